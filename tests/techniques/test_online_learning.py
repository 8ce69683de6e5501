"""Learning from a stream: what is measured before it is learnt, what survives a kill, and that any task can."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_parts
import small_routing
import small_run
import small_texts
from bottega.analysis.ledger import list_step_samples
from bottega.analysis.verify_resume import find_difference as first_difference
from bottega.callbacks.prequential import Prequential
from bottega.config.recipe import Recipe
from bottega.core.callback import Progress
from bottega.core.errors import OutOfMemory, UsageError
from bottega.data.order.online import FIRST_EPOCH, OnlineStream
from bottega.engines.torch.engine import TorchEngine
from bottega.run.compose import (
    build_engine,
    build_loader,
    build_training_plan,
    count_total_steps,
    set_learning_rate_schedule,
)
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe
from bottega.techniques.apply import resolve_techniques

ONLINE: dict[str, Any] = {"training.max_steps": None, "data.online": {"replay": 0.25, "memory": 20}}


def routing(folder: Path) -> dict[str, Any]:
    return {**small_routing.settings(folder), "training.num_epochs": None}


def text(folder: Path) -> dict[str, Any]:
    return small_run.settings(folder, small_run.write_text(folder / "text.txt", words=300))


def topics(folder: Path) -> dict[str, Any]:
    return small_texts.settings(folder, "cnn", **{"model.word_dropout": 0.2, "training.num_epochs": None})


def several(folder: Path) -> dict[str, Any]:
    return small_parts.settings(folder)


CASES: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "routing": ("routing", routing),
    "language": ("language/shakespeare", text),
    "classify": ("classify/cnn", topics),
    "multitask": ("multitask", several),
}


def values(case: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return {**CASES[case][1](folder), **ONLINE, "name": "run", **changes}


def train(case: str, folder: Path, **changes: Any) -> Any:
    return bottega.train(CASES[case][0], values(case, folder, **changes))


def recipe_of(case: str, folder: Path, **changes: Any) -> Recipe:
    return load_recipe([CASES[case][0], values(case, folder, **changes)]).recipe


def only(batch: Any, at: np.ndarray) -> dict[str, Any]:
    return {
        name: only(value, at) if isinstance(value, dict) else value[at] if np.ndim(value) else value
        for name, value in batch.items()
    }


@pytest.mark.parametrize(("case", "micro"), [("routing", None), ("classify", 3), ("language", None)])
def test_what_is_said_is_the_mean_over_new_samples_before_they_are_learnt(
    case: str, micro: int | None, tmp_path: Path
) -> None:
    """Against an engine that is shown the new rows alone, before each step. The measuring itself changes no weight."""
    recipe = recipe_of(case, tmp_path, **{"training.micro_batch_size": micro})
    workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    plan = build_training_plan(recipe, workload)
    (watch,) = (callback for callback in plan.callbacks if isinstance(callback, Prequential))
    by_hand = Prequential(workload.summarise)
    engines = [build_engine(recipe, plan.task) for _ in range(2)]
    loader = build_loader(recipe, plan.training, engines[0], plan.order)
    assert isinstance(loader.order, OnlineStream)
    total = count_total_steps(recipe, loader)
    for engine in engines:
        set_learning_rate_schedule(recipe, engine, total=total, steps_per_epoch=round(loader.steps_per_epoch))
    assert plan.on_train_start is not None
    plan.on_train_start(engines[0], loader, resumed=False)
    batches, new = loader(0), 0
    for step in range(total):
        batch = next(batches)
        positions = np.arange(step * loader.batch_size, (step + 1) * loader.batch_size)
        at = np.flatnonzero(loader.order.indices(positions)[1] == FIRST_EPOCH)
        new += len(at)
        if len(at):
            by_hand.add(engines[1].eval_step({**only(batch, at), "index": positions[at]}).sums)
        for engine in engines:
            engine.train_step(step, batch)
    assert new == len(plan.training)
    measured, expected = watch.compute_metrics(), by_hand.compute_metrics()
    assert measured.keys() == expected.keys()
    for name, value in measured.items():
        assert value == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for a, b in zip(engines[0].model.parameters(), engines[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("changes", "fits", "most"),
    [
        ({}, 8, 8),
        ({"evaluation.batch_size": 3}, 8, 3),
        ({"training.micro_batch_size": "auto"}, 3, 8),
        ({"training.micro_batch_size": 4, "evaluation.batch_size": 6}, 8, 4),
    ],
)
def test_no_more_is_measured_at_once_than_fits(
    changes: dict[str, Any], fits: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step has not found out yet what does; and rows are for nobody."""
    seen: list[int] = []
    plain = TorchEngine.eval_step

    def eval_step(engine: TorchEngine, batch: Any, **options: Any) -> Any:
        if not options:
            return plain(engine, batch)  # of the validation
        assert options == {"with_rows": False}
        seen.append(len(batch["x"]))
        if seen[-1] > fits:
            raise OutOfMemory("too much")
        return plain(engine, batch, **options)

    usual = train("routing", tmp_path, name="usual").metrics
    monkeypatch.setattr(TorchEngine, "eval_step", eval_step)
    found = train("routing", tmp_path, name="few", **changes).metrics
    assert max(seen) == most
    names = [name for name in usual if name.startswith("online/")]
    assert {name: found[name] for name in names} == pytest.approx({name: usual[name] for name in names}, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_kill_changes_neither_weights_nor_what_was_measured(case: str, tmp_path: Path) -> None:
    changes = {"checkpoint.every": 1, "checkpoint.keep": 60, "evaluation.every": 5}
    run = train(case, tmp_path, **changes)
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row if name.startswith("online/")}
    assert names >= ({"online/text/perplexity", "online/topics/accuracy"} if case == "multitask" else {"online/loss"})
    assert names <= set(rows[-1])
    assert rows[-1]["online/loss"] == run.metrics["online/loss"]  # where compare looks for it
    whole = tmp_path / "whole"
    shutil.move(run.path, whole)
    shutil.copytree(whole, run.path, symlinks=True)
    for folder in (run.path / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > run.step // 2:
            shutil.rmtree(folder)
    train(case, tmp_path, **changes)
    assert first_difference(whole, run.path) is None


def test_the_run_is_as_long_as_the_stream_and_the_ledger_knows_it(tmp_path: Path) -> None:
    run = train("routing", tmp_path)
    size = len(bottega.load(run.path).workload.data.training())
    order = OnlineStream(size, 0, replay_fraction=0.25, memory_size=20, batch_size=8)
    assert run.step == -(-order.epoch_length // 8)
    seen = [list_step_samples(run.path, step=step, replay=False) for step in range(1, run.step + 1)]
    index = np.concatenate([one["samples"] for one in seen])
    epoch = np.concatenate([one["epochs"] for one in seen])
    np.testing.assert_array_equal(index[epoch == FIRST_EPOCH], np.arange(size))
    with pytest.raises(
        UsageError,
        match=rf"training\.max_steps: 99 is more than the stream \(data\.online\) has: {run.step} steps of 8 samples",
    ):
        train("routing", tmp_path, name="longer", **{"training.max_steps": 99})
    with pytest.raises(UsageError, match=r"training\.batch_size: 8 -> 4"):
        train("routing", tmp_path, **{"training.batch_size": 4})
    assert train("routing", tmp_path, name="shorter", **{"training.max_steps": 3}).step == 3


def test_a_stream_without_validation_still_measures_itself(tmp_path: Path) -> None:
    small = {"data.validation.split": None, "data.validation": None, "evaluation.metric": "loss"}
    given = {
        key: value for key, value in values("routing", tmp_path, **small).items() if key != "data.validation.split"
    }
    run = bottega.train("routing", given)
    assert 0 < run.metrics["online/accuracy"] < 1


def test_a_part_that_has_an_order_of_its_own_is_refused(tmp_path: Path) -> None:
    given = values("multitask", tmp_path)
    given["data.parts.text"]["settings"]["data.online"] = True
    with pytest.raises(UsageError, match=r"data\.parts\.text: data\.online cannot be combined with several tasks"):
        bottega.train("multitask", given)


def test_means_survive_a_checkpoint_and_go_back_with_it() -> None:
    one = Prequential(lambda means: {**means, "twice": 2 * means["loss"]})
    assert one.compute_metrics() == {}
    one.add({"loss": (torch.tensor(0.1, dtype=torch.float64), 3.0), "never": (0.0, 0.0)})
    note = json.loads(json.dumps(one.state_dict()))
    other = Prequential(one.summarise)
    other.load_state_dict(note)
    for watch in (one, other):
        watch.add({"loss": (torch.tensor(0.7, dtype=torch.float64), 5.0), "never": (0.0, 0.0)})
    assert one.compute_metrics() == other.compute_metrics()
    assert one.compute_metrics() == {"online/loss": pytest.approx(0.1), "online/twice": pytest.approx(0.2)}
    told: dict[str, float] = {}
    one.after_step(Progress(), told)
    assert told == one.compute_metrics()
    other.load_state_dict({})
    assert other.compute_metrics() == {}


def test_spiking_units_of_a_stream_learn_by_the_timing_of_spikes(tmp_path: Path) -> None:
    spiking = small_routing.SPIKING
    here: Any = None  # a branch of one task is not asked

    def names(**changes: Any) -> list[str]:
        return [one.name for one in resolve_techniques(recipe_of("routing", tmp_path, **changes), here)]

    assert names(**spiking, **{"data.online": None, "training.max_steps": 4}) == []
    assert names() == []
    assert names(**spiking) == ["plasticity"]
    asked = {"data.online": None, "training.max_steps": 4, "model.plasticity": True}
    assert names(**spiking, **asked) == ["plasticity"], "the guide says it of the model"
    said = recipe_of("routing", tmp_path, **spiking, techniques=[{"name": "plasticity", "options": {"rate": 0.5}}])
    (one,) = resolve_techniques(said, here)
    assert getattr(one.options, "rate", None) == 0.5


def test_all_of_a_batch_counts_where_all_of_it_is_new(tmp_path: Path) -> None:
    run = train("routing", tmp_path, **{"data.online": {"replay": 0.0}, "checkpoint.keep": 9})
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    note = json.loads((run.path / "checkpoints" / "last" / "progress.json").read_text())["notes"]["prequential"]
    assert note["accuracy"][1] == len(bottega.load(run.path).workload.data.training())
    assert rows[0]["online/accuracy"] == pytest.approx(rows[0]["accuracy"])


@pytest.mark.slow
def test_two_ranks_measure_what_one_does(tmp_path: Path) -> None:
    """Each has half of a batch, and the sums are those of both; half of the last batches is not new."""
    given = values("routing", tmp_path, **{"training.mixed_precision": "fp32", "device": "cpu"})
    words = [f"{key}={'null' if value is None else json.dumps(value)}" for key, value in given.items() if key != "name"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for name, launcher in (("one", []), ("two", launch)):
        running = small_run.Running(tmp_path / name, ["train", "routing", *words, f"name={name}"], launcher=launcher)
        code, said = running.end()
        assert code == 0, said
    one, two = (
        [json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "two")
    )
    for mine, theirs in zip(one, two, strict=True):
        found = {name: value for name, value in mine.items() if name.startswith("online/")}
        assert found
        assert {name: theirs[name] for name in found} == pytest.approx(found, rel=1e-5, abs=1e-6)
