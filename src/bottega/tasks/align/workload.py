"""The workload of alignment: images with captions, and a CLIP that learns which belong together."""

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
from bottega.data.records.fields import CAPTION_FIELDS
from bottega.data.sources.samples import load_image_encoder
from bottega.data.tables.classes import Classes
from bottega.data.text.captions import CaptionTokenizer, read_captions
from bottega.data.text.clip_tokenizer import train_clip_tokenizer
from bottega.data.text.negatives import ContrastiveRows
from bottega.models.clip.config import ClipShape
from bottega.models.clip.torch import Clip, export_clip, read_clip_shape
from bottega.tasks.align.clip_folder import load_clip_tokenizer
from bottega.tasks.align.config import AlignRecipe, build_clip_shape
from bottega.tasks.align.task import Alignment
from bottega.tasks.base_model import find_base_folder
from bottega.tasks.media_tables import MediaProcessor, MediaTables, build_media_data
from bottega.tasks.metadata import MetadataUnreadable, read_metadata
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Workload

METADATA_FILE, TOKENIZER_FOLDER = "align.json", "text"
MAX_CAPTIONS = 512
"""Largest number of captions that a contact sheet chooses from."""


class AlignMetadata(BaseModel):
    """Shapes and tokenizer of the run; saved with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: ClipShape
    frame: tuple[int, int, int]
    """Height, width and channels of the images."""
    tokens: str
    """Fingerprint of the tokenizer."""


def open_workload(recipe: Recipe, *, progress: Callable[[str, int, int], None]) -> AlignWorkload:
    """Prepare the data of a recipe, train a tokenizer on its captions, and choose the model."""
    checked = _check_recipe(recipe)
    prepared = prepare_media(checked, progress=progress)
    base_folder = find_base_folder(checked)
    tables = [prepared.table(name) for name in prepared.training_tables]
    texts = {text.strip() for table in tables for text in read_captions(table)}
    if not any(texts):
        raise DataError("data.train: there are no captions; give each image one, such as a.txt next to a.png")
    if len(texts) < 2:
        raise DataError("data.train: all captions are equal, so there are no negatives; give each image its own")
    frame = load_image_encoder(prepared).bucket_shape(0)
    if base_folder is not None:
        shape, caption_tokenizer = (
            read_clip_shape(base_folder, key="model.from"),
            load_clip_tokenizer(base_folder, key="model.from"),
        )
    else:
        model = checked.model
        folder = train_clip_tokenizer(tables, content=prepared.fingerprint, vocab_size=model.vocab_size)
        caption_tokenizer = CaptionTokenizer(folder, model.max_tokens)
        shape = _build_shape(checked, frame, caption_tokenizer)
    metadata = AlignMetadata(shape=shape, frame=frame, tokens=caption_tokenizer.fingerprint)
    return AlignWorkload(checked, metadata, caption_tokenizer, prepared=prepared, base_folder=base_folder)


def reopen_workload(recipe: Recipe, processor: Path, fingerprint: str) -> AlignWorkload:
    """Return the workload of a finished run, from its saved processor."""
    checked, metadata = _check_recipe(recipe), _read_metadata(processor)
    caption_tokenizer = CaptionTokenizer(processor / TOKENIZER_FOLDER, metadata.shape.max_tokens)
    return AlignWorkload(
        checked,
        metadata,
        caption_tokenizer,
        expected_fingerprint=fingerprint,
        base_folder=find_base_folder(checked, processor_folder=processor),
    )


def _check_recipe(recipe: Recipe) -> AlignRecipe:
    assert isinstance(recipe, AlignRecipe)
    data = recipe.data
    if data.buckets is not None:
        raise UsageError("data.buckets: a CLIP needs images of one shape; remove it")
    if data.normalise != "symmetric":
        raise UsageError(f"data.normalise: {data.normalise} has no effect: a CLIP normalises pixels itself; remove it")
    if data.condition_field is not None:
        raise UsageError(
            "data.condition_field does not apply to captions; remove it, and set data.train.label if they are in none of the "
            f"fields {', '.join(CAPTION_FIELDS)}"
        )
    return recipe


def _build_shape(recipe: AlignRecipe, frame: tuple[int, int, int], caption_tokenizer: CaptionTokenizer) -> ClipShape:
    (height, width, _), patch = frame, recipe.model.patch_size
    if height != width:
        raise DataError(f"data.train: images are {height} x {width}, but a CLIP needs squares; set data.image_size")
    if height % patch:
        raise UsageError(f"model.patch_size: {patch} does not divide the side of the images, {height}")
    tokenizer = caption_tokenizer.tokenizer
    prefix_ids, _ = tokenizer.special_tokens_around
    return build_clip_shape(
        recipe.model,
        image_size=height,
        vocab_size=tokenizer.vocab_size,
        bos=prefix_ids[0],
        eos=tokenizer.eos_token_id,
        padding=tokenizer.pad_token_id,
    )


@final
class AlignWorkload(Workload):
    """A CLIP that learns which images and captions belong together."""

    metrics = ("loss", "accuracy", "caption_recall")
    unit = "images"

    def __init__(
        self,
        recipe: AlignRecipe,
        metadata: AlignMetadata,
        caption_tokenizer: CaptionTokenizer,
        *,
        prepared: PreparedData | None = None,
        expected_fingerprint: str | None = None,
        base_folder: Path | None = None,
    ) -> None:
        """Take either prepared data, or the fingerprint that the data of a finished run must have."""
        self.recipe, self.metadata, self.caption_tokenizer = recipe, metadata, caption_tokenizer
        self.task: Alignment = Alignment(
            shape=metadata.shape,
            negatives=recipe.model.negatives,
            pretrained=str(base_folder) if base_folder is not None else None,
        )
        model = recipe.model
        negatives: Any = {"count": model.negatives, "hard_fraction": model.hard_negatives, "seed": recipe.seed}
        self.tables = MediaTables(
            recipe,
            frame=metadata.frame,
            classes=Classes(()),
            to_samples=lambda rows: ContrastiveRows(rows, rows.table, caption_tokenizer, **negatives),
        )
        self.data: TableData = build_media_data(
            self.tables,
            prepared=prepared,
            expected_fingerprint=expected_fingerprint,
            notes=lambda _: _note_overridden_sizes(recipe, metadata),
        )
        self.processor = MediaProcessor(metadata, read=_read_complete_metadata, write_files=self._write_files)
        self.sampler = AlignSampler(recipe, self.tables, self.data, caption_tokenizer)

    def _write_files(self, folder: Path) -> None:
        self.caption_tokenizer.save(folder / TOKENIZER_FOLDER)
        (folder / METADATA_FILE).write_text(self.metadata.model_dump_json(indent=1) + "\n")

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write a CLIP of transformers with its tokenizer and its image processor."""
        export_clip(models["model"], folder)
        self.caption_tokenizer.save(folder)
        path = folder / "tokenizer_config.json"
        # Pipelines of diffusers pad captions to the length that the tokenizer states.
        config = {**json.loads(path.read_bytes()), "model_max_length": self.caption_tokenizer.length}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return {"library_name": "transformers", "pipeline_tag": "zero-shot-image-classification"}


