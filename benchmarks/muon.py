"""Muon beside AdamW for generators and classifiers: final quality, and that of Muon with fewer steps.

    python benchmarks/muon.py docstrings --seeds 5            # classify/transformer, on a CPU
    python benchmarks/muon.py sst2 --data text-cls-sst2/ --seeds 5
    python benchmarks/muon.py digits                          # image, on a CPU
    python benchmarks/muon.py fashion --data fashion-mnist/ --set max_steps=4000 --jobs 3    # image/fashion, on a GPU

The recipe's optimizer is replaced, and nothing else. The learning rate of each optimizer is chosen by the same sweep on one
seed, by the measure of the case on the validation split; then both are trained with each seed. Muon is also trained with fractions of the steps, with
schedules of that length. Generators are measured by the Frechet distance of a judge, one for all runs; classifiers by the
accuracy of the last evaluation. Prints a line a run, a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A recipe, its measure, and the learning rates of the sweeps."""

    words: tuple[str, ...]
    steps: int
    measure: str
    is_better_higher: bool
    rates: dict[str, tuple[float, ...]]
    files: tuple[str, ...] = ()
    """Overrides with `{data}`, the folder of `--data`."""
    split: str = "validation"
    count: int | None = None
    """Generated samples; None is the default of `bottega evaluate`."""


CLASSIFIER_RATES = {"adamw": (5e-4, 1e-3, 2e-3, 4e-3), "muon": (2e-3, 4e-3, 8e-3, 1.6e-2)}
GENERATOR_RATES = {"adamw": (4e-4, 1e-3, 2e-3), "muon": (1e-3, 2e-3, 4e-3)}
CASES = {
    "docstrings": Case(("classify/transformer",), 300, "accuracy", True, CLASSIFIER_RATES),
    "sst2": Case(
        ("classify/sst2-transformer", "num_epochs=null"),
        1100,
        "accuracy",
        True,
        CLASSIFIER_RATES,
        ("data.train.path={data}/train.tsv", "data.validation.path={data}/dev.tsv", "data.test.path={data}/test.tsv"),
        split="test",
    ),
    "digits": Case(("image",), 2200, "frechet_distance", False, GENERATOR_RATES),
    "fashion": Case(
        ("image/fashion",),
        16000,
        "frechet_distance",
        False,
        GENERATOR_RATES,
        ("--data={data}",),
        split="test",
        count=10_000,
    ),
}
OPTIMIZERS = {"adamw": "{name: adamw}", "muon": "{name: muon}"}
FRACTIONS = {"adamw": (1.0,), "muon": (1.0, 0.7, 0.5)}


@dataclass(frozen=True)
class Bench:
    """Runs of one case in a folder."""

    folder: Path
    case: Case
    data: str | None
    settings: tuple[str, ...]
    steps: int

    def measure(
        self, optimizer: str, rate: float, *, seed: int, fraction: float = 1.0, split: str = "validation"
    ) -> dict[str, Any]:
        """Train and evaluate once; return the measure and the seconds of all steps."""
        steps = round(self.steps * fraction)
        name = f"{optimizer}-{rate:g}-{seed}-{steps}"
        run = self.folder / "runs" / name
        if not run.exists():  # the sweep has trained some of them
            self.call(
                *("train", *self.words(), *self.settings, f"name={name}", f"seed={seed}", f"max_steps={steps}"),
                *(f"training.optimizer={OPTIMIZERS[optimizer]}", f"training.learning_rate={rate:g}"),
                *("evaluation.every=25%", "samples.every=null", "checkpoint.every=null", "early_stopping=null"),
                *("logging.report=false", "logging.tensorboard=false", "logging.modules=false", "--quiet"),
            )
        count = [] if self.case.count is None else ["--count", str(self.case.count)]
        result = json.loads(self.call("evaluate", str(run), "--checkpoint", "last", "--split", split, *count, "--json"))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        seconds = statistics.median([row["step_seconds"] for row in rows if row["kind"] == "train"][1:])
        losses = [row["loss"] for row in rows if row["kind"] == "eval"]
        values = {"value": result["metrics"][self.case.measure], "loss": losses[-1], "seconds": steps * seconds}
        print(
            f"{optimizer:<8} {steps:>6} steps  rate {rate:<7g} seed {seed}  {self.case.measure} {values['value']:.4f}  "
            f"loss {values['loss']:.4f}  {values['seconds']:.1f} s",
            flush=True,
        )
        return {"optimizer": optimizer, "rate": rate, "seed": seed, "fraction": fraction, **values}

    def words(self) -> list[str]:
        """Return the words of the recipe with its data, the same for all runs."""
        files = [override.format(data=self.data) for override in self.case.files]
        judge = ["needs.judge.settings.seed=0"] if self.case.measure == "frechet_distance" else []
        return [*self.case.words, *files, *judge]

    def call(self, *words: str) -> str:
        """Run a command of bottega; return its output."""
        command = [sys.executable, "-m", "bottega", *words]
        result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"{' '.join(command)}\n{result.stderr[-3000:]}")
        return result.stdout


