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

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "kim": ("classify/sst2", {}),
    "augmented": ("classify/sst2", {"data.augmentation.augmentation_factor": 1, "training.num_epochs": 4}),
    "transformer": ("classify/sst2-transformer", {}),
}


def run_tfidf(folder: Path) -> dict[str, float]:
    """Return the accuracies of the TF-IDF baseline, with tokens, n-grams and regularisation selected on dev."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    def read(name: str) -> tuple[list[str], list[int]]:
        lines = [line.rstrip("\n").split("\t") for line in (folder / f"{name}.tsv").open(encoding="utf-8")]
        return [text for text, _ in lines], [int(label) for _, label in lines]

    (train, labels), dev, test = read("train"), read("dev"), read("test")
    scores = []
    for pattern in (r"(?u)\b\w\w+\b", r"\S+"):
        for length in (1, 2):
            vectorizer = TfidfVectorizer(ngram_range=(1, length), token_pattern=pattern, sublinear_tf=True)
            features = vectorizer.fit_transform(train)
            for strength in (1.0, 3.0, 10.0):
                model = LogisticRegression(C=strength, max_iter=1000).fit(features, labels)
                scores.append(
                    tuple(model.score(vectorizer.transform(texts), targets) for texts, targets in (dev, test))
                )
    best = max(scores)
    return {"dev": best[0], "test": best[1]}


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
