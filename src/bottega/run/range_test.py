"""The rate that `training.learning_rate: auto` takes: found by a range test on an engine of its own, kept with the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.callbacks.bars import bars
from bottega.callbacks.console import Console
from bottega.config.recipe import Recipe
from bottega.core import checkpoint
from bottega.core.errors import CheckpointError, EnvironmentProblem
from bottega.core.rundir import RunDirectory
from bottega.engines import rate_range
from bottega.engines.rate_range import HIGH, LOW, STEPS
from bottega.run import resume
from bottega.run.compose import build_engine, build_loader, plan_rates, total_steps
from bottega.run.lesson import applied
from bottega.run.range_picture import draw
from bottega.tasks import needs
from bottega.tasks.branch import Branch
from bottega.world import World

JSON, PICTURE = "lr-find.json", "lr-find.png"


def measured(
    recipe: Recipe,
    branch: Branch,
    *,
    start: Path | None = None,
    low: float = LOW,
    high: float = HIGH,
    steps: int = STEPS,
    say: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """What a range test finds, from initial weights or from a checkpoint `start` that was verified. Nothing on disk is
    touched; lesson and engine are made for it alone, because a technique may keep something in them."""
    rate_range.check_range(low, high, steps)
    # A graph would be compiled for a hundred steps only, and nobody looks at averaged weights.
    alone = _changed(recipe, learning_rate=high, compile=False, ema=None)
    lesson = applied(needs.placed(alone), branch)
    engine = build_engine(alone, lesson.task)
    loader = build_loader(alone, lesson.training, engine, lesson.order)
    total = total_steps(alone, loader)
    plan_rates(alone, engine, total=total, steps_per_epoch=round(loader.steps_per_epoch))
    first = 0
    if start is not None:
        resume.check_frozen_unchanged(checkpoint.read_manifest(start), {"frozen": dict(lesson.frozen)})
        first = resume.progress_at(start, loader=loader, total=total, say=lambda text: None).step
        engine.load(start)
    try:
        if lesson.begin is not None:
            lesson.begin(engine, loader)
        swept = rate_range.sweep(engine, loader, low=low, high=high, steps=steps, first=first, say=say)
    finally:
        # It may hold the engine, which would then outlive the test: the model would be in memory twice. Not closed,
        # because that ends the group of ranks, and they are about to train.
        engine.before_step = None
    found = rate_range.found_in(swept, low=low, high=high, steps=steps)
    return {
        "suggestion": found.suggestion,
        "steepest": found.steepest,
        "minimum": found.minimum,
        "minimum_tenth": found.minimum / 10,
        "start_loss": found.start_loss,
        "lowest_loss": found.lowest_loss,
        "diverged": found.diverges,
        "still_falling": found.is_at_end,
        "from_step": first,
        "batch_size": loader.batch_size_at(first),
        "seed": recipe.seed,
        "curve": {"rate": swept.rates.tolist(), "loss": swept.after.tolist(), "smoothed": found.smoothed.tolist()},
    }


def settled(
    recipe: Recipe, branch: Branch, directory: RunDirectory, *, resume_from: Path | None, console: Console
) -> Recipe:
    """The recipe with a number where it says auto. A run that has one keeps it, and so does whoever resumes it."""
    if recipe.training.learning_rate != "auto":
        return recipe
    from bottega.engines.devices import choose_device
    from bottega.engines.ranks import any_rank, join_group

    world = join_group(choose_device(recipe.device), World.current())
    file = directory.path / JSON
    # Rank 0 alone looks: the others might be early, before --fresh has set the old run aside.
    if any_rank(world.is_main and _is_kept(directory, recipe, branch)):
        rate = float(json.loads(file.read_text(encoding="utf-8"))["suggestion"])
        console.say(f"training.learning_rate: auto is {rate:g}, as the range test found ({file})")
        return _changed(recipe, learning_rate=rate)
    found = resume.find(directory, resume_from, console.warn) if resume_from is not None else None
    start = found[0] if found is not None else None
    with bars(console.rich, in_bytes=False) as say:
        report = measured(recipe, branch, start=start, say=lambda done, total: say("lr-find", done, total))
    rate = report["suggestion"]
    if world.is_main:
        directory.write(file, json.dumps({**report, "key": _key(recipe, branch)}, indent=1) + "\n")
        try:
            draw(report, directory.path / PICTURE)
        except (EnvironmentProblem, OSError) as error:
            console.warn(f"no {PICTURE}: {error}; training goes on without it")
    console.say(f"training.learning_rate: auto is {rate:g}, found by a range test ({directory.path / PICTURE})")
    return _changed(recipe, learning_rate=rate)


def _is_kept(directory: RunDirectory, recipe: Recipe, branch: Branch) -> bool:
    """Whether the run has its rate. One that has begun must; before that, it may be one of another recipe or data."""
    file = directory.path / JSON
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        is_ours, is_number = kept["key"] == _key(recipe, branch), float(kept["suggestion"]) > 0
    except (OSError, ValueError, KeyError, TypeError):
        is_ours = is_number = False
    if not resume.has_begun(directory):
        return is_ours and is_number
    if not is_number:
        raise CheckpointError(
            f"{file} is missing or damaged, and with it the rate this run learns with; put it back, or start over with --fresh"
        )
    return True


def _key(recipe: Recipe, branch: Branch) -> str:
    text = json.dumps([recipe.results_key(), branch.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _changed(recipe: Recipe, **training: Any) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=training)})
