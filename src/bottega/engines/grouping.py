"""The recipe's rows and shorthands as one setting for each parameter, with durations in steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from bottega.config.groups import Row, Setting, settings
from bottega.config.training import Training
from bottega.config.units import Cadence


def parameter_settings(
    training: Training,
    names: Sequence[str],
    *,
    total: int = 1,
    steps_per_epoch: int = 1,
    learns: Callable[[str], bool] = lambda name: True,
) -> dict[str, Setting]:
    """By name; `names` are in the order of the model. What the task does not train is no concern of the table's."""

    def steps(duration: Cadence | None) -> int:
        return 0 if duration is None else duration.steps(total, max(1, steps_per_epoch))

    own = [name for name in names if learns(name)]
    found = settings(
        own,
        [Row(group.pattern, group.scale, group.weight_decay, steps(group.starts)) for group in training.groups],
        freeze=training.freeze or (),
        unfreeze_every=steps(training.unfreeze.layers_per) if training.unfreeze is not None else None,
        layer_decay=training.layer_decay,
    )
    return {name: found.get(name, Setting(scale=None)) for name in names}


def thaw(model: nn.Module, settings: Mapping[str, Setting], step: int, *, compiled: bool = False) -> bool:
    """Let parameters learn whose time has come, and tell whether any was changed.

    The others get no gradient: their moments stay 0 too, and their backward costs nothing. A compiled graph leaves their
    gradients out, and torch 2.11 does not notice that they are wanted from now on; so it is told to compile anew.
    """
    changed = False
    for name, parameter in model.named_parameters():
        one = settings[name]
        learns = one.scale is not None and one.starts <= step
        changed = changed or parameter.requires_grad is not learns
        parameter.requires_grad_(learns)
    if changed and compiled:
        torch.compiler.reset()
    return changed
