"""Routing: which label a sample has, by the experts that a router finds for it."""

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
    activity_sums,
    firing_rate_penalties,
    spike_rate,
    unit_activity,
    unit_activity_metrics,
)
from bottega.tasks.measures import classification
from bottega.tasks.measures import routing as measures

EXPERTS = "experts"
"""Where the model has them, and what their statistics are called."""


class RoutingTask(Task):
    """A batch holds `x` float32 [b, d] and `label` [b]; where it is known, `rule` [b], the number of the right expert, and
    `bayes` [b], the chance that the best possible answer is right.

    Optional: `weight` [b], where 0 marks a padding row that counts nowhere.
    """

    shape: RoutingShape
    num_rules: int | None = None
    """Of the data, where its rules are known."""
    has_bayes: bool = False
    """Whether it is known how well the data can be told."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    load_balancing_weight: float = Field(0.01, ge=0)
    z_weight: float = Field(0.0, ge=0)
    routing_loss_weight: float = Field(0.0, ge=0)
    firing_rate: float | None = Field(None, ge=0, le=1)
    firing_weight: float = Field(0.1, ge=0)
    mean: tuple[float, ...] | None = None
    scale: tuple[float, ...] | None = None
    """(x - mean) * scale is what the model reads; None reads x."""
    pretrained: str | None = None
    """A folder whose weights the training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        initial = Initial("bottega.models.routing.torch:initialise_routing")
        model = ModelSpec(
            "bottega.models.routing.torch:RoutingNet", self.shape, initial=initial, pretrained=self.pretrained
        )
        return {"model": model.changed(self._set_scale)}

    def _set_scale(self, models: Models, seed: int) -> None:
        if self.mean is not None and self.scale is not None:
            models["model"].set_scale(np.asarray(self.mean), np.asarray(self.scale))

    def counts(self, batch: Batch) -> Mapping[str, float]:
        number = float((np.asarray(batch["weight"]) > 0).sum()) if "weight" in batch else float(len(batch["x"]))
        names = ["loss", *(["routing"] if self._is_taught(batch) else []), *self._costs]
        return dict.fromkeys(names, number)

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        model, label = models["model"], batch["label"].long()
        counted = batch["weight"] > 0 if "weight" in batch else torch.ones_like(label, dtype=torch.bool)
        out: RoutingNetOutput = model(batch["x"], counted)
        logits = out.logits.float()
        smoothing = self.label_smoothing if model.training else 0.0
        each = {"loss": F.cross_entropy(logits, label, reduction="none", label_smoothing=smoothing)}
        weights = {"loss": 1.0}
        if self._is_taught(batch):
            each["routing"], weights["routing"] = self._miss(out, batch["rule"].long()), self.routing_loss_weight
        # Selected rather than multiplied: what fills up a batch may be of any value, and 0 times infinity is none.
        terms = {name: (torch.where(counted, values, 0.0).sum(), weights[name]) for name, values in each.items()}
        metrics, rows = self._measured(out, batch, counted), {"probability": logits.detach().softmax(1), "label": label}
        if not model.training:
            return Loss(terms, metrics, rows=rows | self._found(out, batch))
        terms |= self._added(out, counted)
        return Loss(terms, metrics | self._dropped(out), rows=rows, stats=routing_stats(out.routing, EXPERTS))

    def update(self, tensors: Mapping[str, Array], seen: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        return update_router_state(tensors, seen, name=EXPERTS, shape=self.shape.experts, rng=rng)

    def batch_metrics(self, seen: Mapping[str, Array]) -> dict[str, Array]:
        load = seen.get(f"{EXPERTS}.load") if self.shape.experts.num_experts > 1 else None
        return {} if load is None else {"load_entropy": load_entropy(load)}

    def score(self, rows: Rows) -> dict[str, float]:
        rule = rows.get("rule")
        found = measures.routing_metrics(rows["chosen"], self.shape.experts.num_experts, rule=rule)
        units = unit_activity_metrics(rows["units"]) if "units" in rows else {}
        return {**found, **units, **classification.classification_metrics(rows["probability"], rows["label"])}

    def predict(self, models: Models, x: Tensor) -> RoutingNetOutput:
        found: RoutingNetOutput = models["model"](x)
        return found

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """The names of what an evaluation finds."""
        experts = self.shape.experts.num_experts
        names = ["loss", "accuracy", "macro_f1", "weighted_f1", "ece", "auroc"]
        names += ["bayes_accuracy"] if self.has_bayes else []
        if experts > 1:
            names += ["gate_entropy", "load_entropy", *(f"load/{number}" for number in range(experts))]
            names += ["rule_information"] if self.num_rules is not None else []
            names += ["routing"] if self.routing_loss_weight else []
        return (*names, *(("firing_rate", "dead", "saturated") if self._spikes else ()))

    @property
    def _spikes(self) -> bool:
        return self.shape.num_units > 0 or self.shape.experts.spiking_units is not None

    def _is_taught(self, batch: Batch) -> bool:
        return self.routing_loss_weight > 0 and "rule" in batch

    @property
    def _costs(self) -> dict[str, float]:
        """What training adds to the loss beside what it is told, with the weight of each."""
        shape = self.shape
        is_balanced = shape.experts.balance == "loss" and shape.experts.num_experts > 1
        found = {
            "balance": self.load_balancing_weight if is_balanced else 0.0,
            "router_z": self.z_weight if shape.experts.num_experts > 1 else 0.0,
            "firing": self.firing_weight if self.firing_rate is not None and shape.num_units else 0.0,
        }
        return {name: weight for name, weight in found.items() if weight}

    def _added(self, out: RoutingNetOutput, counted: Tensor) -> dict[str, tuple[Tensor, float]]:
        """Only while training: by how the load stands by then they are no measure of the weights."""
        found: dict[str, tuple[Tensor, float]] = {}
        for name, weight in self._costs.items():
            if name == "firing":
                assert out.spikes is not None
                assert self.firing_rate is not None
                total = torch.where(counted, firing_rate_penalties(out.spikes, self.firing_rate), 0.0).sum()
            else:
                total = out.routing.balance if name == "balance" else out.routing.z
            found[name] = (total, weight)
        return found

    def _measured(self, out: RoutingNetOutput, batch: Batch, counted: Tensor) -> Sums:
        number, routing = counted.float().sum(), out.routing
        right = torch.where(counted, out.logits.argmax(1) == batch["label"], False).float().sum()
        found: Sums = {"accuracy": (right, number)}
        if "bayes" in batch:
            found["bayes_accuracy"] = (torch.where(counted, batch["bayes"], 0.0).sum(), number)
        if self.shape.experts.num_experts > 1:
            most = float(np.log(self.shape.experts.num_experts))
            found["gate_entropy"] = (routing.entropy.detach() / most, number)
        if self._spikes:
            rates = torch.cat([rates for rates, _ in self._rates(out)], dim=-1)
            found["firing_rate"] = activity_sums(rates[None], counted)["firing_rate"]
        return found

    def _rates(self, out: RoutingNetOutput) -> list[tuple[Tensor, float]]:
        """How often units fired [b, units] and the most they can, of the trunk and of the router."""
        found: list[tuple[Tensor, float]] = []
        if out.spikes is not None and self.shape.spiking is not None:
            found.append((spike_rate(out.spikes.detach()), self.shape.spiking.highest_rate))
        if out.routing.rates is not None and self.shape.experts.spiking_units is not None:
            found.append((out.routing.rates.detach(), self.shape.experts.spiking_units.highest_rate))
        return found

    def _dropped(self, out: RoutingNetOutput) -> Sums:
        """Who found no room, which only training limits."""
        experts, routing = self.shape.experts, out.routing
        is_told = experts.has_capacity_limit and experts.num_experts > 1
        return {"drop_rate": (routing.dropped, routing.tokens * experts.top_k)} if is_told else {}

    def _found(self, out: RoutingNetOutput, batch: Batch) -> dict[str, Tensor]:
        """Of each example, beside its probabilities."""
        rows = {"chosen": out.routing.chosen}
        if "rule" in batch:
            rows["rule"] = batch["rule"]
        if self._spikes:
            rows["units"] = torch.cat([unit_activity(rates[None], most) for rates, most in self._rates(out)], dim=-1)
        return rows

    def _miss(self, out: RoutingNetOutput, rule: Tensor) -> Tensor:
        """[b]: the cross-entropy of the gates to the right expert; of sigmoids, each is a question of its own."""
        logits = out.routing.logits
        if self.shape.experts.gate == "softmax":
            return F.cross_entropy(logits, rule, reduction="none")
        right = F.one_hot(rule, logits.shape[1]).to(logits)
        return F.binary_cross_entropy_with_logits(logits, right, reduction="none").sum(1)
