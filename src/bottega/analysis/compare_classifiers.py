"""Compare single classifiers by the samples that each predicts correctly; describe pairs of any kind for the report."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from bottega.analysis import statistics
from bottega.analysis.compare_groups import FOLD_KEY, RESULTS_FILE, Group, read_results
from bottega.analysis.compare_predictions import read_correctness
from bottega.config.recipe import diff_recipes
from bottega.core.errors import UsageError

SEEDS_HINT = (
    'a group needs at least 2 runs; give several seeds, such as "runs/name-s*" with the quotes, or a folder of folds'
)


def compare_by_predictions(
    groups: list[Group], *, metric: str | None, split: str | None, level: float
) -> dict[str, Any]:
    """Compare single classifiers by the samples that each predicts correctly (McNemar's test)."""
    for run in (group.members[0].path for group in groups):
        if split is not None and (run / RESULTS_FILE).is_file():
            read_results(run, split)
    correctness = read_correctness(groups)
    if isinstance(correctness, str):
        raise UsageError(
            f"{correctness} is a single run without results/predictions.jsonl: {SEEDS_HINT}; or, for classifiers, write "
            f"predictions: bottega evaluate {correctness} --out {correctness}/results"
        )
    if metric not in (None, "accuracy"):
        raise UsageError(
            f"--metric {metric}: single runs are compared by accuracy only; for other metrics {SEEDS_HINT}"
        )
    rows, pairs = [], []
    for group in groups:
        hits = correctness[group.label]
        interval = statistics.wilson_interval(int(hits.sum()), len(hits), level=level)
        rows.append(describe_single_run(group, hits, interval, kind="samples"))
    for first, second in itertools.combinations(groups, 2):
        comparison = statistics.compare_classifiers(correctness[second.label], correctness[first.label], level=level)
        why = f"each is one classifier evaluated on the same {rows[0]['n']:,} samples; for {comparison.n:,} only one is right"
        pairs.append(describe_pair(first, second, comparison, why=why, paired_by="key"))
    notes = [
        "one run each: this compares two trained classifiers, not two ways of training; to compare those, give several seeds"
    ]
    report = {"metric": "accuracy", "mode": "max", "read_from": "results/predictions.jsonl"}
    return {**report, "groups": rows, "pairs": pairs, "notes": notes}


def describe_pair(
    first: Group, second: Group, comparison: statistics.Comparison, *, why: str, paired_by: str | None
) -> dict[str, Any]:
    """Return the report of a comparison of two groups: the test, why it was chosen, and the recipe keys that differ."""
    changed = diff_recipes(first.members[0].recipe, second.members[0].recipe)
    return {
        "first": first.label,
        "second": second.label,
        "paired_by": paired_by,
        "why": why,
        **dataclasses.asdict(comparison),
        "effect": dict(zip(("name", "size", "unbiased"), comparison.effect, strict=True)),
        "changed": {key: [old, new] for key, old, new in changed if key not in ("seed", FOLD_KEY)},
    }


def describe_single_run(
    group: Group, values: np.ndarray, interval: statistics.Interval, *, kind: str
) -> dict[str, Any]:
    """Return the report of a group of one run, whose `values` are per sample or per person (`kind`)."""
    member, mean = group.members[0], float(values.mean())
    row = {"label": group.label, "name": group.name, "kind": kind, "n": len(values), "mean": mean, "deviation": None}
    run = {"run": str(member.path), "seed": member.recipe.seed, "fold": member.fold, "value": mean}
    return {**row, "interval": dataclasses.asdict(interval), "runs": [run]}
