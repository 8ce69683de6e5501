"""A diffusion transformer (Peebles and Xie, 2023) over patches in one, two or three directions.

Adaptive normalisation carries time and condition into every block and begins as the identity; text is looked at by
cross-attention. With square pictures and classes its tensors are those of diffusers' DiTTransformer2DModel.

B batch   N patches   D hidden size   H heads   L text tokens   C channels
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.core.noise import numpy_generator
from bottega.models.dit.patches import patchify, unpatchify
from bottega.models.generator.config import DiTShape

FREQUENCIES = 256
"""Numbers that stand for a time before it is embedded."""
EPSILON = 1e-6


def sinusoidal_positions(counts: tuple[int, ...], width: int) -> Tensor:
    """Sines and cosines of each patch's place, [N, width], an equal part of the width for each direction; what three
    directions cannot share equally stays 0."""
    part = 2 * (width // (2 * len(counts)))
    rates = 1.0 / 10000 ** (torch.arange(part // 2, dtype=torch.float64) / (part / 2))
    places = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in counts), indexing="ij")
    # The last direction comes first, as in the published weights.
    angles = [place.reshape(-1, 1) * rates for place in reversed(places)]
    parts = [torch.cat((angle.sin(), angle.cos()), dim=1) for angle in angles]
    return F.pad(torch.cat(parts, dim=1), (0, width - part * len(counts))).float()


def time_frequencies(time: Tensor) -> Tensor:
    """Times of 0 to 1,000, [B], as [B, 256] numbers."""
    half = FREQUENCIES // 2
    # In diffusers' order of operations: at time 999 one rounding more is 1e-4 of an angle.
    exponent = -math.log(10000.0) * torch.arange(half, device=time.device, dtype=torch.float32) / (half - 1)
    angles = time.float()[:, None] * exponent.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(FREQUENCIES, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(time_frequencies(time))))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(context or width, width)
        self.to_v = nn.Linear(context or width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        seen = x if context is None else context
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.to_q(x), self.to_k(seen), self.to_v(seen))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """The unit of gradient checkpointing. `along` says over which patches attention looks."""

    def __init__(self, shape: DiTShape, *, along: str) -> None:
        super().__init__()
        width = shape.hidden_size
        self.modulation = nn.Linear(width, 6 * width)
        self.attn = Attention(width, shape.num_heads)
        self.cross = Attention(width, shape.num_heads, shape.context_size) if shape.context_size else None
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.along, self.frames = along, shape.tokens[0]
        self.dropout = shape.dropout

    def forward(self, x: Tensor, c: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        changes = self.modulation(c)[:, None].chunk(6, dim=-1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = changes
        x = x + gate_attn * self._drop(self._attend(_modulated(x, shift_attn, scale_attn)))
        if self.cross is not None:
            x = x + self.cross(layer_norm(x), context, mask)
        h = F.gelu(self.up(_modulated(x, shift_mlp, scale_mlp)), approximate="tanh")
        return x + gate_mlp * self._drop(self.down(h))

    def _attend(self, x: Tensor) -> Tensor:
        if self.along == "all":
            return self.attn(x)
        batch, _, width = x.shape
        grid = x.view(batch, self.frames, -1, width)
        if self.along == "space":
            return self.attn(grid.flatten(0, 1)).view_as(x)
        turned = grid.transpose(1, 2)
        mixed = self.attn(turned.flatten(0, 1)).view_as(turned)
        return mixed.transpose(1, 2).reshape_as(x)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class DiT(nn.Module):
    """From a noisy sample, its time and its condition to the objective's target, of the sample's own shape."""

    place: Tensor

    def __init__(self, shape: DiTShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.hidden_size
        values = math.prod(shape.patch) * shape.channels
        self.embed = nn.Linear(values, width)
        self.time = TimeEmbedding(width)
        turns = ("space", "time") if shape.attention == "factorised" else ("all",)
        self.blocks = nn.ModuleList(Block(shape, along=turns[i % len(turns)]) for i in range(shape.num_layers))
        self.modulation_out = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, values)
        self.checkpoint_blocks = False
        self.compiled: Callable[..., Tensor] | None = None
        self.reset_buffers()

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        *,
        vector: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """x [B, g..., C], time [B] from 0 to 1,000, vector [B, D], context [B, L, W] with mask [B, L] of what is text."""
        if self.compiled is not None and self.training:
            return self.compiled(self, x, time, vector, context, mask)
        return self.compute(x, time, vector, context, mask)

    def compute(
        self, x: Tensor, time: Tensor, vector: Tensor | None, context: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        shape = self.shape
        c = self.time(time)
        c = F.silu(c if vector is None else c + vector)
        h = self.embed(patchify(x, shape.patch)) + self.place
        if torch.is_autocast_enabled(h.device.type) and torch.get_autocast_dtype(h.device.type) is torch.bfloat16:
            h = h.bfloat16()  # halves the traffic between blocks; the norms inside them stay float32
        looks = mask[:, None, None, :] if mask is not None else None
        for block in self.blocks:
            if self.checkpoint_blocks and self.training:
                h = checkpoint(block, h, c, context, looks, use_reentrant=False, preserve_rng_state=True)
            else:
                h = block(h, c, context, looks)
        shift, scale = self.modulation_out(c)[:, None].chunk(2, dim=-1)
        return unpatchify(self.out(_modulated(h, shift, scale)), shape.patch, shape.grid)

    def compile_whole(self, *, graphs: bool) -> None:
        """All of it as one graph; with `graphs` its kernels are also recorded once and replayed.

        At B/4, 32 x 32 and 256 images the GPU is done with a step in 25 ms. One graph for each block kept the host busy
        for 47 ms, one for all for 36; replayed, the host is idle.
        """
        mode = "reduce-overhead" if graphs and not self.shape.dropout else None
        self.compiled = torch.compile(DiT.compute, dynamic=False, mode=mode)

    def reset_buffers(self) -> None:
        device = self.out.weight.device
        place = sinusoidal_positions(self.shape.tokens, self.shape.hidden_size).to(device)
        self.register_buffer("place", place, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DiT:
        super()._apply(fn, recurse)  # `to_empty` leaves buffers undefined
        self.reset_buffers()
        return self


ZERO_INITIALISED = (".modulation.weight", "modulation_out.weight", ".cross.to_out.weight", "out.weight")
"""What begins at nothing: each block is the identity, and the first prediction is 0."""


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Glorot's uniform for matrices, a small normal for embeddings, zeros for biases and for what must begin silent."""
    if name.endswith(".bias") or (name.endswith(ZERO_INITIALISED) and not name.endswith("attn.to_out.weight")):
        return np.zeros(shape, np.float32)
    draw = numpy_generator(seed, name)
    if len(shape) < 2 or "embedding" in name or ".time." in f".{name}":
        return 0.02 * draw.standard_normal(shape, dtype=np.float32)
    limit = math.sqrt(6 / (shape[0] + math.prod(shape[1:])))
    return draw.uniform(-limit, limit, shape).astype(np.float32)


def layer_norm(x: Tensor) -> Tensor:
    """In float32 whatever the precision around it, and without weights of its own: what follows has them."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=EPSILON).to(x.dtype)


def _modulated(x: Tensor, shift: Any, scale: Any) -> Tensor:
    return layer_norm(x) * (1 + scale) + shift
