"""Personalised image generation: train all parts from scratch, evaluate on held-out people, and check the acceptance criteria.

    python benchmarks/personalize.py                       # about half an hour on two CPU cores
    python benchmarks/personalize.py --out runs/trial      # run again to resume

Trains the recipe `personalize` with its dependencies, each timed. Evaluates validation and test people, whose favourite pairs
of colour and pattern do not occur in training; keywords of a language model with random weights must be at chance.
Prints tables, each criterion with its value, and one line of JSON; the exit code is 1 if a criterion fails.
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
from bottega.run.train import ensure_dependency
from bottega.storage.json_values import replace_non_finite
from bottega.tasks import dependencies
from bottega.tasks.recipes import load_recipe

MAX_TRAINING_MINUTES, MAX_EVALUATION_MINUTES, MIN_NEW_PEOPLE = 20, 10, 40
MIN_PREFERENCE_GAIN = 2.0
"""Accuracy of preferences in the arm `both` over that in the arm `none`."""
MAX_WISH_LOSS = 0.05
"""Accuracy of wishes that the arm `both` may lose against the arm `none`."""
MAX_P_VALUE = 0.01


class Clock:
    """Seconds of each stage, saved in a file: finished stages are skipped, and the time of interrupted ones is added up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        state = json.loads(path.read_text()) if path.is_file() else {"seconds": {}, "done": []}
        self.seconds: dict[str, float] = state["seconds"]
        self.done: list[str] = state["done"]

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


def iter_dependencies(recipe: Recipe) -> Iterator[tuple[Recipe, str]]:
    """Yield (recipe, dependency name) in topological order, each run once."""
    runs: set[str] = set()
    for name in recipe.needs:
        inner = dependencies.build_dependency_recipe(recipe, name)
        for owner, dependency in (*iter_dependencies(inner), (recipe, name)):
            run = str(dependencies.find_dependency_run(owner, dependency))
            if run not in runs:
                runs.add(run)
                yield owner, dependency


def train_all(out: Path, arguments: list[str], clock: Clock) -> Path:
    overrides = {key: yaml.safe_load(value) for key, _, value in (argument.partition("=") for argument in arguments)}
    settings = {**overrides, "output_dir": str(out), "name": "personal"}
    recipe = load_recipe(["personalize", settings]).recipe
    for owner, name in iter_dependencies(recipe):
        clock.run(name, partial(ensure_dependency, owner, name, quiet=False))
    clock.run("personalize", lambda: bottega.train("personalize", settings))
    return out / "personal"


def evaluate_split(run: Path, split: str, clock: Clock) -> dict[str, Any]:
    clock.run(f"evaluate {split}", lambda: bottega.evaluate(run, split=split, quiet=False))
    folder = run / "evaluation" / split
    fields = json.loads((folder / "metrics.json").read_bytes())
    return {"metrics": {"loss": fields["loss"]}, **fields, "folder": str(folder)}


def keyword_accuracy(run: Path, split: str, result: dict[str, Any]) -> dict[str, Any]:
    """Return the fraction of people whose keywords name the favourite pair, for trained and random weights, with intervals."""
    workload: Any = bottega.load(run, device="cpu").workload
    tables = {name: workload.personal_rows(name) for name in workload.data.prepared.tables}
    records = {name: [table.record(i) for i in range(len(table))] for name, table in tables.items()}
    fields = find_truth_fields(
        records[split], [record for split_records in records.values() for record in split_records]
    )
    assert fields is not None
    metrics: dict[str, Any] = {"chance": fields.chance_accuracy["preference"]}
    for name, accuracies in result["keywords"].items():
        count = result["counts"]["records"]
        interval = st.wilson_interval(round(accuracies["preference"] * count), count)
        metrics[name] = {"share": accuracies["preference"], "low": interval.low, "high": interval.high}

    def favourite_pair(record: Any) -> tuple[Any, ...]:
        return tuple(record.truth[field] for field in fields.preference)

    train_pairs = {favourite_pair(record) for record in records["train"]}
    metrics["new_people"] = sum(favourite_pair(record) not in train_pairs for record in records[split])
    return metrics


