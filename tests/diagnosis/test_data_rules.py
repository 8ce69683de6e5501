"""Rules about the data on constructed records: just above and just below their thresholds, and valid overrides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bottega.diagnosis import data as data_rules
from bottega.diagnosis.rules import RULES
from bottega.tasks.recipes import check_recipe, parse_overrides
from recorded_run import apply_all, find, write_recorded_run

EXAMPLE = ["texts.jsonl:3", "texts.jsonl:8"]


def make_comparison(*, duplicates: float = 0.0, leak: float = 0.0, key: str = "data") -> dict[str, Any]:
    """Return the comparison of 1,000 training and 400 validation samples with these shares."""
    train = {"compared": 1000, "duplicates": round(1000 * duplicates), "share": duplicates}
    validation = {"compared": 400, "in_train": round(400 * leak), "share": leak, "example": EXAMPLE}
    return {"duplicates": {"key": key, "train": train, "validation": validation}}


@pytest.mark.parametrize(("factor", "is_ill"), [(0.99, False), (1.0, True)])
def test_leak(tmp_path: Path, factor: float, is_ill: bool) -> None:
    share = factor * data_rules.MIN_LEAK_SHARE
    finding = find(write_recorded_run(tmp_path / "run", data=make_comparison(leak=share)), "leak-between-splits")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.evidence == (
            "12 of 400 (3 %) validation samples are also in the training data, such as texts.jsonl:3, which equals texts.jsonl:8"
        )
        assert finding.steps is None
        assert finding.override == "data.deduplicate.method=exact"


def test_leak_into_the_test_data(tmp_path: Path) -> None:
    data = make_comparison()
    data["duplicates"]["test"] = {"compared": 50, "in_train": 20, "share": 0.4, "example": EXAMPLE}
    finding = find(write_recorded_run(tmp_path / "run", data=data), "leak-between-splits")
    assert finding is not None
    assert finding.evidence.startswith("20 of 50 (40 %) test samples are also in the training data")


@pytest.mark.parametrize(("factor", "is_ill"), [(0.99, False), (1.0, True)])
def test_duplicates(tmp_path: Path, factor: float, is_ill: bool) -> None:
    share = factor * data_rules.MIN_DUPLICATE_SHARE
    finding = find(write_recorded_run(tmp_path / "run", data=make_comparison(duplicates=share)), "duplicates")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.evidence == "50 of 1,000 (5 %) training samples repeat an earlier one"


def test_leak_explains_duplicates(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path / "run", data=make_comparison(duplicates=0.5, leak=0.5))
    assert [finding.name for finding in apply_all(run).findings] == ["leak-between-splits"]


def test_equal_tokens_of_different_texts_are_near_duplicates(tmp_path: Path) -> None:
    """Media have no near duplicates: their recipes refuse the method."""
    for name, method in (("text", "near"), ("image", "exact")):
        settings = {"data.deduplicate": {"method": "exact"}, "data.input": name}
        run = write_recorded_run(tmp_path / name, data=make_comparison(duplicates=0.5), settings=settings)
        finding = find(run, "duplicates")
        assert finding is not None
        assert finding.override == f"data.deduplicate.method={method}"


def test_duplicates_of_a_part_name_its_key(tmp_path: Path) -> None:
    copies = make_comparison(duplicates=0.5, key="data.parts.text.settings.data")
    finding = find(write_recorded_run(tmp_path / "run", data=copies, settings={"task": "multitask"}), "duplicates")
    assert finding is not None
    assert finding.override == "data.parts.text.settings.data.deduplicate.method=exact"
    check_recipe(*parse_overrides(["multitask", finding.override]))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "an earlier version wrote it"),
        ({"duplicates": {"train": {"compared": 3}}}, "an earlier version wrote it"),
        ({"duplicates": []}, "an earlier version wrote it"),
        ({"duplicates": {}}, "samples of the task classify are not compared"),
    ],
)
def test_data_that_was_not_compared_is_not_judged(tmp_path: Path, data: dict[str, Any], reason: str) -> None:
    diagnosis = apply_all(write_recorded_run(tmp_path / "run", data=data))
    for name in ("leak-between-splits", "duplicates"):
        assert reason in diagnosis.not_checked[name]


def write_classifier(folder: Path, *, rare: int = 50, recall: float = 0.2, support: int = 40, **options: Any) -> Path:
    """Write a run of a classifier with 900 samples of one class and `rare` of another, which has this recall."""
    run = write_recorded_run(folder, data={"classes": {"common": 900, "rare": rare}}, **options)
    per_class = {"common": {"recall": 0.9, "support": 400}, "rare": {"recall": recall, "support": support}}
    tables = run / "evaluation" / "validation" / "metrics.json"
    tables.parent.mkdir(parents=True)
    tables.write_text(json.dumps({"checkpoint": "checkpoints/step-00000160", "per_class": per_class}))
    return run


@pytest.mark.parametrize(
    ("options", "is_ill"),
    [
        ({"rare": 100}, True),
        ({"rare": 101}, False),
        ({"recall": 0.649}, True),
        ({"recall": 0.651}, False),
        ({"recall": 0.5, "support": 10}, True),
        ({"recall": 0.5, "support": 2}, False),  # 1 of 2 and 9 of 10 may well be equal
        ({"settings": {"data.multi_label": True}}, False),
        ({"settings": {"task": "routing"}}, False),
        ({"settings": {"loss": {"class_weights": "balanced"}}}, False),
    ],
)
def test_class_imbalance(tmp_path: Path, options: dict[str, Any], is_ill: bool) -> None:
    finding = find(write_classifier(tmp_path / "run", **options), "class-imbalance")
    assert (finding is not None) == is_ill


def test_class_imbalance_names_class_and_step(tmp_path: Path) -> None:
    finding = find(write_classifier(tmp_path / "run"), "class-imbalance")
    assert finding is not None
    assert finding.evidence == (
        "the class rare, with 50 of 950 training samples, has a recall of 0.20, and all others 0.90"
    )
    assert finding.steps == (160, 160)
    for recipe in ("classify", "classify/image", "classify/audio", "classify/video", "classify/cnn"):
        check_recipe(*parse_overrides([recipe, *finding.override.split()]))


def test_run_without_evaluation_of_classes_is_not_judged(tmp_path: Path) -> None:
    reason = apply_all(write_recorded_run(tmp_path / "run")).not_checked["class-imbalance"]
    assert reason == "no evaluation with metrics of each class"


def find_small(folder: Path, num_samples: int, **options: Any) -> Any:
    splits = {"splits": {"train": 500, "validation": num_samples}}
    return find(write_recorded_run(folder, data=splits | options.pop("data", {}), **options), "validation-too-small")


@pytest.mark.parametrize(("num_samples", "is_ill"), [(105, True), (110, False)])
def test_small_validation_by_accuracy(tmp_path: Path, num_samples: int, is_ill: bool) -> None:
    """An accuracy of 0.8 on n samples has a margin of about 1.96 sqrt(0.8 · 0.2 / n), which is 0.075 at n = 109."""
    validation = {"loss": [1.0, 0.8, 0.7], "accuracy": [0.6, 0.8, 0.75]}
    finding = find_small(tmp_path / "run", num_samples, validation=validation)
    assert (finding is not None) == is_ill
    if finding is not None:
        assert "on 105 validation samples the accuracy is 0.80 ± 0.08 at best (95 %)" in finding.evidence


@pytest.mark.parametrize(("num_samples", "is_ill"), [(27, True), (28, False)])
def test_small_validation_by_loss(tmp_path: Path, num_samples: int, is_ill: bool) -> None:
    """The loss of a sample deviates by 0.4 of its mean, so 1.96 · 0.4 / sqrt(n) is 0.15 at n = 27.3."""
    finding = find_small(tmp_path / "run", num_samples, validation={"loss": [1.0, 0.8, 0.7]})
    assert (finding is not None) == is_ill


def test_texts_of_many_tokens_are_better_known(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path / "run", data={"splits": {"train": 1000, "validation": 10}, "unit": "tokens"})
    for line, is_ill in ((f'"units_per_second": {100 * 38}', True), (f'"units_per_second": {100 * 39}', False)):
        with (run / "metrics.jsonl").open("a") as log:
            log.write('{"step": 400, "kind": "train", "loss": 0.2, "samples_per_second": 100, ' + line + "}\n")
        assert (find(run, "validation-too-small") is not None) == is_ill


@pytest.mark.parametrize(
    ("settings", "override"),
    [
        ({"data.validation": {"split": 0.02}}, "data.validation.split=0.37"),
        (
            {"data.validation": {"path": "dev.tsv", "kind": "csv"}},
            "data.validation.path=null data.validation.kind=auto data.validation.split=0.38",
        ),
        ({"data.validation": {"split": 0.2, "limit": 20}}, "data.validation.limit=188"),
        ({"data.validation": {"split": 0.1}, "data.split": {"folds": 10}}, "data.split.folds=2"),
        (
            {"data.validation": {"split": 0.5}, "evaluation.max_batches": 1, "evaluation.batch_size": 10},
            "evaluation.max_batches=19",
        ),
        ({"data.validation": {"split": 0.2, "limit": 1000}}, "data.validation.split=0.37"),
        ({"data.validation": {"split": 0.5}}, None),
        ({"data.validation": {"split": 0.5}, "data.split": {"folds": 2}}, None),
    ],
)
def test_small_validation_suggests_what_enlarges_it(
    tmp_path: Path, settings: dict[str, Any], override: str | None
) -> None:
    finding = find_small(tmp_path / "run", 20, validation={"accuracy": [0.5, 0.5]}, settings=settings)
    assert finding is not None
    assert finding.override == override
    base = {"data.train.path": "train.tsv", "data.split": None}
    flat = {"data.validation": settings["data.validation"], "data.split": settings.get("data.split")}
    check_recipe(["classify/sst2", base | flat], parse_overrides((override or "").split())[1])


def test_high_accuracy_of_few_samples_may_be_chance(tmp_path: Path) -> None:
    """All of 12 right may well be 0.8 of all: 0.2 · 0.8 · (1.96 / 0.075)² samples are needed, not none."""
    finding = find_small(tmp_path / "run", 12, validation={"accuracy": [1.0]}, settings={"data.validation": {}})
    assert finding is not None
    assert "is 1.00 ± 0.16 at best (95 %)" in finding.evidence
    assert "about 93 are needed" in finding.evidence


@pytest.mark.parametrize("settings", [{"task": "recall"}, {"task": "multitask"}, {"techniques": ["maml"]}])
def test_samples_with_several_answers_are_not_counted(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert find_small(tmp_path / "run", 5, validation={"accuracy": [0.5]}, settings=settings) is None


def test_run_without_validation_is_not_judged(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path / "run", data={"splits": {"train": 10}}, validation={})
    assert apply_all(run).not_checked["validation-too-small"] == "the run has no validation data"


@pytest.mark.parametrize("name", ["data.json", "memory.json", "environment.json", "evaluation/validation/metrics.json"])
@pytest.mark.parametrize("value", [None, 3, "text", [1], {"a": None}])
def test_files_with_unexpected_values_do_not_end_the_diagnosis(tmp_path: Path, name: str, value: Any) -> None:
    run = write_classifier(tmp_path / "run")
    keys = (
        "splits",
        "classes",
        "duplicates",
        "unit",
        "peak",
        "total",
        "categories",
        "cores",
        "device",
        "steps",
        "per_class",
    )
    (run / name).write_text(json.dumps(dict.fromkeys(keys, value)))
    diagnosis = apply_all(run)
    assert len(diagnosis.not_checked) < len(RULES)


@pytest.mark.parametrize("run", sorted((Path(__file__).parent / "healthy").iterdir()), ids=lambda run: run.name)
def test_values_of_healthy_runs_are_expected(run: Path) -> None:
    assert "unexpected values" not in str(apply_all(run).not_checked)


def test_copies_of_a_sample_are_more_than_those_that_were_compared(tmp_path: Path) -> None:
    """A fifth of the training data was compared, so five times as many validation samples are in it."""
    train = {"compared": 200, "sampled": 0.2, "duplicates": 0, "share": 0.0}
    for name, share, is_ill in (("leak", 0.02, True), ("none", 0.001, False)):
        held_out = {"compared": 400, "in_train": round(400 * share), "share": share, "example": ["a", "b"]}
        copies = {"key": "data", "train": train, "validation": held_out}
        finding = find(write_recorded_run(tmp_path / name, data={"duplicates": copies}), "leak-between-splits")
        assert (finding is not None) == is_ill, name
        assert finding is None or "only 20 % of the training samples were compared" in finding.evidence


def test_fewer_folds_have_the_first_one_if_the_fold_would_not_exist(tmp_path: Path) -> None:
    run = write_recorded_run(
        tmp_path / "run",
        validation={"accuracy": [0.5, 0.6, 0.7, 0.7, 0.7]},
        settings={"evaluation.metric": "accuracy", "data.split.folds": 40, "data.split.fold": 39},
        data={"splits": {"train": 390, "validation": 10}},
    )
    finding = find(run, "validation-too-small")
    assert finding is not None
    assert finding.override.endswith(" data.split.fold=0")
