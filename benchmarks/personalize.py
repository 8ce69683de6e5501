"""What personalised pictures are worth: all parts trained from nothing, held-out people drawn for, and the bars they must pass.

    python benchmarks/personalize.py                       # about half an hour on two CPU cores
    python benchmarks/personalize.py --out runs/trial      # the same again goes on where it was stopped

Trained: the recipe `personalize` with its parts, each timed. Evaluated: validation and test people, whose pairs of colour and
pattern nobody in training likes; and what the language model says with random weights, which must be chance.
Printed: tables, each bar with what was found, and one line of JSON; exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import bottega
from bottega.analysis import statistics as st
from bottega.analysis.evaluate import format_report
from bottega.analysis.personalize_truth import find_truth_fields
from bottega.config.recipe import Recipe
from bottega.data.output_files import replace_non_finite
from bottega.run.train import ensure_dependency
from bottega.tasks import dependencies
from bottega.tasks.recipes import load_recipe

MINUTES_TRAINING, MINUTES_EVALUATION, PEOPLE = 20, 10, 40
GAIN, LOSS, P = 2.0, 0.05, 0.01


class Clock:
    """Seconds of each piece of work, kept in a file: what is done is not done again, and what was stopped is added up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        kept = json.loads(path.read_text()) if path.is_file() else {"seconds": {}, "done": []}
        self.seconds: dict[str, float] = kept["seconds"]
        self.done: list[str] = kept["done"]

    def run(self, name: str, work: Callable[[], Any]) -> None:
        if name in self.done:
            return
        start = time.perf_counter()
        try:
            work()
            self.done.append(name)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"seconds": self.seconds, "done": self.done}, indent=1) + "\n")


def all_parts(recipe: Recipe) -> Iterator[tuple[Recipe, str]]:
    """Parts of parts first, each once."""
    seen: set[str] = set()
    for name in recipe.needs:
        inner = dependencies.dependency_recipe(recipe, name)
        for owner, one in (*all_parts(inner), (recipe, name)):
            run = str(dependencies.dependency_run(owner, one))
            if run not in seen:
                seen.add(run)
                yield owner, one


def trained(out: Path, words: list[str], clock: Clock) -> Path:
    given = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}
    settings = {**given, "output_dir": str(out), "name": "personal"}
    recipe = load_recipe(["personalize", settings]).recipe
    for owner, name in all_parts(recipe):
        clock.run(name, partial(ensure_dependency, owner, name, quiet=False))
    clock.run("personalize", lambda: bottega.train("personalize", settings))
    return out / "personal"


def evaluated(run: Path, split: str, clock: Clock) -> dict[str, Any]:
    clock.run(f"evaluate {split}", lambda: bottega.evaluate(run, split=split, quiet=False))
    folder = run / "evaluation" / split
    fields = json.loads((folder / "metrics.json").read_bytes())
    return {"metrics": {"loss": fields["loss"]}, **fields, "folder": str(folder)}


def keywords(run: Path, split: str, found: dict[str, Any]) -> dict[str, Any]:
    """Share of people whose keywords name the favourite pair, by learnt and by random weights, with intervals."""
    workload: Any = bottega.load(run, device="cpu").workload
    tables = {name: workload.personal_rows(name) for name in workload.data.prepared.tables}
    records = {name: [table.record(i) for i in range(len(table))] for name, table in tables.items()}
    fields = find_truth_fields(records[split], [record for several in records.values() for record in several])
    assert fields is not None
    words: dict[str, Any] = {"chance": fields.chance_accuracy["preference"]}
    for name, shares in found["keywords"].items():
        count = found["counts"]["records"]
        interval = st.wilson_interval(round(shares["preference"] * count), count)
        words[name] = {"share": shares["preference"], "low": interval.low, "high": interval.high}
    liked = {tuple(r.truth[f] for f in fields.preference) for r in records["train"]}
    words["new_people"] = sum(tuple(r.truth[f] for f in fields.preference) not in liked for r in records[split])
    return words


def bars(split: str, found: dict[str, Any], words: dict[str, Any], clock: Clock) -> list[tuple[str, str, bool]]:
    """What was promised, what was found, and whether that is enough."""
    arms, rows = found["arms"], []
    for kind in ("", "drawn_"):
        preference, wish = f"{kind}preference_accuracy", f"{kind}wish_accuracy"
        if preference not in arms["both"]:
            continue
        both, none, shuffled = (arms[arm][preference]["mean"] for arm in ("both", "none", "shuffled"))
        rows.append(
            (
                f"{preference}: both at least {GAIN:g} x none",
                f"{both:.3f} and {none:.3f}",
                both >= GAIN * none and both > none,
            )
        )
        lost = arms["none"][wish]["mean"] - arms["both"][wish]["mean"]
        rows.append((f"{wish}: lost at most {LOSS:g}", f"{lost:+.3f}", lost <= LOSS))
        chance, low = found["chance"][preference], arms["shuffled"][preference]["low"]
        level = max(chance, none)
        rows.append(
            (
                f"{preference}: shuffled is chance",
                f"{shuffled:.3f}, from {low:.3f}; chance {chance:.3f}, none {none:.3f}",
                low <= level,
            )
        )
        (test,) = [t for t in found["tests"] if (t["measure"], t["first"], t["second"]) == (preference, "none", "both")]
        rows.append(
            (f"{preference}: p of both and none below {P:g}", f"{test['p_adjusted']:.2g}", test["p_adjusted"] < P)
        )
    learnt, random = words["learnt"], words["random weights"]
    said = f"{learnt['share']:.3f} and {random['share']:.3f} ({random['low']:.3f} to {random['high']:.3f})"
    is_chance = random["low"] <= words["chance"]
    rows.append(
        ("keywords: learnt above chance, random at chance", said, is_chance and learnt["low"] > words["chance"])
    )
    rows.append((f"people with new pairs: at least {PEOPLE}", str(words["new_people"]), words["new_people"] >= PEOPLE))
    minutes = clock.seconds[f"evaluate {split}"] / 60
    rows.append((f"evaluation within {MINUTES_EVALUATION} minutes", f"{minutes:.1f}", minutes <= MINUTES_EVALUATION))
    return [(f"{split}: {name}", value, passed) for name, value, passed in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/personalize-benchmark"))
    parser.add_argument("settings", nargs="*", help="key=value of the recipe, for trials")
    options = parser.parse_args()
    clock = Clock(options.out / "times.json")
    run = trained(options.out, options.settings, clock)
    training = [name for name in clock.seconds if not name.startswith("evaluate")]
    minutes = sum(clock.seconds[name] for name in training) / 60
    found: dict[str, Any] = {"seconds": clock.seconds}
    checks = [(f"all parts within {MINUTES_TRAINING} minutes", f"{minutes:.1f}", minutes <= MINUTES_TRAINING)]
    for split in ("validation", "test"):
        result = evaluated(run, split, clock)
        words = keywords(run, split, result)
        print(f"\n{split}\n{format_report(result)}\n")
        checks += bars(split, result, words, clock)
        means = {arm: {name: v["mean"] for name, v in values.items()} for arm, values in result["arms"].items()}
        found[split] = {"arms": means, "keywords": words}
    print("\n".join(f"{name:<16}{seconds:>8.0f} s" for name, seconds in clock.seconds.items()))
    width = max(len(name) for name, _, _ in checks)
    print(
        "\n" + "\n".join(f"{'pass' if passed else 'FAIL'}  {name:<{width}}  {value}" for name, value, passed in checks)
    )
    print(json.dumps(replace_non_finite({**found, "bars": [list(check) for check in checks]})))
    return 0 if all(passed for _, _, passed in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
