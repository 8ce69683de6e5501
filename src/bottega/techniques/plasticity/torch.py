"""Plasticity: the weights of spiking layers also follow the timing of spikes, beside what the gradient does to them.

A forward changes nothing. What the spike trains of a batch call for is summed over its examples, and after the optimizer's
step the weights move once by the mean of it. A reward, where one is asked for, counts each example by how much better it
went than usual (Frémaux & Gerstner, 2016).

S time steps   B examples   I inputs   O outputs
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.types import Array, Batch, Loss, Models
from bottega.models.several import Several
from bottega.models.spiking.stdp import (
    STDPRule,
    apply_soft_bounds,
    clamp_to_bounds,
    gain_and_loss,
    match_row_statistics,
    weight_change,
)
from bottega.models.spiking.units import SpikingGate, SpikingLayer
from bottega.techniques.wrapped_task import WrappedTask

KEY = "techniques.plasticity"
SUM, REWARDED, COUNT = "plasticity/sum/", "plasticity/rewarded/", "plasticity/count/"
REWARD = "plasticity/reward"
SMALLEST = 1e-7
"""A probability that underflows would cost infinitely much, and the weights with it."""


class SpikeTrains(NamedTuple):
    """What went through a layer in one call; B are examples, or all their tokens."""

    pre: Tensor
    """[S, B, I]"""
    post: Tensor
    """[S, B, O]"""
    mask: Tensor | None = None
    """[B]: 0 for padding, where the layer was told; else the rows of the batch tell."""
    part: str | None = None
    """Of several tasks, whose it was."""


@final
class Plasticity(WrappedTask):
    """Any task whose model has spiking layers. It listens inside the model, which is therefore not compiled."""

    overflows_by: ClassVar[str] = "techniques.plasticity.rate"
    rule: STDPRule = STDPRule()
    rate: float
    reward: Literal["none", "accuracy", "loss"] = "none"
    reward_decay: float = 0.99
    bounds: Literal["hard", "soft"] = "hard"
    low: float = -1.0
    high: float = 1.0
    normalise: bool = False
    targets: tuple[str, ...] | None = None

    @property
    def needs_unwrapped_model(self) -> bool:  # type: ignore[override]
        """Who listens between the layers has to find them as they are."""
        return True

    def specs(self) -> dict[str, ModelSpec]:
        specs = self.inner.specs()
        return {**specs, "model": specs["model"].changed(self._check_layers)}

    def _check_layers(self, models: Models, seed: int) -> None:
        select_spiking_layers(models["model"], self.targets)  # refuses, before anything is computed

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """The mean reward so far as a sum and its weight, so that the first steps are not compared with 0."""
        own = {REWARD: torch.zeros(2)} if self.reward != "none" else {}
        return {**self.inner.state(parameters), **own}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        model = models["model"]
        if not model.training:
            return self.inner.loss(models, batch, rng)
        layers = select_trainable_layers(model, self.targets)
        with record_spikes(model, list(layers)) as heard:
            found = self.inner.loss(models, batch, rng)
        with torch.no_grad(), torch.autocast(rng.positions.device.type, enabled=False):
            own = self._seen(layers, heard, found, batch)
        return found._replace(stats={**found.stats, **own})

    def _seen(
        self, layers: Mapping[SpikingLayer, str], heard: Mapping[int, list[SpikeTrains]], found: Loss, batch: Batch
    ) -> dict[str, Tensor]:
        """Sums over the examples. A layer that nothing came by sums to 0, and has to be there: ranks add up name by name."""
        reward = compute_reward(found.rows, self.reward) if self.reward != "none" else None
        sums: dict[str, Tensor] = {}
        for number, (layer, name) in enumerate(layers.items()):
            zero = torch.zeros_like(layer.synapse.weight, dtype=torch.float32)
            places = [kind + name for kind in (SUM, *((REWARDED,) if reward is not None else ()))]
            one = {f"{place}{side}": zero for place in places for side in self._sides}
            one[COUNT + name] = zero.new_zeros(())
            for train in heard[number]:
                counted = _counted(train, batch)
                weight = counted if counted is not None else torch.ones(train.post.shape[1], device=zero.device)
                new = self._called_for(train, counted, SUM + name)
                if reward is not None:
                    new |= self._called_for(train, weight * _each(reward, train), REWARDED + name)
                new[COUNT + name] = weight.sum()
                one = {key: one[key] + value.float() for key, value in new.items()}
            # Two layers may share their weights, each with its own trains.
            sums |= {key: sums[key] + value if key in sums else value for key, value in one.items()}
        if reward is not None and layers:
            rows = _rows_that_count(batch, None)
            counts = torch.ones_like(reward) if rows is None else rows
            sums[REWARD] = torch.stack((torch.where(counts > 0, reward, 0.0).sum(), counts.sum()))
        return sums

    @property
    def _sides(self) -> tuple[str, ...]:
        """Soft bounds look at gain and loss by themselves, and hard ones at what is left of both: half the work."""
        return ("",) if self.bounds == "hard" else ("/gain", "/loss")

    def _called_for(self, train: SpikeTrains, weight: Tensor | None, place: str) -> dict[str, Tensor]:
        if self.bounds == "hard":
            return {place: weight_change(train.pre, train.post, self.rule, weight=weight)}
        both = gain_and_loss(train.pre, train.post, self.rule, weight=weight)
        return {f"{place}{side}": found for side, found in zip(self._sides, both, strict=True)}

    def update(self, tensors: Mapping[str, Array], seen: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        found = dict(self.inner.update(tensors, seen, rng))
        usual: Tensor | None = None
        if REWARD in seen:
            total, count = seen[REWARD]
            mean = torch.stack((total / count.clamp(min=1), torch.ones_like(total)))
            found[REWARD] = self.reward_decay * tensors[REWARD] + (1 - self.reward_decay) * mean
            usual = found[REWARD][0] / found[REWARD][1]
        for key in seen:
            if key.startswith(COUNT):
                name = key.removeprefix(COUNT)
                by_now = found if name in found else tensors
                found[name] = self._moved(by_now[name].float(), name, seen, usual)
        return found

    def _moved(self, weight: Tensor, name: str, seen: Mapping[str, Tensor], usual: Tensor | None) -> Tensor:
        """A weight after its mean change; as it was, where that is no number."""
        found = [seen[f"{SUM}{name}{side}"] for side in self._sides]
        if usual is not None:
            good = [seen[f"{REWARDED}{name}{side}"] for side in self._sides]
            found = [better - usual * plain for better, plain in zip(good, found, strict=True)]
        called_for = found[0]
        if self.bounds == "soft":
            called_for = apply_soft_bounds(found[0], found[1], weight, low=self.low, high=self.high)
        new = torch.addcmul(weight, called_for, self.rate / seen[COUNT + name].clamp(min=1))
        new = match_row_statistics(new, weight) if self.normalise else new
        # Of an infinite change a bound would make a number.
        return torch.where(
            called_for.sum().isfinite(), clamp_to_bounds(new, weight, low=self.low, high=self.high), weight
        )


# What is listened to


def select_spiking_layers(model: nn.Module, targets: Sequence[str] | None) -> dict[SpikingLayer, str]:
    """The spiking layers that are meant, each with its name; refused in one line where there are none."""
    there = {module: name for name, module in model.named_modules() if isinstance(module, SpikingLayer)}
    if not there:
        raise UsageError(
            f"techniques: plasticity changes spiking layers, and {type(model).__name__} has none; leave it out, or train a "
            "spiking model such as classify/spiking"
        )
    if targets is None:
        return there
    found: dict[SpikingLayer, str] = {}
    for word in targets:
        meant = {layer: name for layer, name in there.items() if _is_meant(word, name)}
        if not meant:
            raise UsageError(f"{KEY}.targets: {word!r} is no spiking layer; there is {', '.join(there.values())}")
        found |= meant
    return {layer: name for layer, name in there.items() if layer in found}  # in the order of the model


def _is_meant(word: str, name: str) -> bool:
    """By its name, by the part it is in, or by a pattern over its whole name."""
    if name == word or name.startswith(word + "."):
        return True
    try:
        return re.fullmatch(word, name) is not None
    except re.error as error:
        raise UsageError(f"{KEY}.targets: {word!r} is not a regular expression: {error}") from None


def select_trainable_layers(model: nn.Module, targets: Sequence[str] | None) -> dict[SpikingLayer, str]:
    """Those whose weights are not frozen, each with the name of its weights; the first name, where layers share them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = select_spiking_layers(model, targets)
    return {layer: names[id(layer.synapse.weight)] for layer in layers if layer.synapse.weight.requires_grad}


