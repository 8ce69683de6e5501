"""The branch of alignment: pictures with captions, and a CLIP that learns which belong together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from bottega.config.recipe import Recipe
from bottega.core.errors import DataError, UsageError
from bottega.core.types import Models
from bottega.data.image.augment import denormalise_pixels
from bottega.data.image.write import write_images
from bottega.data.prepare.media import prepare_media
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.samples import load_image_encoder
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes
from bottega.data.text.captions import CaptionTokenizer, read_captions
from bottega.data.text.clip_tokenizer import train_clip_tokenizer
from bottega.data.text.negatives import ContrastiveRows
from bottega.models.clip.config import ClipShape
from bottega.models.clip.torch import Clip, export_clip, read_clip_shape
from bottega.tasks.align.clip_folder import load_clip_tokens
from bottega.tasks.align.config import AlignRecipe, clip_shape
from bottega.tasks.align.task import Alignment
from bottega.tasks.base_model import find_base_folder
from bottega.tasks.media_workload import MediaWorkload
from bottega.tasks.metadata import MetadataMissing, read_metadata

METADATA_FILE, TOKENS = "align.json", "text"
SHOWN = 512
"""Captions that a sheet chooses from, at most."""


class AlignMetadata(BaseModel):
    """What a run knows of its data once it is prepared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: ClipShape
    frame: tuple[int, int, int]
    """Height, width and channels of the pictures."""
    tokens: str
    """The fingerprint of the tokenizer."""


def prepare(recipe: Recipe, *, say: Callable[[str, int, int], None]) -> AlignWorkload:
    checked = _checked(recipe)
    prepared = prepare_media(checked, progress=say)
    start = find_base_folder(checked)
    tables = [prepared.table(name) for name in prepared.training_tables]
    texts = {text.strip() for table in tables for text in read_captions(table)}
    if not any(texts):
        raise DataError("data.train: there are no captions; give each picture its own, such as a.txt beside a.png")
    if len(texts) < 2:
        raise DataError("data.train: all captions are alike, so there is nothing to tell apart; give each its own")
    frame = load_image_encoder(prepared).bucket_shape(0)
    if start is not None:
        shape, tokens = read_clip_shape(start, key="model.from"), load_clip_tokens(start, key="model.from")
    else:
        model = checked.model
        learnt = train_clip_tokenizer(tables, content=prepared.fingerprint, vocab_size=model.vocab_size)
        tokens = CaptionTokenizer(learnt, model.max_tokens)
        shape = _shape(checked, frame, tokens)
    facts = AlignMetadata(shape=shape, frame=frame, tokens=tokens.fingerprint)
    return AlignWorkload(checked, facts, tokens, prepared=prepared, start=start)


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> AlignWorkload:
    checked, facts = _checked(recipe), _read_facts(processor)
    tokens = CaptionTokenizer(processor / TOKENS, facts.shape.max_tokens)
    return AlignWorkload(
        checked, facts, tokens, expected=fingerprint, start=find_base_folder(checked, processor=processor)
    )


def _checked(recipe: Recipe) -> AlignRecipe:
    assert isinstance(recipe, AlignRecipe)
    data = recipe.data
    if data.buckets is not None:
        raise UsageError("data.buckets: a CLIP sees pictures of one shape; leave it out")
    if data.normalise != "symmetric":
        raise UsageError(f"data.normalise: {data.normalise}, and a CLIP scales pixels by itself; leave it out")
    if data.condition_field is not None:
        raise UsageError(
            "data.condition_field: captions are found by their usual names (caption, text, txt); name another field with "
            "data.train.label"
        )
    return recipe


def _shape(recipe: AlignRecipe, frame: tuple[int, int, int], tokens: CaptionTokenizer) -> ClipShape:
    (height, width, _), patch = frame, recipe.model.patch_size
    if height != width:
        raise DataError(f"data.train: pictures of {height} x {width}, and a CLIP sees squares; set data.image_size")
    if height % patch:
        raise UsageError(f"model.patch_size: {patch} does not divide the side of the pictures, {height}")
    found = tokens.tokenizer
    before, _ = found.special_tokens_around
    return clip_shape(
        recipe.model,
        image_size=height,
        tokens=found.vocab_size,
        bos=before[0],
        eos=found.eos_token_id,
        padding=found.pad_token_id,
    )


