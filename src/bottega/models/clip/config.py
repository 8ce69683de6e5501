"""What decides the tensors of a CLIP."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class ClipShape(BaseModel):
    """All that decides the tensors of a CLIP and what it is shown: transformers' configuration, and how pixels are scaled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str
    """The configuration as JSON."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Of values from 0 to 1. With a half for both, the network sees the -1 to 1 that it is handed."""
    keeps_aspect: bool = True
    """Whether a picture of other sides is cut to the middle, rather than distorted."""

    @property
    def config_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(self.config)
        return values

    @property
    def image_size(self) -> int:
        return int(self.config_dict["vision_config"].get("image_size", 224))

    @property
    def max_tokens(self) -> int:
        """How many tokens can be read."""
        text = self.config_dict["text_config"]
        usual = 77 if self.config_dict.get("model_type") == "clip" else 64
        return int(text.get("max_position_embeddings", usual))
