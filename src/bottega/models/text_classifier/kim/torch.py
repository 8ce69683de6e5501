"""Convolutional text classifier with max-over-time pooling (Kim, 2014).

B batch   T tokens   E embedding   F filters of one width   D features, all filters   K classes
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.models.initial import fill_parameters
from bottega.models.text_classifier.config import KimShape
from bottega.models.text_classifier.kim.initial import initial_value
from bottega.models.text_classifier.ngrams import build_wide_part


class Kim(nn.Module):
    """Convolutions over token embeddings, max-over-time pooling and a linear head.

    Rows are padded on the right; `mask` (B, T) is true for text, and padding has no influence.
    """

    def __init__(self, shape: KimShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.embed_size)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(shape.embed_size, shape.num_filters, width) for width in shape.filter_sizes
        )
        self.head = nn.Linear(shape.num_features, shape.num_labels)
        self.ngrams = build_wide_part(shape)
        self.checkpoint_blocks = False

    def forward(self, ids: Tensor, mask: Tensor, *ngrams: Tensor) -> Tensor:
        """Return logits (B, K) of tokens `ids` (B, T); with a wide part, `ngrams` are the inputs of that."""
        features = self.features(ids, mask)
        logits = self.head(F.dropout(features, self.shape.dropout, self.training) if self.shape.dropout else features)
        return logits if self.ngrams is None else logits + self.ngrams(*ngrams)

    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the largest activation of each filter over the text, (B, D)."""
        x = self.embedding(ids) * mask[..., None]
        # Pad to the widest filter, or a short text would have no window.
        missing = max(0, max(self.shape.filter_sizes) - ids.shape[1])
        x, mask = F.pad(x, (0, 0, 0, missing)).transpose(1, 2), F.pad(mask, (0, missing))
        pooled = []
        for convolution in self.convolutions:
            if self.checkpoint_blocks and self.training:
                pooled.append(checkpoint(max_over_time, convolution, x, mask, use_reentrant=False))
            else:
                pooled.append(max_over_time(convolution, x, mask))
        return F.relu(torch.cat(pooled, dim=1))


def max_over_time(convolution: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """Return the maximum (B, F) over windows that are all text; a shorter text has its first window only."""
    activations = convolution(x)
    is_text = mask[:, mask.shape[1] - activations.shape[2] :].clone()
    is_text[:, 0] = True
    return activations.masked_fill(~is_text[:, None], -math.inf).amax(2)


def initialise_kim(module: Kim, seed: int) -> None:
    """Initialise all parameters in place; a value depends only on the seed and the parameter's name and shape."""
    fill_parameters(module, lambda name, shape: initial_value(name, shape, seed))
