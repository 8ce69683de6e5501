"""Cross-entropy of tokens from logits: the unfused form of the loss that the transformer fuses with its head.

B batch   T tokens   V vocabulary
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from bottega.models.losses import IGNORE_INDEX


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed negative log likelihood of targets (B, T) under logits (B, T, V), in float32.

    Unlike the fused loss it can be differentiated twice.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten().long(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
