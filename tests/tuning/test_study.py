"""Studies in Optuna's storage: proposals that depend on seed and number alone, many processes, kills, other recipes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError
from bottega.tuning.journal import LockedJournal
from bottega.tuning.space import build_grid, parse_space
from bottega.tuning.study import Objective, Study, open_storage

DIMENSIONS = parse_space(
    {
        "lr": "log(1e-5, 1e-1)",
        "model.dropout": "uniform(0, 0.5)",
        "training.optimizer.name": "[sgd, adamw]",
        "training.optimizer.momentum": "uniform(0.5, 0.99) if training.optimizer.name=sgd",
        "model.filter_sizes": [[3, 4], [3, 4, 5]],
        "model.num_layers": "int(1, 6)",
    }
)
WORKERS = 8


def score(keys: dict[str, Any]) -> float:
    """A smooth function with its maximum at a learning rate of 1e-3 and a dropout of 0.1."""
    return -((math.log10(keys["training.learning_rate"]) + 3) ** 2) - (keys["model.dropout"] - 0.1) ** 2


def make_study(folder: Path, *, method: str = "tpe", storage: str | None = None, **options: Any) -> Study:
    grid = build_grid(DISCRETE, {}) if method == "grid" else ()
    settings: dict[str, Any] = {
        "dimensions": DISCRETE if method == "grid" else DIMENSIONS,
        "base": {},
        "objectives": [Objective("accuracy", "max")],
        "method": method,
        "grid": grid,
    }
    return Study(open_storage(storage, folder), "s", **(settings | options))


DISCRETE = parse_space({"lr": "[1e-4, 1e-3, 1e-2]", "model.dropout": "[0.0, 0.1]"})


def run_trials(study: Study, count: int) -> list[dict[str, Any]]:
    proposals = []
    for _ in range(count):
        record = study.ask(limit=10**6)
        assert record is not None
        proposals.append(record.keys)
        study.finish(record.number, [score(record.keys)])
    return proposals


@pytest.mark.parametrize("method", ["random", "tpe", "cmaes", "grid"])
def test_a_reopened_study_proposes_what_an_uninterrupted_one_does(tmp_path: Path, method: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = run_trials(make_study(tmp_path / "a", method=method), 14 if method != "grid" else 6)
    interrupted = run_trials(make_study(tmp_path / "b", method=method), 3)
    for _ in range(len(whole) - 3):
        interrupted += run_trials(make_study(tmp_path / "b", method=method), 1)
    assert interrupted == whole
    assert len({json.dumps(keys, sort_keys=True) for keys in whole}) == len(whole)


def test_values_of_all_kinds_come_back_as_they_were_given(tmp_path: Path) -> None:
    for keys in run_trials(make_study(tmp_path, method="random"), 12):
        assert keys["model.filter_sizes"] in ([3, 4], [3, 4, 5])
        assert isinstance(keys["model.num_layers"], int)
        assert ("training.optimizer.momentum" in keys) == (keys["training.optimizer.name"] == "sgd")


def test_cma_es_stores_no_pickle_and_learns(tmp_path: Path) -> None:
    study = make_study(tmp_path, method="cmaes", dimensions=DIMENSIONS[:2])
    values = [score(keys) for keys in run_trials(study, 60)]
    assert max(values[:10]) < max(values[-20:])
    text = (tmp_path / "journal.jsonl").read_text()
    assert "optimizer" not in text.replace("training.optimizer", "")
    assert "generation" in text


def test_limit_counts_trials_of_all_processes(tmp_path: Path) -> None:
    first, second = make_study(tmp_path), make_study(tmp_path)
    numbers = [study.ask(limit=3).number for study in (first, second, first)]  # type: ignore[union-attr]
    assert numbers == [0, 1, 2]
    assert first.ask(limit=3) is None
    assert second.ask(limit=3) is None
    assert second.ask(limit=4).number == 3  # type: ignore[union-attr]


def test_a_grid_has_no_gap_after_trials_beyond_the_limit(tmp_path: Path) -> None:
    from optuna.trial import TrialState

    study = make_study(tmp_path, method="grid")
    keys = [study.ask(limit=2).keys for _ in range(2)]  # type: ignore[union-attr]
    extra = study._study.ask()  # another machine took it at the same moment, and found the limit reached
    extra.set_user_attr("over_limit", True)
    study._study.tell(extra, state=TrialState.FAIL)
    keys += [study.ask(limit=6).keys for _ in range(4)]  # type: ignore[union-attr]
    assert keys == build_grid(DISCRETE, {})


def test_a_trial_proposed_in_part_is_completed(tmp_path: Path) -> None:
    """The process died between the creation of the trial and its last key."""
    study = make_study(tmp_path, method="random")
    (tmp_path / "whole").mkdir()
    expected = run_trials(make_study(tmp_path / "whole", method="random"), 1)
    study._study.ask()
    assert not study.get_trial(0).attributes.get("proposed")
    assert make_study(tmp_path, method="random").complete_proposal(0).keys == expected[0]


def test_a_failed_trial_has_no_value_and_its_reason(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    record = study.ask(limit=1)
    assert record is not None
    study.fail(record.number, "out of memory: 2 GiB")
    (trial,) = make_study(tmp_path).list_trials()
    assert (trial.state, trial.values, trial.attributes["reason"]) == ("failed", None, "out of memory: 2 GiB")


def test_another_recipe_under_the_same_name_is_refused(tmp_path: Path) -> None:
    identity = {"recipe": {"training.max_steps": 10}, "space": {"lr": "log(1, 2)"}}
    make_study(tmp_path, identity=identity)
    make_study(tmp_path, identity=identity)
    with pytest.raises(
        UsageError, match=r"study s was started with another recipe or space \(training.max_steps: 10 -> 20\)"
    ):
        make_study(tmp_path, identity={**identity, "recipe": {"training.max_steps": 20}})


def test_pruners_end_the_worse_half(tmp_path: Path) -> None:
    study = make_study(tmp_path, pruner="median")
    for number in range(8):
        record = study.ask(limit=100)
        assert record is not None
        for progress in (100, 200, 300):
            is_bad = study.report(record.number, progress, -number)
            assert is_bad == (number >= 5), (number, progress)
        study.finish(record.number, [-float(number)])


def test_a_cut_line_of_the_journal_is_removed(tmp_path: Path) -> None:
    run_trials(make_study(tmp_path), 2)
    journal = tmp_path / "journal.jsonl"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":4,"worker')  # a process was killed while it wrote
    assert len(make_study(tmp_path).list_trials()) == 2
    run_trials(make_study(tmp_path), 1)
    assert len(make_study(tmp_path).list_trials()) == 3
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_a_damaged_line_of_the_journal_is_named(tmp_path: Path) -> None:
    run_trials(make_study(tmp_path), 1)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*lines[:2], "garbage\n", *lines[2:]]))
    with pytest.raises(CheckpointError, match=r"journal.jsonl, line 3: damaged; restore the file"):
        make_study(tmp_path)


def test_lists_are_points_of_a_grid(tmp_path: Path) -> None:
    dimensions = parse_space({"model.filter_sizes": [[3, 4], [3, 4, 5]]})
    grid = build_grid(dimensions, {})
    study = make_study(tmp_path, method="grid", dimensions=dimensions, grid=grid)
    assert [study.ask(limit=2).keys for _ in range(2)] == grid  # type: ignore[union-attr]


def test_a_full_disk_leaves_the_journal_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = LockedJournal(tmp_path / "journal.jsonl")
    journal.append_logs([{"a": 1}])
    monkeypatch.setattr("os.pwrite", lambda handle, data, at: os.write(handle, data[:3]))
    with pytest.raises(EnvironmentProblem, match="the disk is full"):
        journal.append_logs([{"b": 2}])
    monkeypatch.undo()
    journal.append_logs([{"c": 3}])
    assert list(LockedJournal(tmp_path / "journal.jsonl").read_logs(0)) == [{"a": 1}, {"c": 3}]


WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_study import make_study, run_trials, score
study = make_study(Path(sys.argv[1]), method="random", storage=sys.argv[2] or None)
while (record := study.ask(limit=40)) is not None:
    study.report(record.number, 500, score(record.keys))
    study.finish(record.number, [score(record.keys)])
"""


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
def test_eight_processes_share_one_study(tmp_path: Path, kind: str) -> None:
    storage = f"sqlite:///{tmp_path}/tune.db" if kind == "sqlite" else ""
    command = [sys.executable, "-c", WORKER, str(tmp_path), storage, str(Path(__file__).parent)]
    workers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(WORKERS)]
    errors = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * WORKERS, errors
    assert not any("Error" in error for error in errors), errors
    trials = [
        trial
        for trial in make_study(tmp_path, method="random", storage=storage or None).list_trials()
        if not trial.is_over_limit
    ]
    assert [trial.state for trial in trials] == ["complete"] * 40
    assert len({json.dumps(trial.keys) for trial in trials}) == 40


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("tune.db", UsageError, "expected a URL"),
        ("sqlite:////nowhere/at/all/tune.db", EnvironmentProblem, "cannot connect"),
        ("nosuch://user:secret@host/db", UsageError, "not a database URL"),
        ("mysql://user:secret@127.0.0.1/db", EnvironmentProblem, "the driver of this database is not installed"),
    ],
)
def test_unreachable_storage_is_one_line_without_the_password(
    tmp_path: Path, url: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        open_storage(url, tmp_path)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pareto_front_of_two_metrics(tmp_path: Path) -> None:
    study = make_study(tmp_path, objectives=[Objective("accuracy", "max"), Objective("parameters", "min")])
    for values in ((0.9, 100.0), (0.8, 50.0), (0.7, 80.0), (0.95, 200.0)):
        record = study.ask(limit=10)
        assert record is not None
        assert not study.report(record.number, 500, values[0])
        study.finish(record.number, values)
    assert study.find_pareto_front() == [0, 1, 3]
