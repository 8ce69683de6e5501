"""Overrides computed from the recipe and the record of a run: a lower or higher rate, another length, more capacity."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bottega.config.optimizers import OPTIMIZER_SPECS
from bottega.diagnosis.finding import NotRecorded
from bottega.diagnosis.series import get_median_update_ratio, get_num_steps, get_rates
from bottega.models.text_classifier.config import EncoderShape, KimShape
from bottega.run_files.record import RunRecord

SAFE_RATES = {"adamw": 3e-3, "adam": 3e-3, "muon": 3e-3, "adafactor": 3e-3, "lion": 3e-4, "sgd": 0.1}
"""Optimizer -> highest learning rate that is suggested: that of the bundled recipes, which are small; SGD's and Lion's are those
of their papers' experiments."""
DEFAULT_SAFE_RATE = 1e-3
TARGET_UPDATE_RATIO = 1e-3
"""Update-to-weight ratio of a well-chosen rate; the healthy runs have 1e-3 to 1e-2 at the peak of their schedule."""
SLOW_UPDATE_RATIO = 5e-4
"""Update-to-weight ratio below which slow convergence is a matter of the rate rather than of the length."""
STRONG_WEIGHT_DECAY, STRONG_COUPLED_WEIGHT_DECAY = 1.0, 0.01
"""Weight decay from which it limits what a model can fit; if it is added to the gradient (Adam, SGD), far less does."""
STRONG_DROPOUT = 0.6
"""Dropout from which it limits what a model can fit; recipes for little data use up to 0.5."""
STRONG_LABEL_SMOOTHING = 0.3
CAPACITY_FACTOR = 4
"""Factor on the width of a model that is too small: a doubling is seldom enough to see."""
CAPACITY_KEYS = ("model.hidden_size", "model.expert_size")
TEXT_CLASSIFIER_WIDTHS = {
    "transformer": ("model.hidden_size", int(EncoderShape.model_fields["hidden_size"].default)),
    "cnn": ("model.num_filters", int(KimShape.model_fields["num_filters"].default)),
}
"""Kind of a text classifier -> the key of its width, and the value if the key is null."""


def suggest_lower_rate(record: RunRecord) -> str:
    """Return the override for a rate a tenth of the run's, or the optimizer's highest safe one if that is lower."""
    return f"training.learning_rate={round_rate(min(get_peak_rate(record) / 10, get_safe_rate(record)))}"


def suggest_higher_rate(record: RunRecord, update_ratio: float) -> str:
    """Return the override for the rate that brings the update-to-weight ratio to TARGET_UPDATE_RATIO, if that is safe."""
    peak = get_peak_rate(record)
    rate = peak * TARGET_UPDATE_RATIO / update_ratio if update_ratio > 0 else math.inf
    return f"training.learning_rate={round_rate(max(min(rate, get_safe_rate(record)), 2 * peak))}"


def get_peak_rate(record: RunRecord) -> float:
    """Return the rate of the recipe, or the highest logged one if it is found by a range test."""
    rate = record.get("training.learning_rate")
    return float(rate) if isinstance(rate, int | float) and rate > 0 else float(get_rates(record)[1].max())


def get_optimizer(record: RunRecord) -> str:
    """Return the name of the optimizer."""
    return str(record.get("training.optimizer.name"))


def get_safe_rate(record: RunRecord) -> float:
    """Return the highest rate that is suggested for the optimizer."""
    return SAFE_RATES.get(get_optimizer(record), DEFAULT_SAFE_RATE)


def round_rate(rate: float) -> str:
    """Return a rate with one significant digit, as a recipe would have it, such as 0.003 or 2e-05."""
    return f"{float(f'{rate:.0e}'):g}"


def get_weight_decay(record: RunRecord) -> float:
    """Return the weight decay of the recipe."""
    return _get_number(record, "training.weight_decay")


def suggest_clipping(record: RunRecord) -> str | None:
    """Return the override that clips gradients, or None if they are clipped at 1 or below."""
    limit = record.get("training.max_grad_norm")
    return "training.max_grad_norm=1.0" if limit is None or limit > 1.0 else None


def suggest_longer_run(record: RunRecord, factor: int = 2) -> str:
    """Return the override for a run `factor` times as long, that ends with a low learning rate."""
    epochs = record.get("training.num_epochs")
    length = (
        f"training.num_epochs={factor * epochs}"
        if isinstance(epochs, int)
        else f"training.max_steps={factor * get_num_steps(record)}"
    )
    return " ".join([length, *list_decay_overrides(record)])


