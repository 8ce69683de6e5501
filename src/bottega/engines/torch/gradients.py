"""Gradients that are no plain backward: of what the weights cost, of terms that must not fight, and summed over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bottega.core.noise import numpy_generator
from bottega.engines.torch.ranks import data_group


def add_penalty(penalty: Tensor, parameters: Sequence[Tensor], *, scale: Tensor | None) -> None:
    """Once a step, after the examples' gradients are in place and the same on all ranks, as the penalty is.

    Not by `backward`: the hooks of replicated parameters would take it for another micro-batch.
    """
    learning = [p for p in parameters if p.requires_grad]
    if not penalty.requires_grad:  # all that it is about is frozen
        return
    found = torch.autograd.grad(penalty, learning, allow_unused=True)
    for parameter, gradient in zip(learning, found, strict=True):
        if gradient is None:
            continue
        gradient = gradient if scale is None else gradient * scale
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def sum_gradients_over_ranks(parameters: Sequence[Tensor]) -> None:
    """The sum over ranks, for a model that is not wrapped: each rank's loss is its share of the mean over all."""
    if not dist.is_initialized():
        return
    # A parameter that this rank's share had no use for still has to be summed with the others'.
    learning = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in learning]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=data_group())
    for parameter, part in zip(learning, flat.split([g.numel() for g in gradients]), strict=True):
        parameter.grad = part.view_as(parameter)


class PCGrad:
    """The gradient of each term by itself over the micro-batches of a step, and one that none of them objects to.

    PCGrad (Yu et al., 2020): where two gradients point against each other, each loses its part along the other, the
    others being met in an order drawn for the step.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.gradients: dict[str, list[Tensor]] = {}

    def backward(self, terms: Mapping[str, Tensor]) -> None:
        learning = [p for p in self.parameters if p.requires_grad]
        for number, (name, value) in enumerate(terms.items()):
            more = number + 1 < len(terms)
            found = torch.autograd.grad(value, learning, retain_graph=more, allow_unused=True)
            whole = [torch.zeros_like(p) if g is None else g for p, g in zip(learning, found, strict=True)]
            old = self.gradients.get(name)
            self.gradients[name] = whole if old is None else list(torch._foreach_add(old, whole))

    def combine(self, *, seed: int, step: int) -> Tensor:
        """Writes the gradients, and gives the cosine of the two that disagree most."""
        flat = [torch.cat([g.flatten() for g in gradients]) for gradients in self.gradients.values()]
        self.gradients = {}
        if dist.is_initialized():
            for gradient in flat:
                dist.all_reduce(gradient, group=data_group())
        rng = numpy_generator(seed, "gradient order", step)
        squares = [gradient.square().sum().clamp(min=torch.finfo(gradient.dtype).tiny) for gradient in flat]
        worst = flat[0].new_ones(())
        total = torch.zeros_like(flat[0])
        for i, own in enumerate(flat):
            changed = own
            for j in rng.permutation(np.delete(np.arange(len(flat)), i)):
                worst = torch.minimum(worst, torch.dot(own, flat[j]) / (squares[i].sqrt() * squares[j].sqrt()))
                against = torch.dot(changed, flat[j]).clamp(max=0.0)
                changed = changed - flat[j] * (against / squares[j])
            total += changed
        learning = [p for p in self.parameters if p.requires_grad]
        for parameter, part in zip(learning, total.split([p.numel() for p in learning]), strict=True):
            parameter.grad = part.view_as(parameter)
        return worst
