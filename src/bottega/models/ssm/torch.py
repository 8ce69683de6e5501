"""State-space layer (Mamba-2, Dao & Gu 2024): mixes tokens through a state of fixed size.

Parameters have the names of transformers' `Mamba2Mixer`, except that A_log, D and dt_bias are in the submodule `dynamics`:
models share whole submodules.

B batch   T tokens   D hidden size   H heads   P head size   G groups   N state size
E channels of the convolution   W its width
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.noise import numpy_generator
from bottega.models.ssm.config import SSMShape
from bottega.models.ssm.scan import scan_chunked, scan_step

DECAY_RATE_RANGE = (1.0, 16.0)
"""Range of the initial rates -A of the heads: some forget within a few tokens, some remember thousands."""


def _has_kernels(shape: SSMShape) -> bool:
    """Return whether there are kernels for this shape: on a GPU, if Triton is installed."""
    if not torch.cuda.is_available():
        return False
    try:
        from bottega.models.ssm import scan_kernel  # noqa: F401
        from bottega.models.ssm.kernel import MAX_CHANNELS, MAX_CONV_WIDTH
    except ImportError:
        return False
    return shape.inner_size <= MAX_CHANNELS and shape.conv_size <= MAX_CONV_WIDTH


class SSMState(NamedTuple):
    """Recurrent state of a layer."""

    conv: Tensor
    """The last inputs of the convolution, (B, E, W - 1)."""
    ssm: Tensor
    """(B, H, P, N), float32 or better: in half precision, small additions would be lost over 100,000 tokens."""

    @classmethod
    def empty(
        cls, shape: SSMShape, batch: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> SSMState:
        """Return the state before the first token."""
        exact = torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros(batch, shape.conv_channels, shape.conv_size - 1, device=device, dtype=dtype),
            torch.zeros(batch, shape.num_heads, shape.head_size, shape.state_size, device=device, dtype=exact),
        )


class Dynamics(nn.Module):
    """Per-head parameters: decay rate, skip connection around the state, and time-step bias."""

    def __init__(self, num_heads: int, *, time_step_min: float, time_step_max: float) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(num_heads))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(num_heads))
        self.time_step_min, self.time_step_max = time_step_min, time_step_max

    def initial_value(self, kind: str, name: str, seed: int) -> np.ndarray:
        """Return an initial parameter as in Mamba-2: log-uniform time steps, uniform rates, and D of 1."""
        num_heads = self.D.shape[0]
        if kind == "D":
            return np.ones(num_heads, np.float32)
        uniform = numpy_generator(seed, name).random(num_heads)
        if kind == "A_log":
            return np.log(DECAY_RATE_RANGE[0] + (DECAY_RATE_RANGE[1] - DECAY_RATE_RANGE[0]) * uniform).astype(
                np.float32
            )
        low, high = math.log(self.time_step_min), math.log(self.time_step_max)
        steps = np.exp(low + (high - low) * uniform)
        return (steps + np.log(-np.expm1(-steps))).astype(np.float32)  # the inverse of softplus


class CausalConvolution(nn.Module):
    """Causal depthwise convolution: each channel's weighted sum of its last W values.

    Written as W products of shifted sequences, which compile to one kernel in the memory order of the projections. A
    convolution of torch would need a transpose, and cuDNN's is slow with one channel per group.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))
        self.bias = nn.Parameter(torch.zeros(channels))

    def initial_value(self, kind: str, name: str, seed: int) -> np.ndarray:
        """Return an initial parameter as torch does for a convolution: uniform within 1 / sqrt(W)."""
        bound = 1.0 / math.sqrt(self.weight.shape[-1])
        shape = tuple(self.weight.shape if kind == "weight" else self.bias.shape)
        return numpy_generator(seed, name).uniform(-bound, bound, shape).astype(np.float32)

    def forward(self, x: Tensor, *, segments: Tensor | None) -> Tensor:
        """Return (B, T, E) for x (B, W - 1 + T, E), which starts with earlier values.

        With `segments` (B, T), a token reads only values of its own segment.
        """
        width = self.weight.shape[-1]
        length = x.shape[1] - width + 1
        total: Tensor = self.bias
        for k in range(width):
            term = self.weight[:, 0, k] * x[:, k : k + length]
            offset = width - 1 - k
            if segments is not None and offset:
                is_same_segment = F.pad(segments, (offset, 0), value=-1)[:, :length] == segments
                term = term * is_same_segment[..., None]
            total = total + term
        return total

    def forward_fused(self, x: Tensor, channels: slice, segments: Tensor | None) -> Tensor:
        """Return the SiLU of the convolution of some channels, without earlier values, in one kernel."""
        return torch.ops.bottega.conv_silu(x, self.weight[channels], self.bias[channels], segments)


class GatedRMSNorm(nn.Module):
    """RMS norm of x * silu(gate) over all channels, in float32 at any precision.

    As in transformers, it is not computed per group.
    """

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return RMSNorm(x * SiLU(gate)), in at least float32."""
        exact = torch.promote_types(x.dtype, torch.float32)
        gated = x.to(exact) * F.silu(gate.to(exact))
        return F.rms_norm(gated, self.weight.shape, self.weight.to(exact), self.epsilon)

    def forward_fused(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the same as `forward`, in x's dtype, computed by one kernel."""
        rows = (x.flatten(0, 1), gate.flatten(0, 1))
        return torch.ops.bottega.gated_norm(*rows, self.weight, self.epsilon)[0].view_as(x)


