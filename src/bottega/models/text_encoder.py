"""Text encoders for captions: a small transformer trained with the generator, or a frozen pretrained one.

B batch   L text tokens   W width of a text token
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.models.dit.torch import Attention, layer_norm
from bottega.models.folders.resolve import require_config
from bottega.models.folders.transformers_loader import load_pretrained
from bottega.models.folders.untrusted import attribute_errors_to, load_transformers_config, require_safetensors
from bottega.models.generator.config import ConditionShape

CLIP_TYPES = ("clip", "clip_text_model")


class TextBlock(nn.Module):
    """A pre-norm transformer block. Its norms have no affine weights: the linear layer after each can represent them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attn = Attention(width, num_heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        x = x + self.attn(layer_norm(x), mask=attention_mask)
        return x + self.down(F.gelu(self.up(layer_norm(x)), approximate="tanh"))


class TextEncoder(nn.Module):
    """Bidirectional encoder from tokens (B, L) to hidden states (B, L, W) of unit variance."""

    def __init__(self, shape: ConditionShape) -> None:
        super().__init__()
        assert shape.vocab_size is not None, "a trained text encoder has a vocabulary"
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.text_size)
        self.position_embedding = nn.Embedding(shape.max_tokens, shape.text_size)
        self.blocks = nn.ModuleList(TextBlock(shape.text_size, shape.num_text_heads) for _ in range(shape.text_layers))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode `ids` (B, L). `mask` (B, L) is true for text, at least once in each row; padding is encoded as 0."""
        x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        attention_mask = mask[:, None, None, :] if mask is not None else None
        for block in self.blocks:
            x = block(x, attention_mask)
        x = layer_norm(x)
        return x if mask is None else x * mask[..., None]


class TextEncoderMetadata(NamedTuple):
    """Dimensions of a pretrained text encoder, read from its configuration without loading weights."""

    width: int
    vocab_size: int
    max_positions: int | None
    """Maximum number of tokens; None if there is no limit."""
    is_clip: bool


def read_text_encoder_metadata(folder: Path) -> TextEncoderMetadata:
    """Return the dimensions of the text encoder in a local folder."""
    config = _read_config(folder)
    text_config = getattr(config, "text_config", config)
    width, vocab_size = getattr(text_config, "hidden_size", None), getattr(text_config, "vocab_size", None)
    if not isinstance(width, int) or not isinstance(vocab_size, int):
        raise UsageError(
            f"model.text.from: {folder} contains a {config.model_type}, which is not a text encoder; use one such as "
            "CLIP or T5"
        )
    max_positions = getattr(text_config, "max_position_embeddings", None)
    return TextEncoderMetadata(
        width, vocab_size, max_positions if isinstance(max_positions, int) else None, config.model_type in CLIP_TYPES
    )


def load_text_encoder(folder: Path) -> Any:
    """Return a frozen text encoder of transformers from a local folder, in float32.

    Missing weights are an error.
    """
    config = _read_config(folder)
    import transformers

    model_class: Any = transformers.AutoModel
    if config.model_type in CLIP_TYPES:
        model_class = transformers.CLIPTextModel  # the text half of a CLIP
    elif type(config) in transformers.AutoModelForTextEncoding._model_mapping:
        model_class = transformers.AutoModelForTextEncoding
    with attribute_errors_to(folder, key="model.text.from"):
        require_safetensors(folder)
        errors = (OSError, ValueError, RuntimeError)
        model = load_pretrained(model_class, folder, description="a text encoder", errors=errors, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def _read_config(folder: Path) -> Any:
    require_config(folder, key="model.text.from", description="text encoder")
    return load_transformers_config(folder, key="model.text.from", description="text encoder")
