"""`bottega plan --memory`: which micro-batch fits on which GPU, from steps measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bottega.analysis.plan import precompute_notes
from bottega.callbacks.console import Console
from bottega.callbacks.progress_bars import progress_bars
from bottega.config.load import get_global_batch_size
from bottega.core.engine import Engine
from bottega.core.errors import OutOfMemory, UsageError
from bottega.core.types import Batch
from bottega.data.sources.source import Source
from bottega.run.checks import find_problems, raise_all
from bottega.run.compose import build_engine, build_training_plan, prepare_workload
from bottega.run.train import ensure_dependency
from bottega.tasks import dependencies
from bottega.tasks.recipes import load_recipe, parse_overrides
from bottega.world import World

GIB = 1 << 30
GPU_SIZES = (16, 24, 40, 48, 80, 141)
"""Memory of common GPUs, in GiB."""
CUDA_CONTEXT = 1.0
"""GiB that are gone before the first tensor: the driver's context, kernels, and the workspaces of matmuls."""
MAX_MICRO_BATCH = 64
"""Examples in a forward beyond which nobody has asked; a recipe's own batch may be more."""


def plan_memory(words: list[str], *, quiet: bool = False) -> dict[str, Any]:
    """Train a copy of the recipe for a few steps with ever larger micro-batches, and throw it away."""
    if World.from_environment().size > 1:
        raise UsageError("bottega plan --memory: is measured by one process; start it without a launcher")
    sources, overrides = parse_overrides(words)
    recipe = load_recipe(sources, overrides).recipe
    raise_all(find_problems(recipe))
    for name in dependencies.referenced_dependencies(recipe):
        ensure_dependency(recipe, name, quiet=quiet)
    console = Console(unit="samples", quiet=quiet)
    plan = build_training_plan(
        dependencies.resolve_references(recipe), prepare_workload(dependencies.resolve_references(recipe), console)
    )
    # Every size would be compiled anew; what is compiled takes somewhat less.
    training = recipe.training.model_copy(
        update={"compile": False, "micro_batch_size": None, "gradient_accumulation_steps": None}
    )
    engine = build_engine(recipe.model_copy(update={"training": training}), plan.task)
    try:
        with progress_bars(console.rich, in_bytes=False) as say:
            batch = get_global_batch_size(recipe, 1)
            return measure_memory(
                engine,
                lambda size: longest_batch(plan.training, size),
                batch=batch,
                max_micro_batch=min(batch, MAX_MICRO_BATCH),
                report_progress=lambda done, total: say("memory", done, total),
                notes=precompute_notes(recipe),
            )
    finally:
        engine.close()


def longest_batch(source: Source, size: int) -> Batch:
    """So many samples of the data; the longest where they differ, because those decide what fits."""
    alike = source.length_order(len(source))
    order = np.arange(len(source)) if alike is None else np.asarray(alike)[::-1]
    index = order[np.arange(size) % len(order)]
    return source.rows(index, np.zeros(size, dtype=np.int64))


def measure_memory(
    engine: Engine,
    batch_of: Callable[[int], Batch],
    *,
    batch: int,
    max_micro_batch: int,
    report_progress: Any = lambda done, total: None,
    notes: list[str],
) -> dict[str, Any]:
    """What was measured, and which micro-batch it allows on each card, as plain values."""
    is_gpu = engine.device_type == "cuda"
    measured = engine.measure_memory(batch_of, max_micro_batch=max_micro_batch, report_progress=report_progress)
    if not measured.steps:
        raise OutOfMemory(f"out of memory on {engine.device} with one example; use a smaller model or shorter samples")
    trained = next(one for one in measured.models if one.name == "model")
    return {
        "device": measured.device,
        "is_peak": is_gpu,
        "precision": engine.precision,
        "weights": [one._asdict() for one in measured.models],
        "trained_parameters": trained.learning,
        "gradient_bytes": measured.gradients,
        "optimizer_bytes": measured.optimizer,
        "batch": batch,
        "rows": [row._asdict() for row in measured.steps],
        "cards": fit_gpus(measured.steps, batch) if is_gpu else [],
        "notes": notes if is_gpu else [*notes, NO_GPU_NOTE],
    }


NO_GPU_NOTE = (
    "no GPU here: what is kept for backward was counted on the CPU, in the precision it trains in; say the same on a "
    "machine with a GPU for its peak and for the table of cards"
)


def fit_gpus(rows: list[Any], batch: int) -> list[dict[str, Any]]:
    """The largest measured micro-batch that fits, and how often it is to be gone through for the recipe's batch."""
    found = []
    for size in GPU_SIZES:
        fits = [row for row in rows if row.reserved / GIB + CUDA_CONTEXT <= size]
        micro = max((row.micro_batch for row in fits), default=None)
        passes = -(-batch // micro) if micro else None
        found.append({"gib": size, "micro_batch": micro, "passes": passes})
    return found


def format_report(report: dict[str, Any]) -> str:
    lines = [f"{'model':<18}{'parameters':>16}{'learn':>14}{'memory':>12}  type"]
    for one in report["weights"]:
        counts = f"{one['parameters']:>16,}{one['learning']:>14,}"
        lines.append(f"{one['name']:<18}{counts}{_size(one['bytes']):>12}  {one['kind']}")
    lines += [f"{'gradients':<48}{_size(report['gradient_bytes']):>12}"]
    lines += [f"{'optimizer':<48}{_size(report['optimizer_bytes']):>12}", ""]
    what = "peak" if report["is_peak"] else "kept"
    lines += [
        f"measured on {report['device']}, {report['precision']}",
        f"{'micro-batch':>11}{what:>12}{'samples/s':>12}",
    ]
    lines += [
        f"{row['micro_batch']:>11}{_size(row['peak']):>12}{row['samples_per_second']:>12.2f}" for row in report["rows"]
    ]
    if report["cards"]:
        lines += ["", f"{'GPU memory':>11}{'micro-batch':>13}{'passes':>8}  for a batch of {report['batch']}"]
        for card in report["cards"]:
            fits = f"{card['micro_batch']:>13}{card['passes']:>8}" if card["micro_batch"] else f"{'none':>13}"
            lines.append(f"{card['gib']:>7} GiB{fits}")
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])


def _size(number: int) -> str:
    if number >= GIB / 10:
        return f"{number / GIB:.2f} GiB"
    return f"{number / (1 << 20):.1f} MiB" if number >= 1 << 20 else f"{number / (1 << 10):.1f} KiB"
