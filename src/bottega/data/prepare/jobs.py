"""Run jobs on all cores; each leaves a folder behind, so that finished jobs are not repeated after a kill."""

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
# Starting a process takes half a second, so fewer bytes than this are processed here.
WORTH_PROCESSES = 24 << 20
# A thousand small files take about half a second, whatever their size.
WORTH_FILES = 8000

ProgressCallback = Callable[[str, int, int], None]
"""Called with the stage, the bytes done and the bytes in all."""


class Jobs(ABC):
    """Numbered jobs that worker processes run. Job n writes the folder `folder`/n, which appears when it is complete."""

    stage: str
    folder: Path
    sizes: tuple[int, ...]
    """Bytes of each job."""

    @abstractmethod
    def run_job(self, number: int, out: Path) -> dict[str, Any]:
        """Run job `number` into the empty folder `out`; return a small summary that JSON can hold."""

    def num_pieces(self, number: int) -> int:
        """Return the number of pieces that a job reads."""
        return 1

    def job_folder(self, number: int) -> Path:
        """Return the folder of the results of a job."""
        return self.folder / f"{number:06d}"

    def __call__(self, number: int) -> dict[str, Any]:
        if number >= len(self.sizes):
            return {}  # prefetched beyond the end
        folder = self.job_folder(number)
        if (folder / SUMMARY).is_file():
            return json.loads((folder / SUMMARY).read_bytes())
        try:
            # A worker may outlive its killed parent, so the next run may do the same job: the first result stays.
            with writing_folder(folder, replace=False) as temporary:
                summary = self.run_job(number, temporary)
                (temporary / SUMMARY).write_text(json.dumps(summary))
        except OSError as error:
            if isinstance(error, FileExistsError) and (folder / SUMMARY).is_file():
                return json.loads((folder / SUMMARY).read_bytes())
            if error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(self.folder):
                raise EnvironmentProblem(f"{self.folder}: {error.strerror}; free some space") from error
            raise
        return summary


def run_jobs(jobs: Jobs, progress: ProgressCallback) -> Iterator[dict[str, Any]]:
    """Run the jobs, and yield their summaries in order."""
    jobs.folder.mkdir(parents=True, exist_ok=True)
    total, done = sum(jobs.sizes), 0
    progress(jobs.stage, 0, total)
    stream = prefetch(jobs, 0, workers=_num_workers(jobs), depth=0)
    try:
        for size in jobs.sizes:
            summary = next(stream)
            done += size
            progress(jobs.stage, done, total)
            yield dict(summary)
    finally:
        stream.close()


def _num_workers(jobs: Jobs) -> int:
    remaining = [n for n in range(len(jobs.sizes)) if not jobs.job_folder(n).exists()]
    if sum(jobs.sizes[n] for n in remaining) < WORTH_PROCESSES and sum(map(jobs.num_pieces, remaining)) < WORTH_FILES:
        return 0
    cores = min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(remaining)
    )
    return cores if cores > 1 else 0