@final
class AlignSampler(Sampler):
    """Held-out images, each with the caption that scores highest."""

    def __init__(
        self, recipe: AlignRecipe, tables: MediaTables, data: TableData, caption_tokenizer: CaptionTokenizer
    ) -> None:
        self.recipe, self.tables, self.data, self.caption_tokenizer = recipe, tables, data, caption_tokenizer

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Write a contact sheet of validation images, or of training images if none are held out."""
        prepared = self.data.prepared
        name = "validation" if "validation" in prepared.tables else prepared.training_tables[0]
        rows = self.tables.read_rows(prepared, name)
        texts = list(dict.fromkeys(read_captions(rows.table)))[:MAX_CAPTIONS]
        index = np.arange(min(self.recipe.samples.count, len(rows)))
        pixels = rows.rows(index, np.zeros_like(index))["image"]
        scores = self.score_pairs(models["model"], pixels, texts, device=device)
        best = [texts[number] for number in scores.argmax(1).tolist()]
        write_images(denormalise_pixels(pixels, mode="symmetric"), folder, captions=best)

    @torch.no_grad()
    def score_pairs(self, model: Clip, pixels: np.ndarray, texts: list[str], *, device: Any) -> np.ndarray:
        """Return logits (images, texts) that each pair belongs together; pixels are from -1 to 1."""
        ids = torch.from_numpy(self.caption_tokenizer.encode(texts)["input_ids"]).to(device)
        images = model.encode_images(torch.from_numpy(pixels).to(device))
        return model.logits(images, model.encode_texts(ids)).float().cpu().numpy()


def _note_overridden_sizes(recipe: AlignRecipe, metadata: AlignMetadata) -> list[str]:
    """Return a note on the sizes of the recipe that the CLIP it starts from overrides."""
    model, config = recipe.model, metadata.shape.config_dict
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
    overridden = [f"{key} {size}" for key, size in actual.items() if size is not None and size != getattr(model, key)]
    return [f"model.from: its own sizes are used: {', '.join(overridden)}"] if overridden else []


def _read_complete_metadata(folder: Path) -> AlignMetadata:
    """Read the metadata of a saved processor whose tokenizer is there too."""
    metadata = _read_metadata(folder)
    if not (folder / TOKENIZER_FOLDER / "tokenizer.json").is_file():
        raise MetadataUnreadable(
            f"{folder / TOKENIZER_FOLDER} has no tokenizer; run the training command again to rewrite it"
        )
    return metadata


def _read_metadata(processor: Path) -> AlignMetadata:
    return read_metadata(processor / METADATA_FILE, AlignMetadata.model_validate_json)
