"""Properties of every task on a GPU: exact resume with `deterministic`, and the mean under splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, build

from bottega.engines.compile_choice import is_compilable
from small_run import differing_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

PLAIN: dict[str, Any] = {
    "model.dropout": 0.0,
    "training.compile": False,
    "training.mixed_precision": "fp32",
    "training.optimizer.name": "sgd",
    "training.learning_rate": 0.1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"training.ema": 0.9, "training.max_grad_norm": 0.5},
    "eager": {
        "training.compile": False,
        "training.micro_batch_size": 2,
        "training.ema": 0.9,
        "model.dropout": 0.1,
    },
}
"""The defaults (compiled, bf16, one forward a step), and eager mode with micro-batches."""


@pytest.fixture(params=[case for case in CASES if case.engine == "torch"], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.task == "personalize":
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    return request.param


def float32_options(case: Case) -> dict[str, Any]:
    """Return options for float32; frozen models default to half precision on a GPU."""
    return {**PLAIN, "model.frozen_precision": "fp32"} if case.task == "personalize" else PLAIN


@pytest.mark.parametrize("variant", VARIANTS)
def test_deterministic_resume_is_bit_exact(case: Case, variant: str, tmp_path: Path) -> None:
    options = {"device": "cuda", "deterministic": True, **VARIANTS[variant]}
    straight, first, second = (build(case, tmp_path, **options) for _ in range(3))
    for subject in (straight, first, second):
        subject.engine.is_compiled = variant == "default" and is_compilable(subject.engine.task)
    reports = straight.advance(0, 4)
    end = straight.state()
    assert first.advance(0, 2) == reports[:2], "two runs differ"
    second.engine.load(first.save(tmp_path / "cut", 2))
    assert second.advance(2, 4) == reports[2:]
    assert differing_tensors(end, second.state()) == []


def test_micro_batches_do_not_change_the_loss_or_the_update(case: Case, tmp_path: Path) -> None:
    """One step of SGD: rounding is larger than on a CPU, and further steps may amplify it."""
    options = {**float32_options(case), "device": "cuda"}
    unsplit = build(case, tmp_path, **options)
    split = build(case, tmp_path, **options, **{"training.micro_batch_size": 3})
    a, b = unsplit.advance(0, 1), split.advance(0, 1)
    assert b[0]["loss"] == pytest.approx(a[0]["loss"], rel=1e-5)
    unsplit_state, split_state = unsplit.state(), split.state()
    assert unsplit_state.keys() == split_state.keys()
    for name in unsplit_state:
        np.testing.assert_allclose(unsplit_state[name], split_state[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_first_loss_matches_the_cpu(case: Case, tmp_path: Path) -> None:
    """Weights, samples and noise are functions of the seed on every device."""
    options = float32_options(case)
    on_gpu, on_cpu = (build(case, tmp_path, **options, device=device).advance(0, 1)[0] for device in ("cuda", "cpu"))
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], rel=1e-4)
