"""`bottega crossval` from the split to the table: held-out samples, training data of each fold, and the statistics."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

import bottega
from bottega.analysis.compare import compare
from bottega.analysis.crossval_folds import is_trained, plan_folds, resolve_splitting
from bottega.analysis.crossval_jobs import train_folds
from bottega.analysis.crossval_table import format_report, pool_predictions, summarise_folds
from bottega.config.load import to_yaml
from bottega.core import checkpoint
from bottega.core.errors import DataError, EnvironmentProblem, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.run.dependencies import ChildProcessFailed
from bottega.run.job_pool import Job, plan_job_environments
from bottega.run.prepare import prepare_recipe
from bottega.tasks.recipes import load_recipe
from small_texts import make_rows as texts
from small_texts import settings

FOLDS = 3


def write_rows(folder: Path, *, count: int = 62) -> Path:
    """Write texts with a unique word each, twice, so that a vocabulary could include it, and several texts per user."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "own.jsonl"
    lines = []
    for number, row in enumerate(texts(count)):
        own = "".join(chr(ord("a") + int(digit)) for digit in f"{number:03d}")
        lines.append(json.dumps({**row, "text": f"{row['text']} x{own} x{own}", "user": f"u{number % 11}"}) + "\n")
    path.write_text("".join(lines))
    return path


def tiny_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    own = {
        "data.train.path": str(write_rows(folder)),
        "training.max_steps": 4,
        "evaluation.every": 2,
        "checkpoint.every": 2,
    }
    return {**settings(folder, "cnn"), **own, "loss.class_weights": "balanced", "name": "t", **changes}


def load(values: dict[str, Any], source: str = "classify") -> Any:
    return load_recipe([source, values]).recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crossval")


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return bottega.crossval("classify", tiny_settings(folder), folds=FOLDS, jobs=2)


def read_predictions(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "predictions.jsonl").read_text().splitlines()]


def read_files(root: Path) -> dict[Path, tuple[int, bytes]]:
    inside = [path for path in root.glob("fold-*/**/*") if path.is_file() and path.name != "LOCK"]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in inside}


# Held-out samples.


def test_each_sample_is_held_out_once_and_folds_are_stratified(report: dict[str, Any]) -> None:
    root = Path(report["folder"])
    rows = read_predictions(root)
    assert sorted(row["key"] for row in rows) == sorted(f"own.jsonl:{number}" for number in range(1, 63))
    counts = Counter((row["fold"], row["label"]) for row in rows)
    for label in ("cook", "sail", "sing"):
        of_label = [counts[fold, label] for fold in range(FOLDS)]
        assert max(of_label) - min(of_label) <= 1
    sizes = Counter(row["fold"] for row in rows)
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert [run["held_out"] for run in report["runs"]] == [sizes[fold] for fold in range(FOLDS)]


def test_vocabulary_and_class_weights_exclude_held_out_samples(report: dict[str, Any], folder: Path) -> None:
    root, table = Path(report["folder"]), [json.loads(line) for line in write_rows(folder).read_text().splitlines()]
    for fold in range(FOLDS):
        held = {int(row["key"].rpartition(":")[2]) - 1 for row in read_predictions(root) if row["fold"] == fold}
        processor = root / f"fold-{fold}" / "processor"
        vocabulary = json.loads((processor / "tokenizer.json").read_text())["model"]["vocab"]
        own = {table[row]["text"].split()[-1]: row in held for row in range(len(table))}
        assert {word for word, is_held in own.items() if not is_held} <= vocabulary.keys()
        assert not {word for word, is_held in own.items() if is_held} & vocabulary.keys()
        names = json.loads((processor / "classes.json").read_text())
        counts = Counter(row["label"] for number, row in enumerate(table) if number not in held)
        weights = np.array(json.loads((processor / "weights.json").read_text()))
        assert weights * [counts[name] for name in names] == pytest.approx(
            [weights[0] * counts[names[0]]] * len(names), rel=1e-6
        )


