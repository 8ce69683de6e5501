"""Rule about diverged losses: not finite, or far above the first or the best value."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bottega.diagnosis.finding import Finding, NotRecorded
from bottega.diagnosis.gradients import find_exploding_gradients, is_explosion_the_cause
from bottega.diagnosis.overrides import suggest_clipping, suggest_lower_rate
from bottega.diagnosis.series import MAX_INITIAL_CROSS_ENTROPY, get_metric, has_one_distribution, is_cross_entropy
from bottega.run_files.record import RunRecord

DIVERGED_FACTOR = 3.0
"""Ratio to its start above which a loss counts as diverged; the noise of small batches stays below 2."""
DIVERGED_FACTOR_OF_CHANGING_DATA = 10.0
"""The same if the data changes during training: a healthy run on a new source starts with 3.1 times its first loss."""
MIN_RISE = 1.0
"""Smallest rise, in nats, that counts: from 0.002 to 0.01 is noise of a model that fits its data."""
PEAK_FACTOR = 30.0
"""Ratio to its start that no single loss in the second half of a healthy run reaches."""
MAX_BAD_SHARE = 0.05
"""Share of logged losses that may be not finite: with training.on_nonfinite=skip, a bad batch now and then does no harm."""
FORGOTTEN_FRACTION = 0.75
"""Fraction of its improvement that a loss must lose again to count as diverged from its best value."""


def find_divergence(record: RunRecord) -> Finding | None:
    """The training loss is not finite, or ended far above its start or its best value."""
    num_bad = record.log.num_nonfinite.get("loss", 0)
    is_stopped = record.state.get("state") == "diverged"
    series = record.log.get("train", "loss")
    num_logged = num_bad + (0 if series is None else series.num_added)
    is_often_bad = num_bad > MAX_BAD_SHARE * num_logged
    try:
        steps, losses = get_metric(record, "train", "loss", minimum=2)
    except NotRecorded:
        if not (num_bad or is_stopped):
            raise
        return Finding("divergence", "the loss was not finite in the first logged steps", None, _suggest(record))
    description = None
    if record.get("task") != "recall":  # its loss starts at 0, because at first there is nothing to recall
        description = describe_divergence(
            losses.tolist(),
            is_one_task=has_one_distribution(record),
            has_cross_entropy=is_cross_entropy(record),
        )
    if description is None and is_stopped:
        description = f"the loss was not finite after step {int(steps[-1]):,}, where it was {losses[-1]:.4g}"
    if description is None and is_often_bad:
        description = f"the loss was not finite in {num_bad:,} of {num_logged:,} logged steps"
    if description is None or _has_exploding_gradients(record):
        return None
    return Finding("divergence", description, (int(steps[0]), int(steps[-1])), _suggest(record))


def _has_exploding_gradients(record: RunRecord) -> bool:
    """Return whether gradients explain the divergence, so that the rule about them reports it."""
    try:
        return is_explosion_the_cause(record) and find_exploding_gradients(record) is not None
    except NotRecorded:
        return False


def _suggest(record: RunRecord) -> str:
    return " ".join(filter(None, [suggest_lower_rate(record), suggest_clipping(record)]))


def describe_divergence(
    losses: Sequence[float], *, is_one_task: bool = True, has_cross_entropy: bool = False
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
    start = min(first, MAX_INITIAL_CROSS_ENTROPY) if has_cross_entropy else first
    peak = max(losses[len(losses) // 2 :])
    factor = DIVERGED_FACTOR if is_one_task else DIVERGED_FACTOR_OF_CHANGING_DATA
    if start < first and last > factor * start:
        return f"the training loss was {first:.4g} in the first logged steps, above that of any untrained model, and ended at {last:.4g}"
    if start > 0 and last > factor * start and last > start + MIN_RISE:
        return f"the training loss started at {first:.4g} and ended at {last:.4g}"
    if start > 0 and peak > PEAK_FACTOR * start and peak > start + 10 * MIN_RISE:
        return f"the training loss started at {first:.4g}, rose to {peak:.4g} and ended at {last:.4g}"
    if not is_one_task or len(losses) < 3 * window or window < 3:
        return None
    best = min(median(losses[i : i + window]) for i in range(len(losses) - window + 1))
    improvement = first - best
    if improvement > max(MIN_RISE, 0.5 * abs(first)) and last > best + FORGOTTEN_FRACTION * improvement:
        return f"the training loss fell from {first:.4g} to {best:.4g} and ended at {last:.4g}"
    return None


RULES = {"divergence": find_divergence}
