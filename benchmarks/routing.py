"""Routing quality: accuracy against the Bayes accuracy of known rules, and experts against a dense network of equal compute.

    python benchmarks/routing.py                # five seeds of each, a quarter of an hour on one CPU core
    python benchmarks/routing.py --seeds 2 --steps 100 --out runs/trial

hard: `routing/synthetic-hard`. Contestants: routed, supervised (routed, with supervision by the rule), and dense (one expert, wider
by the cost of the router, so that all have equal FLOPs per sample). Each is trained at the best of three learning rates, selected
with a seed that is not counted. Runs of equal seed are compared in pairs, as `bottega compare` does.
large: `routing/large`, with and without supervision by the rule, evaluated on its 20,000 test samples.
Prints tables and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import bottega
from bottega.analysis.compare import compare, format_report
from bottega.storage.json_values import replace_non_finite
from bottega.tasks.recipes import load_recipe

HARD, LARGE = "routing/synthetic-hard", "routing/large"
RATE_KEY, RATES, SELECTION_SEED = "training.learning_rate", (1e-2, 2e-2, 4e-2), 100
ROUTING_METRICS = ("rule_information", "load_entropy")
QUIET = {"samples.every": None, "logging.tensorboard": False, "logging.resources": False}


def build_contestants() -> dict[str, dict[str, Any]]:
    model: Any = load_recipe([HARD]).recipe.model
    # An expert has three matrices with the trunk's width, the router one column per expert.
    dense_size = model.expert_size + math.ceil(model.num_experts / 3)
    return {
        "dense": {"model.num_experts": 1, "model.expert_size": dense_size},
        "routed": {},
        "supervised": {"model.routing_loss_weight": 0.1},
    }


def train(recipe: str, out: Path, name: str, changes: dict[str, Any], *, seed: int, steps: int | None) -> Any:
    length = {"training.max_steps": steps, "evaluation.every": steps} if steps is not None else {}
    identity = {"output_dir": str(out), "name": f"{name}-s{seed}", "seed": seed}
    return bottega.train(recipe, {**QUIET, **changes, **length, **identity})


def compare_hard(out: Path, *, seeds: int, steps: int | None) -> dict[str, Any]:
    contestants, runs = build_contestants(), {}
    for name, changes in contestants.items():
        trial_metrics = {
            rate: train(
                HARD, out / "rates", f"{name}-{rate}", changes | {RATE_KEY: rate}, seed=SELECTION_SEED, steps=steps
            ).metrics
            for rate in RATES
        }
        contestants[name] = changes | {RATE_KEY: max(trial_metrics, key=lambda rate: trial_metrics[rate]["accuracy"])}
    for seed in range(seeds):
        for name, changes in contestants.items():
            runs[name, seed] = train(HARD, out, name, changes, seed=seed, steps=steps)
    print(f"{'':<12}{'rate':>6}{'flops':>10}{'parameters':>12}{'accuracy':>10}{'information':>13}{'load entropy':>14}")
    table = {}
    for name in contestants:
        saved = bottega.load(runs[name, 0].path)
        metrics = [runs[name, seed].metrics for seed in range(seeds)]
        row = {
            "rate": contestants[name][RATE_KEY],
            "flops": saved.workload.metadata.shape.flops_per_sample(),
            "parameters": sum(p.numel() for p in saved.model.parameters()),
            **{key: mean(values.get(key, math.nan) for values in metrics) for key in ("accuracy", *ROUTING_METRICS)},
            "bayes_accuracy": metrics[0]["bayes_accuracy"],
        }
        table[name] = row
        columns = "".join(f"{row[key]:>{width}.4f}" for key, width in zip(ROUTING_METRICS, (13, 14), strict=True))
        print(f"{name:<12}{row['rate']:>6}{row['flops']:>10,}{row['parameters']:>12,}{row['accuracy']:>10.4f}{columns}")
    if seeds == 1:
        return {"table": table}
    report = compare([str(out / f"{name}-s*") for name in contestants])
    print("\n" + format_report(report))
    keys = ("first", "second", "difference", "interval", "p_adjusted", "outcome")
    return {"table": table, "pairs": [{key: pair[key] for key in keys} for pair in report["pairs"]]}


def compare_large(out: Path, *, seeds: int, steps: int | None) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, weight in {"large-supervised": 0.1, "large": 0.0}.items():
        metrics = []
        for seed in range(seeds):
            run = train(LARGE, out, name, {"model.routing_loss_weight": weight}, seed=seed, steps=steps)
            metrics.append(bottega.evaluate(run.path, split="test")["metrics"])
        keys = ("accuracy", "bayes_accuracy", *ROUTING_METRICS)
        table[name] = {key: mean(values[key] for values in metrics) for key in keys}
        print(f"{name:<18}" + "  ".join(f"{key} {value:.4f}" for key, value in table[name].items()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None, help="steps per run (default: as in the recipes)")
    parser.add_argument("--out", type=Path, default=Path("runs/routing-benchmark"))
    parser.add_argument("--part", choices=("hard", "large", "all"), default="all")
    options = parser.parse_args()
    parts = {"hard": compare_hard, "large": compare_large}
    chosen = parts if options.part == "all" else {options.part: parts[options.part]}
    results = {name: part(options.out, seeds=options.seeds, steps=options.steps) for name, part in chosen.items()}
    print(json.dumps(replace_non_finite(results)))


if __name__ == "__main__":
    main()
