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
from bottega.data.formats.fingerprint import content_hashes
from bottega.data.prepare.prepared import Prepared
from bottega.data.tables.cache import cached, default_cache
from bottega.data.text.captions import CaptionTokens, first_captions, learn_tokens
from bottega.models.folders.resolve import component_folder, resolve_model
from bottega.models.generator.config import ConditionShape
from bottega.tasks import needs
from bottega.tasks.frozen import check_same, content_of, found_again
from bottega.tasks.generation.config import AudioRecipe, ImageRecipe, TextEncoderOptions, VideoRecipe
from bottega.tasks.generation.text import FrozenText
from bottega.tasks.kept import read_kept

FOLDER, FACTS = "text", "text.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")
OWN_TOKENS, MOST_TOKENS = 32, 128
"""Where a recipe does not say how many: for our own encoder, and for one that could read more than captions have."""
PROMPTS, SHOWN = 16, 4
"""Captions of the data that a run remembers, and how many of them it draws when it is asked for nothing."""


class TextFacts(BaseModel):
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
    tokens: CaptionTokens
    facts: TextFacts
    options: TextEncoderOptions
    prompts: tuple[str, ...]
    """What samples are drawn for."""

    def shape(self, hidden_size: int) -> ConditionShape:
        if self.facts.encoder is not None:
            sizes: dict[str, Any] = {"text_size": self.facts.width}
        else:
            own = self.options
            sizes = {"text_size": own.hidden_size, "text_layers": own.num_layers}
            sizes["vocab_size"] = self.tokens.tokenizer.vocab_size
        return ConditionShape(kind="text", hidden_size=hidden_size, max_tokens=self.tokens.length, **sizes)

    @cached_property
    def of_task(self) -> dict[str, Any]:
        """The fields of the task that have to do with text."""
        empty, facts = self.tokens.encode([""]), self.facts
        frozen = FrozenText(folder=facts.encoder, is_masked=facts.is_masked) if facts.encoder is not None else None
        ids, length = tuple(empty["input_ids"][0].tolist()), int(empty["attention_mask"].sum())
        return {"text": frozen, "empty_text": ids, "empty_length": length}

    def asked(self, wanted: str | list[str] | None) -> list[str]:
        """The prompts that were given, or those a run shows by itself."""
        return [wanted] if isinstance(wanted, str) else list(wanted or self.prompts[:SHOWN])

    def rows(self, prompts: list[str]) -> dict[str, np.ndarray]:
        for prompt in prompts:
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise UsageError(f"--prompt {prompt!r}: is no Unicode text") from None
        return self.tokens.encode(prompts)

    def save(self, codec: Path) -> None:
        folder = codec / FOLDER
        self.tokens.save(folder)
        (folder / FACTS).write_text(self.facts.model_dump_json(indent=1) + "\n")

    def check(self, codec: Path) -> None:
        """A run goes on with the encoder and the tokens it began with, or not at all."""
        before = _read(codec)
        named, was = self.facts.encoder or "model.text", before.encoder or "its own"
        check_same("text encoder", now=self.facts.content, before=before.content, named=named, was=was)
        if CaptionTokens(codec / FOLDER, before.max_tokens).fingerprint != self.tokens.fingerprint:
            raise CheckpointError(f"{codec / FOLDER}: the captions give other tokens than this run began with")


def prepare_text(recipe: ImageRecipe | AudioRecipe | VideoRecipe, prepared: Prepared) -> TextCondition:
    """With the tokenizer of the encoder's folder, or with one learnt from the captions of the training data."""
    if recipe.data.condition_field is not None:
        raise UsageError(
            "data.condition_field: captions are found by their usual names (caption, text, txt, transcript, sentence); "
            "name another field with data.train.label"
        )
    options = recipe.model.text
    held_out = ["validation"] if "validation" in prepared.tables else []
    remembered = first_captions(list(map(prepared.table, (*held_out, *prepared.training_tables))), PROMPTS)
    if options.from_ is None:
        tables = [prepared.table(name) for name in prepared.training_tables]
        folder = learn_tokens(tables, content=prepared.fingerprint, vocab_size=options.vocab_size)
        facts = TextFacts(max_tokens=options.max_tokens or OWN_TOKENS, prompts=remembered)
    else:
        encoder, beside = encoder_folders(needs.place(recipe, options.from_))
        folder = _tokenizer_folder(beside)
        facts = _frozen_facts(encoder, options, remembered)
    tokens = CaptionTokens(folder, facts.max_tokens)
    if facts.encoder is not None and tokens.tokenizer.vocab_size > facts.vocab_size:
        raise UsageError(
            f"model.text.from: {folder} has {tokens.tokenizer.vocab_size} tokens, and {facts.encoder} knows {facts.vocab_size}; they do not belong together"
        )
    return TextCondition(tokens, facts, options, recipe.samples.prompts or remembered)


def reopen_text(recipe: ImageRecipe | AudioRecipe | VideoRecipe, codec: Path) -> TextCondition:
    """As the run has kept it; a frozen encoder must still be where it was, and the same."""
    facts, runs = _read(codec), codec.absolute().parent.parent
    if facts.encoder is not None:
        known, name = Path(facts.encoder), recipe.model.text.from_ or facts.encoder
        places = (lambda: known, lambda: encoder_folders(needs.place(recipe, name, beside=runs))[0])
        found = found_again("text encoder", facts.content, places, known=facts.encoder)
        facts = facts.model_copy(update={"encoder": str(found)})
    tokens = CaptionTokens(codec / FOLDER, facts.max_tokens)
    return TextCondition(tokens, facts, recipe.model.text, recipe.samples.prompts or facts.prompts)


def encoder_folders(name: str) -> tuple[Path, Path]:
    """Of an encoder and of its tokenizer: one folder with both, a run's export, a pipeline of diffusers, or a part of one."""
    folder = resolve_model(name, key="model.text.from", holds=None).path.absolute()
    encoder = component_folder(folder, "text_encoder")
    if encoder != folder:
        return encoder, folder / "tokenizer"
    beside = folder.parent / "tokenizer"
    has_own = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return folder, folder if has_own or not beside.is_dir() else beside


def _frozen_facts(encoder: Path, options: TextEncoderOptions, prompts: tuple[str, ...]) -> TextFacts:
    from bottega.models.text_encoder import read_text_facts

    known = read_text_facts(encoder)
    most = known.positions
    if options.max_tokens is not None and most is not None and options.max_tokens > most:
        raise UsageError(f"model.text.max_tokens: {options.max_tokens} is more than the {most} that {encoder} can read")
    return TextFacts(
        max_tokens=options.max_tokens or min(MOST_TOKENS, most or MOST_TOKENS),
        prompts=prompts,
        encoder=str(encoder),
        content=content_of(encoder),
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
    named = [(file.name, found) for file, found in zip(files, content_hashes(files), strict=True)]
    key = hashlib.sha256(repr(("tokenizer", named)).encode()).hexdigest()[:32]
    return cached(default_cache(), key, lambda target: _convert(folder, target))


def _convert(folder: Path, target: Path) -> None:
    try:
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).save_pretrained(target)
    except (ImportError, OSError, ValueError) as error:
        reason = first_line(error)
        raise EnvironmentProblem(f"model.text.from: the tokenizer of {folder} cannot be read: {reason}") from error


def _read(codec: Path) -> TextFacts:
    return read_kept(codec / FOLDER / FACTS, TextFacts.model_validate_json)
