"""What tokens cost where their logits are wanted too: the plain form of the loss that the transformer fuses with its head.

B batch   T tokens   V vocabulary
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""The target that is not predicted, and costs nothing."""


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the negative log likelihood of targets [B, T] under logits [B, T, V], in float32. It can be
    differentiated twice, which the fused one cannot."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten().long(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
