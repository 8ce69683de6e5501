"""Compare single classifiers by the samples that each predicts correctly; describe pairs of any kind for the report."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from bottega.analysis import statistics as st
from bottega.analysis.compare_groups import FOLD_KEY, RESULTS_FILE, Group, read_correctness, read_results
from bottega.config.recipe import diff_recipes
from bottega.core.errors import UsageError

SEEDS_HINT = (
    'at least 2 runs a group are needed; give seeds, such as "runs/name-s*" with the quotes, or a folder of folds'
)


def compare_by_predictions(
    groups: list[Group], *, metric: str | None, split: str | None, level: float
) -> dict[str, Any]:
    """Single classifiers, by the samples that each has right."""
    for run in (group.members[0].path for group in groups):
        if split is not None and (run / RESULTS_FILE).is_file():
            read_results(run, split)
    right = read_correctness(groups)
    if isinstance(right, str):
        raise UsageError(
            f"{right} is a single run without results/predictions.jsonl: {SEEDS_HINT}; or, for classifiers, write "
            f"predictions: bottega evaluate {right} --out {right}/results"
        )
    if metric not in (None, "accuracy"):
        raise UsageError(f"--metric {metric}: single runs are compared by accuracy; else {SEEDS_HINT}")
    rows, pairs = [], []
    for group in groups:
        hits = right[group.label]
        interval = st.wilson_interval(int(hits.sum()), len(hits), level=level)
        rows.append(describe_single_run(group, hits, interval, kind="samples"))
    for one, other in itertools.combinations(groups, 2):
        found = st.compare_classifiers(right[other.label], right[one.label], level=level)
        why = (
            f"each is one classifier that answered the same {rows[0]['n']:,} samples; in {found.n:,} just one is right"
        )
        pairs.append(describe_pair(one, other, found, why=why, paired_by="key"))
    notes = ["one run each: this tells two trained classifiers apart, not two ways of training; for these, give seeds"]
    report = {"metric": "accuracy", "mode": "max", "read_from": "results/predictions.jsonl"}
    return {**report, "groups": rows, "pairs": pairs, "notes": notes}


def describe_pair(one: Group, other: Group, found: st.Comparison, *, why: str, paired_by: str | None) -> dict[str, Any]:
    changed = diff_recipes(one.members[0].recipe, other.members[0].recipe)
    return {
        "first": one.label,
        "second": other.label,
        "paired_by": paired_by,
        "why": why,
        **dataclasses.asdict(found),
        "effect": dict(zip(("name", "size", "unbiased"), found.effect, strict=True)),
        "changed": {key: [old, new] for key, old, new in changed if key not in ("seed", FOLD_KEY)},
    }


def describe_single_run(group: Group, values: np.ndarray, interval: st.Interval, *, kind: str) -> dict[str, Any]:
    member, mean = group.members[0], float(values.mean())
    row = {"label": group.label, "name": group.name, "kind": kind, "n": len(values), "mean": mean, "deviation": None}
    run = {"run": str(member.path), "seed": member.recipe.seed, "fold": member.fold, "value": mean}
    return {**row, "interval": dataclasses.asdict(interval), "runs": [run]}
