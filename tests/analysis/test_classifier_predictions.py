"""Predictions of a classifier: one row per example with its key, metrics by class, and plots."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

import bottega
import small_texts
from bottega import cli
from bottega.analysis.classifier_predictions import ClassifierPredictions
from bottega.data.sources.source import ArraySource
from bottega.data.sources.take import Take
from bottega.tasks.classify.prediction_tables import build_prediction_tables

NAMES = ("a", "b", "c")


class Table:
    def row(self, name: str, number: int) -> str:
        return f"{name}{number}"


def random_predictions(count: int = 60, *, is_multi_label: bool = False, seed: int = 0) -> ClassifierPredictions:
    draw = np.random.default_rng(seed)
    source = ArraySource({"x": np.zeros((count, 1), np.float32)})
    source.table = Table()  # type: ignore[attr-defined]
    chances = draw.dirichlet(np.ones(3), count).astype(np.float32)
    if is_multi_label:
        rows = {"probability": draw.random((count, 3)).astype(np.float32), "labels": draw.integers(0, 2, (count, 3))}
    else:
        rows = {"probability": chances, "label": draw.integers(0, 3, count)}
    return ClassifierPredictions(rows, Take(source, count), NAMES)


def test_class_metrics_match_scikit_learn() -> None:
    for predictions in (random_predictions(), random_predictions(is_multi_label=True)):
        expected = precision_recall_fscore_support(predictions.labels, predictions.predicted, zero_division=0)
        labels = "labels" if predictions.is_multi_label else "label"
        rows = {"probability": predictions.probabilities, labels: predictions.labels}
        for number, row in enumerate(build_prediction_tables(rows, NAMES)["per_class"].values()):
            assert [row[key] for key in ("precision", "recall", "f1", "support")] == pytest.approx(
                [column[number] for column in expected]
            )


def test_rows_hold_the_prediction_of_their_key() -> None:
    predictions = random_predictions()
    lines = predictions.to_rows()
    assert [line["key"] for line in lines] == [f"key{n}" for n in range(60)]
    for line, chances, label in zip(lines, predictions.probabilities, predictions.labels, strict=True):
        assert (line["label"], line["predicted"]) == (NAMES[label], NAMES[chances.argmax()])
        assert line["probability"] == pytest.approx(chances.max(), abs=1e-6)
    several = random_predictions(is_multi_label=True).to_rows()[0]
    assert several["probability"].keys() == set(NAMES)
    assert several["predicted"] == [name for name in NAMES if several["probability"][name] >= 0.5]


def test_evaluate_writes_predictions_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = bottega.train("classify", {**small_texts.settings(tmp_path), "name": "run"}).path
    assert cli.main(["evaluate", str(run), "--out", str(run / "results")]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("cook", "sail", "sing", "precision"))
    assert {path.name for path in (run / "results").iterdir()} == {
        "metrics.json",
        "predictions.jsonl",
        "confusion.png",
        "calibration.png",
    }
    lines = [json.loads(line) for line in (run / "results" / "predictions.jsonl").read_text().splitlines()]
    metrics = json.loads((run / "results" / "metrics.json").read_text())
    right = np.mean([line["label"] == line["predicted"] for line in lines])
    assert metrics["accuracy"] == pytest.approx(right, abs=1e-6)
    assert (len(lines), len({line["key"] for line in lines}), metrics["split"]) == (24, 24, "validation")
    assert sum(row["support"] for row in metrics["per_class"].values()) == 24


def test_evaluate_writes_predictions_of_an_audio_classifier(tmp_path: Path) -> None:
    from small_media import audio

    shared = {k: v for k, v in audio(tmp_path).items() if not k.startswith(("model.", "samples."))}
    run = bottega.train("classify/audio", {**shared, "model.hidden_size": 8, "name": "run"}).path
    assert cli.main(["evaluate", str(run), "--out", str(tmp_path / "out"), "--json"]) == 0
    lines = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert {json.loads(line)["label"] for line in lines} <= {"dark", "grey", "bright"}
