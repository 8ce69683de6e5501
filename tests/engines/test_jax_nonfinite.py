"""Non-finite steps in JAX: halt, skip and rollback end with the weights that torch has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from both_engines import copy_state, find_largest_difference
from bottega.core.errors import Diverged
from nonfinite_trial import BAD, Trial, bad_step
from small_run import differing_tensors
from toy_jax import JaxToy, jax_engine
from toy_task import Toy, train_steps


def jax_trial(folder: Path, policy: str, **options: Any) -> Trial:
    return Trial(folder, policy, build=jax_engine, task=JaxToy(), **options)


@pytest.mark.parametrize("log", [1, 3], ids=["detected at once", "detected later"])
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_bad_batches_are_left_out_as_in_torch(policy: str, log: int, tmp_path: Path) -> None:
    ours, theirs = jax_trial(tmp_path / "jax", policy, log=log), Trial(tmp_path / "torch", policy, task=Toy(), log=log)
    ours.run()
    theirs.run()
    bad_steps = [step for step in range(10) if BAD in ours.loader.indices(step)[0]]
    assert len(bad_steps) == 2, "ten steps are two epochs"
    assert find_largest_difference(copy_state(theirs.engine), copy_state(ours.engine)) < 1e-5
    assert len(ours.warned) == len(theirs.warned) == 2
    assert ours.progress.step == theirs.progress.step == 10
    assert ours.progress.skip_steps == theirs.progress.skip_steps == (bad_steps if policy == "rollback" else [])
    expected = jax_engine(task=JaxToy(), micro=4)
    expected.skip_steps = frozenset(bad_steps)
    train_steps(expected, ours.loader, 0, 10)
    assert differing_tensors(copy_state(expected), copy_state(ours.engine)) == []
    assert all(np.isfinite(array).all() for array in copy_state(ours.engine).values())


def test_halt_names_the_module_and_keeps_the_weights_from_before_the_bad_step(tmp_path: Path) -> None:
    step = bad_step()
    trial, before = jax_trial(tmp_path / "halt", "halt", log=4), jax_trial(tmp_path / "before", "halt", total=step)
    before.run()
    with pytest.raises(Diverged, match=f"not finite at step {step + 1} .*, first in first;") as caught:
        trial.run()
    assert caught.value.code == 6
    assert differing_tensors(copy_state(before.engine), copy_state(trial.engine)) == []
    folder = tmp_path / "halt" / "nonfinite" / f"step-{step + 1:08d}"
    report = json.loads((folder / "report.json").read_text())
    assert report["first_bad_module"] == "first"
    assert BAD in report["samples"]
    assert (folder / "batch.safetensors").exists()
