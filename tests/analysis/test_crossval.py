"""`bottega crossval` from the split to the table: who is held out when, what each fold has learnt from, and the arithmetic."""

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
from bottega.analysis.crossval_jobs import FoldJob, plan_job_environments, train_folds
from bottega.analysis.crossval_table import format_report, pool_predictions, summarise_folds
from bottega.config.load import to_yaml
from bottega.core import checkpoint
from bottega.core.errors import DataError, EnvironmentProblem, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.run.dependencies import DependencyFailed
from bottega.run.prepare import prepare_recipe
from bottega.tasks.recipes import load_recipe
from small_texts import rows as texts
from small_texts import settings

FOLDS = 3


def data(folder: Path, *, count: int = 62) -> Path:
    """Texts with a word of their own each, twice, so that a vocabulary could take it; and a user with several texts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "own.jsonl"
    lines = []
    for number, row in enumerate(texts(count)):
        own = "".join(chr(ord("a") + int(digit)) for digit in f"{number:03d}")
        lines.append(json.dumps({**row, "text": f"{row['text']} x{own} x{own}", "user": f"u{number % 11}"}) + "\n")
    path.write_text("".join(lines))
    return path


def tiny(folder: Path, **changes: Any) -> dict[str, Any]:
    own = {"data.train.path": str(data(folder)), "training.max_steps": 4, "evaluation.every": 2, "checkpoint.every": 2}
    return {**settings(folder, "cnn"), **own, "loss.class_weights": "balanced", "name": "t", **changes}


def recipe_of(values: dict[str, Any], source: str = "classify") -> Any:
    return load_recipe([source, values]).recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crossval")


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return bottega.crossval("classify", tiny(folder), folds=FOLDS, jobs=2)


def answers(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "predictions.jsonl").read_text().splitlines()]


def files_of(root: Path) -> dict[Path, tuple[int, bytes]]:
    inside = [path for path in root.glob("fold-*/**/*") if path.is_file() and path.name != "LOCK"]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in inside}


# What is held out, and what it was kept from.


def test_each_sample_is_held_out_once_and_classes_are_shared_out(report: dict[str, Any]) -> None:
    root = Path(report["folder"])
    rows = answers(root)
    assert sorted(row["key"] for row in rows) == sorted(f"own.jsonl:{number}" for number in range(1, 63))
    counts = Counter((row["fold"], row["label"]) for row in rows)
    for label in ("cook", "sail", "sing"):
        of_label = [counts[fold, label] for fold in range(FOLDS)]
        assert max(of_label) - min(of_label) <= 1
    sizes = Counter(row["fold"] for row in rows)
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert [run["held_out"] for run in report["runs"]] == [sizes[fold] for fold in range(FOLDS)]


def test_nothing_of_a_fold_comes_from_what_it_holds_out(report: dict[str, Any], folder: Path) -> None:
    root, table = Path(report["folder"]), [json.loads(line) for line in data(folder).read_text().splitlines()]
    for fold in range(FOLDS):
        held = {int(row["key"].rpartition(":")[2]) - 1 for row in answers(root) if row["fold"] == fold}
        processor = root / f"fold-{fold}" / "processor"
        vocabulary = json.loads((processor / "tokenizer.json").read_text())["model"]["vocab"]
        own = {table[row]["text"].split()[-1]: row in held for row in range(len(table))}
        assert {word for word, is_held in own.items() if not is_held} <= vocabulary.keys()
        assert not {word for word, is_held in own.items() if is_held} & vocabulary.keys()
        names = json.loads((processor / "classes.json").read_text())
        learnt = Counter(row["label"] for number, row in enumerate(table) if number not in held)
        weights = np.array(json.loads((processor / "weights.json").read_text()))
        assert weights * [learnt[name] for name in names] == pytest.approx(
            [weights[0] * learnt[names[0]]] * len(names), rel=1e-6
        )


@pytest.mark.parametrize("by", ["group", "fraction", "hash"])
def test_other_ways_to_cut(folder: Path, by: str) -> None:
    """Each row in one held-out part, and with groups all rows of a user in the same one."""
    recipe = recipe_of(tiny(folder))
    split, _ = resolve_splitting(recipe, folds=3, by=by, field="user" if by == "group" else None)
    user = [json.loads(line)["user"] for line in data(folder).read_text().splitlines()]
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


def test_repeats_are_other_splits_of_the_same_seed(folder: Path) -> None:
    recipe = recipe_of(tiny(folder, **{"data.split.seed": 7}))
    split, _ = resolve_splitting(recipe, folds=2, by=None, field=None)
    found = [(fold.recipe.data.split, fold.recipe.seed) for fold in plan_folds(recipe, split, repeats=2, out=None)]
    assert [(one.seed, one.fold) for one, _ in found] == [(7, 0), (7, 1), (8, 0), (8, 1)]
    assert {seed for _, seed in found} == {recipe.seed}


def test_how_rows_are_shared_out_unless_one_says(folder: Path) -> None:
    def by(values: dict[str, Any], source: str = "classify", **asked: Any) -> tuple[str, str | None, int | None]:
        found, _ = resolve_splitting(recipe_of(values, source), **{"folds": None, "by": None, "field": None, **asked})
        return found.by, found.field, found.folds

    values = tiny(folder)
    assert by(values) == ("stratified", None, 5)
    assert by({**values, "data.multi_label": True, "loss": None}) == ("fraction", None, 5)
    assert by({**values, "data.split.by": "fraction", "data.split.folds": 7}) == ("fraction", None, 7)
    assert by(values, field="user", folds=4) == ("group", "user", 4)
    assert by({"data.train.path": str(data(folder)), "training.max_steps": 1}, "language") == ("fraction", None, 5)
    assert by({}, "routing") == ("stratified", None, 5)


def test_held_out_data_of_its_own_is_left_aside_and_said(folder: Path) -> None:
    own = {"data.validation": {"path": "dev.jsonl"}, "data.test": {"path": "test.jsonl"}}
    recipe = recipe_of({**tiny(folder), "data.validation.split": None, **own})
    split, notes = resolve_splitting(recipe, folds=2, by=None, field=None)
    (fold, _) = plan_folds(recipe, split, repeats=1, out=None)
    assert "data.validation (dev.jsonl) is not used" in notes[0]
    assert fold.recipe.data.validation is None
    assert fold.recipe.data.test.path == "test.jsonl"


# What they say together.


def test_the_interval_by_hand() -> None:
    """Deviation 0.0005^(1/2); times (1/5 + 1/4)^(1/2) that is 0.015, times (1/5)^(1/2) it is 0.01; t of 4 is 2.776445."""
    found = summarise_folds([0.80, 0.82, 0.78, 0.84, 0.81], folds=5)
    assert (found["mean"], found["deviation"]) == pytest.approx((0.81, 0.0005**0.5))
    assert found["interval"]["low"] == pytest.approx(0.81 - 2.776445 * 0.015, abs=1e-7)
    assert found["interval"]["high"] == pytest.approx(0.81 + 2.776445 * 0.015, abs=1e-7)
    assert found["uncorrected"]["high"] == pytest.approx(0.81 + 2.776445 * 0.01, abs=1e-7)
    again = summarise_folds(
        [0.80, 0.82, 0.78, 0.84, 0.81] * 2, folds=5
    )  # two repeats: n grows, the share of a fold does not
    half = scipy.stats.t.ppf(0.975, 9) * again["deviation"] * np.sqrt(1 / 10 + 1 / 4)
    assert again["interval"]["high"] == pytest.approx(0.81 + half)


def test_the_report_holds_the_numbers_of_the_folds(report: dict[str, Any]) -> None:
    root = Path(report["folder"])
    assert json.loads((root / "crossval.json").read_text()) == report
    values = [run["metrics"]["accuracy"] for run in report["runs"]]
    assert report["metrics"]["accuracy"]["mean"] == pytest.approx(np.mean(values))
    assert report["metrics"]["accuracy"]["deviation"] == pytest.approx(np.std(values, ddof=1))
    for run in report["runs"]:
        mine = [row["label"] == row["predicted"] for row in answers(root) if row["fold"] == run["number"]]
        assert run["metrics"]["accuracy"] == pytest.approx(np.mean(mine))
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
def test_a_plot_that_fails_costs_no_numbers(
    report: dict[str, Any], folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        held = json.loads((Path(report["folder"]) / "crossval.json").read_text())
        assert held["pooled"] == report["pooled"], "written before anything is drawn"
        raise error

    (Path(report["folder"]) / "crossval.json").unlink()
    monkeypatch.setattr("bottega.analysis.compare.plot_comparison", fail)
    monkeypatch.setattr("bottega.plots.classification.plot_confusion_matrix", fail)
    found = bottega.crossval("classify", tiny(folder), folds=FOLDS)
    assert found["metrics"] == report["metrics"]
    assert list(found["files"]) == ["predictions"]
    assert found["notes"][-2:] == [f"no confusion.png: {error}", f"no crossval.png: {error}"]
    assert json.loads((Path(report["folder"]) / "crossval.json").read_text()) == found
    monkeypatch.undo()
    assert bottega.crossval("classify", tiny(folder), folds=FOLDS) == report  # as the others expect it


def test_a_plot_of_a_fold_that_fails_is_a_note(
    report: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise EnvironmentProblem("plots need matplotlib")

    results = Path(report["folder"]) / "fold-1" / "results"
    shutil.copytree(results, folder / "before")
    shutil.rmtree(results)
    monkeypatch.setattr("bottega.analysis.classifier_predictions.plot_calibration", fail)
    found = bottega.crossval("classify", tiny(folder), folds=FOLDS)
    assert found["metrics"] == report["metrics"]
    assert found["pooled"] == report["pooled"]
    assert "no plots of single folds: plots need matplotlib" in found["notes"]
    assert bottega.crossval("classify", tiny(folder), folds=FOLDS) == found
    monkeypatch.undo()
    shutil.rmtree(results)
    shutil.copytree(folder / "before", results)
    assert bottega.crossval("classify", tiny(folder), folds=FOLDS) == report  # as the others expect it


def test_an_interval_is_shown_as_far_as_its_metric_goes(report: dict[str, Any]) -> None:
    metrics = {"accuracy": [0.9, 1.0, 1.0], "ece": [0.01, 0.1, 0.02], "loss": [0.1, 0.6, 0.1], "psnr": [1, 9, 2]}
    own = {name: summarise_folds(values, folds=FOLDS) for name, values in metrics.items()}
    runs = [{**run, "metrics": {k: v[i] for k, v in metrics.items()}} for i, run in enumerate(report["runs"])]
    text = format_report({**report, "metrics": own, "runs": runs, "pooled": {}})
    low, high = (
        next(r for r in text.splitlines() if r.startswith(f"95 % {end}")).split()[3:] for end in ("from", "to")
    )
    assert (high[0], low[1], low[2]) == ("*1.0000", "*0.0000", "*0.0000")
    assert (low[0], low[3]) == tuple(f"{own[name]['interval']['low']:.4f}" for name in ("accuracy", "psnr"))
    assert "note: * the interval exceeds the range of the metric" in text
    assert own["accuracy"]["interval"]["high"] > 1
    assert "note: *" not in format_report({**report, "metrics": {"psnr": own["psnr"]}, "runs": runs})


def test_answers_of_several_classes_are_pooled() -> None:
    rows = [
        {"label": ["a", "b"], "predicted": ["a", "b"]},
        {"label": [], "predicted": ["b"]},
        {"label": ["a"], "predicted": []},
    ]
    found, matrix = pool_predictions(rows, ("a", "b"))
    assert found["exact_match"] == pytest.approx(1 / 3)
    assert found["label_accuracy"] == pytest.approx(4 / 6)
    assert found["macro_f1"] == pytest.approx(2 / 3)  # a: one right, one missed; b: one right, one wrong
    assert matrix.shape == (2, 2, 2)


def test_the_same_call_again_touches_no_fold(report: dict[str, Any], folder: Path) -> None:
    root = Path(report["folder"])
    before = files_of(root)
    again = bottega.crossval("classify", tiny(folder), folds=FOLDS)
    assert again == report
    assert files_of(root) == before


def test_the_last_checkpoint_in_place_of_the_best(report: dict[str, Any], folder: Path) -> None:
    found = bottega.crossval("classify", tiny(folder), folds=FOLDS, checkpoint="last")
    assert [run["step"] for run in found["runs"]] == [4] * FOLDS
    assert not any("optimistic" in note for note in found["notes"])
    bottega.crossval("classify", tiny(folder), folds=FOLDS)  # as the others expect it


def test_another_recipe_is_refused_until_all_is_set_aside(report: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UsageError, match=r"another recipe .*learning_rate.*start over with fresh"):
        bottega.crossval("classify", tiny(folder, **{"training.learning_rate": 0.5}), folds=FOLDS)
    with pytest.raises(UsageError, match=r"another recipe \(.*data.split.folds: 3 -> 4"):
        bottega.crossval("classify", tiny(folder), folds=4)


def test_what_python_is_told_has_no_dashes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fewer than folds 40; lower it, or use by fraction"):
        bottega.crossval("classify", tiny(folder), folds=40, out=tmp_path / "many")


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
    recipe = recipe_of(tiny(tmp_path, **{"training.early_stopping.patience": 2}))
    split, _ = resolve_splitting(recipe, folds=2, by=None, field=None)
    fold = plan_folds(recipe, split, repeats=1, out=tmp_path / "cv")[0]
    checkpoint.write(
        fold.run.checkpoints, step=progress["step"], files={}, progress=progress, fingerprint={"data": "d"}
    )
    fold.run.recipe.write_text(to_yaml(fold.recipe))
    assert is_trained(fold) == expected
    fold.run.recipe.write_text(to_yaml(fold.recipe.model_copy(update={"seed": 5})))
    assert not is_trained(fold)


# Where they run.


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert plan_job_environments("cpu", 2, num_folds=5) == [{}, {}]  # what somebody has set is left alone
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert plan_job_environments("cpu", 2, num_folds=5) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert len(plan_job_environments("cpu", 7, num_folds=5)) == 5
    monkeypatch.setattr("bottega.analysis.crossval_jobs.JOB_MEMORY", 1)
    assert len(plan_job_environments("cpu", "auto", num_folds=9)) == 4
    monkeypatch.setattr("bottega.analysis.crossval_jobs.JOB_MEMORY", 1 << 60)
    assert len(plan_job_environments("cpu", "auto", num_folds=9)) == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in plan_job_environments("cuda", "auto", num_folds=9)] == ["4", "6"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in plan_job_environments("auto", 3, num_folds=9)] == ["4", "6", "4"]


class Ended:
    """In place of a training: over at once, with the code that is asked for."""

    code = 0

    def __init__(self, job: FoldJob, environment: dict[str, str]) -> None:
        self.job, self.environment = job, environment

    def follow(self, log: Any, report_progress: Any) -> bool:
        return True

    def error(self) -> str:
        return "no"


def works(folder: Path, number: int) -> list[FoldJob]:
    found = [FoldJob(RunDirectory(folder / f"fold-{n}"), folder / f"fold-{n}.yaml") for n in range(number)]
    for work in found:
        work.run.create()
    return found


def test_who_lives_on_counts_as_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folds of a command that was killed are still trained: with two places a third begins when one of them ends."""
    said: list[str] = []
    held = works(tmp_path, 3)
    locks = [Lock(work.run) for work in held[:2]]
    rounds = 0

    def sleep(_: float) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            assert not any("training" in text for text in said), said
            locks[0].__exit__(None, None, None)
        if rounds == 6:
            assert [text for text in said if text.endswith(": training")] == ["fold-0: training", "fold-2: training"]
            locks[1].__exit__(None, None, None)

    monkeypatch.setattr("bottega.analysis.crossval_jobs._Child", Ended)
    monkeypatch.setattr("bottega.analysis.crossval_jobs.time.sleep", sleep)
    for lock in locks:
        lock.__enter__()
    train_folds(held, [{}, {}], log=said.append, report_progress=lambda *_: None)
    assert said[-1] == "fold-1: training"


