"""The text condition of a generator: its tokenizer, its encoder, and default prompts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import BaseModel, ConfigDict

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.data.formats.fingerprint import hash_files
from bottega.data.prepare.prepared import PreparedData
from bottega.data.records.fields import CAPTION_FIELDS
from bottega.data.tables.cache import get_or_build
from bottega.data.text.captions import CaptionTokenizer, find_distinct_captions, train_caption_tokenizer
from bottega.models.folders.resolve import find_component_folder, resolve_model
from bottega.models.generator.config import ConditionShape
from bottega.storage.cache_folder import default_cache
from bottega.tasks import dependencies
from bottega.tasks.frozen_models import check_same_model, find_frozen_model, hash_model_folder
from bottega.tasks.generation.config import AudioRecipe, ImageRecipe, TextEncoderOptions, VideoRecipe
from bottega.tasks.generation.text import FrozenText
from bottega.tasks.metadata import read_metadata

TOKENIZER_FOLDER, METADATA_FILE = "text", "text.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
DEFAULT_MAX_TOKENS, MAX_FROZEN_TOKENS = 32, 128
"""Default of max_tokens with an encoder that is trained, and its upper limit with a frozen one."""
NUM_SAVED_PROMPTS, NUM_DEFAULT_PROMPTS = 16, 4
"""Captions of the data that are saved with a run, and how many of them are used if no prompt is given."""


class TextMetadata(BaseModel):
    """Text condition of a run, saved beside its tokenizer so that it can be used without the data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int
    prompts: tuple[str, ...]
    encoder: str | None = None
    """Folder of a frozen encoder; None is an encoder inside the model."""
    content: str | None = None
    """Hash of the frozen encoder: the model works only with the encoder it was trained with."""
    width: int = 0
    vocab_size: int = 0
    """Width of the frozen encoder's outputs, and number of its embeddings."""
    is_masked: bool = True
    """Whether the frozen encoder masks padding."""


@final
@dataclass(frozen=True)
class TextCondition:
    """Tokenizer and encoder of captions, with the prompts that samples are drawn for."""

    caption_tokenizer: CaptionTokenizer
    metadata: TextMetadata
    options: TextEncoderOptions
    prompts: tuple[str, ...]

    def build_shape(self, hidden_size: int) -> ConditionShape:
        """Return the shape of the condition in a model of this width."""
        if self.metadata.encoder is not None:
            sizes: dict[str, Any] = {"text_size": self.metadata.width}
        else:
            trained_encoder = self.options
            sizes = {"text_size": trained_encoder.hidden_size, "text_layers": trained_encoder.num_layers}
            sizes["vocab_size"] = self.caption_tokenizer.tokenizer.vocab_size
        return ConditionShape(kind="text", hidden_size=hidden_size, max_tokens=self.caption_tokenizer.length, **sizes)

    @cached_property
    def task_fields(self) -> dict[str, Any]:
        """Fields of the task that describe the text condition."""
        empty, metadata = self.caption_tokenizer.encode([""]), self.metadata
        frozen = None
        if metadata.encoder is not None:
            frozen = FrozenText(folder=metadata.encoder, is_masked=metadata.is_masked)
        ids, length = tuple(empty["input_ids"][0].tolist()), int(empty["attention_mask"].sum())
        return {"text": frozen, "empty_text": ids, "empty_length": length}

    def resolve_prompts(self, prompts: str | list[str] | None) -> list[str]:
        """Return the given prompts as a list, or the run's default prompts."""
        return [prompts] if isinstance(prompts, str) else list(prompts or self.prompts[:NUM_DEFAULT_PROMPTS])

    def encode(self, prompts: list[str]) -> dict[str, np.ndarray]:
        """Return `input_ids` and `attention_mask` of prompts; raise UsageError for text that is not valid Unicode."""
        for prompt in prompts:
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise UsageError(f"--prompt {prompt!r} is not valid Unicode text") from None
        return self.caption_tokenizer.encode(prompts)

    def save(self, processor: Path) -> None:
        """Write the tokenizer, and what identifies the text encoder, to a processor folder."""
        folder = processor / TOKENIZER_FOLDER
        self.caption_tokenizer.save(folder)
        (folder / METADATA_FILE).write_text(self.metadata.model_dump_json(indent=1) + "\n")

    def check_saved(self, processor: Path) -> None:
        """Raise CheckpointError if a saved processor belongs to another encoder or tokenizer."""
        recorded = _read_saved_metadata(processor)
        name, recorded_encoder = (
            self.metadata.encoder or "model.text",
            recorded.encoder or "an encoder trained with the model",
        )
        check_same_model(
            "text encoder",
            current_hash=self.metadata.content,
            recorded_hash=recorded.content,
            name=name,
            recorded=recorded_encoder,
        )
        if (
            CaptionTokenizer(processor / TOKENIZER_FOLDER, recorded.max_tokens).fingerprint
            != self.caption_tokenizer.fingerprint
        ):
            raise CheckpointError(
                f"{processor / TOKENIZER_FOLDER}: the tokenizer saved here is not the one that the recipe and data give now; "
                "restore them, or start over with --fresh"
            )


