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

SUMMARY_FILE = "summary.json"
# Starting a process takes half a second, so fewer bytes than this are processed without workers.
MIN_BYTES_FOR_WORKERS = 24 << 20
# A thousand small files take about half a second, whatever their size; below this number no workers are started.
MIN_PIECES_FOR_WORKERS = 8000

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
        if (folder / SUMMARY_FILE).is_file():
            return json.loads((folder / SUMMARY_FILE).read_bytes())
        try:
            # A worker may outlive its killed parent, so the next run may do the same job: the first result stays.
            with writing_folder(folder, replace=False) as temporary:
                summary = self.run_job(number, temporary)
                (temporary / SUMMARY_FILE).write_text(json.dumps(summary))
        except OSError as error:
            if isinstance(error, FileExistsError) and (folder / SUMMARY_FILE).is_file():
                return json.loads((folder / SUMMARY_FILE).read_bytes())
            if error.filename is not None and Path(os.fsdecode(error.filename)).is_relative_to(self.folder):
                raise EnvironmentProblem(
                    f"cannot write {self.folder}: {error.strerror}; free some space, or make the folder writable"
                ) from error
            raise
        return summary


def run_jobs(jobs: Jobs, progress: ProgressCallback) -> Iterator[dict[str, Any]]:
    """Run the jobs, and yield their summaries in order."""
    jobs.folder.mkdir(parents=True, exist_ok=True)
    total_bytes, done_bytes = sum(jobs.sizes), 0
    progress(jobs.stage, 0, total_bytes)
    summaries = prefetch(jobs, 0, workers=_choose_num_workers(jobs), depth=0)
    try:
        for size in jobs.sizes:
            summary = next(summaries)
            done_bytes += size
            progress(jobs.stage, done_bytes, total_bytes)
            yield dict(summary)
    finally:
        summaries.close()


def _choose_num_workers(jobs: Jobs) -> int:
    remaining = [n for n in range(len(jobs.sizes)) if not jobs.job_folder(n).exists()]
    if (
        sum(jobs.sizes[n] for n in remaining) < MIN_BYTES_FOR_WORKERS
        and sum(map(jobs.num_pieces, remaining)) < MIN_PIECES_FOR_WORKERS
    ):
        return 0
    num_workers = min(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(remaining)
    )
    return num_workers if num_workers > 1 else 0
