"""Train a tokenizer in CLIP's format on captions, so that transformers' CLIPTokenizer gives the same tokens.

Byte-level BPE over lower-cased words and punctuation without spaces; the last token of a word ends in `</w>`. A text is
framed by `<|startoftext|>` and `<|endoftext|>`, which is also the padding token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from bottega.core.errors import UsageError
from bottega.data.tables.cache import get_or_build
from bottega.data.tables.shards import Table
from bottega.data.text.bytelevel import SYMBOLS
from bottega.data.text.captions import read_captions
from bottega.data.text.tokenizer import END_OF_TEXT, Tokenizer
from bottega.storage.cache_folder import default_cache

START_OF_TEXT, END_OF_WORD = "<|startoftext|>", "</w>"
WORD_PATTERN = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
# Part of the cache key. Increase it when the same captions would give a different tokenizer.
FORMAT = 1
# Largest training text, sampled evenly: more text hardly changes the merges.
MAX_TRAINING_CHARACTERS = 64 << 20


def train_clip_tokenizer(tables: Sequence[Table], *, content: str, vocab_size: int, cache: Path | None = None) -> Path:
    """Train a CLIP tokenizer on the captions of tables, cached by their hash `content`, and return its folder."""
    names = [table.folder.name for table in tables]
    key = hashlib.sha256(repr(("clip tokens", FORMAT, content, names, vocab_size)).encode()).hexdigest()[:32]

    def build(folder: Path) -> None:
        texts = [text for table in tables for text in read_captions(table)]
        step = -(-sum(map(len, texts)) // MAX_TRAINING_CHARACTERS) or 1
        train_clip_bpe(texts[::step], vocab_size=vocab_size).save(folder)

    return get_or_build(cache or default_cache(), key, build)


def train_clip_bpe(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Train a CLIP tokenizer of at most `vocab_size` tokens: all bytes, all bytes at the end of a word, merges, and two special
    tokens."""
    minimum = 2 * len(SYMBOLS) + 2
    if vocab_size < minimum:
        raise UsageError(
            f"model.vocab_size: expected at least {minimum} (each byte within and at the end of words, and 2 special tokens), got {vocab_size}"
        )
    trained_backend = _build_backend(models.BPE(continuing_subword_prefix="", end_of_word_suffix=END_OF_WORD))
    # The trainer counts only the word ends that occur in the texts, so it may return a few more merges than fit.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=SYMBOLS,
        continuing_subword_prefix="",
        end_of_word_suffix=END_OF_WORD,
        show_progress=False,
    )
    trained_backend.train_from_iterator(texts, trainer)
    trained_merges = json.loads(trained_backend.to_str())["model"]["merges"]
    merges = [(str(first), str(second)) for first, second in trained_merges]
    tokens = [*SYMBOLS, *(f"{symbol}{END_OF_WORD}" for symbol in SYMBOLS)]
    selected_merges: list[tuple[str, str]] = []
    for pair in merges:
        if len(tokens) + 2 >= vocab_size:
            break
        selected_merges.append(pair)
        tokens.append("".join(pair))
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*tokens, START_OF_TEXT, END_OF_TEXT]))}
    bpe = models.BPE(
        vocabulary,
        selected_merges,
        continuing_subword_prefix="",
        end_of_word_suffix=END_OF_WORD,
        unk_token=END_OF_TEXT,
        fuse_unk=False,
    )
    backend = _build_backend(bpe)
    backend.add_special_tokens([START_OF_TEXT, END_OF_TEXT])
    special_tokens = [(name, vocabulary[name]) for name in (END_OF_TEXT, START_OF_TEXT)]
    backend.post_processor = processors.RobertaProcessing(
        special_tokens[0], special_tokens[1], trim_offsets=False, add_prefix_space=False
    )
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "bos_token": START_OF_TEXT,
        **dict.fromkeys(("eos_token", "pad_token", "unk_token"), END_OF_TEXT),
        "clean_up_tokenization_spaces": False,
    }
    return Tokenizer(backend, kind="pretrained", config=config)


def _build_backend(model: models.BPE) -> tokenizers.Tokenizer:
    """Return a tokenizer with normalizer, pre-tokenizer and decoder as transformers configures a CLIPTokenizer."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), "removed", invert=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    return backend
