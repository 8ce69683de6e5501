"""Who reads captions: a small transformer of our own that learns with the generator, or a pretrained one that does not.

B batch   L text tokens   W width of a text token
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.dit.torch import Attention, layer_norm
from bottega.models.folders.resolve import require_config
from bottega.models.folders.transformers_loader import load_encoder
from bottega.models.folders.untrusted import attribute_errors_to, load_transformers_config
from bottega.models.generator.config import ConditionShape

HEAD_SIZE = 32
CLIP_TYPES = ("clip", "clip_text_model")


class TextBlock(nn.Module):
    """Norms have no weights of their own: a linear layer follows each, and can do all that they could."""

    def __init__(self, width: int) -> None:
        super().__init__()
        heads = next(n for n in range(max(1, width // HEAD_SIZE), 0, -1) if width % n == 0)
        self.attn = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, looks: Tensor | None) -> Tensor:
        x = x + self.attn(layer_norm(x), mask=looks)
        return x + self.down(F.gelu(self.up(layer_norm(x)), approximate="tanh"))


class TextEncoder(nn.Module):
    """Tokens [B, L] to what is meant by each [B, L, W], of unit variance; every token sees the whole caption."""

    def __init__(self, shape: ConditionShape) -> None:
        super().__init__()
        assert shape.vocab_size is not None, "a text encoder of our own has a vocabulary"
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.text_size)
        self.position_embedding = nn.Embedding(shape.max_tokens, shape.text_size)
        self.blocks = nn.ModuleList(TextBlock(shape.text_size) for _ in range(shape.text_layers))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` [B, L] is true where there is text; at least once in each row. What is not text comes out as 0."""
        x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        looks = mask[:, None, None, :] if mask is not None else None
        for block in self.blocks:
            x = block(x, looks)
        x = layer_norm(x)
        return x if mask is None else x * mask[..., None]


class TextEncoderMetadata(NamedTuple):
    """What must be known of a pretrained text encoder before it is loaded."""

    width: int
    vocab_size: int
    positions: int | None
    """The most tokens it can read; None where there is no such number."""
    is_clip: bool


def read_text_encoder_metadata(folder: Path) -> TextEncoderMetadata:
    config = _config(folder)
    text = getattr(config, "text_config", config)
    width, vocab_size = getattr(text, "hidden_size", None), getattr(text, "vocab_size", None)
    if not isinstance(width, int) or not isinstance(vocab_size, int):
        raise UsageError(f"model.text.from: {folder} holds a {config.model_type}, which is no text encoder")
    positions = getattr(text, "max_position_embeddings", None)
    return TextEncoderMetadata(
        width, vocab_size, positions if isinstance(positions, int) else None, config.model_type in CLIP_TYPES
    )


def load_text_encoder(folder: Path) -> Any:
    """A transformers encoder from a local folder, in float32, to be called and never trained.

    Only safetensors are read and no code of the folder's own; a weight that is not there is an error, because
    transformers would draw it at random.
    """
    config = _config(folder)
    import transformers

    kind: Any = transformers.AutoModel
    if config.model_type in CLIP_TYPES:
        kind = transformers.CLIPTextModel  # the half of a CLIP that reads
    elif type(config) in transformers.AutoModelForTextEncoding._model_mapping:
        kind = transformers.AutoModelForTextEncoding
    with attribute_errors_to(folder, key="model.text.from"):
        model, seen = load_encoder(kind, folder)
    if seen["missing_keys"]:
        raise CheckpointError(f"{folder}: lacks {sorted(seen['missing_keys'])[0]}; it is no complete text encoder")
    return model.eval().requires_grad_(False)


def _config(folder: Path) -> Any:
    require_config(folder, key="model.text.from", what="text encoder")
    return load_transformers_config(folder, key="model.text.from", what="text encoder")
