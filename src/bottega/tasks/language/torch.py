"""The loss of causal language modelling in torch, with the statistics of its experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.core.types import Array, Batch, Loss, Models, Sums
from bottega.models.decoder.torch import LayerRoutings
from bottega.models.experts import torch as experts
from bottega.models.losses import IGNORE_INDEX
from bottega.models.spiking.units import sum_activity, unit_activity
from bottega.tasks.language.task import Language


def compute_loss(task: Language, models: Models, batch: Batch) -> Loss:
    """Return the summed negative log likelihood of the targets, and what the experts add to it."""
    inputs, documents = _split_inputs(batch)
    targets = batch["input_ids"][:, 1:]
    if "attention_mask" in batch:
        targets = targets.masked_fill(batch["attention_mask"][:, 1:] <= 0, IGNORE_INDEX)
    if "weight" in batch:
        targets = targets.masked_fill((batch["weight"] <= 0)[:, None], IGNORE_INDEX)
    metrics: Sums = {}
    if task.shape.experts is None:
        out = Loss(terms={"loss": (models["model"](inputs, targets, documents=documents), 1.0)}, metrics=metrics)
    else:
        is_counted = targets != IGNORE_INDEX
        total, routings = models["model"](inputs, targets, documents=documents, token_mask=is_counted)
        out = _build_expert_loss(task, total, routings, metrics)
        metrics |= _compute_routing_metrics(task, routings, is_counted, is_training=models["model"].training)
        if not models["model"].training:
            out.rows.update(_collect_routing_rows(task, routings, is_counted))
    if "bytes" in batch:
        num_bytes = batch["bytes"].float()
        if "weight" in batch:
            num_bytes = num_bytes * (batch["weight"] > 0)
        metrics["bits_per_byte"] = (out.terms["loss"][0].detach() / math.log(2.0), num_bytes.sum())
    return out


def compute_logits(models: Models, batch: Batch) -> Tensor:
    """Return all logits, (batch, length, vocabulary); for small batches only."""
    inputs, documents = _split_inputs(batch)
    return models["model"](inputs, documents=documents)


def update_routers(
    task: Language, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise
) -> Mapping[str, Array]:
    """Return the new state of each router, by name, from the statistics of a step."""
    updated: dict[str, Tensor] = {}
    for name in task.expert_layers:
        assert task.shape.experts is not None, "a model with expert layers has experts"
        updated |= experts.update_router_state(tensors, batch_stats, name=name, shape=task.shape.experts, rng=rng)
    return updated


def compute_load_entropy(loads: Sequence[Tensor]) -> Tensor:
    """Return the entropy of the load of each layer's experts, averaged over layers."""
    return experts.load_entropy(torch.stack(list(loads)))


def _build_expert_loss(task: Language, total: Tensor, routings: LayerRoutings, metrics: Sums) -> Loss:
    shape = task.shape.experts
    assert shape is not None, "a model with routed layers has experts"
    losses = {"balance": [routing.balance for routing in routings], "router_z": [routing.z for routing in routings]}
    weights = task.get_auxiliary_weights()
    terms = {name: (torch.stack(losses[name]).sum(), weight) for name, weight in weights.items()}
    tokens = torch.stack([routing.tokens for routing in routings]).sum()
    # The reported loss is the cross-entropy alone, without the auxiliary losses that are minimised with it.
    metrics["loss"] = (total.detach(), routings[0].tokens)
    max_entropy = math.log(max(2, shape.num_experts))
    metrics["gate_entropy"] = (torch.stack([routing.entropy for routing in routings]).sum() / max_entropy, tokens)
    stats: dict[str, Tensor] = {}
    for name, routing in zip(task.expert_layers, routings, strict=True):
        stats |= experts.routing_stats(routing, name)
    return Loss({"loss": (total, 1.0), **terms}, metrics, {}, stats)


def _compute_routing_metrics(task: Language, routings: LayerRoutings, is_counted: Tensor, *, is_training: bool) -> Sums:
    """Return the drop rate, if experts have a capacity (in training only), and the firing rate of spiking routers."""
    metrics: Sums = {}
    shape = task.shape.experts
    assert shape is not None, "a model with routed layers has experts"
    if is_training and shape.has_capacity_limit:
        dropped, tokens = (
            torch.stack([getattr(routing, name) for routing in routings]).sum() for name in ("dropped", "tokens")
        )
        metrics["drop_rate"] = (dropped, tokens * shape.top_k)
    rates = _collect_firing_rates(routings)
    if rates is not None:
        metrics["firing_rate"] = sum_activity(rates.flatten(0, 1)[None], is_counted.flatten())["firing_rate"]
    return metrics


def _collect_routing_rows(task: Language, routings: LayerRoutings, is_counted: Tensor) -> dict[str, Tensor]:
    """Return the expert load and the unit activity of each example, for `score` in an evaluation."""
    shape = task.shape.experts
    assert shape is not None, "a model with routed layers has experts"
    rows, rates = (
        {"load": _count_expert_loads(routings, is_counted, shape.num_experts)},
        _collect_firing_rates(routings),
    )
    if rates is not None and shape.spiking_units is not None:
        activity = unit_activity(rates.flatten(0, 1)[None], shape.spiking_units.highest_rate).view(rates.shape)
        # A unit is dead (0) or saturated (2) in an example if it is so at every token; padding does not count.
        is_token = is_counted[..., None]
        min_activity, max_activity = (
            activity.masked_fill(~is_token, 2).amin(1),
            activity.masked_fill(~is_token, 0).amax(1),
        )
        rows["units"] = torch.where(max_activity == 0, max_activity, torch.where(min_activity == 2, min_activity, 1))
    return rows


def _split_inputs(batch: Batch) -> tuple[Tensor, Tensor | None]:
    documents = batch["documents"][:, :-1] if "documents" in batch else None
    return batch["input_ids"][:, :-1], documents


def _count_expert_loads(routings: LayerRoutings, is_counted: Tensor, num_experts: int) -> Tensor:
    """Count the tokens of each example that were routed to each expert, (batch, layers, experts)."""
    loads = []
    for routing in routings:
        load = torch.zeros(len(is_counted), num_experts, device=is_counted.device)
        ones = is_counted[..., None].expand_as(routing.chosen).float()
        loads.append(load.scatter_add_(1, routing.chosen.flatten(1), ones.flatten(1)))
    return torch.stack(loads, dim=1)


def _collect_firing_rates(routings: LayerRoutings) -> Tensor | None:
    """Return the firing rates of the units of all spiking routers at each token, (batch, length, units)."""
    rates = [routing.rates.detach() for routing in routings if routing.rates is not None]
    return torch.cat(rates, dim=-1) if rates else None
