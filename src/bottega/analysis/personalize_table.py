"""Format the results of a personalised evaluation for the terminal: a column for each arm, and the main tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bottega.analysis.compare import format_table

SIMILARITIES = ("clip_preference", "clip_target", "clip_history")
"""Measures that are shown if the data does not say what images should show."""


def format_report(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table of arms, the accuracy of the keywords, and the main tests."""
    arms = results["arms"]
    measures = list(dict.fromkeys(measure for values in arms.values() for measure in values))
    width = max(map(len, measures)) + 2
    lines = [
        "",
        " " * width + "".join(f"{arm:>11}" for arm in arms) + (f"{'chance':>11}" if "chance" in results else ""),
    ]
    for measure in measures:
        cells = [f"{arms[arm][measure]['mean']:>11.4f}" if measure in arms[arm] else " " * 11 for arm in arms]
        chance = results.get("chance", {}).get(measure)
        lines.append((f"{measure:<{width}}" + "".join(cells) + (f"{chance:>11.4f}" if chance else "")).rstrip())
    lines.append(f"{'people':<{width}}{results['counts']['people']:>11,}")
    return [*lines, *_format_keywords(results, width), *_format_tests(results.get("tests", []))]


def select_headline_measures(measures: Iterable[str]) -> list[str]:
    """Return the accuracies of preference and wish, or the CLIP similarities if there are no accuracies."""
    names = list(measures)
    accuracies = [name for name in names if name.removeprefix("drawn_") in ("preference_accuracy", "wish_accuracy")]
    return accuracies or [name for name in names if name in SIMILARITIES]


def _format_keywords(results: Mapping[str, Any], width: int) -> list[str]:
    """Format the accuracy of keywords by the trained language model, and by the same network with random weights."""
    accuracies, chance = results.get("keywords", {}), results.get("chance", {})
    if not accuracies.get("learnt"):
        return []
    lines = [
        "",
        "users whose keywords name what they like",
        " " * width + "".join(f"{name:>16}" for name in accuracies),
    ]
    lines[-1] += f"{'chance':>16}"
    for name in accuracies["learnt"]:
        cells = "".join(f"{by_column[name]:>16.4f}" for by_column in accuracies.values())
        chance_accuracy = chance.get(f"{name}_accuracy", chance.get(f"drawn_{name}_accuracy"))
        lines.append(f"{name:<{width}}{cells}" + (f"{chance_accuracy:>16.4f}" if chance_accuracy is not None else ""))
    return lines


def _format_tests(tests: Sequence[Mapping[str, Any]]) -> list[str]:
    measures = select_headline_measures(dict.fromkeys(test["measure"] for test in tests))
    # Whether images still show the wish is tested for the full method only.
    shown_tests = [
        t for name in measures for t in tests if t["measure"] == name and ("wish" not in name or _is_full_method(t))
    ]
    if not shown_tests:
        return []
    rows = [["measure", "pair", "difference", "95 % interval", "test", "p (Holm)"]]
    for test in shown_tests:
        low, high = test["interval"]["low"], test["interval"]["high"]
        pair = f"{test['second']} - {test['first']}"
        p = "< 0.0001" if test["p_adjusted"] < 1e-4 else f"{test['p_adjusted']:.4f}"
        difference, span = f"{test['difference']:+.4f}", f"{low:+.4f} to {high:+.4f}"
        rows.append([test["measure"], pair, difference, span, test["test"], p])
    return ["", *format_table(rows, right=(2, 3, 5))]


def _is_full_method(test: Mapping[str, Any]) -> bool:
    return (test["first"], test["second"]) == ("none", "both")
