"""`bottega ledger`: the samples of one step, recomputed because the order is a function of the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bottega.core.batch import batch_length
from bottega.core.checkpoint import list_checkpoints
from bottega.core.errors import UsageError
from bottega.run.compose import build_plain_loader, build_training_plan
from bottega.run.saved import open_run
from bottega.tasks import dependencies
from bottega.tasks.data_paths import resolve_paths


def list_step_samples(path: Path, *, step: int, replay: bool) -> dict[str, Any]:
    """Return the samples of one step (from 1, as in the log); with `replay`, also the loss of that batch."""
    if step < 1:
        raise UsageError(f"--step {step}: expected 1 or more; steps are counted as in the log")
    saved = open_run(path, device="cpu")
    plan = build_training_plan(
        resolve_paths(dependencies.resolve_references(saved.recipe), saved.workload.data.started_in), saved.workload
    )
    source = plan.training
    world_size = _read_world_size(saved.directory.environment)
    loader = build_plain_loader(saved.recipe, source, data_size=world_size, order=plan.order)
    index, epoch = loader.indices(step - 1)
    report: dict[str, Any] = {
        "run": str(path),
        "step": step,
        "samples": index.tolist(),
        "epochs": epoch.tolist(),
        "described": [source.describe(int(i), int(e)) for i, e in zip(index[:4], epoch[:4], strict=True)],
    }
    num_trained_steps = max((manifest.step for _, manifest in list_checkpoints(saved.directory.checkpoints)), default=0)
    if step > num_trained_steps:
        report["note"] = f"the run has trained for {num_trained_steps} steps; step {step} would use these samples"
    if replay:
        batch = loader.batch(step - 1)
        # Only the task of the training plan can adapt to an episode.
        task = plan.task if "query" in batch else None
        sums = saved.engine.eval_step(batch, task=task).sums
        means = {name: float(total) / float(count) for name, (total, count) in sums.items() if count}
        report["replay"] = {
            "checkpoint": saved.checkpoint.name,
            "samples": batch_length(batch),
            "loss": saved.workload.summarise(means)["loss"],
        }
    return report


def _read_world_size(environment: Path) -> int:
    import json

    return int(json.loads(environment.read_text())["world"]) if environment.is_file() else 1


def format_report(report: dict[str, Any]) -> str:
    """Format the samples of a step for the terminal."""
    lines = [report["note"]] if "note" in report else []
    lines += [f"step {report['step']}: samples {', '.join(map(str, report['samples']))}"]
    for text in report["described"]:
        lines += ["", text]
    if "replay" in report:
        lines += ["", f"replayed with {report['replay']['checkpoint']}: loss {report['replay']['loss']:.6f}"]
    return "\n".join(lines)
