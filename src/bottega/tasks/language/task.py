"""Causal language modelling: predict the next token of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from bottega.core.model_spec import Initial, ModelSpec, resolve_reference
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models, Rows
from bottega.models.decoder.config import TransformerShape

LOSS = "bottega.tasks.language.{framework}:compute_loss"
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
        is_dense = self.shape.experts is None and not self.shape.has_ssm
        model = ModelSpec(
            f"bottega.models.decoder.{'{framework}' if is_dense else 'torch'}:Transformer",
            self.shape,
            initial=Initial(
                "bottega.models.decoder.{framework}:initialise_decoder",
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
        return dict.fromkeys(("loss", *self.get_auxiliary_weights()), float(is_predicted.sum()))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        loss: Loss = resolve_reference(LOSS, rng.framework)(self, models, batch)
        return loss

    def predict(self, models: Models, batch: Batch, *, framework: str = "torch") -> Array:
        """Return all logits, (batch, length, vocabulary); for small batches only."""
        return resolve_reference("bottega.tasks.language.{framework}:compute_logits", framework)(models, batch)

    def add_perplexity(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics with the perplexity, exp(loss)."""
        if "loss" not in metrics:
            return dict(metrics)
        # exp(x) overflows a float above about 709.
        return {**metrics, "perplexity": math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf}

    # Experts

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        """Return the new running load of each router, and its new bias if that balances the experts."""
        if self.shape.experts is None:
            return {}
        from bottega.tasks.language.torch import update_routers  # JAX has no experts

        return update_routers(self, tensors, batch_stats, rng)

    def batch_metrics(self, batch_stats: Mapping[str, Array]) -> dict[str, Array]:
        """Return the entropy of the expert load in the whole batch, averaged over layers."""
        loads = [batch_stats[f"{name}.load"] for name in self.expert_layers if f"{name}.load" in batch_stats]
        if not loads:
            return {}
        from bottega.tasks.language.torch import compute_load_entropy  # JAX has no experts

        return {"load_entropy": compute_load_entropy(loads)}

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
        units: dict[str, float] = {}
        if "units" in rows:
            from bottega.models.spiking.units import unit_activity_metrics

            units = unit_activity_metrics(rows["units"][rows["load"].any(axis=(1, 2))])
        return metrics | (per_expert if num_experts <= MAX_EXPERTS_REPORTED else {}) | units

    def get_auxiliary_weights(self) -> dict[str, float]:
        """Auxiliary loss of the experts -> weight, for those that are used."""
        shape = self.shape.experts
        if shape is None:
            return {}
        balance = self.balance_weight if shape.balance == "loss" else 0.0
        return {name: weight for name, weight in (("balance", balance), ("router_z", self.z_weight)) if weight}

    @property
    def expert_layers(self) -> list[str]:
        """Names of the model's expert layers."""
        return [f"model.layers.{layer}.mlp" for layer in self.shape.expert_layers]

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
        return (*self.get_auxiliary_weights(), "gate_entropy", "load_entropy", "load_max", "load_min", *loads, *units)