def open_text_condition(recipe: ImageRecipe | AudioRecipe | VideoRecipe, prepared: PreparedData) -> TextCondition:
    """Return the text condition of a recipe, with the encoder's tokenizer or one trained on the training captions."""
    if recipe.data.condition_field is not None:
        raise UsageError(
            "data.condition_field does not apply to a text condition; remove it, and set data.train.label if the captions "
            f"are in none of the fields {', '.join(CAPTION_FIELDS)}"
        )
    options = recipe.model.text
    held_out = ["validation"] if "validation" in prepared.tables else []
    captions = find_distinct_captions(
        list(map(prepared.table, (*held_out, *prepared.training_tables))), NUM_SAVED_PROMPTS
    )
    if options.from_ is None:
        tables = [prepared.table(name) for name in prepared.training_tables]
        folder = train_caption_tokenizer(tables, content=prepared.fingerprint, vocab_size=options.vocab_size)
        metadata = TextMetadata(max_tokens=options.max_tokens or DEFAULT_MAX_TOKENS, prompts=captions)
    else:
        encoder, tokenizer = resolve_encoder_folders(dependencies.resolve_reference(recipe, options.from_))
        folder = _find_tokenizer_folder(tokenizer)
        metadata = _build_frozen_metadata(encoder, options, captions)
    caption_tokenizer = CaptionTokenizer(folder, metadata.max_tokens)
    if metadata.encoder is not None and caption_tokenizer.tokenizer.vocab_size > metadata.vocab_size:
        raise UsageError(
            f"model.text.from: {folder} has {caption_tokenizer.tokenizer.vocab_size} tokens, but {metadata.encoder} has "
            f"{metadata.vocab_size} embeddings; give an encoder with its own tokenizer"
        )
    return TextCondition(caption_tokenizer, metadata, options, recipe.samples.prompts or captions)


def reopen_text_condition(recipe: ImageRecipe | AudioRecipe | VideoRecipe, processor: Path) -> TextCondition:
    """Return the text condition of a finished run; a frozen encoder must be unchanged."""
    metadata = _read_saved_metadata(processor)
    runs_folder = processor.absolute().parent.parent  # of RUNS/RUN/processor
    if metadata.encoder is not None:
        recorded, name = Path(metadata.encoder), recipe.model.text.from_ or metadata.encoder
        candidates = (
            lambda: recorded,
            lambda: resolve_encoder_folders(dependencies.resolve_reference(recipe, name, runs_folder=runs_folder))[0],
        )
        folder = find_frozen_model("text encoder", metadata.content, candidates, recorded_folder=metadata.encoder)
        metadata = metadata.model_copy(update={"encoder": str(folder)})
    caption_tokenizer = CaptionTokenizer(processor / TOKENIZER_FOLDER, metadata.max_tokens)
    return TextCondition(caption_tokenizer, metadata, recipe.model.text, recipe.samples.prompts or metadata.prompts)


def resolve_encoder_folders(name: str) -> tuple[Path, Path]:
    """Return (encoder folder, tokenizer folder) of `name`: a run, a local folder or a hub name.

    In a diffusers pipeline they are its subfolders text_encoder and tokenizer. Elsewhere both are the same folder, unless it has
    no tokenizer and the folder beside it, named tokenizer, exists.
    """
    folder = resolve_model(name, key="model.text.from", required_file=None).path.absolute()
    encoder = find_component_folder(folder, "text_encoder")
    if encoder != folder:
        return encoder, folder / "tokenizer"
    tokenizer_folder = folder.parent / "tokenizer"
    has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return folder, folder if has_tokenizer or not tokenizer_folder.is_dir() else tokenizer_folder


def _build_frozen_metadata(encoder: Path, options: TextEncoderOptions, prompts: tuple[str, ...]) -> TextMetadata:
    from bottega.models.text_encoder import read_text_encoder_metadata

    config = read_text_encoder_metadata(encoder)
    max_positions = config.max_positions
    if options.max_tokens is not None and max_positions is not None and options.max_tokens > max_positions:
        raise UsageError(
            f"model.text.max_tokens: {options.max_tokens} is more than the {max_positions} that {encoder} can read; lower it"
        )
    return TextMetadata(
        max_tokens=options.max_tokens or min(MAX_FROZEN_TOKENS, max_positions or MAX_FROZEN_TOKENS),
        prompts=prompts,
        encoder=str(encoder),
        content=hash_model_folder(encoder),
        width=config.width,
        vocab_size=config.vocab_size,
        is_masked=not config.is_clip,
    )


def _find_tokenizer_folder(folder: Path) -> Path:
    """Return a folder with a tokenizer.json: itself, or older files converted by transformers, in the cache."""
    if (folder / "tokenizer.json").is_file():
        return folder
    files = sorted(file for file in folder.glob("*") if file.suffix in (".json", ".txt", ".model"))
    if not any(file.name in TOKENIZER_FILES for file in files):
        raise UsageError(f"model.text.from: {folder} has no tokenizer; put its tokenizer.json there")
    hashes = [(file.name, digest) for file, digest in zip(files, hash_files(files), strict=True)]
    key = hashlib.sha256(repr(("tokenizer", hashes)).encode()).hexdigest()[:32]
    return get_or_build(default_cache(), key, lambda target: _convert_tokenizer(folder, target))


def _convert_tokenizer(folder: Path, target: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EnvironmentProblem(
            f"model.text.from: the tokenizer of {folder} needs transformers; pip install 'bottega[hub]'"
        ) from error
    try:
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).save_pretrained(target)
    except (ImportError, OSError, ValueError) as error:  # some formats need a further package, which the error names
        raise EnvironmentProblem(
            f"model.text.from: the tokenizer of {folder} cannot be read ({first_line(error)}); download it again, or put its "
            "tokenizer.json there"
        ) from error


def _read_saved_metadata(processor: Path) -> TextMetadata:
    return read_metadata(processor / TOKENIZER_FOLDER / METADATA_FILE, TextMetadata.model_validate_json)
