"""Population-based training: exploit and explore, continuation after a kill, and the winner trained again bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optuna")

from small_study import TuneProcess, find_processes, read_study, tune, wait_until

from bottega.core.errors import UsageError
from bottega.tuning.population import CHANGEABLE_KEYS, draw_value, perturb_value
from bottega.tuning.space import parse_space
from small_run import differing_tensors, read_tensors

OPTIONS: dict[str, Any] = {"method": "pbt", "trials": None, "space": {"training.learning_rate": "log(1e-4, 1e-1)"}}
CHANGES: dict[str, Any] = {"tune.population": 3, "tune.every": "50%", "tune.exploit": 0.34, "evaluation.metric": "loss"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pbt")


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return tune(folder, changes=CHANGES, verify=True, **OPTIONS)


def test_worst_member_copies_the_best_and_perturbs_its_keys(report: dict[str, Any]) -> None:
    segments = {(segment["generation"], segment["member"]): segment for segment in report["segments"]}
    assert len(segments) == 6
    first = [segments[0, member] for member in range(3)]
    ranked = sorted(first, key=lambda segment: segment["value"])
    best, middle, worst = (segment["member"] for segment in ranked)
    copied = segments[1, worst]
    assert copied["parent"] == f"gen-000-member-{best:02d}"
    key = "training.learning_rate"
    (dimension,) = parse_space(OPTIONS["space"])
    rng = np.random.default_rng([0, 1, worst])
    rng.integers(1)  # the choice among the best, of which there is one
    assert copied["keys"][key] == perturb_value(dimension, segments[0, best]["keys"][key], rng)
    for member in (best, middle):
        assert segments[1, member]["parent"] == f"gen-000-member-{member:02d}"
        assert segments[1, member]["keys"] == segments[0, member]["keys"]


def test_lineage_of_the_winner_replays_bit_for_bit(report: dict[str, Any]) -> None:
    assert report["verified"] is True
    lineage = report["lineage"]
    assert [segment["step"] for segment in lineage] == [4, 8]
    assert lineage[0]["parent"] is None
    assert lineage[1]["parent"] == Path(lineage[0]["run"]).name
    winner = Path(report["best"]["run"])
    assert report["best"]["values"] == [min(segment["value"] for segment in report["segments"] if segment["step"] == 8)]
    replayed = winner.parent.parent / "replay" / winner.name
    assert not differing_tensors(read_tensors(winner), read_tensors(replayed))


def test_the_same_call_trains_nothing_again(report: dict[str, Any], folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (folder / "study" / "trials").rglob("metrics.jsonl")}
    again = tune(folder, changes=CHANGES, **OPTIONS)
    assert again["segments"] == report["segments"]
    assert {path: path.stat().st_mtime_ns for path in (folder / "study" / "trials").rglob("metrics.jsonl")} == before


def test_a_population_of_another_recipe_is_refused(report: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UsageError, match="population of another recipe or space"):
        tune(folder, changes={**CHANGES, "training.batch_size": 16}, study=report["study"], **OPTIONS)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"space": {"model.num_filters": [4, 8]}}, "space model.num_filters: cannot change within a run"),
        ({}, {"trials": 4}, "the number of members of pbt is tune.population"),
        ({}, {"pruner": "median"}, "pbt replaces bad members instead"),
        ({}, {"metric": "accuracy,-parameters"}, "pbt optimises one metric"),
        ({"training.max_steps": None, "training.num_epochs": 2}, {}, "pbt needs a length in steps"),
        ({"tune.every": 8}, {}, "leaves no interval within 8 steps"),
        ({"training.early_stopping": {"patience": 2}}, {}, "pbt compares members at the same step"),
        ({}, {"confirm": 2}, "the winner of pbt has a schedule of keys"),
        ({}, {"storage": "sqlite:///tune.db"}, "pbt keeps its state in the folder"),
    ],
)
def test_bad_options_are_refused_before_the_first_member(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        tune(tmp_path, changes={**CHANGES, **changes}, **{**OPTIONS, **options})
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_a_killed_population_continues_to_the_same_winner(tmp_path: Path) -> None:
    changes = {**CHANGES, "training.max_steps": 400, "evaluation.every": 100, "tune.every": 100}
    words = ["--method", "pbt"]
    command = TuneProcess(tmp_path, *words, changes=changes)
    state = tmp_path / "study" / "population.json"
    wait_until(lambda: state.is_file() and len(json.loads(state.read_text())["segments"]) >= 4, what="four segments")
    command.kill()
    wait_until(lambda: not find_processes(tmp_path), what="the members to end")
    code, output = TuneProcess(tmp_path, *words, changes=changes).finish()
    assert code == 0, output
    TuneProcess(tmp_path / "whole", *words, changes=changes).finish()
    killed, whole = read_study(tmp_path), read_study(tmp_path / "whole")
    for key in ("keys", "values", "curve", "number"):
        assert killed["best"][key] == whole["best"][key]
    assert not differing_tensors(read_tensors(Path(killed["best"]["run"])), read_tensors(Path(whole["best"]["run"])))


@pytest.mark.slow
def test_every_changeable_key_of_a_task_may_change_at_a_resume(tmp_path: Path) -> None:
    """A run resumed with another value of the key trains on, from the same checkpoint."""
    from small_study import build_settings

    import bottega
    from bottega.run.train import train_command
    from bottega.tasks.recipes import load_recipe
    from bottega.tuning.plan import get_value

    settings = build_settings(tmp_path, name="base")
    base = bottega.train("classify", settings)
    recipe = load_recipe(["classify", settings]).recipe
    values = {"training.optimizer.betas": [0.8, 0.9], "training.ema": 0.5, "training.max_grad_norm": 0.5}
    checked = [key for key in CHANGEABLE_KEYS if get_value(recipe, key) is not None]
    assert len(checked) >= 6
    for number, key in enumerate(checked):
        words = [f"{name}={json.dumps(value)}" for name, value in {**settings, "name": f"r{number}"}.items()]
        words += [f"{key}={json.dumps(values.get(key, 0.25))}", "training.max_steps=10"]
        result = train_command(
            ["classify", *words], fresh=False, resume_from=base.path, allow_data_change=False, quiet=True
        )
        assert result["step"] == 10, key


def test_drawn_and_perturbed_values_stay_in_their_space() -> None:
    dimensions = parse_space({"a": "log(1e-4, 1e-1)", "b": "uniform(0, 0.5)", "c": "int(2, 9)", "d": "[x, y, z]"})
    rng = np.random.default_rng(0)
    for dimension in dimensions:
        value = draw_value(dimension, rng)
        for _ in range(200):
            value = perturb_value(dimension, value, rng)
            if dimension.key == "d":
                assert value in ("x", "y", "z")
            else:
                assert dimension.values.low <= value <= dimension.values.high  # type: ignore[union-attr]
                assert dimension.key != "c" or isinstance(value, int)
