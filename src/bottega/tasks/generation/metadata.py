"""Metadata of a generator's data, saved with a run so that it can sample without the data."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from bottega.models.generator.config import CodeGeneratorShape, GeneratorShape
from bottega.tasks.generation.latent_space import LatentMetadata
from bottega.tasks.metadata import read_metadata

METADATA_FILE = "generator.json"


class GeneratorMetadata(BaseModel):
    """Shapes and classes found in the prepared data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: GeneratorShape | CodeGeneratorShape
    classes: tuple[str, ...] = ()
    fps: int | None = None
    """Frames per second of video; None for images and audio."""
    latents: LatentMetadata | None = None
    """None if values are generated directly."""

    @property
    def sample(self) -> tuple[int, ...]:
        """Sides and channels of the data; with an autoencoder they differ from those of the latents."""
        return self.shape.sample if self.latents is None else self.latents.sample


def read_generator_metadata(folder: Path) -> GeneratorMetadata:
    """Read the metadata of a saved processor; raises MetadataUnreadable."""
    return read_metadata(folder / METADATA_FILE, GeneratorMetadata.model_validate_json)
