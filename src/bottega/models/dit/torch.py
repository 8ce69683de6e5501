"""Diffusion transformer (DiT, Peebles and Xie, 2023) over patches in one, two or three dimensions.

Time and class enter every block by adaptive layer norm, zero-initialised; text by cross-attention. For square images and
classes the tensors are those of diffusers' DiTTransformer2DModel.

B batch   N patches   P positions of a patch   D hidden size   H heads   L text tokens   W width of a text token   C channels
grid: the sides of a sample without its channels
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.models.generator.config import EPSILON, TIME_EMBEDDING_SIZE, DiTShape


def sinusoidal_positions(counts: tuple[int, ...], width: int) -> Tensor:
    """Return sinusoidal position embeddings (N, width) of `counts` patches in each dimension.

    Each dimension has an equal part of the width.
    Channels that remain if the width cannot be divided equally are 0.
    """
    axis_width = 2 * (width // (2 * len(counts)))
    rates = 1.0 / 10000 ** (torch.arange(axis_width // 2, dtype=torch.float64) / (axis_width / 2))
    positions = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in counts), indexing="ij")
    # The last dimension comes first, as in the published weights.
    angles = [position.reshape(-1, 1) * rates for position in reversed(positions)]
    embeddings = [torch.cat((angle.sin(), angle.cos()), dim=1) for angle in angles]
    return F.pad(torch.cat(embeddings, dim=1), (0, width - axis_width * len(counts))).float()


def embed_times(time: Tensor) -> Tensor:
    """Return sinusoidal embeddings (B, 256) of times (B) in 0..1,000."""
    half = TIME_EMBEDDING_SIZE // 2
    # diffusers' order of operations: at time 999 another rounding changes an angle by 1e-4.
    exponent = -math.log(10000.0) * torch.arange(half, device=time.device, dtype=torch.float32) / (half - 1)
    angles = time.float()[:, None] * exponent.exp()
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class TimeEmbedding(nn.Module):
    """MLP over the sinusoidal embedding of the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(TIME_EMBEDDING_SIZE, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, time: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(embed_times(time))))


