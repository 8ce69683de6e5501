"""`bottega compare` over synthetic run directories: the choice of the test, the report, and refused comparisons."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from bottega.analysis.compare import compare, format_report, plot_comparison
from bottega.core import checkpoint
from bottega.core.errors import DataError, UsageError
from recorded_figures import list_texts, record_figures

CLASSIFY: dict[str, Any] = {
    "task": "classify",
    "data.train.path": "reviews.jsonl",
    "model.kind": "cnn",
    "training.max_steps": 10,
    "evaluation.metric": "accuracy",
    "evaluation.mode": "max",
}
GOOD, BETTER = (0.80, 0.81, 0.79, 0.82, 0.80), (0.83, 0.85, 0.82, 0.84, 0.835)

Make = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that writes a run directory with one evaluation for each value."""
    monkeypatch.chdir(tmp_path)

    # fsync is slow, and nothing here has to survive a power failure.
    monkeypatch.setattr("os.fsync", lambda handle: None)

    def write_run(
        name: str,
        *values: float | None,
        seed: int = 0,
        data: str | None = "d1",
        settings: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
        held_out: str | None = None,
        content: str | None = None,
    ) -> Path:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        recipe = {**CLASSIFY, "seed": seed, "name": run.name, **(settings or {})}
        recipe = {key: value for key, value in recipe.items() if value is not None}
        (run / "recipe.yaml").write_text(json.dumps(recipe, indent=0), encoding="utf-8")  # JSON is YAML
        rows = [
            {"step": i + 1, "kind": "eval", "samples": i, "accuracy": v, "loss": 1 - (v or 0), **(more or {})}
            for i, v in enumerate(values)
        ]
        lines = [{"step": 1, "kind": "train", "samples": 1, "loss": 9.0, "accuracy": 0.99}, *rows]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
        if data is not None:
            hashes = {"validation": held_out, "validation.content": content}
            recorded = {name: value for name, value in hashes.items() if value is not None}
            fingerprint = {"data": data, "held_out": recorded} if recorded else {"data": data}
            checkpoint.write(run / "checkpoints", step=1, files={}, progress={}, fingerprint=fingerprint)
        return run

    return write_run


@pytest.fixture
def make_group(make_run: Make) -> Callable[..., str]:
    """A function that writes a group of runs with one value for each seed and returns its glob pattern."""

    def write_group(name: str, values: Sequence[float], *, first: int = 0, **options: Any) -> str:
        for number, value in enumerate(values):
            make_run(f"{name}-s{first + number}", value, seed=first + number, **options)
        return f"runs/{name}-s*"

    return write_group


