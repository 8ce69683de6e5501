"""`bottega prepare` and `bottega data` on the command line, and the same from Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import bottega
from bottega import cli
from small_run import train


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    written = [{"text": f"text number {n}", "label": ("good", "bad")[n % 2], "user": n % 5} for n in range(60)]
    path.write_text("\n".join(map(json.dumps, [*written, written[0]])) + "\n")
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert cli.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_prepare_writes_and_exports_to_several_formats(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prepare", "classify", "--data", rows, "--out", tmp_path / "kept"]
    result = run_json(capsys, *arguments, "--to", "jsonl", tmp_path / "j", "--to", "webdataset", tmp_path / "w")
    assert list(result["tables"]) == ["train", "validation"]
    assert sum(table["rows"] for table in result["tables"].values()) == result["records"] == 61
    assert {Path(path).parent.name for path in result["exported"]} == {"j", "w"}
    # Class names are restored from both formats.
    for folder in ("j", "w"):
        again = run_json(capsys, "data", "classify", "--data", tmp_path / folder, "data.validation=null")
        assert set(again["labels"]["train"]) == {"good", "bad"}
        assert again["unread_parts"] == ["validation"]
    assert run_json(capsys, "data", tmp_path / "kept")["fingerprint"] == result["fingerprint"]


def test_note_suggests_a_test_split_only_where_there_is_one(rows: Path, tmp_path: Path) -> None:
    """The same rows from a folder with splits and from a file share a preparation; only the folder has a test split."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(rows.read_text())
    settings = {"data.train.path": str(folder), "data.validation": None}
    prepared = bottega.prepare("classify", settings)
    [note] = prepared.notes()
    assert "set data.test.split=test to use it" in note
    assert "test" in bottega.prepare("classify", {**settings, "data.test.split": "test"}).tables, "as the note suggests"
    alone = {**settings, "data.train.path": str(folder / "train.jsonl")}
    assert bottega.prepare("classify", alone).folder == prepared.folder
    assert bottega.prepare("classify", alone).notes() == []
    # Other splits beside the validation data are not suggested, only those beside the training data.
    with_validation = {**alone, "data.validation": {"path": str(folder)}}
    assert bottega.prepare("classify", with_validation).notes() == []


def test_data_reports_duplicates_within_and_across_splits(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "data", rows, "data.validation=null", "--examples", 2)
    assert report["task"] == "classify"
    assert report["duplicates"] == {"train": 1}
    assert report["labels"] == {"train": {"good": 31, "bad": 30}}
    assert len(report["examples"]) == 2
    held_out = run_json(capsys, "data", rows, f"data.validation.path={rows}")
    assert held_out["duplicates"]["train and validation"] == 61


def test_bucketed_images_have_a_contact_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(6):
        Image.new("RGB", ((16, 16), (24, 12))[n % 2], (40 * n, 0, 0)).save(tmp_path / f"{n}.png")
    arguments = ["data", tmp_path, "data.image_size=16", "data.buckets=3", "--out", tmp_path / "report"]
    [sheet] = run_json(capsys, *arguments)["pictures"]
    with Image.open(sheet) as image:
        assert image.width >= 2 * 16, "a sheet has several images side by side"


def test_video_has_a_contact_sheet_of_frames(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = np.zeros((3, 5, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "clips.npz", video=frames, fps=np.full(3, 8.0))
    report = run_json(capsys, "data", tmp_path / "clips.npz", "--out", tmp_path / "report")
    assert (report["task"], report["lengths"]["train"]["max"]) == ("video", 5)
    [sheet] = report["pictures"]
    with Image.open(sheet) as image:
        assert image.width >= 2 * 8, "a sheet has several frames side by side"


def test_prepare_from_python(rows: Path) -> None:
    prepared = bottega.prepare("language", {"data.train.path": str(rows), "data.train.kind": "auto"})
    assert sum(table["documents"] for table in prepared.tables.values()) == 61
    assert prepared.table("train").row("key", 0).startswith("rows.jsonl:")


def test_run_log_names_dropped_records(rows: Path, tmp_path: Path) -> None:
    rows.write_text(rows.read_text() + '{"text": \n')
    changes = {"data.bad_records": "skip", "data.max_bad": 0.05, "data.tokenizer.kind": "bytes"}
    run = train(tmp_path / "runs", rows, **changes)
    log = (run.path / "log.txt").read_text()
    assert "1 of 62 records dropped as bad" in log
    assert "rows.jsonl, line 62" in log


def test_single_text_can_be_split_and_deduplicated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one line of a single text\n" * 40)
    arguments = ["prepare", "language", "--data", tmp_path / "a.txt", "--tokenizer", "bytes"]
    result = run_json(capsys, *arguments, "data.deduplicate.method=exact")
    assert sum(table["bytes"] for table in result["tables"].values()) == 1040


def test_condition_is_part_of_the_preparation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images of which some have no label: accepted without a condition, refused with one."""
    for name in ("0.png", "cat/1.png", "cat/2.png"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "p" / name)
    arguments = ["prepare", "image", "--data", str(tmp_path / "p"), "data.validation=null"]
    assert run_json(capsys, *arguments, "model.condition=none")["tables"]["train"]["rows"] == 3
    assert cli.main(arguments) == 3
    assert "has no label, unlike other records" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["language", "data.replay.share=0.5"], "data.replay.path"),
        (["audio", "data.sample_rate=10"], "sample_rate"),
        (["image", "data.image_size=100000"], "image_size"),
        (["classify", "data.temperature=2"], "temperature"),
        (["classify", "--to", "zip", "out"], "--to zip"),
    ],
)
def test_invalid_data_options_are_refused_in_one_line(
    rows: Path, arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["prepare", *arguments, "--data", str(rows)]) == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1


def test_table_in_latin_1_needs_data_train_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "films.csv"
    table.write_bytes(b"text,label\n" + "".join(f"café {n},{'ab'[n % 2]}\n" for n in range(20)).encode("latin-1"))
    assert cli.main(["data", str(table)]) == 3
    assert "set data.train.encoding" in capsys.readouterr().err
    report = run_json(capsys, "data", table, "data.train.encoding=latin-1")
    assert report["task"] == "classify"
    assert set(report["labels"]["train"]) == {"a", "b"}
