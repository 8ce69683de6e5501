"""A small recipe of routing/mind: routing, language and memory tasks over one state-space trunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import small_multitask
import small_recall
import small_routing
from small_run import write_text

TRUNK: dict[str, Any] = {
    "model.hidden_size": 16,
    "model.num_layers": 2,
    "model.state_size": 8,
}


def parts(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    routing = {
        "data.train": {"path": str(small_routing.write_rows(folder))},
        "data.validation.split": 0.25,
        "data.test": None,
        "model.trunk": "state_space",
        "model.token_size": 4,
        "model.num_experts": 3,
        "model.expert_size": 8,
        "model.router": "spiking",
        "model.time_steps": 4,
    }
    text = {
        "data.train": {"path": str(write_text(folder / "text.txt", words=200))},
        "data.sequence_length": 16,
        "data.limit": None,
        "model.num_experts": 2,
        "model.expert_size": 8,
        "model.router": "spiking",
    }
    memory = {
        key: value for key, value in small_recall.lasting(folder).items() if key.startswith(("data.", "model.memory"))
    }
    return {
        "routing": {"recipe": "routing/large", "settings": {**routing, **TRUNK}, "metric": "accuracy"},
        "language": {
            "recipe": "language",
            "settings": {**text, **TRUNK, "model.kind": "ssm", "model.size": None},
            "weight": 0.5,
            "metric": "perplexity",
        },
        "memory": {
            "recipe": "recall/lasting",
            "settings": {**memory, **TRUNK, "model.kind": "ssm"},
            "weight": 0.3,
            "metric": "retrieval_accuracy",
        },
    }


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    part_settings = {f"data.parts.{name}": part for name, part in parts(folder).items()}
    shared = {key: value for key, value in small_multitask.SMALL.items() if not key.startswith("model.")}
    return {**shared, "output_dir": str(folder), **part_settings, **changes}
