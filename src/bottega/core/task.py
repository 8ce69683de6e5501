"""Interface of a task: the models it trains, its loss, its metrics, and state that changes without a gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.types import Array, Batch, Loss, Models, Rows


class Task(BaseModel, ABC):
    """A stateless description of what is learned: its fields are its configuration, the models come with every call.

    `loss` may only *call* the models, so that an engine can wrap, shard, compile or replace them. All randomness comes
    from `rng`, which is a function of (seed, step, position in the global batch).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    needs_unwrapped_model: ClassVar[bool] = False
    """Whether the model must be neither wrapped nor compiled: `loss` calls it with other weights, or sets hooks in it."""
    gradient_surgery: ClassVar[bool] = False
    """Whether the gradients of the loss terms are combined by PCGrad instead of added."""
    update_inputs: ClassVar[tuple[str, ...]] = ()
    """Names of the `Loss.rows` that `update` receives too."""

    @property
    def noise_names(self) -> tuple[str, ...]:
        """Names of all draws of `loss`: JAX gets their keys, which are hashes of names, before a step."""
        return ()

    @abstractmethod
    def specs(self) -> dict[str, ModelSpec]:
        """Return the models by name, as descriptions that an engine builds. "model" is trained, the others are frozen."""

    @abstractmethod
    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the number of items that each loss term sums over, from the host batch, before any forward pass."""

    @abstractmethod
    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        """Return the terms to minimise and the metrics to report, as sums over examples."""

    def bucket(self, batch: Batch) -> Batch:
        """Return a host batch padded to one of few shapes, for an engine that compiles for each; padding changes no sum."""
        return batch

    def score(self, rows: Rows) -> dict[str, float]:
        """Return metrics that are not means over examples, from the rows of a data set: each example once, in order."""
        return {}

    def is_trainable(self, name: str) -> bool:
        """Return whether a parameter is trained and saved in checkpoints; the base model under an adapter is not."""
        return True

    def new_modules(self) -> tuple[str, ...]:
        """Return the modules that are randomly initialised although the rest is pretrained, such as a new head.

        LoRA and adapters train them in full.
        """
        return ()

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """Return the initial values of tensors kept beside the weights, which change without a gradient."""
        return {}

    def penalty(self, parameters: Mapping[str, Array], state: Mapping[str, Array]) -> Array | None:
        """Return a regularisation term of the weights, added to the loss once per step; None if there is none."""
        return None

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        """Return new values of tensors that change without a gradient, by name, after the optimizer step.

        A pure function; the engine writes the values. `tensors` are the parameters, buffers and state after the step.
        `batch_stats` are `Loss.stats` summed over the global batch, and the rows named in `update_inputs`, in order. `rng`
        has no positions: draws are a function of (rng.seed, rng.step, name).
        """
        return {}

    def batch_metrics(self, batch_stats: Mapping[str, Array]) -> dict[str, Array]:
        """Return metrics of a training step that are not means over examples, such as the load balance of experts."""
        return {}
