"""Compare search methods and pruners on a recorded table of real runs (benchmarks/search_table.json.gz).

    python benchmarks/search_quality.py [--trials 50] [--seeds 30]

Searches run through the code of `bottega tune`, but a trial looks its learning curve up in place of training. Methods are
compared by the best value found (Wilcoxon test over seeds, as `bottega compare` does), pruners by the steps they save.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from optuna.storages import InMemoryStorage

from bottega.analysis.statistics import compare_paired
from bottega.plots.study import plot_parallel
from bottega.tuning.space import build_grid, parse_space
from bottega.tuning.study import Objective, Study

TABLE = Path(__file__).with_name("search_table.json.gz")


def load_table() -> tuple[dict[str, Any], dict[str, list[list[float]]]]:
    table = json.loads(gzip.decompress(TABLE.read_bytes()))
    curves = {json.dumps(run["keys"], sort_keys=True): run["curve"] for run in table["runs"]}
    return table, curves


def search(
    table: dict[str, Any],
    curves: dict[str, list[list[float]]],
    *,
    method: str,
    pruner: str,
    seed: int,
    num_trials: int,
    metric: str = "accuracy",
) -> dict[str, Any]:
    """Return the best value of a complete trial, the steps trained, and those without pruning."""
    column, sign = (1, 1.0) if metric == "accuracy" else (2, -1.0)
    dimensions = parse_space(table["grid"])
    study = Study(
        InMemoryStorage(),
        "s",
        dimensions=dimensions,
        base={},
        objectives=[Objective(metric, "max" if sign > 0 else "min")],
        method=method,
        pruner=pruner,
        seed=seed,
        grid=build_grid(dimensions, {}) if method == "grid" else (),
        first_evaluation=100,
    )
    best, trained, full = -math.inf, 0, 0
    trained_points: set[str] = set()
    while (record := study.ask(limit=num_trials)) is not None:
        name = json.dumps(record.keys, sort_keys=True)
        curve = curves[name]
        is_pruned = False
        steps = 0
        for row in curve:
            steps = row[0]
            if (
                study.report(record.number, round(1000 * steps / table["steps"]), row[column])
                and steps < table["steps"]
            ):
                is_pruned = True
                break
        if name not in trained_points:  # the same keys are never trained twice
            trained, full = trained + steps, full + table["steps"]
        trained_points.add(name)
        if not curve:
            study.fail(record.number, "diverged")
        elif is_pruned:
            study.prune(record.number)
        else:
            value = max(sign * row[column] for row in curve)
            study.finish(record.number, [sign * value])
            best = max(best, value)
    return {"best": sign * best, "trained": trained, "full": full, "distinct": len(trained_points), "study": study}


def plot_search(table: dict[str, Any], study: Study, path: Path) -> None:
    """Write the parallel coordinates of a search, as `bottega tune` does."""
    trials = [{"keys": trial.keys, "values": trial.values} for trial in study.list_trials() if trial.values is not None]
    report = {"trials": trials, "space": table["grid"], "metrics": [{"name": "accuracy", "mode": "max"}]}
    plot_parallel(report, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--metric", choices=("accuracy", "loss"), default="accuracy")
    parser.add_argument("--methods", default="random,tpe,cmaes")
    parser.add_argument("--pruners", default="none,median,asha,hyperband")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="plot one search by TPE, in place of the comparison"
    )
    arguments = parser.parse_args()
    table, curves = load_table()
    if arguments.plot is not None:
        one = search(table, curves, method="tpe", pruner="none", seed=0, num_trials=arguments.trials)
        plot_search(table, one["study"], arguments.plot)
        return
    column, sign = (1, 1.0) if arguments.metric == "accuracy" else (2, -1.0)
    trained_curves = [curve for curve in curves.values() if curve]
    ranked = sorted((max(sign * row[column] for row in curve) for curve in trained_curves), reverse=True)
    values = [sign * value for value in ranked]
    print(
        f"{len(curves)} runs of {table['recipe']}, best {values[0]:.4f}, 5th {values[4]:.4f}, median {values[len(values) // 2]:.4f}"
    )
    methods = arguments.methods.split(",")
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    settings = [(method, "none") for method in methods]
    settings += [("tpe", pruner) for pruner in arguments.pruners.split(",") if pruner != "none"]
    for method, pruner in settings:
        start = time.perf_counter()
        results[method, pruner] = [
            search(
                table,
                curves,
                method=method,
                pruner=pruner,
                seed=arguments.first_seed + seed,
                num_trials=arguments.trials,
                metric=arguments.metric,
            )
            for seed in range(arguments.seeds)
        ]
        runs = results[method, pruner]
        best = [run["best"] for run in runs]
        saved = 1 - sum(run["trained"] for run in runs) / sum(run["full"] for run in runs)
        ranks = [1 + sum(sign * value > sign * b for value in values) for b in best]
        print(
            f"{method:<8}{pruner:<10} best mean {statistics.mean(best):.4f}, median {statistics.median(best):.4f}, rank of 288: "
            f"{statistics.mean(ranks):.1f}, distinct {statistics.mean(run['distinct'] for run in runs):.1f}, steps saved "
            f"{saved:.0%}, {time.perf_counter() - start:.0f} s"
        )
    for first, second in [(("random", "none"), ("tpe", "none"))] + [
        (("tpe", "none"), ("tpe", pruner)) for pruner in arguments.pruners.split(",") if pruner != "none"
    ]:
        a = np.array([run["best"] for run in results[first]])
        b = np.array([run["best"] for run in results[second]])
        result = compare_paired(a, b, level=0.95)
        wilcoxon = f", Wilcoxon p {result.ranks.p:.2g}" if result.ranks is not None else ""
        print(
            f"{' '.join(second)} against {' '.join(first)}: {(b - a).mean():+.5f} "
            f"[{-result.interval.high:+.5f}, {-result.interval.low:+.5f}], {result.test} p {result.p:.2g}{wilcoxon}"
        )


if __name__ == "__main__":
    main()
