"""Two processes and one give the same weights, losses and evaluations, and agree when something goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import two_ranks as two_ranks_script
from bottega.core.trainer import evaluate
from bottega.data.loading.loader import iter_eval_batches
from bottega.metrics_log import read_metrics
from toy_task import Toy, copy_state, engine, loader, source, train_steps, training


def load_result(folder: Path, name: str, rank: int = 0) -> dict[str, np.ndarray]:
    return {key.replace("|", "/"): array for key, array in load_file(folder / f"{name}.{rank}.safetensors").items()}


@pytest.fixture(autouse=True, scope="module")
def _rank() -> None:
    """Check that two_ranks.py was imported outside a process group."""
    assert two_ranks_script.RANK == 0


@pytest.mark.parametrize("micro", [None, 1, 3])
def test_weights_and_losses_match_one_process(two_ranks: Path, micro: int | None) -> None:
    torch_engine = engine(training(optimizer={"name": "sgd"}))
    losses = [report["loss"] for report in train_steps(torch_engine, loader(of=torch_engine), 0, 3)]
    distributed = load_result(two_ranks, f"split-{micro}")
    for name, array in copy_state(torch_engine).items():
        np.testing.assert_allclose(distributed[name], array, rtol=1e-6, atol=1e-6, err_msg=name)
    assert json.loads((two_ranks / f"split-{micro}.json").read_text()) == pytest.approx(losses, rel=1e-6)


def test_groups_with_a_later_start_match_one_process(two_ranks: Path) -> None:
    torch_engine = engine(training(optimizer={"name": "sgd"}, groups=two_ranks_script.UNFREEZING))
    torch_engine.set_schedule(torch_engine.rate, total=8, steps_per_epoch=5)
    train_steps(torch_engine, loader(of=torch_engine), 0, 4)
    distributed = load_result(two_ranks, "unfreezing")
    for name, array in copy_state(torch_engine).items():
        np.testing.assert_allclose(distributed[name], array, rtol=1e-6, atol=1e-6, err_msg=name)


def test_compiled_steps_match_one_eager_process(two_ranks: Path) -> None:
    assert_toy_steps_match(two_ranks, "compiled")
    for rank in (0, 1):
        report = json.loads((two_ranks / f"compiled.{rank}.json").read_text())
        assert report == {"is_compiled": True, "error": None, "calls": report["calls"]}
        assert report["calls"] > 2, "each step has two micro-batches"


def test_no_rank_compiles_if_the_compiler_of_one_fails(two_ranks: Path) -> None:
    assert_toy_steps_match(two_ranks, "compiler-fails")
    errors = [json.loads((two_ranks / f"compiler-fails.{rank}.json").read_text()) for rank in (0, 1)]
    assert [report["is_compiled"] for report in errors] == [False, False]
    assert errors[0]["error"] == "the compiler failed on another rank"
    assert errors[1]["error"] == "RuntimeError: Failed to find C compiler"


def assert_toy_steps_match(folder: Path, name: str) -> None:
    """Assert that two ranks have the weights of one process after three steps."""
    torch_engine = engine(training(optimizer={"name": "sgd"}))
    train_steps(torch_engine, loader(of=torch_engine), 0, 3)
    distributed = load_result(folder, name)
    for key, array in copy_state(torch_engine).items():
        np.testing.assert_allclose(distributed[key], array, rtol=1e-6, atol=1e-6, err_msg=key)


def test_gathered_rows_have_each_sample_once_in_order(two_ranks: Path) -> None:
    data = source(samples=37)
    expected = data.rows(np.arange(37), np.zeros(37, int))["x"][:, 0]
    for rank in (0, 1):
        np.testing.assert_array_equal(load_result(two_ranks, "rows", rank)["first"], expected)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("tensor", two_ranks_script.WithDropout()),
        ("tensor-unwrapped", two_ranks_script.Unwrapped()),
        ("tensor-state", two_ranks_script.Remembering()),
    ],
)
def test_ranks_that_share_their_data_match_one_process(two_ranks: Path, name: str, task: Toy) -> None:
    """Samples, noise, dropout, counts, gradients and metrics are not counted twice."""
    torch_engine = engine(training(optimizer={"name": "sgd"}), task=task, micro=3)
    losses = [report["loss"] for report in train_steps(torch_engine, loader(of=torch_engine), 0, 3)]
    for rank in (0, 1):
        distributed = load_result(two_ranks, name, rank)
        for key, array in copy_state(torch_engine).items():
            np.testing.assert_array_equal(distributed[key], array, err_msg=key)
        assert json.loads((two_ranks / f"{name}.{rank}.json").read_text()) == losses
        np.testing.assert_array_equal(
            load_result(two_ranks, "tensor-rows", rank)["first"], load_result(two_ranks, "rows")["first"]
        )


@pytest.mark.parametrize("kind", two_ranks_script.OUT_OF_MEMORY)
def test_ranks_find_the_micro_batch_that_fits_all_of_them(two_ranks: Path, kind: str) -> None:
    torch_engine = engine(training(optimizer={"name": "sgd"}), task=two_ranks_script.OUT_OF_MEMORY[kind]())
    train_steps(torch_engine, loader(of=torch_engine), 0, 3)
    distributed = load_result(two_ranks, kind)
    for name, array in copy_state(torch_engine).items():
        np.testing.assert_allclose(distributed[name], array, rtol=1e-6, atol=1e-6, err_msg=name)


def test_ranks_stay_equal_bit_for_bit(two_ranks: Path) -> None:
    for name in (
        "split-None",
        "split-1",
        "split-3",
        "unfreezing",
        *two_ranks_script.OUT_OF_MEMORY,
        "disagreement",
        "rollback",
    ):
        a, b = load_result(two_ranks, name, 0), load_result(two_ranks, name, 1)
        assert a.keys() == b.keys()
        assert all(a[key].tobytes() == b[key].tobytes() for key in a), name


def test_an_evaluation_counts_every_sample_once(two_ranks: Path) -> None:
    expected = evaluate(engine(task=two_ranks_script.Weighted(noise=0.0)), iter_eval_batches(source(samples=37), 8))
    for rank in (0, 1):
        metrics = json.loads((two_ranks / f"evaluation.{rank}.json").read_text())
        assert metrics == pytest.approx(expected, rel=1e-6)


def test_both_ranks_roll_back_and_skip_the_same_batch(two_ranks: Path) -> None:
    a, b = (json.loads((two_ranks / f"rollback.{rank}.json").read_text()) for rank in (0, 1))
    assert a == b
    batches = loader(source(bad=two_ranks_script.BAD), of=engine())
    assert a["skip_steps"] == [step for step in range(6) if two_ranks_script.BAD in batches.indices(step)[0]] != []
    assert [row["step"] for row in read_metrics(two_ranks / "rollback.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert all(np.isfinite(array).all() for array in load_result(two_ranks, "rollback").values())
