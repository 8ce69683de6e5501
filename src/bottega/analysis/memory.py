"""`bottega plan --memory`: the largest micro-batch that fits on each GPU size, from steps measured on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bottega.analysis.plan import list_precompute_notes
from bottega.analysis.prediction import build_longest_batch
from bottega.callbacks.console import Console
from bottega.callbacks.progress_bars import progress_bars
from bottega.config.load import get_global_batch_size
from bottega.core.engine import Engine
from bottega.core.errors import UsageError
from bottega.core.types import Batch
from bottega.engines.out_of_memory import build_out_of_memory_error
from bottega.measurements import format_bytes
from bottega.run.checks import find_problems, raise_all
from bottega.run.compose import build_engine, build_training_plan, prepare_workload
from bottega.run.train import ensure_dependency
from bottega.tasks import dependencies
from bottega.tasks.recipes import load_recipe, parse_overrides
from bottega.world import World

GIB = 1 << 30
GPU_SIZES = (16, 24, 40, 48, 80, 141)
"""Memory of common GPUs, in GiB."""
CUDA_CONTEXT_GIB = 1.0
"""Memory in use before the first tensor: the CUDA context, kernels and cuBLAS workspaces."""
MAX_MICRO_BATCH = 64
"""Largest micro-batch that is measured; the batch of a recipe may be larger."""


def plan_memory(words: list[str], *, quiet: bool = False) -> dict[str, Any]:
    """Train a temporary copy of the model for a few steps with growing micro-batches, and report the memory."""
    if World.from_environment().size > 1:
        raise UsageError("bottega plan --memory measures one process; start it without a launcher")
    sources, overrides = parse_overrides(words)
    recipe = load_recipe(sources, overrides).recipe
    raise_all(find_problems(recipe))
    for name in dependencies.find_referenced_dependencies(recipe):
        ensure_dependency(recipe, name, quiet=quiet)
    console = Console(unit="samples", quiet=quiet)
    resolved = dependencies.resolve_references(recipe)
    plan = build_training_plan(resolved, prepare_workload(resolved, console))
    # Without compilation, as every size would be compiled anew; a compiled model takes somewhat less memory.
    training = recipe.training.model_copy(
        update={"compile": False, "micro_batch_size": None, "gradient_accumulation_steps": None}
    )
    engine = build_engine(recipe.model_copy(update={"training": training}), plan.task)
    try:
        with progress_bars(console.rich, in_bytes=False) as report_progress:
            batch_size = get_global_batch_size(recipe, 1)
            return measure_memory(
                engine,
                lambda size: build_longest_batch(plan.training, size),
                batch_size=batch_size,
                max_micro_batch=min(batch_size, MAX_MICRO_BATCH),
                report_progress=lambda done, total: report_progress("memory", done, total),
                notes=list_precompute_notes(recipe),
            )
    finally:
        engine.close()


def measure_memory(
    engine: Engine,
    build_batch: Callable[[int], Batch],
    *,
    batch_size: int,
    max_micro_batch: int,
    report_progress: Any = lambda done, total: None,
    notes: list[str],
) -> dict[str, Any]:
    """Measure memory by micro-batch and find the micro-batch that fits on each GPU; return plain values."""
    is_gpu = engine.device_type == "cuda"
    measurement = engine.measure_memory(build_batch, max_micro_batch=max_micro_batch, report_progress=report_progress)
    if not measurement.steps:
        advice = "use a smaller model or shorter samples"
        raise build_out_of_memory_error(engine.memory_use(), "with one example", advice=advice)
    trained_model = next(model for model in measurement.models if model.name == "model")
    return {
        "device": measurement.device,
        "is_peak": is_gpu,
        "precision": engine.precision,
        "weights": [model._asdict() for model in measurement.models],
        "trained_parameters": trained_model.learning,
        "gradient_bytes": measurement.gradient_bytes,
        "optimizer_bytes": measurement.optimizer_bytes,
        "batch": batch_size,
        "rows": [row._asdict() for row in measurement.steps],
        "cards": fit_gpus(measurement.steps, batch_size) if is_gpu else [],
        "notes": notes if is_gpu else [*notes, NO_GPU_NOTE],
    }


NO_GPU_NOTE = (
    "there is no GPU here: the activations saved for backward were measured on the CPU, in its training precision; run the "
    "same command on a machine with a GPU for its peak memory and the table of GPUs"
)


def fit_gpus(rows: list[Any], batch_size: int) -> list[dict[str, Any]]:
    """Return for each GPU size the largest measured micro-batch that fits, and the number of passes for a batch."""
    cards = []
    for size in GPU_SIZES:
        fitting_rows = [row for row in rows if row.reserved / GIB + CUDA_CONTEXT_GIB <= size]
        micro_batch_size = max((row.micro_batch for row in fitting_rows), default=None)
        passes = -(-batch_size // micro_batch_size) if micro_batch_size else None
        cards.append({"gib": size, "micro_batch": micro_batch_size, "passes": passes})
    return cards


def format_report(report: dict[str, Any]) -> str:
    """Format a report for the terminal."""
    lines = [f"{'model':<18}{'parameters':>16}{'trainable':>14}{'memory':>12}  type"]
    for model in report["weights"]:
        counts = f"{model['parameters']:>16,}{model['learning']:>14,}"
        lines.append(f"{model['name']:<18}{counts}{format_bytes(model['bytes']):>12}  {model['kind']}")
    lines += [f"{'gradients':<48}{format_bytes(report['gradient_bytes']):>12}"]
    lines += [f"{'optimizer':<48}{format_bytes(report['optimizer_bytes']):>12}", ""]
    title = "peak" if report["is_peak"] else "activations"
    lines += [
        f"measured on {report['device']}, {report['precision']}",
        f"{'micro-batch':>11}{title:>12}{'samples/s':>12}",
    ]
    lines += [
        f"{row['micro_batch']:>11}{format_bytes(row['peak']):>12}{row['samples_per_second']:>12.2f}"
        for row in report["rows"]
    ]
    if report["cards"]:
        lines += ["", f"{'GPU memory':>11}{'micro-batch':>13}{'passes':>8}  for a batch of {report['batch']}"]
        for card in report["cards"]:
            fit_text = f"{card['micro_batch']:>13}{card['passes']:>8}" if card["micro_batch"] else f"{'none':>13}"
            lines.append(f"{card['gib']:>7} GiB{fit_text}")
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])