@pytest.mark.parametrize("by", ["group", "fraction", "hash"])
def test_split_by_group_fraction_or_hash(folder: Path, by: str) -> None:
    """Each row is held out once, and with groups all rows of a user in the same fold."""
    recipe = load(tiny_settings(folder))
    split, _ = resolve_splitting(recipe, folds=3, by=by, field="user" if by == "group" else None)
    user = [json.loads(line)["user"] for line in write_rows(folder).read_text().splitlines()]
    held: list[int] = []
    folds_of = defaultdict(set)
    for fold in plan_folds(recipe, split, repeats=1, out=None):
        prepared = prepare_recipe(fold.recipe, lambda *_: None)
        keys = [prepared.table("validation").row("key", row) for row in range(prepared.tables["validation"]["rows"])]
        held += (numbers := [int(key.rpartition(":")[2]) - 1 for key in keys])
        for number in numbers:
            folds_of[user[number]].add(fold.number)
        assert prepared.tables["train"]["rows"] + len(keys) == len(user)
    assert sorted(held) == list(range(len(user)))
    assert (max(map(len, folds_of.values())) == 1) == (by == "group")


def test_repeats_change_the_split_seed_only(folder: Path) -> None:
    recipe = load(tiny_settings(folder, **{"data.split.seed": 7}))
    split, _ = resolve_splitting(recipe, folds=2, by=None, field=None)
    recipes = [fold.recipe for fold in plan_folds(recipe, split, repeats=2, out=None)]
    assert [(r.data.split.seed, r.data.split.fold) for r in recipes] == [(7, 0), (7, 1), (8, 0), (8, 1)]
    assert {r.seed for r in recipes} == {recipe.seed}


def test_default_split_of_each_task(folder: Path) -> None:
    def by(values: dict[str, Any], source: str = "classify", **options: Any) -> tuple[str, str | None, int | None]:
        options = {"folds": None, "by": None, "field": None, **options}
        split, _ = resolve_splitting(load(values, source), **options)
        return split.by, split.field, split.folds

    values = tiny_settings(folder)
    assert by(values) == ("stratified", None, 5)
    assert by({**values, "data.multi_label": True, "loss": None}) == ("fraction", None, 5)
    assert by({**values, "data.split.by": "fraction", "data.split.folds": 7}) == ("fraction", None, 7)
    assert by(values, field="user", folds=4) == ("group", "user", 4)
    assert by({"data.train.path": str(write_rows(folder)), "training.max_steps": 1}, "language") == (
        "fraction",
        None,
        5,
    )
    assert by({}, "routing") == ("stratified", None, 5)


def test_separate_validation_data_is_not_used_and_reported(folder: Path) -> None:
    own = {"data.validation": {"path": "dev.jsonl"}, "data.test": {"path": "test.jsonl"}}
    recipe = load({**tiny_settings(folder), "data.validation.split": None, **own})
    split, notes = resolve_splitting(recipe, folds=2, by=None, field=None)
    (fold, _) = plan_folds(recipe, split, repeats=1, out=None)
    assert "data.validation (dev.jsonl) is not used" in notes[0]
    assert fold.recipe.data.validation is None
    assert fold.recipe.data.test.path == "test.jsonl"


# Statistics over folds.


def test_interval_has_the_nadeau_bengio_correction() -> None:
    """Deviation 0.0005^(1/2); times (1/5 + 1/4)^(1/2) that is 0.015, times (1/5)^(1/2) it is 0.01; t of 4 is 2.776445."""
    summary = summarise_folds([0.80, 0.82, 0.78, 0.84, 0.81], num_folds=5)
    assert (summary["mean"], summary["deviation"]) == pytest.approx((0.81, 0.0005**0.5))
    assert summary["interval"]["low"] == pytest.approx(0.81 - 2.776445 * 0.015, abs=1e-7)
    assert summary["interval"]["high"] == pytest.approx(0.81 + 2.776445 * 0.015, abs=1e-7)
    assert summary["uncorrected"]["high"] == pytest.approx(0.81 + 2.776445 * 0.01, abs=1e-7)
    # Two repeats: n grows, the held-out fraction does not.
    again = summarise_folds([0.80, 0.82, 0.78, 0.84, 0.81] * 2, num_folds=5)
    half = scipy.stats.t.ppf(0.975, 9) * again["deviation"] * np.sqrt(1 / 10 + 1 / 4)
    assert again["interval"]["high"] == pytest.approx(0.81 + half)


