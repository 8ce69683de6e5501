"""Online learning: training on a stream, with each new sample evaluated before it is trained on (prequential)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from bottega.callbacks.console import Console
from bottega.callbacks.prequential import PREFIX, Prequential
from bottega.config.recipe import Recipe
from bottega.core.batch import batch_length, slice_batch
from bottega.core.engine import Engine
from bottega.core.errors import OutOfMemory, UsageError
from bottega.core.rundir import RunDirectory
from bottega.core.types import Batch, Sums
from bottega.data.loading.loader import Loader
from bottega.data.order.online import build_online_stream
from bottega.data.order.orders import OnlineOrder, Order
from bottega.data.sources.source import Source
from bottega.data.sources.zip_sources import Unshuffled, Zip
from bottega.tasks.workload import Workload
from bottega.techniques.training_plan import TrainingPlan


def apply_stream(plan: TrainingPlan, recipe: Recipe, workload: Workload) -> TrainingPlan:
    """Return the plan of a stream, which evaluates each new sample first. Applied after all techniques."""
    online = recipe.data.online
    assert online is not None, "only called with data.online"
    order = plan.order
    if order is None:
        order = build_online_stream(recipe, len(plan.training))
    elif not isinstance(order, Unshuffled):
        raise UsageError(
            "data.online: a stream reads samples in the order of the data, but the samples have another order (a mixture, or "
            "images in buckets); keep one"
        )
    metrics_callback = Prequential(workload.summarise)

    def add_evaluation(engine: Engine, loader: Loader, *, resumed: bool) -> None:
        def evaluate(step: int, batch: Batch) -> None:
            for sums in _evaluate_in_parts(
                engine, _weight_new_samples(batch, loader, step), max_examples=recipe.evaluation.batch_size
            ):
                metrics_callback.add(sums)

        engine.add_hook(evaluate)

    streamed_plan = replace(
        plan,
        order=order,
        notes=(*plan.notes, _describe_stream(recipe, order, plan.training)),
        callbacks=(*plan.callbacks, metrics_callback),
        summarise=lambda metrics: metrics_callback.add_metrics(plan.summarise(metrics)),
        on_train_end=lambda directory, console: _report_metrics(plan, metrics_callback, directory, console),
    )
    return streamed_plan.with_train_start_hook(add_evaluation)


def _evaluate_in_parts(engine: Engine, batch: Batch, *, max_examples: int | None) -> Iterator[Sums]:
    """Evaluate a batch in parts of at most the micro-batch size, and at most `max_examples` examples over all ranks."""
    size = batch_length(batch)
    limits = [engine.micro_batch_size, -(-max_examples // engine.data_size) if max_examples is not None else None]
    part_size, start = min([size, *(limit for limit in limits if limit is not None)]), 0
    while start < size:
        try:
            sums = engine.eval_step(slice_batch(batch, start, start + part_size), with_rows=False).sums
        except OutOfMemory:
            # A single process finds its micro-batch size in the first step, after this; several ranks already have it.
            if part_size == 1 or engine.world_size > 1:
                raise
            part_size = -(-part_size // 2)
            continue
        yield sums
        start += part_size


def _weight_new_samples(batch: Batch, loader: Loader, step: int) -> dict[str, Any]:
    """Return the batch for evaluation, with weight 0 for replayed samples, which were trained on before.

    `index` is the position of each sample in the stream, which its noise depends on.
    """
    size = loader.batch_size_at(step) // loader.data_size
    positions = loader.samples_before(step) + loader.data_rank * size + np.arange(size)
    source, order = loader.source, loader.order
    assert order is not None
    if isinstance(source, Zip) and source.orders is not None:
        task_batches = {
            name: _mask_replayed(batch[name], task_order, positions) for name, task_order in source.orders.items()
        }
        return {**batch, **task_batches, "index": positions}
    return {**_mask_replayed(batch, order, positions), "index": positions}


def _mask_replayed(batch: Batch, order: Order, positions: np.ndarray) -> dict[str, Any]:
    assert isinstance(order, OnlineOrder), "checked when the stream was built"
    is_new = order.is_new(positions).astype(np.float32)
    return {**batch, "weight": batch["weight"] * is_new if "weight" in batch else is_new}


def _describe_stream(recipe: Recipe, order: Order, source: Source) -> str:
    online = recipe.data.online
    assert online is not None
    num_samples = max(map(len, source.sources.values())) if isinstance(source, Zip) else len(source)
    memory = f"the last {online.memory:,}" if online.memory is not None else "all earlier"
    replay = f", with {online.replay:.0%} of each batch replayed from {memory} samples" if online.replay else ""
    return (
        f"online: {num_samples:,} samples once each, in the order of the data{replay}; the metrics online/... evaluate each "
        "sample before it is trained on"
    )


def _report_metrics(
    plan: TrainingPlan, metrics_callback: Prequential, directory: RunDirectory, console: Console
) -> None:
    if plan.on_train_end is not None:
        plan.on_train_end(directory, console)
    metrics = console.headline_metrics(metrics_callback.compute_metrics())
    if metrics:
        text = ", ".join(f"{name.removeprefix(PREFIX)} {value:.4f}" for name, value in metrics.items())
        console.info(f"\nonline, each sample before it was trained on: {text}")
