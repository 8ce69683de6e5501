"""Language modelling: predict the next token of a text."""

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
from bottega.models.spiking.units import activity_sums, unit_activity, unit_activity_metrics

MAX_EXPERTS_REPORTED = 16
"""Experts whose loads are told one by one; of more, only the largest and the smallest are."""


class Language(Task):
    """A batch holds `input_ids` [b, T+1]: all but the last are read, all but the first are predicted.

    Optional: `attention_mask` [b, T+1], where 0 fills up a row at its end: nothing real sees it, because attention is
    causal, and it is never predicted; `weight` [b], where 0 marks a padding row that counts nowhere; `documents`
    [b, T+1], ids between which nothing is seen; `bytes` [b], the length of the text that the row's targets stand for.
    """

    shape: TransformerShape
    pretrained: str | None = None
    """A local folder or a hub name whose weights the training starts from."""
    balance_weight: float = 0.01
    """Of the loss that keeps experts equally busy, where they are balanced by one."""
    z_weight: float = 0.001
    """Of the loss that keeps the router's logits small (ST-MoE, Zoph et al., 2022)."""

    def specs(self) -> dict[str, ModelSpec]:
        model = ModelSpec(
            "bottega.models.decoder.torch:Transformer",
            self.shape,
            initial=Initial(
                "bottega.models.decoder.torch:initialise_decoder", {"residual_layers": self.shape.num_layers}
            ),
            pretrained=self.pretrained,
            load="bottega.models.folders.pretrained:fetch_weights",
            is_filled=True,
        )
        return {"model": model}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        mask = batch["attention_mask"] if "attention_mask" in batch else np.ones(np.shape(batch["input_ids"]))
        predicted = np.asarray(mask)[:, 1:] > 0
        if "weight" in batch:
            predicted = predicted & (np.asarray(batch["weight"]) > 0)[:, None]
        # What experts cost is a mean over the tokens that are predicted, too.
        return dict.fromkeys(("loss", *self._costs()), float(predicted.sum()))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        inputs, documents = _inputs(batch)
        targets = batch["input_ids"][:, 1:]
        if "attention_mask" in batch:
            targets = targets.masked_fill(batch["attention_mask"][:, 1:] <= 0, IGNORE_INDEX)
        if "weight" in batch:
            targets = targets.masked_fill((batch["weight"] <= 0)[:, None], IGNORE_INDEX)
        metrics: Sums = {}
        if self.shape.experts is None:
            out = Loss(terms={"loss": (models["model"](inputs, targets, documents=documents), 1.0)}, metrics=metrics)
        else:
            counted = targets != IGNORE_INDEX
            total, routed = models["model"](inputs, targets, documents=documents, token_mask=counted)
            out = self._with_experts(total, routed, metrics)
            metrics |= self._only_some(routed, counted, training=models["model"].training)
            if not models["model"].training:
                out.rows.update(self._found(routed, counted))
        if "bytes" in batch:
            size = batch["bytes"].float()
            if "weight" in batch:
                size = size * (batch["weight"] > 0)
            metrics["bits_per_byte"] = (out.terms["loss"][0].detach() / math.log(2.0), size.sum())
        return out

    # Experts

    def _costs(self) -> dict[str, float]:
        """Term -> weight of what experts cost beside the tokens."""
        shape = self.shape.experts
        if shape is None:
            return {}
        balance = self.balance_weight if shape.balance == "loss" else 0.0
        return {name: weight for name, weight in (("balance", balance), ("router_z", self.z_weight)) if weight}

    def _with_experts(self, total: Tensor, routed: LayerRoutings, metrics: Sums) -> Loss:
        shape = self.shape.experts
        assert shape is not None, "or nothing was routed"
        costs = {"balance": [one.balance for one in routed], "router_z": [one.z for one in routed]}
        terms = {name: (torch.stack(costs[name]).sum(), weight) for name, weight in self._costs().items()}
        tokens = torch.stack([one.tokens for one in routed]).sum()
        # What is minimised is more than this; a report stays the surprise of the text alone.
        metrics["loss"] = (total.detach(), routed[0].tokens)
        most = math.log(max(2, shape.num_experts))
        metrics["gate_entropy"] = (torch.stack([one.entropy for one in routed]).sum() / most, tokens)
        stats: dict[str, Tensor] = {}
        for name, routing in zip(self._expert_layers(), routed, strict=True):
            stats |= experts.routing_stats(routing, name)
        return Loss({"loss": (total, 1.0), **terms}, metrics, {}, stats)

    def _only_some(self, routed: LayerRoutings, counted: Tensor, *, training: bool) -> Sums:
        """Measures that only some models have: who found no room, which training alone limits, and how often units fire."""
        found: Sums = {}
        shape = self.shape.experts
        assert shape is not None, "or nothing was routed"
        if training and shape.has_capacity_limit:
            dropped, tokens = (torch.stack([getattr(one, n) for one in routed]).sum() for n in ("dropped", "tokens"))
            found["drop_rate"] = (dropped, tokens * shape.top_k)
        rates = _rates(routed)
        if rates is not None:
            found["firing_rate"] = activity_sums(rates.flatten(0, 1)[None], counted.flatten())["firing_rate"]
        return found

    def _found(self, routed: LayerRoutings, counted: Tensor) -> dict[str, Tensor]:
        """Of each example, in an evaluation."""
        shape = self.shape.experts
        assert shape is not None, "or nothing was routed"
        rows, rates = {"load": _loads(routed, counted, shape.num_experts)}, _rates(routed)
        if rates is not None and shape.spiking_units is not None:
            each = unit_activity(rates.flatten(0, 1)[None], shape.spiking_units.highest_rate).view(rates.shape)
            # Of all its tokens: silent in each, or as often as it could be in each; what fills up is no reason against.
            real = counted[..., None]
            least, most = each.masked_fill(~real, 2).amin(1), each.masked_fill(~real, 0).amax(1)
            rows["units"] = torch.where(most == 0, most, torch.where(least == 2, least, 1))
        return rows

    def _expert_layers(self) -> list[str]:
        """Where the model has them."""
        return [f"model.layers.{layer}.mlp" for layer in self.shape.expert_layers]

    def update(self, tensors: Mapping[str, Array], seen: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        """The running load of each router, and its bias where that is what balances."""
        new: dict[str, Tensor] = {}
        for name in self._expert_layers():
            assert self.shape.experts is not None, "or there were no such layers"
            new |= experts.update_router_state(tensors, seen, name=name, shape=self.shape.experts, rng=rng)
        return new

    def batch_metrics(self, seen: Mapping[str, Array]) -> dict[str, Array]:
        """How evenly the whole batch asked the experts of each layer, as a mean over layers."""
        loads = [seen[f"{name}.load"] for name in self._expert_layers() if f"{name}.load" in seen]
        return {"load_entropy": experts.load_entropy(torch.stack(loads))} if loads else {}

    def score(self, rows: Rows) -> dict[str, float]:
        """How evenly the experts were asked over the whole data set; each layer by itself, since the third expert of one
        has nothing to do with the third of another."""
        load = rows["load"].sum(axis=0)
        shares = load / np.maximum(load.sum(axis=-1, keepdims=True), 1)
        surprise = -(shares * np.log(np.maximum(shares, 1e-30))).sum(axis=-1)
        number = shares.shape[-1]
        found = {
            "load_entropy": float(surprise.mean() / math.log(max(2, number))),
            "load_max": float(shares.max()),
            "load_min": float(shares.min()),
        }
        each = {f"load/{expert}": float(share) for expert, share in enumerate(shares.mean(axis=0))}
        # An example without a token that counts says nothing about units.
        units = unit_activity_metrics(rows["units"][rows["load"].any(axis=(1, 2))]) if "units" in rows else {}
        return found | (each if number <= MAX_EXPERTS_REPORTED else {}) | units

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        """What an evaluation knows of experts."""
        shape = self.shape.experts
        if shape is None:
            return ()
        loads = (
            [f"load/{expert}" for expert in range(shape.num_experts)]
            if shape.num_experts <= MAX_EXPERTS_REPORTED
            else []
        )
        units = ("firing_rate", "dead", "saturated") if shape.spiking_units is not None else ()
        return (*self._costs(), "gate_entropy", "load_entropy", "load_max", "load_min", *loads, *units)

    def predict(self, models: Models, batch: Batch) -> Tensor:
        """All logits [b, T, V]: for small batches."""
        inputs, documents = _inputs(batch)
        return models["model"](inputs, documents=documents)

    def add_perplexity(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What people read off the means: the perplexity of a loss in nats."""
        if "loss" not in metrics:
            return dict(metrics)
        # Beyond e ** 700 a float is infinite, and so is the surprise.
        return {**metrics, "perplexity": math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf}


def _inputs(batch: Batch) -> tuple[Tensor, Tensor | None]:
    documents = batch["documents"][:, :-1] if "documents" in batch else None
    return batch["input_ids"][:, :-1], documents


def _loads(routed: LayerRoutings, counted: Tensor, num_experts: int) -> Tensor:
    """[b, L, E]: how often the tokens of each example asked each expert."""
    found = []
    for routing in routed:
        asked = torch.zeros(len(counted), num_experts, device=counted.device)
        once = counted[..., None].expand_as(routing.chosen).float()
        found.append(asked.scatter_add_(1, routing.chosen.flatten(1), once.flatten(1)))
    return torch.stack(found, dim=1)


def _rates(routed: LayerRoutings) -> Tensor | None:
    """[b, T, units]: how often the units of all spiking routers fired at each token."""
    found = [one.rates.detach() for one in routed if one.rates is not None]
    return torch.cat(found, dim=-1) if found else None
