"""Layers of the JAX models, under the parameter names and layouts of their torch twins, and the context of a forward.

As in torch, precision, dropout and checkpointing are not arguments of every layer but a context around the forward:
`forward_context`. It is read while a function is traced, so all its values but the dropout key are constants of a jitted function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Array = Any
"""A JAX array, or what stands for one while a function is traced."""


@dataclass
class ForwardContext:
    """How the models of one forward compute."""

    dtype: Any = jnp.float32
    """Of matrix products and convolutions; weights are converted when they are used, as under torch.autocast."""
    dropout_key: Array | None = None
    """None in an evaluation."""
    checkpoints_blocks: bool = False
    """Whether the activations of a block are recomputed in the backward pass."""
    place: Callable[[Array], Array] | None = None
    """Splits the examples of an activation over devices, if there are several."""
    num_dropouts: int = 0
    """Dropouts so far; each has a key of its own."""


_context: ContextVar[ForwardContext] = ContextVar("forward_context", default=ForwardContext())  # noqa: B039


@contextmanager
def forward_context(
    *,
    dtype: Any = jnp.float32,
    dropout_key: Array | None = None,
    checkpoints_blocks: bool = False,
    place: Callable[[Array], Array] | None = None,
) -> Iterator[None]:
    """Context in which models compute in `dtype`; with a key, they train: dropout is on."""
    token = _context.set(ForwardContext(dtype, dropout_key, checkpoints_blocks, place))
    try:
        yield
    finally:
        _context.reset(token)


def is_training() -> bool:
    """Return whether the forward is one of training."""
    return _context.get().dropout_key is not None


def get_compute_dtype() -> Any:
    """Return the dtype of matrix products."""
    return _context.get().dtype


def get_platform() -> str:
    """Return the platform that computes, cpu or gpu: that of the default device, which an engine sets."""
    device = getattr(jax.config, "jax_default_device", None)
    return str(device.platform if device is not None else jax.default_backend())


def place_examples(x: Array) -> Array:
    """Return an activation (examples, ...) split over devices by examples, as the batch is.

    Called on the residual stream of each block: otherwise the compiler may split activations like the weights of a layer.
    """
    place = _context.get().place
    return x if place is None else place(x)


def dropout(x: Array, rate: float) -> Array:
    """Set a fraction of the values to zero and scale the others, in training; return `x` in an evaluation."""
    context = _context.get()
    if not rate or context.dropout_key is None:
        return x
    key = jax.random.fold_in(context.dropout_key, context.num_dropouts)
    context.num_dropouts += 1
    is_kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(is_kept, x / (1 - rate), jnp.zeros((), x.dtype))


def checkpoint_block(block: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block whose activations are recomputed in the backward pass, if the context asks for it in training."""
    if not _context.get().checkpoints_blocks or not is_training():
        return block
    return jax.checkpoint(block)


Observer = Callable[[Any, Any], None]
_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observe_outputs(observer: Observer) -> Iterator[None]:
    """Context in which `observer(module, output)` is called for each module that is called."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


class Module(nnx.Module):
    """A model or layer whose parameters have the names of a torch module's."""

    framework: ClassVar[str] = "jax"
    """Modules of torch have no such attribute."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        forward = cls.__dict__.get("__call__")
        if forward is None:
            return

        @functools.wraps(forward)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            output = forward(self, *arguments, **named)
            if (observer := _observer.get()) is not None:
                observer(self, output)
            return output

        cls.__call__ = call  # type: ignore[method-assign]

    parameter_names: tuple[str, ...] = ()
    """Names of all parameters of a whole model in torch's order; NNX sorts attributes when it copies a module."""

    def variables(self) -> dict[str, Any]:
        """Return the variables of the parameters by name, in torch's order: a layer's own before those of its parts."""
        variables = self._find_variables()
        return {name: variables[name] for name in self.parameter_names} if self.parameter_names else variables

    def _find_variables(self) -> dict[str, Any]:
        return {
            f"{path}.{name}" if path else name: value
            for path, module in self.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, nnx.Variable)
        }

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module and all its parts, each with its path."""
        yield prefix, self
        for name, value in vars(self).items():
            parts = {name: value} if isinstance(value, Module) else {}
            if isinstance(value, nnx.List):
                parts = {f"{name}.{index}": layer for index, layer in enumerate(value)}
            for part_name, part in parts.items():
                yield from part.named_modules(f"{prefix}.{part_name}" if prefix else part_name)

    def named_parameters(self) -> dict[str, Array]:
        """Return the parameters by name, in the order of `variables`."""
        return {name: variable[...] for name, variable in self.variables().items()}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return host copies of the parameters by name."""
        return {name: np.asarray(value) for name, value in self.named_parameters().items()}


class Linear(Module):
    """A product with `weight` (out, in), and `bias` (out)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features)))
        self.bias = nnx.Param(jnp.zeros(out_features)) if bias else None

    def __call__(self, x: Array) -> Array:
        dtype = get_compute_dtype()
        y = x.astype(dtype) @ self.weight[...].astype(dtype).T
        return y if self.bias is None else y + self.bias[...].astype(dtype)


class Embedding(Module):
    """Rows of `weight` (entries, features), in float32."""

    def __init__(self, num_entries: int, num_features: int) -> None:
        self.weight = nnx.Param(jnp.zeros((num_entries, num_features)))

    def __call__(self, indices: Array) -> Array:
        return self.weight[...][indices]


class RMSNorm(Module):
    """Root mean square norm over the last axis, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.weight = nnx.Param(jnp.ones(size))
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        values = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + self.epsilon)
        return (values * scale * self.weight[...]).astype(x.dtype)


