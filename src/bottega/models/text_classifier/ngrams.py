"""Linear text classifier over weighted, hashed n-grams, alone or as the wide part beside a network.

B batch   L n-grams of a text   K classes
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.models.initial import initialise
from bottega.models.text_classifier.config import NgramShape


class NgramLayer(nn.EmbeddingBag):
    """A linear layer over the buckets of n-grams: one row of class weights for each bucket, and a bias.

    Its parameters start at 0, because its loss is convex: the seed decides the order of the samples only.
    """

    def __init__(self, num_buckets: int, num_labels: int) -> None:
        super().__init__(num_buckets, num_labels, mode="sum")
        self.bias = nn.Parameter(torch.empty(num_labels))

    def forward(self, ngram_ids: Tensor, ngram_weights: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits (B, K) of the n-grams `ngram_ids` (B, L); padding has weight 0."""
        # Without (B, L, K) in memory; the gradient is summed in a fixed order, so that it is deterministic.
        weights = ngram_weights.to(self.weight.dtype)
        return F.embedding_bag(ngram_ids, self.weight, mode="sum", per_sample_weights=weights) + self.bias

    def initial_value(self, kind: str, name: str, seed: int) -> np.ndarray:
        """Return zeros."""
        return np.zeros(tuple(getattr(self, kind).shape), np.float32)


class NgramClassifier(nn.Module):
    """A linear classifier over n-grams."""

    def __init__(self, shape: NgramShape) -> None:
        super().__init__()
        self.shape = shape
        self.ngrams = NgramLayer(shape.num_buckets, shape.num_labels)
        self.checkpoint_blocks = False

    def forward(self, ngram_ids: Tensor, ngram_weights: Tensor) -> Tensor:
        """Return logits (B, K) of the n-grams `ngram_ids` (B, L); padding has weight 0."""
        return self.ngrams(ngram_ids, ngram_weights)


def build_wide_part(num_buckets: int | None, num_labels: int) -> NgramLayer | None:
    """Return the layer whose logits a network adds to its own, or None without buckets."""
    return None if num_buckets is None else NgramLayer(num_buckets, num_labels)


def initialise_ngrams(module: NgramClassifier, seed: int) -> None:
    """Set all parameters to 0."""
    initialise(module, seed, residual_layers=1)
