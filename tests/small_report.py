"""Run directories for reports, written without training: metrics, samples of every medium, evaluations, hostile texts."""

from __future__ import annotations

import io
import json
import math
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HOSTILE = "<script>window.owned = 1</script><img src=x onerror='window.owned = 1'>\"'&\u2028"
"""Text that would run code on a page that does not escape it."""
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)


def write_run(
    folder: Path,
    *,
    task: str = "classify",
    num_logs: int = 30,
    recipe: Mapping[str, Any] | None = None,
    metrics: str | None = None,
) -> Path:
    """Write a finished run with `num_logs` logs and an evaluation after every tenth; `metrics` replaces metrics.jsonl."""
    folder.mkdir(parents=True)
    values = {"task": task, "seed": 0, "data": {"train": {"kind": "jsonl", "path": "data.jsonl"}}}
    values |= {"evaluation": {"metric": "accuracy"}, "training": {"max_steps": 10 * num_logs}, **(recipe or {})}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    environment = {
        "bottega": "0",
        "parameters": 1000,
        "device": "cpu",
        "world": 1,
        "unit": "texts",
        "command": ["bottega"],
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "data.json").write_text(
        json.dumps({"splits": {"train": 90, "validation": 10}, "classes": {"a": 60, "b": 30}})
    )
    (folder / "metrics.jsonl").write_text(metrics if metrics is not None else make_metrics(num_logs))
    modules = {"layers.0": {"gradient_norm": 0.5, "update_ratio": 1e-3, "dead_fraction": 0.25}}
    rows = [{"step": 10 * i, "kind": "modules", "samples": 320 * i, "modules": modules} for i in range(1, 4)]
    (folder / "modules.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_metrics(num_logs: int) -> str:
    """Return the text of a metrics.jsonl with a falling loss."""
    lines = []
    for number in range(1, num_logs + 1):
        step = 10 * number
        row = {
            "step": step,
            "kind": "train",
            "samples": 32 * step,
            "loss": 3 * math.exp(-number / 20) + 0.1 * (number % 3),
        }
        row |= {"learning_rate": 1e-3, "grad_norm": 1.5, "samples_per_second": 320.0, "units_per_second": 320.0}
        row |= {"step_seconds": 0.1, "data_wait": 0.01, "cpu_percent": 99.0, "ram_gib": 0.5}
        lines.append(json.dumps(row))
        if number % 10 == 0:
            measured = {"loss": 3 * math.exp(-number / 20), "accuracy": 1 - math.exp(-number / 20)}
            lines.append(json.dumps({"step": step, "kind": "eval", "samples": 32 * step, **measured}))
    return "".join(line + "\n" for line in lines)


def write_samples(run: Path, steps: tuple[int, ...] = (100, 200, 300), text: str = "once upon a time") -> None:
    """Write a text, an image and a sound for each step."""
    for step in steps:
        folder = run / "samples" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "00.txt").write_text(f"{text} at {step}")
        (folder / "00.png").write_bytes(PNG)
        (folder / "00.wav").write_bytes(make_wav())


def make_wav(num_samples: int = 800) -> bytes:
    """Return a tenth of a second of silence."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"\0\0" * num_samples)
    return buffer.getvalue()


def write_evaluation(run: Path, classes: tuple[str, ...] = ("a", "b")) -> None:
    """Write the evaluation of a classifier with a confusion matrix and a calibration."""
    folder = run / "evaluation" / "validation"
    folder.mkdir(parents=True)
    per_class = {name: {"precision": 0.5, "recall": 0.75, "f1": 0.6, "support": 4} for name in classes}
    counts = [[3 if i == j else 1 for j in range(len(classes))] for i in range(len(classes))]
    fields: dict[str, Any] = {
        "loss": 0.5,
        "accuracy": 0.75,
        "split": "validation",
        "samples": 8,
        "per_class": per_class,
    }
    fields["confusion"] = {"classes": list(classes), "counts": counts}
    fields["calibration"] = {
        "edges": [0, 0.5, 1],
        "counts": [0, 8],
        "confidence": [None, 0.8],
        "accuracy": [None, 0.75],
    }
    (folder / "metrics.json").write_text(json.dumps(fields))


def write_study(folder: Path, *, key: str = "training.learning_rate") -> Path:
    """Write the study.json of a search for a trade-off between two metrics."""
    folder.mkdir(parents=True)
    trials = [
        {
            "number": i,
            "state": "complete",
            "keys": {key: 10.0**-i, "model.kind": "cnn"},
            "values": [0.5 + i / 10, 100.0 * i],
            "curve": [[1.0, 0.5]],
            "step": 10,
            "steps": 10,
            "seconds": 1.0,
            "run": f"trial-{i}",
            "reason": None,
        }
        for i in range(1, 4)
    ]
    failed = {**trials[0], "number": 4, "state": "failed", "values": None, "reason": "out of memory"}
    fields: dict[str, Any] = {"study": folder.name, "task": "classify", "recipe": "classify/cnn", "method": "tpe"}
    fields |= {"metrics": [{"name": "accuracy", "mode": "max"}, {"name": "parameters", "mode": "min"}]}
    fields |= {"space": {key: "log(0.0001, 0.1)", "model.kind": '["cnn"]'}, "counts": {"complete": 3, "failed": 1}}
    fields |= {"trials": [*trials, failed], "pareto": [1, 3], "importances": {key: 0.9}, "summary": "a summary"}
    (folder / "study.json").write_text(json.dumps(fields))
    return folder
