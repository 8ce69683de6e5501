"""Online learning: the samples as a stream, measured when they are new and then learnt from."""

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
    """The lesson as a stream, once all techniques have had their say."""
    online = recipe.data.online
    assert online is not None, "asked for by data.online"
    order = plan.order
    if order is None:
        order = build_online_stream(recipe, len(plan.training))
    elif not isinstance(order, Unshuffled):
        raise UsageError(
            "data.online: a stream takes its samples as they come, and these have an order of their own (a mixture, or images "
            "in buckets); leave one out"
        )
    watch = Prequential(workload.summarise)

    def begin(engine: Engine, loader: Loader, *, resumed: bool) -> None:
        def measure(step: int, batch: Batch) -> None:
            for sums in _measured(engine, _weighed(batch, loader, step), at_most=recipe.evaluation.batch_size):
                watch.add(sums)

        engine.add_hook(measure)

    changed = replace(
        plan,
        order=order,
        notes=(*plan.notes, _told(recipe, order, plan.training)),
        callbacks=(*plan.callbacks, watch),
        summary=lambda metrics: watch.add_metrics(plan.summary(metrics)),
        finish=lambda directory, console: _finish(plan, watch, directory, console),
    )
    return changed.with_train_start_hook(begin)


def _measured(engine: Engine, batch: Batch, *, at_most: int | None) -> Iterator[Sums]:
    """Part by part: no more at once than a forward of training has, nor than `at_most` of all ranks together."""
    size = batch_length(batch)
    limits = [engine.micro_batch_size, -(-at_most // engine.data_size) if at_most is not None else None]
    at_once, at = min([size, *(limit for limit in limits if limit is not None)]), 0
    while at < size:
        try:
            sums = engine.eval_step(slice_batch(batch, at, at + at_once), with_rows=False).sums
        except OutOfMemory:
            # One process learns what fits from its first step, which comes after this; several have found it together.
            if at_once == 1 or engine.world > 1:
                raise
            at_once = -(-at_once // 2)
            continue
        yield sums
        at += at_once


def _weighed(batch: Batch, loader: Loader, step: int) -> dict[str, Any]:
    """The batch as an evaluation has it, with weight 0 for what is not new: that was learnt from already."""
    share = loader.batch_size_at(step) // loader.data_size
    positions = loader.samples_before(step) + loader.data_rank * share + np.arange(share)
    source, order = loader.source, loader.order
    assert order is not None
    if isinstance(source, Zip) and source.orders is not None:
        parts = {name: _only_new(batch[name], own, positions) for name, own in source.orders.items()}
        return {**batch, **parts, "index": positions}
    return {**_only_new(batch, order, positions), "index": positions}


def _only_new(batch: Batch, order: Order, positions: np.ndarray) -> dict[str, Any]:
    assert isinstance(order, OnlineOrder), "asked for when the stream was made"
    is_new = order.is_new(positions).astype(np.float32)
    return {**batch, "weight": batch["weight"] * is_new if "weight" in batch else is_new}


def _told(recipe: Recipe, order: Order, source: Source) -> str:
    online = recipe.data.online
    assert online is not None
    longest = max(map(len, source.sources.values())) if isinstance(source, Zip) else len(source)
    of = f"the last {online.memory:,}" if online.memory is not None else "all"
    again = f", and {online.replay:.0%} of what is seen comes again, of {of} before" if online.replay else ""
    return f"online: {longest:,} samples once each, in the order of the data{again}; online/... measures each when it is new"


def _finish(plan: TrainingPlan, watch: Prequential, directory: RunDirectory, console: Console) -> None:
    if plan.finish is not None:
        plan.finish(directory, console)
    found = console.headline_metrics(watch.compute_metrics())
    if found:
        said = ", ".join(f"{name.removeprefix(PREFIX)} {value:.4f}" for name, value in found.items())
        console.info(f"\nonline, each sample before it was learnt from: {said}")
