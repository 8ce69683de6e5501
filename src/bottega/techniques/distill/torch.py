"""The loss of distillation in torch, from the outputs and the hidden states of student and teacher.

B batch   T tokens   K classes   N positions   D, E widths of student and teacher
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models, Sums
from bottega.models.build import build_models
from bottega.techniques.call_recorder import CallRecorder, ModelCall, find_blocks, match_blocks, record_activations
from bottega.techniques.distill.task import TEACHER, Distillation
from bottega.techniques.injected_layers import hash_frozen

MAX_POSITIONS = 512
"""Maximum number of positions whose pairwise similarities are compared: for 64 x 64 positions of an image they would take 67
MB a sample."""


def build_teacher(task: Task) -> nn.Module:
    """Return the model of a task, with its pretrained weights."""
    model: nn.Module = build_models(task, 0)["model"]
    return model


def hash_weights(model: nn.Module) -> str:
    """Return one SHA-256 over all tensors of a model."""
    return hash_frozen(model, lambda name: False)


def require_blocks(models: Mapping[str, nn.Module]) -> None:
    """Raise UsageError if a model, by its role, has no sequence of blocks whose states can be compared."""
    for role, model in models.items():
        if not find_blocks(model):
            raise UsageError(
                f"techniques.distill.hidden: {role} is a {type(model).__name__}, which has no sequence of blocks; set it to 0"
            )


def compute_loss(task: Distillation, models: Models, batch: Batch, rng: Noise) -> Loss:
    """Return the loss of the data and of the teacher, weighted by alpha."""
    student, teacher = models["model"], models[TEACHER]
    if student.training and not task.alpha and not task.hidden:
        # With weight 0 the teacher is only evaluated; training steps do not call it.
        return task.inner.loss(models, batch, rng)
    recorder = CallRecorder(student, computes_token_loss=task.form == "tokens")
    pairs = match_blocks(find_blocks(student), find_blocks(teacher)) if task.hidden else []
    with record_activations([student_block for student_block, _ in pairs]) as student_states:
        output = task.inner.loss({**models, "model": recorder}, batch, rng)
    with torch.no_grad(), record_activations([teacher_block for _, teacher_block in pairs]) as teacher_states:
        teacher_output = recorder.single_call.replay_on(teacher)
    example_mask = batch["weight"] > 0 if "weight" in batch else None
    terms = {name: (total, weight * (1 - task.alpha)) for name, (total, weight) in output.terms.items()}
    distances, mask = _compute_distances(task, recorder.single_call, teacher_output, example_mask)
    added_sums: Sums = {"distill": _masked_sum(distances, mask)}
    terms["distill"] = (added_sums["distill"][0], task.alpha)
    if task.hidden:
        position_mask = batch[task.padding] > 0 if task.padding is not None else recorder.single_call.target_mask
        block_distances = [
            hidden_state_distance(student_states[i], teacher_states[i], position_mask) for i in range(len(pairs))
        ]
        added_sums["hidden"] = _masked_sum(torch.stack(block_distances).mean(0), example_mask)
        terms["hidden"] = (added_sums["hidden"][0], task.hidden)
    added_metrics = {name: (total.detach(), count) for name, (total, count) in added_sums.items()}
    return output._replace(terms=terms, metrics={**output.metrics, **added_metrics})


def _compute_distances(
    task: Distillation, call: ModelCall, teacher_output: Tensor, example_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the distance of each example `(B,)` or token `(B, T)`, and the mask of those that count."""
    if task.form == "values":
        return (call.output.float() - teacher_output.float()).square().flatten(1).mean(1), example_mask
    if task.form == "labels":
        return softened_binary_kl(call.output, teacher_output, task.temperature), example_mask
    return softened_kl(
        call.output, teacher_output, task.temperature
    ), call.target_mask if task.form == "tokens" else example_mask


def softened_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) of logits `(..., K)`, both divided by the temperature.

    The result is multiplied by the temperature squared, because gradients of softened logits are smaller by this factor. So
    alpha means the same at each temperature.
    """
    ours, theirs = (F.log_softmax(logits.float() / temperature, dim=-1) for logits in (student, teacher))
    return F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1) * temperature**2


def softened_binary_kl(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return the softened KL of independent binary logits `(B, K)`: the mean over labels, `(B,)`."""
    ours, theirs = student.float() / temperature, teacher.float() / temperature
    positive = theirs.sigmoid() * (F.logsigmoid(theirs) - F.logsigmoid(ours))
    negative = (-theirs).sigmoid() * (F.logsigmoid(-theirs) - F.logsigmoid(-ours))
    return (positive + negative).mean(-1) * temperature**2


def hidden_state_distance(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """Return the distance `(B,)` between normalised hidden states `(B, N, D)` and `(B, N, E)`.

    For equal widths it is the squared distance at each position. Otherwise it is the squared difference of their similarity
    matrices over positions, which needs no projection between the widths.
    """
    if student.shape[1] != teacher.shape[1]:
        raise UsageError(
            f"techniques.distill.hidden: a block of the teacher has {teacher.shape[1]} positions, but the student's has "
            f"{student.shape[1]}; choose models with the same number of positions, or set it to 0"
        )
    mask = torch.ones(student.shape[:2], dtype=torch.bool, device=student.device) if mask is None else mask
    student, teacher = F.normalize(student.float(), dim=-1), F.normalize(teacher.float(), dim=-1)
    if student.shape[2] == teacher.shape[2]:
        return _masked_mean((student - teacher).square().sum(-1), mask)
    step = -(-student.shape[1] // MAX_POSITIONS)
    student, teacher, mask = student[:, ::step], teacher[:, ::step], mask[:, ::step]
    with torch.autocast(student.device.type, enabled=False):  # the difference of nearly equal numbers needs float32
        difference = (student @ student.mT - teacher @ teacher.mT).square()
    return _masked_mean(difference.flatten(1), (mask[:, :, None] & mask[:, None, :]).flatten(1))


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean `(B,)` of `(B, n)` over the mask; 0 where it is empty."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def _masked_sum(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Any]:
    """Return sum and count over the mask. Values are selected rather than multiplied, since padding may be NaN."""
    if mask is None:
        return values.sum(), float(values.numel())
    return torch.where(mask, values, 0.0).sum(), mask.float().sum()
