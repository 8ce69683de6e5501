"""Optimizers by name, over the group table, and an update that a device flag can hold back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bottega.config.optimizers import FALLBACK_OPTIMIZER, OPTIMIZER_SPECS
from bottega.config.parameter_groups import ParameterSetting
from bottega.config.training import Optimizer as OptimizerOptions
from bottega.core.model_spec import resolve_reference


def build_optimizers(
    named: Mapping[str, torch.nn.Parameter],
    settings: Mapping[str, ParameterSetting],
    options: OptimizerOptions,
    *,
    learning_rate: float,
    weight_decay: float,
) -> list[torch.optim.Optimizer]:
    """Freeze what is never to learn and return the optimizers; each group carries its `scale`.

    Weight decay goes to matrices only, unless a row says otherwise: decaying a norm's gain or a bias pulls it away from
    where it has to be.
    """
    rule = OPTIMIZER_SPECS[options.name]
    groups: dict[tuple[bool, float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in named.items():
        one = settings[name]
        parameter.requires_grad_(one.scale is not None)
        if one.scale is not None:
            usual = weight_decay if parameter.dim() >= 2 else 0.0
            is_hidden = rule.is_for_hidden_matrices_only and is_hidden_matrix(name, parameter)
            key = is_hidden, one.scale, usual if one.weight_decay is None else one.weight_decay
            groups.setdefault(key, []).append(parameter)

    def table(hidden: bool) -> list[dict[str, Any]]:
        return [
            {"params": parameters, "scale": scale, "weight_decay": decay}
            for (is_hidden, scale, decay), parameters in groups.items()
            if is_hidden is hidden
        ]

    others = FALLBACK_OPTIMIZER if rule.is_for_hidden_matrices_only else options.name
    tables = ((options.name, table(True)), (others, table(False)))
    return [_one(name, options, groups, learning_rate) for name, groups in tables if groups]


def describe_fallback(named: Mapping[str, Tensor], options: OptimizerOptions) -> list[str]:
    """Return a line where the update rule that was chosen applies to none of the parameters."""
    if not OPTIMIZER_SPECS[options.name].is_for_hidden_matrices_only or any(
        is_hidden_matrix(name, parameter) for name, parameter in named.items()
    ):
        return []
    return [
        f"training.optimizer.name: {options.name} is for matrices between hidden states, and this model trains none; all of "
        "it is trained by AdamW"
    ]


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    # Such a rule (Muon) orthogonalises maps between hidden states. An embedding or head is a table of rows, and stays with AdamW.
    return parameter.dim() == 2 and "embed" not in name and "head" not in name


def _one(name: str, options: OptimizerOptions, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    rule = OPTIMIZER_SPECS[name]
    reference = (
        f"bottega.engines.torch.{rule.torch_class}" if ":" in rule.torch_class else f"torch.optim:{rule.torch_class}"
    )
    given = {option: getattr(options, option) for option in rule.options}
    optimizer: torch.optim.Optimizer = resolve_reference(reference)(groups, lr=lr, **given, **rule.fixed_arguments)
    return optimizer


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """An optimizer's state dict would bring an old rate back, so ours is set before every step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]


def step_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], *, divisor: Tensor | None, skip_update: Tensor | None
) -> None:
    """Step with gradients divided by `divisor`, or not at all where the device flag `hold` is 1; nobody waits.

    Fused kernels take both as arguments, so clipping costs no pass over the gradients. The others are stepped and then
    put back by `where`, which needs a copy of what they change.
    """
    for optimizer in optimizers:
        if optimizer.defaults.get("fused"):
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
            _step_or_put_back(optimizer, skip_update)


def initialise_state(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The state as a first step leaves it that was held back: zeros, for every parameter.

    Left to themselves optimizers make it when a gradient first comes. A checkpoint could then not be compared with what
    it should hold, and fused SGD, held back at its first step, would keep uninitialised memory as its momentum.
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
def _step_or_put_back(optimizer: torch.optim.Optimizer, hold: Tensor) -> None:
    parameters = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    before = [p.clone() for p in parameters]
    states = [{k: v.clone() for k, v in optimizer.state[p].items() if torch.is_tensor(v)} for p in parameters]
    optimizer.step()
    held = hold.bool()
    for p, old, state in zip(parameters, before, states, strict=True):
        p.copy_(torch.where(held, old, p))
        for key, value in optimizer.state[p].items():
            if torch.is_tensor(value):
                was = state.get(key, torch.zeros_like(value))
                value.copy_(torch.where(held.to(value.device), was, value))


def state_tensors(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Every state tensor as `parameter name/state name`; `names` maps id(parameter) to its name."""
    found: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                found[f"{names[id(parameter)]}/{key}"] = torch.as_tensor(value)
    return found


def load_state(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> None:
    """Put the state back as it was: a step counter stays where the optimizer keeps it, a number stays a number."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, state = key.rpartition("/")
        by_name.setdefault(name, {})[state] = value
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                loaded = by_name.get(names[id(parameter)], {})
                on_device = bool(optimizer.defaults.get("fused"))
                optimizer.state[parameter] = {
                    key: value.to(parameter.device) if value.dim() or on_device else value.clone()
                    for key, value in loaded.items()
                }