def suggest_faster_training(record: RunRecord) -> str:
    """Return the override for a higher rate if the updates are small, else for a longer run; both end at a low rate."""
    ratio = get_update_ratio_or_default(record)
    if ratio < SLOW_UPDATE_RATIO:
        return " ".join([suggest_higher_rate(record, ratio), *list_decay_overrides(record)])
    return suggest_longer_run(record)


def get_update_ratio_or_default(record: RunRecord) -> float:
    """Return the median update-to-weight ratio, or a usual value if none was recorded."""
    try:
        return get_median_update_ratio(record)
    except NotRecorded:
        return TARGET_UPDATE_RATIO


def suggest_decay(record: RunRecord) -> str | None:
    """Return the override for a schedule that ends at a low learning rate; None if the recipe has one."""
    return " ".join(list_decay_overrides(record)) or None


def list_decay_overrides(record: RunRecord) -> list[str]:
    """Return the overrides that make the learning rate end near zero; none if it does."""
    words = [] if record.get("training.scheduler.name") == "cosine" else ["training.scheduler.name=cosine"]
    has_floor = any(record.get(f"training.scheduler.{key}") for key in ("min_ratio", "eta_min"))
    return words + (["training.scheduler.min_ratio=0"] if has_floor else [])


def suggest_shorter_run(record: RunRecord, step: int) -> str:
    """Return the override for a run whose learning rates sum to those of this run up to `step`.

    A run of `step` steps would decay its rate by then and so learn less than this run had: twice as many steps are right
    where a cosine schedule was still near its peak. At least `step` of them: in a warm-up, the rates sum to less.
    """
    steps, rates = get_rates(record)
    weights = rates * np.diff(steps, prepend=0)
    share = weights[steps <= step].sum() / weights.sum()
    # A run that was stopped early, or still trains, has not come as far as its recipe says.
    num_steps = max(step, round(share * min(get_num_steps(record), int(steps[-1]))))
    words = [f"training.max_steps={num_steps}"]
    if record.get("training.num_epochs") is not None:
        words.append("training.num_epochs=null")
    warmup = record.get("training.scheduler.warmup_steps")
    if isinstance(warmup, int) and warmup >= num_steps:
        words.append(f"training.scheduler.warmup_steps={num_steps // 10}")
    return " ".join(words)


def list_strong_regularisation(record: RunRecord) -> list[str]:
    """Return the overrides that weaken each regularisation strong enough to keep a model from fitting its data."""
    words = []
    spec = OPTIMIZER_SPECS.get(get_optimizer(record))
    is_coupled = spec is not None and spec.has_coupled_weight_decay
    limit = STRONG_COUPLED_WEIGHT_DECAY if is_coupled else STRONG_WEIGHT_DECAY
    if get_weight_decay(record) >= limit:
        words.append(f"training.weight_decay={0 if is_coupled else 0.1}")
    words += [
        f"{key}=0.1"
        for key in ("model.dropout", "model.word_dropout", "model.attention_dropout", "model.expert_dropout")
        if _get_number(record, key) >= STRONG_DROPOUT
    ]
    if _get_number(record, "training.label_smoothing") >= STRONG_LABEL_SMOOTHING:
        words.append("training.label_smoothing=0")
    return words


def suggest_capacity(record: RunRecord) -> str:
    """Return the override that lets a model fit more: weaker regularisation, no frozen modules, or a wider model."""
    words = list_strong_regularisation(record)
    if record.get("training.freeze"):
        words.append("training.freeze=null")
    if not words and record.get("model.from") is None:
        words = [f"{key}={CAPACITY_FACTOR * width}" for key, width in _read_widths(record).items()]
    return " ".join(words) or suggest_longer_run(record)


def _read_widths(record: RunRecord) -> dict[str, int]:
    """Return the keys of the model's width and their values; those of a text classifier have defaults of its kind."""
    default = TEXT_CLASSIFIER_WIDTHS.get(str(record.get("model.kind"))) if record.get("task") == "classify" else None
    if default is not None:
        key, width = default
        return {key: record.get(key) or width}
    widths = {key: record.get(key) for key in CAPACITY_KEYS}
    return {key: width for key, width in widths.items() if isinstance(width, int) and not isinstance(width, bool)}


def suggest_fewer_layers(record: RunRecord) -> str:
    """Return the override for a quarter of the layers, or a lower rate if their number is not in the recipe."""
    layers = record.get("model.num_layers")
    has_layers = isinstance(layers, int) and layers > 1
    return f"model.num_layers={max(1, layers // 4)}" if has_layers else suggest_lower_rate(record)


def _get_number(record: RunRecord, key: str) -> float:
    """Return a number of the recipe; 0 if the key is null, absent or something else."""
    value: Any = record.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