class Attention(nn.Module):
    """Self-attention, or cross-attention to a `context` of width `context_size`."""

    def __init__(self, width: int, num_heads: int, context_size: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(context_size or width, width)
        self.to_v = nn.Linear(context_size or width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        q, k, v = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for y in (self.to_q(x), self.to_k(source), self.to_v(source))
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A DiT block with adaLN-Zero; the unit of gradient checkpointing.

    `extent` is the extent of self-attention: all patches, those of one frame ("space"), or one position over time ("time").
    """

    def __init__(self, shape: DiTShape, *, extent: str) -> None:
        super().__init__()
        width = shape.hidden_size
        self.modulation = nn.Linear(width, 6 * width)
        self.attn = Attention(width, shape.num_heads)
        self.cross = Attention(width, shape.num_heads, shape.context_size) if shape.context_size else None
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.extent, self.num_frames = extent, shape.tokens[0]
        self.dropout = shape.dropout

    def forward(self, x: Tensor, c: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return the new x (B, N, D); c (B, D) embeds time and class, `mask` is broadcast to (B, H, N, L)."""
        modulation = self.modulation(c)[:, None].chunk(6, dim=-1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation
        attended = self._attend(_modulate(x, shift_attn, scale_attn))
        x = _add_gated(x, gate_attn, self._apply_dropout(attended))
        if self.cross is not None:
            x = x + self.cross(layer_norm(x), context, mask)
        h = F.gelu(self.up(_modulate(x, shift_mlp, scale_mlp)), approximate="tanh")
        return _add_gated(x, gate_mlp, self._apply_dropout(self.down(h)))

    def _attend(self, x: Tensor) -> Tensor:
        if self.extent == "all":
            return self.attn(x)
        batch, _, width = x.shape
        grid = x.view(batch, self.num_frames, -1, width)
        if self.extent == "space":
            return self.attn(grid.flatten(0, 1)).view_as(x)
        by_position = grid.transpose(1, 2)
        attended = self.attn(by_position.flatten(0, 1)).view_as(by_position)
        return attended.transpose(1, 2).reshape_as(x)

    def _apply_dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class DiT(nn.Module):
    """Maps a noisy sample, its time and its condition to the objective's prediction, of the sample's shape."""

    place: Tensor
    """Position embeddings (N, D)."""

    def __init__(self, shape: DiTShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.hidden_size
        values_per_patch = math.prod(shape.patch) * shape.channels
        self.embed = nn.Linear(values_per_patch, width)
        self.time = TimeEmbedding(width)
        extents = ("space", "time") if shape.attention == "factorised" else ("all",)
        self.blocks = nn.ModuleList(Block(shape, extent=extents[i % len(extents)]) for i in range(shape.num_layers))
        self.modulation_out = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, values_per_patch)
        self.checkpoint_blocks = False
        self.compiled: Callable[..., Tensor] | None = None
        self.compiled_block: Callable[..., Tensor] | None = None
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
        """Return the prediction for x (B, *grid, C) at time (B) in 0..1,000.

        `vector` (B, D) is the class or vector condition, `context` (B, L, W) the text with `mask` (B, L) true for tokens.
        """
        if self.compiled is not None and self.training:
            return self.compiled(self, x, time, vector, context, mask)
        return self.compute(x, time, vector, context, mask)

    def compute(
        self, x: Tensor, time: Tensor, vector: Tensor | None, context: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Compute the forward; `compile_whole` compiles this function."""
        shape = self.shape
        c = self.time(time)
        c = F.silu(c if vector is None else c + vector)
        h = self.embed(patchify(x, shape.patch)) + self.place
        if torch.is_autocast_enabled(h.device.type) and torch.get_autocast_dtype(h.device.type) is torch.bfloat16:
            h = h.bfloat16()  # halves the traffic between blocks; the norms inside them stay float32
        attention_mask = mask[:, None, None, :] if mask is not None else None
        for block in self.blocks:
            if self.checkpoint_blocks and self.training:
                run_block = functools.partial(self.compiled_block, block) if self.compiled_block is not None else block
                h = checkpoint(run_block, h, c, context, attention_mask, use_reentrant=False, preserve_rng_state=True)
            else:
                h = block(h, c, context, attention_mask)
        shift, scale = self.modulation_out(c)[:, None].chunk(2, dim=-1)
        return unpatchify(self.out(_modulate(h, shift, scale)), shape.patch, shape.grid)

    def compile_whole(self, *, use_cuda_graphs: bool) -> None:
        """Compile the model as one graph; with `use_cuda_graphs` also record it as CUDA graphs.

        At B/4, 32 x 32 and 256 images the GPU needs 25 ms for a step. The host needed 47 ms with one graph per block and
        36 ms with one for all; with CUDA graphs it is idle.

        With gradient checkpointing it is one graph per block. In one graph for all, the compiler is free to recompute blocks
        before their turn: at B/4, 64 x 64 and 128 images that took 7.3 GiB where one block at a time takes 3.5.
        """
        if self.checkpoint_blocks:
            self.compiled_block = torch.compile(Block.forward, dynamic=False)
            return
        mode = "reduce-overhead" if use_cuda_graphs and not self.shape.dropout else None
        self.compiled = torch.compile(DiT.compute, dynamic=False, mode=mode)

    def reset_buffers(self) -> None:
        """Recompute the position embeddings on the device of the weights."""
        device = self.out.weight.device
        place = sinusoidal_positions(self.shape.tokens, self.shape.hidden_size).to(device)
        self.register_buffer("place", place, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DiT:
        super()._apply(fn, recurse)  # `to_empty` leaves buffers undefined
        self.reset_buffers()
        return self


def layer_norm(x: Tensor) -> Tensor:
    """Layer norm in float32 even under autocast, without affine weights: the next layer can represent them."""
    return F.layer_norm(x.float(), x.shape[-1:], eps=EPSILON).to(x.dtype)


def _modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    kernels = _find_kernels(x)
    if kernels is not None:
        return kernels.normalise_and_modulate(x, shift, scale, epsilon=EPSILON)
    return layer_norm(x) * (1 + scale) + shift


def _add_gated(x: Tensor, gate: Tensor, delta: Tensor) -> Tensor:
    kernels = _find_kernels(x)
    return x + gate * delta if kernels is None else kernels.add_gated(x, gate, delta)


def _find_kernels(x: Tensor) -> Any | None:
    """Return the module of Triton kernels, which have no gradients; None on a CPU, in training, while compiling and without Triton."""
    if not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    try:
        from bottega.models.dit import sampling_kernels
    except ImportError:
        return None
    return sampling_kernels


def patchify(x: Tensor, patch: tuple[int, ...]) -> Tensor:
    """Split samples (B, *grid, C) into patches (B, N, P C); patches and the positions in a patch are in row-major order.

    A transpose is needed: a reshape alone would cut rows of pixels, not squares.
    """
    num_axes = len(patch)
    grid = x.shape[1:-1]
    sides = [size for side, patch_side in zip(grid, patch, strict=True) for size in (side // patch_side, patch_side)]
    split = x.reshape(x.shape[0], *sides, x.shape[-1])
    outer, inner = range(1, 2 * num_axes, 2), range(2, 2 * num_axes + 1, 2)
    patches = split.permute(0, *outer, *inner, 2 * num_axes + 1)
    return patches.reshape(x.shape[0], math.prod(patches.shape[1 : num_axes + 1]), -1)


def unpatchify(tokens: Tensor, patch: tuple[int, ...], grid: tuple[int, ...]) -> Tensor:
    """Join patches (B, N, P C) to samples (B, *grid, C), the inverse of `patchify`."""
    num_axes = len(patch)
    counts = [side // patch_side for side, patch_side in zip(grid, patch, strict=True)]
    patches = tokens.reshape(tokens.shape[0], *counts, *patch, -1)
    axis_order = [axis for i in range(num_axes) for axis in (1 + i, 1 + num_axes + i)]
    return patches.permute(0, *axis_order, 2 * num_axes + 1).reshape(tokens.shape[0], *grid, -1)