@final
class AlignWorkload(MediaWorkload):
    metrics = ("loss", "accuracy", "caption_recall")
    unit = "images"

    def __init__(
        self,
        recipe: AlignRecipe,
        facts: AlignMetadata,
        tokens: CaptionTokenizer,
        *,
        prepared: PreparedData | None = None,
        expected: str | None = None,
        start: Path | None = None,
    ) -> None:
        """Either with prepared data, or again from the codec of a finished run and the fingerprint it had."""
        super().__init__(recipe, prepared, expected=expected)
        self.facts, self.tokens = facts, tokens
        self.task: Alignment = Alignment(
            shape=facts.shape,
            negatives=recipe.model.negatives,
            pretrained=str(start) if start is not None else None,
        )

    def frame(self) -> tuple[int, ...]:
        return self.facts.frame

    def class_names(self) -> Classes:
        return Classes(())

    def served(self, rows: Any) -> Source:
        model = self.recipe.model
        options: Any = {"count": model.negatives, "hard_fraction": model.hard_negatives, "seed": self.recipe.seed}
        return ContrastiveRows(rows, rows.table, self.tokens, **options)

    @property
    def metadata(self) -> AlignMetadata:
        return self.facts

    @property
    def notes(self) -> list[str]:
        return [*super().notes, *self._overridden()]

    def _overridden(self) -> list[str]:
        """Sizes that the recipe gives and the CLIP it starts from decides otherwise."""
        model, config = self.recipe.model, self.facts.shape.config_dict
        if model.from_ is None:
            return []
        vision, text = config.get("vision_config", {}), config.get("text_config", {})
        actual = {
            "hidden_size": vision.get("hidden_size"),
            "num_layers": vision.get("num_hidden_layers"),
            "patch_size": vision.get("patch_size"),
            "text_hidden_size": text.get("hidden_size"),
            "text_num_layers": text.get("num_hidden_layers"),
        }
        other = [f"{key} {size}" for key, size in actual.items() if size is not None and size != getattr(model, key)]
        return [f"model.from: its own sizes are used: {', '.join(other)}"] if other else []

    def read_metadata(self, folder: Path) -> AlignMetadata:
        facts = _read_facts(folder)
        if not (folder / TOKENS / "tokenizer.json").is_file():
            raise MetadataMissing(
                f"{folder / TOKENS} has no tokenizer; start the same training again to have it written"
            )
        return facts

    def write_processor(self, folder: Path) -> None:
        self.tokens.save(folder / TOKENS)
        (folder / METADATA_FILE).write_text(self.facts.model_dump_json(indent=1) + "\n")

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Held-out pictures, or where none are held out training ones, each with the caption that fits best."""
        name = "validation" if "validation" in self.prepared.tables else self.prepared.training_tables[0]
        rows = self._rows(self.recipe, self.prepared, name, is_training=False)
        texts = list(dict.fromkeys(read_captions(rows.table)))[:SHOWN]  # type: ignore[attr-defined]
        index = np.arange(min(self.recipe.samples.count, len(rows)))
        pixels = rows.rows(index, np.zeros_like(index))["image"]
        scores = self.score_pairs(models["model"], pixels, texts, device=device)
        best = [texts[number] for number in scores.argmax(1).tolist()]
        write_images(denormalise_pixels(pixels, mode="symmetric"), folder, captions=best)

    @torch.no_grad()
    def score_pairs(self, model: Clip, pixels: np.ndarray, texts: list[str], *, device: Any) -> np.ndarray:
        """Log odds [pictures, texts] that each pair belongs together; pixels from -1 to 1."""
        ids = torch.from_numpy(self.tokens.encode(texts)["input_ids"]).to(device)
        images = model.images(torch.from_numpy(pixels).to(device))
        return model.logits(images, model.texts(ids)).float().cpu().numpy()

    def example_flags(self) -> None:
        """Nothing can be generated."""

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """A CLIP of transformers with its tokenizer and its image processor."""
        export_clip(models["model"], folder)
        self.tokens.save(folder)
        path = folder / "tokenizer_config.json"
        # Pipelines of diffusers fill captions up to what the tokenizer says.
        said = {**json.loads(path.read_bytes()), "model_max_length": self.tokens.length}
        path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        return {"library_name": "transformers", "pipeline_tag": "zero-shot-image-classification"}


def _read_facts(processor: Path) -> AlignMetadata:
    return read_metadata(processor / METADATA_FILE, AlignMetadata.model_validate_json)
