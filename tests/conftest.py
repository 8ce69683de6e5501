"""Shared fixtures: a cache for the session, one thread, and one finished run for tests that only read it."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline, because the machine may be busy; no database of earlier examples, so that tests are deterministic.
settings.register_profile("tests", deadline=None, max_examples=50, database=None, derandomize=True)
settings.load_profile("tests")

# Before torch is imported: the models are tiny, and two threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests run on the CPU on every machine: both ranks of a two-rank test would share one GPU, whose numbers differ.
# `make test-gpu` runs the tests marked `gpu`.
ON_GPU = os.environ.get("BOTTEGA_TEST_GPU") == "1"
if ON_GPU:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it once, before the first matrix product
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# No downloads; read when huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
for inherited in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(inherited, None)


TESTS = Path(__file__).parent
LONGEST_FILES = (
    "cli/test_file_faults.py",
    "tuning/test_search.py",
    "test_docs.py",
    "cli/test_ranks.py",
    "tuning/test_population.py",
)
"""Files whose campaigns take minutes: started first, so that no process is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first. Skip tests marked `gpu` with a reason unless `make test-gpu` runs them, which requires a GPU."""
    order = {f"{TESTS}/{name}": number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(str(item.path), len(order)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not ON_GPU:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and BOTTEGA_TEST_GPU=1; see `make test-gpu`"))
        return
    import torch

    if not torch.cuda.is_available():
        pytest.exit("BOTTEGA_TEST_GPU=1, and torch sees no GPU", returncode=5)
    for item in marked:  # the compiler of torch and the CUDA libraries emit warnings of their own
        item.add_marker(pytest.mark.filterwarnings("ignore"))


EXTRAS = (
    *("PIL", "av", "datasets", "diffusers", "fsspec", "gigatoken", "peft", "pyarrow", "sklearn", "soundfile", "soxr"),
    *("transformers", "wandb", "webdataset", "zstandard"),
)
"""Optional packages that tests use; `make setup` installs all of them."""
# Determined once, here: a test may simulate a missing package, and then must not be skipped.
ABSENT = {package for package in EXTRAS if importlib.util.find_spec(package) is None}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Report a test as skipped if it failed because an optional package is absent, and name the package."""
    report = yield
    if report.outcome == "failed" and call.excinfo is not None:
        package = find_missing_extra(call.excinfo.value)
        if package is not None:
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = (path, line or 0, f"Skipped: {package} is not installed")
    return report


def find_missing_extra(error: BaseException | None) -> str | None:
    """Return the optional package that an error or one of its causes did not find."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, ModuleNotFoundError):
            package = str(error.name).partition(".")[0]
            if package in ABSENT:
                return package
        error = error.__cause__ or error.__context__
    return None


@pytest.fixture
def gpu() -> Iterator[None]:
    """Reset the compiler before and after a test, and deterministic and precision flags after it."""
    import torch

    torch.compiler.reset()
    torch.backends.cudnn.allow_tf32 = False  # convolutions of float32 would be rounded to ten bits
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.compiler.reset()
    torch.cuda.empty_cache()


@pytest.fixture
def compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `training.compile: auto` compile the few steps of a test, as it does a long run."""
    from bottega.engines import compile_choice

    cost = compile_choice.CompileCost(compile_seconds=0.0, factor=0.5, step_seconds=1.0)
    costs = {kind: dict.fromkeys(table, cost) for kind, table in compile_choice.COSTS.items()}
    monkeypatch.setattr(compile_choice, "COSTS", costs)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Put prepared data into a temporary folder, never into the cache of the user."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    # One cache of compiled programs for all processes of a test run.
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    root = tmp_path_factory.getbasetemp().parent if is_worker else tmp_path_factory.getbasetemp()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "jax"))
    yield folder
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_run import write_text

    return write_text(tmp_path_factory.mktemp("text") / "small.txt")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """The directory of a small language run of 8 steps; tests that change it make a copy."""
    from small_run import train

    return train(tmp_path_factory.mktemp("finished"), text_file, name="finished").path


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """The output folder of two processes under torchrun with gloo; see two_ranks.py."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers
    out = shared / "two-ranks"
    with open(shared / "two-ranks.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.is_dir():
            _run_two_ranks(out, text_file)
    return out


def _run_two_ranks(out: Path, text_file: Path) -> None:
    from small_media import write_images
    from small_run import environment

    out.mkdir()
    write_images(out)  # written here, so that the two processes do not write them concurrently
    launch = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = Path(__file__).parent / "two_ranks.py"
    process = subprocess.run(
        [*launch, str(script), str(out), str(text_file)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if process.returncode != 0:
        shutil.rmtree(out)
        raise AssertionError(process.stderr[-4000:])