def test_what_is_said_of_folds_that_fail_and_that_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed(Ended):
        code = 3

    monkeypatch.setattr("bottega.analysis.crossval_jobs._Child", Failed)
    two = works(tmp_path, 2)
    checkpoint.write(two[1].run.checkpoints, step=6, files={}, progress={"step": 6, "total": 8}, fingerprint={})
    said: list[str] = []
    for trained, end in ((0, r"\(and 1 more\)$"), (1, r"\(and 1 more\); the other folds are saved$")):
        with pytest.raises(DependencyFailed, match=end):
            train_folds(two, [{}, {}], num_trained=trained, log=said.append, report_progress=lambda *_: None)
    assert said[:2] == ["fold-0: training", "fold-1: resumed at step 6"]


# From end to end.


@pytest.mark.slow
def test_any_number_of_jobs_gives_the_same_numbers(report: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """And two of them are compared by the test for folds."""
    alone = bottega.crossval("classify", tiny(folder), folds=FOLDS, jobs=1, out=tmp_path / "a")
    assert [run["metrics"] for run in alone["runs"]] == [run["metrics"] for run in report["runs"]]
    assert answers(tmp_path / "a") == answers(Path(report["folder"]))
    other = tiny(folder, **{"training.learning_rate": 0.3})
    bottega.crossval("classify", other, folds=FOLDS, jobs=2, out=tmp_path / "b")
    for split in (None, "validation"):
        (pair,) = compare([str(tmp_path / "a"), str(tmp_path / "b")], split=split)["pairs"]
        assert pair["test"].startswith(("corrected resampled", "Wilcoxon"))
        assert pair["paired_by"] == "fold"
        assert pair["n"] == FOLDS


@pytest.mark.slow
def test_language_and_pictures(tmp_path: Path) -> None:
    from small_media import image
    from small_run import SMALL

    words = {**SMALL, "data.train.path": str(data(tmp_path)), "output_dir": str(tmp_path), "name": "text"}
    text = bottega.crossval("language", {**words, "training.max_steps": 2, "data.test.split": 0.1}, folds=2, jobs=2)
    assert text["by"] == "fraction"
    assert {"loss", "bits_per_byte"} <= text["metrics"].keys()
    assert set(text["test"]["loss"]) == {"mean", "deviation"}
    assert "test, the same samples for all folds" in format_report(text)
    drawn = {**image(tmp_path), "training.max_steps": 2, "name": "drawn"}
    found = bottega.crossval("image", drawn, folds=2, jobs=2)
    assert [run["held_out"] for run in found["runs"]] == [18, 18]
    assert found["metric"] in found["metrics"]
    assert "pooled" not in found
