"""A frozen text encoder for captions."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from bottega.core.model_spec import ModelSpec


class FrozenText(BaseModel):
    """A frozen text encoder of transformers in a folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    is_masked: bool = True
    """Whether padding is masked. Not for CLIP: Stable Diffusion was trained with all 77 positions visible, so its weights
    depend on the end tokens after a caption."""

    def spec(self) -> ModelSpec:
        """Return how the frozen text encoder is loaded. It has no form in JAX: transformers computes it in torch."""
        return ModelSpec("bottega.models.text_encoder:load_text_encoder", Path(self.folder))
