"""Causal language modelling: predict the next token of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models, Rows, Sums
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import LayerRoutings
from bottega.models.experts import torch as experts
from bottega.models.losses.token_loss import IGNORE_INDEX
from bottega.models.spiking.units import sum_activity, unit_activity, unit_activity_metrics

MAX_EXPERTS_REPORTED = 16
"""Up to this number of experts, the load of each is a metric; above, only the largest and the smallest."""


class Language(Task):
    """Next-token prediction with a decoder, with the auxiliary losses of its experts.

    A batch has `input_ids` (batch, length + 1): all but the last are inputs, all but the first are targets. Optional:
    `attention_mask` (batch, length + 1), 0 for padding at the end, which is not predicted; `weight` (batch,), 0 for a padding
    row; `documents` (batch, length + 1), document ids between which attention does not cross; `bytes` (batch,), the number of
    bytes that the targets of a row encode.
    """

    shape: TransformerShape
    pretrained: str | None = None
    """Local folder or hub name of the weights to start from."""
    zero_init_residual: bool = False
    """Whether the projections that write into the residual stream start as zeros."""
    balance_weight: float = 0.01
    """Weight of the load-balancing loss, if experts are balanced by a loss."""
    z_weight: float = 0.001
    """Weight of the router's z-loss (ST-MoE, Zoph et al., 2022)."""

    def specs(self) -> dict[str, ModelSpec]:
        model = ModelSpec(
            "bottega.models.decoder.torch:Transformer",
            self.shape,
            initial=Initial(
                "bottega.models.decoder.torch:initialise_decoder",
                {"residual_layers": self.shape.num_layers, "zero_residual": self.zero_init_residual},
            ),
            pretrained=self.pretrained,
            load="bottega.models.folders.pretrained:fetch_weights",
            is_filled=True,
        )
        return {"model": model}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        mask = batch["attention_mask"] if "attention_mask" in batch else np.ones(np.shape(batch["input_ids"]))
        is_predicted = np.asarray(mask)[:, 1:] > 0
        if "weight" in batch:
            is_predicted = is_predicted & (np.asarray(batch["weight"]) > 0)[:, None]
        # The auxiliary losses are means over the predicted tokens, too.
        return dict.fromkeys(("loss", *self._get_auxiliary_weights()), float(is_predicted.sum()))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        inputs, documents = _split_inputs(batch)
        targets = batch["input_ids"][:, 1:]
        if "attention_mask" in batch:
            targets = targets.masked_fill(batch["attention_mask"][:, 1:] <= 0, IGNORE_INDEX)
        if "weight" in batch:
            targets = targets.masked_fill((batch["weight"] <= 0)[:, None], IGNORE_INDEX)
        metrics: Sums = {}
        if self.shape.experts is None:
            out = Loss(terms={"loss": (models["model"](inputs, targets, documents=documents), 1.0)}, metrics=metrics)
        else:
            is_counted = targets != IGNORE_INDEX
            total, routings = models["model"](inputs, targets, documents=documents, token_mask=is_counted)
            out = self._build_expert_loss(total, routings, metrics)
            metrics |= self._compute_routing_metrics(routings, is_counted, is_training=models["model"].training)
            if not models["model"].training:
                out.rows.update(self._collect_routing_rows(routings, is_counted))
        if "bytes" in batch:
            num_bytes = batch["bytes"].float()
            if "weight" in batch:
                num_bytes = num_bytes * (batch["weight"] > 0)
            metrics["bits_per_byte"] = (out.terms["loss"][0].detach() / math.log(2.0), num_bytes.sum())
        return out

    # Experts

    def _get_auxiliary_weights(self) -> dict[str, float]:
        """Auxiliary loss of the experts -> weight, for those that are used."""
        shape = self.shape.experts
        if shape is None:
            return {}
        balance = self.balance_weight if shape.balance == "loss" else 0.0
        return {name: weight for name, weight in (("balance", balance), ("router_z", self.z_weight)) if weight}

    def _build_expert_loss(self, total: Tensor, routings: LayerRoutings, metrics: Sums) -> Loss:
        shape = self.shape.experts
        assert shape is not None, "a model with routed layers has experts"
        losses = {"balance": [routing.balance for routing in routings], "router_z": [routing.z for routing in routings]}
        weights = self._get_auxiliary_weights()
        terms = {name: (torch.stack(losses[name]).sum(), weight) for name, weight in weights.items()}
        tokens = torch.stack([routing.tokens for routing in routings]).sum()
        # The reported loss is the cross-entropy alone, without the auxiliary losses that are minimised with it.
        metrics["loss"] = (total.detach(), routings[0].tokens)
        max_entropy = math.log(max(2, shape.num_experts))
        metrics["gate_entropy"] = (torch.stack([routing.entropy for routing in routings]).sum() / max_entropy, tokens)
        stats: dict[str, Tensor] = {}
        for name, routing in zip(self._list_expert_layers(), routings, strict=True):
            stats |= experts.routing_stats(routing, name)
        return Loss({"loss": (total, 1.0), **terms}, metrics, {}, stats)

    def _compute_routing_metrics(self, routings: LayerRoutings, is_counted: Tensor, *, is_training: bool) -> Sums:
        """Return the drop rate, if experts have a capacity (in training only), and the firing rate of spiking routers."""
        metrics: Sums = {}
        shape = self.shape.experts
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

    def _collect_routing_rows(self, routings: LayerRoutings, is_counted: Tensor) -> dict[str, Tensor]:
        """Return the expert load and the unit activity of each example, for `score` in an evaluation."""
        shape = self.shape.experts
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
            rows["units"] = torch.where(
                max_activity == 0, max_activity, torch.where(min_activity == 2, min_activity, 1)
            )
        return rows

    def _list_expert_layers(self) -> list[str]:
        """Return the names of the model's expert layers."""
        return [f"model.layers.{layer}.mlp" for layer in self.shape.expert_layers]

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        """Return the new running load of each router, and its new bias if that balances the experts."""
        updated: dict[str, Tensor] = {}
        for name in self._list_expert_layers():
            assert self.shape.experts is not None, "a model with expert layers has experts"
            updated |= experts.update_router_state(tensors, batch_stats, name=name, shape=self.shape.experts, rng=rng)
        return updated

    def batch_metrics(self, batch_stats: Mapping[str, Array]) -> dict[str, Array]:
        """Return the entropy of the expert load in the whole batch, averaged over layers."""
        loads = [batch_stats[f"{name}.load"] for name in self._list_expert_layers() if f"{name}.load" in batch_stats]
        return {"load_entropy": experts.load_entropy(torch.stack(loads))} if loads else {}

    def score(self, rows: Rows) -> dict[str, float]:
        """Return the distribution of the expert load over the whole data set.

        The entropy is computed for each layer, since experts of different layers with the same number are unrelated.
        """
        load = rows["load"].sum(axis=0)
        fractions = load / np.maximum(load.sum(axis=-1, keepdims=True), 1)
        entropy = -(fractions * np.log(np.maximum(fractions, 1e-30))).sum(axis=-1)
        num_experts = fractions.shape[-1]
        metrics = {
            "load_entropy": float(entropy.mean() / math.log(max(2, num_experts))),
            "load_max": float(fractions.max()),
            "load_min": float(fractions.min()),
        }
        per_expert = {f"load/{expert}": float(fraction) for expert, fraction in enumerate(fractions.mean(axis=0))}
        # Examples without a predicted token have no unit activity.
        units = unit_activity_metrics(rows["units"][rows["load"].any(axis=(1, 2))]) if "units" in rows else {}
        return metrics | (per_expert if num_experts <= MAX_EXPERTS_REPORTED else {}) | units

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """Names of the metrics of an evaluation that concern experts."""
        shape = self.shape.experts
        if shape is None:
            return ()
        loads = (
            [f"load/{expert}" for expert in range(shape.num_experts)]
            if shape.num_experts <= MAX_EXPERTS_REPORTED
            else []
        )
        units = ("firing_rate", "dead", "saturated") if shape.spiking_units is not None else ()
        return (*self._get_auxiliary_weights(), "gate_entropy", "load_entropy", "load_max", "load_min", *loads, *units)

    def predict(self, models: Models, batch: Batch) -> Tensor:
        """Return all logits, (batch, length, vocabulary); for small batches only."""
        inputs, documents = _split_inputs(batch)
        return models["model"](inputs, documents=documents)

    def add_perplexity(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics with the perplexity, exp(loss)."""
        if "loss" not in metrics:
            return dict(metrics)
        # exp(x) overflows a float above about 709.
        return {**metrics, "perplexity": math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf}


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
