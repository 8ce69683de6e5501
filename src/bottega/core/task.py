"""What is learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.types import Array, Batch, Loss, Models, Rows


class Task(BaseModel, ABC):
    """Stateless: its fields are its configuration, and the models are handed to it on every call.
    `loss` may only *call* the models, so an engine is free to wrap, shard, compile or rebind them. Randomness comes
    from `rng` alone, a value that is a function of (seed, step, position in the global batch).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    needs_unwrapped_model: ClassVar[bool] = False
    """Whether `loss` calls the model with other weights than its own; it is then neither wrapped nor compiled."""
    gradient_surgery: ClassVar[bool] = False
    """Whether the gradients of its terms are reconciled rather than added up."""
    update_inputs: ClassVar[tuple[str, ...]] = ()
    """Names of those `Loss.rows` that `update` is shown too."""

    @abstractmethod
    def specs(self) -> dict[str, ModelSpec]:
        """The models by name, as descriptions that an engine builds. The trained one is "model"; the others are frozen."""

    @abstractmethod
    def counts(self, batch: Batch) -> Mapping[str, float]:
        """How many things each term of the loss sums over, from the host batch alone, before any forward."""

    @abstractmethod
    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        """The terms to minimise and the metrics to report, as sums."""

    def score(self, rows: Rows) -> dict[str, float]:
        """What is no mean over examples, from the rows of a whole data set: each example once, in order."""
        return {}

    def is_trainable(self, name: str) -> bool:
        """Whether a parameter is this task's to train and a checkpoint's to keep; the base under an adapter is not."""
        return True

    def new_modules(self) -> tuple[str, ...]:
        """Parts of the model that begin at random, or at 0, though the rest comes from elsewhere: where parts are put into a
        model that stays (LoRA), these learn in full."""
        return ()

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """What is kept beside the weights and changes without a gradient, as it is at the start."""
        return {}

    def penalty(self, parameters: Mapping[str, Array], state: Mapping[str, Array]) -> Array | None:
        """What the weights themselves cost, once a step and not for each example; added to what is minimised."""
        return None

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        """New values of what changes without a gradient, by name, after the optimizer's step. Pure: the engine writes them.

        `tensors` are parameters, buffers and state as they are by then. `seen` are the stats of the whole global batch,
        summed over its examples; and of `learns_from_rows` the rows of all of them in order. `rng` is of the step, and has no
        positions: what is drawn is f(rng.seed, rng.step, name).
        """
        return {}

    def batch_metrics(self, batch_stats: Mapping[str, Array]) -> dict[str, Array]:
        """What a step reports of all that it saw and that is no mean over examples, such as how even a load is."""
        return {}
