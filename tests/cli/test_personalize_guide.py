"""The configuration of a published guide trains unchanged, and so does a data set in its published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import small_personal
from bottega import cli
from config.guide_blocks import PERSONALIZE
from small_collections import records, write_flickr, write_image

ADDED = "  save_steps: 2\n  validation_steps: 2\n  output_dir: ./my_custom_output\n"
SMALLER = ("image_size=32", "samples.steps=2", "samples.count=2", "evaluation.max_batches=1", "checkpoint.keep=1")


def frozen_models() -> list[str]:
    return [f"model.{name}={folder}" for name, folder in small_personal.models().items()]


def convert_record(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the keys and absolute image paths of the programs that the guide belongs to."""

    def convert(item: dict[str, Any]) -> dict[str, Any]:
        name = f"{item['id'][1:]}.jpg"
        return {"item_id": item["id"], "caption": "a red star", "image_path": str(folder / "40K" / name), "score": 4}

    return {
        "worker_id": row["user"],
        "history_items_info": [convert(item) for item in row["history"]],
        "target_item_info": convert(row["target"]),
        "worker_style": "calm",
        "num_interactions": 4,
    }


@pytest.mark.slow
def test_configuration_of_the_guide_trains_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "datasets/FLICKR"
    (folder / "processed_dataset").mkdir(parents=True)
    for number in range(24):
        write_image(folder / f"40K/{number}.jpg", number)
    rows = [convert_record(folder, row) for row in records(users=40)]
    for name, part in (("train", rows[:64]), ("val", rows[64:])):
        (folder / f"processed_dataset/{name}.json").write_text(json.dumps(part))
    monkeypatch.chdir(tmp_path)
    Path("flickr_train.yaml").write_text(
        PERSONALIZE.replace("mixed_precision: bf16\n", "mixed_precision: bf16\n" + ADDED)
    )
    command = [
        "train",
        "personalize/flickr",
        "--config",
        "flickr_train.yaml",
        "--device",
        "cpu",
        *frozen_models(),
        *SMALLER,
    ]
    assert cli.main([*command, "name=x"]) == 3, "the images are outside the folder of the records"
    assert "data.pictures" in capfd.readouterr().err
    pictures_override = "data.pictures=datasets/FLICKR"
    assert cli.main([*command, pictures_override, "name=x", "num_train_epochs=1"]) == 0, capfd.readouterr().err
    err = capfd.readouterr().err
    assert "batch_size 6 per process x accumulation 4 = 24" in err
    assert "step 2  validation" in err
    resumed = ["--resume_from", "my_custom_output/x", pictures_override, "name=y", "num_train_epochs=2"]
    assert cli.main([*command, *resumed]) == 0, capfd.readouterr().err
    assert "resumed my_custom_output/x" in capfd.readouterr().err


@pytest.mark.slow
def test_published_layout_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = write_flickr(tmp_path / "flickr", workers=12)
    command = ["train", "personalize/flickr", "--data", str(folder), f"data.captions={folder / 'captions.json'}"]
    small = ("data.history_length=3", "training.batch_size=2", "max_steps=2", "num_epochs=null", "--device", "cpu")
    assert cli.main([*command, *frozen_models(), *SMALLER, *small, f"output_dir={tmp_path}", "name=x"]) == 0, (
        capfd.readouterr().err
    )
    assert (tmp_path / "x/checkpoints").is_dir()
