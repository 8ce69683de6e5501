"""Dimensions of a decoder, with attention or a state space, an MLP or experts in each layer, and their costs; no torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bottega.core.errors import UsageError
from bottega.models.experts.config import ExpertsShape
from bottega.models.ssm.config import SSMShape
from bottega.similar_names import find_similar_names

Mixer = Literal["attention", "ssm"]
Activation = Literal["swiglu", "relu2"]
MLP_RATIO = 3
"""Default ratio of a gated MLP's inner width to the hidden size: its three matrices have about as many weights as the two
of a plain MLP at a ratio of 4. Tasks that share layers have the same ratio."""


class TransformerShape(BaseModel):
    """Dimensions of the model. Two equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_heads: int = Field(default=0, ge=0)
    num_kv_heads: int = Field(default=0, ge=0)
    head_size: int = Field(default=0, ge=0)
    """Size of an attention head; 0 if no layer has attention."""
    intermediate_size: int = Field(ge=0)
    """Inner width of the MLP of a layer without experts; 0: no MLP."""
    vocab_size: int = Field(gt=1)
    context: int = Field(gt=0)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    tie_embeddings: bool = True
    qk_norm: bool = True
    rope_theta: float = Field(default=10000.0, gt=0.0)
    norm_epsilon: float = Field(default=1e-6, gt=0.0)
    activation: Activation = "swiglu"
    """Of the MLPs: SwiGLU with three matrices, or squared ReLU with two (Primer, So et al., 2021)."""
    logit_softcap: float | None = Field(default=None, gt=0.0)
    """Logits are c * tanh(logits / c), as in Gemma 2."""
    value_embeddings: bool = False
    """Whether every second attention layer, the last one included, adds an embedding of each token to its value."""
    mixers: tuple[Mixer, ...] | None = None
    """The sequence mixer of each layer; None is attention in all of them."""
    ssm: SSMShape | None = None
    experts: ExpertsShape | None = None
    experts_every: int = Field(default=1, gt=0)
    """Every n-th layer has experts in place of the MLP: the last of each n."""

    @model_validator(mode="after")
    def _check_heads(self) -> TransformerShape:
        if not self.has_attention:
            return self
        for name in ("num_heads", "num_kv_heads", "head_size"):
            if not getattr(self, name):
                raise ValueError(f"{name} is 0, but a layer with attention needs at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}, "
                f"but each key-value head serves the same number of query heads; "
                f"try num_kv_heads {nearest_kv_heads(self.num_heads, self.num_kv_heads)}"
            )
        if self.head_size % 2:
            raise ValueError(
                f"head_size {self.head_size} is odd, but rotary positions rotate pairs of channels; "
                f"try head_size {self.head_size + 1}"
            )
        return self

    @model_validator(mode="after")
    def _check_mixers_and_experts(self) -> TransformerShape:
        if self.mixers is not None and len(self.mixers) != self.num_layers:
            raise ValueError(
                f"mixers has length {len(self.mixers)}, but num_layers is {self.num_layers}; give one mixer for each layer"
            )
        if self.value_embeddings and not self.has_attention:
            raise ValueError("value_embeddings is true, but no layer has attention")
        if (self.ssm is not None) != self.has_ssm:
            raise ValueError("ssm must be given if a layer is a state-space layer, and only then")
        for name, shape in (("ssm", self.ssm), ("experts", self.experts)):
            if shape is not None and shape.hidden_size != self.hidden_size:
                raise ValueError(
                    f"{name}.hidden_size is {shape.hidden_size}, but hidden_size is {self.hidden_size}; they must be equal"
                )
        if self.experts is not None and not any(map(self.has_experts, range(self.num_layers))):
            raise ValueError(
                f"experts_every is {self.experts_every}, but then none of the {self.num_layers} layers has experts; "
                f"try {self.num_layers}"
            )
        return self

    def mixer(self, layer: int) -> Mixer:
        """Return the sequence mixer of a layer."""
        return "attention" if self.mixers is None else self.mixers[layer]

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.experts is not None and (layer + 1) % self.experts_every == 0

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether a layer adds an embedding of each token to its value."""
        attention_layers = [i for i in range(self.num_layers) if self.mixer(i) == "attention"]
        return self.value_embeddings and layer in attention_layers[::-2]

    @property
    def has_attention(self) -> bool:
        """Whether any layer has attention."""
        return self.mixers is None or "attention" in self.mixers

    @property
    def has_ssm(self) -> bool:
        """Whether any layer has a state space."""
        return self.mixers is not None and "ssm" in self.mixers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    def num_parameters(self) -> int:
        """Return the exact number of parameters; a tied embedding counts once."""
        return self._count_parameters(self.experts.num_parameters() if self.experts is not None else 0)

    def num_active_parameters(self) -> int:
        """Return the number of parameters used for one token: the chosen experts only."""
        return self._count_parameters(self.experts.num_active_parameters() if self.experts is not None else 0)

    def _count_parameters(self, expert_parameters: int) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        layer_parameters = (
            self._count_mixer_parameters(layer) + self._count_mlp_parameters(layer, expert_parameters)
            for layer in range(self.num_layers)
        )
        return embeddings + sum(layer_parameters) + self.hidden_size

    def _count_mixer_parameters(self, layer: int) -> int:
        """Return the parameters of a layer's mixer with the norm before it."""
        width, query_size, key_size = (
            self.hidden_size,
            self.num_heads * self.head_size,
            self.num_kv_heads * self.head_size,
        )
        if self.mixer(layer) == "ssm":
            assert self.ssm is not None, "checked by the validator"
            return self.ssm.num_parameters() + width
        value_embedding = self._count_value_embedding(layer)
        return (
            2 * width * query_size
            + 2 * width * key_size
            + (2 * self.head_size if self.qk_norm else 0)
            + width
            + value_embedding
        )

    def _count_value_embedding(self, layer: int) -> int:
        return self.vocab_size * self.num_kv_heads * self.head_size if self.has_value_embedding(layer) else 0

    def _count_mlp_parameters(self, layer: int, expert_parameters: int) -> int:
        if self.has_experts(layer):
            return expert_parameters + self.hidden_size
        num_matrices = 3 if self.activation == "swiglu" else 2
        mlp_parameters = num_matrices * self.hidden_size * self.intermediate_size
        return mlp_parameters + self.hidden_size if self.intermediate_size else 0

    def flops_per_token(self, length: int | None = None) -> int:
        """Return the FLOPs of forward and backward for one token of a sequence of `length` (default: the context).

        They are 6 per weight, and 12 * num_heads * head_size * length per attention layer (PaLM, appendix B). An embedding
        lookup multiplies nothing, so an embedding counts only if it is also the head.
        """
        lookup_parameters = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        lookup_parameters += sum(map(self._count_value_embedding, range(self.num_layers)))
        num_ssm_layers = sum(self.mixer(layer) == "ssm" for layer in range(self.num_layers))
        attention_flops = (
            12 * (self.num_layers - num_ssm_layers) * self.num_heads * self.head_size * (length or self.context)
        )
        scan_flops = (
            0 if self.ssm is None else num_ssm_layers * (self.ssm.flops_per_token() - 6 * self.ssm.num_parameters())
        )
        return 6 * (self.num_active_parameters() - lookup_parameters) + attention_flops + scan_flops


