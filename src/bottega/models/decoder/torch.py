"""Decoder-only language model with the parameter names of transformers' Qwen3 (or Llama without QK-norm).

A layer may have a state space in place of attention, and experts in place of its MLP.

B batch   T tokens   D hidden size   K key-value heads   h head size   V vocabulary   L layers with experts   E experts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.models.attention import Attention, RMSNorm, SequenceContext, build_document_mask, compute_rotary_tables
from bottega.models.decoder.config import TransformerShape
from bottega.models.experts.torch import Experts, Routing, drop_initial_experts
from bottega.models.initial import initialise
from bottega.models.losses import IGNORE_INDEX
from bottega.models.losses.linear_cross_entropy import cap_logits, linear_cross_entropy
from bottega.models.ssm.torch import SSMState, StateSpace

LayerCache = tuple[Tensor, Tensor] | SSMState
"""Keys and values of one layer, or the state of a state space."""
BlockOutput = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Routing]
LayerRoutings = tuple[Routing, ...]
"""Routing of one forward, for each layer with experts."""
MAX_DENSE_MASK = 1 << 26
"""Entries of the largest mask over documents that an eager model holds as a matrix: 64 sequences of 1,024 tokens. Each layer
keeps it for the backward pass, in bf16 128 MiB."""


@dataclass(frozen=True)
class DecoderCache:
    """Cache of all layers for generation, updated in place: keys and values (B, K, length, h) or states of fixed size."""

    layers: tuple[LayerCache, ...]

    @classmethod
    def empty(
        cls,
        shape: TransformerShape,
        *,
        batch_size: int,
        length: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> DecoderCache:
        """Return an empty cache for `length` tokens (default: the context)."""
        size = (batch_size, shape.num_kv_heads, length or shape.context, shape.head_size)

        def build_layer_cache(layer: int) -> LayerCache:
            if shape.mixer(layer) == "ssm":
                assert shape.ssm is not None, "checked by the shape"
                return SSMState.empty(shape.ssm, batch_size, device=device, dtype=dtype)
            return torch.zeros(size, device=device, dtype=dtype), torch.zeros(size, device=device, dtype=dtype)

        return cls(tuple(build_layer_cache(layer) for layer in range(shape.num_layers)))

    @property
    def num_rows(self) -> int:
        """Number of rows, B."""
        return len(self.layers[0][0])

    @property
    def length(self) -> int:
        """Number of positions for keys and values; 0 if no layer has attention."""
        return max((layer[0].shape[2] for layer in self.layers if not isinstance(layer, SSMState)), default=0)

    def reset(self) -> None:
        """Zero the states of state spaces; keys and values need no reset, as they are overwritten before they are used."""
        for cache in self.layers:
            if isinstance(cache, SSMState):
                for tensor in cache:
                    tensor.zero_()

    def update_rows(self, prefill_cache: DecoderCache, rows: Sequence[int], *, length: int) -> None:
        """Copy `prefill_cache`, a cache of `length` tokens from position 0, into the given rows."""
        for cache, update in zip(self.layers, prefill_cache.layers, strict=True):
            for target, source in zip(cache, update, strict=True):
                if isinstance(cache, SSMState):
                    target[rows] = source
                else:
                    target[rows, :, :length] = source


class MLP(nn.Module):
    """Feed-forward with SwiGLU (Shazeer, 2020), or without a gate and with squared ReLU (So et al., 2021)."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate_proj: nn.Linear | None = None
        if shape.activation == "swiglu":
            self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = None if self.gate_proj is None else self.gate_proj(x), self.up_proj(x)
        if torch.compiler.is_compiling():
            # The product is the largest activation of a block and cheap to recompute from its factors: 3 GiB less at
            # 64 x 1,024 tokens. The compiler removes the unused second matrix product.
            return checkpoint(self._project_down, gate, up, use_reentrant=False)
        return self._project_down(gate, up)

    def _project_down(self, gate: Tensor | None, up: Tensor) -> Tensor:
        return self.down_proj(F.relu(up).square() if gate is None else F.silu(gate) * up)


