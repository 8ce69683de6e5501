"""Every trainable pair of engine and task, each as a recipe small enough to train many times in a test.

A new engine or task needs one line here to run all tests of this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import small_multitask
import small_personal
import small_recall
import small_routing
import small_routing_mind
import small_texts
from bottega.core import checkpoint
from bottega.data.loading.loader import Loader
from bottega.models.autoencoder.codes import CodeAutoencoder
from bottega.models.autoencoder.codes_folder import write_codes
from bottega.models.autoencoder.config import AutoencoderShape, CodesShape
from bottega.run.compose import build_engine, build_loader, build_training_plan, set_learning_rate_schedule
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe
from bottega.tasks.workload import Workload
from small_media import audio, image, video
from small_run import settings, write_text


def language(folder: Path) -> dict[str, Any]:
    """Three layers, so that first, middle and last differ."""
    return {**settings(folder, write_text(folder / "text.txt")), "model.num_layers": 3}


def decoder_of_kind(kind: str, **changes: Any) -> Callable[[Path], dict[str, Any]]:
    """Return the language settings with a different kind of decoder."""

    def make_settings(folder: Path) -> dict[str, Any]:
        attention = ("num_heads", "num_kv_heads", "head_size", "intermediate_size")
        unset = {f"model.{key}": None for key in attention} if kind == "ssm" else {}
        return {**language(folder), **unset, "model.kind": kind, **{f"model.{k}": v for k, v in changes.items()}}

    return make_settings


def image_vae(folder: Path) -> dict[str, Any]:
    shared = {key: value for key, value in image(folder).items() if not key.startswith(("model.", "samples."))}
    return {**shared, "model.hidden_size": 8, "model.latent_channels": 2, "samples.every": None}


def image_tokens(folder: Path) -> dict[str, Any]:
    shared = {key: value for key, value in image(folder).items() if not key.startswith(("model.", "samples."))}
    return {**shared, "model.hidden_size": 8, "model.levels": [4, 4], "samples.every": None}


def image_over_codes(folder: Path) -> dict[str, Any]:
    """Image generation over the codes of an untrained, frozen tokenizer."""
    inner = AutoencoderShape(channels=1, latent_channels=2, widths=(4, 8), layers_per_block=1)
    tokenizer = CodeAutoencoder(CodesShape(autoencoder=inner, levels=(4, 4)))
    tokenizer.initialise(0)
    write_codes(tokenizer, folder / "codes", input="image", normalise="symmetric")
    return {**image(folder), "model.tokenizer": str(folder / "codes")}


def align(folder: Path) -> dict[str, Any]:
    """Contrastive alignment with three negatives; the data has only three captions."""
    shared = {key: value for key, value in image(folder).items() if not key.startswith("samples.")}
    sizes = {"text_hidden_size": 16, "text_num_layers": 1, "vocab_size": 514, "max_tokens": 8, "projection_size": 16}
    return {**shared, **{f"model.{k}": v for k, v in sizes.items()}, "model.negatives": 3, "samples.every": None}


def classify_image(folder: Path) -> dict[str, Any]:
    shared = {key: value for key, value in image(folder).items() if not key.startswith(("model.", "samples."))}
    return {**shared, "model.hidden_size": 8}


def classify_spiking(folder: Path) -> dict[str, Any]:
    """A spiking classifier with every option enabled."""
    shared = {key: value for key, value in classify_image(folder).items() if key != "model.hidden_size"}
    units = {"refractory": 1, "adaptation": 0.1, "coding": "rate", "firing_rate": 0.2, "firing_rate_weight": 2.0}
    sizes = {"model.hidden_size": 24, "model.time_steps": 6, "training.scheduler.name": "constant"}
    return {**shared, **sizes, **{f"model.{key}": value for key, value in units.items()}}


def classify_cnn(folder: Path) -> dict[str, Any]:
    return small_texts.settings(
        folder, "cnn", **{"model.word_dropout": 0.2, "model.dropout": 0.0, "training.scheduler.name": "constant"}
    )


def classify_ngrams(folder: Path) -> dict[str, Any]:
    return small_texts.settings(folder, "ngrams")


def classify_wide(folder: Path) -> dict[str, Any]:
    """Kim's network with a wide part."""
    return {**classify_cnn(folder), "model.wide": True, "model.num_buckets": 512}


SLOW = (pytest.mark.slow,)
"""JAX compiles each case for seconds: `make test` has one of them, the campaigns have all."""


@dataclass(frozen=True)
class Case:
    engine: str
    task: str
    recipe: str
    settings: Callable[[Path], dict[str, Any]]
    lacks: tuple[str, ...] = ()
    """Keys of the common settings that this task does not have."""
    kind: str = ""
    """Distinguishes cases of the same recipe."""
    marks: tuple[pytest.MarkDecorator, ...] = ()
    """Marks of the tests of this case: `slow` for twins that share what they test with a quick case."""
    starts_at_zero: bool = False
    """Whether all initial weights are 0, so that the seed does not change them."""

    def with_engine(self, engine: str) -> Case:
        """Return the same recipe with another engine."""
        return replace(self, engine=engine)

    def __str__(self) -> str:
        return "-".join(filter(None, (self.engine, self.recipe, self.kind)))


