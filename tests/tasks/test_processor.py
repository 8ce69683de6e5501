"""Saved processors: truncated files are rewritten, other data is refused, and rounding differences are accepted."""

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
AUDIO = {"data.input": "audio", **SPECTRUM}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "image_vae": (small_media.write_images, {"task": "image_vae", **HALVED}),
    "image_vae of audio": (small_media.write_audio, {"task": "image_vae", **HALVED, **AUDIO}),
    "image_tokens": (small_media.write_images, {"task": "image_tokens", **HALVED, "model.levels": [4, 4]}),
    "image_tokens of audio": (small_media.write_audio, {"task": "image_tokens", **HALVED, **AUDIO}),
    "classify": (small_media.write_images, {"task": "classify", **SMALL, "data.input": "image"}),
    "classify of audio": (small_media.write_audio, {"task": "classify", **SMALL, **AUDIO}),
    "image": (small_media.write_images, {"task": "image", **SMALL}),
    "audio": (small_media.write_audio, {"task": "audio", **SMALL, **SPECTRUM}),
}


def open_workload(case: str, folder: Path, **changes: Any) -> Any:
    write_data, settings = RUNS[case]
    recipe = load_recipe([{**settings, "data.train.path": str(write_data(folder)), **changes}]).recipe
    return registry.open_workload(recipe, progress=lambda *_: None)


@pytest.mark.parametrize("case", RUNS)
def test_truncated_files_are_refused_and_written_again(case: str, tmp_path: Path) -> None:
    workload, processor = open_workload(case, tmp_path), tmp_path / "processor"
    workload.processor.save(processor)
    assert workload.processor.is_saved(processor)
    for file in sorted(processor.iterdir()):
        original = file.read_bytes()
        for content in (original[: len(original) // 2], b"", b"[]" if original[:1] == b"{" else b"1", None):
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(CheckpointError, match="run the training command again"):
                registry.reopen_workload(workload.recipe, processor, workload.data.fingerprint)
            assert not workload.processor.is_saved(processor)
            workload.processor.save(processor)
            assert file.read_bytes() == original


@pytest.mark.parametrize("case", [case for case in RUNS if case.endswith("audio")])
def test_rounding_of_the_mel_mean_is_accepted(case: str, tmp_path: Path) -> None:
    """Another CPU sums in a different order."""
    workload, processor = open_workload(case, tmp_path), tmp_path / "processor"
    workload.processor.save(processor)
    file = processor / "mel.json"
    original = json.loads(file.read_text())

    def shift_mean(by: float) -> None:
        scale = {**original["scale"], "mean": original["scale"]["mean"] + by}
        file.write_text(json.dumps({**original, "scale": scale}))

    shift_mean(5e-4)
    assert workload.processor.is_saved(processor)
    shift_mean(0.01)
    with pytest.raises(DataError, match="the shape or the loudness of the spectrograms differs"):
        workload.processor.is_saved(processor)


@pytest.mark.parametrize("case", ["image_vae", "image_tokens", "classify"])
def test_other_image_sizes_are_refused(case: str, tmp_path: Path) -> None:
    open_workload(case, tmp_path).processor.save(tmp_path / "processor")
    with pytest.raises(DataError, match="the sizes or the classes of the data differ"):
        open_workload(case, tmp_path, **{"data.image_size": 16}).processor.is_saved(tmp_path / "processor")


@pytest.mark.parametrize("case", ["image_vae", "image_tokens", "classify", "image"])
def test_images_of_another_aspect_ratio_are_refused(case: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for height, width in ((8, 16), (16, 8)):
        image = rng.integers(0, 256, (36, height, width), np.uint8)
        np.savez(tmp_path / f"{height}.npz", image=image, label=np.array(small_media.NAMES)[np.arange(36) % 3])
    workload = open_workload(case, tmp_path, **{"data.train.path": str(tmp_path / "8.npz")})
    assert len(workload.data.read_external(ExternalData(SourceOptions(path=str(tmp_path / "8.npz"))))) == 36
    with pytest.raises(DataError, match=r"16\.npz has samples of 16 x 8 x 1, but this run was trained on 8 x 16 x 1"):
        workload.data.read_external(ExternalData(SourceOptions(path=str(tmp_path / "16.npz"))))


def test_clips_are_resized_to_the_size_of_the_run(tmp_path: Path) -> None:
    settings = {
        "task": "video",
        **SMALL,
        "data.num_frames": 4,
        "data.train.path": str(small_media.write_videos(tmp_path)),
    }
    workload = registry.open_workload(load_recipe([settings]).recipe, progress=lambda *_: None)
    video = np.zeros((4, 4, 16, 12), np.uint8)
    np.savez(tmp_path / "large.npz", video=video, label=np.array(["dark"] * 4), fps=np.full(4, 8, np.uint8))
    rows = workload.data.read_external(ExternalData(SourceOptions(path=str(tmp_path / "large.npz")))).rows(
        np.arange(4), np.zeros(4, int)
    )
    assert rows["video"].shape == (4, 4, 8, 8, 1)
