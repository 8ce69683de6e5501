"""Gradual unfreezing: parameters that are frozen until a step of the run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bottega.config.parameter_groups import ParameterSetting


def unfreeze_parameters(
    model: nn.Module, settings: Mapping[str, ParameterSetting], step: int, *, is_compiled: bool = False
) -> bool:
    """Unfreeze the parameters that are due at `step`; return whether any parameter changed.

    Frozen parameters get no gradient, so their moments stay 0 and their backward costs nothing. A compiled graph leaves
    their gradients out, and torch 2.11 does not notice when they are unfrozen, so the compiler is reset.
    """
    has_changed = False
    for name, parameter in model.named_parameters():
        setting = settings[name]
        is_trained = setting.scale is not None and setting.start_step <= step
        has_changed = has_changed or parameter.requires_grad is not is_trained
        parameter.requires_grad_(is_trained)
    if has_changed and is_compiled:
        torch.compiler.reset()
    return has_changed
