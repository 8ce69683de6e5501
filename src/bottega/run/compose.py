"""Construction of a run from its recipe: workload, training plan, engine, loader, schedule, cadences, callbacks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bottega.callbacks.console import Console
from bottega.callbacks.early_stopping import EarlyStopping, ReduceOnPlateau
from bottega.callbacks.jsonl import JsonLines, ModuleLines
from bottega.callbacks.memory import MemoryMonitor
from bottega.callbacks.profile import ProfileWriter
from bottega.callbacks.progress_bars import progress_bars
from bottega.callbacks.resources import Resources
from bottega.callbacks.stability import Stability
from bottega.callbacks.tensorboard import TensorBoard
from bottega.callbacks.tensorboard_hparams import flatten_hyperparameters
from bottega.callbacks.tracker_guard import TrackerGuard
from bottega.callbacks.wandb import WandB
from bottega.config.load import get_global_batch_size
from bottega.config.recipe import Recipe
from bottega.config.units import Interval
from bottega.core.callback import Callback
from bottega.core.engine import Engine
from bottega.core.errors import UsageError
from bottega.core.rundir import RunDirectory
from bottega.core.schedule import Schedule
from bottega.core.task import Task
from bottega.core.trainer import Cadences
from bottega.data.loading.loader import Loader, iter_eval_batches
from bottega.data.order.curriculum import compute_first_steps, plan_stages, rank_samples
from bottega.data.order.orders import CurriculumOrder, Order
from bottega.data.order.sequential import Sequential
from bottega.data.sources.source import Source
from bottega.engines.backend import open_backend
from bottega.metrics_log import MODULES_LOG
from bottega.similar_names import find_similar_names
from bottega.tasks import registry
from bottega.tasks.workload import Workload
from bottega.techniques.apply import apply_techniques
from bottega.techniques.training_plan import TrainingPlan


def prepare_workload(recipe: Recipe, console: Console, *, processor: Path | None = None) -> Workload:
    """Prepare the data of a recipe and open its task, with progress bars.

    `processor` is the processor folder of the run that is resumed; None starts a new run.
    """
    with progress_bars(console.rich) as progress:
        return registry.open_workload(recipe, progress=progress, processor=processor)


def build_training_plan(recipe: Recipe, workload: Workload) -> TrainingPlan:
    """Build the training plan of a workload, changed by the techniques of the recipe."""
    from bottega.run.saved import open_run

    return apply_techniques(recipe, workload, open_run=open_run)


def build_engine(recipe: Recipe, task: Task) -> Engine:
    """Build the engine with its models; its schedule is set once the length of the run is known."""
    backend = open_backend(recipe.engine)
    backend.limit_threads(recipe.cpu_threads)
    return backend.build_engine(
        task,
        recipe.training,
        seed=recipe.seed,
        device=recipe.device,
        deterministic=recipe.deterministic,
        micro_batch_size=resolve_micro_batch_size(recipe),
        pin_memory=recipe.data.pin_memory,
        mesh=recipe.distributed.mesh,
    )


def resolve_micro_batch_size(recipe: Recipe) -> int | None:
    """Return the number of samples in one forward pass of one process; None for the whole batch."""
    training = recipe.training
    if isinstance(training.micro_batch_size, int):
        return training.micro_batch_size
    return training.batch_size if training.gradient_accumulation_steps else None


def build_loader(recipe: Recipe, source: Source, engine: Engine, order: Order | None = None) -> Loader:
    """Build the loader of this process. `order` combines several sources; None is a plain shuffle."""
    # On a GPU the host is idle while the device works, so batches are prefetched; on a CPU prefetching would only compete for the cores.
    prefetch = (2 if engine.device_type == "cuda" else 0) if recipe.data.prefetch == "auto" else recipe.data.prefetch
    loader = build_plain_loader(recipe, source, data_size=engine.data_size, order=order)
    return replace(
        loader, data_rank=engine.data_rank, data_size=engine.data_size, workers=recipe.data.workers, prefetch=prefetch
    )


def build_plain_loader(recipe: Recipe, source: Source, *, data_size: int, order: Order | None = None) -> Loader:
    """Build a loader without workers or prefetching that yields the global batch of `data_size` ranks."""
    loader = Loader(source, get_global_batch_size(recipe, data_size), seed=recipe.seed, order=order)
    if isinstance(order, Sequential):
        epochs = recipe.training.num_epochs if recipe.training.max_steps is None else None
        return replace(
            loader, order=order.plan_turns(count_total_steps(recipe, loader), loader.batch_size, epochs=epochs)
        )
    curriculum = recipe.data.curriculum
    if curriculum is None:
        return loader
    if order is not None:
        raise UsageError("data.curriculum defines its own order of samples; remove data.mixture and data.replay")
    stages = plan_stages(
        curriculum,
        size=len(source),
        total_steps=count_total_steps(recipe, loader),
        steps_per_epoch=max(1, round(loader.steps_per_epoch)),
        batch_size=loader.batch_size,
        batch_multiplier=loader.batch_size // recipe.training.batch_size,
    )
    has_harder_samples = any(stage.num_samples < len(source) for stage in stages)
    # Stages of other batch sizes or rates alone need no difficulty, which packed text does not have.
    ranking = rank_samples(source, curriculum.by) if has_harder_samples else np.arange(len(source))
    return replace(loader, order=CurriculumOrder(ranking, stages, seed=recipe.seed))


def count_total_steps(recipe: Recipe, loader: Loader) -> int:
    """Return the length of the run in steps."""
    training = recipe.training
    if recipe.data.online is not None:
        return _count_stream_steps(recipe, loader)
    if training.max_steps is not None:
        return training.max_steps
    assert training.num_epochs is not None, "the schema requires max_steps or num_epochs"
    if isinstance(loader.order, Sequential) and loader.order.turn_lengths is not None:
        return loader.order.schedule.num_steps(loader.batch_size)  # each source fills whole batches
    return max(1, math.ceil(training.num_epochs * loader.steps_per_epoch))


def _count_stream_steps(recipe: Recipe, loader: Loader) -> int:
    """Return the number of steps over a stream: its length, or max_steps if that is set."""
    length, max_steps = max(1, math.ceil(loader.steps_per_epoch)), recipe.training.max_steps
    if max_steps is not None and max_steps > length:
        raise UsageError(
            f"training.max_steps: {max_steps} is more than the stream (data.online) has, which is {length} steps of "
            f"{loader.batch_size} samples; lower it, or remove it"
        )
    return max_steps or length


def set_learning_rate_schedule(recipe: Recipe, engine: Engine, *, total: int, steps_per_epoch: int) -> None:
    """Set the learning rate of each step: the peak rate, which curriculum stages may override, times the schedule."""
    peaks: list[float] = [get_peak_learning_rate(recipe)]
    first_steps: tuple[int, ...] = (0,)
    curriculum = recipe.data.curriculum
    if curriculum is not None and any(stage.learning_rate for stage in curriculum.stages):
        peaks = [stage.learning_rate or peaks[0] for stage in curriculum.stages]
        first_steps = compute_first_steps(curriculum, total, max(1, steps_per_epoch))
    schedules = [_build_schedule(recipe, peak, total=total, steps_per_epoch=steps_per_epoch) for peak in peaks]

    def compute_rate(step: int) -> float:
        stage = bisect_right(first_steps, step) - 1
        return peaks[stage] * schedules[stage](step)

    engine.set_schedule(compute_rate, total=total, steps_per_epoch=steps_per_epoch)


def describe_shortened_warmup(recipe: Recipe, total: int, steps_per_epoch: int) -> list[str]:
    """Return a note if the warm-up is longer than the run."""
    warmup = recipe.training.scheduler.warmup_steps.to_steps(total, max(1, steps_per_epoch))
    if warmup <= total or recipe.training.scheduler.name == "one_cycle":
        return []
    return [
        f"training.scheduler.warmup_steps: {warmup} is longer than the run and is shortened to its {total} steps, so the "
        "learning rate rises until the end"
    ]


def get_peak_learning_rate(recipe: Recipe) -> float:
    """Return the learning rate of the recipe, which a range test has replaced if it was `auto`."""
    rate = recipe.training.learning_rate
    assert rate != "auto", "a range test resolves it first"
    return rate


def _build_schedule(recipe: Recipe, peak: float, *, total: int, steps_per_epoch: int) -> Schedule:
    scheduler = recipe.training.scheduler
    warmup = scheduler.warmup_steps.to_steps(total, steps_per_epoch)
    return Schedule(
        scheduler.name,
        total=total,
        warmup=min(warmup, total),
        floor=_compute_floor(recipe, peak),
        cycle=scheduler.t_max or (max(1, (total - warmup) // scheduler.cycles) if scheduler.cycles else None),
        power=scheduler.power,
        gamma=scheduler.gamma,
        decay_fraction=scheduler.decay_fraction,
    )


def _compute_floor(recipe: Recipe, peak: float) -> float:
    """Return the smallest learning rate as a fraction of the peak."""
    scheduler = recipe.training.scheduler
    fraction = scheduler.eta_min / peak if scheduler.eta_min is not None else scheduler.min_ratio or 0.0
    return min(1.0, fraction)


def resolve_cadences(recipe: Recipe, total: int, loader: Loader, *, has_validation: bool) -> Cadences:
    """Return the cadences of the recipe in steps."""

    def to_steps(interval: Interval | None) -> int:
        return total if interval is None else interval.to_steps(total, max(1, round(loader.steps_per_epoch)))

    save_interval = recipe.checkpoint.every
    save_seconds = save_interval.seconds if save_interval is not None else None
    order = loader.order
    source_starts = order.schedule.first_steps(loader.batch_size)[1:] if isinstance(order, Sequential) else ()
    return Cadences(
        log=to_steps(recipe.logging.every),
        evaluate=to_steps(recipe.evaluation.every) if has_validation else 0,
        evaluate_at=frozenset(source_starts),
        save=0 if save_seconds is not None else to_steps(save_interval),
        save_seconds=save_seconds,
        sample=to_steps(recipe.samples.every) if recipe.samples.every is not None else 0,
        module_statistics=to_steps(recipe.logging.every) if recipe.logging.modules else 0,
        histograms=to_steps(recipe.logging.histograms) if recipe.logging.histograms is not None else 0,
    )


def check_metrics(recipe: Recipe, measured_metrics: tuple[str, ...], *, has_validation: bool) -> None:
    """Raise UsageError if evaluation or early stopping uses a metric that is not measured."""
    early_stopping, is_plateau = recipe.training.early_stopping, recipe.training.scheduler.name == "plateau"
    if not has_validation:
        if early_stopping is not None or is_plateau:
            key = "training.early_stopping" if early_stopping is not None else "training.scheduler: plateau"
            raise UsageError(
                f"{key} needs validation data, but data.validation is null; set it to a fraction such as 0.05"
            )
        return
    required = {"evaluation.metric": recipe.evaluation.metric}
    if early_stopping is not None:
        required["training.early_stopping.metric"] = early_stopping.metric
    for key, metric in required.items():
        if metric not in measured_metrics:
            similar = find_similar_names(metric, measured_metrics)
            hint = f"did you mean {similar[0]}?" if similar else f"choose from {', '.join(measured_metrics)}"
            raise UsageError(f"{key}: {metric} is not measured; {hint}")


def make_validation_batches(recipe: Recipe, source: Source, loader: Loader) -> Any:
    """Return a function that returns an iterator over the batches of the validation data."""
    # At most as many samples at once as in a forward pass of training, so that they fit in memory.
    micro_batch_size = resolve_micro_batch_size(recipe)
    batch_size = recipe.evaluation.batch_size or min(
        loader.batch_size, micro_batch_size * loader.data_size if micro_batch_size else loader.batch_size
    )
    limit = batch_size * recipe.evaluation.max_batches if recipe.evaluation.max_batches else None
    return lambda: iter_eval_batches(
        source, batch_size, data_rank=loader.data_rank, data_size=loader.data_size, limit=limit
    )


def build_callbacks(
    recipe: Recipe,
    directory: RunDirectory,
    console: Console,
    *,
    is_main: bool,
    compute: Mapping[str, float],
    metrics: tuple[str, ...] = (),
) -> list[Callback]:
    """Build the callbacks: early stopping and plateau on every process; logging on the main one.

    `compute` is what `measure_compute` returned, `metrics` the names of the metrics that an evaluation measures.
    """
    control_callbacks = _build_control_callbacks(recipe)
    if not is_main:
        return control_callbacks
    loggers: list[Callback] = [Stability()]
    loggers += [Resources(directory.path, compute=compute)] if recipe.logging.resources else []
    loggers += [console, JsonLines(directory.metrics, console.warn)]
    if recipe.logging.modules:
        loggers.append(ModuleLines(directory.path / MODULES_LOG, console.warn))
    trackers = _build_trackers(recipe, directory, console, metrics)
    return [*control_callbacks, *loggers, *(TrackerGuard(tracker, console.warn) for tracker in trackers)]


def _build_trackers(
    recipe: Recipe, directory: RunDirectory, console: Console, metrics: tuple[str, ...]
) -> list[Callback]:
    trackers: list[Callback] = []
    if recipe.logging.tensorboard:
        trackers.append(
            TensorBoard(
                directory.path,
                console.warn,
                hyperparameters=flatten_hyperparameters(recipe.results_key()),
                metrics=metrics,
                best_metric=recipe.evaluation.metric,
            )
        )
    wandb = recipe.logging.wandb
    if wandb.is_active:
        options = {**wandb.model_dump(), "name": wandb.name or directory.path.name}
        project = wandb.project or "bottega"
        trackers.append(
            WandB(
                folder=directory.path,
                project=project,
                options=options,
                config=recipe.to_plain_dict(),
                warn=console.warn,
                best_metric=recipe.evaluation.metric,
            )
        )
    return trackers


def build_monitors(recipe: Recipe, directory: RunDirectory, engine: Engine, console: Console) -> list[Callback]:
    """Build the callbacks of the main process that measure the engine: its memory, and the steps of `profile`."""
    monitors: list[Callback] = [MemoryMonitor(directory.path / "memory.json", engine.memory_use, console.warn)]
    if recipe.profile.steps is not None:
        folder = directory.path / "profile"
        monitors.append(ProfileWriter(engine.profiler, recipe.profile.steps, folder, console))
    return monitors


def check_profile(recipe: Recipe, total: int) -> None:
    """Raise UsageError if steps are to be profiled that the run does not have."""
    if recipe.profile.steps is not None and recipe.profile.steps[1] > total:
        first, last = recipe.profile.steps
        raise UsageError(
            f"profile.steps: [{first}, {last}] is past the end of the run, which has {total} steps; lower it"
        )


def _build_control_callbacks(recipe: Recipe) -> list[Callback]:
    callbacks: list[Callback] = []
    early_stopping, scheduler = recipe.training.early_stopping, recipe.training.scheduler
    if early_stopping is not None:
        callbacks.append(
            EarlyStopping(
                metric=early_stopping.metric,
                maximise=early_stopping.is_maximised,
                patience=early_stopping.patience,
                threshold=early_stopping.threshold,
            )
        )
    if scheduler.name == "plateau":
        callbacks.append(
            ReduceOnPlateau(
                metric=recipe.evaluation.metric,
                maximise=recipe.evaluation.is_maximised,
                patience=scheduler.patience,
                threshold=0.0,
                factor=scheduler.factor,
                floor=_compute_floor(recipe, get_peak_learning_rate(recipe)),
            )
        )
    return callbacks
