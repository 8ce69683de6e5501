"""Every technique on every medium: it trains, and an interrupted run resumes bitwise equal.

The claims of each technique are tested over five seeds in the file of its name.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_media
import small_run
import small_texts
from small_run import differing_tensors, read_tensors

Values = dict[str, Any]


def language(folder: Path) -> Values:
    return {**small_run.settings(folder, small_run.write_text(folder / "text.txt")), "data.validation.split": 0.2}


def split_by_class(values: Values, first: list[str], second: list[str]) -> Values:
    sources = [{"path": values["data.train.path"], "labels": labels} for labels in (first, second)]
    return {key: value for key, value in values.items() if not key.startswith("data.train")} | {"data.sources": sources}


def language_sequence(folder: Path) -> Values:
    texts = [small_run.write_text(folder / f"{seed}.txt", seed=seed) for seed in range(2)]
    values = {key: value for key, value in language(folder).items() if key != "data.train.path"}
    return {**values, "data.sources": [{"path": str(text)} for text in texts]}


MEDIA: dict[str, tuple[str, Callable[[Path], Values], Callable[[Path], Values]]] = {
    "language": ("language/shakespeare", language, language_sequence),
    "classify": (
        "classify",
        small_texts.settings,
        lambda folder: split_by_class(
            {**small_texts.settings(folder), "data.split": None, "data.train": {}}, ["cook", "sail"], ["sing"]
        ),
    ),
    "image": (
        "image",
        small_media.image,
        lambda folder: split_by_class({**small_media.image(folder), "data.train": {}}, ["dark", "grey"], ["bright"]),
    ),
}
"""Recipe, small settings, and the same data as a sequence of two sources."""


def techniques(*names: str, **options: Any) -> Values:
    return {"techniques": [{"name": name, "options": options.get(name, {})} for name in names]}


def distillation(medium: str, folder: Path) -> Values:
    recipe, settings, _ = MEDIA[medium]
    teacher = bottega.train(recipe, {**settings(folder), "training.max_steps": 4, "name": "teacher"})
    return {**settings(folder), **techniques("distill", distill={"teacher": str(teacher.path)})}


def sequence(medium: str, folder: Path) -> Values:
    ewc_and_replay = techniques("ewc", "replay", ewc={"samples": 6}, replay={"share": 0.25})
    return {**MEDIA[medium][2](folder), "data.mixture": "sequence", **ewc_and_replay}


def meta_learning(medium: str, folder: Path) -> Values:
    ways = {"ways": 2} if medium == "classify" else {}
    few = {"inner_steps": 1, "shots": 1, "queries": 1, **ways}
    return {**MEDIA[medium][1](folder), **techniques("maml", maml=few)}


def change_settings(**changes: Any) -> Callable[[str, Path], Values]:
    return lambda medium, folder: {**MEDIA[medium][1](folder), **changes}


TECHNIQUES: dict[str, Callable[[str, Path], Values]] = {
    "lora": change_settings(**techniques("lora", lora={"rank": 2})),
    "adapter": change_settings(**techniques("adapter", adapter={"size": 4})),
    "distill": distillation,
    "ewc and replay": sequence,
    "maml": meta_learning,
    "unfreezing": change_settings(**{"training.unfreeze.layers_per": 2, "training.layer_decay": 0.8}),
}


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize(
    "technique", [pytest.param(name, marks=pytest.mark.slow if name == "maml" else ()) for name in TECHNIQUES]
)
def test_trains_and_resumes_bitwise_equal(technique: str, medium: str, tmp_path: Path) -> None:
    values = TECHNIQUES[technique](medium, tmp_path) | {
        "training.max_steps": 6,
        "checkpoint.every": 1,
        "checkpoint.keep": 9,
    }
    values |= {"evaluation.every": 3, "training.ema": 0.9, "name": "run"}
    run = bottega.train(MEDIA[medium][0], values)
    assert run.step == 6
    assert math.isfinite(run.metrics["loss"])
    final = read_tensors(run.path)
    first = run.path / "checkpoints" / "step-00000001"
    changed = differing_tensors(final, {**final, **_weights(first)})
    assert changed, "no weight has changed"
    for step in (5, 6):
        shutil.rmtree(run.path / "checkpoints" / f"step-{step:08d}")
    resumed = bottega.train(MEDIA[medium][0], values)
    assert resumed.step == 6
    assert differing_tensors(final, read_tensors(resumed.path)) == []


def _weights(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {f"model.safetensors/{name}": array for name, array in load_file(folder / "model.safetensors").items()}
