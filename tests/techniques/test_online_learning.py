"""Online learning from a stream: prequential metrics, replay and resumed runs, for every task."""

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
import small_multitask
import small_routing
import small_run
import small_texts
from bottega.analysis.ledger import list_step_samples
from bottega.analysis.verify_resume import find_difference
from bottega.callbacks.prequential import Prequential
from bottega.config.recipe import Recipe
from bottega.core.callback import Progress
from bottega.core.errors import OutOfMemory, UsageError
from bottega.data.order.online import NEW_SAMPLE_EPOCH, OnlineStream
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


def multitask(folder: Path) -> dict[str, Any]:
    return small_multitask.settings(folder)


CASES: dict[str, tuple[str, Callable[[Path], dict[str, Any]]]] = {
    "routing": ("routing", routing),
    "language": ("language/shakespeare", text),
    "classify": ("classify/cnn", topics),
    "multitask": ("multitask", multitask),
}


def values(case: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return {**CASES[case][1](folder), **ONLINE, "name": "run", **changes}


def train(case: str, folder: Path, **changes: Any) -> Any:
    return bottega.train(CASES[case][0], values(case, folder, **changes))


def build_recipe(case: str, folder: Path, **changes: Any) -> Recipe:
    return load_recipe([CASES[case][0], values(case, folder, **changes)]).recipe


def select_rows(batch: Any, indices: np.ndarray) -> dict[str, Any]:
    return {
        name: select_rows(value, indices) if isinstance(value, dict) else value[indices] if np.ndim(value) else value
        for name, value in batch.items()
    }


@pytest.mark.parametrize(("case", "micro"), [("routing", None), ("classify", 3), ("language", None)])
def test_prequential_metrics_are_means_over_new_samples_before_training(
    case: str, micro: int | None, tmp_path: Path
) -> None:
    """Compared with an engine that evaluates only the new rows before each step. Evaluation changes no weight."""
    recipe = build_recipe(case, tmp_path, **{"training.micro_batch_size": micro})
    workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    plan = build_training_plan(recipe, workload)
    (prequential,) = (callback for callback in plan.callbacks if isinstance(callback, Prequential))
    reference = Prequential(workload.summarise)
    engines = [build_engine(recipe, plan.task) for _ in range(2)]
    loader = build_loader(recipe, plan.training, engines[0], plan.order)
    assert isinstance(loader.order, OnlineStream)
    total = count_total_steps(recipe, loader)
    for engine in engines:
        set_learning_rate_schedule(recipe, engine, total=total, steps_per_epoch=round(loader.steps_per_epoch))
    assert plan.on_train_start is not None
    plan.on_train_start(engines[0], loader, resumed=False)
    batches, num_new = loader(0), 0
    for step in range(total):
        batch = next(batches)
        positions = np.arange(step * loader.batch_size, (step + 1) * loader.batch_size)
        is_new = np.flatnonzero(loader.order.indices(positions)[1] == NEW_SAMPLE_EPOCH)
        num_new += len(is_new)
        if len(is_new):
            reference.add(engines[1].eval_step({**select_rows(batch, is_new), "index": positions[is_new]}).sums)
        for engine in engines:
            engine.train_step(step, batch)
    assert num_new == len(plan.training)
    measured, expected = prequential.compute_metrics(), reference.compute_metrics()
    assert measured.keys() == expected.keys()
    for name, value in measured.items():
        assert value == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    for a, b in zip(engines[0].model.parameters(), engines[1].model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("changes", "fits", "largest"),
    [
        ({}, 8, 8),
        ({"evaluation.batch_size": 3}, 8, 3),
        ({"training.micro_batch_size": "auto"}, 3, 8),
        ({"training.micro_batch_size": 4, "evaluation.batch_size": 6}, 8, 4),
    ],
)
def test_prequential_batch_size_is_limited_to_what_fits(
    changes: dict[str, Any], fits: int, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step does not know yet what fits, and no rows are requested."""
    sizes: list[int] = []
    plain = TorchEngine.eval_step

    def eval_step(engine: TorchEngine, batch: Any, **options: Any) -> Any:
        if not options:
            return plain(engine, batch)  # validation
        assert options == {"with_rows": False}
        sizes.append(len(batch["x"]))
        if sizes[-1] > fits:
            raise OutOfMemory("too much")
        return plain(engine, batch, **options)

    reference = train("routing", tmp_path, name="usual").metrics
    monkeypatch.setattr(TorchEngine, "eval_step", eval_step)
    metrics = train("routing", tmp_path, name="few", **changes).metrics
    assert max(sizes) == largest
    names = [name for name in reference if name.startswith("online/")]
    assert {name: metrics[name] for name in names} == pytest.approx({name: reference[name] for name in names}, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_resume_is_bitwise_equal_in_weights_and_metrics(case: str, tmp_path: Path) -> None:
    changes = {"checkpoint.every": 1, "checkpoint.keep": 60, "evaluation.every": 5}
    run = train(case, tmp_path, **changes)
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row if name.startswith("online/")}
    assert names >= ({"online/text/perplexity", "online/topics/accuracy"} if case == "multitask" else {"online/loss"})
    assert names <= set(rows[-1])
    assert rows[-1]["online/loss"] == run.metrics["online/loss"]  # read by compare
    uninterrupted = tmp_path / "uninterrupted"
    shutil.move(run.path, uninterrupted)
    shutil.copytree(uninterrupted, run.path, symlinks=True)
    for folder in (run.path / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > run.step // 2:
            shutil.rmtree(folder)
    train(case, tmp_path, **changes)
    assert find_difference(uninterrupted, run.path) is None


def test_run_length_is_the_stream_length_and_the_ledger_lists_it(tmp_path: Path) -> None:
    run = train("routing", tmp_path)
    size = len(bottega.load(run.path).workload.data.training())
    order = OnlineStream(size, 0, replay_fraction=0.25, memory_size=20, batch_size=8)
    assert run.step == -(-order.epoch_length // 8)
    ledger = [list_step_samples(run.path, step=step, replay=False) for step in range(1, run.step + 1)]
    index = np.concatenate([entry["samples"] for entry in ledger])
    epoch = np.concatenate([entry["epochs"] for entry in ledger])
    np.testing.assert_array_equal(index[epoch == NEW_SAMPLE_EPOCH], np.arange(size))
    with pytest.raises(
        UsageError,
        match=rf"training\.max_steps: 99 is more than the stream \(data\.online\) has, which is {run.step} steps of 8 samples",
    ):
        train("routing", tmp_path, name="longer", **{"training.max_steps": 99})
    with pytest.raises(UsageError, match=r"training\.batch_size: 8 -> 4"):
        train("routing", tmp_path, **{"training.batch_size": 4})
    assert train("routing", tmp_path, name="shorter", **{"training.max_steps": 3}).step == 3


def test_stream_without_validation_reports_online_metrics(tmp_path: Path) -> None:
    small = {"data.validation.split": None, "data.validation": None, "evaluation.metric": "loss"}
    settings = {
        key: value for key, value in values("routing", tmp_path, **small).items() if key != "data.validation.split"
    }
    run = bottega.train("routing", settings)
    assert 0 < run.metrics["online/accuracy"] < 1


def test_online_data_of_one_task_in_multitask_is_refused(tmp_path: Path) -> None:
    settings = values("multitask", tmp_path)
    settings["data.parts.text"]["settings"]["data.online"] = True
    with pytest.raises(UsageError, match=r"data\.parts\.text: data\.online cannot be combined with several tasks"):
        bottega.train("multitask", settings)


def test_prequential_means_are_saved_and_restored() -> None:
    original = Prequential(lambda means: {**means, "twice": 2 * means["loss"]})
    assert original.compute_metrics() == {}
    original.add({"loss": (torch.tensor(0.1, dtype=torch.float64), 3.0), "never": (0.0, 0.0)})
    state = json.loads(json.dumps(original.state_dict()))
    restored = Prequential(original.summarise)
    restored.load_state_dict(state)
    for prequential in (original, restored):
        prequential.add({"loss": (torch.tensor(0.7, dtype=torch.float64), 5.0), "never": (0.0, 0.0)})
    assert original.compute_metrics() == restored.compute_metrics()
    assert original.compute_metrics() == {"online/loss": pytest.approx(0.1), "online/twice": pytest.approx(0.2)}
    metrics: dict[str, float] = {}
    original.after_step(Progress(), metrics)
    assert metrics == original.compute_metrics()
    restored.load_state_dict({})
    assert restored.compute_metrics() == {}


def test_spiking_model_on_a_stream_uses_plasticity(tmp_path: Path) -> None:
    spiking = small_routing.SPIKING
    no_workload: Any = None  # not used for a single task

    def technique_names(**changes: Any) -> list[str]:
        return [
            technique.name
            for technique in resolve_techniques(build_recipe("routing", tmp_path, **changes), no_workload)
        ]

    assert technique_names(**spiking, **{"data.online": None, "training.max_steps": 4}) == []
    assert technique_names() == []
    assert technique_names(**spiking) == ["plasticity"]
    offline = {"data.online": None, "training.max_steps": 4, "model.plasticity": True}
    assert technique_names(**spiking, **offline) == ["plasticity"], "model.plasticity enables it without a stream"
    recipe = build_recipe("routing", tmp_path, **spiking, techniques=[{"name": "plasticity", "options": {"rate": 0.5}}])
    (technique,) = resolve_techniques(recipe, no_workload)
    assert getattr(technique.options, "rate", None) == 0.5


def test_without_replay_every_sample_counts(tmp_path: Path) -> None:
    run = train("routing", tmp_path, **{"data.online": {"replay": 0.0}, "checkpoint.keep": 9})
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    state = json.loads((run.path / "checkpoints" / "last" / "progress.json").read_text())["notes"]["prequential"]
    assert state["accuracy"][1] == len(bottega.load(run.path).workload.data.training())
    assert rows[0]["online/accuracy"] == pytest.approx(rows[0]["accuracy"])


@pytest.mark.slow
def test_two_ranks_report_the_same_metrics_as_one(tmp_path: Path) -> None:
    """Each rank has half of a batch, and sums are reduced over both; half of the last batches is replayed."""
    settings = values("routing", tmp_path, **{"training.mixed_precision": "fp32", "device": "cpu"})
    arguments = [
        f"{key}={'null' if value is None else json.dumps(value)}" for key, value in settings.items() if key != "name"
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for name, launcher in (("one", []), ("two", launch)):
        running = small_run.Running(
            tmp_path / name, ["train", "routing", *arguments, f"name={name}"], launcher=launcher
        )
        code, output = running.end()
        assert code == 0, output
    single_rows, two_rank_rows = (
        [json.loads(x) for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "two")
    )
    for single, two_rank in zip(single_rows, two_rank_rows, strict=True):
        expected = {name: value for name, value in single.items() if name.startswith("online/")}
        assert expected
        assert {name: two_rank[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
