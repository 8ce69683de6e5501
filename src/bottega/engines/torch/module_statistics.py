"""Statistics of each module in one training step: gradient norm, update-to-weight ratio and fraction of dead units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bottega.engines.module_groups import Statistics, group_by_module

MAX_SAMPLED_ELEMENTS = 16_384
"""Elements of a parameter that the update-to-weight ratio is computed from; a copy of all weights would add to the peak of memory."""


def find_unit_dimensions(model: nn.Module) -> dict[int, int]:
    """Return id(parameter) -> the dimension of its output units: rows of a matrix, channels of a convolution, stacked experts.

    Vectors have none, nor embeddings, whose rows have no gradient if their token is absent.
    """
    dimensions: dict[int, int] = {id(p): 0 for p in model.parameters() if p.dim() >= 2}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            dimensions.pop(id(module.weight), None)
        if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            dimensions[id(module.weight)] = 1
    return dimensions


@dataclass(frozen=True)
class _Layout:
    """Where each parameter with a gradient contributes; computed once for each set of such parameters."""

    matrices: list[tuple[Tensor, tuple[int, ...]]]
    """Parameters with output units, and the dimensions that their norm is taken over."""
    vectors: list[Tensor]
    modules: list[str]
    norm_modules: Tensor
    """Index of the module of each norm: those of all units, then those of the vectors."""
    is_unit: Tensor
    num_units: list[int]
    strides: list[int]
    sizes: list[int]
    """Elements of each parameter that are sampled, matrices first."""
    factors: Tensor
    """Elements of each parameter for one that is sampled, twice in a row."""
    parameter_modules: Tensor

    @property
    def parameters(self) -> list[Tensor]:
        return [*(parameter for parameter, _ in self.matrices), *self.vectors]


class ModuleStatistics:
    """Computes the statistics with a few kernels and without waiting for the device; `fetch` returns them."""

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        """`names` maps id(parameter) to its name."""
        self._names, self._model = names, model
        self._module_of = group_by_module(list(names.values()))
        self._layouts: dict[tuple[int, ...], _Layout] = {}
        self._layout: _Layout | None = None
        self._old_weights = self._gradient_sums = self._weight_sums = torch.empty(0)

    @torch.no_grad()
    def record_gradients(self, parameters: Sequence[Tensor], *, scale: Tensor | None) -> None:
        """Record the norms of the gradients, before clipping and divided by the loss scale, and some of the weights."""
        layout = self._layout = self._get_layout([p for p in parameters if p.grad is not None and p.numel()])
        norms = [
            torch.linalg.vector_norm(_get_gradient(p), dim=dims, dtype=torch.float32) for p, dims in layout.matrices
        ]
        if layout.vectors:
            vectors = [_get_gradient(p) for p in layout.vectors]
            norms.append(torch.stack(torch._foreach_norm(vectors, 2, torch.float32)))
        all_norms = torch.cat(norms)
        unscaled = all_norms.double() if scale is None else all_norms.double() / scale
        # Adding 0 times the norm makes the count of a gradient that is not finite NaN, not 0.
        is_dead = all_norms.eq(0).double() * layout.is_unit + 0.0 * unscaled
        sums = torch.stack([unscaled.square(), is_dead])
        self._gradient_sums = _sum_by_index(sums, layout.norm_modules, len(layout.modules))
        self._old_weights = _sample_elements(layout)

    @torch.no_grad()
    def record_update(self) -> None:
        """Record how far the optimizer step moved the weights."""
        layout = self._layout
        assert layout is not None, "record_gradients comes first"
        changes = _sample_elements(layout) - self._old_weights
        parts = [*changes.split(layout.sizes), *self._old_weights.split(layout.sizes)]
        sums = torch.stack(torch._foreach_norm(parts)).double().square() * layout.factors
        self._weight_sums = _sum_by_index(sums.view(2, -1), layout.parameter_modules, len(layout.modules))
        self._old_weights = torch.empty(0)

    def fetch(self) -> Statistics:
        """Return the statistics of the recorded step; waits for the device.

        A module has no `dead_fraction` if none of its parameters has units, and no `update_ratio` if its weights are 0.
        """
        layout = self._layout
        assert layout is not None, "record_gradients comes first"
        rows = torch.cat([self._gradient_sums, self._weight_sums]).T.tolist()
        statistics: Statistics = {}
        for module, num_units, (gradient, num_dead, change, weight) in zip(
            layout.modules, layout.num_units, rows, strict=True
        ):
            values = statistics[module] = {"gradient_norm": math.sqrt(gradient)}
            if weight:
                values["update_ratio"] = math.sqrt(change / weight)
            if num_units:
                values["dead_fraction"] = num_dead / num_units
        return statistics

    def _get_layout(self, parameters: Sequence[Tensor]) -> _Layout:
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            self._layouts = {key: self._build_layout(parameters)}  # an older set, before unfreezing, does not return
        return self._layouts[key]

    def _build_layout(self, parameters: Sequence[Tensor]) -> _Layout:
        device = parameters[0].device
        unit_dimensions = find_unit_dimensions(self._model)
        matrices = [p for p in parameters if id(p) in unit_dimensions]
        vectors = [p for p in parameters if id(p) not in unit_dimensions]
        modules = list(dict.fromkeys(self._module_of[self._names[id(p)]] for p in parameters))
        indices = [modules.index(self._module_of[self._names[id(p)]]) for p in (*matrices, *vectors)]
        units = [p.shape[unit_dimensions[id(p)]] for p in matrices]
        num_norms = [*units, *(1 for _ in vectors)]
        num_units = [0] * len(modules)
        for index, number in zip(indices, units, strict=False):
            num_units[index] += number
        strides = [choose_stride(p) for p in (*matrices, *vectors)]
        sizes = [math.ceil(p.numel() / stride) for p, stride in zip((*matrices, *vectors), strides, strict=True)]
        factors = [p.numel() / size for p, size in zip((*matrices, *vectors), sizes, strict=True)]
        parameter_modules = torch.tensor(indices, device=device)
        return _Layout(
            matrices=[(p, tuple(d for d in range(p.dim()) if d != unit_dimensions[id(p)])) for p in matrices],
            vectors=vectors,
            modules=modules,
            norm_modules=parameter_modules.repeat_interleave(torch.tensor(num_norms, device=device)),
            is_unit=(torch.arange(sum(num_norms), device=device) < sum(units)).double(),
            num_units=num_units,
            strides=strides,
            sizes=sizes,
            factors=torch.tensor(factors * 2, dtype=torch.float64, device=device),
            parameter_modules=parameter_modules,
        )


def choose_stride(parameter: Tensor) -> int:
    """Return the smallest stride that samples at most MAX_SAMPLED_ELEMENTS and is coprime to the length of a row.

    With a common divisor it would meet the same few columns in every row.
    """
    stride = math.ceil(parameter.numel() / MAX_SAMPLED_ELEMENTS)
    while stride > 1 and math.gcd(stride, parameter.shape[-1]) > 1:
        stride += 1
    return max(1, stride)


def _get_gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _sample_elements(layout: _Layout) -> Tensor:
    parameters = zip(layout.parameters, layout.strides, strict=True)
    return torch.cat([p.detach().flatten()[::stride].float() for p, stride in parameters])


def _sum_by_index(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_zeros((len(values), size)).index_add_(1, index, values)
