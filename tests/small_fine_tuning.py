"""Small tasks of all kinds, small base models of three media, and fine-tuning runs on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import bottega
import small_media
import small_run
import small_texts
from bottega.models.convnet.config import ConvNetShape
from bottega.models.decoder.config import TransformerShape
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.models.text_classifier.config import EncoderShape, KimShape
from bottega.tasks.classify.task import Classification
from bottega.tasks.generation.task import Generation
from bottega.tasks.language.task import Language

STEADY = {"training.scheduler.name": "constant", "training.scheduler.warmup_steps": 0}
LANGUAGE = {key: value for key, value in small_run.SMALL.items() if not key.startswith("model.")}
SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "intermediate_size",
    "context",
    "dropout",
)
NULL_SIZES = {f"model.{key}": None for key in SIZES}


def transformer(**changes: Any) -> TransformerShape:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_size": 8}
    return TransformerShape(**{**sizes, "intermediate_size": 32, "vocab_size": 20, "context": 16, **changes})


def language_task() -> tuple[Any, dict[str, torch.Tensor]]:
    return Language(shape=transformer()), {"input_ids": torch.arange(30).view(3, 10) % 20}


def untied_task() -> tuple[Any, dict[str, torch.Tensor]]:
    return Language(shape=transformer(tie_embeddings=False)), {"input_ids": torch.arange(30).view(3, 10) % 20}


def text_classifier_task(shape: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    ids = torch.arange(24).view(4, 6) % 20
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "label": torch.tensor([0, 1, 2, 0])}
    return Classification(key="text", shape=shape), batch


def encoder_task() -> tuple[Any, dict[str, torch.Tensor]]:
    return text_classifier_task(EncoderShape(vocab_size=20, num_labels=3, hidden_size=16, num_layers=2, num_heads=2))


def kim_task() -> tuple[Any, dict[str, torch.Tensor]]:
    return text_classifier_task(KimShape(vocab_size=20, num_labels=3, embed_size=8, num_filters=6, filter_sizes=(2, 3)))


def image_classifier_task() -> tuple[Any, dict[str, torch.Tensor]]:
    shape = ConvNetShape(grid=(8, 8), channels=1, num_labels=3, hidden_size=8, num_layers=1)
    x = torch.linspace(-1, 1, 256).view(4, 8, 8, 1)
    return Classification(key="image", shape=shape), {"image": x, "label": torch.tensor([0, 1, 2, 0])}


def video_classifier_task() -> tuple[Any, dict[str, torch.Tensor]]:
    shape = ConvNetShape(grid=(4, 8, 8), channels=1, num_labels=3, hidden_size=8, num_layers=1)
    x = torch.linspace(-1, 1, 512).view(2, 4, 8, 8, 1)
    return Classification(key="video", shape=shape), {"video": x, "label": torch.tensor([0, 1])}


def image_generator_task() -> tuple[Any, dict[str, torch.Tensor]]:
    backbone = DiTShape(grid=(8, 8), channels=1, patch=(2, 2), hidden_size=16, num_layers=2, num_heads=2)
    shape = GeneratorShape(backbone=backbone, condition=ConditionShape(kind="class", size=3, hidden_size=16))
    batch = {"image": torch.linspace(-1, 1, 256).view(4, 8, 8, 1), "label": torch.tensor([0, 1, 2, 0])}
    return Generation(key="image", shape=shape), batch


TASKS = [
    language_task,
    untied_task,
    encoder_task,
    kim_task,
    image_classifier_task,
    video_classifier_task,
    image_generator_task,
]


def write_bases(folder: Path) -> Path:
    """Write language/ and image/, exported runs, and encoder/, a BERT of transformers."""
    text = small_run.write_text(folder / "text.txt")
    small_run.train(folder, text, name="language", **{"model.num_layers": 2, "training.max_steps": 4})
    bottega.train("image", {**small_media.image(folder), "name": "image", "training.max_steps": 4})
    for name in ("language", "image"):
        bottega.load(folder / name, device="cpu").export()
    small_texts.write_encoder(folder / "encoder")
    return folder


def language(bases: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    text = small_run.write_text(folder / "other.txt", seed=1)
    paths = {"output_dir": str(folder), "data.train.path": str(text), "model.from": str(bases / "language")}
    return "language/shakespeare", {**LANGUAGE, **NULL_SIZES, **paths}


def classify(bases: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    settings = small_texts.settings(folder)
    other_settings = {key: value for key, value in settings.items() if not key.startswith("model.")}
    return "classify/pretrained", {**other_settings, "model.from": str(bases / "encoder")}


def image(bases: Path, folder: Path) -> tuple[str, dict[str, Any]]:
    return "image", {**small_media.image(folder), "model.from": str(bases / "image")}


MEDIA: dict[str, Callable[[Path, Path], tuple[str, dict[str, Any]]]] = {
    "language": language,
    "classify": classify,
    "image": image,
}


def train(bases: Path, folder: Path, medium: str, *, technique: Any = "lora", **changes: Any) -> Any:
    recipe, settings = MEDIA[medium](bases, folder)
    return bottega.train(recipe, {**settings, **STEADY, "techniques": [technique], **changes})
