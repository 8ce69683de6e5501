"""Runs that are ill on purpose in their data, in modules or in loading; each trains in less than a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import small_media
import small_routing
import small_texts
from small_illnesses import QUIET, SPIKING, Illness

TEXTS: dict[str, Any] = {
    **QUIET,
    "training.max_steps": 30,
    "training.batch_size": 16,
    "training.learning_rate": 0.01,
    "evaluation.every": 10,
    "checkpoint.every": 1000,
    "logging.every": 2,
}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_leak(folder: Path, seed: int) -> Illness:
    """Each text is there twice, so most of the validation texts are also trained on; labels are random and can only be memorised."""
    draw = np.random.default_rng(seed)
    rows = [
        {"text": " ".join(f"w{word}" for word in draw.integers(0, 300, 8)), "label": "abc"[int(draw.integers(3))]}
        for _ in range(300)
    ]
    settings = {
        "data.train.path": write_rows(folder / "twice.jsonl", [*rows, *rows]),
        "model.embed_size": 32,
        "model.num_filters": 32,
        "training.max_steps": 200,
        "evaluation.every": 50,
    }
    return Illness("leak-between-splits", settings, "classify/transformer", TEXTS)


def make_image_leak(folder: Path, seed: int) -> Illness:
    """The validation images are those of the training data."""
    arrays = dict(np.load(small_media.write_images(folder)))
    order = np.random.default_rng(seed).permutation(36)
    for name, rows in (("train", order), ("validation", order[:30])):
        np.savez(folder / f"{name}.npz", **{key: values[rows] for key, values in arrays.items()})
    settings = {
        "data.train": {"kind": "auto", "path": str(folder / "train.npz")},
        "data.validation": {"path": str(folder / "validation.npz")},
        "model.hidden_size": 8,
        "training.batch_size": 4,
    }
    return Illness("leak-between-splits", settings, "classify/image", {**TEXTS, "evaluation.batch_size": None})


def make_language_leak(folder: Path, seed: int) -> Illness:
    """A language model is trained on texts of which each is there twice."""
    rows = [{"text": row["text"]} for row in small_texts.make_rows(300, seed=seed)]
    settings = {
        "data.train": {"kind": "jsonl", "path": write_rows(folder / "twice.jsonl", [*rows, *rows])},
        "data.validation.split": 0.2,
        "data.tokenizer": {"kind": "bytes"},
        "data.sequence_length": 32,
        "model.size": None,
        "model.num_layers": 1,
        "model.hidden_size": 16,
        "model.num_heads": 2,
    }
    return Illness("leak-between-splits", settings, "language", TEXTS)


def make_duplicates(folder: Path, seed: int) -> Illness:
    """A third of the training texts are copies, and the validation texts are others."""
    rows, others = small_texts.make_rows(200, seed=seed), small_texts.make_rows(100, seed=seed + 100)
    train = {json.dumps(row): row for row in rows}
    settings = {
        "data.train.path": write_rows(folder / "train.jsonl", [*train.values(), *list(train.values())[:100]]),
        "data.validation.split": None,
        "data.validation.path": write_rows(folder / "dev.jsonl", [r for r in others if json.dumps(r) not in train]),
    }
    return Illness("duplicates", settings, "classify/transformer", TEXTS)


def make_imbalance(folder: Path, seed: int) -> Illness:
    """One text in twenty is of the rare class, whose word occurs in a tenth of the others too: it is more likely one of those."""
    draw, rows = np.random.default_rng(seed), []
    for number in range(1500):
        is_rare = draw.random() < 0.05
        words = [f"w{word}" for word in draw.integers(0, 20, 6)]
        if draw.random() < (0.85 if is_rare else 0.1):
            words[int(draw.integers(6))] = "signal"
        rows.append({"text": f"{' '.join(words)} n{number}", "label": "rare" if is_rare else "common"})
    settings = {
        "data.train.path": write_rows(folder / "rare.jsonl", rows),
        "data.validation.split": 0.3,
        "training.max_steps": 200,
        "training.batch_size": 32,
        "evaluation.every": 50,
        "evaluation.batch_size": 256,
    }
    return Illness("class-imbalance", settings, "classify/transformer", TEXTS)


def make_small_validation(folder: Path, seed: int) -> Illness:
    """Twelve validation texts, of which a third have another label than their words."""
    draw, rows = np.random.default_rng(seed), small_texts.make_rows(600, seed=seed)
    for number, row in enumerate(rows):
        row["text"] += f" n{number}"
        if draw.random() < 0.3:
            row["label"] = list(small_texts.WORDS)[int(draw.integers(3))]
    settings = {"data.train.path": write_rows(folder / "few.jsonl", rows), "data.validation.split": 0.02}
    return Illness("validation-too-small", settings, "classify/transformer", TEXTS)


def make_silent_units(folder: Path, seed: int) -> Illness:
    """Spiking units whose threshold no input reaches."""
    settings = {"model.spike_threshold": 20.0, "model.firing_rate": None, "model.firing_rate_weight": None}
    return Illness("dead-units", settings, "classify/spiking", SPIKING)


def make_dead_filters(folder: Path, seed: int) -> Illness:
    """A CNN with rectified units and noisy labels, at a learning rate that pushes their inputs below zero."""
    draw, rows = np.random.default_rng(seed), small_texts.make_rows(400, seed=seed)
    for row in rows:
        if draw.random() < 0.3:
            row["label"] = list(small_texts.WORDS)[int(draw.integers(3))]
    settings = {
        "data.train.path": write_rows(folder / "noisy.jsonl", rows),
        "training.learning_rate": 0.3,
        "training.max_steps": 100,
        "logging.every": 1,
    }
    return Illness("dead-units", settings, "classify/transformer", TEXTS)


def make_collapsed_experts(folder: Path, seed: int) -> Illness:
    """Sixteen experts for three rules, without load balancing."""
    settings = {
        "data.train.path": str(small_routing.write_rows(folder, count=600, seed=seed)),
        "model.num_experts": 16,
        "model.balance": "none",
        "model.routing_loss_weight": 0.0,
        "training.learning_rate": 0.03,
        "training.max_steps": 150,
        "training.batch_size": 32,
        "evaluation.every": 25,
        "checkpoint.every": 1000,
        "logging.every": 5,
    }
    return Illness("collapsed-experts", settings, "routing", {**small_routing.SMALL, **QUIET})


def make_slow_data(folder: Path, seed: int) -> Illness:
    """Images that are decoded for each batch, and a network that is faster than that. WebP takes longest to decode."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    for number in range(48):
        path = folder / "images" / "ab"[number % 2] / f"{number}.webp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path, quality=95)
    settings = {
        "data.train": {"kind": "auto", "path": str(folder / "images")},
        "data.store": "encoded",
        "data.image_size": 64,
        "model.hidden_size": 4,
        "model.num_layers": 1,
        "model.time_steps": 1,
        "training.max_steps": 40,
        "training.batch_size": 32,
        "training.learning_rate": 1e-4,
        "logging.every": 4,
        "evaluation.every": 40,
    }
    return Illness("slow-data", settings, "classify/spiking", SPIKING)


ILLNESSES: dict[str, Callable[[Path, int], Illness]] = {
    "leak": make_leak,
    "leak-of-images": make_image_leak,
    "leak-of-language": make_language_leak,
    "duplicates": make_duplicates,
    "class-imbalance": make_imbalance,
    "validation-too-small": make_small_validation,
    "silent-units": make_silent_units,
    "collapsed-experts": make_collapsed_experts,
    "slow-data": make_slow_data,
}
