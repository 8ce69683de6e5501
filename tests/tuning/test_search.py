"""Searches with real trials: values, failures, pruning, kills, continuation, other machines and the best recipe."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from small_study import SPACE, TuneProcess, build_settings, find_processes, read_study, tune, wait_until

import bottega
from bottega.config.load import to_yaml
from bottega.core import checkpoint
from bottega.core.errors import UsageError
from bottega.core.rundir import RunDirectory
from bottega.metrics_log import read_metrics
from bottega.run.job_pool import Job
from bottega.tasks.recipes import load_recipe
from bottega.tuning.plan import StudyFailed, plan_study
from bottega.tuning.report import format_report
from bottega.tuning.space import parse_space
from bottega.tuning.study import Objective, Study, open_storage
from bottega.tuning.trial_run import TrialRun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune")


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return tune(folder)


def read_values(report: dict[str, Any]) -> dict[str, Any]:
    return {json.dumps(trial["keys"], sort_keys=True): trial["values"] for trial in report["trials"]}


def test_a_trial_is_a_run_whose_best_evaluation_is_its_value(report: dict[str, Any]) -> None:
    assert [trial["state"] for trial in report["trials"]] == ["complete"] * 3
    for trial in report["trials"]:
        rows = [row for row in read_metrics(Path(trial["run"]) / "metrics.jsonl") if row["kind"] == "eval"]
        assert trial["values"] == [max(row["accuracy"] for row in rows)]
        assert trial["curve"] == [[row["step"] / 8, row["accuracy"]] for row in rows]
        recipe = load_recipe([Path(trial["run"]) / "recipe.yaml"]).recipe
        assert recipe.training.learning_rate == trial["keys"]["training.learning_rate"]
        assert recipe.model.dropout == trial["keys"]["model.dropout"]
    assert report["best"]["values"] == max(trial["values"] for trial in report["trials"])


def test_best_recipe_trains_to_the_value_of_the_best_trial(report: dict[str, Any], folder: Path) -> None:
    run = bottega.train(report["files"]["recipe"], {"output_dir": str(folder / "again")})
    evaluations = [row for row in run.history() if row["kind"] == "eval"]
    assert [max(row["accuracy"] for row in evaluations)] == report["best"]["values"]


def test_files_and_summary(report: dict[str, Any]) -> None:
    assert set(report["files"]) == {"recipe", "history", "parallel", "slices"}
    assert all(Path(path).stat().st_size > 500 for path in report["files"].values())
    assert json.loads((Path(report["folder"]) / "study.json").read_text()) == report
    text = format_report(report)
    assert "3 trials (3 complete)" in text
    assert "--confirm 3 trains the best and the second best with other seeds" in text


def test_the_same_call_trains_nothing_again(report: dict[str, Any], folder: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in (folder / "study" / "trials").rglob("*") if path.is_file()}
    again = tune(folder)
    assert again["trials"] == report["trials"]
    assert {
        path: path.stat().st_mtime_ns for path in (folder / "study" / "trials").rglob("*") if path.is_file()
    } == files


def test_more_trials_continue_the_study(report: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """The fourth trial has the keys that a study of four trials from the start would give it."""
    study = tune(folder, trials=4)
    assert study["trials"][:3] == report["trials"]
    fresh = Study(
        open_storage(None, tmp_path),
        "s",
        dimensions=parse_space(SPACE),
        base={},
        objectives=[Objective("accuracy", "max")],
        method="random",
    )
    assert [fresh.ask(limit=9).keys for _ in range(4)] == [trial["keys"] for trial in study["trials"]]  # type: ignore[union-attr]


def test_another_recipe_in_the_same_folder_is_refused(report: dict[str, Any], folder: Path) -> None:
    with pytest.raises(
        UsageError, match=r"another recipe or space \(training.batch_size: 8 -> 16\); choose another study"
    ):
        tune(folder, changes={"training.batch_size": 16}, study=report["study"])
    with pytest.raises(UsageError, match="was started with another recipe or space"):
        tune(folder, space={"model.dropout": [0.1, 0.2]}, study=report["study"])
    with pytest.raises(UsageError, match=r"has the study .* choose another out"):  # its default name is another one
        tune(folder, changes={"training.batch_size": 16})
    assert read_study(folder)["trials"][:3] == report["trials"]


def test_a_diverged_trial_fails_with_its_reason_and_never_wins(tmp_path: Path) -> None:
    space = {"training.learning_rate": [1e-2, 1e38]}
    report = tune(tmp_path, space=space, method="grid", trials=None, metric="loss")
    good, bad = report["trials"]
    assert (good["state"], bad["state"]) == ("complete", "failed")
    assert bad["values"] is None
    assert bad["reason"].startswith("diverged: ")
    assert bad["lines"]
    assert report["best"]["number"] == 0
    assert "trial 1 failed: diverged" in format_report(report)


def test_a_study_without_a_good_trial_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StudyFailed, match=r"every trial of .* failed; the first: diverged"):
        tune(tmp_path, space={"training.learning_rate": [1e38]}, method="grid", trials=None)


def test_a_finished_run_needs_its_last_evaluation_and_the_same_recipe(report: dict[str, Any], folder: Path) -> None:
    """A signal may stop a trial between its last step and its last evaluation, which the next start repeats."""
    trial = report["trials"][0]
    run = RunDirectory(Path(trial["run"]))
    recipe = load_recipe([run.recipe]).recipe
    finished = TrialRun(0, {}, recipe, Job(run, folder / "unused.yaml"))
    assert finished.is_finished()
    assert not TrialRun(0, {}, recipe.model_copy(update={"seed": 5}), finished.job).is_finished()
    copied = RunDirectory(folder / "copied")
    progress = {**checkpoint.read_progress(checkpoint.find_newest(run.checkpoints)), "evaluated": 4}  # type: ignore[arg-type]
    checkpoint.write(copied.checkpoints, step=8, files={}, progress=progress, fingerprint={})
    copied.recipe.write_text(run.recipe.read_text())
    assert not TrialRun(0, {}, recipe, Job(copied, folder / "unused.yaml")).is_finished()


def test_fresh_renames_the_study(report: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "study", tmp_path / "study")
    space = {"model.dropout": [0.1]}
    again = tune(tmp_path, space=space, method="grid", trials=None, fresh=True)
    assert again["space"] == {"model.dropout": "[0.1]"}
    (old,) = (path for path in tmp_path.iterdir() if path.name.startswith("study") and path.name != "study")
    assert json.loads((old / "study.json").read_text())["trials"][:3] == report["trials"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(UsageError, match="exists and is not a study"):
        tune(tmp_path, space=space, method="grid", trials=None, fresh=True, out=tmp_path / "other")


@pytest.mark.slow
def test_a_finite_space_ends_the_search_before_its_time(tmp_path: Path) -> None:
    report = tune(tmp_path, space={"model.dropout": [0.0, 0.5]}, trials=None, timeout=3600, jobs=1)
    assert report["finished"]
    assert {trial["keys"]["model.dropout"] for trial in report["trials"]} == {0.0, 0.5}


@pytest.mark.slow
def test_the_time_limit_saves_trials_and_the_same_call_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the search jumps past the limit when the trial has logged some steps more than before."""
    changes = {"training.max_steps": 10**6, "evaluation.every": 10**5, "checkpoint.every": None}
    metrics = tmp_path / "study" / "trials" / "trial-00000" / "metrics.jsonl"
    limit = 2000
    clock = time.monotonic

    def read_clock() -> float:
        return clock() + (10**5 if metrics.is_file() and metrics.stat().st_size > limit else 0.0)

    monkeypatch.setattr("bottega.tuning.search.time.monotonic", read_clock)
    for _ in range(2):
        report = tune(tmp_path, changes=changes, trials=1, timeout="1 h", jobs=1)
        assert not report["finished"]
        (trial,) = report["trials"]
        assert trial["state"] == "running"
        assert (metrics.parent / "checkpoints" / "last").exists()
        limit = metrics.stat().st_size + 2000
    steps = [row["step"] for row in read_metrics(metrics) if row["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_a_failed_trial_of_two_processes_has_the_reason_of_its_ranks(tmp_path: Path) -> None:
    changes = {"distributed.processes": 2}
    with pytest.raises(StudyFailed, match="the first: diverged: ") as caught:
        tune(tmp_path, space={"training.learning_rate": [1e38]}, method="grid", trials=None, changes=changes, jobs=1)
    assert caught.value.code == 6


def test_changed_data_is_refused(report: dict[str, Any], folder: Path) -> None:
    settings = build_settings(folder)
    data = Path(settings["data.train.path"])
    text = data.read_text()
    try:
        data.write_text("".join(text.splitlines(keepends=True)[:60]))
        with pytest.raises(UsageError, match=r"started with another recipe or space \(data: \w+ -> \w+\)"):
            bottega.tune("classify", settings, space=SPACE, method="random", trials=9, out=folder / "study")
    finally:
        data.write_text(text)


@pytest.mark.slow
def test_two_folders_share_a_study_in_a_database(tmp_path: Path) -> None:
    """As two machines do: neither takes over trials of the other, and none is trained twice."""
    words = ["--storage", f"sqlite:///{tmp_path}/tune.db", "--study", "shared", "--trials", "6"]
    data = build_settings(tmp_path)["data.train.path"]
    commands = [
        TuneProcess(tmp_path / name, *words, changes={"data.train.path": data, "output_dir": "runs"})
        for name in ("a", "b")
    ]
    results = [command.finish() for command in commands]
    assert [code for code, _ in results] == [0, 0], results
    runs = [sorted(path.name for path in (tmp_path / name / "study" / "trials").iterdir()) for name in ("a", "b")]
    assert not set(runs[0]) & set(runs[1])
    assert sorted(runs[0] + runs[1]) == [f"trial-{number:05d}" for number in range(6)]


@pytest.mark.slow
def test_equal_keys_are_trained_once(tmp_path: Path) -> None:
    report = tune(tmp_path, space={"model.dropout": [0.0, 0.5]}, trials=5, jobs=1)  # draws 0.0 three times, then 0.5
    copies = [trial for trial in report["trials"] if trial["same_as"] is not None]
    assert copies, "the third draw of two values repeats one"
    assert len(list((tmp_path / "study" / "trials").iterdir())) == len(report["trials"]) - len(copies)
    assert f"{len(copies)} with the keys and result of another" in format_report(report)
    for copy in copies:
        original = report["trials"][copy["same_as"]]
        assert (copy["keys"], copy["values"], copy["curve"]) == (
            original["keys"],
            original["values"],
            original["curve"],
        )


@pytest.mark.slow
def test_pruned_trials_are_ended_early_and_saved(tmp_path: Path) -> None:
    """A learning rate of 0.1 % of the right one is pruned against five good trials."""
    changes = {"training.max_steps": 400, "evaluation.every": 20, "checkpoint.every": None}
    space = {"training.learning_rate": [1e-2, 1.1e-2, 0.9e-2, 1.2e-2, 0.8e-2, 1e-5]}
    report = tune(
        tmp_path, space=space, method="grid", trials=None, changes=changes, pruner="median", jobs=1, metric="loss"
    )
    assert [trial["state"] for trial in report["trials"]] == ["complete"] * 5 + ["pruned"]
    pruned = report["trials"][-1]
    assert pruned["step"] < 400
    assert (Path(pruned["run"]) / "checkpoints" / "last").exists()
    assert report["steps"]["trained"] < report["steps"]["full"]
    assert "pruning saved" in format_report(report)


@pytest.mark.slow
def test_trade_off_between_accuracy_and_size(tmp_path: Path) -> None:
    space = {"model.num_filters": [2, 4, 16]}
    report = tune(tmp_path, space=space, method="grid", trials=None, metric="accuracy,-parameters")
    assert [metric["mode"] for metric in report["metrics"]] == ["max", "min"]
    sizes = [trial["values"][1] for trial in report["trials"]]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3
    assert 0 in report["pareto"]
    assert Path(report["files"]["pareto"]).is_file()


@pytest.mark.slow
def test_best_is_confirmed_with_other_seeds(tmp_path: Path) -> None:
    report = tune(
        tmp_path, space={"training.learning_rate": [1e-5, 3e-2]}, method="grid", trials=None, confirm=2, metric="loss"
    )
    groups = {group["name"]: group for group in report["confirmation"]["groups"]}
    assert set(groups) == {"base", "second", "best"}
    assert {run["seed"] for run in groups["best"]["runs"]} == {1, 2}
    assert report["summary"].startswith("with 2 new seeds each, loss: ")


# Kills.


@pytest.mark.slow
def test_trials_of_a_killed_command_save_and_go_on(tmp_path: Path) -> None:
    """Nothing of the command can run after SIGKILL; its trials are told by the kernel."""
    changes = {"training.max_steps": 600, "evaluation.every": 100, "checkpoint.every": None}
    first = TuneProcess(tmp_path, "--trials", "2", changes=changes)
    metrics = [tmp_path / "study" / "trials" / f"trial-{number:05d}" / "metrics.jsonl" for number in range(2)]
    wait_until(lambda: all(path.is_file() and path.stat().st_size > 2000 for path in metrics), what="both trials")
    first.kill()
    wait_until(lambda: not find_processes(tmp_path), what="the trials to end")
    trained = [json.loads(path.read_text().splitlines()[-1])["step"] for path in metrics]
    assert all(0 < step < 600 for step in trained), trained
    assert all((path.parent / "checkpoints" / "last").exists() for path in metrics)
    code, output = TuneProcess(tmp_path, "--trials", "2", changes=changes).finish()
    assert code == 0, output
    assert "resumed at step" in output
    report = read_study(tmp_path)
    whole = tune(tmp_path / "whole", changes=changes, trials=2)
    assert read_values(report) == read_values(whole)
    assert not find_processes(tmp_path)


@pytest.mark.slow
def test_a_stopped_command_saves_its_trials_and_says_so(tmp_path: Path) -> None:
    changes = {"training.max_steps": 5000, "evaluation.every": 100, "checkpoint.every": None}
    command = TuneProcess(tmp_path, "--trials", "2", changes=changes)
    metrics = tmp_path / "study" / "trials" / "trial-00000" / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.stat().st_size > 500, what="the first trial")
    command.process.send_signal(signal.SIGINT)
    code, output = command.finish()
    assert code == 130, output
    assert "the same command continues the study" in output
    assert not find_processes(tmp_path)
    assert (metrics.parent / "checkpoints" / "last").exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)  # ends a hang only: about two minutes on two idle cores, several beside other tests
