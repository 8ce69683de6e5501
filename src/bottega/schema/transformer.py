"""The dimensions of a decoder-only transformer, its named sizes, and what they cost; no torch."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bottega.core.errors import UsageError


class TransformerShape(BaseModel):
    """All that decides the tensors of the model. Two equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    vocab_size: int = Field(gt=1)
    context: int = Field(gt=0)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    tie_embeddings: bool = True
    qk_norm: bool = True
    rope_theta: float = Field(default=10000.0, gt=0.0)
    norm_epsilon: float = Field(default=1e-6, gt=0.0)

    @model_validator(mode="after")
    def _heads_agree(self) -> TransformerShape:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: "
                f"each key-value head serves the same number of query heads; try num_kv_heads {_divisor_near(self.num_heads, self.num_kv_heads)}"
            )
        if self.head_size % 2:
            raise ValueError(
                f"head_size {self.head_size} is odd: rotary positions turn pairs of channels; try head_size {self.head_size + 1}"
            )
        return self

    def parameters(self) -> int:
        """The exact number of parameters; a tied embedding counts once."""
        width, queries, keys = self.hidden_size, self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        attention = 2 * width * queries + 2 * width * keys + (2 * self.head_size if self.qk_norm else 0)
        layer = attention + 3 * width * self.intermediate_size + 2 * width
        embeddings = self.vocab_size * width * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * layer + width

    def flops_per_token(self, length: int | None = None) -> int:
        """Forward and backward: 6 per weight that is multiplied, and 12 L H h T for attention (PaLM, appendix B).

        An embedding that is only looked up multiplies nothing, so it counts only where it is also the head.
        """
        looked_up = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        attention = 12 * self.num_layers * self.num_heads * self.head_size * (length or self.context)
        return 6 * (self.parameters() - looked_up) + attention


def _divisor_near(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


SIZES: dict[str, dict[str, Any]] = {
    "nano": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_size": 32,
        "intermediate_size": 384,
        "context": 128,
    },
    # GPT-2 small's work per token: three matrices of 768 x 2048 weigh what its two of 768 x 3072 do. Six heads of 128
    # in place of twelve of 64, because attention kernels reach their best rate at 128.
    "verse": {
        "num_layers": 12,
        "hidden_size": 768,
        "num_heads": 6,
        "num_kv_heads": 6,
        "head_size": 128,
        "intermediate_size": 2048,
        "context": 1024,
    },
    "stanza": {
        "num_layers": 24,
        "hidden_size": 2048,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_size": 128,
        "intermediate_size": 6144,
        "context": 2048,
    },
    "epic": {
        "num_layers": 40,
        "hidden_size": 5120,
        "num_heads": 40,
        "num_kv_heads": 8,
        "head_size": 128,
        "intermediate_size": 16384,
        "context": 4096,
        "tie_embeddings": False,
    },
}

DECLARED: dict[str, tuple[int, float]] = {
    "nano": (1024, 1.0e6),
    "verse": (50304, 125e6),
    "stanza": (50304, 1.3e9),
    "epic": (50304, 13e9),
}
"""Size -> (vocabulary, parameters that the documentation promises at that vocabulary, within 2 %)."""


def sized(size: str, *, vocab_size: int, **changes: Any) -> TransformerShape:
    """A named size with a vocabulary; any field may be changed."""
    if size not in SIZES:
        near = difflib.get_close_matches(size, SIZES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known sizes: " + ", ".join(SIZES)
        raise UsageError(f"model.size: {size!r} is no size of the language model; {hint}")
    return TransformerShape(**{**SIZES[size], "vocab_size": vocab_size, **changes})
