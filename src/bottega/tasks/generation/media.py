"""Media of generation: sizes of samples, and the conversion between pixels or audio and the values that a model reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from bottega.data.image.augment import denormalise_pixels, normalise_pixels
from bottega.data.image.write import FORMATS, write_images
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.samples import load_image_encoder, open_media_source
from bottega.data.video.source import VideoRows
from bottega.data.video.write import ANIMATION_SUFFIXES, write_videos
from bottega.tasks.generation.config import ImageRecipe, VideoRecipe

MediumName = Literal["image", "audio", "video"]


class Medium(ABC):
    """What differs between images, audio and video."""

    name: MediumName
    key: str
    """Batch field that holds the samples: image, mel or video."""
    unit: str
    """What samples are called, in the plural."""
    suffixes: tuple[str, ...]
    """Suffixes of single files that samples can be written to."""

    @abstractmethod
    def read_sides(self, prepared: PreparedData) -> tuple[tuple[int, ...], int]:
        """Return (grid, channels) of the prepared data as a model reads it."""

    @abstractmethod
    def get_patch(self) -> tuple[int, ...]:
        """Return the size of a patch along each axis of the grid."""

    @abstractmethod
    def from_values(self, x: np.ndarray, *, device: Any = "cpu") -> np.ndarray:
        """Convert values of a model to samples of the medium: pixels uint8, or audio float32."""

    @abstractmethod
    def to_values(self, samples: np.ndarray) -> np.ndarray:
        """Convert samples of the medium to the values that a model, or the autoencoder before it, reads."""

    @abstractmethod
    def write(self, samples: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        """Write samples to a file or folder; return the files."""


@final
class ImageMedium(Medium):
    """Images: pixels uint8 (n, height, width, channels)."""

    name, key, unit = "image", "image", "images"
    suffixes = tuple(FORMATS)

    def __init__(self, recipe: ImageRecipe) -> None:
        self.recipe = recipe

    def read_sides(self, prepared: PreparedData) -> tuple[tuple[int, ...], int]:
        height, width, channels = load_image_encoder(prepared).bucket_shape(0)
        return (height, width), channels

    def get_patch(self) -> tuple[int, ...]:
        return (self.recipe.model.patch_size,) * 2

    def from_values(self, x: np.ndarray, *, device: Any = "cpu") -> np.ndarray:
        return denormalise_pixels(x, mode=self.recipe.data.normalise)

    def to_values(self, samples: np.ndarray) -> np.ndarray:
        return normalise_pixels(samples, mode=self.recipe.data.normalise)

    def write(self, samples: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        return write_images(samples, path, captions=captions)


@final
class VideoMedium(Medium):
    """Clips: pixels uint8 (n, frames, height, width, channels)."""

    name, key, unit = "video", "video", "clips"
    suffixes = (*ANIMATION_SUFFIXES, ".png")

    def __init__(self, recipe: VideoRecipe, fps: int | None) -> None:
        self.recipe, self.fps = recipe, fps

    def read_sides(self, prepared: PreparedData) -> tuple[tuple[int, ...], int]:
        height, width, channels = prepared.table(prepared.training_tables[0]).columns["video"].shape
        return (self.recipe.data.num_frames, height, width), channels

    def get_patch(self) -> tuple[int, ...]:
        model = self.recipe.model
        return (model.temporal_patch_size, model.patch_size, model.patch_size)

    def from_values(self, x: np.ndarray, *, device: Any = "cpu") -> np.ndarray:
        return denormalise_pixels(x, mode=self.recipe.data.normalise)

    def to_values(self, samples: np.ndarray) -> np.ndarray:
        return normalise_pixels(samples, mode=self.recipe.data.normalise)

    def write(self, samples: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        return write_videos(samples, self.fps or 8, path, captions=captions)


def read_fps(recipe: VideoRecipe, prepared: PreparedData) -> int:
    """Return the frame rate of the training clips."""
    rows = open_media_source(recipe, prepared, prepared.training_tables[0], is_training=False)
    assert isinstance(rows, VideoRows)
    return rows.fps
