"""A cadence of 0 turns it off, in any unit and spelling, exactly as null does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bottega.core.errors import UsageError
from bottega.tasks.recipes import load_recipe
from small_run import SMALL, read_logged_steps, train, write_text

KEYS = ("samples.every", "evaluation.every", "checkpoint.every", "logging.every")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [0, "0", "0 steps", "0 epochs", "0%", None])
def test_zero_is_null(key: str, value: Any) -> None:
    recipe = load_recipe(["language", {key: value}]).recipe
    block, _, name = key.partition(".")
    assert getattr(getattr(recipe, block), name) is None
    assert load_recipe([recipe.to_plain_dict()]).recipe == recipe


def test_other_spellings_of_zero() -> None:
    recipe = load_recipe(["language", {"save_frequency": 0, "eval_frequency": 0, "log_frequency": 0}]).recipe
    assert (recipe.checkpoint.every, recipe.evaluation.every, recipe.logging.every) == (None, None, None)
    assert load_recipe(["language", {"checkpoint.every": "0 min"}]).recipe.checkpoint.every is None
    with pytest.raises(UsageError, match=r"samples\.every: expected a number of steps"):
        load_recipe(["language", {"samples.every": "-1"}])


def test_run_without_cadences_is_evaluated_and_saved_at_its_end(tmp_path: Path) -> None:
    run = train(tmp_path, write_text(tmp_path / "t.txt"), name="off", **{**SMALL, **dict.fromkeys(KEYS, 0)})
    assert run.step == 8
    assert read_logged_steps(run.path) == [8]
    assert read_logged_steps(run.path, "eval") == [8]
    assert [path.name for path in sorted((run.path / "checkpoints").glob("step-*"))] == ["step-00000008"]
    assert not (run.path / "samples").exists()
