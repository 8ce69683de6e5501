"""Small personalize runs: 24 users, and frozen models with random weights."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import tiny_pipelines

COLOURS = {"red": (220, 40, 40), "blue": (40, 60, 220)}
SHAPES = ("star", "moon")
SIDE = 32


@cache
def models() -> dict[str, Path]:
    """Return the folders of a LLaMA, a Stable Diffusion and a CLIP, written once per process."""
    folder = Path(tempfile.mkdtemp(prefix="bottega-personal-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {
        "language_model": tiny_pipelines.write_llama(folder / "llama"),
        "diffusion": tiny_pipelines.write_stable_diffusion(folder / "diffusion"),
        "clip": tiny_pipelines.write_clip(folder / "clip"),
    }


def write_records(folder: Path) -> Path:
    """Write train.jsonl with 24 users and validation.jsonl with 8: each prefers one colour and wishes for one shape."""
    target = folder / "people"
    if target.exists():
        return target
    temporary = folder / ".people"
    (temporary / "pictures").mkdir(parents=True)
    for colour, rgb in COLOURS.items():
        for shape in SHAPES:
            pixels = np.full((SIDE, SIDE, 3), 250, np.uint8)
            inner = slice(8, 24) if shape == "star" else slice(4, 16)
            pixels[inner, inner] = rgb
            Image.fromarray(pixels).save(temporary / "pictures" / f"{colour}-{shape}.png")
    for table, count in (("train", 24), ("validation", 8)):
        rows = [json.dumps(record(number, table)) for number in range(count)]
        (temporary / f"{table}.jsonl").write_text("\n".join(rows) + "\n")
    temporary.rename(target)
    return target


def record(number: int, table: str) -> dict[str, Any]:
    colour, shape = list(COLOURS)[number % 2], SHAPES[number // 2 % 2]
    other = SHAPES[1 - SHAPES.index(shape)]
    liked = [item(colour, other, f"{number}-{index}") for index in range(2 + number % 3)]
    return {
        "user": f"{table[0]}{number}",
        "history": liked,
        "target": item(colour, shape, f"{number}-target"),
        "wish": f"a {shape}",
        "truth": {"colour": colour},
    }


def item(colour: str, shape: str, name: str) -> dict[str, str]:
    return {"id": name, "caption": f"a {colour} {shape}", "image": f"pictures/{colour}-{shape}.png"}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return settings for the recipe `personalize`."""
    frozen = {f"model.{name}": str(path) for name, path in models().items()}
    return {
        **frozen,
        "needs": {},
        "output_dir": str(folder),
        "model.num_image_tokens": 2,
        "model.num_prefix_tokens": 2,
        "model.start_words": None,
        "model.keywords.allowed": [*COLOURS, *SHAPES],
        "model.keywords.max_tokens": 6,
        "data.train.kind": "auto",
        "data.train.path": str(write_records(folder)),
        "data.image_size": SIDE,
        "data.sequence_length": 128,
        "data.workers": 0,
        "training.max_steps": 8,
        "training.batch_size": 8,
        "training.ema": None,
        "training.scheduler.warmup_steps": 2,
        "evaluation.every": 4,
        "checkpoint.every": 4,
        "samples.every": None,
        "samples.count": 3,
        "samples.steps": 2,
        "samples.sampler": "euler",
        "logging.every": 1,
        "logging.tensorboard": False,
        "logging.report": False,
        "logging.resources": False,
        **changes,
    }


def learning(folder: Path) -> dict[str, Any]:
    """Return settings with every kind of random draw, for a run whose loss falls measurably."""
    # Random models hardly react to two tokens among many, and chaotically to tokens of large norm.
    conditions = {"model.num_image_tokens": 16, "model.weights": {"keywords": 0.3, "target": 0.3}}
    return settings(folder, **conditions, **{"model.keyword_dropout": 0.5, "training.scheduler.name": "constant"})


def train(output: Path, **changes: Any) -> Any:
    """Run `bottega.train` in this process."""
    import bottega

    return bottega.train("personalize", settings(output, **changes))


def train_arguments(output: Path, *more: str, **changes: Any) -> list[str]:
    """Return the command line of the same run."""
    values = settings(output, **changes).items()
    return ["train", "personalize", *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values), *more]