CASES = [
    Case("torch", "language", "language/shakespeare", language),
    Case(
        "torch",
        "language",
        "language/shakespeare",
        decoder_of_kind(
            "transformer", activation="relu2", value_embeddings=True, logit_softcap=15.0, zero_init_residual=True
        ),
        kind="speedrun",
    ),
    Case("torch", "language", "language/shakespeare", decoder_of_kind("moe", num_experts=4), kind="moe"),
    Case(
        "torch",
        "language",
        "language/shakespeare",
        decoder_of_kind(
            "moe", num_experts=4, balance="bias", capacity_factor=1.0, expert_dropout=0.3, shared_experts=1
        ),
        kind="moe-bias",
    ),
    Case(
        "torch", "language", "language/shakespeare", decoder_of_kind("ssm", state_size=8, ssm_head_size=8), kind="ssm"
    ),
    Case(
        "torch",
        "language",
        "language/shakespeare",
        decoder_of_kind("hybrid", state_size=8, ssm_head_size=8, attention_every=2, num_experts=3, experts_every=2),
        kind="hybrid",
    ),
    Case("torch", "image", "image", image),
    Case("torch", "audio", "audio", audio),
    Case("torch", "video", "video", video),
    Case("torch", "image_vae", "image_vae/digits", image_vae, lacks=("model.dropout",)),
    Case("torch", "image_tokens", "image_tokens/digits", image_tokens, lacks=("model.dropout",)),
    Case("torch", "image", "image/tokens", image_over_codes),
    Case("torch", "align", "align", align),
    Case("torch", "classify", "classify/transformer", small_texts.settings),
    Case("torch", "classify", "classify/cnn", classify_cnn),
    Case("torch", "classify", "classify/cnn", classify_wide, kind="wide"),
    Case("torch", "classify", "classify", classify_ngrams, starts_at_zero=True),
    Case("torch", "classify", "classify/image", classify_image),
    Case("torch", "classify", "classify/spiking", classify_spiking),
    Case("torch", "personalize", "personalize", small_personal.learning, lacks=("model.dropout",)),
    Case("torch", "routing", "routing", small_routing.settings),
    Case("torch", "routing", "routing", small_routing.spiking, kind="spiking"),
    Case("torch", "recall", "recall", small_recall.settings),
    Case("torch", "recall", "recall/lasting", small_recall.lasting),
    Case("torch", "multitask", "multitask", small_multitask.settings),
    Case("torch", "multitask", "routing/mind", small_routing_mind.settings),
    Case("jax", "language", "language/shakespeare", language),
    Case(
        "jax",
        "language",
        "language/shakespeare",
        decoder_of_kind(
            "transformer", activation="relu2", value_embeddings=True, logit_softcap=15.0, zero_init_residual=True
        ),
        kind="speedrun",
        marks=SLOW,
    ),
    Case("jax", "classify", "classify/cnn", classify_cnn, marks=SLOW),
    Case("jax", "classify", "classify/transformer", small_texts.settings, marks=SLOW),
    Case("jax", "classify", "classify/image", classify_image, marks=SLOW),
    Case("jax", "image", "image", image, marks=SLOW),
    Case("jax", "audio", "audio", audio, marks=SLOW),
    Case("jax", "video", "video", video, marks=SLOW),
]


@dataclass
class Subject:
    """One process of a run, without the training loop."""

    workload: Workload
    engine: Any
    loader: Loader

    def advance(self, start: int, stop: int) -> list[dict[str, float]]:
        stream = self.loader(start)
        reports = [self.engine.fetch(self.engine.train_step(step, next(stream))) for step in range(start, stop)]
        stream.close()
        return [{key: value for key, value in report.items() if key != "units"} for report in reports]

    def state(self) -> dict[str, np.ndarray]:
        files = self.engine.snapshot().files()
        return {f"{file}/{name}": array.copy() for file, arrays in files.items() for name, array in arrays.items()}

    def save(self, folder: Path, step: int) -> Path:
        files = self.engine.snapshot().files()
        return checkpoint.write(folder, step=step, files=files, progress={"step": step}, fingerprint={})


def build(case: Case, folder: Path, **changes: Any) -> Subject:
    values = {**case.settings(folder), "engine": case.engine, **changes}
    values = {key: value for key, value in values.items() if key not in case.lacks}
    recipe = load_recipe([case.recipe, values]).recipe
    assert recipe.task == case.task
    workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    plan = build_training_plan(recipe, workload)
    engine = build_engine(recipe, plan.task)
    loader = build_loader(recipe, plan.training, engine, plan.order)
    set_learning_rate_schedule(recipe, engine, total=8, steps_per_epoch=round(loader.steps_per_epoch))
    return Subject(workload, engine, loader)
