"""The linear baseline of a text classifier: fitted to the same split, recorded, and never the end of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bottega
import small_texts
from bottega.core.callback import Progress
from bottega.data.text.ngrams import count_ngrams
from bottega.run import result as result_module
from bottega.tasks import registry
from bottega.tasks.classify import baseline as baseline_module
from bottega.tasks.classify.baseline import (
    fit_linear_baseline,
    predict_with_logistic_regression,
    predict_with_naive_bayes,
)
from bottega.tasks.recipes import load_recipe

ROWS = small_texts.make_rows(90)
TEXTS, LABELS = [row["text"] for row in ROWS], np.array([list(small_texts.WORDS).index(row["label"]) for row in ROWS])
BASELINE_ON = {"evaluation.baseline": True, "name": "run"}


def open_workload(folder: Path, **changes: Any) -> Any:
    values = {**small_texts.settings(folder, "ngrams"), "evaluation.baseline": True, **changes}
    return registry.open_workload(load_recipe(["classify", values]).recipe, progress=lambda stage, done, total: None)


@pytest.mark.parametrize("predict", [predict_with_logistic_regression, predict_with_naive_bayes])
def test_both_models_learn_and_return_probabilities(predict: Any) -> None:
    probabilities = predict(TEXTS[:60], LABELS[:60], [*TEXTS[60:], ""], 4)  # the fourth class has no training texts
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (probabilities[:-1].argmax(1) == LABELS[60:]).mean() >= 0.9
    assert np.isfinite(probabilities).all()


def test_the_baseline_is_measured_on_the_validation_texts(tmp_path: Path) -> None:
    workload = open_workload(tmp_path)
    result = workload.fit_baseline()
    tables = [workload.data.prepared.table(name) for name in ("train", "validation")]
    (texts, labels), (new_texts, new_labels) = (workload._read_texts(table) for table in tables)
    probabilities = predict_with_logistic_regression(texts, labels, new_texts, 3)
    assert result.metrics["accuracy"] == (probabilities.argmax(1) == new_labels).mean()
    assert result.metrics.keys() <= set(workload.metrics)
    assert result.notes == ()


def test_augmented_copies_are_left_out(tmp_path: Path) -> None:
    plain = open_workload(tmp_path)
    augmented = open_workload(tmp_path, **{"data.augmentation.augmentation_factor": 2})
    assert len(augmented.data.prepared.table("train")) == 3 * len(plain.data.prepared.table("train"))
    assert augmented.fit_baseline().metrics == plain.fit_baseline().metrics


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation.baseline": False},
        {"evaluation.max_batches": 1},
        {"data.validation": None},
        {"data.split": {"by": "stratified", "folds": 3, "fold": 0}, "data.validation": None},
    ],
)
def test_it_is_left_out_where_it_could_not_be_compared(changes: dict[str, Any], tmp_path: Path) -> None:
    assert open_workload(tmp_path, **changes).fit_baseline() is None


def test_texts_beyond_the_limits_are_left_out_evenly_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline_module, "MAX_TEXTS", 30)
    result = fit_linear_baseline((TEXTS, LABELS), (TEXTS[:20], LABELS[:20]), 3)
    assert result.notes == ("30 of 90 training texts",)
    assert result.metrics["accuracy"] > 0.8, "all classes are among the texts that are left"
    monkeypatch.setattr(baseline_module, "MAX_CHARACTERS", sum(map(len, TEXTS[:20])) // 2)
    assert "10 of 20 validation texts" in fit_linear_baseline((TEXTS, LABELS), (TEXTS[:20], LABELS[:20]), 3).notes


def test_without_scikit_learn_naive_bayes_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    result = fit_linear_baseline((TEXTS, LABELS), (TEXTS, LABELS), 3)
    assert result.name == "naive Bayes over n-grams (scikit-learn is not installed)"
    assert result.metrics["accuracy"] > 0.9


def test_naive_bayes_is_that_of_scikit_learn() -> None:
    naive_bayes = pytest.importorskip("sklearn.naive_bayes")
    ngrams, new = count_ngrams(TEXTS[:60], baseline_module.NGRAMS), count_ngrams(TEXTS[60:], baseline_module.NGRAMS)
    features = [np.zeros((len(counted.ends), baseline_module.NGRAMS.buckets), np.int8) for counted in (ngrams, new)]
    for matrix, counted in zip(features, (ngrams, new), strict=True):
        matrix[baseline_module._get_text_numbers(counted), counted.buckets] = 1
    # Its prior is not smoothed; with as many texts of each class there is no difference.
    reference = naive_bayes.MultinomialNB(fit_prior=False).fit(features[0], LABELS[:60])
    assert len(set(np.bincount(LABELS[:60]))) == 1
    probabilities = predict_with_naive_bayes(TEXTS[:60], LABELS[:60], TEXTS[60:], 3)
    np.testing.assert_allclose(probabilities, reference.predict_proba(features[1]), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("best", "is_warning"), [(0.0, False), (1e9, True)])
def test_of_a_metric_that_is_minimised_the_lower_value_is_better(
    best: float, is_warning: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**small_texts.settings(tmp_path, "ngrams"), **BASELINE_ON, "evaluation.metric": "ece"}
    recipe = load_recipe(["classify", values]).recipe
    lines: dict[str, list[str]] = {"warn": [], "info": []}
    console: Any = SimpleNamespace(warn=lines["warn"].append, info=lines["info"].append)
    directory: Any = SimpleNamespace(path=tmp_path, write=lambda path, text: None)
    progress = Progress(total=1, best=best)
    result_module._compare_with_baseline(recipe, directory, open_workload(tmp_path), progress, console)
    assert (len(lines["warn"]), len(lines["info"])) == (int(is_warning), int(not is_warning)), lines


def test_a_run_records_and_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {**small_texts.settings(tmp_path, "ngrams"), **BASELINE_ON, "logging.report": True}
    run = bottega.train("classify", {**values, "training.max_steps": 1, "training.batch_size": 1}, quiet=False)
    recorded = json.loads((run.path / "baseline.json").read_text())
    accuracy = recorded["metrics"]["accuracy"]
    printed = capsys.readouterr()
    line = f"TF-IDF with logistic regression on the same split: accuracy {accuracy:.4f}"
    assert line in printed.out + printed.err
    assert "better than this run" in printed.out + printed.err
    assert f"TF-IDF with logistic regression: {accuracy:.4g}"[:40] in (run.path / "report.html").read_text()


def test_a_failure_costs_a_warning_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("empty vocabulary")

    monkeypatch.setattr(baseline_module, "predict_with_logistic_regression", fail)
    monkeypatch.setattr(baseline_module, "_has_scikit_learn", lambda: True)
    run = bottega.train("classify", {**small_texts.settings(tmp_path, "ngrams"), **BASELINE_ON}, quiet=False)
    assert run.step == 8
    assert not (run.path / "baseline.json").exists()
    printed = capsys.readouterr()
    assert "the baseline was not fitted: empty vocabulary" in printed.out + printed.err
