"""The rate that `training.learning_rate: auto` takes: found by a range test on an engine of its own, kept with the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.callbacks.console import Console
from bottega.callbacks.progress_bars import progress_bars
from bottega.config.recipe import Recipe
from bottega.core import checkpoint
from bottega.core.errors import CheckpointError, EnvironmentProblem
from bottega.core.rundir import RunDirectory
from bottega.engines import lr_range_test as rate_range
from bottega.engines.backend import open_backend
from bottega.engines.lr_range_test import HIGHEST_RATE, LOWEST_RATE, NUM_STEPS
from bottega.run import resume
from bottega.run.compose import build_engine, build_loader, count_total_steps, set_learning_rate_schedule
from bottega.run.range_picture import draw
from bottega.run.training_plan import build_training_plan
from bottega.tasks import dependencies
from bottega.tasks.workload import Workload

REPORT_FILE, PLOT_FILE = "lr-find.json", "lr-find.png"


def run_range_test(
    recipe: Recipe,
    workload: Workload,
    *,
    checkpoint_path: Path | None = None,
    low: float = LOWEST_RATE,
    high: float = HIGHEST_RATE,
    steps: int = NUM_STEPS,
    report_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """What a range test finds, from initial weights or from a checkpoint `start` that was verified. Nothing on disk is
    touched; lesson and engine are made for it alone, because a technique may keep something in them."""
    rate_range.check_range(low, high, steps)
    # A graph would be compiled for a hundred steps only, and nobody looks at averaged weights.
    alone = _changed(recipe, learning_rate=high, compile=False, ema=None)
    plan = build_training_plan(dependencies.resolve_references(alone), workload)
    engine = build_engine(alone, plan.task)
    plan = plan.complete(engine)
    loader = build_loader(alone, plan.training, engine, plan.order)
    total = count_total_steps(alone, loader)
    set_learning_rate_schedule(alone, engine, total=total, steps_per_epoch=round(loader.steps_per_epoch))
    first = 0
    if checkpoint_path is not None:
        resume.check_frozen_unchanged(checkpoint.read_manifest(checkpoint_path), {"frozen": dict(plan.frozen)})
        first = resume.load_progress(checkpoint_path, loader=loader, total=total, say=lambda text: None).step
        engine.load(checkpoint_path)
    try:
        if plan.begin is not None:
            plan.begin(engine, loader, resumed=checkpoint_path is not None)
        swept = rate_range.sweep_learning_rates(
            engine, loader, low=low, high=high, steps=steps, first=first, report_progress=report_progress
        )
    finally:
        # It may hold the engine, which would then outlive the test: the model would be in memory twice. Not closed,
        # because that ends the group of ranks, and they are about to train.
        engine.remove_hooks()
    found = rate_range.analyse_sweep(swept, low=low, high=high, steps=steps)
    return {
        "suggestion": found.suggestion,
        "steepest": found.steepest,
        "minimum": found.minimum,
        "minimum_tenth": found.minimum / 10,
        "start_loss": found.start_loss,
        "lowest_loss": found.lowest_loss,
        "diverged": found.diverges_at,
        "still_falling": found.is_still_falling,
        "from_step": first,
        "batch_size": loader.batch_size_at(first),
        "seed": recipe.seed,
        "curve": {
            "rate": swept.rates.tolist(),
            "loss": swept.losses_after_update.tolist(),
            "smoothed": found.smoothed.tolist(),
        },
    }


def resolve_learning_rate(
    recipe: Recipe, workload: Workload, directory: RunDirectory, *, resume_from: Path | None, console: Console
) -> Recipe:
    """The recipe with a number where it says auto. A run that has one keeps it, and so does whoever resumes it."""
    if recipe.training.learning_rate != "auto":
        return recipe
    backend = open_backend(recipe.engine)
    rank = backend.join_ranks(recipe.device)
    file = directory.path / REPORT_FILE
    # Rank 0 alone looks: the others might be early, before --fresh has set the old run aside.
    if backend.any_rank(rank == 0 and _is_kept(directory, recipe, workload)):
        rate = float(json.loads(file.read_text(encoding="utf-8"))["suggestion"])
        console.info(f"training.learning_rate: auto is {rate:g}, as the range test found ({file})")
        return _changed(recipe, learning_rate=rate)
    found = resume.find_checkpoint(directory, resume_from, console.warn) if resume_from is not None else None
    start = found[0] if found is not None else None
    with progress_bars(console.rich, in_bytes=False) as say:
        report = run_range_test(
            recipe, workload, checkpoint_path=start, report_progress=lambda done, total: say("lr-find", done, total)
        )
    rate = report["suggestion"]
    if rank == 0:
        directory.write(file, json.dumps({**report, "key": _key(recipe, workload)}, indent=1) + "\n")
        try:
            draw(report, directory.path / PLOT_FILE)
        except (EnvironmentProblem, OSError) as error:
            console.warn(f"no {PLOT_FILE}: {error}; training goes on without it")
    console.info(f"training.learning_rate: auto is {rate:g}, found by a range test ({directory.path / PLOT_FILE})")
    return _changed(recipe, learning_rate=rate)


def _is_kept(directory: RunDirectory, recipe: Recipe, workload: Workload) -> bool:
    """Whether the run has its rate. One that has begun must; before that, it may be one of another recipe or data."""
    file = directory.path / REPORT_FILE
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        is_ours, is_number = kept["key"] == _key(recipe, workload), float(kept["suggestion"]) > 0
    except (OSError, ValueError, KeyError, TypeError):
        is_ours = is_number = False
    if not resume.has_begun(directory):
        return is_ours and is_number
    if not is_number:
        raise CheckpointError(
            f"{file} is missing or damaged, and with it the rate this run learns with; put it back, or start over with --fresh"
        )
    return True


def _key(recipe: Recipe, workload: Workload) -> str:
    text = json.dumps([recipe.results_key(), workload.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _changed(recipe: Recipe, **training: Any) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=training)})
