"""A frozen text encoder for captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bottega.core.model_spec import ModelSpec


class FrozenText(BaseModel):
    """A frozen text encoder of transformers in a folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    is_masked: bool = True
    """Whether padding is masked. Not for CLIP: Stable Diffusion was trained with all 77 positions visible, so its weights
    depend on the end tokens after a caption."""

    def spec(self) -> ModelSpec:
        """Return how the frozen text encoder is loaded."""
        return ModelSpec("bottega.models.text_encoder:load_text_encoder", Path(self.folder))

    @torch.no_grad()
    def encode(self, encoder: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return keyword arguments of the model: the last hidden states, and their mask if padding is masked."""
        if not self.is_masked:
            return {"context": encoder(input_ids=ids).last_hidden_state}
        hidden = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return {"context": hidden, "mask": mask}
