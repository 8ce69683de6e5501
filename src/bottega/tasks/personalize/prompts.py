"""Prompts for the frozen language model: the liked captions and the wish, filled into the templates of the recipe."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import UsageError
from bottega.models.folders.resolve import resolve_model
from bottega.models.frozen.language import KEY, read_language_model_metadata
from bottega.tasks.personalize.config import Keywords
from bottega.tasks.personalize.data.records import Record
from bottega.tasks.personalize.language_tokenizer import LanguageTokenizer


@final
class PromptBuilder:
    """Builds prompts of at most `length` tokens; the oldest items of a history are dropped until the prompt fits.

    At least `reserved` positions of the language model are left free, for image tokens and prefixes or for an answer.
    """

    def __init__(self, folder: Path | str, options: Keywords, *, length: int = 600, reserved: int = 0) -> None:
        path = resolve_model(folder, key=KEY).path
        metadata = read_language_model_metadata(path)
        self.options = options
        self.tokenizer = LanguageTokenizer(path, vocab_size=metadata.vocab_size)
        max_positions, reserved = metadata.max_positions, max(reserved, options.max_tokens)
        self.length = length if max_positions is None else min(length, max_positions - reserved)
        if self.length < 1:
            raise UsageError(
                f"{KEY}: {path} has {max_positions} positions, and {reserved} are reserved for "
                "model.num_image_tokens + model.num_prefix_tokens or for model.keywords.max_tokens; lower these"
            )

    def build_preference_prompt(self, record: Record) -> np.ndarray:
        """Return the prompt that asks for keywords of what a user likes, int64 (length,)."""
        wish = self._truncate(record.wish_or_caption)
        template = self.options.preference_prompt
        return self._fit_history(record, lambda history: self._fill_template(template, history=history, wish=wish))

    def build_target_prompt(self, wish: str) -> np.ndarray:
        """Return the prompt that asks for keywords of what the image must show, int64 (length,)."""
        ids = self.tokenizer.encode_prompt(self._fill_template(self.options.target_prompt, wish=self._truncate(wish)))
        if len(ids) > self.length:
            raise self._build_length_error("target_prompt", len(ids))
        return ids

    def build_image_prompt(self, record: Record) -> np.ndarray:
        """Return the prompt that the image tokens follow, int64 (length,).

        It begins with the target prompt up to the wish, and ends with the preference prompt, which the image tokens answer. A
        preference prompt that contains {wish} is used alone.
        """
        options, wish = self.options, self._truncate(record.wish_or_caption)
        has_wish = "{wish}" in options.preference_prompt
        wish_text = "" if has_wish else self._fill_template(options.target_prompt.partition("{wish}")[0]) + wish + "\n"
        return self._fit_history(
            record,
            lambda history: wish_text + self._fill_template(options.preference_prompt, history=history, wish=wish),
        )

    def _fill_template(self, template: str, **fields: str) -> str:
        # Not str.format: captions and templates may contain other braces.
        fields = {"count": str(self.options.count), **fields}
        return re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], match[0]), template)

    def _fit_history(self, record: Record, build_text: Callable[[str], str]) -> np.ndarray:
        """Return the prompt with as many of the newest items as fit.

        The line break of the last item is dropped: the template decides what follows the history.
        """
        history = record.history[-self.length :]  # each item takes at least one token
        items = [self._fill_template(self.options.item, caption=self._truncate(item.caption)) for item in history]

        def encode_without(num_dropped: int) -> np.ndarray:
            return self.tokenizer.encode_prompt(build_text("".join(items[num_dropped:]).rstrip("\n")))

        ids = encode_without(0)
        if len(ids) <= self.length:
            return ids
        low, high = 1, len(items)  # bounds on the number of dropped items
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(encode_without(middle)) <= self.length else (middle + 1, high)
        if low >= len(items):
            raise self._build_length_error("preference_prompt", len(ids))
        return encode_without(low)

    def _truncate(self, text: str) -> str:
        """Cut a caption or wish to a quarter of the prompt's length, so that it leaves room for other captions."""
        return self.tokenizer.truncate(text, max(1, self.length // 4))

    def _build_length_error(self, key: str, count: int) -> UsageError:
        return UsageError(
            f"data.sequence_length: {self.length} tokens cannot hold model.keywords.{key}, which has {count} tokens once it "
            "is filled in; shorten the template, or raise data.sequence_length if the language model has more positions"
        )


@final
@dataclass(frozen=True)
class ImagePrompts:
    """The prompts that image tokens follow, for the workers of a data loader: each process loads its own tokenizer."""

    folder: str
    options: Keywords
    length: int
    reserved: int
    """Positions of the language model that trained tokens take."""
    content: str
    """Hash of the language model."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "builder"}

    @cached_property
    def builder(self) -> PromptBuilder:
        """Builds the prompts of the language model."""
        return PromptBuilder(self.folder, self.options, length=self.length, reserved=self.reserved)

    @property
    def fingerprint(self) -> str:
        """Hash of the language model and of everything that affects its prompts."""
        identity = (self.content, self.options.model_dump_json(), self.length, self.reserved)
        return hashlib.sha256(repr(identity).encode()).hexdigest()

    def encode_prompt(self, record: Record) -> np.ndarray:
        """Return the token ids of the prompt for `record`, int64 (length,)."""
        return self.builder.build_image_prompt(record)

    def encode_words(self, words: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of each word, one after the other, without special tokens."""
        tokens = [self.builder.tokenizer.encode(word) for word in words]
        if not all(tokens):
            word = words[tokens.index([])]
            raise UsageError(
                f"model.start_words: {word!r} has no token of the language model; give a word or sign such as ':'"
            )
        return tuple(number for ids in tokens for number in ids)
