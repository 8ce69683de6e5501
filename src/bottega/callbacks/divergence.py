"""Detect a diverged training loss: finite, but far above its first or its best value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bottega.config.recipe import Recipe

DIVERGED_FACTOR = 3.0
"""Ratio to its start above which a loss counts as diverged; the noise of small batches stays below 2."""
MIN_RISE = 1.0
"""Smallest rise, in nats, that counts: from 0.002 to 0.01 is noise of a model that fits its data."""
PEAK_FACTOR = 30.0
"""Ratio to its start that no single loss in the second half of a healthy run reaches."""
MAX_INITIAL_LOSS = 12.0
"""Nats above any initial cross-entropy (a vocabulary of 50,000 starts at 10.8): if the first logged loss is higher, the run
had diverged before it was logged."""
FORGOTTEN_FRACTION = 0.75
"""Fraction of its improvement that a loss must lose again to count as diverged from its best value."""


def diagnose_losses(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> str | None:
    """Return a warning with its remedy if the training losses in the rows of metrics.jsonl diverged, else None."""
    if recipe.task == "recall":
        return None  # its loss starts at 0, because at first there is nothing to recall
    losses = [row.get("loss") for row in rows if row.get("kind") == "train"]
    data = recipe.data
    is_one_task = data.mixture != "sequence" and data.curriculum is None and getattr(data, "online", None) is None
    divergence = describe_divergence(
        [loss for loss in losses if isinstance(loss, float) and math.isfinite(loss)],
        is_one_task=is_one_task,
        is_cross_entropy=recipe.task in ("language", "classify") and not recipe.techniques,
    )
    if divergence is None:
        return None
    advice = f"lower training.learning_rate ({recipe.training.learning_rate})"
    clip_advice = ", or set training.max_grad_norm" if recipe.training.max_grad_norm is None else ""
    return f"{divergence}; do not trust this run: {advice}{clip_advice}, and train again under another name"


def describe_divergence(
    losses: Sequence[float], *, is_one_task: bool = True, is_cross_entropy: bool = False
) -> str | None:
    """Return how the logged training losses diverged; None if they did not.

    Medians of the first and last few losses are compared, so that one spike or one lucky batch does not decide. If the data
    changes during training (`is_one_task` is false), a loss that rises again has not diverged; only a loss far above its
    start has.
    """
    if len(losses) < 2:
        return None
    window = max(1, min(10, len(losses) // 3))
    first, last = median(losses[:window]), median(losses[-window:])
    start = min(first, MAX_INITIAL_LOSS) if is_cross_entropy else first
    peak = max(losses[len(losses) // 2 :])
    if start > 0 and last > DIVERGED_FACTOR * start and last > start + MIN_RISE:
        return f"the loss diverged: it started at {first:.4g} and ended at {last:.4g}"
    if start > 0 and peak > PEAK_FACTOR * start and peak > start + 10 * MIN_RISE:
        return f"the loss diverged: it started at {first:.4g}, rose to {peak:.4g} and ended at {last:.4g}"
    if not is_one_task or len(losses) < 3 * window or window < 3:
        return None
    best = min(median(losses[i : i + window]) for i in range(len(losses) - window + 1))
    improvement = first - best
    if improvement > max(MIN_RISE, 0.5 * abs(first)) and last > best + FORGOTTEN_FRACTION * improvement:
        return f"the loss diverged: it fell from {first:.4g} to {best:.4g} and ended at {last:.4g}"
    return None
