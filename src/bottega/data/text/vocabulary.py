"""Build tokenizers: bytes, characters, BPE and words from a corpus, or a pretrained one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from pydantic import BaseModel, ConfigDict, model_validator
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from bottega.core.errors import DataError, UsageError
from bottega.data.text.bytelevel import SYMBOLS, split_at_safe_points
from bottega.data.text.tokenizer import END_OF_TEXT, PIECE_CHARACTERS, UNKNOWN_TOKEN, Kind, Tokenizer
from bottega.models.folders.resolve import resolve_tokenizer

MIN_BPE_VOCAB_SIZE = 257
"""All bytes and end of text."""
DEFAULT_BPE_VOCAB_SIZE = 4096
# The 's of "movie's" is a word of its own, and "don't" stays whole, as does "n't" in texts that were tokenised before ("do n't").
WORD_PATTERN = r"'(?:s|re|ve|ll|m|d)\b|\w+(?:'t\b)?|[^\w\s]"
# More words than any language has, because the library needs a size.
UNLIMITED_VOCAB_SIZE = 1 << 31
MODELS_WITH_POSITION_OFFSET = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "longformer",
    "mpnet",
    "xmod",
    "roberta-prelayernorm",
    "esm",
)


class TokenizerSpec(BaseModel):
    """Which tokenizer to build: bytes, characters, bpe of `vocab_size`, words, or pretrained at `path` (a file, folder or hub name).

    `vocab_size` None is 4096 for bpe, and no limit for words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind = "bpe"
    vocab_size: int | None = None
    min_frequency: int = 2
    """For kind words: less frequent words are unknown."""
    path: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _set_default_vocab_size(cls, values: Any) -> Any:
        is_bpe = isinstance(values, dict) and values.get("kind", "bpe") == "bpe"
        return (
            {**values, "vocab_size": DEFAULT_BPE_VOCAB_SIZE} if is_bpe and values.get("vocab_size") is None else values
        )


def build_tokenizer(spec: TokenizerSpec, texts: Iterable[str]) -> Tokenizer:
    """Build the tokenizer of a spec; `texts` are read only by the kinds that are trained on them."""
    if spec.kind == "bytes":
        return build_byte_tokenizer()
    if spec.kind == "characters":
        return build_character_tokenizer(texts)
    if spec.kind == "bpe":
        return train_bpe(texts, vocab_size=spec.vocab_size or DEFAULT_BPE_VOCAB_SIZE)
    if spec.kind == "words":
        return train_word_tokenizer(texts, vocab_size=spec.vocab_size, min_frequency=spec.min_frequency)
    if not spec.path:
        raise UsageError(
            "data.tokenizer.path: a pretrained tokenizer needs a tokenizer.json, its folder, or a name on the hub"
        )
    return load_pretrained_tokenizer(spec.path)


def build_byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids 0-255 are the bytes, and 256 is end of text."""
    backend = tokenizers.Tokenizer(models.BPE({symbol: byte for byte, symbol in enumerate(SYMBOLS)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap_backend(backend, "bytes")


def build_character_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer with one id per character of the texts, in Unicode order; the last id is end of text."""
    characters = sorted(set().union(*map(set, texts)))
    backend = tokenizers.Tokenizer(models.WordLevel({character: i for i, character in enumerate(characters)}))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _wrap_backend(backend, "characters")


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE, which round-trips any text; a small corpus gives fewer ids than `vocab_size`."""
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise UsageError(
            f"data.tokenizer.vocab_size: expected at least {MIN_BPE_VOCAB_SIZE} (all bytes and end of text), got "
            f"{vocab_size}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=SYMBOLS, show_progress=False
    )
    # For whole texts of 16 MB the library needs 3 GB. It only counts words, and these are the same in pieces.
    pieces = (piece for text in texts for piece in split_at_safe_points(text, PIECE_CHARACTERS))
    backend.train_from_iterator(pieces, trainer)
    return _wrap_backend(backend, "bpe")


def train_word_tokenizer(texts: Iterable[str], *, vocab_size: int | None, min_frequency: int = 2) -> Tokenizer:
    """Train a vocabulary of the most frequent lower-cased words and punctuation; all others are unknown.

    `vocab_size` counts the unknown word and end of text too; None takes all words that occur `min_frequency` times.
    """
    if vocab_size is not None and vocab_size < 3:
        raise UsageError(
            "data.tokenizer.vocab_size: expected at least 3 (the unknown word, end of text and a word), got "
            f"{vocab_size}"
        )
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token=UNKNOWN_TOKEN))
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase(), normalizers.Replace("\u2019", "'")]
    )
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(WORD_PATTERN), "removed", invert=True)
    trainer = trainers.WordLevelTrainer(
        vocab_size=UNLIMITED_VOCAB_SIZE if vocab_size is None else vocab_size,
        min_frequency=min_frequency,
        special_tokens=[UNKNOWN_TOKEN, END_OF_TEXT],
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if backend.get_vocab_size() < 3:
        raise DataError(
            f"no word occurs {min_frequency} times in the training texts; lower data.tokenizer.min_frequency"
        )
    return _wrap_backend(backend, "words", unk_token=UNKNOWN_TOKEN, pad_token=END_OF_TEXT)


def load_pretrained_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer from a tokenizer.json, its folder, or the Hugging Face hub."""
    path = resolve_tokenizer(name)
    tokenizer = Tokenizer.load(path)
    limits = [limit for limit in (tokenizer.model_max_length, _read_max_positions(path)) if limit is not None]
    if limits:
        tokenizer.config["model_max_length"] = min(limits)
    return tokenizer


def _read_max_positions(path: Path) -> int | None:
    """Return the number of positions of the model in the tokenizer's folder; None if it has no model or states no number."""
    config_path = (path if path.is_dir() else path.parent) / "config.json"
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # a tokenizer may have no model, and loading the model reports its own errors
    num_positions = config.get("max_position_embeddings") if isinstance(config, dict) else None
    if not isinstance(num_positions, int):
        return None
    # The positions of these models start after pad_token_id, so that the first ones are never used.
    offset = (config.get("pad_token_id") or 0) + 1 if config.get("model_type") in MODELS_WITH_POSITION_OFFSET else 0
    return num_positions - offset if num_positions > offset else None


def _wrap_backend(backend: tokenizers.Tokenizer, kind: Kind, **special_tokens: str) -> Tokenizer:
    backend.add_special_tokens([END_OF_TEXT])
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        **special_tokens,
    }
    return Tokenizer(backend, kind=kind, config=config)