def test_report_summarises_the_folds(report: dict[str, Any]) -> None:
    root = Path(report["folder"])
    assert json.loads((root / "crossval.json").read_text()) == report
    values = [run["metrics"]["accuracy"] for run in report["runs"]]
    assert report["metrics"]["accuracy"]["mean"] == pytest.approx(np.mean(values))
    assert report["metrics"]["accuracy"]["deviation"] == pytest.approx(np.std(values, ddof=1))
    for run in report["runs"]:
        correct = [row["label"] == row["predicted"] for row in read_predictions(root) if row["fold"] == run["number"]]
        assert run["metrics"]["accuracy"] == pytest.approx(np.mean(correct))
    assert report["pooled"]["accuracy"] == pytest.approx(
        np.average(values, weights=[run["held_out"] for run in report["runs"]])
    )
    for name in ("picture", "confusion"):
        assert Path(report["files"][name]).read_bytes().startswith(b"\x89PNG")
    text = format_report(report)
    assert (
        f"mean{'':21}{np.mean(values):>8.4f}".split() == next(r for r in text.splitlines() if "mean" in r).split()[:2]
    )
    assert "the correction of Nadeau and Bengio (2003): folds share training data" in text
    assert "scaled by 1/3 + 1/2, not by 1/3" in text


@pytest.mark.parametrize("error", [EnvironmentProblem("plots need matplotlib"), OSError("no space left")])
def test_failed_plot_keeps_the_metrics(
    report: dict[str, Any], folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        saved = json.loads((Path(report["folder"]) / "crossval.json").read_text())
        assert saved["pooled"] == report["pooled"], "written before any plot"
        raise error

    (Path(report["folder"]) / "crossval.json").unlink()
    monkeypatch.setattr("bottega.analysis.compare.plot_comparison", fail)
    monkeypatch.setattr("bottega.plots.classification.plot_confusion_matrix", fail)
    result = bottega.crossval("classify", tiny_settings(folder), folds=FOLDS)
    assert result["metrics"] == report["metrics"]
    assert list(result["files"]) == ["predictions"]
    assert result["notes"][-2:] == [f"no confusion.png: {error}", f"no crossval.png: {error}"]
    assert json.loads((Path(report["folder"]) / "crossval.json").read_text()) == result
    monkeypatch.undo()
    # Restores the report for other tests.
    assert bottega.crossval("classify", tiny_settings(folder), folds=FOLDS) == report


def test_failed_plot_of_a_fold_is_a_note(report: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise EnvironmentProblem("plots need matplotlib")

    results = Path(report["folder"]) / "fold-1" / "results"
    shutil.copytree(results, folder / "before")
    shutil.rmtree(results)
    monkeypatch.setattr("bottega.analysis.classifier_predictions.plot_calibration", fail)
    result = bottega.crossval("classify", tiny_settings(folder), folds=FOLDS)
    assert result["metrics"] == report["metrics"]
    assert result["pooled"] == report["pooled"]
    assert "no plots of single folds: plots need matplotlib" in result["notes"]
    assert bottega.crossval("classify", tiny_settings(folder), folds=FOLDS) == result
    monkeypatch.undo()
    shutil.rmtree(results)
    shutil.copytree(folder / "before", results)
    # Restores the report for other tests.
    assert bottega.crossval("classify", tiny_settings(folder), folds=FOLDS) == report


def test_interval_is_clipped_to_the_range_of_the_metric(report: dict[str, Any]) -> None:
    metrics = {"accuracy": [0.9, 1.0, 1.0], "ece": [0.01, 0.1, 0.02], "loss": [0.1, 0.6, 0.1], "psnr": [1, 9, 2]}
    summaries = {name: summarise_folds(values, num_folds=FOLDS) for name, values in metrics.items()}
    runs = [{**run, "metrics": {k: v[i] for k, v in metrics.items()}} for i, run in enumerate(report["runs"])]
    text = format_report({**report, "metrics": summaries, "runs": runs, "pooled": {}})
    low, high = (
        next(r for r in text.splitlines() if r.startswith(f"95 % {end}")).split()[3:] for end in ("from", "to")
    )
    assert (high[0], low[1], low[2]) == ("*1.0000", "*0.0000", "*0.0000")
    assert (low[0], low[3]) == tuple(f"{summaries[name]['interval']['low']:.4f}" for name in ("accuracy", "psnr"))
    assert "note: * the interval exceeds the range of the metric" in text
    assert summaries["accuracy"]["interval"]["high"] > 1
    assert "note: *" not in format_report({**report, "metrics": {"psnr": summaries["psnr"]}, "runs": runs})


def test_multi_label_predictions_are_pooled() -> None:
    rows = [
        {"label": ["a", "b"], "predicted": ["a", "b"]},
        {"label": [], "predicted": ["b"]},
        {"label": ["a"], "predicted": []},
    ]
    metrics, matrix = pool_predictions(rows, ("a", "b"))
    assert metrics["exact_match"] == pytest.approx(1 / 3)
    assert metrics["label_accuracy"] == pytest.approx(4 / 6)
    assert metrics["macro_f1"] == pytest.approx(2 / 3)  # a: one right, one missed; b: one right, one wrong
    assert matrix.shape == (2, 2, 2)


def test_second_call_changes_no_fold(report: dict[str, Any], folder: Path) -> None:
    root = Path(report["folder"])
    before = read_files(root)
    again = bottega.crossval("classify", tiny_settings(folder), folds=FOLDS)
    assert again == report
    assert read_files(root) == before


def test_checkpoint_last_is_evaluated(report: dict[str, Any], folder: Path) -> None:
    result = bottega.crossval("classify", tiny_settings(folder), folds=FOLDS, checkpoint="last")
    assert [run["step"] for run in result["runs"]] == [4] * FOLDS
    assert not any("optimistic" in note for note in result["notes"])
    bottega.crossval("classify", tiny_settings(folder), folds=FOLDS)  # restore the report for other tests


def test_changed_recipe_is_refused_without_fresh(report: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UsageError, match=r"another recipe .*learning_rate.*start over with fresh"):
        bottega.crossval("classify", tiny_settings(folder, **{"training.learning_rate": 0.5}), folds=FOLDS)
    with pytest.raises(UsageError, match=r"another recipe \(.*data.split.folds: 3 -> 4"):
        bottega.crossval("classify", tiny_settings(folder), folds=4)


def test_python_errors_name_arguments_without_dashes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fewer than folds 40; lower it, or use by fraction"):
        bottega.crossval("classify", tiny_settings(folder), folds=40, out=tmp_path / "many")


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        ({"step": 4, "total": 4}, True),
        ({"step": 2, "total": 4}, False),
        ({"step": 2, "total": 4, "notes": {"early_stop": {"best": 0.1, "waited": 2}}}, True),
        ({"step": 2, "total": 4, "notes": {"early_stop": {"best": 0.1, "waited": 1}}}, False),
    ],
)
def test_a_fold_is_trained_when_its_run_has_ended(tmp_path: Path, progress: dict[str, Any], expected: bool) -> None:
    recipe = load(tiny_settings(tmp_path, **{"training.early_stopping.patience": 2}))
    split, _ = resolve_splitting(recipe, folds=2, by=None, field=None)
    fold = plan_folds(recipe, split, repeats=1, out=tmp_path / "cv")[0]
    checkpoint.write(
        fold.run.checkpoints, step=progress["step"], files={}, progress=progress, fingerprint={"data": "d"}
    )
    fold.run.recipe.write_text(to_yaml(fold.recipe))
    assert is_trained(fold) == expected
    fold.run.recipe.write_text(to_yaml(fold.recipe.model_copy(update={"seed": 5})))
    assert not is_trained(fold)


