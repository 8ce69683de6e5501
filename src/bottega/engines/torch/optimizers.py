"""Optimizers by name over parameter groups, with an update that a flag on the device can skip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bottega.config.optimizers import FALLBACK_OPTIMIZER, OPTIMIZER_SPECS, is_hidden_matrix
from bottega.config.parameter_groups import ParameterSetting
from bottega.config.training import Optimizer as OptimizerOptions
from bottega.core.model_spec import resolve_reference
from bottega.engines.torch.muon import Muon


def build_optimizers(
    named_parameters: Mapping[str, torch.nn.Parameter],
    settings: Mapping[str, ParameterSetting],
    options: OptimizerOptions,
    *,
    learning_rate: float,
    weight_decay: float,
) -> list[torch.optim.Optimizer]:
    """Freeze the parameters that are never trained, and build the optimizers.

    Each parameter group has a `scale`, the factor of the learning rate that `set_learning_rate` applies.

    Weight decay applies to matrices only, unless a group sets it: norm gains and biases should not be pulled to 0.
    """
    spec = OPTIMIZER_SPECS[options.name]
    groups: dict[tuple[bool, float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in named_parameters.items():
        setting = settings[name]
        parameter.requires_grad_(setting.scale is not None)
        if setting.scale is not None:
            default_decay = weight_decay if parameter.dim() >= 2 else 0.0
            is_hidden = spec.is_for_hidden_matrices_only and is_hidden_matrix(name, parameter.dim())
            key = is_hidden, setting.scale, default_decay if setting.weight_decay is None else setting.weight_decay
            groups.setdefault(key, []).append(parameter)

    def make_param_groups(hidden: bool) -> list[dict[str, Any]]:
        return [
            {"params": parameters, "scale": scale, "weight_decay": decay}
            for (is_hidden, scale, decay), parameters in groups.items()
            if is_hidden is hidden
        ]

    fallback_name = FALLBACK_OPTIMIZER if spec.is_for_hidden_matrices_only else options.name
    groups_by_optimizer = ((options.name, make_param_groups(True)), (fallback_name, make_param_groups(False)))
    return [_build_optimizer(name, options, groups, learning_rate) for name, groups in groups_by_optimizer if groups]


def _build_optimizer(
    name: str, options: OptimizerOptions, groups: list[dict[str, Any]], lr: float
) -> torch.optim.Optimizer:
    spec = OPTIMIZER_SPECS[name]
    reference = (
        f"bottega.engines.torch.{spec.torch_class}" if ":" in spec.torch_class else f"torch.optim:{spec.torch_class}"
    )
    arguments = {option: getattr(options, option) for option in spec.options}
    optimizer: torch.optim.Optimizer = resolve_reference(reference)(groups, lr=lr, **arguments, **spec.fixed_arguments)
    return optimizer


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of every group, before every step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]


def step_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], *, divisor: Tensor | None, skip_update: Tensor | None
) -> None:
    """Step with gradients divided by `divisor`, or not at all if the device flag `skip_update` is 1, without a sync.

    Fused kernels and Muon take both as arguments, so clipping needs no pass over the gradients. The others step and are then
    restored by `where`, which needs a copy of what they change.
    """
    for optimizer in optimizers:
        if optimizer.defaults.get("fused") or isinstance(optimizer, Muon):
            optimizer.grad_scale, optimizer.found_inf = divisor, skip_update  # type: ignore[attr-defined]
            optimizer.step()
            continue
        if divisor is not None:
            torch._foreach_div_(
                [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None], divisor
            )
        if skip_update is None:
            optimizer.step()
        else:
            _step_or_restore(optimizer, skip_update)


def initialise_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Allocate the optimizer state of every parameter as zeros, as a skipped first step leaves it.

    By default optimizers allocate it at the first gradient. Then a checkpoint could not be checked against the expected
    names, and fused SGD with a skipped first step would keep uninitialised memory as its momentum.
    """
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"]:
                for p in group["params"]:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    step_optimizers(optimizers, divisor=None, skip_update=torch.ones((), device=parameters[0].device))
    for p in parameters:
        p.grad = None


@torch.no_grad()
def _step_or_restore(optimizer: torch.optim.Optimizer, skip_update: Tensor) -> None:
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    old_parameters = [p.clone() for p in parameters]
    states = [{k: v.clone() for k, v in optimizer.state[p].items() if torch.is_tensor(v)} for p in parameters]
    optimizer.step()
    is_skipped = skip_update.bool()
    for p, old, state in zip(parameters, old_parameters, states, strict=True):
        p.copy_(torch.where(is_skipped, old, p))
        for key, value in optimizer.state[p].items():
            if torch.is_tensor(value):
                old_value = state.get(key, torch.zeros_like(value))
                value.copy_(torch.where(is_skipped.to(value.device), old_value, value))


def collect_state_tensors(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return every state tensor as `parameter name/state name`; `names` maps id(parameter) to its name."""
    tensors: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"{names[id(parameter)]}/{key}"] = torch.as_tensor(value)
    return tensors


def load_state(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> None:
    """Load the optimizer state; scalars such as step counters stay on the device where the optimizer keeps them."""
    states_by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, state_name = key.rpartition("/")
        states_by_name.setdefault(name, {})[state_name] = value
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                loaded = states_by_name.get(names[id(parameter)], {})
                is_fused = bool(optimizer.defaults.get("fused"))
                optimizer.state[parameter] = {
                    key: value.to(parameter.device) if value.dim() or is_fused else value.clone()
                    for key, value in loaded.items()
                }
