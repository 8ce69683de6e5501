"""What all tests share: a cache of their own, one thread, and one finished run for those that only read it."""

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

# No deadline, because the machine may be busy; no memory of earlier runs, so that a run is a function of the code.
settings.register_profile("tests", deadline=None, max_examples=50, database=None, derandomize=True)
settings.load_profile("tests")

# Before torch is imported anywhere: the models are tiny, and two threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests compute on the CPU, whatever the machine has: both ranks of a two-rank test would land on one GPU, and its numbers
# are others. `make test-gpu` runs those that are marked `gpu`.
ON_GPU = os.environ.get("BOTTEGA_TEST_GPU") == "1"
if ON_GPU:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it once, before the first matrix product
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Nothing is fetched; the library reads this when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
for inherited in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(inherited, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped with a reason unless `make test-gpu` runs them, which has to find a GPU."""
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
    for item in marked:  # torch's compiler and the libraries of a GPU warn of things that are theirs
        item.add_marker(pytest.mark.filterwarnings("ignore"))


EXTRAS = (
    *("PIL", "av", "datasets", "diffusers", "fsspec", "gigatoken", "peft", "pyarrow", "sklearn", "soundfile", "soxr"),
    *("transformers", "wandb", "webdataset", "zstandard"),
)
"""What a test may need and a machine may lack; a plain `make setup` installs all of it."""
# Looked for once and now: a test may pretend that one is absent, and has to fail if that is not answered well.
ABSENT = {package for package in EXTRAS if importlib.util.find_spec(package) is None}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test that fails because an optional package is absent is skipped, and says which one."""
    report = yield
    if report.outcome == "failed" and call.excinfo is not None:
        package = missing_extra(call.excinfo.value)
        if package is not None:
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = (path, line or 0, f"Skipped: {package} is not installed")
    return report


def missing_extra(error: BaseException | None) -> str | None:
    """The optional package that an error, or what led to it, did not find."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ModuleNotFoundError):
            package = str(error.name).partition(".")[0]
            if package in ABSENT:
                return package
        error = error.__cause__ or error.__context__
    return None


@pytest.fixture
def gpu() -> Iterator[None]:
    """A compiler without memory, and no flag of `deterministic` or of a precision left for the next test."""
    import torch

    torch.compiler.reset()
    torch.backends.cudnn.allow_tf32 = False  # convolutions of float32 would be rounded to ten bits
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.compiler.reset()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepared data goes to a folder that ends with the session, never to the user's."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
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
    """The directory of a small language run of 8 steps. Tests that change something copy it first."""
    from small_run import train

    return train(tmp_path_factory.mktemp("finished"), text_file, name="finished").path


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """What two processes left, started by torchrun on gloo; see two_ranks.py."""
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
    from small_media import pictures
    from small_run import environment

    out.mkdir()
    pictures(out)  # before both processes would write them at once
    launch = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = Path(__file__).parent / "two_ranks.py"
    done = subprocess.run(
        [*launch, str(script), str(out), str(text_file)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if done.returncode != 0:
        shutil.rmtree(out)
        raise AssertionError(done.stderr[-4000:])
