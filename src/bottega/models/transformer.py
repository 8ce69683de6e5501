"""A decoder-only transformer whose parameters carry the names of transformers' Qwen3 (or Llama without QK-norm).

B batch   T tokens   S keys a query may see   D hidden size   H query heads   K key-value heads   h head size   V vocabulary
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from bottega.models.linear_cross_entropy import linear_cross_entropy
from bottega.schema.transformer import TransformerShape

Mask = Tensor | BlockMask | None
"""True where a query may look; None is plain causal attention, which has the fastest kernels."""


@dataclass(frozen=True)
class Cache:
    """Keys and values of what was already read, one pair of [B, K, length, h] for each layer, written in place."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def empty(
        cls,
        shape: TransformerShape,
        *,
        batch: int,
        length: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Cache:
        size = (batch, shape.num_kv_heads, length or shape.context, shape.head_size)

        def zeros() -> Tensor:
            return torch.zeros(size, device=device, dtype=dtype)

        return cls(tuple((zeros(), zeros()) for _ in range(shape.num_layers)))


@dataclass(frozen=True)
class Window:
    """Where the tokens of one call stand: the rotation of each, what each may look at, and what was read before.

    `start` is the position of the first token: an integer for all rows, or a tensor [B] when rows have read unequally.
    """

    cos: Tensor
    sin: Tensor
    mask: Mask = None
    causal: bool = True
    start: int | Tensor = 0
    stop: int = 0


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 whatever the precision around it."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.epsilon).to(x.dtype)


def rotary(shape: TransformerShape, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, [context, h], the two halves of a head turning together."""
    exponents = torch.arange(0, shape.head_size, 2, device=device, dtype=torch.float32) / shape.head_size
    positions = torch.arange(shape.context, device=device, dtype=torch.float32)
    angles = positions[:, None] * (1.0 / shape.rope_theta**exponents)[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask, dynamic=False)


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, causal: bool, dropout: float) -> Tensor:
    """q [B, H, T, h] over k, v [B, K, S, h]."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Uncompiled, FlexAttention would materialise the scores; inside a compiled block it is already fused.
        flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, enable_gqa=grouped
    )


def document_mask(documents: Tensor, *, flex: bool) -> Mask:
    """Causal, and only within the same document."""
    length = documents.shape[1]
    if not flex:
        order = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
        return (order & (documents[:, :, None] == documents[:, None, :]))[:, None]

    def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return _compiled_block_mask()(same_document, documents.shape[0], None, length, length, device=documents.device)


