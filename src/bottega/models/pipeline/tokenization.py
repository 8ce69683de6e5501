"""Texts as the token rows that a pipeline's text encoders read, cut and filled up as the pipeline itself does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import DataError, EnvironmentProblem, UsageError, first_line
from bottega.models.folders.json_object import read_json_object
from bottega.models.folders.tokenizer_limits import convert_panics, read_tokenizer
from bottega.models.pipeline.metadata import PipelineMetadata

USUAL_ENDS = ("<|endoftext|>", "</s>")
Encode = Callable[[list[str]], list[list[int]]]


def tokenize(facts: PipelineMetadata, texts: Sequence[str]) -> list[np.ndarray]:
    """int64 [n, K] for each text encoder, whose lengths K are `facts.lengths`."""
    found = []
    for folder, length, most in zip(facts.tokenizers, facts.lengths, facts.vocab_sizes, strict=True):
        rows = np.array(_encoder(folder, length)(list(texts)), np.int64).reshape(len(texts), length)
        if rows.size and rows.max() >= most:
            raise UsageError(
                f"{folder}: gives token {rows.max()}, and its text encoder knows {most}; they do not belong together"
            )
        found.append(rows)
    return found


@lru_cache(maxsize=8)
def _encoder(folder: str, length: int) -> Encode:
    """Opened once in a process: CLIP's takes 50 ms."""
    place = Path(folder)
    return _of_file(place, length) if (place / "tokenizer.json").is_file() else _of_older_files(place, length)


def _of_file(folder: Path, length: int) -> Encode:
    """The tokenizer as it is in its file, rather than what the class named in the index makes of its vocabulary: the two
    differ where a pipeline was written with a tokenizer that its library has no class for, as ours are."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        with convert_panics(str(file)):
            core = Tokenizer.from_str(read_tokenizer(file))
    except DataError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise UsageError(f"{file}: is not a tokenizer that can be read ({str(error).splitlines()[0]})") from error
    # A caption that spells a mark, such as the one that ends a text, is text.
    core.encode_special_tokens = True
    number, token = _filler(core, folder)
    core.enable_truncation(length)
    core.enable_padding(length=length, pad_id=number, pad_token=token)

    def encode(texts: list[str]) -> list[list[int]]:
        with convert_panics(str(file)):
            return [one.ids for one in core.encode_batch_fast(texts)]

    return encode


def _of_older_files(folder: Path, length: int) -> Encode:
    """vocab.json and merges.txt, or spiece.model, which transformers knows how to join."""
    try:
        from transformers import AutoTokenizer

        words: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        reason = first_line(error)
        raise EnvironmentProblem(f"{folder}: the tokenizer cannot be read: {reason}") from error
    return lambda texts: words(texts, padding="max_length", max_length=length, truncation=True)["input_ids"]


def _filler(core: Any, folder: Path) -> tuple[int, str]:
    """What rows are filled up with; CLIP looks at it, and SDXL's two encoders have different ones."""
    files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    said = [read_json_object(file) for file in files if file.is_file()]
    named = [one.get(key) for key in ("pad_token", "eos_token") for one in said]
    tokens = [one.get("content") if isinstance(one, dict) else one for one in named]
    for token in (*tokens, *USUAL_ENDS):
        number = core.token_to_id(token) if isinstance(token, str) else None
        if number is not None:
            return number, str(token)
    raise UsageError(f"{folder / 'tokenizer_config.json'}: names no pad_token, so that rows cannot be filled up")