def write_predictions(
    run: Path, right: Sequence[bool], *, keys: Sequence[str] | None = None, label: str = "yes"
) -> None:
    rows = [
        {"key": key, "label": label, "predicted": label if ok else "no", "probability": 0.9}
        for key, ok in zip(keys or [f"test.jsonl:{i}" for i in range(len(right))], right, strict=True)
    ]
    (run / "results").mkdir()
    (run / "results" / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def error_of(*names: str, kind: type[Exception] = UsageError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        compare(names, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


# Choice of the test.


def test_common_seeds_are_paired(make_group: Callable[..., str]) -> None:
    report = compare([make_group("a", GOOD), make_group("b", BETTER, settings={"model.num_filters": 64})])
    (pair,) = report["pairs"]
    expected = scipy.stats.ttest_rel(BETTER, GOOD)
    assert (pair["test"], pair["paired_by"], pair["n"]) == ("paired t-test", "seed", 5)
    assert (pair["statistic"], pair["p"]) == pytest.approx((expected.statistic, expected.pvalue))
    bounds = expected.confidence_interval(0.95)
    assert (pair["interval"]["low"], pair["interval"]["high"]) == pytest.approx((bounds.low, bounds.high))
    assert pair["ranks"]["p"] == pytest.approx(2 / 2**5)
    assert (pair["better"], pair["outcome"]) == ("B", "B is better")
    assert "paired t-test, n = 5, p = 0.00" in pair["verdict"]
    assert pair["changed"] == {"model.num_filters": [None, 64]}
    assert [run["value"] for run in report["groups"][0]["runs"]] == list(GOOD)
    assert report["groups"][0]["mean"] == pytest.approx(np.mean(GOOD))
    assert report["groups"][0]["deviation"] == pytest.approx(np.std(GOOD, ddof=1))
    assert report["notes"] == []


def test_pairs_are_matched_by_seed_and_not_by_order(make_run: Make) -> None:
    """Names in another order than their seeds; differences of 0.02 only if runs are paired by seed."""
    for seed, value in enumerate(GOOD):
        make_run(f"a-{seed}", value, seed=seed)
        make_run(f"b-{9 - seed}", value + 0.02 + seed / 1000, seed=seed)
    (pair,) = compare(["runs/a-*", "runs/b-*"])["pairs"]
    assert pair["bootstrap"]["percentile"]["low"] >= 0.02 - 1e-9
    assert pair["difference"] == pytest.approx(0.022)


def test_mode_min_means_smaller_is_better(make_group: Callable[..., str]) -> None:
    goal = {"evaluation.metric": "loss", "evaluation.mode": "min"}
    report = compare([make_group("a", GOOD, settings=goal), make_group("b", BETTER, settings=goal)])
    assert (report["metric"], report["mode"]) == ("loss", "min")
    assert report["pairs"][0]["difference"] < 0
    assert report["pairs"][0]["better"] == "B"


def test_other_metric_is_read_at_the_best_checkpoint(make_run: Make) -> None:
    """Not at the best value of that other metric, whose checkpoint was not kept."""
    goal = {"evaluation.metric": "loss", "evaluation.mode": "min"}
    for name, offset in (("a", 0.0), ("b", 0.1)):
        for seed in range(3):
            run = make_run(f"{name}-s{seed}", seed=seed, settings=goal)
            rows = [(1, 0.5, 0.6), (2, 0.3, 0.7 + offset + seed / 100), (3, 0.4, 0.99), (4, None, 0.999)]
            lines = [{"step": s, "kind": "eval", "samples": s, "loss": x, "accuracy": y} for s, x, y in rows]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    report = compare(["runs/a-s*", "runs/b-s*"], metric="accuracy")
    assert [run["value"] for run in report["groups"][0]["runs"]] == pytest.approx([0.70, 0.71, 0.72])
    assert report["mode"] == "max"  # from the name of the metric, although the best checkpoint is by another metric
    assert compare(["runs/a-s*", "runs/b-s*"], metric="loss")["mode"] == "min"


def test_groups_without_common_seeds_are_unpaired(make_group: Callable[..., str]) -> None:
    report = compare([make_group("a", GOOD), make_group("b", BETTER[:4], first=10)])
    (pair,) = report["pairs"]
    expected = scipy.stats.ttest_ind(BETTER[:4], GOOD, equal_var=False)
    assert (pair["test"], pair["paired_by"], pair["n"]) == ("Welch's t-test", None, 9)
    assert (pair["p"], pair["df"]) == pytest.approx((expected.pvalue, expected.df))
    assert "no seed in common" in pair["why"]
    assert any("5 and 4 runs" in note for note in report["notes"])


def test_folds_use_the_corrected_resampled_t_test(make_run: Make) -> None:
    for name, values in (("cv-a", GOOD), ("cv-b", BETTER)):
        for fold, value in enumerate(values):
            split = {"data.split.folds": 5, "data.split.fold": fold}
            make_run(f"{name}/fold-{fold}", value, settings=split, data=f"part {fold}")
        (Path("runs") / name / "crossval.json").write_text('{"folds": 5}')
    report = compare(["runs/cv-a", "runs/cv-b/"])
    (pair,) = report["pairs"]
    differences = np.array(BETTER) - np.array(GOOD)
    t = differences.mean() / np.sqrt(differences.var(ddof=1) * (1 / 5 + 1 / 4))
    assert (pair["test"], pair["paired_by"]) == ("corrected resampled t-test", "fold")
    assert (pair["statistic"], pair["p"]) == pytest.approx((t, 2 * scipy.stats.t.sf(t, 4)))
    assert pair["ranks"] is None  # a rank test has no correction for shared training data
    # Also given as sub-folders; an unfinished cross-validation counts with its planned number of folds.
    again = compare(["runs/cv-a/fold-*", "runs/cv-b/fold-[0-3]"])["pairs"][0]
    t = differences[:4].mean() / np.sqrt(differences[:4].var(ddof=1) * (1 / 4 + 1 / 4))
    assert again["statistic"] == pytest.approx(t)


def test_repeated_folds_are_one_group(make_run: Make) -> None:
    """Two repeats of three folds: six pairs, and a fold still holds out a third."""
    values = {"cv-a": (0.80, 0.81, 0.79, 0.82, 0.80, 0.78), "cv-b": (0.83, 0.85, 0.82, 0.84, 0.83, 0.84)}
    for name, numbers in values.items():
        for number, value in enumerate(numbers):
            split = {"data.split.folds": 3, "data.split.fold": number % 3, "data.split.seed": number // 3}
            make_run(f"{name}/fold-{number}", value, settings=split, data=f"part {number}")
    (pair,) = compare(["runs/cv-a", "runs/cv-b"])["pairs"]
    differences = np.subtract(values["cv-b"], values["cv-a"])
    t = differences.mean() / np.sqrt(differences.var(ddof=1) * (1 / 6 + 1 / 2))
    assert (pair["n"], pair["statistic"]) == (6, pytest.approx(t))
    assert pair["changed"] == {}


def test_single_classifiers_are_compared_by_their_predictions(make_run: Make) -> None:
    a, b = make_run("a", 0.8), make_run("b", 0.8, seed=1, settings={"model.num_filters": 64})
    write_predictions(a, [True] * 60 + [False] * 30 + [True] * 10)
    write_predictions(b, [True] * 60 + [True] * 30 + [False] * 10)
    report = compare(["runs/a", "runs/b"])
    (pair,) = report["pairs"]
    assert (report["metric"], pair["paired_by"]) == ("accuracy", "key")
    assert pair["test"] == "McNemar's test (chi-square)"
    assert pair["statistic"] == pytest.approx((20 - 1) ** 2 / 40)
    assert pair["difference"] == pytest.approx(0.2)
    assert pair["better"] == "B"
    assert pair["effect"] == {"name": "odds ratio", "size": pytest.approx(3.0), "unbiased": None}
    assert [group["mean"] for group in report["groups"]] == pytest.approx([0.7, 0.9])
    assert any("not two ways of training" in note for note in report["notes"])


def test_predictions_are_matched_by_key_and_not_by_line(make_run: Make) -> None:
    a, b = make_run("a", 0.8), make_run("b", 0.8, seed=1)
    write_predictions(a, [True, False, True, False], keys=["1", "2", "3", "4"])
    write_predictions(b, [False, True, False, True], keys=["4", "3", "2", "1"])
    assert compare(["runs/a", "runs/b"])["pairs"][0]["n"] == 0


def test_three_groups_are_corrected_by_holm(make_group: Callable[..., str]) -> None:
    names = [
        make_group("a", GOOD),
        make_group("b", BETTER),
        make_group("c", [v + 0.001 * i for i, v in enumerate(GOOD)]),
    ]
    report = compare(names)
    assert [(p["second"], p["first"]) for p in report["pairs"]] == [("B", "A"), ("C", "A"), ("C", "B")]
    raw = [p["p"] for p in report["pairs"]]
    smallest, middle, largest = sorted(raw)
    adjusted = {smallest: 3 * smallest, middle: max(3 * smallest, 2 * middle)}
    adjusted[largest] = max(adjusted[middle], largest)
    assert [p["p_adjusted"] for p in report["pairs"]] == pytest.approx([min(1.0, adjusted[p]) for p in raw])
    assert "after Holm's correction for 3 pairs" in report["pairs"][0]["verdict"]
    assert any("intervals are not" in note for note in report["notes"])


def test_holm_decides_and_not_the_single_p(make_group: Callable[..., str]) -> None:
    values = np.array(GOOD)
    wobble = np.array([0.02, -0.005, 0.03, 0.001, 0.012])
    names = [make_group("a", values), make_group("b", values + wobble), make_group("c", values + wobble[::-1] / 3)]
    report = compare(names, alpha=0.15)
    raised = [p for p in report["pairs"] if p["p"] < 0.15 <= p["p_adjusted"]]
    assert raised
    assert all(p["outcome"] == "no difference shown" for p in raised)


def test_few_pairs_are_reported(make_group: Callable[..., str]) -> None:
    report = compare([make_group("a", GOOD[:3]), make_group("b", BETTER[:3])])
    assert any("with 3 pairs" in note and "0.25" in note for note in report["notes"])
    assert "n = 3" in report["pairs"][0]["verdict"]


def test_equal_differences_use_wilcoxon(make_group: Callable[..., str]) -> None:
    (pair,) = compare([make_group("a", (0.8, 0.7, 0.6)), make_group("b", (0.9, 0.8, 0.7))])["pairs"]
    assert pair["test"].startswith("Wilcoxon")
    assert (pair["p"], pair["outcome"]) == (0.25, "no difference shown")


def test_unmatched_seeds_are_left_out_and_named(make_group: Callable[..., str]) -> None:
    report = compare([make_group("a", GOOD), make_group("b", BETTER[:4], first=1)])
    assert report["pairs"][0]["n"] == 4
    assert any("only one of them has it: seed 0" in note for note in report["notes"])


def test_split_reads_results_of_evaluate(make_group: Callable[..., str]) -> None:
    names = [make_group("a", GOOD[:3]), make_group("b", BETTER[:3])]
    for run in Path("runs").iterdir():
        (run / "results").mkdir()
        metrics = {"accuracy": 0.5 + len(run.name) / 100 + int(run.name[-1]) / 10, "split": "test"}
        (run / "results" / "metrics.json").write_text(json.dumps(metrics))
    report = compare(names, split="test")
    assert [run["value"] for run in report["groups"][0]["runs"]] == pytest.approx([0.54, 0.64, 0.74])
    assert not [note for note in report["notes"] if "split" in note]
    assert "is of the split test, not validation" in error_of(*names, split="validation")
    assert "has no f1; it has accuracy" in error_of(*names, split="test", metric="f1")
    (Path("runs") / "b-s1" / "results" / "metrics.json").write_text('{"accuracy": 0.7}')
    assert any("does not name its split" in note for note in compare(names, split="test")["notes"])
    (Path("runs") / "b-s1" / "results" / "metrics.json").write_text("[1")
    assert "b-s1/results/metrics.json is not a JSON object" in error_of(*names, split="test", kind=DataError)
    (Path("runs") / "b-s1" / "results" / "metrics.json").unlink()
    assert "bottega evaluate runs/b-s1 --split test --out" in error_of(*names, split="test")


def test_results_on_other_data_are_refused(make_group: Callable[..., str], make_run: Make) -> None:
    """metrics.json also says `test` for the test split of other data."""
    names = [make_group("a", GOOD[:3]), make_group("b", BETTER[:3])]
    for run in Path("runs").iterdir():
        (run / "results").mkdir()
        metrics = {"accuracy": 0.5 + int(run.name[-1]) / 10, "split": "test", "data": None}
        (run / "results" / "metrics.json").write_text(json.dumps(metrics))
    assert compare(names, split="test")["pairs"][0]["n"] == 3
    (Path("runs") / "b-s1" / "results" / "metrics.json").write_text(json.dumps({**metrics, "data": "elsewhere/x"}))
    text = error_of(*names, split="test")
    assert "runs/b-s1/results/metrics.json was measured on elsewhere/x" in text
    assert "bottega evaluate runs/b-s1 --split test --out" in text


def test_predictions_on_other_data_are_refused(make_run: Make) -> None:
    runs = [make_run("a", 0.8), make_run("b", 0.9)]
    for run in runs:
        write_predictions(run, [True, False, True])
    for fields, expected in (
        ({"split": "test", "data": "elsewhere/x"}, "was measured on elsewhere/x"),
        ({"split": "validation", "data": None}, "is of the split validation, not test"),
    ):
        (runs[1] / "results" / "metrics.json").write_text(json.dumps({"accuracy": 0.7, **fields}))
        assert expected in error_of("runs/a", "runs/b", split="test")
        assert compare(["runs/a", "runs/b"])["pairs"][0]["paired_by"] == "key"


# Comparable data.


def test_moved_data_is_recognised_by_its_fingerprint(make_group: Callable[..., str]) -> None:
    """The folder may have moved; equal content is the same data."""
    moved = {"data.train.path": "elsewhere/reviews.jsonl"}
    assert compare([make_group("a", GOOD), make_group("b", BETTER, settings=moved)])["notes"] == []


def test_augmentation_does_not_change_the_held_out_data(make_group: Callable[..., str], make_run: Make) -> None:
    copies = {"data.augmentation.augmentation_factor": 2}
    plain = make_group("a", GOOD)
    for seed, value in enumerate(BETTER):
        make_run(f"b-s{seed}", value, seed=seed, data=f"with copies of seed {seed}", settings=copies)
    report = compare([plain, "runs/b-s*"])
    assert any("data.augmentation" in note for note in report["notes"])
    assert report["pairs"][0]["better"] == "B"


def test_training_data_may_differ_with_the_same_held_out_file(make_group: Callable[..., str]) -> None:
    few = {"data.train.path": "few.jsonl", "data.validation.path": "dev.jsonl"}
    many = {"data.train.path": "many.jsonl", "data.validation.path": "dev.jsonl"}
    other = {"data.train.path": "few.jsonl", "data.validation.path": "test.jsonl"}
    group = make_group("a", GOOD, settings=few, data="few")
    assert compare([group, make_group("b", BETTER, settings=many, data="many")])["pairs"][0]["n"] == 5
    text = error_of(group, make_group("c", BETTER, settings=other, data="other"))
    assert 'data.validation.path ("dev.jsonl" and "test.jsonl")' in text


def test_different_data_is_refused(make_group: Callable[..., str]) -> None:
    group = make_group("a", GOOD)
    split = make_group("b", BETTER, data="d2", settings={"data.validation.split": 0.3})
    assert "measured on different data: data.validation.split (0.1 and 0.3)" in error_of(group, split)
    assert "its files have changed" in error_of(group, make_group("c", BETTER, data="d3"))
    fewer = make_group("d", BETTER, settings={"evaluation.max_batches": 2})
    assert "measured on all of it and 2 batches of 32" in error_of(group, fewer)
    assert "only the recipes were compared" in compare([group, make_group("e", BETTER, data=None)])["notes"][0]


READ_OTHERWISE = {"data.train.columns": ["text", "rest", "label"]}


def test_reading_options_may_differ_for_equal_samples_and_labels(make_group: Callable[..., str]) -> None:
    group = make_group("a", GOOD, held_out="h1")
    report = compare([group, make_group("b", BETTER, data="d2", held_out="h1", settings=READ_OTHERWISE)])
    assert report["notes"] == [
        "the data was read in different ways (data.train.columns); the samples measured and their labels are the same"
    ]
    text = error_of(group, make_group("c", BETTER, data="d3", held_out="h2", settings={"model.num_filters": 64}))
    assert "different data: the held-out samples or labels differ" in text
    assert "data.train.columns" in error_of(
        group, make_group("d", BETTER, data="d4", held_out="h2", settings=READ_OTHERWISE)
    )
    few = {**READ_OTHERWISE, "data.validation": {"split": 0.1, "limit": 3}}
    assert "data.validation.limit (null and 3)" in error_of(
        group, make_group("e", BETTER, data="d5", held_out="h1", settings=few)
    )
    assert "its files have changed" in error_of(group, make_group("f", BETTER, data="d6", held_out="h1"))


def test_equal_keys_of_other_files_are_other_samples(make_group: Callable[..., str]) -> None:
    moved = {"data.train.path": "elsewhere/reviews.jsonl", **READ_OTHERWISE}
    apart = {"data.train.path": "many.jsonl", "data.validation.path": "dev.jsonl"}
    group = make_group("a", GOOD, held_out="h1", content="c1")
    same = make_group("b", BETTER, data="d2", held_out="h1", content="c1", settings=moved)
    assert "the samples measured and their labels are the same" in compare([group, same])["notes"][0]
    assert compare([group, make_group("c", BETTER, data="d3", held_out="h1", content="c1", settings=READ_OTHERWISE)])[
        "pairs"
    ]
    for name, content in (("d", "c2"), ("e", None)):
        other = make_group(name, BETTER, data="d4", held_out="h1", content=content, settings=moved)
        assert 'data.train.path ("reviews.jsonl" and "elsewhere/reviews.jsonl")' in error_of(group, other)
    changed = make_group("f", BETTER, data="d5", held_out="h1", content="c2", settings=READ_OTHERWISE)
    assert "measured on different data" in error_of(group, changed)
    held = make_group("g", GOOD, data="d6", held_out="h1", settings=apart)
    few = {**apart, "data.train.path": "few.jsonl"}
    assert compare([held, make_group("h", BETTER, data="d7", held_out="h1", settings=few)])["pairs"]


def test_loss_over_other_text_fields_is_refused(make_run: Make) -> None:
    language = {"task": "language", "model.kind": None, "model.size": "nano", "evaluation.metric": "loss"}
    for name in ("title", "text"):
        for seed in range(2):
            settings = {**language, "evaluation.mode": "min", "data.train.field": name}
            make_run(f"{name}-s{seed}", 0.5 + seed / 10, seed=seed, data=name, settings=settings, held_out="h1")
    assert "loss is a mean over different units: data.train.field" in error_of("runs/title-s*", "runs/text-s*")


def test_folds_without_hashes_are_matched_by_their_predictions(make_run: Make) -> None:
    """As an earlier version wrote them: the evaluation of each fold is the only record of its held-out samples."""
    for name, settings, label in (
        ("cv-a", {}, "yes"),
        ("cv-b", READ_OTHERWISE, "yes"),
        ("cv-c", READ_OTHERWISE, "other"),
    ):
        for fold in range(3):
            split = {"data.split.folds": 3, "data.split.fold": fold}
            run = make_run(
                f"{name}/fold-{fold}", 0.8 + fold / 10, settings={**split, **settings}, data=f"{name} {fold}"
            )
            write_predictions(run, [True, False], keys=[f"a.csv:{fold}", f"a.csv:{fold + 3}"], label=label)
            (run / "results" / "metrics.json").write_text(json.dumps({"split": "validation"}))
    assert compare(["runs/cv-a", "runs/cv-b"])["pairs"][0]["paired_by"] == "fold"
    assert "data.train.columns" in error_of("runs/cv-a", "runs/cv-c")
    for file in Path("runs/cv-b").glob("fold-*/results/metrics.json"):
        file.write_text(json.dumps({"split": "validation", "data": "elsewhere/x"}))
    assert "data.train.columns" in error_of(
        "runs/cv-a", "runs/cv-b"
    )  # predictions on other data do not identify the held-out samples


def test_loss_over_other_tokens_is_refused(make_run: Make) -> None:
    language = {"task": "language", "model.kind": None, "model.size": "nano", "evaluation.metric": "loss"}
    for name, kind in (("a", "bytes"), ("b", "bpe")):
        for seed in range(2):
            settings = {**language, "evaluation.mode": "min", "data.tokenizer.kind": kind}
            values = {"bits_per_byte": 1.0 + seed / 10 + (kind == "bpe") * seed}
            make_run(f"{name}-s{seed}", 0.5, seed=seed, data=kind, settings=settings, more=values)
    text = error_of("runs/a-s*", "runs/b-s*")
    assert "data.tokenizer.kind" in text
    assert "--metric bits_per_byte" in text
    assert compare(["runs/a-s*", "runs/b-s*"], metric="bits_per_byte")["pairs"][0]["n"] == 2


# Refused comparisons.


def test_single_runs_need_predictions(make_run: Make) -> None:
    make_run("a", 0.8)
    b = make_run("b", 0.9, settings={"model.num_filters": 64})
    text = error_of("runs/a", "runs/b")
    assert "at least 2" in text
    assert "several seeds" in text
    assert "bottega evaluate runs/a --out" in text
    write_predictions(b, [True])
    assert "runs/a is a single run" in error_of("runs/a", "runs/b")


def test_predictions_without_common_samples_are_refused(make_run: Make) -> None:
    for name, keys in (("a", range(8)), ("b", range(8, 28))):
        file = make_run(name, 0.8) / "results" / "predictions.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f'{{"key": "{key}", "label": "yes", "predicted": "no"}}\n' for key in keys))
    assert "different data: 8 and 20 samples, none in common" in error_of("runs/a", "runs/b")


def test_single_run_against_a_group_is_refused(make_run: Make, make_group: Callable[..., str]) -> None:
    make_run("one", 0.9)
    assert "runs/one is a single run: a group needs at least 2" in error_of(make_group("a", GOOD), "runs/one")


def test_single_pair_is_refused(make_group: Callable[..., str]) -> None:
    text = error_of(make_group("a", GOOD[:3]), make_group("b", BETTER[:3], first=2))
    assert "needs 2 pairs or more; give both the same seeds" in text


def test_unpaired_groups_without_variance_are_refused(make_group: Callable[..., str]) -> None:
    assert "have no variance" in error_of(make_group("a", (1.0, 1.0)), make_group("b", (0.9, 0.9), first=5))


def test_group_members_may_differ_only_in_the_seed(make_run: Make, make_group: Callable[..., str]) -> None:
    group = make_group("a", GOOD)
    make_run("a-s9", 0.9, seed=9, settings={"training.learning_rate": 0.1, "model.num_filters": 7})
    text = error_of(group, make_group("b", BETTER))
    assert "differ in more than the seed" in text
    assert "training.learning_rate (0.0003 and 0.1)" in text
    assert "model.num_filters (null and 7)" in text


def test_duplicate_run_or_seed_is_refused(make_run: Make, make_group: Callable[..., str]) -> None:
    first, second = make_group("a", GOOD), make_group("b", BETTER)
    assert "given twice" in error_of(first, second, "runs/../runs/a-s1")
    assert "given twice" in error_of("runs/a-s0,runs/a-s0", second)
    make_run("a-s0.1", 0.8, seed=0)
    assert "are both seed 0; keep one" in error_of("runs/a-s*", second)


def test_different_best_metrics_are_refused(make_group: Callable[..., str]) -> None:
    group = make_group("a", GOOD)
    text = error_of(group, make_group("b", BETTER, settings={"evaluation.metric": "loss", "evaluation.mode": "min"}))
    assert "selects its best checkpoint by accuracy (max)" in text
    assert "by loss (min)" in text
    text = error_of(group, make_group("c", BETTER, settings={"evaluation.mode": "min"}))
    assert "evaluation.mode: higher accuracy is better, got min" in text


def test_missing_metrics_are_refused(make_run: Make, make_group: Callable[..., str]) -> None:
    first, second = make_group("a", GOOD), make_group("b", BETTER)
    assert "metrics.jsonl has no f1; it has accuracy, loss" in error_of(first, second, metric="f1")
    make_run("b-s7", seed=7)
    assert "runs/b-s7 has no evaluation" in error_of(first, second)
    make_run("c-s0", None, seed=0)
    make_run("c-s1", 0.7, seed=1)
    assert "accuracy is null and not a finite number" in error_of(first, "runs/c-s*")
    # Without a best evaluation no other metric can be read.
    assert "accuracy is null" in error_of(first, "runs/c-s*", metric="loss")


def test_folds_against_seeds_are_refused(make_run: Make, make_group: Callable[..., str]) -> None:
    for fold in range(3):
        make_run(f"cv/fold-{fold}", 0.8, settings={"data.split.folds": 3, "data.split.fold": fold})
    assert "compare groups of one kind" in error_of(make_group("a", GOOD), "runs/cv")
    assert "a group of its own" in error_of("runs/cv,runs/a-s0", "runs/a-s1")


def test_folds_of_another_split_are_refused(make_run: Make) -> None:
    for name, seed in (("cv-a", 0), ("cv-b", 1)):
        for fold in range(3):
            split = {"data.split.folds": 3, "data.split.fold": fold, "data.split.seed": seed}
            make_run(f"{name}/fold-{fold}", 0.8 + fold / 10, settings=split, data=f"{seed} {fold}")
    assert "data.split.seed (0 and 1)" in error_of("runs/cv-a", "runs/cv-b")


def test_predictions_on_other_samples_or_labels_are_refused(make_run: Make) -> None:
    a, b, c = (make_run(name, 0.8, seed=i) for i, name in enumerate("abc"))
    write_predictions(a, [True, False])
    write_predictions(b, [True, True], keys=["test.jsonl:0", "test.jsonl:7"])
    write_predictions(c, [True, True], label="other")
    assert "different samples or labels, 2 of 3" in error_of("runs/a", "runs/b")
    assert "different samples or labels, 2 of 2" in error_of("runs/a", "runs/c")
    write_predictions(make_run("d", 0.8, seed=4), [True, True])
    assert "single runs are compared by accuracy" in error_of("runs/a", "runs/d", metric="loss")
    assert compare(["runs/a", "runs/d"], metric="accuracy")["pairs"][0]["n"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "predictions.jsonl:2"),
        ('{"key": "b", "label": "yes"}', "expected key, label and predicted"),
        ('{"key": "a", "label": "yes", "predicted": "no"}', "'a' occurs twice"),
        ("[]", "expected key, label and predicted"),
    ],
)
def test_damaged_predictions_are_refused(make_run: Make, line: str, message: str) -> None:
    a, b = make_run("a", 0.8), make_run("b", 0.8, seed=1)
    write_predictions(b, [True])
    (a / "results").mkdir()
    (a / "results" / "predictions.jsonl").write_text(f'{{"key": "a", "label": "yes", "predicted": "yes"}}\n{line}\n')
    assert message in error_of("runs/a", "runs/b", kind=DataError)


def test_names_without_a_run_are_refused(make_run: Make, make_group: Callable[..., str]) -> None:
    group = make_group("a", GOOD)
    assert "no run matches" in error_of(group, "runs/zz-*")
    assert "no run at runs/a-s7" in error_of(group, "runs/a-s7")
    assert "is not a run" in error_of(group, ",")
    assert "give at least two groups" in error_of(group)
    for alpha in (0.0, 1.0, -1.0, float("nan")):
        assert "--alpha" in error_of(group, "runs/b", alpha=alpha)


# Table and plot.


def test_table_names_the_test_of_every_pair(make_group: Callable[..., str]) -> None:
    text = format_report(compare([make_group("a", GOOD), make_group("b", BETTER), make_group("c", GOOD[::-1])]))
    assert "significant" not in text
    rows = [line for line in text.splitlines() if line.startswith(("B - A ", "C - A ", "C - B "))]
    assert len(rows) == 3
    for row in rows:
        assert "paired t-test" in row
        assert "d_z" in row
        assert row.endswith(("is better", "no difference shown"))
    for name in ("B - A", "C - A", "C - B"):
        assert f"{name}: paired t-test, because they have 5 seeds in common" in text


def test_plot_of_a_comparison(make_group: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = record_figures(monkeypatch)
    report = compare([make_group("a", (0.8, 0.8, 0.8, 0.7)), make_group("b", BETTER[:4])])
    plot_comparison(report, tmp_path / "deep" / "p.png")
    assert (tmp_path / "deep" / "p.png").read_bytes().startswith(b"\x89PNG")
    dots = [line for line in figures[0].axes[0].lines if line.get_marker() == "o"]
    assert sorted(float(dot.get_ydata()[0]) for dot in dots) == sorted([0.8, 0.8, 0.8, 0.7, *BETTER[:4]])
    texts = "\n".join(list_texts(figures[0]))
    assert report["pairs"][0]["verdict"] in texts
    assert "lines join runs of one seed or fold" in texts


def test_interval_is_clipped_to_the_range_of_the_metric() -> None:
    group = {"label": "A", "name": "a", "kind": "seeds", "n": 2, "mean": 0.9, "deviation": 0.1, "runs": []}
    report: dict[str, Any] = {
        "metric": "accuracy",
        "mode": "max",
        "read_from": "here",
        "level": 0.95,
        "pairs": [],
        "notes": [],
        "groups": [{**group, "interval": {"low": 0.31, "high": 1.14}}],
    }
    assert "0.31000 to *1.00000" in format_report(report)
    assert "* the interval exceeds the range of the metric" in format_report(report)
    loss_table = format_report({**report, "metric": "loss"})
    assert "0.31000 to 1.14000" in loss_table
    assert "*" not in loss_table
