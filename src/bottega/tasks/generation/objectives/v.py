"""v-prediction (Salimans and Ho, 2022)."""

from __future__ import annotations

from typing import final

from torch import Tensor

from bottega.tasks.generation.objectives.base import VariancePreserving


@final
class VPrediction(VariancePreserving):
    """The target is v = alpha * noise - sigma * clean."""

    prediction_type = "v_prediction"

    def target(self, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        return alpha * noise - sigma * clean

    def split_prediction(self, predicted: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        return alpha * x - sigma * predicted, sigma * x + alpha * predicted

    def min_snr_weight(self, snr: Tensor, max_snr: float) -> Tensor:
        return snr.clamp(max=max_snr) / (snr + 1)


OBJECTIVE = VPrediction
