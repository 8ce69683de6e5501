"""Who makes a part, and who waits: one process at a time, alone, whatever group or other runs want the same one."""

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

POLL, PATIENT = 0.5, 5.0
"""Seconds between two looks at a part that somebody else makes, and until the first word about it."""
STALLED = 30 * 60.0
"""Seconds without a newer file after which the other ranks give up."""
GRACE = 10.0
"""Seconds in which a part that is stopped can save, before it is told once more."""


@contextmanager
def lock_dependency(run: Path, *, quiet: bool) -> Iterator[None]:
    """One process at a time makes a part; who comes later waits for it, and then looks again."""
    # Not the run's own lock, which is taken by who trains it, and moves with a run that is set aside.
    place = _work_place(run)
    place.create()
    begun, due = time.monotonic(), PATIENT
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(Lock(place))
                break
            except DirectoryInUse:
                waited = time.monotonic() - begun
                if waited >= due and not quiet:
                    print_notice(f"bottega: another process is making {run}; waiting for it since {waited:.0f} s")
                    due = waited + 60
                time.sleep(POLL)
        try:
            yield
        except BaseException:
            place.remove_if_unused([place.path, place.path.parent])
            raise


def _work_place(run: Path) -> RunDirectory:
    """For the lock and what else making a part takes: runs/.parts/NAME, so that runs/parts holds parts only."""
    return RunDirectory(run.parent.with_name(f".{run.parent.name}") / run.name)


def wait_for_dependency(run: Path, is_ready: Callable[[], bool], *, name: str, quiet: bool) -> None:
    """Until rank 0 has made a part. A launcher ends everybody if it fails; if it hangs, nobody else would notice."""
    if not quiet:
        print_notice(f"bottega: rank {World.from_environment().rank} waits for rank 0 to make needs.{name}: {run}")
    newest, since = 0.0, time.monotonic()
    while not is_ready():
        found = _newest(run)
        if found != newest:
            newest, since = found, time.monotonic()
        elif time.monotonic() - since > STALLED:
            raise PeerLost(
                f"needs.{name}: nothing has happened in {run} for {STALLED / 60:.0f} minutes; see what keeps rank 0, "
                "and start the same command again"
            )
        time.sleep(POLL)


def _newest(run: Path) -> float:
    """When something was last written by the training of a part, or of a part of it."""
    written = [0.0]
    for path in [*run.glob("*"), *dependencies.dependencies_folder(run.parent).rglob("metrics.jsonl")]:
        try:
            written.append(path.stat().st_mtime)
        except OSError:  # a temporary file that has its own name by now
            continue
    return max(written)


class DependencyFailed(BottegaError):
    """A part was trained in a process of its own, whose exit code is passed on."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code if code > 0 else 128 - code  # as shells count those that a signal ended


def train_in_subprocess(recipe: Recipe, run: Path, *, name: str, quiet: bool, allow_data_change: bool) -> None:
    """A part is one process's work; inside a launched group it needs an environment without the group."""
    place = _work_place(run)
    place.path.mkdir(parents=True, exist_ok=True)
    file = place.path / f"{run.name}.yaml"
    place.write(file, to_yaml(recipe))
    train = ["train", str(file), f"name={run.name}", *(["--quiet"] if quiet else [])]
    for words in ([*train, "--allow-data-change"] if allow_data_change else train, ["export", str(run)]):
        code = _alone(words, quiet=quiet)
        if code:
            raise DependencyFailed(f"needs.{name}: {run} could not be made: bottega {words[0]} ended with {code}", code)


def _alone(words: list[str], *, quiet: bool) -> int:
    """The exit code of a verb that is not one of our group. What it says goes to stderr: our stdout may be JSON."""
    command, out = plugins.bottega_command(words), subprocess.DEVNULL if quiet else 2
    with StopSignals() as stop, subprocess.Popen(command, env=get_standalone_environment(), stdout=out) as child:
        heard: float | None = None
        while child.poll() is None:
            if stop.received is not None and heard is None:
                heard = time.monotonic()
            if heard is not None and time.monotonic() - heard > GRACE:
                # Launchers and terminals signal the whole group, and a second signal would stop it before it has
                # saved; but if it was meant for us alone, it has not heard yet.
                child.send_signal(stop.received or signal.SIGTERM)
                heard = math.inf
            time.sleep(POLL / 5)
    return child.returncode