def test_twenty_kills_lose_no_finished_trial_and_repeat_none(tmp_path: Path) -> None:
    """Commands and trials are killed at random; at the end every trial has ended once, with the value of an undisturbed run.

    Most kills come after a random number of logged steps, so that a slow machine is killed at the same progress and ends; the
    others come at any time, to hit starts.
    """
    rng = random.Random(0)
    changes = {"training.max_steps": 150, "evaluation.every": 50, "checkpoint.every": 50}
    num_trials, kills = 10, 0
    finished: dict[int, Any] = {}
    killed_trials = 0
    while True:
        command = TuneProcess(tmp_path, "--trials", str(num_trials), changes=changes)
        if kills < 20:
            if rng.random() < 0.3:
                time.sleep(rng.uniform(0.5, 4.0))
            else:
                wait_for_steps(command, tmp_path, count_logged_steps(tmp_path) + rng.randint(1, 150))
            children = command.list_trial_processes()
            if children and killed_trials < 3 and rng.random() < 0.3:
                killed_trials += 1
                rng.choice(children).kill()
                kills += 1
                time.sleep(0.5)
            kills += command.process.poll() is None  # a command that has ended by itself counts as no kill
            command.kill()  # closes its output also when it has ended
        else:
            command.finish()
        wait_until(lambda: not find_processes(tmp_path), what="left-over trials to end")
        for trial in list_journal_trials(tmp_path):
            if trial["state"] != "running":
                assert finished.setdefault(trial["number"], trial) == trial
        if command.process.returncode == 0:
            if kills >= 20:
                break
            num_trials += 2
    report = read_study(tmp_path)
    assert [trial["number"] for trial in report["trials"]] == list(range(num_trials))
    assert {trial["state"] for trial in report["trials"]} <= {"complete", "failed"}
    assert sum(trial["state"] == "failed" for trial in report["trials"]) <= killed_trials
    for trial in report["trials"]:
        if trial["state"] == "complete" and trial["same_as"] is None:
            steps = [
                row["step"] for row in read_metrics(Path(trial["run"]) / "metrics.jsonl") if row["kind"] == "train"
            ]
            assert steps == list(range(1, 151)), "a step was trained twice or not at all"
    complete = [trial for trial in report["trials"] if trial["state"] == "complete"]
    for trial in rng.sample(complete, 3):
        undisturbed = bottega.train(
            "classify", {**build_settings(tmp_path, **changes), **trial["keys"], "output_dir": str(tmp_path / "u")}
        )
        values = [row["accuracy"] for row in undisturbed.history() if row["kind"] == "eval"]
        assert trial["values"] == [max(values)]


