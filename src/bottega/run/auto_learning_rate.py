"""`training.learning_rate: auto`: a range test on a separate engine, whose result is saved with the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bottega.callbacks.console import Console
from bottega.callbacks.progress_bars import progress_bars
from bottega.config.recipe import Recipe
from bottega.core import checkpoint
from bottega.core.errors import CheckpointError
from bottega.core.rundir import RunDirectory
from bottega.engines import lr_range_test
from bottega.engines.backend import open_backend
from bottega.engines.lr_range_test import HIGHEST_RATE, LOWEST_RATE, NUM_STEPS
from bottega.plots.figure import try_plot
from bottega.plots.lr_range import plot_range_test
from bottega.run import resume
from bottega.run.compose import (
    build_engine,
    build_loader,
    build_training_plan,
    count_total_steps,
    set_learning_rate_schedule,
)
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
    """Run a range test of the learning rates from `low` to `high`; return its report. Nothing is written to disk.

    The test starts from initial weights, or from the verified checkpoint `checkpoint_path`. Training plan and engine are
    built for this test alone, because techniques may keep state in them.
    """
    lr_range_test.check_range(low, high, steps)
    # Compiling does not pay for a hundred steps, and averaged weights are not used.
    test_recipe = _replace_training_options(recipe, learning_rate=high, compile=False, ema=None)
    plan = build_training_plan(dependencies.resolve_references(test_recipe), workload)
    engine = build_engine(test_recipe, plan.task)
    plan = plan.complete(engine)
    loader = build_loader(test_recipe, plan.training, engine, plan.order)
    total = count_total_steps(test_recipe, loader)
    set_learning_rate_schedule(test_recipe, engine, total=total, steps_per_epoch=round(loader.steps_per_epoch))
    first_step = 0
    if checkpoint_path is not None:
        resume.check_frozen_unchanged(checkpoint.read_manifest(checkpoint_path), {"frozen": dict(plan.frozen)})
        first_step = resume.load_progress(checkpoint_path, loader=loader, total=total, report=lambda text: None).step
        engine.load(checkpoint_path)
    try:
        if plan.on_train_start is not None:
            plan.on_train_start(engine, loader, resumed=checkpoint_path is not None)
        sweep = lr_range_test.sweep_learning_rates(
            engine, loader, low=low, high=high, steps=steps, first_step=first_step, report_progress=report_progress
        )
    finally:
        # Hooks may hold the engine, which would then outlive the test, with the model in memory twice. The engine is not
        # closed, because that would destroy the process group that training uses next.
        engine.remove_hooks()
    result = lr_range_test.analyse_sweep(sweep, low=low, high=high, steps=steps)
    return {
        "suggestion": result.suggestion,
        "steepest": result.steepest,
        "minimum": result.minimum,
        "minimum_tenth": result.minimum / 10,
        "start_loss": result.start_loss,
        "lowest_loss": result.lowest_loss,
        "diverged": result.diverges_at,
        "still_falling": result.is_still_falling,
        "from_step": first_step,
        "batch_size": loader.batch_size_at(first_step),
        "seed": recipe.seed,
        "curve": {
            "rate": sweep.rates.tolist(),
            "loss": sweep.losses_after_update.tolist(),
            "smoothed": result.smoothed.tolist(),
        },
    }


def resolve_learning_rate(
    recipe: Recipe, workload: Workload, directory: RunDirectory, *, resume_from: Path | None, console: Console
) -> Recipe:
    """Return the recipe with a number in place of `auto`; a run that has a rate already keeps it."""
    if recipe.training.learning_rate != "auto":
        return recipe
    backend = open_backend(recipe.engine)
    rank = backend.join_ranks(recipe.device)
    report_file = directory.path / REPORT_FILE
    # Only rank 0 checks: the others might read before --fresh has renamed the old run.
    if backend.any_rank(rank == 0 and _has_rate(directory, recipe, workload)):
        rate = float(json.loads(report_file.read_text(encoding="utf-8"))["suggestion"])
        console.info(f"training.learning_rate: auto is {rate:g}, from the earlier range test ({report_file})")
        return _replace_training_options(recipe, learning_rate=rate)
    checkpoint_and_manifest = (
        resume.find_checkpoint(directory, resume_from, console.warn) if resume_from is not None else None
    )
    path = checkpoint_and_manifest[0] if checkpoint_and_manifest is not None else None
    with progress_bars(console.rich, in_bytes=False) as progress:
        report = run_range_test(
            recipe, workload, checkpoint_path=path, report_progress=lambda done, total: progress("lr-find", done, total)
        )
    rate = report["suggestion"]
    if rank == 0:
        directory.write(report_file, json.dumps({**report, "key": _compute_key(recipe, workload)}, indent=1) + "\n")
        try_plot(partial(plot_range_test, report), directory.path / PLOT_FILE, warn=console.warn)
    console.info(f"training.learning_rate: auto is {rate:g}, found by a range test ({report_file})")
    return _replace_training_options(recipe, learning_rate=rate)


def _has_rate(directory: RunDirectory, recipe: Recipe, workload: Workload) -> bool:
    """Return whether the run has a rate for this recipe and data; raise if it has checkpoints but no rate."""
    report_file = directory.path / REPORT_FILE
    try:
        report = json.loads(report_file.read_text(encoding="utf-8"))
        has_same_key, is_valid_rate = report["key"] == _compute_key(recipe, workload), float(report["suggestion"]) > 0
    except (OSError, ValueError, KeyError, TypeError):
        has_same_key = is_valid_rate = False
    if not resume.has_begun(directory):
        return has_same_key and is_valid_rate
    if not is_valid_rate:
        raise CheckpointError(
            f"{report_file} is missing or damaged; it contains the learning rate of this run; restore it, or start over with "
            "--fresh"
        )
    return True


def _compute_key(recipe: Recipe, workload: Workload) -> str:
    """Return a hash of the recipe and the data that the learning rate is for."""
    text = json.dumps([recipe.results_key(), workload.data.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _replace_training_options(recipe: Recipe, **options: Any) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=options)})