def choose_rates(case: Case, sweep: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the best rate of each optimizer."""
    sign = -1 if case.is_better_higher else 1
    return {
        optimizer: min((row for row in sweep if row["optimizer"] == optimizer), key=lambda row: sign * row["value"])[
            "rate"
        ]
        for optimizer in OPTIMIZERS
    }


def print_table(case: Case, rows: Sequence[dict[str, Any]]) -> None:
    """Print mean and deviation of the measure for each optimizer and fraction of the steps."""
    print(f"\n{'optimizer':<10}{'rate':>8}{'steps':>8}{'seconds':>9}{case.measure:>18}{'deviation':>11}")
    for optimizer, fractions in FRACTIONS.items():
        for fraction in fractions:
            runs = [row for row in rows if (row["optimizer"], row["fraction"]) == (optimizer, fraction)]
            values, seconds = [row["value"] for row in runs], statistics.mean(row["seconds"] for row in runs)
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            print(
                f"{optimizer:<10}{runs[0]['rate']:>8g}{fraction:>8.2f}{seconds:>9.1f}{statistics.mean(values):>18.4f}{deviation:>11.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--data", help="folder of the data set")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--steps", type=int, help="length of the whole runs; default: that of the recipe")
    parser.add_argument(
        "--rates", nargs="*", default=[], metavar="NAME=R,R", help="rates of a sweep, as muon=2e-3,4e-3"
    )
    parser.add_argument("--count", type=int, help="generated samples; default: that of the case")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of the recipe")
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    chosen = {
        name: tuple(map(float, values.split(","))) for name, _, values in (x.partition("=") for x in arguments.rates)
    }
    case = replace(case, rates={**case.rates, **chosen}, count=arguments.count or case.count)
    data = str(Path(arguments.data).resolve()) if arguments.data else None
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(arguments.jobs) as pool:
        bench = Bench(Path(temporary), case, data, tuple(arguments.set), arguments.steps or case.steps)
        bench.call("prepare", *bench.words())
        points = [(optimizer, rate) for optimizer, rates in case.rates.items() for rate in rates]
        first = [bench.measure(*points[0], seed=0)]  # alone, because it trains the judge
        sweep = [*first, *pool.map(lambda point: bench.measure(*point, seed=0), points[1:])]
        rates = choose_rates(case, sweep)
        final = [
            (optimizer, fraction, seed)
            for seed in range(arguments.seeds)
            for optimizer, fractions in FRACTIONS.items()
            for fraction in fractions
        ]
        rows = list(
            pool.map(
                lambda run: bench.measure(run[0], rates[run[0]], seed=run[2], fraction=run[1], split=case.split), final
            )
        )
    print_table(case, rows)
    print(json.dumps({"bench": "muon", "case": arguments.case, "rates": rates, "sweep": sweep, "rows": rows}))


if __name__ == "__main__":
    main()
