"""Rules about the learning rate, from the update-to-weight ratio of the modules and the loss."""

from __future__ import annotations

import numpy as np

from bottega.diagnosis.finding import Finding
from bottega.diagnosis.overrides import (
    STRONG_WEIGHT_DECAY,
    get_peak_rate,
    get_weight_decay,
    suggest_higher_rate,
    suggest_lower_rate,
)
from bottega.diagnosis.series import (
    CONVERGED_FRACTION,
    HIGH_RATE,
    TrainingCurve,
    get_highest_update_ratio,
    get_median_update_ratio,
    get_rates,
    get_training_curve,
)
from bottega.run_files.record import RunRecord

HIGH_UPDATE_RATIO = 0.04
"""Median update-to-weight ratio of the modules above which a rate may be too high. The healthy runs have at most 0.011, and 0.023 if
only tokens of a prompt are trained; above HIGHEST_UPDATE_RATIO, it is too high whatever the loss looks like."""
HIGHEST_UPDATE_RATIO = 0.08
"""The same for a single logged step: weights that grow in the first steps make all later updates small beside them. The healthy runs
have at most 0.065, runs of six tasks at rates of 0.1 to 10 had 0.09 to 1.4."""
LOW_UPDATE_RATIO = 5e-5
"""Median update-to-weight ratio of the modules below which a rate may be too low; the healthy runs have at least 1e-3, and
fine-tuning at 1e-5 has about 3e-4."""
EARLY_RISE = 1.3
"""Ratio of the highest loss of the first fifth of a run to its first loss from which it rose; healthy runs have at most 1.22."""
ROUGH_FRACTION = 0.1
"""Median change of the loss from one log to the next, as a fraction of its level, from which a curve is rough."""
STAGNANT_FALL = 0.2
"""Fall of the training loss, as a fraction of its start, below which large updates have led nowhere."""
SMALL_FALL = 0.1
"""Fall of the training loss, as a fraction of its start, below which it has hardly moved."""


def find_rate_too_high(record: RunRecord) -> Finding | None:
    """Each step changes a large part of the weights, and the loss rose at first, jumps about or hardly fell."""
    curve = get_training_curve(record)
    ratio, highest_ratio = get_median_update_ratio(record), get_highest_update_ratio(record)
    if ratio < HIGH_UPDATE_RATIO and highest_ratio < HIGHEST_UPDATE_RATIO:
        return None
    decay = get_weight_decay(record)
    if decay >= STRONG_WEIGHT_DECAY and get_peak_rate(record) * decay > max(ratio, highest_ratio / 2):
        return None  # the weights change because they shrink: the weight decay is too strong, not the rate
    symptom = _describe_instability(record, curve)
    if symptom is None and ratio > HIGHEST_UPDATE_RATIO:
        symptom = f"the loss went from {curve.start:.4g} to {curve.end:.4g}"
    if symptom is None:
        return None
    amount = f"{100 * ratio:.2g} %" if ratio >= HIGH_UPDATE_RATIO else f"up to {100 * highest_ratio:.2g} %"
    return Finding(
        "learning-rate-too-high",
        f"each step changed the weights by {amount} (0.1 to 1 % is usual), and {symptom}",
        (int(curve.steps[0]), int(curve.steps[-1])),
        suggest_lower_rate(record),
    )


def _describe_instability(record: RunRecord, curve: TrainingCurve) -> str | None:
    early = curve.losses[: max(3, len(curve.losses) // 5)]
    if curve.losses[0] > 0 and early.max() > EARLY_RISE * curve.losses[0]:
        return f"the loss rose from {curve.losses[0]:.4g} to {early.max():.4g} at first"
    if curve.start - curve.end < STAGNANT_FALL * abs(curve.start):
        return f"the loss only went from {curve.start:.4g} to {curve.end:.4g}"
    rate_steps, rates = get_rates(record)
    is_high = np.interp(curve.steps, rate_steps, rates) >= HIGH_RATE * rates.max()
    losses = curve.losses[is_high]
    if len(losses) < 4 or curve.end < CONVERGED_FRACTION * curve.start:
        return None
    level, change = abs(float(np.median(losses))), float(np.median(np.abs(np.diff(losses))))
    if change > ROUGH_FRACTION * level:
        return f"the loss changed by {change:.3g} from one log to the next, at a level of {level:.3g}"
    return None


def find_rate_too_low(record: RunRecord) -> Finding | None:
    """Each step hardly changes the weights, and the loss hardly moved."""
    curve = get_training_curve(record)
    ratio = get_median_update_ratio(record)
    fall = curve.start - curve.end
    if ratio >= LOW_UPDATE_RATIO or fall > SMALL_FALL * abs(curve.start):
        return None
    return Finding(
        "learning-rate-too-low",
        f"each step changed the weights by {100 * ratio:.1g} % (0.1 to 1 % is usual), and the training loss went from "
        f"{curve.start:.4g} to {curve.end:.4g}",
        (int(curve.steps[0]), int(curve.steps[-1])),
        suggest_higher_rate(record, ratio),
    )


RULES = {"learning-rate-too-high": find_rate_too_high, "learning-rate-too-low": find_rate_too_low}