def nearest_kv_heads(num_heads: int, preferred: int) -> int:
    """Return the number of key-value heads nearest to `preferred` that divides the query heads."""
    return min(
        (divisor for divisor in range(1, num_heads + 1) if num_heads % divisor == 0),
        key=lambda divisor: abs(divisor - preferred),
    )


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
    # As much work per token as GPT-2 small: three matrices of 768 x 2048 have as many weights as its two of 768 x 3072.
    # Six heads of 128 in place of twelve of 64, because attention kernels reach their best rate at 128.
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

DOCUMENTED_PARAMETERS: dict[str, tuple[int, float]] = {
    "nano": (1024, 1.0e6),
    "verse": (50304, 125e6),
    "stanza": (50304, 1.3e9),
    "epic": (50304, 13e9),
}
"""Size -> (vocabulary, documented number of parameters at that vocabulary, exact within 2 %)."""


def shape_for_size(size: str, *, vocab_size: int, **changes: Any) -> TransformerShape:
    """Return the shape of a named size with a vocabulary; `changes` override fields."""
    if size not in SIZES:
        similar_sizes = find_similar_names(size, SIZES)
        hint = f"did you mean {similar_sizes[0]!r}?" if similar_sizes else "known sizes: " + ", ".join(SIZES)
        raise UsageError(f"model.size: {size!r} is not a size of the language model; {hint}")
    return TransformerShape(**{**SIZES[size], "vocab_size": vocab_size, **changes})
