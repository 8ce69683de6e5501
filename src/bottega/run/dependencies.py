"""Training the runs that another run depends on (`needs`): one process trains each, and all others wait for it."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bottega.config.load import to_yaml
from bottega.config.recipe import Recipe
from bottega.core.errors import BottegaError, DirectoryInUse, PeerLost
from bottega.core.rundir import Lock, RunDirectory
from bottega.signals import StopSignals
from bottega.tasks import dependencies, plugins
from bottega.terminal import print_notice
from bottega.world import World, get_standalone_environment

POLL_SECONDS, FIRST_NOTICE_SECONDS = 0.5, 5.0
"""Seconds between two checks of a dependency that another process trains, and until the first message about it."""
STALL_SECONDS = 30 * 60.0
"""Seconds without a new or changed file after which the other ranks give up."""
GRACE_SECONDS = 10.0
"""Seconds that a stopped dependency has to save, before it is signalled again."""


@contextmanager
def lock_dependency(run: Path, *, quiet: bool) -> Iterator[None]:
    """Hold the lock of a dependency while it is trained; other processes wait for it here."""
    # Not the run's own lock: the process that trains takes it, and it moves if the run is renamed.
    work_folder = _get_work_folder(run)
    work_folder.create()
    start, notice_at = time.monotonic(), FIRST_NOTICE_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(Lock(work_folder))
                break
            except DirectoryInUse:
                wait_seconds = time.monotonic() - start
                if wait_seconds >= notice_at and not quiet:
                    print_notice(f"bottega: waiting for another process to train {run} ({wait_seconds:.0f} s so far)")
                    notice_at = wait_seconds + 60
                time.sleep(POLL_SECONDS)
        try:
            yield
        except BaseException:
            work_folder.remove_if_unused([work_folder.path, work_folder.path.parent])
            raise


def _get_work_folder(run: Path) -> RunDirectory:
    """Return the folder of the lock and the recipe file, runs/.parts/NAME, so that runs/parts holds only runs."""
    return RunDirectory(run.parent.with_name(f".{run.parent.name}") / run.name)


def wait_for_dependency(run: Path, is_ready: Callable[[], bool], *, name: str, quiet: bool) -> None:
    """Wait until rank 0 has trained a dependency; raise PeerLost if nothing is written for STALL_SECONDS.

    If rank 0 fails, the launcher ends all ranks; if it hangs, only this timeout notices.
    """
    if not quiet:
        print_notice(f"bottega: rank {World.from_environment().rank} waits for rank 0 to train needs.{name}: {run}")
    last_modified, unchanged_since = 0.0, time.monotonic()
    while not is_ready():
        modified = _find_last_modified(run)
        if modified != last_modified:
            last_modified, unchanged_since = modified, time.monotonic()
        elif time.monotonic() - unchanged_since > STALL_SECONDS:
            raise PeerLost(
                f"needs.{name}: nothing was written to {run} for {STALL_SECONDS / 60:.0f} minutes; check rank 0, and run the "
                "same command again"
            )
        time.sleep(POLL_SECONDS)


def _find_last_modified(run: Path) -> float:
    """Return the time, in seconds since 1970, at which a dependency or one of its own dependencies last wrote a file."""
    times = [0.0]
    for path in [*run.glob("*"), *dependencies.get_dependencies_folder(run.parent).rglob("metrics.jsonl")]:
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # a temporary file that was renamed meanwhile
            continue
    return max(times)


class ChildProcessFailed(BottegaError):
    """A process that trains a dependency or a fold failed; its exit code is passed on."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code if code > 0 else 128 - code  # a process ended by a signal, as shells report it


def train_in_subprocess(recipe: Recipe, run: Path, *, name: str, quiet: bool, allow_data_change: bool) -> None:
    """Train and export a dependency in one process, outside the launched group of ranks."""
    work_folder = _get_work_folder(run)
    work_folder.path.mkdir(parents=True, exist_ok=True)
    file = work_folder.path / f"{run.name}.yaml"
    work_folder.write(file, to_yaml(recipe), redact=False)
    train = ["train", str(file), f"name={run.name}", *(["--quiet"] if quiet else [])]
    for words in ([*train, "--allow-data-change"] if allow_data_change else train, ["export", str(run)]):
        code = _run_outside_group(words, quiet=quiet)
        if code:
            raise ChildProcessFailed(f"needs.{name}: bottega {words[0]} of {run} failed with exit code {code}", code)


def _run_outside_group(words: list[str], *, quiet: bool) -> int:
    """Run a command outside the group of ranks; return its exit code. Its output goes to stderr: stdout may be JSON."""
    command, out = plugins.build_bottega_command(words), subprocess.DEVNULL if quiet else 2
    with StopSignals() as stop, subprocess.Popen(command, env=get_standalone_environment(), stdout=out) as child:
        signalled_at: float | None = None
        while child.poll() is None:
            if stop.received is not None and signalled_at is None:
                signalled_at = time.monotonic()
            if signalled_at is not None and time.monotonic() - signalled_at > GRACE_SECONDS:
                # Launchers and terminals signal the whole group, and a second signal would end the child before it has
                # saved. But if the signal was sent to this process alone, the child has not received it yet.
                child.send_signal(stop.received or signal.SIGTERM)
                signalled_at = math.inf
            time.sleep(POLL_SECONDS / 5)
    return child.returncode
