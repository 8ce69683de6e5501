"""v-prediction (Salimans and Ho, 2022)."""

from __future__ import annotations

from typing import final

from bottega.core.types import Array
from bottega.tasks.generation.objectives.base import VariancePreserving


@final
class VPrediction(VariancePreserving):
    """The target is v = alpha * noise - sigma * clean."""

    prediction_type = "v_prediction"

    def target(self, clean: Array, noise: Array, alpha: Array, sigma: Array) -> Array:
        return alpha * noise - sigma * clean

    def split_prediction(self, predicted: Array, x: Array, alpha: Array, sigma: Array) -> tuple[Array, Array]:
        return alpha * x - sigma * predicted, sigma * x + alpha * predicted

    def min_snr_weight(self, snr: Array, max_snr: float) -> Array:
        return snr.clip(max=max_snr) / (snr + 1)


OBJECTIVE = VPrediction
