"""The folder of a study: which study it belongs to, and which process works on which trial.

Several processes may work in one folder. Each holds a shared lock on it, and an exclusive one on every trial it trains; the kernel
releases both when it dies, so that another process can continue its trials.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from bottega.core.errors import DirectoryInUse, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.redaction import redact_text
from bottega.storage.durable import hold_lock, rename_aside
from bottega.terminal import print_notice
from bottega.tuning.journal import JOURNAL_FILE
from bottega.tuning.trial_run import get_trial_name

OWNER_FILE, STATE_FILE = "owner.json", "population.json"
"""Files of a study: what the folder belongs to, and the state of a population."""
LOCKS_FOLDER = "locks"


@final
class StudyFolder:
    """An open folder of a study; `owner` is its identifier in the storage, which other machines have none of."""

    def __init__(self, path: Path, owner: str) -> None:
        self.path, self.owner = path, owner

    def try_lock_trial(self, number: int) -> Lock | None:
        """Return the held lock of a trial; None if another process has it."""
        lock = Lock(RunDirectory(self.path / LOCKS_FOLDER / get_trial_name(number)))
        try:
            return lock.__enter__()
        except DirectoryInUse:
            return None

    @contextmanager
    def hold_asking(self) -> Iterator[None]:
        """Hold the lock under which trials are created and taken over, so that a new trial is locked before others see it."""
        with hold_lock(self.path / LOCKS_FOLDER / "ask"):
            yield


@contextmanager
def open_study_folder(path: Path, *, study: str, storage: str | None) -> Iterator[StudyFolder]:
    """Create or open the folder of a study; raises UsageError if it has another study, or its study is stored elsewhere."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; choose another --study or --out")
    (path / LOCKS_FOLDER).mkdir(parents=True, exist_ok=True)
    location = redact_text(storage) if storage is not None else JOURNAL_FILE
    with hold_lock(path / LOCKS_FOLDER / "study", shared=True):
        file = path / OWNER_FILE
        with hold_lock(path / LOCKS_FOLDER / "ask"):
            if not file.is_file():
                fields = {"owner": uuid.uuid4().hex, "study": study, "storage": location}
                RunDirectory(path).write(file, json.dumps(fields) + "\n")
            try:
                fields = json.loads(file.read_bytes())
                owner = str(fields["owner"])
            except (ValueError, KeyError, TypeError):
                raise UsageError(f"{file} is damaged; restore it, or start over with --fresh") from None
        for key, value in (("study", study), ("storage", location)):
            if fields.get(key) != value:
                raise UsageError(
                    f"{path} has the study {fields.get('study')} in {fields.get('storage')}, not {study} in {location}; "
                    "choose another --out, or start over with --fresh"
                )
        has_trials = any((path / "trials").glob("*/recipe.yaml"))
        if storage is None and has_trials and not any((path / name).exists() for name in (JOURNAL_FILE, STATE_FILE)):
            raise UsageError(
                f"{path / JOURNAL_FILE} is missing, but there are trials; restore it, or start over with --fresh"
            )
        yield StudyFolder(path, owner)


def rename_study(path: Path) -> None:
    """Rename the folder of a study for --fresh; raises if a process works in it, or it is not a study."""
    if not (path / OWNER_FILE).is_file():
        if not path.is_dir() or any(path.iterdir()):
            raise UsageError(f"{path} exists and is not a study; choose another --study or --out")
        return
    (path / LOCKS_FOLDER).mkdir(exist_ok=True)
    with hold_lock(path / LOCKS_FOLDER / "study", wait=False) as is_free:
        if not is_free:
            raise DirectoryInUse(f"{path} is in use by another bottega tune; stop it first, or choose another --study")
        print_notice(f"bottega: the old study is renamed to {rename_aside(path)}")
