"""Spike-timing-dependent plasticity (STDP): weights of spiking layers also follow spike timing, beside the gradient.

A forward pass changes nothing. The weight changes of a batch's spike trains are summed over examples, and after the
optimizer step the weights move once by their mean. An optional reward weights each example by its reward above the
running mean (Frémaux & Gerstner, 2016).

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
from bottega.models.multitask import MultitaskModel
from bottega.models.spiking.stdp import (
    STDPRule,
    apply_soft_bounds,
    clamp_to_bounds,
    compute_gain_and_loss,
    compute_weight_change,
    match_row_statistics,
)
from bottega.models.spiking.units import SpikingGate, SpikingLayer
from bottega.techniques.wrapped_task import WrappedTask

KEY = "techniques.plasticity"
SUM_PREFIX, REWARDED_PREFIX, COUNT_PREFIX = "plasticity/sum/", "plasticity/rewarded/", "plasticity/count/"
REWARD = "plasticity/reward"
MIN_PROBABILITY = 1e-7
"""Smallest probability whose logarithm is taken; an underflow would give an infinite reward."""


class SpikeTrains(NamedTuple):
    """Spikes into and out of a layer in one call; B are examples, or all their tokens."""

    pre: Tensor
    """`(S, B, I)`"""
    post: Tensor
    """`(S, B, O)`"""
    mask: Tensor | None = None
    """`(B,)`: 0 for padding, if the layer was given a mask; otherwise the weights of the batch decide."""
    task_name: str | None = None
    """Name of the task, in a multitask model."""


@final
class Plasticity(WrappedTask):
    """A task with STDP in the spiking layers of its model. It sets hooks in the model, which is therefore not compiled."""

    divergence_key: ClassVar[str] = "techniques.plasticity.rate"
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
        """True: hooks in the layers need the plain modules."""
        return True

    def specs(self) -> dict[str, ModelSpec]:
        specs = self.inner.specs()
        return {**specs, "model": specs["model"].with_change(self._check_layers)}

    def _check_layers(self, models: Models, seed: int) -> None:
        select_spiking_layers(models["model"], self.targets)  # raises before anything is computed

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """Return the state with the running mean reward, as a sum and its weight, so that it is not biased to 0."""
        reward_state = {REWARD: torch.zeros(2)} if self.reward != "none" else {}
        return {**self.inner.state(parameters), **reward_state}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        model = models["model"]
        if not model.training:
            return self.inner.loss(models, batch, rng)
        layers = select_trainable_layers(model, self.targets)
        with record_spikes(model, list(layers)) as trains:
            output = self.inner.loss(models, batch, rng)
        with torch.no_grad(), torch.autocast(rng.positions.device.type, enabled=False):
            plasticity_stats = self._compute_stats(layers, trains, output, batch)
        return output._replace(stats={**output.stats, **plasticity_stats})

    def _compute_stats(
        self, layers: Mapping[SpikingLayer, str], trains: Mapping[int, list[SpikeTrains]], output: Loss, batch: Batch
    ) -> dict[str, Tensor]:
        """Return sums over examples. A layer that was not called has sums of 0: ranks are summed name by name."""
        reward = compute_reward(output.rows, self.reward) if self.reward != "none" else None
        sums: dict[str, Tensor] = {}
        for number, (layer, name) in enumerate(layers.items()):
            zero = torch.zeros_like(layer.synapse.weight, dtype=torch.float32)
            keys = [kind + name for kind in (SUM_PREFIX, *((REWARDED_PREFIX,) if reward is not None else ()))]
            layer_sums = {f"{key}{suffix}": zero for key in keys for suffix in self._suffixes}
            layer_sums[COUNT_PREFIX + name] = zero.new_zeros(())
            for spikes in trains[number]:
                mask = _get_train_mask(spikes, batch)
                weight = mask if mask is not None else torch.ones(spikes.post.shape[1], device=zero.device)
                changes = self._compute_weight_changes(spikes, mask, SUM_PREFIX + name)
                if reward is not None:
                    changes |= self._compute_weight_changes(
                        spikes, weight * _repeat_per_train(reward, spikes), REWARDED_PREFIX + name
                    )
                changes[COUNT_PREFIX + name] = weight.sum()
                layer_sums = {key: layer_sums[key] + value.float() for key, value in changes.items()}
            # Two layers may share their weights, each with its own spike trains.
            sums |= {key: sums[key] + value if key in sums else value for key, value in layer_sums.items()}
        if reward is not None and layers:
            example_mask = _get_example_mask(batch, None)
            counts = torch.ones_like(reward) if example_mask is None else example_mask
            sums[REWARD] = torch.stack((torch.where(counts > 0, reward, 0.0).sum(), counts.sum()))
        return sums

    @property
    def _suffixes(self) -> tuple[str, ...]:
        """Soft bounds need potentiation and depression separately; hard bounds only their difference, at half the cost."""
        return ("",) if self.bounds == "hard" else ("/gain", "/loss")

    def _compute_weight_changes(self, spikes: SpikeTrains, weight: Tensor | None, key: str) -> dict[str, Tensor]:
        if self.bounds == "hard":
            return {key: compute_weight_change(spikes.pre, spikes.post, self.rule, weight=weight)}
        gain_loss_pair = compute_gain_and_loss(spikes.pre, spikes.post, self.rule, weight=weight)
        return {f"{key}{suffix}": value for suffix, value in zip(self._suffixes, gain_loss_pair, strict=True)}

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        updated = dict(self.inner.update(tensors, batch_stats, rng))
        mean_reward: Tensor | None = None
        if REWARD in batch_stats:
            total, count = batch_stats[REWARD]
            mean = torch.stack((total / count.clamp(min=1), torch.ones_like(total)))
            updated[REWARD] = self.reward_decay * tensors[REWARD] + (1 - self.reward_decay) * mean
            mean_reward = updated[REWARD][0] / updated[REWARD][1]
        for key in batch_stats:
            if key.startswith(COUNT_PREFIX):
                name = key.removeprefix(COUNT_PREFIX)
                current = updated if name in updated else tensors
                updated[name] = self._move_weight(current[name].float(), name, batch_stats, mean_reward)
        return updated

    def _move_weight(
        self, weight: Tensor, name: str, batch_stats: Mapping[str, Tensor], mean_reward: Tensor | None
    ) -> Tensor:
        """Return a weight after its mean change; unchanged if that is not finite."""
        deltas = [batch_stats[f"{SUM_PREFIX}{name}{suffix}"] for suffix in self._suffixes]
        if mean_reward is not None:
            rewarded = [batch_stats[f"{REWARDED_PREFIX}{name}{suffix}"] for suffix in self._suffixes]
            deltas = [
                weighted - mean_reward * unweighted for weighted, unweighted in zip(rewarded, deltas, strict=True)
            ]
        delta = deltas[0]
        if self.bounds == "soft":
            delta = apply_soft_bounds(deltas[0], deltas[1], weight, low=self.low, high=self.high)
        new = torch.addcmul(weight, delta, self.rate / batch_stats[COUNT_PREFIX + name].clamp(min=1))
        new = match_row_statistics(new, weight) if self.normalise else new
        # A bound would make an infinite change finite, so the change itself is checked.
        return torch.where(delta.sum().isfinite(), clamp_to_bounds(new, weight, low=self.low, high=self.high), weight)


# Layers and their spike trains


def select_spiking_layers(model: nn.Module, targets: Sequence[str] | None) -> dict[SpikingLayer, str]:
    """Return the spiking layers that `targets` name, with their names; raise UsageError if there are none."""
    layers = {module: name for name, module in model.named_modules() if isinstance(module, SpikingLayer)}
    if not layers:
        raise UsageError(
            f"techniques: plasticity needs spiking layers, but {type(model).__name__} has none; remove it, or train a "
            "spiking model such as classify/spiking"
        )
    if targets is None:
        return layers
    selected: dict[SpikingLayer, str] = {}
    for pattern in targets:
        matches = {layer: name for layer, name in layers.items() if _matches_layer(pattern, name)}
        if not matches:
            raise UsageError(
                f"{KEY}.targets: {pattern!r} is not a spiking layer; the model has {', '.join(layers.values())}"
            )
        selected |= matches
    return {layer: name for layer, name in layers.items() if layer in selected}  # in the order of the model


def _matches_layer(pattern: str, name: str) -> bool:
    """Return whether the layer `name` is `pattern`, is inside the module `pattern`, or matches it as a regular expression."""
    if name == pattern or name.startswith(pattern + "."):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise UsageError(f"{KEY}.targets: {pattern!r} is not a regular expression: {error}") from None


def select_trainable_layers(model: nn.Module, targets: Sequence[str] | None) -> dict[SpikingLayer, str]:
    """Return the selected layers that are not frozen, with the name of their weight (the first, if it is shared)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = select_spiking_layers(model, targets)
    return {layer: names[id(layer.synapse.weight)] for layer in layers if layer.synapse.weight.requires_grad}


