"""Each illness of curves, rates and gradients is made on purpose, named, and gone in a run that follows the advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bottega
from small_illnesses import ILLNESSES, IMAGES, ROUTING, SPIKING, check_cycle


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ILLNESSES)
def test_illness_is_named_and_its_advice_removes_it(tmp_path: Path, name: str, seed: int) -> None:
    check_cycle(tmp_path, ILLNESSES[name], seed)


def test_low_rate_is_named_and_its_advice_removes_it(tmp_path: Path) -> None:
    check_cycle(tmp_path, ILLNESSES["learning-rate-too-low"], seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("recipe", "base"),
    [
        ("routing/large", ROUTING),
        ("classify/spiking", {**SPIKING, "training.max_steps": 200}),
        ("classify/image", {**IMAGES, "model.hidden_size": 16}),
    ],
    ids=("routing", "spiking", "image"),
)
def test_healthy_run_comes_out_clean(tmp_path: Path, recipe: str, base: dict[str, Any], seed: int) -> None:
    run = bottega.train(recipe, {**base, "output_dir": str(tmp_path), "name": "run", "seed": seed})
    assert bottega.diagnose(run.path)["lines"] == []
