"""torch's group norm, with a way around where it crashes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GroupNorm(nn.GroupNorm):
    """Where its input learns nothing, as behind frozen layers, and lies with its channels last, torch's backward on a CPU
    ends the process (2.13: it writes a gradient that nobody made room for). Channels first, it does not."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.contiguous()
        return super().forward(x)
