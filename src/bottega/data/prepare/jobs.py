"""Many pieces of work on all cores, each of which leaves a folder behind: what is done is not done again after a kill."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bottega.core.errors import EnvironmentProblem
from bottega.data.loading.prefetch import prefetch
from bottega.storage.durable import writing_folder

SUMMARY = "summary.json"
# Starting a process costs half a second, so less work than this is done here.
WORTH_PROCESSES = 24 << 20
# A thousand small files take about half a second, however few their bytes.
WORTH_FILES = 8000

ProgressCallback = Callable[[str, int, int], None]
"""What is being done, how many bytes of how many."""


class Jobs(ABC):
    """Sent to worker processes. Job n writes the folder `folder`/n, which appears when it is whole."""

    stage: str
    folder: Path
    sizes: tuple[int, ...]
    """Bytes of each job."""

    @abstractmethod
    def run_job(self, number: int, out: Path) -> dict[str, Any]:
        """Do job `number` into the empty folder `out`, and say in a few words of JSON what came of it."""

    def num_pieces(self, number: int) -> int:
        """How many files or pieces of files a job reads."""
        return 1

    def job_folder(self, number: int) -> Path:
        return self.folder / f"{number:06d}"

    def __call__(self, number: int) -> dict[str, Any]:
        if number >= len(self.sizes):
            return {}  # ordered ahead, beyond the end
        part = self.job_folder(number)
        if (part / SUMMARY).is_file():
            return json.loads((part / SUMMARY).read_bytes())
        try:
            # A worker may outlive a parent that was killed, so the next one may do the same job: the first result stays.
            with writing_folder(part, replace=False) as temporary:
                summary = self.run_job(number, temporary)
                (temporary / SUMMARY).write_text(json.dumps(summary))
        except OSError as error:
            if isinstance(error, FileExistsError) and (part / SUMMARY).is_file():
                return json.loads((part / SUMMARY).read_bytes())
            if error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(self.folder):
                raise EnvironmentProblem(f"{self.folder}: {error.strerror}; free some space") from error
            raise
        return summary


def run_jobs(jobs: Jobs, progress: ProgressCallback) -> Iterator[dict[str, Any]]:
    """The summaries in order, as the jobs are done."""
    jobs.folder.mkdir(parents=True, exist_ok=True)
    total, done = sum(jobs.sizes), 0
    progress(jobs.stage, 0, total)
    stream = prefetch(jobs, 0, workers=_workers(jobs), depth=0)
    try:
        for size in jobs.sizes:
            summary = next(stream)
            done += size
            progress(jobs.stage, done, total)
            yield dict(summary)
    finally:
        stream.close()


def _workers(jobs: Jobs) -> int:
    left = [n for n in range(len(jobs.sizes)) if not jobs.job_folder(n).exists()]
    if sum(jobs.sizes[n] for n in left) < WORTH_PROCESSES and sum(map(jobs.num_pieces, left)) < WORTH_FILES:
        return 0
    cores = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(left))
    return cores if cores > 1 else 0
