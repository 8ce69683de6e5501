"""Gradient computations beyond a plain backward: norm and clipping, penalties, sums over ranks, and PCGrad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bottega.core.noise import numpy_generator
from bottega.engines.torch.ranks import get_data_group


def compute_norm_and_divisor(
    parameters: Sequence[Tensor], *, scale: Tensor | None, max_norm: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the norm of the unscaled gradients, and the divisor that undoes the loss scale and clips them to `max_norm`.

    The divisor is None if gradients are neither scaled nor clipped.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if scale is not None:
        norm = norm / scale
    if max_norm is None:
        # A copy, because the guard may change the scale before the optimizer divides by it.
        return norm, None if scale is None else scale.clone()
    clip = (norm / max_norm).clamp(min=1.0)
    return norm, clip if scale is None else clip * scale


def clear_gradients(parameters: Sequence[Tensor]) -> None:
    """Free the gradients after an update."""
    for p in parameters:
        p.grad = None


def add_penalty(penalty: Tensor, parameters: Sequence[Tensor], *, scale: Tensor | None) -> None:
    """Add the gradient of a penalty on the weights, once per step, after the gradients were summed over ranks.

    Not by `backward`: the hooks of DDP would take it for another micro-batch.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not penalty.requires_grad:  # everything it depends on is frozen
        return
    gradients = torch.autograd.grad(penalty, trainable, allow_unused=True)
    for parameter, gradient in zip(trainable, gradients, strict=True):
        if gradient is None:
            continue
        gradient = gradient if scale is None else gradient * scale
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def sum_gradients_over_ranks(parameters: Sequence[Tensor]) -> None:
    """Sum the gradients over ranks, for a model not wrapped in DDP: each rank's loss is its part of the global mean."""
    if not dist.is_initialized():
        return
    # A parameter without a gradient on this rank may have one on another.
    trainable = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=get_data_group())
    for parameter, part in zip(trainable, flat.split([g.numel() for g in gradients]), strict=True):
        parameter.grad = part.view_as(parameter)


class PCGrad:
    """Gradient surgery (PCGrad; Yu et al., 2020): sum the gradients of several tasks without their conflicting components.

    Accumulates the gradient of each task over the micro-batches of a step. If two gradients point in opposing
    directions, each is projected onto the normal plane of the other, in an order drawn for the step.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.gradients: dict[str, list[Tensor]] = {}

    def backward(self, losses: Mapping[str, Tensor]) -> None:
        """Add the gradients of one micro-batch, from the loss of each task."""
        trainable = [p for p in self.parameters if p.requires_grad]
        for number, (name, loss) in enumerate(losses.items()):
            is_last = number + 1 == len(losses)
            partial = torch.autograd.grad(loss, trainable, retain_graph=not is_last, allow_unused=True)
            gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(trainable, partial, strict=True)]
            accumulated = self.gradients.get(name)
            self.gradients[name] = (
                gradients if accumulated is None else list(torch._foreach_add(accumulated, gradients))
            )

    def combine(self, *, seed: int, step: int) -> Tensor:
        """Write the combined gradients to the parameters; return the smallest cosine between two tasks' gradients."""
        flat = [torch.cat([g.flatten() for g in gradients]) for gradients in self.gradients.values()]
        self.gradients = {}
        if dist.is_initialized():
            for gradient in flat:
                dist.all_reduce(gradient, group=get_data_group())
        rng = numpy_generator(seed, "gradient order", step)
        squared_norms = [gradient.square().sum().clamp(min=torch.finfo(gradient.dtype).tiny) for gradient in flat]
        smallest_cosine = flat[0].new_ones(())
        total = torch.zeros_like(flat[0])
        for i, gradient_of_task in enumerate(flat):
            projected = gradient_of_task
            for j in rng.permutation(np.delete(np.arange(len(flat)), i)):
                smallest_cosine = torch.minimum(
                    smallest_cosine,
                    torch.dot(gradient_of_task, flat[j]) / (squared_norms[i].sqrt() * squared_norms[j].sqrt()),
                )
                conflict = torch.dot(projected, flat[j]).clamp(max=0.0)
                projected = projected - flat[j] * (conflict / squared_norms[j])
            total += projected
        trainable = [p for p in self.parameters if p.requires_grad]
        for parameter, part in zip(trainable, total.split([p.numel() for p in trainable]), strict=True):
            parameter.grad = part.view_as(parameter)
        return smallest_cosine
