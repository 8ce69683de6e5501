"""Rules about gradients that grow without bound or do not reach the first layers."""

from __future__ import annotations

import re

import numpy as np

from bottega.diagnosis.finding import Finding, NotRecorded
from bottega.diagnosis.overrides import (
    get_optimizer,
    get_peak_rate,
    get_safe_rate,
    suggest_clipping,
    suggest_fewer_layers,
    suggest_lower_rate,
)
from bottega.diagnosis.series import explain_missing_modules, get_metric, get_training_curve, thin
from bottega.run_files.record import RunRecord

EXPLODING_FACTOR = 50.0
"""Ratio of the gradient norm to that of the first logged step from which it exploded; healthy runs have at most 5."""
MIN_EXPLODED_ROWS = 2
"""Logged steps with such a norm: a single one may be one bad batch."""
VANISHING_RATIO = 0.01
"""Ratio of the gradient norm of a block to the largest of all modules below which it vanishes; healthy runs have at least 0.036."""
MAX_FALL_WHEN_VANISHED = 0.2
"""Fall of the training loss, as a fraction of its start, above which small gradients have done their work."""
SCALE_DEPENDENT_OPTIMIZERS = ("sgd",)
"""Optimizers whose update grows with the gradient, so that an exploding one is the cause of a divergence. The updates of others
depend on the rate alone, and gradients explode because the weights have."""
_BLOCK = re.compile(r"(^|\.)\d+(-\d+)?$")


def find_exploding_gradients(record: RunRecord) -> Finding | None:
    """The gradient norm grew by orders of magnitude."""
    steps, norms = get_metric(record, "train", "grad_norm", minimum=2)
    start = float(norms[0])
    is_exploded = norms > EXPLODING_FACTOR * start
    num_exploded = int(is_exploded.sum()) + record.log.num_nonfinite.get("grad_norm", 0)
    has_ended = record.state.get("state") == "diverged"
    if start <= 0 or not is_exploded.any() or (num_exploded < MIN_EXPLODED_ROWS and not has_ended):
        return None
    first = int(np.argmax(is_exploded))
    return Finding(
        "exploding-gradients",
        f"the gradient norm rose from {start:.4g} to {norms.max():.4g}",
        (int(steps[first]), int(steps[-1])),
        _suggest_smaller_updates(record),
    )


def _suggest_smaller_updates(record: RunRecord) -> str:
    """Return the override that clips gradients, with a lower rate if it is high even for clipped ones."""
    clipping = suggest_clipping(record)
    is_high = get_peak_rate(record) > get_safe_rate(record)
    words = [clipping, suggest_lower_rate(record) if is_high or clipping is None else None]
    return " ".join(word for word in words if word is not None)


def is_explosion_the_cause(record: RunRecord) -> bool:
    """Return whether a divergence of this run would come from its gradients: unclipped, with an update that grows with them."""
    return get_optimizer(record) in SCALE_DEPENDENT_OPTIMIZERS and suggest_clipping(record) is not None


def find_vanishing_gradients(record: RunRecord) -> Finding | None:
    """The gradient of some blocks is orders of magnitude smaller than that of the others, and the loss hardly fell."""
    curve = get_training_curve(record)
    norms: dict[str, float] = {}
    for name, series in record.modules.series.get("gradient_norm", {}).items():
        _, values = thin(series)
        norms[name] = float(np.median(values[len(values) // 2 :]))
    blocks = {name: norm for name, norm in norms.items() if _BLOCK.search(name)}
    if len(blocks) < 2:
        missing = f"no gradient norms of modules{explain_missing_modules(record)}"
        reason = "the model has fewer than two blocks" if norms else missing
        raise NotRecorded(reason)
    weakest, strongest = min(blocks, key=blocks.__getitem__), max(norms, key=norms.__getitem__)
    if norms[weakest] >= VANISHING_RATIO * norms[strongest]:
        return None
    if curve.start - curve.end > MAX_FALL_WHEN_VANISHED * abs(curve.start):
        return None
    return Finding(
        "vanishing-gradients",
        f"the gradient norm of {weakest} was {norms[weakest]:.2g}, that of {strongest} {norms[strongest]:.2g}, and the training "
        f"loss went from {curve.start:.4g} to {curve.end:.4g}",
        (int(curve.steps[len(curve.steps) // 2]), int(curve.steps[-1])),
        suggest_fewer_layers(record),
    )


RULES = {"exploding-gradients": find_exploding_gradients, "vanishing-gradients": find_vanishing_gradients}
