"""Folders of many small files: work is batched over files, and progress is reported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bottega.config.data import HeldOut, Source
from bottega.data.formats import find_files, fingerprint, metadata
from bottega.data.image.config import ImageData
from bottega.data.prepare import inputs, jobs
from bottega.data.prepare.media import prepare_media
from bottega.tasks.generation.config import Generator, ImageRecipe


def write_images(folder: Path, count: int) -> Path:
    for number in range(count):
        path = folder / "images" / f"class-{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(path)
    return folder / "images"


def test_progress_is_reported_while_files_are_hashed_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_ITEMS_PER_JOB", 5)
    source = Source(path=str(write_images(tmp_path, 40)))
    data = ImageData(train=source, validation=HeldOut(split=0.2))
    reports: dict[str, list[float]] = {}

    def progress(stage: str, done: int, total: int) -> None:
        reports.setdefault(stage, []).append(done / total)

    prepare_media(ImageRecipe(model=Generator(condition="class"), data=data), progress=progress, cache=tmp_path / "c")
    assert list(reports) == ["hash", "scan", "encode"]
    for stage, fractions in reports.items():
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1
        assert max(np.diff([0, *fractions])) < 0.2, f"{stage} reports a fifth of the work at once"


def test_jobs_hold_few_files_and_keep_their_order(tmp_path: Path) -> None:
    source_files = find_files(Source(path=str(write_images(tmp_path, 30))))
    all_inputs = (inputs.Input(source_files, "train"),)
    items = inputs.list_items(all_inputs, inputs.Shares(None, None), cut_single_text=True) * 100
    jobs = inputs.group_into_jobs(items, all_inputs)
    assert max(map(len, jobs)) <= 1000
    assert [item for job in jobs for item in job] == items


def test_cached_hashes_are_merged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = find_files(Source(path=str(write_images(tmp_path, 20)))).paths
    merged = []

    class CachedHashes(dict[str, str]):
        def __or__(self, other: Any) -> Any:
            merged.append(len(other))
            return {**self, **other}

    monkeypatch.setattr(fingerprint, "_load_cached_hashes", lambda states: CachedHashes())
    assert len(set(fingerprint.hash_files(files))) == 20
    assert len(merged) <= 1


def test_cached_hashes_belong_to_the_files_of_the_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_MAX_QUERY_PATHS", 3)
    folder = write_images(tmp_path, 7)
    files = find_files(Source(path=str(folder))).paths
    first = fingerprint.hash_files(files)
    for file in files:
        os.utime(file, (1e9, 1e9))
    states = {str(file): fingerprint._read_state(file)._replace(changed=0) for file in files}
    fingerprint._store_hashes((name, str(state), "hash") for name, state in states.items())
    assert fingerprint._load_cached_hashes(states) == dict.fromkeys(states, "hash")
    assert fingerprint.hash_files(files) == first, "files with new times were not hashed again"


def test_folder_is_searched_once_for_a_metadata_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_images(tmp_path, 3) / "class-0"
    searched: list[str] = []
    monkeypatch.setattr(
        metadata, "_list_tables", lambda path, search=metadata._list_tables: (searched.append(path), search(path))[1]
    )
    os.utime(folder, (1e9, 1e9))
    for _ in range(10):
        assert metadata.find_table_in(folder) is None
    assert len(searched) == 1
    (folder / "metadata.csv").write_text("file_name,text\n0.png,a\n")
    assert metadata.find_table_in(folder) == folder / "metadata.csv", "a new table was not detected"
    (folder / "metadata.csv").unlink()
    assert metadata.find_table_in(folder) is None


def test_many_small_files_start_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_ITEMS_PER_JOB", 5)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    data = ImageData(train=Source(path=str(write_images(tmp_path, 40))), validation=HeldOut(split=0.2))
    recipe = ImageRecipe(model=Generator(condition="class"), data=data)
    worker_counts: list[int] = []
    monkeypatch.setattr(
        jobs,
        "prefetch",
        lambda *arguments, original=jobs.prefetch, **options: (
            worker_counts.append(options["workers"]),
            original(*arguments, **options),
        )[1],
    )
    tables = []
    for threshold in (8000, 40):
        monkeypatch.setattr(jobs, "MIN_PIECES_FOR_WORKERS", threshold)
        prepared = prepare_media(recipe, progress=lambda *_: None, cache=tmp_path / str(threshold))
        files = sorted(path for path in prepared.folder.rglob("*") if path.is_file() and path.name != "MANIFEST.json")
        tables.append({path.relative_to(prepared.folder).as_posix(): path.read_bytes() for path in files})
    assert worker_counts == [0, 0, 2, 2]
    assert tables[0] == tables[1]