def wait_for_steps(command: TuneProcess, folder: Path, num_steps: int) -> None:
    """Wait until all trials together have logged `num_steps` lines, or the command has ended."""
    wait_until(
        lambda: command.process.poll() is not None or count_logged_steps(folder) >= num_steps, what="steps of trials"
    )


def count_logged_steps(folder: Path) -> int:
    """Return the number of lines that all trials have logged so far."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("study/trials/*/metrics.jsonl"))


def list_journal_trials(folder: Path) -> list[dict[str, Any]]:
    """Return number, state and values of the trials in the storage; none before there is a study."""
    owner = folder / "study" / "owner.json"
    if not owner.is_file() or not (folder / "study" / "journal.jsonl").is_file():
        return []
    study = Study(
        open_storage(None, folder / "study"),
        json.loads(owner.read_text())["study"],
        dimensions=parse_space(SPACE),
        base={},
        objectives=[Objective("accuracy", "max")],
    )
    return [{"number": trial.number, "state": trial.state, "values": trial.values} for trial in study.list_trials()]


def test_recipes_of_trials_in_a_folder_with_any_name(tmp_path: Path) -> None:
    sources = ["classify", build_settings(tmp_path)]
    folder = tmp_path / "café 'x' \"y\" \\ \x1b]0;"
    plan = plan_study(sources, [], flags={}, space=SPACE, out=folder)
    recipe = plan.build_trial_recipe({"model.dropout": 0.2}, name="trial-00000")
    assert recipe.output_dir == str(folder / "trials")


def test_a_study_without_matplotlib_has_a_note(
    report: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    again = tune(folder)
    assert set(again["files"]) == {"recipe"}
    assert any("plots need matplotlib" in note for note in again["notes"])


def test_recipe_file_with_a_tune_section(tmp_path: Path) -> None:
    """Training ignores the section, and the name of a run does not depend on it."""
    values = build_settings(tmp_path)
    with_section = load_recipe(
        ["classify", {**values, "tune": {"trials": 4, "space": {"model": {"dropout": [0, 0.1]}}}}]
    ).recipe
    without = load_recipe(["classify", values]).recipe
    assert with_section.run_name() == without.run_name()
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(with_section))
    report = bottega.tune(path, trials=1, out=tmp_path / "study", jobs=1)
    assert report["space"] == {"model.dropout": "[0, 0.1]"}
    assert len(report["trials"]) == 1


@pytest.mark.slow
def test_a_full_disk_in_a_trial_fails_that_trial_only(tmp_path: Path) -> None:
    """The second of three trials has a small disk of its own."""
    small_disk = tmp_path / "study" / "trials" / "trial-00001"
    small_disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small_disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small disk, which needs root")
    try:
        report = tune(tmp_path, jobs=1, changes={"model.embed_size": 64, "model.num_filters": 64})
    finally:
        subprocess.run(["umount", "-l", str(small_disk)], check=True)
    assert [trial["state"] for trial in report["trials"]] == ["complete", "failed", "complete"]
    assert report["trials"][1]["reason"].startswith("environment: ")
    assert "full" in report["trials"][1]["reason"] or "space" in report["trials"][1]["reason"]


@pytest.mark.slow
def test_a_trial_of_two_processes(tmp_path: Path) -> None:
    report = tune(tmp_path, trials=1, jobs=1, changes={"distributed.processes": 2})
    (trial,) = report["trials"]
    assert trial["state"] == "complete", trial["reason"]
    assert json.loads((Path(trial["run"]) / "environment.json").read_text())["world"] == 2