class LayerNorm(Module):
    """Layer norm over the last axis, computed and returned in float32, as under torch.autocast."""

    def __init__(self, size: int, epsilon: float = 1e-5, *, affine: bool = True, bias: bool = True) -> None:
        self.weight = nnx.Param(jnp.ones(size)) if affine else None
        self.bias = nnx.Param(jnp.zeros(size)) if affine and bias else None
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        values = x.astype(jnp.float32)
        mean = jnp.mean(values, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(values - mean), axis=-1, keepdims=True)
        y = (values - mean) * jax.lax.rsqrt(variance + self.epsilon)
        if self.weight is not None:
            y = y * self.weight[...]
        return y if self.bias is None else y + self.bias[...]


class GroupNorm(Module):
    """Group norm of (batch, channels, *grid), computed and returned in float32, as under torch.autocast."""

    def __init__(self, num_groups: int, num_channels: int, epsilon: float = 1e-5) -> None:
        self.weight = nnx.Param(jnp.ones(num_channels))
        self.bias = nnx.Param(jnp.zeros(num_channels))
        self.num_groups, self.epsilon = num_groups, epsilon

    def __call__(self, x: Array) -> Array:
        values = x.astype(jnp.float32).reshape(len(x), self.num_groups, -1)
        mean = jnp.mean(values, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(values - mean), axis=-1, keepdims=True)
        y = ((values - mean) * jax.lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
        columns = (1, -1, *(1,) * (x.ndim - 2))
        return y * self.weight[...].reshape(columns) + self.bias[...].reshape(columns)


class Conv(Module):
    """A convolution over (batch, channels, *grid) with `weight` (out, in, *kernel), and `bias` (out)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Sequence[int],
        *,
        stride: Sequence[int] | None = None,
        padding: Sequence[int] | None = None,
        bias: bool = True,
    ) -> None:
        self.weight = nnx.Param(jnp.zeros((out_channels, in_channels, *kernel)))
        self.bias = nnx.Param(jnp.zeros(out_channels)) if bias else None
        self.stride = tuple(stride or (1,) * len(kernel))
        self.padding = tuple((size, size) for size in (padding or (0,) * len(kernel)))

    def __call__(self, x: Array) -> Array:
        dtype = get_compute_dtype()
        axes = "DHW"[-len(self.stride) :]
        y = jax.lax.conv_general_dilated(
            x.astype(dtype),
            self.weight[...].astype(dtype),
            self.stride,
            self.padding,
            dimension_numbers=(f"NC{axes}", f"OI{axes}", f"NC{axes}"),
        )
        return y if self.bias is None else y + self.bias[...].astype(dtype).reshape(1, -1, *(1,) * len(axes))


def attend(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, is_causal: bool = False, dropout_rate: float = 0.0
) -> Array:
    """Return the attention (B, T, H, h) of q (B, T, H, h) over k, v (B, S, K, h), where K divides H.

    `mask` is true for keys that a query may attend to, (B or 1, H or 1, T, S). On a GPU, half precision uses cuDNN's kernel.
    """
    if dropout_rate and is_training():
        return _attend_with_dropout(q, k, v, mask=mask, is_causal=is_causal, dropout_rate=dropout_rate)
    uses_cudnn = get_platform() == "gpu" and _is_supported_by_cudnn(q, k, mask)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=is_causal, implementation="cudnn" if uses_cudnn else "xla"
    )


def _is_supported_by_cudnn(q: Array, k: Array, mask: Array | None) -> bool:
    """Return whether cuDNN has a kernel, with its gradient, for these arguments on any GPU."""
    is_half = q.dtype in (jnp.bfloat16, jnp.float16)
    has_head_size = q.shape[-1] <= 128 and q.shape[-1] % 8 == 0
    has_lengths = mask is None or (q.shape[1] % 2 == 0 and k.shape[1] % 2 == 0)
    return is_half and has_head_size and has_lengths


def _attend_with_dropout(
    q: Array, k: Array, v: Array, *, mask: Array | None, is_causal: bool, dropout_rate: float
) -> Array:
    """Attention with dropout of its weights, which the fused kernels do not have."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    if is_causal:
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        mask = causal if mask is None else mask & causal
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = dropout(jax.nn.softmax(scores, axis=-1), dropout_rate).astype(v.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def bind(model: Any, parameters: Mapping[str, Array]) -> Any:
    """Return a copy of a model with these parameters, by name; the model itself may be abstract."""
    graph, state = nnx.split(model)
    values = [
        (path, variable.replace(value=parameters[".".join(map(str, path))]))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(values))


@dataclass(frozen=True)
class ModelGraph:
    """A model without its parameters: a constant of jitted functions."""

    graph: Any
    shape: Any
    """The configuration of the model, if it has one."""


def split_model(model: Any) -> tuple[ModelGraph, Any]:
    """Return the graph of a model, for a static argument of a jitted function, and its parameters, for another argument."""
    graph, state = nnx.split(model)
    return ModelGraph(graph, getattr(model, "shape", None)), state


def join_model(graph: ModelGraph, parameters: Any) -> Any:
    """Return the model that `split_model` has split."""
    return nnx.merge(graph.graph, parameters)


def take_max(x: Array, axis: int) -> Array:
    """Return the largest values over an axis.

    The gradient of `max` compares `x` with the maximum, which the compiler may have computed from other roundings of `x`: if no value
    equals it, that gradient is 0 / 0. Comparing positions is exact.
    """
    indices = jnp.arange(x.shape[axis]).reshape(-1, *(1,) * (x.ndim - 1 - axis % x.ndim))
    is_largest = indices == jnp.argmax(x, axis=axis, keepdims=True)
    return jnp.where(is_largest, x, 0).sum(axis=axis)