class StateSpace(nn.Module):
    """State-space sequence mixer, used in place of attention. It has no position embeddings and no maximum length."""

    def __init__(self, shape: SSMShape) -> None:
        super().__init__()
        self.shape = shape
        self.has_kernels = _has_kernels(shape)
        in_proj_size = shape.inner_size + shape.conv_channels + shape.num_heads
        self.in_proj = nn.Linear(shape.hidden_size, in_proj_size, bias=False)
        self.conv1d = CausalConvolution(shape.conv_channels, shape.conv_size)
        self.dynamics = Dynamics(shape.num_heads, time_step_min=shape.time_step_min, time_step_max=shape.time_step_max)
        self.norm = GatedRMSNorm(shape.inner_size, shape.norm_epsilon)
        self.out_proj = nn.Linear(shape.inner_size, shape.hidden_size, bias=False)

    def empty(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> SSMState:
        """Return the state before the first token."""
        return SSMState.empty(self.shape, batch, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        *,
        state: SSMState | None = None,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, SSMState | None]:
        """Return the output (B, T, D) for x (B, T, D), and the new state if `state` is passed.

        `lengths` (B): rows are padded on the right, and the new state is the one after each row's last token.
        `documents` (B, T): the state is reset where the document number changes.
        """
        mixed, new_state = self.mix(self.in_proj(x), state=state, lengths=lengths, documents=documents)
        return self.out_proj(mixed), new_state

    def mix(
        self,
        projected: Tensor,
        *,
        state: SSMState | None = None,
        lengths: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, SSMState | None]:
        """Compute all between the projections: the output of `in_proj` to the input (B, T, inner size) of `out_proj`.

        `forward` is for models as they are; generation multiplies by copies of the projections in its own precision.
        """
        assert documents is None or state is None, "documents are for training, a state is for generation"
        inner, channels, heads = self.shape.inner_size, self.shape.conv_channels, self.shape.num_heads
        gate, xbc, dt = projected.split((inner, channels, heads), dim=-1)
        exact = torch.promote_types(projected.dtype, torch.float32)
        dt = F.softplus(dt.to(exact) + self.dynamics.dt_bias.to(exact))
        if lengths is not None:
            dt = dt * (torch.arange(dt.shape[1], device=dt.device) < lengths[:, None])[..., None]
        segments = None if documents is None else _number_segments(documents)
        uses_kernels = (
            self.has_kernels and xbc.is_cuda and xbc.numel() > 0 and state is None and xbc.dtype is not torch.float64
        )
        if uses_kernels:
            # Two separate calls, or their gradients would have to be copied into one tensor.
            conv_x = self.conv1d.forward_fused(xbc[..., :inner], slice(0, inner), segments)
            conv_bc = self.conv1d.forward_fused(xbc[..., inner:], slice(inner, channels), segments)
        else:
            conv_input = _prepend_past(xbc, None if state is None else state.conv, self.shape.conv_size - 1)
            xbc = F.silu(self.conv1d(conv_input, segments=segments)).to(xbc.dtype)
            conv_x, conv_bc = xbc[..., :inner], xbc[..., inner:]
        y, new_state = self._scan(conv_x, conv_bc, dt, state, segments, use_kernels=uses_kernels)
        normed = (self.norm.forward_fused(y, gate) if uses_kernels else self.norm(y, gate)).to(xbc.dtype)
        if state is None:
            return normed, None
        return normed, SSMState(
            _take_last_values(conv_input, lengths, self.shape.conv_size - 1).to(state.conv.dtype), new_state
        )

    def _scan(
        self,
        x: Tensor,
        bc: Tensor,
        dt: Tensor,
        state: SSMState | None,
        segments: Tensor | None,
        *,
        use_kernels: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the scan (B, T, inner size) of x (B, T, inner size), and the new state; `bc` (B, T, 2 G N) is B and C."""
        shape = self.shape
        x = x.unflatten(-1, (-1, shape.head_size))
        B, C = bc.unflatten(-1, (2, -1, shape.state_size)).unbind(-3)
        A = -torch.exp(self.dynamics.A_log.to(dt.dtype))
        # The scan decides the precision of each product; autocast would also round decays and states.
        kind = x.device.type
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            if state is not None and x.shape[1] == 1:
                y, new_state = scan_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], state=state.ssm)
                y = y[:, None]
            else:
                resets = None if segments is None else F.pad(segments.diff(dim=1) != 0, (1, 0))
                start = None if state is None else state.ssm
                options: dict[str, Any] = {"chunk": shape.chunk_size, "resets": resets, "use_kernels": use_kernels}
                y, new_state = scan_chunked(x, dt, A, B, C, state=start, **options)
        y = y + self.dynamics.D.to(dt.dtype)[:, None] * x
        return y.to(x.dtype).flatten(2), new_state


def _number_segments(documents: Tensor) -> Tensor:
    """Return documents numbered from 0 in each row; a number that recurs later is another document."""
    changed = documents.diff(dim=1) != 0
    return F.pad(changed.cumsum(1), (1, 0))


def _prepend_past(x: Tensor, past: Tensor | None, count: int) -> Tensor:
    """Return x (B, T, E) with the `count` earlier values, or zeros, prepended."""
    if past is None:
        return F.pad(x, (0, 0, count, 0))
    return torch.cat((past.transpose(1, 2).to(x.dtype), x), dim=1)


def _take_last_values(x: Tensor, lengths: Tensor | None, count: int) -> Tensor:
    """Return the last `count` values of each row of x (B, count + T, E), as (B, E, count)."""
    if lengths is None:
        return x[:, x.shape[1] - count :].transpose(1, 2)
    indices = lengths[:, None] + torch.arange(count, device=x.device)
    return x.gather(1, indices[..., None].expand(-1, -1, x.shape[2])).transpose(1, 2)
