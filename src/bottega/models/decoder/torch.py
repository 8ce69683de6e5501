"""A decoder whose parameters carry the names of transformers' Qwen3 (or Llama without QK-norm); a layer may have a state
space in place of attention, and experts in place of its feed-forward.

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
from bottega.models.losses.linear_cross_entropy import linear_cross_entropy
from bottega.models.losses.token_loss import IGNORE_INDEX
from bottega.models.ssm.torch import SSMState, StateSpace

LayerCache = tuple[Tensor, Tensor] | SSMState
"""What one layer keeps of the tokens it has read."""
BlockOutput = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Routing]
LayerRoutings = tuple[Routing, ...]
"""How the tokens of one forward went through each layer of experts."""


@dataclass(frozen=True)
class DecoderCache:
    """What was already read, for each layer, written in place: keys and values [B, K, length, h], or the fixed-size state of
    a state space."""

    layers: tuple[LayerCache, ...]

    @classmethod
    def empty(
        cls,
        shape: TransformerShape,
        *,
        batch: int,
        length: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> DecoderCache:
        size = (batch, shape.num_kv_heads, length or shape.context, shape.head_size)

        def past(layer: int) -> LayerCache:
            if shape.mixer(layer) == "ssm":
                assert shape.ssm is not None, "the shape asks for it"
                return SSMState.empty(shape.ssm, batch, device=device, dtype=dtype)
            return torch.zeros(size, device=device, dtype=dtype), torch.zeros(size, device=device, dtype=dtype)

        return cls(tuple(past(layer) for layer in range(shape.num_layers)))

    def reset(self) -> None:
        """Begin again. Keys and values are overwritten before they are seen, and a state is not."""
        for past in self.layers:
            if isinstance(past, SSMState):
                for tensor in past:
                    tensor.zero_()

    def update_rows(self, part: DecoderCache, rows: Sequence[int], *, length: int) -> None:
        """What some rows have read anew, `length` tokens from position 0."""
        for past, new in zip(self.layers, part.layers, strict=True):
            for mine, theirs in zip(past, new, strict=True):
                if isinstance(past, SSMState):
                    mine[rows] = theirs
                else:
                    mine[rows, :, :length] = theirs


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if torch.compiler.is_compiling():
            # The product is the largest activation of a block, and cheap to make again where its factors are at hand:
            # 3 GiB less at 64 x 1,024 tokens. The compiler drops the second matrix product, which nobody needs.
            return checkpoint(self._mix, gate, up, use_reentrant=False)
        return self._mix(gate, up)

    def _mix(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """The unit of compilation, of gradient checkpointing and of sharding."""

    def __init__(self, shape: TransformerShape, layer: int = 0) -> None:
        super().__init__()
        self.has_ssm = shape.mixer(layer) == "ssm"
        if self.has_ssm:
            assert shape.ssm is not None, "the shape asks for it"
            self.mixer = StateSpace(shape.ssm)
        else:
            self.self_attn = Attention(shape)
        self.mlp: nn.Module | None = None
        if shape.has_experts(layer):
            assert shape.experts is not None, "or it had none"
            self.mlp = Experts(shape.experts)
        elif shape.intermediate_size:
            self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        if self.mlp is not None:
            self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.dropout = shape.dropout
        self.compiled: Callable[..., Any] | None = None

    def forward(self, x: Tensor, added: Tensor, window: SequenceContext, past: LayerCache | None = None) -> Any:
        # Dispatched here rather than by the caller, so that the hooks of sharding run outside the compiled region.
        if self.compiled is not None and self.training and past is None and self._fits_a_graph(x):
            return self.compiled(self, x, added, window)
        return self.compute(x, added, window, past)

    def compute(self, x: Tensor, added: Tensor, window: SequenceContext, past: LayerCache | None = None) -> BlockOutput:
        """The stream and what is still to be added to it: the next block adds it, where the sum and the norm that
        follows are one kernel. With the sum at the end of a block it would be a pass over memory of its own.
        With experts, also how the tokens went through them."""
        x = x + added
        mixed = self._drop(self._mix(self.input_layernorm(x), window, past))
        if self.mlp is None:
            return x, mixed
        x = x + mixed
        if isinstance(self.mlp, Experts):
            inner, routing = self.mlp(self.post_attention_layernorm(x), counted=window.counted)
            return x, self._drop(inner), routing
        return x, self._drop(self.mlp(self.post_attention_layernorm(x)))

    def _fits_a_graph(self, x: Tensor) -> bool:
        return not isinstance(self.mlp, Experts) or self.mlp.experts.can_capture_graph(x)

    def _mix(self, x: Tensor, window: SequenceContext, past: LayerCache | None) -> Tensor:
        if not self.has_ssm:
            return self.self_attn(x, window, past)
        assert past is None or isinstance(past, SSMState)
        mixed, state = self.mixer(x, state=past, lengths=window.lengths, documents=window.documents)
        if past is not None:
            for old, new in zip(past, state, strict=True):
                old.copy_(new)
        return mixed

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Trunk(nn.Module):
    """Embedding, blocks and the last norm: the part of the names that starts with `model.`."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)


