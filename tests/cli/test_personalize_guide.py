"""The configuration that a published guide prints trains as it is printed, and so does a collection in its own layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import small_personal
from bottega import cli
from config.guide_blocks import PERSONALIZE
from small_collections import flickr, picture, records

ADDED = "  save_steps: 2\n  validation_steps: 2\n  output_dir: ./my_custom_output\n"
SMALLER = ("image_size=32", "samples.steps=2", "samples.count=2", "evaluation.max_batches=1", "checkpoint.keep=1")


def frozen() -> list[str]:
    return [f"model.{name}={folder}" for name, folder in small_personal.models().items()]


def as_their_programs_write(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """A record with the keys, and the absolute names of pictures, of the programs that the guide belongs to."""

    def item(ours: dict[str, Any]) -> dict[str, Any]:
        name = f"{ours['id'][1:]}.jpg"
        return {"item_id": ours["id"], "caption": "a red star", "image_path": str(folder / "40K" / name), "score": 4}

    return {
        "worker_id": row["user"],
        "history_items_info": [item(one) for one in row["history"]],
        "target_item_info": item(row["target"]),
        "worker_style": "calm",
        "num_interactions": 4,
    }


@pytest.mark.slow
def test_the_guide_trains_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "datasets/FLICKR"
    (folder / "processed_dataset").mkdir(parents=True)
    for number in range(24):
        picture(folder / f"40K/{number}.jpg", number)
    rows = [as_their_programs_write(folder, row) for row in records(users=40)]
    for name, part in (("train", rows[:64]), ("val", rows[64:])):
        (folder / f"processed_dataset/{name}.json").write_text(json.dumps(part))
    monkeypatch.chdir(tmp_path)
    Path("flickr_train.yaml").write_text(
        PERSONALIZE.replace("mixed_precision: bf16\n", "mixed_precision: bf16\n" + ADDED)
    )
    command = ["train", "personalize/flickr", "--config", "flickr_train.yaml", "--device", "cpu", *frozen(), *SMALLER]
    assert cli.main([*command, "name=x"]) == 3, "the pictures lie outside the folder of the records"
    assert "data.pictures" in capfd.readouterr().err
    told = "data.pictures=datasets/FLICKR"
    assert cli.main([*command, told, "name=x", "num_train_epochs=1"]) == 0, capfd.readouterr().err
    said = capfd.readouterr().err
    assert "batch_size 6 per process x accumulation 4 = 24" in said
    assert "step 2  validation" in said
    resumed = ["--resume_from", "my_custom_output/x", told, "name=y", "num_train_epochs=2"]
    assert cli.main([*command, *resumed]) == 0, capfd.readouterr().err
    assert "resumed my_custom_output/x" in capfd.readouterr().err


@pytest.mark.slow
def test_a_published_layout_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = flickr(tmp_path / "flickr", workers=12)
    command = ["train", "personalize/flickr", "--data", str(folder), f"data.captions={folder / 'captions.json'}"]
    small = ("data.history_length=3", "training.batch_size=2", "max_steps=2", "num_epochs=null", "--device", "cpu")
    assert cli.main([*command, *frozen(), *SMALLER, *small, f"output_dir={tmp_path}", "name=x"]) == 0, (
        capfd.readouterr().err
    )
    assert (tmp_path / "x/checkpoints").is_dir()
