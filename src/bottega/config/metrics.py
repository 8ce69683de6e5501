"""Whether higher or lower values of a metric are better, and its bounds, inferred from its name."""

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
"""Also as the end of a longer name: macro_f1, label_accuracy, distill_loss."""

UNIT_INTERVAL_METRICS = (
    *("accuracy", "exact_match", "f1", "precision", "recall", "ece", "auroc", "entropy", "information"),
    *("firing_rate", "dead", "saturated", "drop_rate", "load_max", "load_min"),
)
"""Metrics from 0 to 1; also as the end of a longer name: bayes_accuracy, load_entropy, rule_information."""
METRIC_MINIMA = {"perplexity": 1.0, "bits_per_byte": 0.0, "bits_per_code": 0.0, "mse": 0.0}


def get_metric_bounds(metric: str) -> tuple[float, float]:
    """Return the smallest and largest possible value of a metric, inferred from its name; infinite if unknown."""
    prefix, _, name = metric.removesuffix("_before").rpartition("/")
    is_load = prefix.rpartition("/")[2] == "load" and name.isdecimal()
    if is_load or _ends_with(name, UNIT_INTERVAL_METRICS):
        return 0.0, 1.0
    return METRIC_MINIMA.get(name, -math.inf), math.inf


def infer_metric_mode(metric: str) -> Mode | None:
    """Return whether a metric should be minimised or maximised, by the part of its name after the last slash.

    Returns None for an unknown name.
    """
    name = metric.rpartition("/")[2]
    if _ends_with(name, LOWER_IS_BETTER):
        return "min"
    return "max" if _ends_with(name, HIGHER_IS_BETTER) else None


def _ends_with(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith(f"_{ending}") for ending in endings)


class MonitoredMetric(Section):
    """A section with `metric` and `mode`; a mode that contradicts the name of a known metric is refused."""

    metric: str = Field("loss", description="validation metric to monitor")
    mode: Mode | None = Field(
        None, description="whether to minimise or maximise it; null infers it from the metric's name"
    )

    @field_validator("mode")
    @classmethod
    def _check_mode(cls, mode: Mode | None, info: ValidationInfo) -> Mode | None:
        metric = info.data.get("metric")
        inferred = infer_metric_mode(metric) if metric is not None else None
        if mode is not None and inferred not in (None, mode):
            better = "lower" if inferred == "min" else "higher"
            raise ValueError(f"{better} {metric} is better, got {mode}; remove it")
        return mode

    @property
    def resolved_mode(self) -> Mode:
        """`mode`, or the one inferred from the metric's name; min for an unknown metric."""
        return self.mode or infer_metric_mode(self.metric) or "min"

    @property
    def is_maximised(self) -> bool:
        """Whether higher values are better."""
        return self.resolved_mode == "max"
