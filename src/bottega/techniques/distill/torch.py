"""Learning what a teacher answers, beside what the data says (Hinton et al., 2015): any task that calls its model once.

B batch   T tokens   K classes   N positions   D, E widths of student and teacher
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bottega.core.errors import UsageError
from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.types import Batch, Loss, Models, Sums
from bottega.techniques.call_recorder import CallRecorder, ModelCall, find_blocks, match_blocks, record_activations
from bottega.techniques.wrapped_task import WrappedTask

Form = Literal["classes", "labels", "tokens", "values"]
"""What a model answers: one class of many, each of several for itself, the next token, or numbers such as a velocity."""
TEACHER = "distill.teacher"
MOST_POSITIONS = 512
"""Relations are as many as the square of it: of a picture of 64 x 64 places they would be 67 MB a sample."""


class Distillation(WrappedTask):
    """The student is asked by its own task, and the teacher is asked the same. It is a frozen model, never wrapped or
    compiled."""

    form: Form
    teacher: Any
    """The torch module, with its weights."""
    temperature: float = 2.0
    alpha: float = 0.5
    hidden: float = 0.0
    padding: str | None = None
    """The field of a batch [B, N] that is 0 where positions only fill up a row; None where none do."""

    @property
    def needs_unwrapped_model(self) -> bool:  # type: ignore[override]
        """Who listens between the blocks has to find them as they are."""
        return self.hidden > 0 or self.inner.needs_unwrapped_model

    @property
    def term_names(self) -> tuple[str, ...]:
        """The names of its terms, which are measured too."""
        return ("distill", "hidden") if self.hidden else ("distill",)

    def specs(self) -> dict[str, ModelSpec]:
        specs = self.inner.specs()
        student = specs["model"].changed(self._check_blocks) if self.hidden else specs["model"]
        return {**specs, "model": student, TEACHER: ModelSpec.of(self.teacher)}

    def _check_blocks(self, models: Models, seed: int) -> None:
        for whose, model in (("the student", models["model"]), ("the teacher", self.teacher)):
            if not find_blocks(model):
                raise UsageError(
                    f"techniques.distill.hidden: {whose} is a {type(model).__name__}, which has no blocks one after "
                    "the other; set it to 0"
                )

    def counts(self, batch: Batch) -> Mapping[str, float]:
        """Not by the weights of classes, as the task's own loss may be: the teacher is followed on all alike."""
        own, rows = self.inner.counts(batch), _num_rows(batch)
        return {
            **own,
            **dict.fromkeys(self.term_names, rows),
            **({"distill": own["loss"]} if self.form == "tokens" else {}),
        }

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        student, teacher = models["model"], models[TEACHER]
        if student.training and not self.alpha and not self.hidden:
            return self.inner.loss(
                models, batch, rng
            )  # a teacher without a say is measured, and costs no step anything
        heard = CallRecorder(student, tokens=self.form == "tokens")
        pairs = match_blocks(find_blocks(student), find_blocks(teacher)) if self.hidden else []
        with record_activations([own for own, _ in pairs]) as ours:
            found = self.inner.loss({**models, "model": heard}, batch, rng)
        with torch.no_grad(), record_activations([other for _, other in pairs]) as theirs:
            answer = heard.single_call.replay_on(teacher)
        rows = batch["weight"] > 0 if "weight" in batch else None
        terms = {name: (total, weight * (1 - self.alpha)) for name, (total, weight) in found.terms.items()}
        each, counted = self._differences(heard.single_call, answer, rows)
        added: Sums = {"distill": _summed(each, counted)}
        terms["distill"] = (added["distill"][0], self.alpha)
        if self.hidden:
            kept = batch[self.padding] > 0 if self.padding is not None else heard.single_call.target_mask
            between = [hidden_state_distance(ours[i], theirs[i], kept) for i in range(len(pairs))]
            added["hidden"] = _summed(torch.stack(between).mean(0), rows)
            terms["hidden"] = (added["hidden"][0], self.hidden)
        measured = {name: (total.detach(), count) for name, (total, count) in added.items()}
        return found._replace(terms=terms, metrics={**found.metrics, **measured})

    def _differences(self, call: ModelCall, answer: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Of each example [B] or token [B, T], and which of them count."""
        if self.form == "values":
            return (call.output.float() - answer.float()).square().flatten(1).mean(1), rows
        if self.form == "labels":
            return softened_binary_kl(call.output, answer, self.temperature), rows
        return softened_kl(call.output, answer, self.temperature), call.target_mask if self.form == "tokens" else rows


def softened_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) of logits [..., K], both softened. Times the temperature squared: gradients of softened
    answers are that much smaller, and alpha would mean something else at each temperature."""
    ours, theirs = (F.log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1) * temperature**2


def softened_binary_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The same for logits [B, K] that each stand for a yes: the mean over the questions, [B]."""
    ours, theirs = student.float() / temperature, teacher.float() / temperature
    yes = theirs.sigmoid() * (F.logsigmoid(theirs) - F.logsigmoid(ours))
    no = (-theirs).sigmoid() * (F.logsigmoid(-theirs) - F.logsigmoid(-ours))
    return (yes + no).mean(-1) * temperature**2


def hidden_state_distance(own: Tensor, theirs: Tensor, kept: Tensor | None) -> Tensor:
    """[B] between states [B, N, D] and [B, N, E], as directions: their lengths mean nothing from one model to another.

    Of equal widths the squared distance at each position. Of others the difference between their relations: how alike
    each two positions are in the student and in the teacher, which needs no map between the widths.
    """
    if own.shape[1] != theirs.shape[1]:
        raise UsageError(
            f"techniques.distill.hidden: a block of the teacher has {theirs.shape[1]} positions, and the student's "
            f"{own.shape[1]}; choose models that cut a sample alike, or set it to 0"
        )
    kept = torch.ones(own.shape[:2], dtype=torch.bool, device=own.device) if kept is None else kept
    own, theirs = F.normalize(own.float(), dim=-1), F.normalize(theirs.float(), dim=-1)
    if own.shape[2] == theirs.shape[2]:
        return _mean((own - theirs).square().sum(-1), kept)
    step = -(-own.shape[1] // MOST_POSITIONS)
    own, theirs, kept = own[:, ::step], theirs[:, ::step], kept[:, ::step]
    with torch.autocast(own.device.type, enabled=False):  # of two nearly equal numbers, half precision leaves nothing
        alike = (own @ own.mT - theirs @ theirs.mT).square()
    return _mean(alike.flatten(1), (kept[:, :, None] & kept[:, None, :]).flatten(1))


def _mean(each: Tensor, kept: Tensor) -> Tensor:
    """[B] of [B, n]; 0 where nothing is kept."""
    return torch.where(kept, each, 0.0).sum(1) / kept.sum(1).clamp(min=1)


def _summed(each: Tensor, counted: Tensor | None) -> tuple[Tensor, Any]:
    """Selected rather than multiplied: what fills up a batch may be of any value."""
    if counted is None:
        return each.sum(), float(each.numel())
    return torch.where(counted, each, 0.0).sum(), counted.float().sum()


def _num_rows(batch: Batch) -> float:
    """Of a host batch, those that count."""
    if "weight" in batch:
        return float((np.asarray(batch["weight"]) > 0).sum())
    return float(next(len(value) for value in batch.values() if np.ndim(value)))