@contextmanager
def record_spikes(model: nn.Module, layers: Sequence[SpikingLayer]) -> Iterator[dict[int, list[SpikeTrains]]]:
    """Number of the layer -> its trains, one for each time it was called; a router also says which of its tokens count.

    Only inside: what is computed again for the backward pass does not count twice. At the synapse and at the units, and not
    at the layer around them: a router multiplies a constant current once, and calls its units for all steps.
    """
    heard: dict[int, list[SpikeTrains]] = {number: [] for number in range(len(layers))}
    arrived: dict[int, Tensor] = {}
    counted: Tensor | None = None
    part: str | None = None

    def begin(several: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal part
        part = inputs[0]

    def enter(gate: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        nonlocal counted
        counted = inputs[1] if len(inputs) > 1 else named.get("counted")

    def end(gate: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal counted
        counted = None

    def hooks_of(number: int, layer: SpikingLayer) -> list[Any]:
        def arrive(synapse: nn.Module, inputs: Any, output: Any) -> None:
            arrived[number] = inputs[0].detach()

        def leave(neuron: nn.Module, inputs: Any, output: Any) -> None:
            post, pre = output.detach(), arrived.pop(number)
            pre = pre if len(pre) == len(post) else pre.expand(len(post), *pre.shape[1:])
            # Several tokens of an example are as many trains.
            tokens = counted if counted is None else (counted.detach() > 0).float().flatten()
            heard[number].append(SpikeTrains(pre.flatten(1, -2), post.flatten(1, -2), tokens, part))

        return [layer.synapse.register_forward_hook(arrive), layer.neuron.register_forward_hook(leave)]

    hooks = [hook for number, layer in enumerate(layers) for hook in hooks_of(number, layer)]
    for module in model.modules():
        if isinstance(module, SpikingGate):
            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(end))
        elif isinstance(module, Several):
            hooks.append(module.register_forward_pre_hook(begin))
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


# What it was worth


def compute_reward(rows: Mapping[str, Tensor], kind: Literal["accuracy", "loss"]) -> Tensor:
    """[b]: 1 for an example that was told right and 0 for one that was not, or the log likelihood of what it is."""
    probability, label, labels = (rows.get(name) for name in ("probability", "label", "labels"))
    if probability is None or (label is None and labels is None):
        raise UsageError(
            f"{KEY}.reward: {kind} needs to know of each example whether it was told right, and this task does not say; "
            "set it to none"
        )
    chance = probability.detach().float()
    if label is not None:
        is_right = (chance.argmax(1) == label).float()
        told = chance.gather(1, label.long()[:, None])[:, 0]
        return is_right if kind == "accuracy" else told.clamp(min=SMALLEST).log()
    assert labels is not None
    told = torch.where(labels > 0, chance, 1 - chance)
    return (told >= 0.5).float().mean(1) if kind == "accuracy" else told.clamp(min=SMALLEST).log().mean(1)


def _counted(train: SpikeTrains, batch: Batch) -> Tensor | None:
    """[B]: 1 for what counts and 0 for what fills up; None where all of it does."""
    if train.mask is not None:
        return train.mask
    rows = _rows_that_count(batch, train.part)
    return None if rows is None else _each(rows, train)


def _rows_that_count(batch: Batch, part: str | None) -> Tensor | None:
    """[b], of a part of several tasks those of its own block."""
    blocks = (batch, batch[part]) if part is not None else (batch,)
    said = [block["weight"] > 0 for block in blocks if "weight" in block]
    return torch.stack(said).all(0).float() if said else None


def _each(values: Tensor, train: SpikeTrains) -> Tensor:
    """Of each of the trains [B] what is said of its example."""
    number = train.post.shape[1]
    times, rest = divmod(number, len(values))
    assert not rest, f"{number} trains of {len(values)} examples"
    return values.repeat_interleave(times)
