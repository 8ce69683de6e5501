"""What a run knows of the texts it is asked for: whose tokens, whose encoder, and what it draws when nobody asks."""

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
from bottega.data.tables.cache import default_cache, get_or_build
from bottega.data.text.captions import CaptionTokenizer, find_distinct_captions, train_caption_tokenizer
from bottega.models.folders.resolve import find_component_folder, resolve_model
from bottega.models.generator.config import ConditionShape
from bottega.tasks import dependencies
from bottega.tasks.frozen_models import check_same_model, find_frozen_model, hash_model_folder
from bottega.tasks.generation.config import AudioRecipe, ImageRecipe, TextEncoderOptions, VideoRecipe
from bottega.tasks.generation.text import FrozenText
from bottega.tasks.metadata import read_metadata

FOLDER, METADATA_FILE = "text", "text.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
DEFAULT_MAX_TOKENS, MAX_FROZEN_TOKENS = 32, 128
"""Where a recipe does not say how many: for our own encoder, and for one that could read more than captions have."""
NUM_SAVED_PROMPTS, NUM_DEFAULT_PROMPTS = 16, 4
"""Captions of the data that a run remembers, and how many of them it draws when it is asked for nothing."""


class TextMetadata(BaseModel):
    """Kept beside the tokenizer: enough to ask again where the data are not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int
    prompts: tuple[str, ...]
    encoder: str | None = None
    """Folder of the frozen one; None is our own inside the model."""
    content: str | None = None
    """Its hash: the model understands no other."""
    width: int = 0
    vocab_size: int = 0
    is_masked: bool = True


@final
@dataclass(frozen=True)
class TextCondition:
    tokens: CaptionTokenizer
    metadata: TextMetadata
    options: TextEncoderOptions
    prompts: tuple[str, ...]
    """What samples are drawn for."""

    def shape(self, hidden_size: int) -> ConditionShape:
        if self.metadata.encoder is not None:
            sizes: dict[str, Any] = {"text_size": self.metadata.width}
        else:
            own = self.options
            sizes = {"text_size": own.hidden_size, "text_layers": own.num_layers}
            sizes["vocab_size"] = self.tokens.tokenizer.vocab_size
        return ConditionShape(kind="text", hidden_size=hidden_size, max_tokens=self.tokens.length, **sizes)

    @cached_property
    def task_fields(self) -> dict[str, Any]:
        """The fields of the task that have to do with text."""
        empty, facts = self.tokens.encode([""]), self.metadata
        frozen = FrozenText(folder=facts.encoder, is_masked=facts.is_masked) if facts.encoder is not None else None
        ids, length = tuple(empty["input_ids"][0].tolist()), int(empty["attention_mask"].sum())
        return {"text": frozen, "empty_text": ids, "empty_length": length}

    def resolve_prompts(self, wanted: str | list[str] | None) -> list[str]:
        """The prompts that were given, or those a run shows by itself."""
        return [wanted] if isinstance(wanted, str) else list(wanted or self.prompts[:NUM_DEFAULT_PROMPTS])

    def encode(self, prompts: list[str]) -> dict[str, np.ndarray]:
        for prompt in prompts:
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise UsageError(f"--prompt {prompt!r}: is no Unicode text") from None
        return self.tokens.encode(prompts)

    def save(self, processor: Path) -> None:
        folder = processor / FOLDER
        self.tokens.save(folder)
        (folder / METADATA_FILE).write_text(self.metadata.model_dump_json(indent=1) + "\n")

    def check(self, processor: Path) -> None:
        """A run goes on with the encoder and the tokens it began with, or not at all."""
        before = _read(processor)
        named, was = self.metadata.encoder or "model.text", before.encoder or "its own"
        check_same_model("text encoder", now=self.metadata.content, before=before.content, name=named, previous=was)
        if CaptionTokenizer(processor / FOLDER, before.max_tokens).fingerprint != self.tokens.fingerprint:
            raise CheckpointError(f"{processor / FOLDER}: the captions give other tokens than this run began with")


def open_text_condition(recipe: ImageRecipe | AudioRecipe | VideoRecipe, prepared: PreparedData) -> TextCondition:
    """With the tokenizer of the encoder's folder, or with one learnt from the captions of the training data."""
    if recipe.data.condition_field is not None:
        raise UsageError(
            "data.condition_field: captions are found by their usual names (caption, text, txt, transcript, sentence); "
            "name another field with data.train.label"
        )
    options = recipe.model.text
    held_out = ["validation"] if "validation" in prepared.tables else []
    remembered = find_distinct_captions(
        list(map(prepared.table, (*held_out, *prepared.training_tables))), NUM_SAVED_PROMPTS
    )
    if options.from_ is None:
        tables = [prepared.table(name) for name in prepared.training_tables]
        folder = train_caption_tokenizer(tables, content=prepared.fingerprint, vocab_size=options.vocab_size)
        facts = TextMetadata(max_tokens=options.max_tokens or DEFAULT_MAX_TOKENS, prompts=remembered)
    else:
        encoder, beside = resolve_encoder_folders(dependencies.resolve_reference(recipe, options.from_))
        folder = _tokenizer_folder(beside)
        facts = _frozen_facts(encoder, options, remembered)
    tokens = CaptionTokenizer(folder, facts.max_tokens)
    if facts.encoder is not None and tokens.tokenizer.vocab_size > facts.vocab_size:
        raise UsageError(
            f"model.text.from: {folder} has {tokens.tokenizer.vocab_size} tokens, and {facts.encoder} knows {facts.vocab_size}; they do not belong together"
        )
    return TextCondition(tokens, facts, options, recipe.samples.prompts or remembered)


