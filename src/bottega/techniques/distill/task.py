"""Knowledge distillation (Hinton et al., 2015) for any task that calls its model once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from bottega.core.model_spec import ModelSpec, resolve_reference
from bottega.core.noise import Noise
from bottega.core.types import Batch, Loss, Models
from bottega.techniques.wrapped_task import WrappedTask

Form = Literal["classes", "labels", "tokens", "values"]
"""Output of a model: one of several classes, independent labels, the next token, or values such as a velocity."""
TEACHER = "distill.teacher"
LOSS = "bottega.techniques.distill.{framework}:compute_loss"


class Distillation(WrappedTask):
    """A task whose loss also compares the student's output with that of a frozen teacher called with the same inputs.

    The teacher is neither wrapped nor compiled by torch.
    """

    form: Form
    teacher: Any
    """The model, of the framework of the engine, with its weights."""
    temperature: float = 2.0
    alpha: float = 0.5
    hidden: float = 0.0
    padding: str | None = None
    """The field of a batch, `(B, N)`, that is 0 for padding positions; None without padding."""
    max_tokens: int | None = None
    """The longest text that the teacher reads; None without a limit."""

    @property
    def needs_unwrapped_model(self) -> bool:  # type: ignore[override]
        """Whether activations of blocks are recorded, which needs the plain modules."""
        return self.hidden > 0 or self.inner.needs_unwrapped_model

    @property
    def term_names(self) -> tuple[str, ...]:
        """Names of the added loss terms, which are reported as metrics too."""
        return ("distill", "hidden") if self.hidden else ("distill",)

    def specs(self) -> dict[str, ModelSpec]:
        specs = self.inner.specs()
        student = specs["model"].with_change(self._check_blocks) if self.hidden else specs["model"]
        return {**specs, "model": student, TEACHER: ModelSpec.of(self.teacher)}

    def _check_blocks(self, models: Models, seed: int) -> None:
        from bottega.techniques.distill.torch import require_blocks  # hidden states are compared in torch only

        require_blocks({"the student": models["model"], "the teacher": self.teacher})

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Return the counts of the inner task and of the added terms, which ignore class weights."""
        inner_counts, num_examples = self.inner.counts(batch), _count_examples(batch)
        return {
            **inner_counts,
            **dict.fromkeys(self.term_names, num_examples),
            **({"distill": inner_counts["loss"]} if self.form == "tokens" else {}),
        }

    def bucket(self, batch: Batch) -> Batch:
        """Return the batch padded for the student, but not to more tokens than the teacher reads."""
        padded = self.inner.bucket(batch)
        if self.padding is None or self.max_tokens is None:
            return padded
        names = ("input_ids", self.padding)
        return {**padded, **{name: padded[name][:, : self.max_tokens] for name in names}}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        loss: Loss = resolve_reference(LOSS, rng.framework)(self, models, batch, rng)
        return loss


def _count_examples(batch: Batch) -> float:
    """Return the number of examples of a host batch that are not padding."""
    if "weight" in batch:
        return float((np.asarray(batch["weight"]) > 0).sum())
    return float(next(len(value) for value in batch.values() if np.ndim(value)))
