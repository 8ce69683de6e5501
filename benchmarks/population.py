"""Compare population-based training with the same members trained without exploitation.

    python benchmarks/population.py [--seeds 3]

The first generation of a population has fixed keys. Here each of them is also trained to the end unchanged, and the best of
these fixed members is compared with the winner of the population.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import bottega

SPACE = {"training.learning_rate": "log(1e-4, 1e-1)", "model.dropout": "uniform(0, 0.8)"}
SETTINGS = {
    "training.max_steps": 300,
    "training.scheduler.name": "constant",
    "training.scheduler.warmup_steps": 10,
    "evaluation.every": 30,
    "logging.tensorboard": False,
    "device": "cpu",
    "cpu_threads": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--population", type=int, default=8)
    arguments = parser.parse_args()
    gains = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            options = {"tune.population": arguments.population, "tune.every": "10%", "tune.seed": seed}
            report = bottega.tune(
                "classify/cnn",
                {**SETTINGS, **options},
                space=SPACE,
                method="pbt",
                metric="loss",
                verify=True,
                jobs=2,
                out=Path(folder) / f"pbt-{seed}",
            )
            first = [segment["keys"] for segment in report["segments"] if segment["generation"] == 0]
            last_losses = []
            for number, keys in enumerate(first):
                run = bottega.train(
                    "classify/cnn", {**SETTINGS, **keys, "output_dir": folder, "name": f"fixed-{seed}-{number}"}
                )
                last_losses.append(next(row for row in reversed(run.history()) if row["kind"] == "eval")["loss"])
            fixed, winner = min(last_losses), report["best"]["values"][0]
            changes = sum(
                a["keys"] != b["keys"] for a, b in zip(report["lineage"], report["lineage"][1:], strict=False)
            )
            gains.append(fixed - winner)
            print(
                f"seed {seed}: loss of the winner {winner:.4f} ({changes} changes of keys, replayed equal: {report['verified']}), "
                f"best fixed member {fixed:.4f}, median fixed member {statistics.median(last_losses):.4f}",
                flush=True,
            )
    print(
        f"gain over the best fixed member: {statistics.mean(gains):+.4f} on average, {[round(gain, 4) for gain in gains]}"
    )


if __name__ == "__main__":
    main()
