"""What a run keeps of its data: cut short it is written again, of other data it is refused, and a last digit is no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import small_media
from bottega.config.data import Source as SourceOptions
from bottega.core.errors import CheckpointError, DataError
from bottega.data.sources.external import ExternalData
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe

SPECTRUM = {"data.num_mels": 8, "data.fft_size": 256, "data.hop_size": 64}
SMALL: dict[str, Any] = {"model.hidden_size": 8, "data.validation.split": 0.25, "training.max_steps": 1}
HALVED = {**SMALL, "model.downsample": 2, "model.layers_per_block": 1}
SOUND = {"data.input": "audio", **SPECTRUM}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "image_vae": (small_media.pictures, {"task": "image_vae", **HALVED}),
    "image_vae of sound": (small_media.sounds, {"task": "image_vae", **HALVED, **SOUND}),
    "image_tokens": (small_media.pictures, {"task": "image_tokens", **HALVED, "model.levels": [4, 4]}),
    "image_tokens of sound": (small_media.sounds, {"task": "image_tokens", **HALVED, **SOUND}),
    "classify": (small_media.pictures, {"task": "classify", **SMALL, "data.input": "image"}),
    "classify of sound": (small_media.sounds, {"task": "classify", **SMALL, **SOUND}),
    "image": (small_media.pictures, {"task": "image", **SMALL}),
    "audio": (small_media.sounds, {"task": "audio", **SMALL, **SPECTRUM}),
}


def opened(which: str, folder: Path, **changes: Any) -> Any:
    make, settings = RUNS[which]
    recipe = load_recipe([{**settings, "data.train.path": str(make(folder)), **changes}]).recipe
    return registry.open_workload(recipe, progress=lambda *_: None)


@pytest.mark.parametrize("which", RUNS)
def test_what_was_cut_short_is_written_again(which: str, tmp_path: Path) -> None:
    workload, processor = opened(which, tmp_path), tmp_path / "processor"
    workload.processor.save(processor)
    assert workload.processor.is_saved(processor)
    for file in sorted(processor.iterdir()):
        whole = file.read_bytes()
        for content in (whole[: len(whole) // 2], b"", b"[]" if whole[:1] == b"{" else b"1", None):
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(CheckpointError, match="run the training command again"):
                registry.reopen_workload(workload.recipe, processor, workload.data.fingerprint)
            assert not workload.processor.is_saved(processor)
            workload.processor.save(processor)
            assert file.read_bytes() == whole


@pytest.mark.parametrize("which", [which for which in RUNS if which.endswith("sound") or which == "audio"])
def test_a_last_digit_of_loudness_is_no_other_data(which: str, tmp_path: Path) -> None:
    """Another processor adds up in another order."""
    workload, processor = opened(which, tmp_path), tmp_path / "processor"
    workload.processor.save(processor)
    file = processor / "mel.json"
    whole = json.loads(file.read_text())

    def moved(by: float) -> None:
        scale = {**whole["scale"], "mean": whole["scale"]["mean"] + by}
        file.write_text(json.dumps({**whole, "scale": scale}))

    moved(5e-4)
    assert workload.processor.is_saved(processor)
    moved(0.01)
    with pytest.raises(DataError, match="the shape or the loudness of the spectrograms differs"):
        workload.processor.is_saved(processor)


@pytest.mark.parametrize("which", ["image_vae", "image_tokens", "classify"])
def test_other_sizes_are_other_data(which: str, tmp_path: Path) -> None:
    opened(which, tmp_path).processor.save(tmp_path / "processor")
    with pytest.raises(DataError, match="the sizes or the classes of the data differ"):
        opened(which, tmp_path, **{"data.image_size": 16}).processor.is_saved(tmp_path / "processor")


@pytest.mark.parametrize("which", ["image_vae", "image_tokens", "classify", "image"])
def test_pictures_that_are_no_squares_must_be_of_the_same_sides(which: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for height, width in ((8, 16), (16, 8)):
        image = draw.integers(0, 256, (36, height, width), np.uint8)
        np.savez(tmp_path / f"{height}.npz", image=image, label=np.array(small_media.NAMES)[np.arange(36) % 3])
    workload = opened(which, tmp_path, **{"data.train.path": str(tmp_path / "8.npz")})
    assert len(workload.data.read_external(ExternalData(SourceOptions(path=str(tmp_path / "8.npz"))))) == 36
    with pytest.raises(DataError, match=r"16\.npz: is of 16 x 8 x 1, but this run was trained on 8 x 16 x 1"):
        workload.data.read_external(ExternalData(SourceOptions(path=str(tmp_path / "16.npz"))))


def test_clips_of_other_sides_are_brought_to_those_of_the_run(tmp_path: Path) -> None:
    settings = {"task": "video", **SMALL, "data.num_frames": 4, "data.train.path": str(small_media.clips(tmp_path))}
    workload = registry.open_workload(load_recipe([settings]).recipe, progress=lambda *_: None)
    video = np.zeros((4, 4, 16, 12), np.uint8)
    np.savez(tmp_path / "large.npz", video=video, label=np.array(["dark"] * 4), fps=np.full(4, 8, np.uint8))
    rows = workload.data.read_external(ExternalData(SourceOptions(path=str(tmp_path / "large.npz")))).rows(
        np.arange(4), np.zeros(4, int)
    )
    assert rows["video"].shape == (4, 4, 8, 8, 1)
