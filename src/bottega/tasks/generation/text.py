"""Captions read by a text encoder from a folder, which stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bottega.core.model_spec import ModelSpec


class FrozenText(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    is_masked: bool = True
    """Whether what fills up a row is hidden. Not from CLIP and not from those who read CLIP: Stable Diffusion was trained
    with all 77 places in view, so the end marks after a caption are part of what its weights understand."""

    def spec(self) -> ModelSpec:
        return ModelSpec("bottega.models.text_encoder:load_text_encoder", Path(self.folder))

    @torch.no_grad()
    def encode(self, encoder: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """What the model is handed: the last hidden states, and which of them are text where that matters."""
        if not self.is_masked:
            return {"context": encoder(input_ids=ids).last_hidden_state}
        hidden = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return {"context": hidden, "mask": mask}
