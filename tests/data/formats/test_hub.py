"""Hugging Face datasets from a hub name, a folder or a saved copy, without running code or decoding media."""

from __future__ import annotations

import io
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bottega.config.data import Source
from bottega.core.errors import BottegaError, DataError, EnvironmentProblem, UsageError
from bottega.data.formats import find_files, hub
from bottega.data.records.record import BadRecord, Record

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")

ROWS = [{"text": f"row {i}", "label": i % 2} for i in range(8)]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Use a temporary cache folder and no network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield
    hub._load_dataset.cache_clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(folder / "one", num_shards=2)
    datasets.DatasetDict(train=data, test=data.select([5, 2])).save_to_disk(folder / "parts")
    (folder / "files").mkdir()
    data.to_parquet(folder / "files" / "train.parquet")
    return folder


def read_records(path: Path, **options: str) -> list[Record | BadRecord]:
    source_files = find_files(Source(path=str(path), **options))  # type: ignore[arg-type]
    assert source_files.kind == "huggingface"
    return [record for piece in source_files.list_pieces(1) for record in source_files.read(piece)]


def read_rows(path: Path, **options: str) -> list[dict[str, Any]]:
    return [record.fields for record in read_records(path, **options) if isinstance(record, Record)]


def test_saved_datasets_are_recognised_and_read(saved: Path) -> None:
    assert read_rows(saved / "one") == read_rows(saved / "parts") == ROWS
    assert [record.key for record in read_records(saved / "one")] == [f"one:{i}" for i in range(1, 9)]
    assert len(find_files(Source(path=str(saved / "one"))).list_pieces(1)) == 2
    assert read_rows(saved / "parts", split="test") == [ROWS[5], ROWS[2]]
    with pytest.raises(DataError, match="has no split 'dev'; set split to one of train, test"):
        read_records(saved / "parts", split="dev")
    with pytest.raises(UsageError, match="a single split without a name; remove the key split"):
        read_records(saved / "one", split="train")


def test_total_bytes_is_the_size_of_the_arrow_files(saved: Path) -> None:
    expected = sum(file.stat().st_size for file in (saved / "one").glob("*.arrow"))
    assert find_files(Source(path=str(saved / "one"))).total_bytes == expected > 0
    assert find_files(Source(path=str(saved / "parts"), split="test")).total_bytes > 0


def test_folder_is_read_by_the_library(saved: Path) -> None:
    assert read_rows(saved / "files", kind="huggingface") == ROWS
    # Slices of splits have no files until the library writes them.
    assert read_rows(saved / "files", kind="huggingface", split="train[:25%]") == ROWS[:2]
    assert read_rows(saved / "files", kind="huggingface", split="train[6:]+train[:1]") == [*ROWS[6:], ROWS[0]]
    with pytest.raises(DataError, match='Unknown split "dev"'):
        read_records(saved / "files", kind="huggingface", split="dev")
    with pytest.raises(DataError, match="'other' not found"):
        read_records(saved / "files", kind="huggingface", subset="other")


def test_workers_read_without_the_library(saved: Path, tmp_path: Path) -> None:
    source_files = find_files(Source(path=str(saved / "one")))
    (tmp_path / "job").write_bytes(pickle.dumps((source_files, source_files.list_pieces(1))))
    script = (
        "import pickle, sys, pathlib; sys.modules['datasets'] = None\n"
        "source_files, pieces = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "print([r.fields['label'] for p in pieces for r in source_files.read(p)])"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "job"], capture_output=True, text=True, timeout=200)
    assert done.stdout == f"{[row['label'] for row in ROWS]}\n", done.stderr


def test_fingerprint_depends_on_content_and_split(saved: Path, tmp_path: Path) -> None:
    expected = find_files(Source(path=str(saved / "parts"))).fingerprint
    assert find_files(Source(path=str(saved / "parts"), split="test")).fingerprint != expected
    shutil.copytree(saved / "parts", tmp_path / "copy")
    assert find_files(Source(path=str(tmp_path / "copy"))).fingerprint == expected
    (tmp_path / "copy" / "train" / "more").write_text("x")
    assert find_files(Source(path=str(tmp_path / "copy"))).fingerprint != expected


def test_media_are_bytes_or_files_inside_the_dataset(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    raw = io.BytesIO()
    image.new("RGB", (4, 4)).save(raw, "png")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "own.png").write_bytes(raw.getvalue())
    (tmp_path / "foreign.png").write_bytes(raw.getvalue())
    media = [
        {"bytes": raw.getvalue(), "path": "a.png"},
        {"bytes": None, "path": str(tmp_path / "set" / "own.png")},
        {"bytes": None, "path": str(tmp_path / "foreign.png")},
        {"bytes": None, "path": str(tmp_path / "set" / ".." / "foreign.png")},
        # Invalid bytes are passed on, since nothing is decoded here.
        {"bytes": b"no picture", "path": None},
    ]
    features = datasets.Features(image=datasets.Image(decode=False))
    data = datasets.Dataset.from_dict({"image": media}, features=features).cast_column("image", datasets.Image())
    path = tmp_path / "set" / "data.arrow"
    with pyarrow.ipc.new_stream(str(path), data._data.table.schema) as writer:
        writer.write_table(data._data.table)
    datasets.Dataset.from_file(str(path)).save_to_disk(tmp_path / "saved")
    for name in ("dataset_info.json", "state.json"):
        shutil.copy(tmp_path / "saved" / name, tmp_path / "set" / name)
    state = (tmp_path / "saved" / "state.json").read_text()
    (tmp_path / "set" / "state.json").write_text(state.replace("data-00000-of-00001.arrow", "data.arrow"))
    images = [row["image"] for row in read_rows(tmp_path / "set")]
    assert images == [raw.getvalue(), tmp_path / "set" / "own.png", None, None, b"no picture"]


def test_dataset_scripts_are_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(DataError, match="scripts are no longer supported") as caught:
        read_records(folder, kind="huggingface")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConnectionError("https://user:secret@hub"), EnvironmentProblem, r"owner/name cannot be downloaded .*network"),
        (
            datasets.exceptions.DatasetNotFoundError("no such\nthing"),
            DataError,
            r"owner/name cannot be read .*no such thing",
        ),
    ],
)
def test_hub_errors_are_translated_without_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, kind: type[BottegaError], message: str
) -> None:
    monkeypatch.chdir(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    source_files = find_files(Source(path="owner/name", kind="huggingface"))
    for access in (lambda: source_files.fingerprint, lambda: source_files.list_pieces(1)):
        with pytest.raises(kind, match=message) as caught:
            access()
        assert "\n" not in str(caught.value)
        assert "secret" not in str(caught.value)


def test_hub_name_and_subset_are_passed_to_the_library(
    monkeypatch: pytest.MonkeyPatch, saved: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = []

    def load(*arguments: object, **options: object) -> Any:
        calls.append((arguments, options))
        return datasets.load_from_disk(saved / "one")

    monkeypatch.setattr(datasets, "load_dataset", load)
    records = read_records(Path("owner/other"), kind="huggingface", subset="small")
    assert calls == [(("owner/other", "small"), {"split": "train"})]
    assert records[7].key == "owner/other:8"
    with pytest.raises(DataError, match="does not exist"):
        read_records(tmp_path / "nowhere", kind="huggingface")