class Transformer(nn.Module):
    """Build it on the meta device for a large size; `to_empty` and `bottega.models.initial.initialise` make it real."""

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
        counted: Tensor | None = None,
    ) -> Any:
        """With targets [B, T], the sum of the negative log likelihood over those that are not -100; else logits.

        A model with experts also gives a `Routed`, where there are targets or `counted` [B, T] tells the tokens that count.
        """
        if counted is None and targets is not None and self.shape.experts is not None:
            counted = targets != IGNORE_INDEX
        window = self._window(tokens, documents=documents, cache=cache, position=position, counted=counted)
        hidden, routed = self._through(tokens, window, cache)
        if targets is None:
            answer = self.logits(hidden)
        else:
            answer = linear_cross_entropy(hidden.flatten(0, 1), self.head_weight, targets.flatten())
        return answer if counted is None or not routed else (answer, routed)

    def hidden(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None = None,
        cache: DecoderCache | None = None,
        position: int | Sequence[int] = 0,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """[B, T, D] after the last norm. `position` is where the first token stands: one for all rows, or one each.
        `lengths` tells how many tokens of each row are real, where short ones were filled up on the right: what a cache
        keeps of a row is then that of its last real token."""
        window = self._window(tokens, documents=documents, cache=cache, position=position, lengths=lengths)
        return self._through(tokens, window, cache)[0]

    def _through(
        self, tokens: Tensor, window: SequenceContext, cache: DecoderCache | None
    ) -> tuple[Tensor, LayerRoutings]:
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) is torch.bfloat16:
            # A bfloat16 residual stream halves the traffic between blocks; float16 could overflow there, so it stays.
            x = x.bfloat16()
        if self.shape.dropout:
            x = F.dropout(x, self.shape.dropout, self.training)
        added = 0 * x  # as large as the others and with a gradient, so that one compiled block serves the first one too
        routings: list[Routing] = []
        for i, block in enumerate(self.model.layers):
            if self.checkpoint_blocks and self.training and cache is None:
                found = checkpoint(block, x, added, window, use_reentrant=False, preserve_rng_state=True)
            else:
                found = block(x, added, window, cache.layers[i] if cache is not None else None)
            x, added = found[:2]
            routings += found[2:]
        return self.model.norm(x + added), tuple(routings)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.shape.tie_embeddings else self.lm_head.weight

    def compile_blocks(self) -> None:
        """Compile the training forward of the blocks, once for each kind: nothing else tells one layer from another."""
        compiled = torch.compile(Block.compute, fullgraph=True, dynamic=False)
        for block in self.model.layers:
            assert isinstance(block, Block)
            block.compiled = compiled

    def reset_buffers(self) -> None:
        """The rotary tables again, on the device where the weights now are. They are in no state dict."""
        cos, sin = compute_rotary_tables(self.shape, self.model.norm.weight.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        # `to_empty` leaves buffers undefined and `to(bfloat16)` would round the angles, so both recompute them.
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    def _window(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None,
        cache: DecoderCache | None,
        position: int | Sequence[int],
        lengths: Sequence[int] | None = None,
        counted: Tensor | None = None,
    ) -> SequenceContext:
        assert documents is None or cache is None, "documents are for training, a cache is for generation"
        # What no layer asks for is left out, so that plain transformers are compiled as if it did not exist.
        read: dict[str, Any] = {"counted": counted if self.shape.experts is not None else None}
        if self.shape.has_ssm:
            read["documents"] = documents
            read["lengths"] = torch.tensor(lengths, device=tokens.device) if lengths is not None else None
        if not self.shape.has_attention:
            return SequenceContext(self.cos, self.sin, **read)  # a state knows no position, and so no last one
        length, device = tokens.shape[1], tokens.device
        starts = [position] if isinstance(position, int) else list(position)
        start, stop = starts[0], max(starts) + length
        assert stop <= self.shape.context, f"{stop} tokens exceed the context of {self.shape.context}"
        if len(set(starts)) > 1:
            first = torch.tensor(starts, device=device)
            places = first[:, None] + torch.arange(length, device=device)
            mask = torch.arange(stop, device=device) <= places[:, None, :, None]
            return SequenceContext(
                self.cos[places][:, None], self.sin[places][:, None], mask, start=first, stop=stop, **read
            )
        cos, sin = self.cos[start:stop], self.sin[start:stop]
        if documents is not None:
            # FlexAttention skips the blocks between documents, but knows no dropout.
            flex = device.type == "cuda" and not (self.training and self.shape.dropout)
            return SequenceContext(cos, sin, build_document_mask(documents, flex=flex), stop=stop, **read)
        if start and length > 1:
            mask = torch.ones(length, stop, dtype=torch.bool, device=device).tril(diagonal=start)
            return SequenceContext(cos, sin, mask, start=start, stop=stop, **read)
        return SequenceContext(cos, sin, causal=length > 1, start=start, stop=stop, **read)


def initialise_decoder(model: Transformer, seed: int, *, residual_layers: int) -> None:
    """Set every parameter by its name, and which experts sit out at first."""
    initialise(model, seed, residual_layers=residual_layers)
    drop_initial_experts(model, seed)
