"""Dimensions and image preprocessing of a CLIP; no torch."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class ClipShape(BaseModel):
    """transformers' configuration of a CLIP or SigLIP, and how pixels are scaled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str
    """The configuration as JSON."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean and standard deviation of pixels in 0..1; 0.5 for both leaves pixels in -1..1 as they are."""
    keeps_aspect: bool = True
    """Whether images that are not square are center-cropped rather than distorted."""

    @property
    def config_dict(self) -> dict[str, Any]:
        """The parsed configuration."""
        values: dict[str, Any] = json.loads(self.config)
        return values

    @property
    def image_size(self) -> int:
        """Side in pixels of the network's input."""
        return int(self.config_dict["vision_config"].get("image_size", 224))

    @property
    def max_tokens(self) -> int:
        """Maximum number of text tokens."""
        text = self.config_dict["text_config"]
        default = 77 if self.config_dict.get("model_type") == "clip" else 64
        return int(text.get("max_position_embeddings", default))
