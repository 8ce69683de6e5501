"""The tokenizer of a frozen language model, with its chat template and the tokens that end an answer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.models.folders.json_object import read_json_object
from bottega.models.folders.tokenizer_limits import check_tokenizer
from bottega.models.frozen.language import KEY
from bottega.tasks.frozen_models import hash_named_files

PROMPT_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files that affect the token ids of a prompt, or which tokens end an answer."""


def hash_prompt_files(folder: Path) -> str:
    """Return a hash of the tokenizer, chat template and generation configuration of a model folder."""
    return hash_named_files(folder / name for name in PROMPT_FILES if (folder / name).is_file())


@final
class LanguageTokenizer:
    """The tokenizer of the language model in `folder`, which has `vocab_size` embeddings.

    Prompts are written in the model's chat template if it is a chat model, and as plain text otherwise. The tokenizer is
    loaded by transformers on first use.
    """

    def __init__(self, folder: Path, *, vocab_size: int) -> None:
        self.folder, self.vocab_size = folder, vocab_size

    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the token ids of a prompt, int64 (length,), with the chat template or the tokenizer's special tokens."""
        if self.is_chat:
            tokens = self.encode(self._apply_chat_template(text))
        else:
            tokens = self.tokenizer(text)["input_ids"]
        ids = np.array(tokens, np.int64)
        if ids.max(initial=0) >= self.vocab_size:
            raise UsageError(
                f"{KEY}: the tokenizer of {self.folder} gives token {ids.max()}, but the model has {self.vocab_size} "
                "embeddings; use the tokenizer that belongs to the model"
            )
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` without special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def truncate(self, text: str, max_tokens: int) -> str:
        """Return `text` on one line, cut to at most `max_tokens` tokens."""
        text = " ".join(text.split())
        if len(text.encode(errors="replace")) <= max_tokens:  # a token is at least one byte
            return text
        ids = self.encode(text)
        return text if len(ids) <= max_tokens else str(self.tokenizer.decode(ids[:max_tokens])).strip()

    @cached_property
    def is_chat(self) -> bool:
        """Whether the model is a chat model: its template ends a turn with a token that also ends the model's answers.

        A chat template alone does not prove it: base models are often published with the template of their chat variant.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            return False
        answer = "keywords"
        turn_end = self._apply_chat_template("a", answer).rpartition(answer)[2].strip()
        first_ids = self.encode(turn_end)[:1]
        return bool(first_ids) and first_ids[0] in self.stop_tokens

    @cached_property
    def stop_tokens(self) -> set[int]:
        """Ids of the tokens that end an answer, from the tokenizer, generation_config.json and config.json."""
        tokens = {self.tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            value = read_json_object(path).get("eos_token_id") if path.is_file() else None
            tokens |= set(value) if isinstance(value, list) else {value}
        return tokens - {None}

    @cached_property
    def line_break_tokens(self) -> list[int]:
        """Ids of all tokens that contain a line break."""
        tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return [
            number
            for number, token in enumerate(tokens)
            if token and ("Ċ" in token or "\n" in token or token == "<0x0A>")
        ]

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers; code from the model folder is never run."""
        check_tokenizer(self.folder)
        try:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            raise EnvironmentProblem(
                f"{KEY}: loading its tokenizer needs a package that is not installed ({first_line(error)}); install it"
            ) from error
        except Exception as error:  # each library raises its own classes for a damaged file
            raise CheckpointError(
                f"{KEY}: the tokenizer of {self.folder} cannot be read ({first_line(error)}); download or export it again"
            ) from error

    def _apply_chat_template(self, text: str, answer: str | None = None) -> str:
        """Return a conversation as text; transformers runs templates in jinja's sandbox."""
        turns = [{"role": "user", "content": text}]
        if answer is not None:
            turns.append({"role": "assistant", "content": answer})
        try:
            # A reasoning model would otherwise spend all its tokens on thinking.
            return str(
                self.tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=answer is None, enable_thinking=False
                )
            )
        except Exception as error:  # a template may raise anything
            raise UsageError(
                f"{KEY}: the chat template of {self.folder} fails ({first_line(error)}); correct the template, or use another model"
            ) from error