def check_criteria(
    split: str, result: dict[str, Any], keywords: dict[str, Any], clock: Clock
) -> list[tuple[str, str, bool]]:
    """Return (criterion, value, passed) for each acceptance criterion."""
    arms, rows = result["arms"], []
    for kind in ("", "drawn_"):
        preference, wish = f"{kind}preference_accuracy", f"{kind}wish_accuracy"
        if preference not in arms["both"]:
            continue
        both, none, shuffled = (arms[arm][preference]["mean"] for arm in ("both", "none", "shuffled"))
        rows.append(
            (
                f"{preference}: both at least {MIN_PREFERENCE_GAIN:g} x none",
                f"{both:.3f} and {none:.3f}",
                both >= MIN_PREFERENCE_GAIN * none and both > none,
            )
        )
        lost = arms["none"][wish]["mean"] - arms["both"][wish]["mean"]
        rows.append((f"{wish}: lost at most {MAX_WISH_LOSS:g}", f"{lost:+.3f}", lost <= MAX_WISH_LOSS))
        chance, low = result["chance"][preference], arms["shuffled"][preference]["low"]
        level = max(chance, none)
        rows.append(
            (
                f"{preference}: shuffled is chance",
                f"{shuffled:.3f}, from {low:.3f}; chance {chance:.3f}, none {none:.3f}",
                low <= level,
            )
        )
        (test,) = [
            row
            for row in result["tests"]
            if (row["measure"], row["first"], row["second"]) == (preference, "none", "both")
        ]
        rows.append(
            (
                f"{preference}: p of both and none below {MAX_P_VALUE:g}",
                f"{test['p_adjusted']:.2g}",
                test["p_adjusted"] < MAX_P_VALUE,
            )
        )
    trained, untrained = keywords["learnt"], keywords["random weights"]
    text_value = (
        f"{trained['share']:.3f} and {untrained['share']:.3f} ({untrained['low']:.3f} to {untrained['high']:.3f})"
    )
    is_chance = untrained["low"] <= keywords["chance"]
    rows.append(
        (
            "keywords: trained above chance, random at chance",
            text_value,
            is_chance and trained["low"] > keywords["chance"],
        )
    )
    rows.append(
        (
            f"people with new pairs: at least {MIN_NEW_PEOPLE}",
            str(keywords["new_people"]),
            keywords["new_people"] >= MIN_NEW_PEOPLE,
        )
    )
    minutes = clock.seconds[f"evaluate {split}"] / 60
    rows.append(
        (f"evaluation within {MAX_EVALUATION_MINUTES} minutes", f"{minutes:.1f}", minutes <= MAX_EVALUATION_MINUTES)
    )
    return [(f"{split}: {name}", value, passed) for name, value, passed in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/personalize-benchmark"))
    parser.add_argument("settings", nargs="*", help="recipe settings as key=value")
    options = parser.parse_args()
    clock = Clock(options.out / "times.json")
    run = train_all(options.out, options.settings, clock)
    training = [name for name in clock.seconds if not name.startswith("evaluate")]
    minutes = sum(clock.seconds[name] for name in training) / 60
    results: dict[str, Any] = {"seconds": clock.seconds}
    checks = [(f"all parts within {MAX_TRAINING_MINUTES} minutes", f"{minutes:.1f}", minutes <= MAX_TRAINING_MINUTES)]
    for split in ("validation", "test"):
        result = evaluate_split(run, split, clock)
        keyword_metrics = keyword_accuracy(run, split, result)
        print(f"\n{split}\n{format_report(result)}\n")
        checks += check_criteria(split, result, keyword_metrics, clock)
        means = {arm: {name: v["mean"] for name, v in values.items()} for arm, values in result["arms"].items()}
        results[split] = {"arms": means, "keywords": keyword_metrics}
    print("\n".join(f"{name:<16}{seconds:>8.0f} s" for name, seconds in clock.seconds.items()))
    width = max(len(name) for name, _, _ in checks)
    print(
        "\n" + "\n".join(f"{'pass' if passed else 'FAIL'}  {name:<{width}}  {value}" for name, value, passed in checks)
    )
    print(json.dumps(replace_non_finite({**results, "bars": [list(check) for check in checks]})))
    return 0 if all(passed for _, _, passed in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
