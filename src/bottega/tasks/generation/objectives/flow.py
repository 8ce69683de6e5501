"""Flow matching: the velocity along the straight line between data and noise (rectified flow)."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from bottega.core.noise import Noise
from bottega.core.types import Array
from bottega.tasks.generation.arrays import sigmoid
from bottega.tasks.generation.objectives.base import Objective
from bottega.tasks.generation.schedules import NUM_TRAIN_TIMESTEPS


@final
class Flow(Objective):
    """Flow matching: the target is the velocity noise - clean."""

    uses_schedule = False
    has_stock_pipeline = False

    def draw_times(self, rng: Noise) -> Array:
        """Return training times; the logit-normal favours the middle of the path, where prediction is hardest."""
        if self.times == "logit_normal":
            return self._shift_times(sigmoid(rng.normal("time")))
        return self._shift_times(rng.uniform("time"))

    def levels(self, t: Array) -> tuple[Array, Array]:
        return 1 - t, t

    def model_time(self, t: Array) -> Array:
        return t * NUM_TRAIN_TIMESTEPS

    def target(self, clean: Array, noise: Array, alpha: Array, sigma: Array) -> Array:
        return noise - clean

    def split_prediction(self, predicted: Array, x: Array, alpha: Array, sigma: Array) -> tuple[Array, Array]:
        return x - sigma * predicted, x + alpha * predicted

    def grid(self, steps: int) -> np.ndarray:
        times: np.ndarray = self._shift_times(np.linspace(1, 0, steps + 1))
        return times

    def scheduler(self, pipeline: str | None) -> tuple[str, dict[str, Any]]:
        return "FlowMatchEulerDiscreteScheduler", {"num_train_timesteps": NUM_TRAIN_TIMESTEPS, "shift": self.shift}

    def _shift_times(self, t: Array) -> Array:
        return t if self.shift == 1 else self.shift * t / (1 + (self.shift - 1) * t)


OBJECTIVE = Flow
