"""Parameters that begin to learn during the run: frozen until their time has come."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from bottega.config.parameter_groups import ParameterSetting


def unfreeze_parameters(
    model: nn.Module, settings: Mapping[str, ParameterSetting], step: int, *, compiled: bool = False
) -> bool:
    """Let parameters learn whose time has come, and tell whether any was changed.

    The others get no gradient: their moments stay 0 too, and their backward costs nothing. A compiled graph leaves their
    gradients out, and torch 2.11 does not notice that they are wanted from now on; so it compiles anew.
    """
    changed = False
    for name, parameter in model.named_parameters():
        one = settings[name]
        learns = one.scale is not None and one.start_step <= step
        changed = changed or parameter.requires_grad is not learns
        parameter.requires_grad_(learns)
    if changed and compiled:
        torch.compiler.reset()
    return changed
