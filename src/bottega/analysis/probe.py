"""`bottega plan --probe`: a few real training steps on this device, for the time, the cost and the memory of a run."""

from __future__ import annotations

import re
import time
from typing import Any

from bottega.analysis.prediction import RunPrediction
from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.measurements import format_bytes
from bottega.reporting.tables import format_seconds
from bottega.run.compose import build_engine, build_loader
from bottega.techniques.training_plan import TrainingPlan
from bottega.world import World

NUM_WARMUP_STEPS = 3
"""Steps before the clock starts: they compile, allocate and choose kernels."""
MAX_TIMED_STEPS, MAX_TIMED_SECONDS = 20, 15.0
SECONDS_PER_UNIT = {"h": 3600.0, "hour": 3600.0, "min": 60.0, "s": 1.0, "d": 86400.0, "day": 86400.0}


def parse_price(text: str) -> float:
    """Return the price of a second, from a text such as 2.5/h."""
    match = re.fullmatch(r"\s*[$€£]?\s*(\d+(?:\.\d+)?)\s*(?:/\s*(\w+))?\s*", text)
    unit = (match[2] or "h").lower() if match is not None else ""
    if match is None or unit not in SECONDS_PER_UNIT:
        raise UsageError(f"--price {text}: expected a price per hour, such as 2.5/h")
    return float(match[1]) / SECONDS_PER_UNIT[unit]


def probe_run(recipe: Recipe, plan: TrainingPlan, prediction: RunPrediction, *, price: float | None) -> dict[str, Any]:
    """Train a temporary copy of the model for a few steps; return seconds per step, of the run, its cost and its peak memory.

    Evaluations, samples and checkpoints are not measured.
    """
    if World.from_environment().size > 1:
        raise UsageError("bottega plan --probe measures one process; start it without a launcher")
    engine = build_engine(recipe, plan.task)
    engine.is_compiled = prediction.is_compiled
    try:
        loader = build_loader(recipe, plan.training, engine, plan.order)
        started = time.perf_counter()
        num_warmups = min(NUM_WARMUP_STEPS, prediction.steps)
        batches = iter(loader(0))
        for step in range(num_warmups):
            engine.fetch(engine.train_step(step, next(batches)))
        warmup_seconds = time.perf_counter() - started
        seconds, num_steps = 0.0, 0
        while num_steps < min(MAX_TIMED_STEPS, prediction.steps) and seconds < MAX_TIMED_SECONDS:
            started = time.perf_counter()
            metrics = engine.train_step(num_warmups + num_steps, next(batches))
            engine.fetch(metrics)
            seconds += time.perf_counter() - started
            num_steps += 1
        memory = engine.memory_use()
    finally:
        engine.close()
    step_seconds = seconds / num_steps
    run_seconds = max(0.0, warmup_seconds + step_seconds * (prediction.steps - num_warmups))
    return {
        "device": memory.device,
        "warmup_seconds": warmup_seconds,
        "step_seconds": step_seconds,
        "samples_per_second": prediction.batch_size / step_seconds,
        "run_seconds": run_seconds,
        "cost": None if price is None else run_seconds * price,
        "peak": memory.peak,
    }


def format_probe(report: dict[str, Any], prediction: RunPrediction) -> str:
    """Format what was measured for the terminal."""
    peak = format_bytes(report["peak"])
    if prediction.memory is not None:
        peak += f", predicted {format_bytes(prediction.memory.peak)}"
    lines = [
        f"measured on {report['device']}",
        f"{'step':<14}{report['step_seconds']:.4g} s, {report['samples_per_second']:,.4g} samples/s",
        f"{'run':<14}{format_seconds(report['run_seconds'])} for {prediction.steps:,} steps, without evaluations, samples and "
        "checkpoints",
        f"{'memory':<14}{peak}",
    ]
    if report["cost"] is not None:
        lines.insert(3, f"{'cost':<14}{report['cost']:,.2f}")
    return "\n".join(lines)
