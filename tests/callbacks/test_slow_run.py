"""Warnings about runs that will take hours on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import bottega
import small_texts
from bottega.callbacks import slow_run
from bottega.callbacks.slow_run import SlowRunWarning, suggest_cheaper_steps
from bottega.core.callback import Progress
from bottega.tasks.recipes import load_recipe


def collect_slow_run_warnings(steps: list[int], seconds: float, *, total: int = 1000, start_step: int = 0) -> list[str]:
    """Return the warnings of a run that logs at `steps`, each step taking `seconds`."""
    recipe, warned = load_recipe(["image", {"data.image_size": 32}]).recipe, []
    callback, progress = SlowRunWarning(recipe, warned.append), Progress(step=start_step, total=total)
    callback.start(progress)
    for step in steps:
        progress.step = step
        callback.after_step(progress, {"step_seconds": seconds})
    return warned


def test_hours_are_estimated_once_after_the_first_steps() -> None:
    (line,) = collect_slow_run_warnings([1, 2, 3, 4, 5], 13.0)
    assert "997 more steps of 13 s take about 3.6 hours on this CPU" in line
    assert "a larger model.patch_size (2), or a smaller model.hidden_size (128)" in line
    assert "data.image_size (32) or training.batch_size (128); Ctrl-C" in line
    assert collect_slow_run_warnings([1, 2], 13.0) == []
    assert collect_slow_run_warnings([10, 20], 3.0) == [], "49 minutes are below the limit"
    assert collect_slow_run_warnings([901, 902, 903], 13.0, start_step=900) == [], (
        "only the remaining steps of a resumed run count"
    )
    assert "days" in collect_slow_run_warnings([10], 1000.0)[0]


@pytest.mark.parametrize(
    "name", ["language", "classify", "image", "audio", "video", "image_vae/digits", "routing", "recall"]
)
def test_every_task_has_keys_that_make_a_step_cheaper(name: str) -> None:
    recipe = load_recipe([name, {"data.train.path": "x"} if name == "classify" else {}]).recipe
    text = suggest_cheaper_steps(recipe)
    assert "training.batch_size (" in text
    assert "None" not in text


def test_a_unet_has_no_patches() -> None:
    assert "patch_size" not in suggest_cheaper_steps(load_recipe(["image", {"model.backbone": "unet"}]).recipe)


def test_slow_training_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_run, "LONG_RUN_SECONDS", 0.0)
    run = bottega.train("classify", small_texts.settings(tmp_path, "cnn", name="run"))
    assert (run.path / "log.txt").read_text().count("on this CPU; a step is cheaper with") == 1
