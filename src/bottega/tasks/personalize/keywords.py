"""What a frozen language model says of a person's taste and of a wish, in keywords; and the prompts that ask it.

Answers are kept on disk under all that decides them, so each is decoded once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.data.tables.cache import default_cache
from bottega.models.folders.json_object import read_json_object
from bottega.models.folders.resolve import resolve_model
from bottega.models.folders.tokenizer_limits import check_tokenizer
from bottega.models.frozen.allowed_words import AllowedWords
from bottega.models.frozen.language import KEY, FrozenLanguageModel, read_language_model_metadata
from bottega.tasks.frozen_models import hash_model_folder, hash_named_files
from bottega.tasks.personalize.config import Keywords
from bottega.tasks.personalize.data.records import Record
from bottega.tasks.personalize.keyword_cache import append_answers, lock_answers, read_cached_answers
from bottega.tasks.personalize.keyword_parser import parse_keywords

# Raised when the same answer would be read in another way, so that old ones are left alone.
FORMAT = 2
ROWS, TOKENS = 128, 16384
"""Prompts that are answered together, and how many tokens these may have with their padding."""
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
"""All that decides how a prompt is written and where an answer ends."""
Say = Callable[[str, int, int], None]


@final
class KeywordGenerator:
    """`length` is the most tokens of a prompt; older items of a history are left out until it fits."""

    def __init__(
        self,
        folder: Path | str,
        options: Keywords,
        *,
        length: int = 600,
        room: int = 0,
        precision: str = "fp32",
        cache: Path | None = None,
    ) -> None:
        """`room` is how many positions are taken after or before a prompt besides, by image tokens and prefixes.
        `precision` is of the model that answers, whose likeliest word may hang on it."""
        self.folder, self.options = resolve_model(folder, key=KEY).path, options
        self.facts = read_language_model_metadata(self.folder)
        most, taken = self.facts.max_positions, max(room, options.max_tokens)
        self.length = length if most is None else min(length, most - taken)
        if self.length < 1:
            raise UsageError(
                f"{KEY}: {self.folder} can read {most} tokens, and {taken} are taken by model.num_image_tokens with "
                "num_prefix_tokens, or by model.keywords.max_tokens; lower these"
            )
        self.cache = (default_cache() if cache is None else cache) / "keywords"
        self.without: dict[str, int] = {}
        """How many answers held no keyword, by what was asked."""
        self.remembered: Mapping[str, tuple[str, ...]] = {}
        """Answers of an earlier time, which are not asked for again, whatever the cache has."""
        self.answered: dict[str, tuple[str, ...]] = {}
        """All answers that were asked for, by prompt."""
        self._asked: dict[str, int] = {}
        self._precision = precision

    # What is asked

    def prompt_for_preference(self, record: Record) -> np.ndarray:
        """Token ids, int64."""
        wish = self._cut(record.wish_or_caption)
        prompt = self.options.preference_prompt
        return self._fitting(record, lambda history: self._fill(prompt, history=history, wish=wish))

    def prompt_for_target(self, wish: str) -> np.ndarray:
        ids = self._encode(self._fill(self.options.target_prompt, wish=self._cut(wish)))
        if len(ids) > self.length:
            raise self._too_long("target_prompt", len(ids))
        return ids

    def prompt_for_images(self, record: Record) -> np.ndarray:
        """What image tokens follow: the wish, as the prompt for its keywords begins, and the prompt for the taste, whose
        answer the model is about to give. A prompt for the taste that has {wish} in it is taken as it is."""
        options, wish = self.options, self._cut(record.wish_or_caption)
        has_wish = "{wish}" in options.preference_prompt
        before = "" if has_wish else self._fill(options.target_prompt.partition("{wish}")[0]) + wish + "\n"
        return self._fitting(
            record, lambda history: before + self._fill(options.preference_prompt, history=history, wish=wish)
        )

    def _fill(self, template: str, **fields: str) -> str:
        # Not str.format: captions and templates may have braces of their own.
        fields = {"count": str(self.options.count), **fields}
        return re.sub(r"\{(\w+)\}", lambda found: fields.get(found[1], found[0]), template)

    def _fitting(self, record: Record, prompt: Callable[[str], str]) -> np.ndarray:
        """With as many of the newest items as fit. What comes after the last one is for the prompt to say, so its line
        break is left out."""
        history = record.history[-self.length :]  # each takes a token at least
        items = [self._fill(self.options.item, caption=self._cut(item.caption)) for item in history]

        def without(oldest: int) -> np.ndarray:
            return self._encode(prompt("".join(items[oldest:]).rstrip("\n")))

        found = without(0)
        if len(found) <= self.length:
            return found
        low, high = 1, len(items)  # so many are left out
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if len(without(middle)) <= self.length else (middle + 1, high)
        if low >= len(items):
            raise self._too_long("preference_prompt", len(found))
        return without(low)

    def _cut(self, text: str) -> str:
        """One line, and so much of it that it leaves room for others."""
        text, most = " ".join(text.split()), max(1, self.length // 4)
        if len(text.encode(errors="replace")) <= most:  # a token is a byte at least
            return text
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return text if len(ids) <= most else self.tokenizer.decode(ids[:most]).strip()

    def _too_long(self, prompt: str, count: int) -> UsageError:
        return UsageError(
            f"data.sequence_length: {self.length} tokens do not hold model.keywords.{prompt}, which has {count} with what is "
            "filled in; shorten it, or allow more where the language model can read more"
        )

    def _encode(self, text: str) -> np.ndarray:
        if self.is_chat:
            found = self.tokenizer(self._turn(text), add_special_tokens=False)["input_ids"]
        else:
            found = self.tokenizer(text)["input_ids"]
        ids = np.array(found, np.int64)
        if ids.max(initial=0) >= self.facts.vocab_size:
            raise UsageError(
                f"{KEY}: the tokenizer of {self.folder} has a token {ids.max()}, and the model knows "
                f"{self.facts.vocab_size}; they do not belong together"
            )
        return ids

    def _turn(self, text: str, answer: str | None = None) -> str:
        """A conversation as the tokenizer's template writes it; transformers runs templates in jinja's sandbox."""
        turns = [{"role": "user", "content": text}]
        if answer is not None:
            turns.append({"role": "assistant", "content": answer})
        try:
            # Models that think aloud first would spend all their tokens on it.
            return str(
                self.tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=answer is None, enable_thinking=False
                )
            )
        except Exception as error:  # whatever a template raises
            raise UsageError(f"{KEY}: the chat template of {self.folder} fails: {first_line(error)}") from error

    @cached_property
    def tokenizer(self) -> Any:
        check_tokenizer(self.folder)
        try:
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except ImportError as error:
            raise EnvironmentProblem(f"{KEY}: its tokenizer needs a package: {first_line(error)}") from error
        except Exception as error:  # libraries raise classes of their own where a file is damaged
            raise CheckpointError(
                f"{KEY}: the tokenizer of {self.folder} cannot be read ({first_line(error)}); download or export it again"
            ) from error

    @cached_property
    def is_chat(self) -> bool:
        """Whether it converses: it has a template, and ends its answers as the template ends a turn. (Base models often
        come with the template of their chat models.)"""
        if not getattr(self.tokenizer, "chat_template", None):
            return False
        mark = "keywords"
        tail = self._turn("a", mark).rpartition(mark)[2].strip()
        first = self.tokenizer(tail, add_special_tokens=False)["input_ids"][:1]
        return bool(first) and first[0] in self._ends

    @cached_property
    def _ends(self) -> set[int]:
        """Tokens that end an answer, as the folder's files say."""
        found = {self.tokenizer.eos_token_id}
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            said = read_json_object(path).get("eos_token_id") if path.is_file() else None
            found |= set(said) if isinstance(said, list) else {said}
        return found - {None}

    # What is answered

    def preferences(self, records: Sequence[Record], model: Any, device: Any, say: Say) -> list[tuple[str, ...]]:
        """The keywords of each record's history. `model` is a FrozenLanguage, or what loads one if it comes to that."""
        return self._answers("preference", [self.prompt_for_preference(one) for one in records], model, device, say)

    def targets(self, wishes: Sequence[str], model: Any, device: Any, say: Say) -> list[tuple[str, ...]]:
        return self._answers("target", [self.prompt_for_target(one) for one in wishes], model, device, say)

    @property
    def notes(self) -> list[str]:
        return [
            f"keywords: {count:,} of {self._asked[what]:,} answers on the {what} held none; "
            "their pictures go without (model.keywords says what is asked)"
            for what, count in self.without.items()
            if count
        ]

    def _answers(
        self, what: str, prompts: list[np.ndarray], model: Any, device: Any, say: Say
    ) -> list[tuple[str, ...]]:
        keys = [hashlib.sha256(ids.tobytes()).hexdigest() for ids in prompts]
        wanted = dict(zip(keys, prompts, strict=True))
        known = dict(self.remembered) if wanted.keys() <= self.remembered.keys() else self._known(device)
        if wanted.keys() - known.keys():
            with lock_answers(self._file(device)):
                known = self._known(device)  # another process may have answered them by now
                missing = {key: ids for key, ids in wanted.items() if key not in known}
                if missing:
                    known |= self._decode(missing, model if hasattr(model, "decode") else model(), device, say)
        found = [known[key] for key in keys]
        self.answered |= zip(keys, found, strict=True)
        self.without[what] = self.without.get(what, 0) + sum(not words for words in found)
        self._asked[what] = self._asked.get(what, 0) + len(found)
        return found

    def _decode(
        self, wanted: dict[str, np.ndarray], model: FrozenLanguageModel, device: Any, say: Say
    ) -> dict[str, tuple[str, ...]]:
        import torch

        model.to(device)
        keys = sorted(wanted, key=lambda key: len(wanted[key]))  # those of about one length need little padding
        found: dict[str, tuple[str, ...]] = {}
        say("keywords", 0, len(keys))
        while len(found) < len(keys):
            part = _batch(keys[len(found) :], wanted)
            ids = torch.zeros(len(part), len(wanted[part[-1]]), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, key in enumerate(part):
                ids[row, : len(wanted[key])] = torch.from_numpy(wanted[key])
                mask[row, : len(wanted[key])] = 1
            said = model.decode(
                ids.to(device),
                mask.to(device),
                max_tokens=self.options.max_tokens,
                allowed=self._allowed,
                ends=[*self._breaks, *self._ends],
            )
            new = {key: self._words(tokens) for key, tokens in zip(part, said, strict=True)}
            append_answers(self._file(device), new)
            found |= new
            say("keywords", len(found), len(keys))
        return found

    def _words(self, tokens: list[int]) -> tuple[str, ...]:
        if self._allowed is not None:
            return self._allowed.decode_words(tokens)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return parse_keywords(text, self.options.count, is_truncated=len(tokens) >= self.options.max_tokens)

    @cached_property
    def _allowed(self) -> AllowedWords | None:
        if self.options.allowed is None:
            return None
        encode = lambda text: self.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        return AllowedWords(self.options.allowed, encode, count=self.options.count)

    @cached_property
    def _breaks(self) -> list[int]:
        """Tokens with a line break in them. They end the list of a model that only continues text; one that converses may
        put a line before its list, and knows how to end it."""
        if self.is_chat and self.options.allowed is None:
            return []
        tokens = self.tokenizer.convert_ids_to_tokens(range(len(self.tokenizer)))
        return [
            number
            for number, token in enumerate(tokens)
            if token and ("Ċ" in token or "\n" in token or token == "<0x0A>")
        ]

    def _known(self, device: Any) -> dict[str, tuple[str, ...]]:
        return {**read_cached_answers(self._file(device)), **self.remembered}

    def _file(self, device: Any) -> Path:
        """Answers of one model, as it computes there, to one way of asking; prompts are hashed as tokens, so they need not
        be in the name."""
        decides = (*self._decides, self._precision, str(device).partition(":")[0])
        return self.cache / f"{hashlib.sha256(repr(decides).encode()).hexdigest()[:32]}.jsonl"

    @cached_property
    def _decides(self) -> tuple[Any, ...]:
        options = self.options.model_dump(mode="json", include={"count", "max_tokens", "allowed"})
        return FORMAT, hash_model_folder(self.folder), hash_prompt_files(self.folder), sorted(self._ends), options


def hash_prompt_files(folder: Path) -> str:
    """A hash of all that decides which tokens are said to the language model of a folder."""
    return hash_named_files(folder / name for name in PROMPT_FILES if (folder / name).is_file())


def _batch(keys: list[str], prompts: dict[str, np.ndarray]) -> list[str]:
    """The first so many that fit into a batch; they come in order of length."""
    count = 1
    while count < min(ROWS, len(keys)) and (count + 1) * len(prompts[keys[count]]) <= TOKENS:
        count += 1
    return keys[:count]
