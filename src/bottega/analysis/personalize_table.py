"""The arms of a personalised run for the terminal: a column for each, and the tests that a person asks for first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bottega.analysis.compare import format_table

NEARNESS = ("clip_preference", "clip_target", "clip_history")
"""Tested for the eye where nothing is known of what pictures should show."""


def format_report(found: Mapping[str, Any]) -> list[str]:
    """The table of arms, what the keywords are worth, and the tests that matter most."""
    arms = found["arms"]
    measures = list(dict.fromkeys(measure for values in arms.values() for measure in values))
    width = max(map(len, measures)) + 2
    lines = ["", " " * width + "".join(f"{arm:>11}" for arm in arms) + (f"{'chance':>11}" if "chance" in found else "")]
    for measure in measures:
        cells = [f"{arms[arm][measure]['mean']:>11.4f}" if measure in arms[arm] else " " * 11 for arm in arms]
        chance = found.get("chance", {}).get(measure)
        lines.append((f"{measure:<{width}}" + "".join(cells) + (f"{chance:>11.4f}" if chance else "")).rstrip())
    lines.append(f"{'people':<{width}}{found['counts']['people']:>11,}")
    return [*lines, *_keywords(found, width), *_tests_shown(found.get("tests", []))]


def headline_measures(measures: Iterable[str]) -> list[str]:
    """Preference and wish; of data that knows neither, how near CLIP finds pictures to the words and the liked."""
    names = list(measures)
    whole = [name for name in names if name.removeprefix("drawn_") in ("preference_accuracy", "wish_accuracy")]
    return whole or [name for name in names if name in NEARNESS]


def _keywords(found: Mapping[str, Any], width: int) -> list[str]:
    """By what the language model has learnt, and by the same network with random weights."""
    said, chance = found.get("keywords", {}), found.get("chance", {})
    if not said.get("learnt"):
        return []
    lines = ["", "people whose keywords name what they like", " " * width + "".join(f"{name:>16}" for name in said)]
    lines[-1] += f"{'chance':>16}"
    for name in said["learnt"]:
        cells = "".join(f"{shares[name]:>16.4f}" for shares in said.values())
        guessed = chance.get(f"{name}_accuracy", chance.get(f"drawn_{name}_accuracy"))
        lines.append(f"{name:<{width}}{cells}" + (f"{guessed:>16.4f}" if guessed is not None else ""))
    return lines


def _tests_shown(found: Sequence[Mapping[str, Any]]) -> list[str]:
    kept = headline_measures(dict.fromkeys(test["measure"] for test in found))
    # What personalising must not cost is asked of the whole method alone.
    shown = [t for name in kept for t in found if t["measure"] == name and ("wish" not in name or _is_whole(t))]
    if not shown:
        return []
    rows = [["measure", "pair", "difference", "95 % interval", "test", "p (Holm)"]]
    for test in shown:
        low, high = test["interval"]["low"], test["interval"]["high"]
        pair = f"{test['second']} - {test['first']}"
        p = "< 0.0001" if test["p_adjusted"] < 1e-4 else f"{test['p_adjusted']:.4f}"
        difference, span = f"{test['difference']:+.4f}", f"{low:+.4f} to {high:+.4f}"
        rows.append([test["measure"], pair, difference, span, test["test"], p])
    return ["", *format_table(rows, right=(2, 3, 5))]


def _is_whole(test: Mapping[str, Any]) -> bool:
    return (test["first"], test["second"]) == ("none", "both")
