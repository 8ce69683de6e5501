"""Linear text classifier over weighted, hashed n-grams, alone or as the wide part beside a network.

B batch   L n-grams of a text   K classes   With many classes, neighbouring buckets share a row, so that the table stays small.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.models.device import get_device_type, is_simulated
from bottega.models.initial import initialise
from bottega.models.text_classifier.config import EncoderShape, KimShape, NgramShape


class NgramLayer(nn.EmbeddingBag):
    """A linear layer over the buckets of n-grams: a row of class weights for each bucket, or for several, and a bias.

    Its parameters start at 0, because its loss is convex: the seed decides the order of the samples only.
    """

    def __init__(self, num_buckets: int, num_labels: int, *, buckets_per_row: int = 1) -> None:
        super().__init__(-(-num_buckets // buckets_per_row), num_labels, mode="sum")
        self.buckets_per_row = buckets_per_row
        self.bias = nn.Parameter(torch.empty(num_labels))

    def forward(self, ngram_ids: Tensor, ngram_weights: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits (B, K) of the n-grams `ngram_ids` (B, L); padding has weight 0."""
        # Without (B, L, K) in memory; the gradient is summed in a fixed order, so that it is deterministic.
        weights = ngram_weights.to(self.weight.dtype)
        if self.buckets_per_row > 1:
            ngram_ids = ngram_ids // self.buckets_per_row
        offsets = None
        if get_device_type(ngram_ids.device) == "cpu" and not torch.compiler.is_compiling():
            # Padding takes as long as n-grams: most of the time, if one text of a batch is much longer than the others.
            is_ngram = weights != 0
            counts = is_ngram.sum(1)
            offsets = counts.cumsum(0) - counts
            if is_simulated():  # without data, all of them are n-grams
                ngram_ids, weights = ngram_ids.flatten().clone(), weights.flatten().clone()
            else:
                ngram_ids, weights = ngram_ids[is_ngram], weights[is_ngram]
        return F.embedding_bag(ngram_ids, self.weight, offsets, mode="sum", per_sample_weights=weights) + self.bias

    def initial_value(self, kind: str, name: str, seed: int) -> np.ndarray:
        """Return zeros."""
        return np.zeros(tuple(getattr(self, kind).shape), np.float32)


class NgramClassifier(nn.Module):
    """A linear classifier over n-grams."""

    def __init__(self, shape: NgramShape) -> None:
        super().__init__()
        self.shape = shape
        self.ngrams = NgramLayer(shape.num_buckets, shape.num_labels, buckets_per_row=shape.buckets_per_row)
        self.checkpoint_blocks = False

    def forward(self, ngram_ids: Tensor, ngram_weights: Tensor) -> Tensor:
        """Return logits (B, K) of the n-grams `ngram_ids` (B, L); padding has weight 0."""
        return self.ngrams(ngram_ids, ngram_weights)


def build_wide_part(shape: KimShape | EncoderShape) -> NgramLayer | None:
    """Return the layer whose logits a network adds to its own, or None without buckets."""
    if shape.num_buckets is None:
        return None
    return NgramLayer(shape.num_buckets, shape.num_labels, buckets_per_row=shape.buckets_per_row)


def initialise_ngrams(module: NgramClassifier, seed: int) -> None:
    """Set all parameters to 0."""
    initialise(module, seed, residual_layers=1)
