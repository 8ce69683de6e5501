"""The image files of records: located in their folder, identified by content hash, and each decoded once in parallel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bottega.core.errors import DataError
from bottega.data.formats.fingerprint import hash_files
from bottega.data.image.encoder import ImageEncoder
from bottega.data.prepare.jobs import Jobs, ProgressCallback, run_jobs
from bottega.data.records.record import BadRecord, Unreadable
from bottega.data.records.record import Record as Row
from bottega.data.tables.shards import ShardWriter, merge_tables
from bottega.tasks.personalize.data.record_files import SKIP_HINT, LocatedRecord
from bottega.tasks.personalize.data.records import Item

JOB_BYTES = 64 << 20
# Files hashed between two steps of the progress bar.
HASH_BATCH_SIZE = 256
ROWS_FOLDER = "rows"


@dataclass
class ImageFiles:
    """Paths and content hashes of the images that records name."""

    paths: dict[tuple[Path, str], Path | BadRecord] = field(default_factory=dict)
    hashes: dict[Path, str] = field(default_factory=dict)

    def get_path(self, located: LocatedRecord, item: Item) -> Path | None:
        """Return the image file of an item, None without one; `find_problem` must have accepted the record."""
        if item.image is None:
            return None
        path = self.paths[located.root, item.image]
        assert isinstance(path, Path), "records with a missing image were dropped before"
        return path

    def get_hash(self, located: LocatedRecord, item: Item) -> str | None:
        """Return the content hash of an item's image, None without one."""
        path = self.get_path(located, item)
        return None if path is None else self.hashes[path]

    def find_problem(self, located: LocatedRecord) -> BadRecord | None:
        """Return what is wrong with the image names of a record, None if they are valid."""
        record = located.record
        if record.target.image is None:
            return _build_bad_record(located, f"the target {record.target.id!r} has no image to learn from")
        for item in record.items:
            if item.image is not None:
                path = self._locate(located.root, item.image)
                if isinstance(path, BadRecord):
                    return _build_bad_record(located, f"item {item.id!r}: {path.reason}", is_unsafe=path.is_unsafe)
        return None

    def _locate(self, root: Path, name: str) -> Path | BadRecord:
        path = self.paths.get((root, name))
        if path is None:
            path = self.paths[root, name] = locate_image(root, name)
        return path

    def hash_all(self, records: Iterable[LocatedRecord], progress: ProgressCallback) -> None:
        """Compute the content hashes of all images."""
        paths = sorted(
            {path for located in records for item in located.record.items if (path := self.get_path(located, item))}
        )
        progress("hash", 0, len(paths))
        for start in range(0, len(paths), HASH_BATCH_SIZE):
            batch = paths[start : start + HASH_BATCH_SIZE]
            self.hashes.update(zip(batch, hash_files(batch), strict=True))
            progress("hash", start + len(batch), len(paths))


def _build_bad_record(located: LocatedRecord, reason: str, *, is_unsafe: bool = False) -> BadRecord:
    return BadRecord(located.key, located.where, f"{reason}; {SKIP_HINT}" if not is_unsafe else reason, is_unsafe)


def locate_image(root: Path, name: str) -> Path | BadRecord:
    """Return the file of an image name, with links resolved.

    A file outside `root` is refused: records may come from anywhere and must not make other files of this machine readable.
    """
    try:
        base = root.resolve()
        path = (base / name).resolve()
        if not path.is_relative_to(base):
            reason = f"the image file {name} is outside {root}; set data.pictures to its folder, or move the file"
            return BadRecord(name, name, reason, is_unsafe=True)
        if path.is_file():
            return path
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long or contains NUL, or a link cycle
        return BadRecord(name, name, f"the image file {name!r} cannot be accessed: {error}")
    problem = "is a folder" if path.is_dir() else "does not exist"
    return BadRecord(
        name, name, f"the image file {root / name} {problem}; set data.pictures if the images are elsewhere"
    )


@dataclass(frozen=True)
class DecodeJobs(Jobs):
    """Decodes ranges of the files in worker processes."""

    paths: tuple[Path, ...]
    named_by: tuple[str, ...]
    """For each file, a record that names it."""
    ranges: tuple[tuple[int, int], ...]
    folder: Path
    sizes: tuple[int, ...]
    """Bytes of the files in each range."""
    encoder: ImageEncoder
    stop: bool
    """Whether a damaged file raises an error."""
    stage: str = "decode"

    def run_job(self, number: int, out: Path) -> dict[str, Any]:
        start, end = self.ranges[number]
        bad_reasons: dict[str, str] = {}
        with ShardWriter(out / ROWS_FOLDER, self.encoder.columns) as writer:
            for index in range(start, end):
                path = self.paths[index]
                try:
                    for row in self.encoder.rows(Row(path.name, str(path), {"image": path})):
                        writer.add(row)
                except Unreadable as error:
                    reason = f"the image {path} is damaged or not an image: {error}"
                    if self.stop:
                        raise DataError(f"{self.named_by[index]}: {reason}; {SKIP_HINT}") from error
                    bad_reasons[str(index)] = reason
        return {"bad": bad_reasons}


def decode_images(
    paths: list[Path],
    hashes: list[str],
    named_by: list[str],
    folder: Path,
    *,
    encoder: ImageEncoder,
    stop: bool,
    progress: ProgressCallback,
) -> dict[int, str]:
    """Decode the images into one table, `folder`/pictures, in order; return index -> reason for those left out."""
    sizes = [path.stat().st_size for path in paths]
    ranges = list(_split_ranges(sizes))
    job_sizes = tuple(sum(sizes[start:end]) for start, end in ranges)
    jobs = DecodeJobs(tuple(paths), tuple(named_by), tuple(ranges), folder / "parts", job_sizes, encoder, stop)
    bad_reasons = {
        int(index): reason for summary in run_jobs(jobs, progress) for index, reason in summary["bad"].items()
    }
    if hash_files(paths) != hashes:
        raise DataError("images changed while they were read; prepare the data again when they are complete")
    merge_tables(
        [jobs.job_folder(number) / ROWS_FOLDER for number in range(len(ranges))], folder / "pictures", encoder.columns
    )
    return bad_reasons


def _split_ranges(sizes: list[int]) -> Iterable[tuple[int, int]]:
    """Yield index ranges of about JOB_BYTES each."""
    start = total = 0
    for index, size in enumerate(sizes):
        total += size
        if total >= JOB_BYTES:
            yield start, index + 1
            start, total = index + 1, 0
    if start < len(sizes):
        yield start, len(sizes)
