"""The same recipe under both engines: weights, losses, updates and checkpoints agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, build

from bottega.core.trainer import evaluate
from bottega.data.loading.loader import iter_eval_batches

PAIRS = [
    pytest.param(case, id=str(case).removeprefix("jax-"), marks=case.marks) for case in CASES if case.engine == "jax"
]
PLAIN: dict[str, Any] = {"model.dropout": 0.0, "training.ema": 0.9}
"""Without dropout, whose masks each engine draws by itself."""


@pytest.fixture(params=PAIRS)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def build_both(case: Case, folder: Path, **options: Any) -> tuple[Any, Any]:
    """Return the subjects of the torch engine and of the JAX engine."""
    return tuple(build(case.with_engine(engine), folder, **{**PLAIN, **options}) for engine in ("torch", "jax"))


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the largest difference of any two tensors, relative to the largest value of the tensor."""
    assert a.keys() == b.keys()
    return max(float(np.abs(a[name] - b[name]).max() / max(1.0, np.abs(a[name]).max())) for name in a)


def test_initial_weights_are_equal_bit_for_bit(case: Case, tmp_path: Path) -> None:
    torch_side, jax_side = build_both(case, tmp_path)
    a, b = torch_side.state(), jax_side.state()
    assert list(torch_side.engine.parameters()) == list(jax_side.engine.parameters())
    assert {n: (x.shape, x.dtype) for n, x in a.items()} == {n: (x.shape, x.dtype) for n, x in b.items()}
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_fifty_steps_have_the_same_losses_and_twenty_the_same_weights(case: Case, tmp_path: Path) -> None:
    torch_side, jax_side = build_both(case, tmp_path)
    a, b = torch_side.advance(0, 20), jax_side.advance(0, 20)
    assert [r.keys() for r in a] == [r.keys() for r in b]
    assert largest_difference(torch_side.state(), jax_side.state()) < 1e-4
    source = torch_side.workload.data.validation()
    assert source is not None
    results = [evaluate(side.engine, iter_eval_batches(source, 4)) for side in (torch_side, jax_side)]
    assert results[1] == pytest.approx(results[0], rel=1e-4)
    a += torch_side.advance(20, 50)
    b += jax_side.advance(20, 50)
    assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_each_engine_resumes_the_run_of_the_other(case: Case, tmp_path: Path, optimizer: str) -> None:
    """Weights, moments, step counts and averages are in the checkpoint of either."""
    options = {"training.optimizer.name": optimizer}
    torch_side, jax_side = build_both(case, tmp_path, **options)
    torch_side.advance(0, 3)
    jax_side.advance(0, 3)
    saved_by_torch, saved_by_jax = torch_side.save(tmp_path / "torch", 3), jax_side.save(tmp_path / "jax", 3)
    torch_side.advance(3, 6)
    end = torch_side.state()
    for engine, folder in (("jax", saved_by_torch), ("torch", saved_by_jax)):
        resumed = build(case.with_engine(engine), tmp_path, **{**PLAIN, **options})
        resumed.engine.load(folder)
        resumed.advance(3, 6)
        assert largest_difference(end, resumed.state()) < 1e-5, f"resumed by {engine}"
