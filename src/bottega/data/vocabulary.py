"""Where a tokenizer's vocabulary comes from: nowhere (bytes), the corpus (characters, BPE), or somebody else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from pydantic import BaseModel, ConfigDict
from tokenizers import decoders, models, pre_tokenizers, trainers

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.data.bytelevel import SYMBOLS, safe_pieces
from bottega.data.tokenizer import END_OF_TEXT, PIECE, Kind, Tokenizer

SMALLEST = 257
"""All bytes and end of text."""


class TokenizerSpec(BaseModel):
    """Which tokenizer: bytes, characters, bpe of `vocab_size`, or pretrained at `path` (a file, folder or hub name)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = "bpe"
    vocab_size: int = 4096
    path: str | None = None


def build_tokenizer(spec: TokenizerSpec, texts: Iterable[str]) -> Tokenizer:
    """`texts` are read only by the kinds that learn from them."""
    if spec.kind == "bytes":
        return byte_tokenizer()
    if spec.kind == "characters":
        return character_tokenizer(texts)
    if spec.kind == "bpe":
        return train_bpe(texts, vocab_size=spec.vocab_size)
    if not spec.path:
        raise UsageError("a pretrained tokenizer needs path: a tokenizer.json, its folder, or a name on the hub")
    return pretrained_tokenizer(spec.path)


def byte_tokenizer() -> Tokenizer:
    """Ids 0-255 are the bytes themselves, 256 ends a text."""
    core = tokenizers.Tokenizer(models.BPE({symbol: byte for byte, symbol in enumerate(SYMBOLS)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return _finished(core, "bytes")


def character_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """One id for each character of the texts, in the order of Unicode; the last id ends a text."""
    characters = sorted(set().union(*map(set, texts)))
    core = tokenizers.Tokenizer(models.WordLevel({character: i for i, character in enumerate(characters)}))
    core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return _finished(core, "characters")


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE: any text round-trips, because every byte has an id of its own. A small corpus gives fewer ids."""
    if vocab_size < SMALLEST:
        raise UsageError(f"tokenizer vocab_size={vocab_size} is less than {SMALLEST}: all bytes and end of text")
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=SYMBOLS, show_progress=False
    )
    # Whole texts of 16 MB cost the library 3 GB; the words, which are all it counts, are the same in pieces.
    pieces = (piece for text in texts for piece in safe_pieces(text, PIECE))
    core.train_from_iterator(pieces, trainer)
    return _finished(core, "bpe")


def pretrained_tokenizer(name: str) -> Tokenizer:
    """From a tokenizer.json or its folder, or by its name on the Hugging Face hub."""
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")):
        return Tokenizer.load(path)
    return Tokenizer.load(_downloaded(name))


def _downloaded(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise EnvironmentProblem(
            f"tokenizer {name!r} is no folder here, and huggingface_hub is not installed"
        ) from error
    try:
        path = Path(hf_hub_download(name, "tokenizer.json"))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise EnvironmentProblem(
            f"tokenizer {name!r} is neither a folder here nor can it be fetched from the hub: {reason}"
        ) from error
    try:
        hf_hub_download(name, "tokenizer_config.json")
    except (EntryNotFoundError, OSError):
        pass  # optional: it only says which token ends a text
    return path.parent


def _finished(core: tokenizers.Tokenizer, kind: Kind) -> Tokenizer:
    core.add_special_tokens([END_OF_TEXT])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
    }
    return Tokenizer(core, kind=kind, config=config)
