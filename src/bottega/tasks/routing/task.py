"""Classification of rows of numbers by experts that a router selects for each row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models, Rows, Sums
from bottega.models.experts.torch import load_entropy, routing_stats, update_router_state
from bottega.models.routing.config import RoutingShape
from bottega.models.routing.torch import RoutingNetOutput
from bottega.models.spiking.units import (
    firing_rate_penalties,
    spike_rate,
    sum_activity,
    unit_activity,
    unit_activity_metrics,
)
from bottega.tasks.metrics import classification
from bottega.tasks.metrics.routing import routing_metrics

EXPERT_LAYER = "experts"
"""Name of the expert layer in the model, and prefix of its statistics."""


class RoutingTask(Task):
    """Cross-entropy of the labels, with losses on the router and on the firing rate.

    A batch has `x` float32 (batch, inputs) and `label` (batch,). Optional: `rule` (batch,), the number of the correct expert;
    `bayes` (batch,), the probability that the Bayes-optimal answer is correct; `weight` (batch,), 0 for a padding row.
    """

    shape: RoutingShape
    num_rules: int | None = None
    """Number of rules of the data, if they are known."""
    has_bayes: bool = False
    """Whether the Bayes-optimal accuracy of the data is known."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    load_balancing_weight: float = Field(0.01, ge=0)
    z_weight: float = Field(0.0, ge=0)
    routing_loss_weight: float = Field(0.0, ge=0)
    firing_rate: float | None = Field(None, ge=0, le=1)
    firing_weight: float = Field(0.1, ge=0)
    mean: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    """The model reads (x - mean) * scale, or x if these are None."""
    pretrained: str | None = None
    """Folder of the weights to start from."""

    def specs(self) -> dict[str, ModelSpec]:
        initial = Initial("bottega.models.routing.torch:initialise_routing")
        model = ModelSpec(
            "bottega.models.routing.torch:RoutingNet", self.shape, initial=initial, pretrained=self.pretrained
        )
        return {"model": model.with_change(self._set_scale)}

    def _set_scale(self, models: Models, seed: int) -> None:
        if self.mean is not None and self.scale is not None:
            models["model"].set_scale(np.asarray(self.mean), np.asarray(self.scale))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        count = float((np.asarray(batch["weight"]) > 0).sum()) if "weight" in batch else float(len(batch["x"]))
        names = ["loss", *(["routing"] if self._uses_routing_loss(batch) else []), *self._auxiliary_weights]
        return dict.fromkeys(names, count)

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        model, label = models["model"], batch["label"].long()
        is_counted = batch["weight"] > 0 if "weight" in batch else torch.ones_like(label, dtype=torch.bool)
        out: RoutingNetOutput = model(batch["x"], is_counted)
        logits = out.logits.float()
        smoothing = self.label_smoothing if model.training else 0.0
        losses = {"loss": F.cross_entropy(logits, label, reduction="none", label_smoothing=smoothing)}
        weights = {"loss": 1.0}
        if self._uses_routing_loss(batch):
            losses["routing"] = self._compute_routing_loss(out, batch["rule"].long())
            weights["routing"] = self.routing_loss_weight
        # Select instead of multiplying: padding rows may have any value, and 0 times infinity is not a number.
        terms = {name: (torch.where(is_counted, values, 0.0).sum(), weights[name]) for name, values in losses.items()}
        metrics = self._compute_metrics(out, batch, is_counted)
        rows = {"probability": logits.detach().softmax(1), "label": label}
        if not model.training:
            return Loss(terms, metrics, rows=rows | self._collect_evaluation_rows(out, batch))
        terms |= self._compute_auxiliary_terms(out, is_counted)
        return Loss(
            terms, metrics | self._compute_drop_rate(out), rows=rows, stats=routing_stats(out.routing, EXPERT_LAYER)
        )

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        return update_router_state(tensors, batch_stats, name=EXPERT_LAYER, shape=self.shape.experts, rng=rng)

    def batch_metrics(self, batch_stats: Mapping[str, Array]) -> dict[str, Array]:
        load = batch_stats.get(f"{EXPERT_LAYER}.load") if self.shape.experts.num_experts > 1 else None
        return {} if load is None else {"load_entropy": load_entropy(load)}

    def score(self, rows: Rows) -> dict[str, float]:
        rule = rows.get("rule")
        routing = routing_metrics(rows["chosen"], self.shape.experts.num_experts, rule=rule)
        units = unit_activity_metrics(rows["units"]) if "units" in rows else {}
        return {**routing, **units, **classification.classification_metrics(rows["probability"], rows["label"])}

    def predict(self, models: Models, x: Tensor) -> RoutingNetOutput:
        """Return the logits, routing and spikes for rows of numbers, (batch, inputs)."""
        output: RoutingNetOutput = models["model"](x)
        return output

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """Names of the metrics of an evaluation."""
        num_experts = self.shape.experts.num_experts
        names = ["loss", "accuracy", "macro_f1", "weighted_f1", "ece", "auroc"]
        names += ["bayes_accuracy"] if self.has_bayes else []
        if num_experts > 1:
            names += ["gate_entropy", "load_entropy", *(f"load/{number}" for number in range(num_experts))]
            names += ["rule_information"] if self.num_rules is not None else []
            names += ["routing"] if self.routing_loss_weight else []
        return (*names, *(("firing_rate", "dead", "saturated") if self._has_spiking_units else ()))

    @property
    def _has_spiking_units(self) -> bool:
        return self.shape.num_units > 0 or self.shape.experts.spiking_units is not None

    def _uses_routing_loss(self, batch: Batch) -> bool:
        return self.routing_loss_weight > 0 and "rule" in batch

    @property
    def _auxiliary_weights(self) -> dict[str, float]:
        """Auxiliary loss of training -> weight, for those that are used."""
        shape = self.shape
        is_balanced = shape.experts.balance == "loss" and shape.experts.num_experts > 1
        weights = {
            "balance": self.load_balancing_weight if is_balanced else 0.0,
            "router_z": self.z_weight if shape.experts.num_experts > 1 else 0.0,
            "firing": self.firing_weight if self.firing_rate is not None and shape.num_units else 0.0,
        }
        return {name: weight for name, weight in weights.items() if weight}

    def _compute_auxiliary_terms(self, out: RoutingNetOutput, is_counted: Tensor) -> dict[str, tuple[Tensor, float]]:
        """Return the auxiliary losses; in training only, since they depend on the running load and not on the weights alone."""
        terms: dict[str, tuple[Tensor, float]] = {}
        for name, weight in self._auxiliary_weights.items():
            if name == "firing":
                assert out.spikes is not None
                assert self.firing_rate is not None
                total = torch.where(is_counted, firing_rate_penalties(out.spikes, self.firing_rate), 0.0).sum()
            else:
                total = out.routing.balance if name == "balance" else out.routing.z
            terms[name] = (total, weight)
        return terms

    def _compute_metrics(self, out: RoutingNetOutput, batch: Batch, is_counted: Tensor) -> Sums:
        count, routing = is_counted.float().sum(), out.routing
        correct = torch.where(is_counted, out.logits.argmax(1) == batch["label"], False).float().sum()
        metrics: Sums = {"accuracy": (correct, count)}
        if "bayes" in batch:
            metrics["bayes_accuracy"] = (torch.where(is_counted, batch["bayes"], 0.0).sum(), count)
        if self.shape.experts.num_experts > 1:
            max_entropy = float(np.log(self.shape.experts.num_experts))
            metrics["gate_entropy"] = (routing.entropy.detach() / max_entropy, count)
        if self._has_spiking_units:
            rates = torch.cat([rates for rates, _ in self._collect_firing_rates(out)], dim=-1)
            metrics["firing_rate"] = sum_activity(rates[None], is_counted)["firing_rate"]
        return metrics

    def _collect_firing_rates(self, out: RoutingNetOutput) -> list[tuple[Tensor, float]]:
        """Return the firing rates, (batch, units), and the highest possible rate, of the trunk and of the router."""
        rates: list[tuple[Tensor, float]] = []
        if out.spikes is not None and self.shape.spiking is not None:
            rates.append((spike_rate(out.spikes.detach()), self.shape.spiking.highest_rate))
        if out.routing.rates is not None and self.shape.experts.spiking_units is not None:
            rates.append((out.routing.rates.detach(), self.shape.experts.spiking_units.highest_rate))
        return rates

    def _compute_drop_rate(self, out: RoutingNetOutput) -> Sums:
        """Return the fraction of samples that exceeded the capacity of an expert, which is limited in training only."""
        experts, routing = self.shape.experts, out.routing
        if not experts.has_capacity_limit or experts.num_experts == 1:
            return {}
        return {"drop_rate": (routing.dropped, routing.tokens * experts.top_k)}

    def _collect_evaluation_rows(self, out: RoutingNetOutput, batch: Batch) -> dict[str, Tensor]:
        """Return the chosen experts, the rule and the unit activity of each example, for `score`."""
        rows = {"chosen": out.routing.chosen}
        if "rule" in batch:
            rows["rule"] = batch["rule"]
        if self._has_spiking_units:
            activity = [unit_activity(rates[None], highest) for rates, highest in self._collect_firing_rates(out)]
            rows["units"] = torch.cat(activity, dim=-1)
        return rows

    def _compute_routing_loss(self, out: RoutingNetOutput, rule: Tensor) -> Tensor:
        """Return the cross-entropy between the router and the correct expert, (batch,); binary for sigmoid gates."""
        logits = out.routing.logits
        if self.shape.experts.gate == "softmax":
            return F.cross_entropy(logits, rule, reduction="none")
        target = F.one_hot(rule, logits.shape[1]).to(logits)
        return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(1)