# Jobs.


def test_jobs_are_assigned_cpus_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan_job_environments("cpu", 2, num_runs=5) == [{}, {}]  # variables of the user are not changed
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert plan_job_environments("cpu", 2, num_runs=5) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert len(plan_job_environments("cpu", 7, num_runs=5)) == 5
    monkeypatch.setattr("bottega.run.job_pool.JOB_MEMORY_BYTES", 1)
    assert len(plan_job_environments("cpu", "auto", num_runs=9)) == 4
    monkeypatch.setattr("bottega.run.job_pool.JOB_MEMORY_BYTES", 1 << 60)
    assert len(plan_job_environments("cpu", "auto", num_runs=9)) == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [env["CUDA_VISIBLE_DEVICES"] for env in plan_job_environments("cuda", "auto", num_runs=9)] == ["4", "6"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in plan_job_environments("auto", 3, num_runs=9)] == ["4", "6", "4"]


class FinishedJob:
    """A fake training process that ends at once with `code`."""

    code = 0

    def __init__(self, job: Job, environment: dict[str, str]) -> None:
        self.job, self.environment = job, environment
        self.start_step, self.log_size = job.step, 0

    def has_ended(self) -> bool:
        return True

    def describe_error(self) -> str:
        return "no"


def make_jobs(folder: Path, number: int) -> list[Job]:
    jobs = [Job(RunDirectory(folder / f"fold-{n}"), folder / f"fold-{n}.yaml") for n in range(number)]
    for job in jobs:
        job.run.create()
    return jobs


