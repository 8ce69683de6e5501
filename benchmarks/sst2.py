"""SST-2 from scratch: Kim's network and a small transformer over seeds, compared with TF-IDF and logistic regression.

    python benchmarks/sst2.py --data text-cls-sst2/ --output runs/sst2

The folder holds train.tsv, dev.tsv and test.tsv. The epoch is selected on dev; test is evaluated once. Methods are compared
in pairs of equal seeds (`bottega compare`); `augmented` has one augmented copy of each sentence and half of the epochs, hence
equal steps. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import bottega
from bottega.analysis.compare import compare, format_report
from text_classify import read_tsv, score_tfidf

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "kim": ("classify/sst2", {}),
    "augmented": ("classify/sst2", {"data.augmentation.augmentation_factor": 1, "training.num_epochs": 4}),
    "transformer": ("classify/sst2-transformer", {}),
}


def run_tfidf(folder: Path) -> dict[str, float]:
    """Return the accuracies of the TF-IDF baseline, with tokens, n-grams and regularisation selected on dev."""
    return score_tfidf(*(read_tsv(folder / f"{name}.tsv") for name in ("train", "dev", "test")))


def train_and_test(name: str, seed: int, folder: Path, output: Path) -> dict[str, float]:
    recipe, changes = METHODS[name]
    paths = {"train": "data.train.path", "dev": "data.validation.path", "test": "data.test.path"}
    settings = {key: str(folder / f"{split}.tsv") for split, key in paths.items()}
    start = time.monotonic()
    run = bottega.train(
        recipe, {**settings, **changes, "seed": seed, "name": f"{name}-s{seed}", "output_dir": str(output)}
    )
    seconds = time.monotonic() - start
    test = bottega.evaluate(run.path, split="test", out=run.path / "results")
    dev = max(row["accuracy"] for row in run.history() if row.get("kind") == "eval")
    metrics = {"seed": seed, "dev": dev, "test": test["metrics"]["accuracy"], "seconds": seconds}
    print(name, json.dumps(metrics), flush=True)
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("runs/sst2"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    result: dict[str, Any] = {"tfidf": run_tfidf(options.data)}
    print("tfidf", json.dumps(result["tfidf"]), flush=True)
    for name in options.only:
        rows = [train_and_test(name, seed, options.data, options.output) for seed in range(options.seeds)]
        tests = [row["test"] for row in rows]
        result[name] = {
            "dev": mean(row["dev"] for row in rows),
            "test": mean(tests),
            "deviation": stdev(tests) if len(tests) > 1 else None,
            "seconds": mean(row["seconds"] for row in rows),
        }
    if len(options.only) > 1:
        groups = [str(options.output / f"{name}-s*") for name in options.only]
        print(format_report(compare(groups, metric="accuracy", split="test")))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