class Attention(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.qk_norm = shape.qk_norm
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_size, shape.norm_epsilon)
            self.k_norm = RMSNorm(shape.head_size, shape.norm_epsilon)
        self.head_size = shape.head_size
        self.dropout = shape.dropout

    def forward(self, x: Tensor, window: Window, past: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        # The angles are float32, so the rotation is too; half precision would blur positions that are far apart.
        q, k = rotate(q, window.cos, window.sin).to(v.dtype), rotate(k, window.cos, window.sin).to(v.dtype)
        if past is not None:
            k, v = _remember(past, k, v, window)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(q, k, v, mask=window.mask, causal=window.causal, dropout=dropout)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _remember(past: tuple[Tensor, Tensor], k: Tensor, v: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Write the new keys and values behind the old; give back all that were read so far."""
    for store, new in zip(past, (k, v), strict=True):
        if isinstance(window.start, int):
            store[:, :, window.start : window.stop] = new
        else:
            rows = torch.arange(len(new), device=new.device)[:, None]
            places = window.start[:, None] + torch.arange(new.shape[2], device=new.device)
            store[rows, :, places] = new.transpose(1, 2).to(store.dtype)
    return past[0][:, :, : window.stop].to(v.dtype), past[1][:, :, : window.stop].to(v.dtype)


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

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.dropout = shape.dropout
        self.compiled: Callable[..., tuple[Tensor, Tensor]] | None = None

    def forward(
        self, x: Tensor, added: Tensor, window: Window, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        # Dispatched here rather than by the caller, so that the hooks of sharding run outside the compiled region.
        if self.compiled is not None and self.training and past is None:
            return self.compiled(self, x, added, window)
        return self.compute(x, added, window, past)

    def compute(
        self, x: Tensor, added: Tensor, window: Window, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The stream and what is still to be added to it: the next block adds it, where the sum and the norm that
        follows are one kernel. With the sum at the end of a block it would be a pass over memory of its own."""
        x = x + added
        x = x + self._drop(self.self_attn(self.input_layernorm(x), window, past))
        return x, self._drop(self.mlp(self.post_attention_layernorm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Trunk(nn.Module):
    """Embedding, blocks and the last norm: the part of the names that starts with `model.`."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
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
        cache: Cache | None = None,
        position: int | Sequence[int] = 0,
    ) -> Tensor:
        """With targets [B, T], the sum of the negative log likelihood over those that are not -100; else logits."""
        hidden = self.hidden(tokens, documents=documents, cache=cache, position=position)
        if targets is None:
            return self.logits(hidden)
        return linear_cross_entropy(hidden.flatten(0, 1), self.head_weight, targets.flatten())

    def hidden(
        self,
        tokens: Tensor,
        *,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        position: int | Sequence[int] = 0,
    ) -> Tensor:
        """[B, T, D] after the last norm. `position` is where the first token stands: one for all rows, or one each."""
        window = self._window(tokens, documents=documents, cache=cache, position=position)
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) is torch.bfloat16:
            # A bfloat16 residual stream halves the traffic between blocks; float16 could overflow there, so it stays.
            x = x.bfloat16()
        if self.shape.dropout:
            x = F.dropout(x, self.shape.dropout, self.training)
        added = 0 * x  # as large as the others and with a gradient, so that one compiled block serves the first one too
        for i, block in enumerate(self.model.layers):
            if self.checkpoint_blocks and self.training and cache is None:
                x, added = checkpoint(block, x, added, window, use_reentrant=False, preserve_rng_state=True)
            else:
                x, added = block(x, added, window, cache.layers[i] if cache is not None else None)
        return self.model.norm(x + added)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.shape.tie_embeddings else self.lm_head.weight

    def compile_blocks(self) -> None:
        """Compile the training forward of the blocks, once for all: no attribute tells one layer from another."""
        compiled = torch.compile(Block.compute, fullgraph=True, dynamic=False)
        for block in self.model.layers:
            assert isinstance(block, Block)
            block.compiled = compiled

    def reset_buffers(self) -> None:
        """The rotary tables again, on the device where the weights now are. They are in no state dict."""
        cos, sin = rotary(self.shape, self.model.norm.weight.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Transformer:
        # `to_empty` leaves buffers undefined and `to(bfloat16)` would round the angles, so both recompute them.
        super()._apply(fn, recurse)
        self.reset_buffers()
        return self

    def _window(
        self, tokens: Tensor, *, documents: Tensor | None, cache: Cache | None, position: int | Sequence[int]
    ) -> Window:
        length, device = tokens.shape[1], tokens.device
        starts = [position] if isinstance(position, int) else list(position)
        start, stop = starts[0], max(starts) + length
        assert stop <= self.shape.context, f"{stop} tokens exceed the context of {self.shape.context}"
        assert documents is None or cache is None, "documents are for training, a cache is for generation"
        if len(set(starts)) > 1:
            first = torch.tensor(starts, device=device)
            places = first[:, None] + torch.arange(length, device=device)
            mask = torch.arange(stop, device=device) <= places[:, None, :, None]
            return Window(self.cos[places][:, None], self.sin[places][:, None], mask, start=first, stop=stop)
        cos, sin = self.cos[start:stop], self.sin[start:stop]
        if documents is not None:
            # FlexAttention skips the blocks between documents, but knows no dropout.
            flex = device.type == "cuda" and not (self.training and self.shape.dropout)
            return Window(cos, sin, document_mask(documents, flex=flex), stop=stop)
        if start and length > 1:
            mask = torch.ones(length, stop, dtype=torch.bool, device=device).tril(diagonal=start)
            return Window(cos, sin, mask, start=start, stop=stop)
        return Window(cos, sin, causal=length > 1, start=start, stop=stop)
