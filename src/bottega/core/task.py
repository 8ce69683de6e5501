"""What is learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from bottega.core.noise import Noise
from bottega.core.types import Batch, Loss, Models, Rows


class Task(BaseModel, ABC):
    """Stateless: its fields are its configuration, and the models are handed to it on every call.

    `loss` may only *call* the models, so an engine is free to wrap, shard, compile or rebind them. Randomness comes
    from `rng` alone, a value that is a function of (seed, step, position in the global batch).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    @abstractmethod
    def build(self, seed: int) -> dict[str, Any]:
        """The models by name, on the meta device or the host. Initial weights are f(seed, parameter name)."""

    @abstractmethod
    def counts(self, batch: Batch) -> Mapping[str, float]:
        """How many things each term of the loss sums over, from the host batch alone, before any forward."""

    @abstractmethod
    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        """The terms to minimise and the metrics to report, as sums."""

    def score(self, rows: Rows) -> dict[str, float]:
        """What is no mean over examples, from the rows of a whole data set: each example once, in order."""
        return {}
