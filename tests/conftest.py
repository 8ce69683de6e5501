"""What all tests share: a cache of their own, one thread, and one finished run for those that only read it."""

from __future__ import annotations

import os
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
for inherited in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(inherited, None)


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
    from small_media import pictures
    from small_run import environment

    out = tmp_path_factory.mktemp("two-ranks")
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
    assert done.returncode == 0, done.stderr[-4000:]
    return out
