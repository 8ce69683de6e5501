"""Tokenizes texts for a pipeline's text encoders, truncated and padded as the pipeline itself does."""

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

END_TOKENS = ("<|endoftext|>", "</s>")
Encode = Callable[[list[str]], list[list[int]]]


def tokenize(metadata: PipelineMetadata, texts: Sequence[str]) -> list[np.ndarray]:
    """Return token ids, int64 (texts, K), for each text encoder; the lengths K are `metadata.lengths`."""
    batches = []
    for folder, length, vocab_size in zip(metadata.tokenizers, metadata.lengths, metadata.vocab_sizes, strict=True):
        token_ids = np.array(_load_encoder(folder, length)(list(texts)), np.int64).reshape(len(texts), length)
        if token_ids.size and token_ids.max() >= vocab_size:
            raise UsageError(
                f"{folder} gives token {token_ids.max()}, but its text encoder has only {vocab_size} embeddings; "
                "use a complete copy of one pipeline"
            )
        batches.append(token_ids)
    return batches


@lru_cache(maxsize=8)
def _load_encoder(folder: str, length: int) -> Encode:
    """Return the tokenizer's encode function; cached, because opening CLIP's tokenizer takes 50 ms."""
    path = Path(folder)
    return (
        _load_tokenizer_json(path, length) if (path / "tokenizer.json").is_file() else _load_older_files(path, length)
    )


def _load_tokenizer_json(folder: Path, length: int) -> Encode:
    """Load tokenizer.json itself, not with the class that the index names.

    That class rebuilds the tokenizer from its vocabulary, and the result differs if no class of
    transformers matches, as for our tokenizers.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        with convert_panics(str(file)):
            backend = Tokenizer.from_str(read_tokenizer(file))
    except DataError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise UsageError(
            f"{file} is not a tokenizer that can be read ({str(error).splitlines()[0]}); save or download the pipeline again"
        ) from error
    # A caption that spells a special token, such as the end of text, is plain text.
    backend.encode_special_tokens = True
    pad_id, pad_token = _find_padding(backend, folder)
    backend.enable_truncation(length)
    backend.enable_padding(length=length, pad_id=pad_id, pad_token=pad_token)

    def encode(texts: list[str]) -> list[list[int]]:
        with convert_panics(str(file)):
            return [encoding.ids for encoding in backend.encode_batch_fast(texts)]

    return encode


def _load_older_files(folder: Path, length: int) -> Encode:
    """Load vocab.json and merges.txt, or spiece.model, with transformers."""
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        reason = first_line(error)
        raise EnvironmentProblem(f"{folder}: the tokenizer cannot be read: {reason}") from error
    return lambda texts: tokenizer(texts, padding="max_length", max_length=length, truncation=True)["input_ids"]


def _find_padding(backend: Any, folder: Path) -> tuple[int, str]:
    """Return id and text of the padding token. CLIP attends to padding, and SDXL's two encoders pad differently."""
    files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    configs = [read_json_object(file) for file in files if file.is_file()]
    entries = [config.get(key) for key in ("pad_token", "eos_token") for config in configs]
    tokens = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    for token in (*tokens, *END_TOKENS):
        token_id = backend.token_to_id(token) if isinstance(token, str) else None
        if token_id is not None:
            return token_id, str(token)
    raise UsageError(f"{folder / 'tokenizer_config.json'} has no pad_token; add one")
