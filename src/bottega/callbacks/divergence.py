"""Whether a training loss has diverged by its end: a finite loss far above where it began, or where it had been."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from bottega.config.recipe import Recipe

DIVERGED_FACTOR = 3.0
"""Times its start from which on a loss is far above it; noise of small batches stays below twice."""
MIN_RISE = 1.0
"""And by how much at least: from 0.002 to 0.01 is the noise of a model that knows its data."""
PEAK_FACTOR = 30.0
"""Times its start to which no loss that still learns rises in the second half of a run, not even once."""
MAX_INITIAL_LOSS = 12.0
"""Nats of a cross-entropy that no vocabulary has where nothing is known (50,000 tokens have 10.8). Where the first one that
was logged is higher, the run had diverged by then."""
FORGOTTEN_FRACTION = 0.75
"""The share of what was learnt that is gone again where a loss has left its best for good."""


def diagnose_losses(rows: Sequence[Mapping[str, Any]], recipe: Recipe) -> str | None:
    """Return a line for a person where the training losses among the rows of metrics.jsonl diverged, with the remedy."""
    if recipe.task == "recall":
        return None  # its loss begins at 0, when there is nothing to recall yet
    losses = [row.get("loss") for row in rows if row.get("kind") == "train"]
    data = recipe.data
    is_one_task = data.mixture != "sequence" and data.curriculum is None and getattr(data, "online", None) is None
    what = describe_divergence(
        [loss for loss in losses if isinstance(loss, float) and math.isfinite(loss)],
        is_one_task=is_one_task,
        is_cross_entropy=recipe.task in ("language", "classify") and not recipe.techniques,
    )
    if what is None:
        return None
    rate = f"lower training.learning_rate ({recipe.training.learning_rate})"
    clip = ", or set training.max_grad_norm" if recipe.training.max_grad_norm is None else ""
    return f"{what}; do not trust this run: {rate}{clip}, and start again under another name"


def describe_divergence(
    losses: Sequence[float], *, is_one_task: bool = True, is_cross_entropy: bool = False
) -> str | None:
    """Return what became of the logged training losses where they diverged, in words; None where they did not.

    Medians over the last and first few are compared, so that a single spike or a lucky batch says nothing. Where the data
    changes as training goes on (`is_one_task` is false), a loss that rises again is not divergence, only one far above its
    start.
    """
    if len(losses) < 2:
        return None
    width = max(1, min(10, len(losses) // 3))
    first, last = median(losses[:width]), median(losses[-width:])
    start, peak = min(first, MAX_INITIAL_LOSS) if is_cross_entropy else first, max(losses[len(losses) // 2 :])
    if start > 0 and last > DIVERGED_FACTOR * start and last > start + MIN_RISE:
        return f"the loss diverged: it began at {first:.4g} and ended at {last:.4g}"
    if start > 0 and peak > PEAK_FACTOR * start and peak > start + 10 * MIN_RISE:
        return f"the loss diverged: it began at {first:.4g}, rose to {peak:.4g} and ended at {last:.4g}"
    if not is_one_task or len(losses) < 3 * width or width < 3:
        return None
    best = min(median(losses[i : i + width]) for i in range(len(losses) - width + 1))
    learnt = first - best
    if learnt > max(MIN_RISE, 0.5 * abs(first)) and last > best + FORGOTTEN_FRACTION * learnt:
        return f"the loss diverged: it fell from {first:.4g} to {best:.4g} and ended at {last:.4g}"
    return None
