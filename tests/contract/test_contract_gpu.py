"""The promises that a GPU must keep as well, for every task: exact resume with `deterministic`, and the mean under splits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import CASES, Case, build

from small_run import different

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

PLAIN: dict[str, Any] = {
    "model.dropout": 0.0,
    "training.compile": False,
    "training.mixed_precision": "fp32",
    "training.optimizer.name": "sgd",
    "training.learning_rate": 0.1,
}
FORMS: dict[str, dict[str, Any]] = {
    "default": {"training.ema": 0.9, "training.max_grad_norm": 0.5},
    "eager": {
        "training.compile": False,
        "training.micro_batch_size": 2,
        "training.ema": 0.9,
        "model.dropout": 0.1,
    },
}
"""As a user gets it (compiled, bf16, one forward a step), and in micro-batches without a compiler."""


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.task == "personalize":
        pytest.importorskip("diffusers", reason="diffusers is not installed")
    return request.param


def in_float32(case: Case) -> dict[str, Any]:
    """Frozen models are in half precision on a GPU unless a recipe says otherwise."""
    return {**PLAIN, "model.frozen_precision": "fp32"} if case.task == "personalize" else PLAIN


@pytest.mark.parametrize("form", FORMS)
def test_a_deterministic_run_resumes_bit_for_bit(case: Case, form: str, tmp_path: Path) -> None:
    options = {"device": "cuda", "deterministic": True, **FORMS[form]}
    straight = build(case, tmp_path, **options)
    reports = straight.advance(0, 4)
    end = straight.state()
    first = build(case, tmp_path, **options)
    assert first.advance(0, 2) == reports[:2], "the same numbers twice"
    second = build(case, tmp_path, **options)
    second.engine.load(first.save(tmp_path / "cut", 2))
    assert second.advance(2, 4) == reports[2:]
    assert different(end, second.state()) == []


def test_the_mean_is_exact_under_a_split(case: Case, tmp_path: Path) -> None:
    """One step of plain descent: rounding is larger than on a CPU, and a model may amplify it with each further step."""
    options = {**in_float32(case), "device": "cuda"}
    whole = build(case, tmp_path, **options)
    split = build(case, tmp_path, **options, **{"training.micro_batch_size": 3})
    a, b = whole.advance(0, 1), split.advance(0, 1)
    assert b[0]["loss"] == pytest.approx(a[0]["loss"], rel=1e-5)
    one, other = whole.state(), split.state()
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_first_loss_is_that_of_a_cpu(case: Case, tmp_path: Path) -> None:
    """Weights, samples and noise are functions of the seed on every device."""
    options = in_float32(case)
    there, here = (build(case, tmp_path, **options, device=device).advance(0, 1)[0] for device in ("cuda", "cpu"))
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-4)
