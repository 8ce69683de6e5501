"""Rules about parts of the model: units that never learn, and experts that are never chosen."""

from __future__ import annotations

import numpy as np

from bottega.diagnosis.finding import Finding, NotRecorded
from bottega.diagnosis.overrides import suggest_lower_rate
from bottega.diagnosis.series import get_metric
from bottega.run_files.record import RunRecord

MIN_DEAD_FRACTION = 0.4
"""Fraction of dead units of a module that counts. No healthy run has any unit without a gradient, and up to 0.18 of the units
of a spiking network never fire; with a learning rate that is 30 times too high, a CNN has 0.5 to 0.8."""
MIN_MODULE_ROWS = 4
"""Rows of modules.jsonl that are needed, of which the second half counts: some modules start with zeros."""
MAX_SPIKE_THRESHOLD = 1.0
"""The default threshold of spiking units, at which inputs of unit variance make them fire."""
DEFAULT_FIRING_RATE = 0.1
"""Target firing rate of the bundled recipes."""
MIN_EFFECTIVE_EXPERTS = 0.6
"""Effective fraction of the experts, E^(normalised entropy of the load) / E, below which they have collapsed.

An even load of m of E experts is m / E. Healthy runs have 0.98 or more; without load balancing, 16 experts for three rules
have 0.44 to 0.54."""
BALANCE_WEIGHT = 0.1
"""Weight of the load-balancing loss that is advised; it raises those to 0.68 to 0.84, and the default, 0.01, does not."""


def find_dead_units(record: RunRecord) -> Finding | None:
    """Many units of a module get no gradient, or never fire, and so learn nothing."""
    if record.log.get("eval", "dead") is not None:
        return _find_silent_units(record)
    fractions = record.modules.series.get("dead_fraction", {})
    num_rows = max(map(len, fractions.values()), default=0)
    if num_rows < MIN_MODULE_ROWS:
        rows = f"{num_rows} row{'s' if num_rows != 1 else ''} of modules.jsonl"
        raise NotRecorded(f"{rows} with dead_fraction, at least {MIN_MODULE_ROWS} needed")
    # A loss of exactly 0 has no gradient at all, which is not the fault of any unit.
    has_gradient = {
        step
        for series in record.modules.series.get("gradient_norm", {}).values()
        for step, norm in zip(series.steps, series.values, strict=True)
        if norm > 0
    }
    medians: dict[str, tuple[float, int, int]] = {}
    for module, series in fractions.items():
        second_half = list(zip(series.steps, series.values, strict=True))[len(series) // 2 :]
        points = [(step, value) for step, value in second_half if step in has_gradient]
        if points:
            medians[module] = float(np.median([value for _, value in points])), int(points[0][0]), int(points[-1][0])
    if not medians:
        return None
    worst, (fraction, *steps) = max(medians.items(), key=lambda item: item[1][0])
    if fraction < MIN_DEAD_FRACTION:
        return None
    return Finding(
        "dead-units",
        f"{100 * fraction:.0f} % of the units of {worst} have no gradient",
        (steps[0], steps[1]),
        suggest_lower_rate(record),
    )


def _find_silent_units(record: RunRecord) -> Finding | None:
    """Find units of a spiking network that fire for no validation sample; a surrogate gradient reaches them all the same."""
    steps, values = get_metric(record, "eval", "dead")
    if values[-1] < MIN_DEAD_FRACTION:
        return None
    threshold = record.get("model.spike_threshold")
    if threshold is None and record.get("model.router") == "spiking":
        override = "model.router=linear"  # its units have no options
    elif threshold is not None and threshold > MAX_SPIKE_THRESHOLD:
        override = f"model.spike_threshold={MAX_SPIKE_THRESHOLD:g}"
    elif record.get("model.firing_rate") is None:
        override = f"model.firing_rate={DEFAULT_FIRING_RATE:g}"
    else:
        return None  # a loss pulls them to this rate; if its gradient does not reach them, that is the finding
    return Finding(
        "dead-units",
        f"{100 * values[-1]:.0f} % of the spiking units fire for no validation sample",
        (int(steps[-1]), int(steps[-1])),
        override,
    )


def find_collapsed_experts(record: RunRecord) -> Finding | None:
    """The router sends nearly all samples to a few experts."""
    num_experts = record.get("model.num_experts") or (8 if record.get("model.kind") == "moe" else 1)
    if num_experts == 1:
        return None
    kind = "eval" if record.log.get("eval", "load_entropy") is not None else "train"
    steps, entropies = get_metric(record, kind, "load_entropy")
    effective = num_experts ** entropies[-1] / num_experts
    if effective >= MIN_EFFECTIVE_EXPERTS:
        return None
    loads = [record.log.last_rows.get("eval", {}).get(f"load/{number}") for number in range(num_experts)]
    unused = sum(load < 0.1 / num_experts for load in loads if load is not None)
    detail = f"; {unused} of them get less than a tenth of their share" if unused else ""
    key = "load_balancing_weight" if record.get("task") == "routing" else "balance_weight"
    weight = record.get(f"model.{key}") or 0.0
    is_balanced = (record.get("model.balance") or "loss") == "loss" and weight >= BALANCE_WEIGHT
    new_weight = 10 * weight if is_balanced else BALANCE_WEIGHT
    return Finding(
        "collapsed-experts",
        f"the load of {num_experts} experts has an entropy of {entropies[-1]:.2f}, as if {effective * num_experts:.1f} shared it evenly{detail}",
        (int(steps[0]), int(steps[-1])),
        f"model.balance=loss model.{key}={new_weight:g}",
    )


RULES = {"collapsed-experts": find_collapsed_experts, "dead-units": find_dead_units}
