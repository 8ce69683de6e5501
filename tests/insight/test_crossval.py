"""`bottega crossval` from the split to the table: who is held out when, what each fold has learnt from, and the arithmetic."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

import bottega
from bottega.core import checkpoint
from bottega.core.errors import UsageError
from bottega.insight.compare import compare
from bottega.insight.fold_plan import is_trained, plan_folds, splitting
from bottega.insight.fold_runs import places
from bottega.insight.fold_table import pooled, show, summary
from bottega.preparation import prepare_recipe
from bottega.schema.load import load_recipe, to_yaml
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
        codec = root / f"fold-{fold}" / "codec"
        vocabulary = json.loads((codec / "tokenizer.json").read_text())["model"]["vocab"]
        own = {table[row]["text"].split()[-1]: row in held for row in range(len(table))}
        assert {word for word, is_held in own.items() if not is_held} <= vocabulary.keys()
        assert not {word for word, is_held in own.items() if is_held} & vocabulary.keys()
        names = json.loads((codec / "classes.json").read_text())
        learnt = Counter(row["label"] for number, row in enumerate(table) if number not in held)
        weights = np.array(json.loads((codec / "weights.json").read_text()))
        assert weights * [learnt[name] for name in names] == pytest.approx(
            [weights[0] * learnt[names[0]]] * len(names), rel=1e-6
        )


@pytest.mark.parametrize("by", ["group", "fraction", "hash"])
def test_other_ways_to_cut(folder: Path, by: str) -> None:
    """Each row in one held-out part, and with groups all rows of a user in the same one."""
    recipe = recipe_of(tiny(folder))
    split, _ = splitting(recipe, folds=3, by=by, field="user" if by == "group" else None)
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
    split, _ = splitting(recipe, folds=2, by=None, field=None)
    found = [(fold.recipe.data.split, fold.recipe.seed) for fold in plan_folds(recipe, split, repeats=2, out=None)]
    assert [(one.seed, one.fold) for one, _ in found] == [(7, 0), (7, 1), (8, 0), (8, 1)]
    assert {seed for _, seed in found} == {recipe.seed}


def test_how_rows_are_shared_out_unless_one_says(folder: Path) -> None:
    def by(values: dict[str, Any], source: str = "classify", **asked: Any) -> tuple[str, str | None, int | None]:
        found, _ = splitting(recipe_of(values, source), **{"folds": None, "by": None, "field": None, **asked})
        return found.by, found.field, found.folds

    values = tiny(folder)
    assert by(values) == ("stratified", None, 5)
    assert by({**values, "data.multi_label": True, "loss": None}) == ("fraction", None, 5)
    assert by({**values, "data.split.by": "fraction", "data.split.folds": 7}) == ("fraction", None, 7)
    assert by(values, field="user", folds=4) == ("group", "user", 4)
    assert by({"data.train.path": str(data(folder)), "training.max_steps": 1}, "language") == ("fraction", None, 5)


def test_held_out_data_of_its_own_is_left_aside_and_said(folder: Path) -> None:
    own = {"data.validation": {"path": "dev.jsonl"}, "data.test": {"path": "test.jsonl"}}
    recipe = recipe_of({**tiny(folder), "data.validation.split": None, **own})
    split, notes = splitting(recipe, folds=2, by=None, field=None)
    (fold, _) = plan_folds(recipe, split, repeats=1, out=None)
    assert "data.validation (dev.jsonl) is not used" in notes[0]
    assert fold.recipe.data.validation is None
    assert fold.recipe.data.test.path == "test.jsonl"


# What they say together.


def test_the_interval_by_hand() -> None:
    """Deviation 0.0005^(1/2); times (1/5 + 1/4)^(1/2) that is 0.015, times (1/5)^(1/2) it is 0.01; t of 4 is 2.776445."""
    found = summary([0.80, 0.82, 0.78, 0.84, 0.81], folds=5)
    assert (found["mean"], found["deviation"]) == pytest.approx((0.81, 0.0005**0.5))
    assert found["interval"]["low"] == pytest.approx(0.81 - 2.776445 * 0.015, abs=1e-7)
    assert found["interval"]["high"] == pytest.approx(0.81 + 2.776445 * 0.015, abs=1e-7)
    assert found["uncorrected"]["high"] == pytest.approx(0.81 + 2.776445 * 0.01, abs=1e-7)
    again = summary([0.80, 0.82, 0.78, 0.84, 0.81] * 2, folds=5)  # two repeats: n grows, the share of a fold does not
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
    text = show(report)
    assert (
        f"mean{'':21}{np.mean(values):>8.4f}".split() == next(r for r in text.splitlines() if "mean" in r).split()[:2]
    )
    assert "corrected as Nadeau and Bengio (2003) do: folds share training data" in text
    assert "(1/3 + 1/2), not 1/3" in text


def test_answers_of_several_classes_are_pooled() -> None:
    rows = [
        {"label": ["a", "b"], "predicted": ["a", "b"]},
        {"label": [], "predicted": ["b"]},
        {"label": ["a"], "predicted": []},
    ]
    found, matrix = pooled(rows, ("a", "b"))
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
    assert not any("flatters" in note for note in found["notes"])
    bottega.crossval("classify", tiny(folder), folds=FOLDS)  # as the others expect it


def test_another_recipe_is_refused_until_all_is_set_aside(report: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UsageError, match=r"another recipe .*learning_rate.*say fresh"):
        bottega.crossval("classify", tiny(folder, **{"training.learning_rate": 0.5}), folds=FOLDS)
    with pytest.raises(UsageError, match=r"another recipe \(.*data.split.folds: 3 -> 4"):
        bottega.crossval("classify", tiny(folder), folds=4)


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
    split, _ = splitting(recipe, folds=2, by=None, field=None)
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
    assert places("cpu", 2, wanted=5) == [{}, {}]  # what somebody has set is left alone
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert places("cpu", 2, wanted=5) == [{"OMP_NUM_THREADS": "4"}] * 2
    assert len(places("cpu", 7, wanted=5)) == 5
    monkeypatch.setattr("bottega.insight.fold_runs.ROOM", 1)
    assert len(places("cpu", "auto", wanted=9)) == 4
    monkeypatch.setattr("bottega.insight.fold_runs.ROOM", 1 << 60)
    assert len(places("cpu", "auto", wanted=9)) == 1
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places("cuda", "auto", wanted=9)] == ["4", "6"]
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places("auto", 3, wanted=9)] == ["4", "6", "4"]


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
    assert "test, the same samples for all folds" in show(text)
    drawn = {**image(tmp_path), "training.max_steps": 2, "name": "drawn"}
    found = bottega.crossval("image", drawn, folds=2, jobs=2)
    assert [run["held_out"] for run in found["runs"]] == [18, 18]
    assert found["metric"] in found["metrics"]
    assert "pooled" not in found