@contextmanager
def record_spikes(model: nn.Module, layers: Sequence[SpikingLayer]) -> Iterator[dict[int, list[SpikeTrains]]]:
    """Context that yields the spike trains of each layer by its number, one for each call, with a router's token mask.

    The hooks are removed at its end, so activations recomputed in the backward pass are not counted twice. They are on the
    synapse and the units, not on the layer: a router multiplies a constant current once, and calls its units for all steps.
    """
    recorded: dict[int, list[SpikeTrains]] = {number: [] for number in range(len(layers))}
    inputs_by_layer: dict[int, Tensor] = {}
    token_mask: Tensor | None = None
    task_name: str | None = None

    def set_task_name(multitask_model: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal task_name
        task_name = inputs[0]

    def set_mask(gate: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal token_mask
        token_mask = inputs[1] if len(inputs) > 1 else kwargs.get("token_mask")

    def clear_mask(gate: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal token_mask
        token_mask = None

    def register_hooks(number: int, layer: SpikingLayer) -> list[Any]:
        def record_input(synapse: nn.Module, inputs: Any, output: Any) -> None:
            inputs_by_layer[number] = inputs[0].detach()

        def record_output(neuron: nn.Module, inputs: Any, output: Any) -> None:
            post, pre = output.detach(), inputs_by_layer.pop(number)
            pre = pre if len(pre) == len(post) else pre.expand(len(post), *pre.shape[1:])
            # Each token of an example is a spike train.
            tokens = token_mask if token_mask is None else (token_mask.detach() > 0).float().flatten()
            recorded[number].append(SpikeTrains(pre.flatten(1, -2), post.flatten(1, -2), tokens, task_name))

        return [layer.synapse.register_forward_hook(record_input), layer.neuron.register_forward_hook(record_output)]

    hooks = [hook for number, layer in enumerate(layers) for hook in register_hooks(number, layer)]
    for module in model.modules():
        if isinstance(module, SpikingGate):
            hooks.append(module.register_forward_pre_hook(set_mask, with_kwargs=True))
            hooks.append(module.register_forward_hook(clear_mask))
        elif isinstance(module, MultitaskModel):
            hooks.append(module.register_forward_pre_hook(set_task_name))
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


# Reward and masks


def compute_reward(rows: Mapping[str, Tensor], kind: Literal["accuracy", "loss"]) -> Tensor:
    """Return the reward of each example, `(batch,)`: 1 if it was classified correctly, else 0; or its log likelihood."""
    probability, label, labels = (rows.get(name) for name in ("probability", "label", "labels"))
    if probability is None or (label is None and labels is None):
        raise UsageError(
            f"{KEY}.reward: {kind} needs class probabilities and labels, which this task does not report; set it to none"
        )
    probability = probability.detach().float()
    if label is not None:
        is_correct = (probability.argmax(1) == label).float()
        likelihood = probability.gather(1, label.long()[:, None])[:, 0]
        return is_correct if kind == "accuracy" else likelihood.clamp(min=MIN_PROBABILITY).log()
    assert labels is not None
    likelihood = torch.where(labels > 0, probability, 1 - probability)
    return (
        (likelihood >= 0.5).float().mean(1)
        if kind == "accuracy"
        else likelihood.clamp(min=MIN_PROBABILITY).log().mean(1)
    )


def _get_train_mask(spikes: SpikeTrains, batch: Batch) -> Tensor | None:
    """Return `(B,)`: 1 for real examples or tokens, 0 for padding; None if there is no padding."""
    if spikes.mask is not None:
        return spikes.mask
    example_mask = _get_example_mask(batch, spikes.task_name)
    return None if example_mask is None else _repeat_per_train(example_mask, spikes)


def _get_example_mask(batch: Batch, task_name: str | None) -> Tensor | None:
    """Return the mask of real examples, `(batch,)`, in a multitask batch combined with the mask of the task."""
    batches = (batch, batch[task_name]) if task_name is not None else (batch,)
    masks = [each["weight"] > 0 for each in batches if "weight" in each]
    return torch.stack(masks).all(0).float() if masks else None


def _repeat_per_train(values: Tensor, spikes: SpikeTrains) -> Tensor:
    """Repeat the value of each example for each of its spike trains, `(B,)`."""
    num_trains = spikes.post.shape[1]
    trains_per_example, remainder = divmod(num_trains, len(values))
    assert not remainder, f"{num_trains} trains of {len(values)} examples"
    return values.repeat_interleave(trains_per_example)
