"""`bottega predict` for every kind of classifier: files and folders of images, audio and video, and rows of numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import bottega
import small_media
import small_texts
from bottega import cli
from bottega.core.errors import DataError, UsageError
from bottega.data.audio.write import write_audio

LEARNS = {"training.max_steps": 60, "training.learning_rate": 1e-2, "evaluation.every": 60, "checkpoint.every": 60}


def train(folder: Path, medium: str) -> Path:
    settings = {**getattr(small_media, medium)(folder), **LEARNS, "model.hidden_size": 8, "name": medium}
    settings = {
        k: v for k, v in settings.items() if not k.startswith(("samples.", "model.num", "model.patch", "model.temp"))
    }
    return bottega.train(f"classify/{medium}", settings).path


@pytest.fixture(scope="module")
def image_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("pictures"), "image")


def run_predict(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> Any:
    capsys.readouterr()
    assert cli.main(["predict", *map(str, arguments)]) == code
    output = capsys.readouterr()
    return output.err if code else output.out


def write_png(path: Path, level: int, size: int = 8) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (size, size), level).save(path)
    return path


def test_predict_one_image_several_and_a_folder(
    image_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write_png(tmp_path / "new" / f"{n}.png", level, 8 + 4 * n) for n, level in enumerate((30, 130, 230))]
    out = [line.split("\t") for line in run_predict(capsys, image_run, files[0]).splitlines()]
    assert [(row[0], row[2]) for row in out] == [("dark", "0.png")]
    rows = json.loads(run_predict(capsys, image_run, *files, "--json"))["predictions"]
    assert [row["predicted"] for row in rows] == ["dark", "grey", "bright"]
    for row in rows:
        assert set(row["probabilities"]) == set(small_media.NAMES)
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert row["probability"] == max(row["probabilities"].values())
    folder = json.loads(run_predict(capsys, image_run, tmp_path / "new", "--json"))["predictions"]
    assert [row["file"] for row in folder] == ["0.png", "1.png", "2.png"]
    assert [row["predicted"] for row in folder] == [row["predicted"] for row in rows]
    loaded = bottega.load(image_run)
    assert loaded.predict([str(file) for file in files]) == rows
    assert loaded.predict(files[2])[0]["predicted"] == "bright"
    assert bottega.predict(image_run, data=tmp_path / "new") == folder


def test_folder_names_are_not_labels(image_run: Path, tmp_path: Path) -> None:
    write_png(tmp_path / "holiday" / "sea.png", 230)
    write_png(tmp_path / "garden" / "tree.png", 30)
    rows = {row["file"]: row["predicted"] for row in bottega.predict(image_run, str(tmp_path))}
    assert rows == {"holiday/sea.png": "bright", "garden/tree.png": "dark"}


def test_files_of_other_kinds_are_ignored(image_run: Path, tmp_path: Path) -> None:
    first, other = write_png(tmp_path / "new" / "a.png", 30), write_png(tmp_path / "b.png", 230)
    for name in ("notes.txt", "list.csv", "tool.py"):
        (tmp_path / "new" / name).write_text("nothing to look at\n")
    assert [row["file"] for row in bottega.predict(image_run, str(first.parent))] == ["a.png"]
    both = bottega.predict(image_run, [str(first.parent), str(other)])
    assert [(row["file"], row["predicted"]) for row in both] == [("new/a.png", "dark"), ("b.png", "bright")]


def test_unreadable_files_are_refused_in_one_line(
    image_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "gone.png does not exist" in run_predict(capsys, image_run, tmp_path / "gone.png", code=2)
    assert "give files or folders" in run_predict(capsys, image_run, code=2)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and nothing more")
    assert "broken.png" in run_predict(capsys, image_run, tmp_path / "broken.png", code=3)
    write_png(tmp_path / "mixed" / "good.png", 30)
    (tmp_path / "mixed" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n and nothing more")
    with pytest.raises(DataError, match=r"bad\.png"):
        bottega.predict(image_run, str(tmp_path / "mixed"))


def test_predict_audio_and_video(tmp_path: Path) -> None:
    audio = train(tmp_path / "a", "audio")
    turns = 200 * np.arange(800) / 8000
    for number, name in enumerate(small_media.NAMES):
        audio_samples = 0.3 * np.sin(2 * np.pi * turns * 2**number).astype(np.float32)
        write_audio(audio_samples, 8000, tmp_path / f"{number}-{name}.wav")
    rows = bottega.predict(audio, [str(path) for path in sorted(tmp_path.glob("*.wav"))])
    assert [row["predicted"] for row in rows] == list(small_media.NAMES)
    video = train(tmp_path / "v", "video")
    with np.load(small_media.write_videos(tmp_path / "v")) as fields:
        expected = fields["label"].tolist()
        np.savez(tmp_path / "unlabelled.npz", video=fields["video"], fps=fields["fps"])
    rows = bottega.predict(video, data=tmp_path / "unlabelled.npz")
    assert np.mean([row["predicted"] == label for row, label in zip(rows, expected, strict=True)]) > 0.8


def test_probabilities_of_all_classes_for_texts_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = bottega.train("classify", {**small_texts.settings(tmp_path), "name": "texts"}).path
    row = bottega.predict(texts, "salt and onion")[0]
    assert row["probabilities"].keys() == small_texts.WORDS.keys()
    assert row["probability"] == row["probabilities"][row["predicted"]]
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", x=draw.normal(size=(60, 5)).astype(np.float32), label=np.arange(60) % 3)
    own = {"data.train.path": str(tmp_path / "rows.npz"), "output_dir": str(tmp_path), "name": "rows"}
    small = {"model.routing_loss_weight": 0, "model.hidden_size": 16, "training.max_steps": 4, "training.batch_size": 8}
    rows = bottega.train("routing", {**own, **small, "logging.tensorboard": False}).path
    table = bottega.predict(rows, data=tmp_path / "rows.npz")
    assert len(table) == 60
    assert set(table[0]["probabilities"]) == {"0", "1", "2"}
    assert bottega.predict(rows, str(tmp_path / "rows.npz")) == table
    with np.load(tmp_path / "rows.npz") as fields:
        first = ",".join(map(str, fields["x"][0].tolist()))
    prediction = json.loads(run_predict(capsys, rows, "--json", "--", first))["predictions"][0]
    assert prediction["probabilities"] == pytest.approx(table[0]["probabilities"])
    assert "table" in run_predict(capsys, rows, code=2)


def test_video_channels_are_inferred_from_the_data(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    label, fps = np.arange(12) % 2, np.full(12, 8, np.uint8)
    for name, shape in (("grey", (12, 5, 12, 12)), ("colour", (12, 5, 12, 12, 3))):
        np.savez(tmp_path / f"{name}.npz", video=draw.integers(0, 255, shape).astype(np.uint8), label=label, fps=fps)
    for recipe in ("video", "classify/video"):
        prepared = {n: bottega.prepare(recipe, {"data": str(tmp_path / f"{n}.npz")}) for n in ("grey", "colour")}
        assert {n: data.metadata["channels"] for n, data in prepared.items()} == {"grey": 1, "colour": 3}, recipe


def test_predict_with_a_generator_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a classifier"):
        bottega.predict(small_media.train(tmp_path).path, "a.png")


def test_data_shows_the_columns_of_a_table_without_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "people.csv"
    path.write_text("age,city,review\n" + "".join(f"{20 + n},Rome,good place {n}\n" for n in range(30)) + ",Oslo,\n")
    assert cli.main(["data", str(path)]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[1]: line.split() for line in out.splitlines() if line[:1].isdigit()}
    assert lines["age"][2:5] == ["number", "30", "30"]
    assert lines["city"][2:5] == ["text", "31", "2"]
    assert "data.train.field=review data.train.label=city" in out
    assert cli.main(["data", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [column["name"] for column in report["columns"]] == ["age", "city", "review"]
    assert cli.main(["data", str(path), "data.train.field=review", "--examples", "0"]) == 0