def test_surviving_fold_processes_count_as_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folds of a killed command are still training: with two slots, a third starts when one of them ends."""
    messages: list[str] = []
    jobs = make_jobs(tmp_path, 3)
    locks = [Lock(job.run) for job in jobs[:2]]
    rounds = 0

    def sleep(_: float) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            assert not any("training" in text for text in messages), messages
            locks[0].__exit__(None, None, None)
        if rounds == 6:
            assert [text for text in messages if text.endswith(": training")] == [
                "fold-0: training",
                "fold-2: training",
            ]
            locks[1].__exit__(None, None, None)

    monkeypatch.setattr("bottega.run.job_pool.ChildRun", FinishedJob)
    monkeypatch.setattr("bottega.analysis.crossval_jobs.time.sleep", sleep)
    for lock in locks:
        lock.__enter__()
    train_folds(jobs, [{}, {}], log=messages.append, report_progress=lambda *_: None)
    assert messages[-1] == "fold-1: training"


def test_messages_of_failed_and_resumed_folds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed(FinishedJob):
        code = 3

    monkeypatch.setattr("bottega.run.job_pool.ChildRun", Failed)
    jobs = make_jobs(tmp_path, 2)
    checkpoint.write(jobs[1].run.checkpoints, step=6, files={}, progress={"step": 6, "total": 8}, fingerprint={})
    messages: list[str] = []
    for trained, end in ((0, r"\(and 1 more\)$"), (1, r"\(and 1 more\); the other folds are saved$")):
        with pytest.raises(ChildProcessFailed, match=end):
            train_folds(jobs, [{}, {}], num_trained=trained, log=messages.append, report_progress=lambda *_: None)
    assert messages[:2] == ["fold-0: training", "fold-1: resumed at step 6"]


# End to end.


@pytest.mark.slow
def test_any_number_of_jobs_gives_the_same_numbers(report: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Two cross-validations are compared by the test for folds."""
    alone = bottega.crossval("classify", tiny_settings(folder), folds=FOLDS, jobs=1, out=tmp_path / "a")
    assert [run["metrics"] for run in alone["runs"]] == [run["metrics"] for run in report["runs"]]
    assert read_predictions(tmp_path / "a") == read_predictions(Path(report["folder"]))
    other = tiny_settings(folder, **{"training.learning_rate": 0.3})
    bottega.crossval("classify", other, folds=FOLDS, jobs=2, out=tmp_path / "b")
    for split in (None, "validation"):
        (pair,) = compare([str(tmp_path / "a"), str(tmp_path / "b")], split=split)["pairs"]
        assert pair["test"].startswith(("corrected resampled", "Wilcoxon"))
        assert pair["paired_by"] == "fold"
        assert pair["n"] == FOLDS


@pytest.mark.slow
def test_crossval_of_language_and_images(tmp_path: Path) -> None:
    from small_media import image
    from small_run import SMALL

    settings = {**SMALL, "data.train.path": str(write_rows(tmp_path)), "output_dir": str(tmp_path), "name": "text"}
    text = bottega.crossval("language", {**settings, "training.max_steps": 2, "data.test.split": 0.1}, folds=2, jobs=2)
    assert text["by"] == "fraction"
    assert {"loss", "bits_per_byte"} <= text["metrics"].keys()
    assert set(text["test"]["loss"]) == {"mean", "deviation"}
    assert "test, the same samples for all folds" in format_report(text)
    image_settings = {**image(tmp_path), "training.max_steps": 2, "name": "drawn"}
    result = bottega.crossval("image", image_settings, folds=2, jobs=2)
    assert [run["held_out"] for run in result["runs"]] == [18, 18]
    assert result["metric"] in result["metrics"]
    assert "pooled" not in result
