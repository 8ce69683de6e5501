"""What routing is worth: samples with known rules against their Bayes accuracy, and experts against one network of equal compute.

    python benchmarks/routing.py                # five seeds of each, a quarter of an hour on one CPU core
    python benchmarks/routing.py --seeds 2 --steps 100 --out runs/trial

hard: `routing/synthetic-hard`. Routed, the same told the rule in training, and dense: one expert that is wider by what the
router costs, so that no sample of the routed one is multiplied with more weights. Each at the best of three learning rates,
found with a seed that is not counted. Runs of one seed are pairs, trained one after the other; the test is that of
`bottega compare`.
large: `routing/large`, told the rule in training and not, evaluated on its 20,000 test samples.
Printed: tables, and one line of JSON.
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
from bottega.data.output_files import replace_non_finite
from bottega.tasks.recipes import load_recipe

HARD, LARGE = "routing/synthetic-hard", "routing/large"
RATE, RATES, TRIAL = "training.learning_rate", (1e-2, 2e-2, 4e-2), 100
SAID = ("rule_information", "load_entropy")
QUIET = {"samples.every": None, "logging.tensorboard": False, "logging.resources": False}


def contestants() -> dict[str, dict[str, Any]]:
    model: Any = load_recipe([HARD]).recipe.model
    # An expert has three matrices of the width of the trunk, the router one column for each expert.
    wider = model.expert_size + math.ceil(model.num_experts / 3)
    return {
        "dense": {"model.num_experts": 1, "model.expert_size": wider},
        "routed": {},
        "told": {"model.routing_loss_weight": 0.1},
    }


def train(recipe: str, out: Path, name: str, changes: dict[str, Any], *, seed: int, steps: int | None) -> Any:
    length = {"training.max_steps": steps, "evaluation.every": steps} if steps is not None else {}
    own = {"output_dir": str(out), "name": f"{name}-s{seed}", "seed": seed}
    return bottega.train(recipe, {**QUIET, **changes, **length, **own})


def hard(out: Path, *, seeds: int, steps: int | None) -> dict[str, Any]:
    names, runs = contestants(), {}
    for name, changes in names.items():
        tried = {
            rate: train(HARD, out / "rates", f"{name}-{rate}", changes | {RATE: rate}, seed=TRIAL, steps=steps).metrics
            for rate in RATES
        }
        names[name] = changes | {RATE: max(tried, key=lambda rate: tried[rate]["accuracy"])}
    for seed in range(seeds):
        for name, changes in names.items():
            runs[name, seed] = train(HARD, out, name, changes, seed=seed, steps=steps)
    print(f"{'':<10}{'rate':>6}{'flops':>10}{'parameters':>12}{'accuracy':>10}{'information':>13}{'load entropy':>14}")
    table = {}
    for name in names:
        saved = bottega.load(runs[name, 0].path)
        found = [runs[name, seed].metrics for seed in range(seeds)]
        row = {
            "rate": names[name][RATE],
            "flops": saved.workload.known.shape.flops_per_sample(),
            "parameters": sum(p.numel() for p in saved.model.parameters()),
            **{key: mean(one.get(key, math.nan) for one in found) for key in ("accuracy", *SAID)},
            "bayes_accuracy": found[0]["bayes_accuracy"],
        }
        table[name] = row
        said = "".join(f"{row[key]:>{width}.4f}" for key, width in zip(SAID, (13, 14), strict=True))
        print(f"{name:<10}{row['rate']:>6}{row['flops']:>10,}{row['parameters']:>12,}{row['accuracy']:>10.4f}{said}")
    if seeds == 1:
        return {"table": table}
    report = compare([str(out / f"{name}-s*") for name in names])
    print("\n" + format_report(report))
    kept = ("first", "second", "difference", "interval", "p_adjusted", "outcome")
    return {"table": table, "pairs": [{key: pair[key] for key in kept} for pair in report["pairs"]]}


def large(out: Path, *, seeds: int, steps: int | None) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, weight in {"large-told": 0.1, "large": 0.0}.items():
        found = []
        for seed in range(seeds):
            run = train(LARGE, out, name, {"model.routing_loss_weight": weight}, seed=seed, steps=steps)
            found.append(bottega.evaluate(run.path, split="test")["metrics"])
        keys = ("accuracy", "bayes_accuracy", *SAID)
        table[name] = {key: mean(one[key] for one in found) for key in keys}
        print(f"{name:<12}" + "  ".join(f"{key} {value:.4f}" for key, value in table[name].items()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None, help="shorter runs than the recipes say")
    parser.add_argument("--out", type=Path, default=Path("runs/routing-benchmark"))
    parser.add_argument("--part", choices=("hard", "large", "all"), default="all")
    options = parser.parse_args()
    parts = {"hard": hard, "large": large}
    chosen = parts if options.part == "all" else {options.part: parts[options.part]}
    found = {name: part(options.out, seeds=options.seeds, steps=options.steps) for name, part in chosen.items()}
    print(json.dumps(replace_non_finite(found)))


if __name__ == "__main__":
    main()
