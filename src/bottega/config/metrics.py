"""Which way a metric is better: what its name says, and what a recipe may say of one that is not known here."""

from __future__ import annotations

import math

from pydantic import Field, ValidationInfo, field_validator

from bottega.config.section import Mode, Section

LOWER_IS_BETTER = (
    "loss",
    "objective",
    "perplexity",
    "bits_per_byte",
    "bits_per_code",
    "ece",
    "mse",
    "kl",
    "forgetting",
)
HIGHER_IS_BETTER = ("accuracy", "f1", "precision", "recall", "auroc", "exact_match", "psnr", "backward_transfer")
"""Also at the end of a longer name: macro_f1, label_accuracy, distill_loss."""


UNIT_INTERVAL_METRICS = (
    *("accuracy", "exact_match", "f1", "precision", "recall", "ece", "auroc", "entropy", "information"),
    *("firing_rate", "dead", "saturated", "drop_rate", "load_max", "load_min"),
)
"""From 0 to 1; also at the end of a longer name: bayes_accuracy, load_entropy, rule_information."""
METRIC_MINIMA = {"perplexity": 1.0, "bits_per_byte": 0.0, "bits_per_code": 0.0, "mse": 0.0}


def get_metric_bounds(metric: str) -> tuple[float, float]:
    """What a metric can be at least and at most, as far as its name says."""
    first, _, name = metric.removesuffix("_before").rpartition("/")
    is_load = first.rpartition("/")[2] == "load" and name.isdecimal()
    if is_load or any(name == one or name.endswith(f"_{one}") for one in UNIT_INTERVAL_METRICS):
        return 0.0, 1.0
    return METRIC_MINIMA.get(name, -math.inf), math.inf


def infer_metric_mode(metric: str) -> Mode | None:
    """Of part/accuracy and source/loss by the last part; None where the name tells nothing."""
    name = metric.rpartition("/")[2]
    if any(name == one or name.endswith(f"_{one}") for one in LOWER_IS_BETTER):
        return "min"
    return "max" if any(name == one or name.endswith(f"_{one}") for one in HIGHER_IS_BETTER) else None


class MonitoredMetric(Section):
    """A block with `metric` and `mode`: a mode that contradicts what the metric is known to be is refused."""

    metric: str = Field("loss", description="the validation metric that is watched")
    mode: Mode | None = Field(None, description="whether min or max is better; null is as the metric's name says")

    @field_validator("mode")
    @classmethod
    def _agrees(cls, mode: Mode | None, info: ValidationInfo) -> Mode | None:
        metric = info.data.get("metric")
        known = infer_metric_mode(metric) if metric is not None else None
        if mode is not None and known not in (None, mode):
            better = "smaller" if known == "min" else "larger"
            raise ValueError(f"{mode}, and of {metric} {better} is better; leave it out, or say null")
        return mode

    @property
    def resolved_mode(self) -> Mode:
        """What is better, said or known; min of a metric that nobody knows."""
        return self.mode or infer_metric_mode(self.metric) or "min"

    @property
    def is_maximised(self) -> bool:
        return self.resolved_mode == "max"