def reopen_text_condition(recipe: ImageRecipe | AudioRecipe | VideoRecipe, processor: Path) -> TextCondition:
    """As the run has kept it; a frozen encoder must still be where it was, and the same."""
    facts, runs = _read(processor), processor.absolute().parent.parent
    if facts.encoder is not None:
        known, name = Path(facts.encoder), recipe.model.text.from_ or facts.encoder
        places = (
            lambda: known,
            lambda: resolve_encoder_folders(dependencies.resolve_reference(recipe, name, beside=runs))[0],
        )
        found = find_frozen_model("text encoder", facts.content, places, recorded=facts.encoder)
        facts = facts.model_copy(update={"encoder": str(found)})
    tokens = CaptionTokenizer(processor / FOLDER, facts.max_tokens)
    return TextCondition(tokens, facts, recipe.model.text, recipe.samples.prompts or facts.prompts)


def resolve_encoder_folders(name: str) -> tuple[Path, Path]:
    """Of an encoder and of its tokenizer: one folder with both, a run's export, a pipeline of diffusers, or a part of one."""
    folder = resolve_model(name, key="model.text.from", required_file=None).path.absolute()
    encoder = find_component_folder(folder, "text_encoder")
    if encoder != folder:
        return encoder, folder / "tokenizer"
    beside = folder.parent / "tokenizer"
    has_own = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return folder, folder if has_own or not beside.is_dir() else beside


def _frozen_facts(encoder: Path, options: TextEncoderOptions, prompts: tuple[str, ...]) -> TextMetadata:
    from bottega.models.text_encoder import read_text_encoder_metadata

    known = read_text_encoder_metadata(encoder)
    most = known.positions
    if options.max_tokens is not None and most is not None and options.max_tokens > most:
        raise UsageError(f"model.text.max_tokens: {options.max_tokens} is more than the {most} that {encoder} can read")
    return TextMetadata(
        max_tokens=options.max_tokens or min(MAX_FROZEN_TOKENS, most or MAX_FROZEN_TOKENS),
        prompts=prompts,
        encoder=str(encoder),
        content=hash_model_folder(encoder),
        width=known.width,
        vocab_size=known.vocab_size,
        is_masked=not known.is_clip,
    )


def _tokenizer_folder(folder: Path) -> Path:
    """One with a tokenizer.json: itself, or what transformers makes of older files, kept in the cache."""
    if (folder / "tokenizer.json").is_file():
        return folder
    files = sorted(file for file in folder.glob("*") if file.suffix in (".json", ".txt", ".model"))
    if not any(file.name in TOKENIZER_FILES for file in files):
        raise UsageError(f"model.text.from: {folder} has no tokenizer; put its tokenizer.json there")
    named = [(file.name, found) for file, found in zip(files, hash_files(files), strict=True)]
    key = hashlib.sha256(repr(("tokenizer", named)).encode()).hexdigest()[:32]
    return get_or_build(default_cache(), key, lambda target: _convert(folder, target))


def _convert(folder: Path, target: Path) -> None:
    try:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).save_pretrained(target)
    except (ImportError, OSError, ValueError) as error:
        reason = first_line(error)
        raise EnvironmentProblem(f"model.text.from: the tokenizer of {folder} cannot be read: {reason}") from error


def _read(processor: Path) -> TextMetadata:
    return read_metadata(processor / FOLDER / METADATA_FILE, TextMetadata.model_validate_json)