class Block(nn.Module):
    """A decoder layer; the unit of compilation, gradient checkpointing and sharding."""

    def __init__(self, shape: TransformerShape, layer: int = 0) -> None:
        super().__init__()
        self.has_ssm = shape.mixer(layer) == "ssm"
        if self.has_ssm:
            assert shape.ssm is not None, "checked by the shape"
            self.mixer = StateSpace(shape.ssm)
        else:
            self.self_attn = Attention(shape, has_value_embedding=shape.has_value_embedding(layer))
        self.mlp: nn.Module | None = None
        if shape.has_experts(layer):
            assert shape.experts is not None, "checked by has_experts"
            self.mlp = Experts(shape.experts)
        elif shape.intermediate_size:
            self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        if self.mlp is not None:
            self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.dropout = shape.dropout
        self.compiled: Callable[..., Any] | None = None

    def forward(self, x: Tensor, delta: Tensor, sequence: SequenceContext, cache: LayerCache | None = None) -> Any:
        """Call `compute`, in its compiled version if there is one for this input."""
        # Dispatched here rather than by the caller, so that FSDP's hooks run outside the compiled region.
        if self.compiled is not None and self.training and cache is None and self._can_capture_graph(x):
            return self.compiled(self, x, delta, sequence)
        return self.compute(x, delta, sequence, cache)

    def compute(
        self, x: Tensor, delta: Tensor, sequence: SequenceContext, cache: LayerCache | None = None
    ) -> BlockOutput:
        """Return the residual stream, the output still to be added to it (`delta`), and with experts their routing.

        The next block adds `delta`, where addition and norm fuse into one kernel; at the end of a block the
        addition would be a separate pass over memory.
        """
        x = x + delta
        mixed = self._apply_dropout(self._mix_tokens(self.input_layernorm(x), sequence, cache))
        if self.mlp is None:
            return x, mixed
        x = x + mixed
        if isinstance(self.mlp, Experts):
            expert_output, routing = self.mlp(self.post_attention_layernorm(x), token_mask=sequence.token_mask)
            return x, self._apply_dropout(expert_output), routing
        return x, self._apply_dropout(self.mlp(self.post_attention_layernorm(x)))

    def _can_capture_graph(self, x: Tensor) -> bool:
        return not isinstance(self.mlp, Experts) or self.mlp.experts.can_capture_graph(x)

    def _mix_tokens(self, x: Tensor, sequence: SequenceContext, cache: LayerCache | None) -> Tensor:
        if not self.has_ssm:
            return self.self_attn(x, sequence, cache)
        assert cache is None or isinstance(cache, SSMState)
        mixed, state = self.mixer(x, state=cache, lengths=sequence.lengths, documents=sequence.documents)
        if cache is not None:
            for old, new in zip(cache, state, strict=True):
                old.copy_(new)
        return mixed

    def _apply_dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Trunk(nn.Module):
    """Embedding, blocks and final norm: the parameters whose names start with `model.`."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)


class Transformer(nn.Module):
    """The language model. Build large ones on the meta device, then `to_empty` and `initialise_decoder`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        if not shape.tie_embeddings:
            self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.checkpoint_blocks = False
        self.reset_buffers()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        cache: DecoderCache | None = None,
        position: int | Sequence[int] = 0,
        token_mask: Tensor | None = None,
    ) -> Any:
        """Return logits (B, T, V); with targets (B, T), the summed negative log likelihood of the targets that are not -100.

        `documents` (B, T) are document ids, between which no information passes; `cache` and `position` are as in `hidden`.
        A model with experts also returns `LayerRoutings` if `targets` or `token_mask` is given; `token_mask` (B, T) selects
        the tokens that routing statistics count (default: those with a target).
        """
        if token_mask is None and targets is not None and self.shape.experts is not None:
            token_mask = targets != IGNORE_INDEX
        sequence = self._build_sequence_context(
            tokens, documents=documents, cache=cache, position=position, token_mask=token_mask
        )
        hidden, routings = self._run_blocks(tokens, sequence, cache)
        if targets is None:
            output = self.logits(hidden)
        else:
            output = linear_cross_entropy(
                hidden.flatten(0, 1), self.head_weight, targets.flatten(), softcap=self.shape.logit_softcap
            )
        return output if token_mask is None or not routings else (output, routings)

    def hidden(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None = None,
        cache: DecoderCache | None = None,
        position: int | Sequence[int] = 0,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return hidden states (B, T, D) after the final norm.

        `cache` holds the earlier tokens and is updated in place. `position` is the position of the first token: one for all
        rows, or one per row. `lengths` are the numbers of tokens of each row, not counting the padding on its right; the
        cache then holds the state after the last token that is not padding.
        """
        sequence = self._build_sequence_context(
            tokens, documents=documents, cache=cache, position=position, lengths=lengths
        )
        return self._run_blocks(tokens, sequence, cache)[0]

    def _run_blocks(
        self, tokens: Tensor, sequence: SequenceContext, cache: DecoderCache | None
    ) -> tuple[Tensor, LayerRoutings]:
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) is torch.bfloat16:
            # A bfloat16 residual stream halves the memory traffic between blocks; float16 could overflow.
            x = x.bfloat16()
        if self.shape.dropout:
            x = F.dropout(x, self.shape.dropout, self.training)
        # Zeros rather than None: with inputs like those of later blocks, the first block uses the same compiled graph.
        delta = 0 * x
        routings: list[Routing] = []
        for i, block in enumerate(self.model.layers):
            if self.checkpoint_blocks and self.training and cache is None:
                output = checkpoint(block, x, delta, sequence, use_reentrant=False, preserve_rng_state=True)
            else:
                output = block(x, delta, sequence, cache.layers[i] if cache is not None else None)
            x, delta = output[:2]
            routings += output[2:]
        return self.model.norm(x + delta), tuple(routings)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., D)."""
        return cap_logits(F.linear(hidden, self.head_weight), self.shape.logit_softcap)

    @property
    def head_weight(self) -> Tensor:
        """Weight (V, D) of the head; with tied embeddings it is the weight of the embedding."""
        return self.model.embed_tokens.weight if self.shape.tie_embeddings else self.lm_head.weight

    def compile_blocks(self) -> None:
        """Compile the training forward of the blocks; layers of the same kind share one graph."""
        compiled = torch.compile(Block.compute, fullgraph=True, dynamic=False)
        for block in self.model.layers:
            assert isinstance(block, Block)
            block.compiled = compiled

    @property
    def is_compiled(self) -> bool:
        """Whether the training forward of the blocks is compiled."""
        return any(getattr(block, "compiled", None) is not None for block in self.model.layers)

    def reset_buffers(self) -> None:
        """Recompute the rotary tables on the device of the weights; they are not in the state dict."""
        cos, sin = compute_rotary_tables(self.shape, self.model.norm.weight.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        # `to_empty` leaves buffers undefined and `to(bfloat16)` would round the angles, so both recompute them.
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    def _build_sequence_context(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None,
        cache: DecoderCache | None,
        position: int | Sequence[int],
        lengths: Sequence[int] | None = None,
        token_mask: Tensor | None = None,
    ) -> SequenceContext:
        assert documents is None or cache is None, "documents are for training, a cache is for generation"
        # Fields that no layer uses stay None: if they varied, a plain transformer would be compiled again.
        fields: dict[str, Any] = {"token_mask": token_mask if self.shape.experts is not None else None}
        fields["tokens"] = tokens if self.shape.value_embeddings else None
        if self.shape.has_ssm:
            fields["documents"] = documents
            fields["lengths"] = torch.tensor(lengths, device=tokens.device) if lengths is not None else None
        if not self.shape.has_attention:
            return SequenceContext(self.cos, self.sin, **fields)  # state spaces have no positions and no maximum length
        length, device = tokens.shape[1], tokens.device
        starts = [position] if isinstance(position, int) else list(position)
        start, stop = starts[0], max(starts) + length
        assert stop <= self.shape.context, f"{stop} tokens exceed the context of {self.shape.context}"
        if len(set(starts)) > 1:
            row_starts = torch.tensor(starts, device=device)
            positions = row_starts[:, None] + torch.arange(length, device=device)
            mask = torch.arange(stop, device=device) <= positions[:, None, :, None]
            return SequenceContext(
                self.cos[positions][:, None], self.sin[positions][:, None], mask, start=row_starts, stop=stop, **fields
            )
        cos, sin = self.cos[start:stop], self.sin[start:stop]
        if documents is not None:
            # FlexAttention skips the blocks between documents, but has no dropout, and must be compiled, which takes seconds.
            is_worth_compiling = self.is_compiled or documents.numel() * length > MAX_DENSE_MASK
            use_flex = device.type == "cuda" and is_worth_compiling and not (self.training and self.shape.dropout)
            return SequenceContext(cos, sin, build_document_mask(documents, use_flex=use_flex), stop=stop, **fields)
        if start and length > 1:
            mask = torch.ones(length, stop, dtype=torch.bool, device=device).tril(diagonal=start)
            return SequenceContext(cos, sin, mask, start=start, stop=stop, **fields)
        return SequenceContext(cos, sin, is_causal=length > 1, start=start, stop=stop, **fields)


def initialise_decoder(model: Transformer, seed: int, *, residual_layers: int, zero_residual: bool = False) -> None:
    """Initialise every parameter from the seed and its name, and draw the experts that are dropped in the first step."""
    initialise(model, seed, residual_layers=residual_layers, zero_residual=zero_residual)
    drop_initial_experts(model, seed)
