"""torch's group norm with a workaround for a crash on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GroupNorm(nn.GroupNorm):
    """Group norm that makes inputs without gradient contiguous.

    For channels-last inputs that need no gradient, as behind frozen layers, torch's CPU backward crashes the process (2.13:
    it writes a gradient that was not allocated). Channels-first inputs are safe.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.contiguous()
        return super().forward(x)
