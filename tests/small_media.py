"""Small generator runs: a few images, audio clips or videos of three classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

COMMON: dict[str, Any] = {
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.patch_size": 2,
    "data.workers": 0,
    "data.validation.split": 0.25,
    "training.max_steps": 8,
    "training.batch_size": 8,
    "training.ema": None,
    "training.scheduler.warmup_steps": 2,
    "evaluation.every": 4,
    "checkpoint.every": 4,
    "samples.every": None,
    "samples.steps": 4,
    "logging.every": 1,
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
}
NAMES = ("dark", "grey", "bright")


def write_images(folder: Path) -> Path:
    """Write 36 images of 8 x 8 pixels, with one mean brightness for each class."""
    draw, label = np.random.default_rng(0), np.arange(36) % 3
    image = draw.normal(30 + 100 * label[:, None, None], 10, (36, 8, 8)).clip(0, 255).astype(np.uint8)
    return _save_arrays(folder / "pictures.npz", image=image, label=np.array(NAMES)[label])


def write_audio(folder: Path) -> Path:
    """Write 36 audio clips of 0.1 s, with one pitch for each class."""
    draw, label = np.random.default_rng(0), np.arange(36) % 3
    turns = (200 * 2.0**label)[:, None] * np.arange(800) / 8000 + draw.random((36, 1))
    audio = np.rint(10_000 * np.sin(2 * np.pi * turns)).astype(np.int16)
    return _save_arrays(
        folder / "sounds.npz", audio=audio, label=np.array(NAMES)[label], sample_rate=np.full(36, 8000, np.int32)
    )


def write_videos(folder: Path) -> Path:
    """Write 36 videos of 4 frames of 8 x 8 pixels; the class is the change of brightness over time."""
    draw, label = np.random.default_rng(0), np.arange(36) % 3
    level = 128 + (label - 1)[:, None] * 75 * np.arange(-1.5, 2)
    video = draw.normal(level[:, :, None, None], 10, (36, 4, 8, 8)).clip(0, 255).astype(np.uint8)
    return _save_arrays(folder / "clips.npz", video=video, label=np.array(NAMES)[label], fps=np.full(36, 8, np.uint8))


def image(folder: Path) -> dict[str, Any]:
    return {**COMMON, "output_dir": str(folder), **_data_settings(write_images(folder))}


def audio(folder: Path) -> dict[str, Any]:
    spectrum = {"data.num_mels": 8, "data.fft_size": 256, "data.hop_size": 64}
    return {**COMMON, "output_dir": str(folder), **_data_settings(write_audio(folder)), **spectrum}


def video(folder: Path) -> dict[str, Any]:
    return {
        **COMMON,
        "output_dir": str(folder),
        **_data_settings(write_videos(folder)),
        "data.num_frames": 4,
        "model.temporal_patch_size": 1,
    }


def train(output: Path, **changes: Any) -> Any:
    """Run `bottega.train` on the images, in this process."""
    import bottega

    return bottega.train("image", {**image(output), **changes})


def train_arguments(output: Path, *more: str, **changes: Any) -> list[str]:
    """Return the command line of the same run."""
    values = {**image(output), **changes}.items()
    return ["train", "image", *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values), *more]


def _data_settings(path: Path) -> dict[str, Any]:
    return {"data.train.kind": "auto", "data.train.path": str(path)}


def _save_arrays(path: Path, **fields: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        np.savez(path, **fields)  # type: ignore[arg-type]
    return path
