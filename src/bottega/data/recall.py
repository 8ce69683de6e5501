"""Associative recall: made-up streams in which keys are given values and asked for them when the statement is out of sight.

The tokens are one that asks, then keys, values and fillers. A fact is a key and then its value; a question is the asking
token and then a key, and at the key the value is to be told. Answers are never shown, so a question helps no later one.

Everything is a function of (seed, number of the sample): whatever the batch, the order or the process.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.core.noise import Noise
from bottega.data.sources.source import Source

QUERY_TOKEN = 0
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Tokens:
    """Which token is what."""

    num_keys: int
    num_values: int
    num_fillers: int

    @property
    def vocab_size(self) -> int:
        return 1 + self.num_keys + self.num_values + self.num_fillers

    def key(self, number: np.ndarray) -> np.ndarray:
        return 1 + number

    def value(self, number: np.ndarray) -> np.ndarray:
        return 1 + self.num_keys + number

    def filler(self, number: np.ndarray) -> np.ndarray:
        return 1 + self.num_keys + self.num_values + number

    def format_token(self, token: int) -> str:
        """For people: k3, v1, or a dot for a filler."""
        if token == QUERY_TOKEN:
            return "?"
        for sign, first, count in (("k", 1, self.num_keys), ("v", 1 + self.num_keys, self.num_values)):
            if first <= token < first + count:
                return f"{sign}{token - first}"
        return "."


@final
@dataclass(frozen=True)
class Streams(Source):
    """Streams [segments, T]: the first segment states `num_pairs` facts, and each of the `distance` others asks for some.

    `tokens` [n, 1 + distance, T], and `answers` of the same form: the value's number where one is to be told, -100 elsewhere.
    """

    tokens: Tokens
    segment_length: int
    distance: int
    num_pairs: int
    num_questions: int
    seed: int
    first: int
    """The number of the first stream; streams of other numbers are held out."""
    count: int
    is_measured: bool = False
    """Whether the same is also to be told without memory."""

    def __len__(self) -> int:
        return self.count

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        draw, size = Noise(self.seed, 0, self.first + np.asarray(index, np.int64)), len(index)
        segments = 1 + self.distance
        tokens = self.tokens.filler(_whole(draw, "filler", (segments, self.segment_length), self.tokens.num_fillers))
        answers = np.full_like(tokens, IGNORE_INDEX)
        keys = _chosen(draw, "keys", self.tokens.num_keys, self.num_pairs)
        values = _whole(draw, "values", (self.num_pairs,), self.tokens.num_values)
        row = np.arange(size)[:, None]
        at = _places(draw, "stated", self.segment_length, self.num_pairs)
        tokens[row, 0, at] = self.tokens.key(keys)
        tokens[row, 0, at + 1] = self.tokens.value(values)
        for segment in range(1, segments):
            which = _whole(draw, f"asked {segment}", (self.num_questions,), self.num_pairs)
            at = _places(draw, f"questions {segment}", self.segment_length, self.num_questions)
            tokens[row, segment, at] = QUERY_TOKEN
            tokens[row, segment, at + 1] = self.tokens.key(np.take_along_axis(keys, which, 1))
            answers[row, segment, at + 1] = np.take_along_axis(values, which, 1)
        found: dict[str, Any] = {"tokens": tokens, "answers": answers}
        if self.is_measured:
            found["measured"] = np.ones(size, np.float32)
        return found

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        tokens = self.rows(np.array([index]), np.array([epoch]))["tokens"][0]
        lines = (" ".join(map(self.tokens.format_token, segment.tolist())) for segment in tokens)
        return "\n".join((f"stream {self.first + index}", *lines))


@final
@dataclass(frozen=True)
class Facts(Source):
    """Segments [T] in order, without an end: an epoch goes on where the one before it ended.

    Segment i states `num_pairs` of the keys whose values change, in turn, and one of those whose values last. It asks for
    what was stated `distance` to twice as many segments ago; before there was such a segment, for a key without a value,
    and no answer is right. Values that last are asked for in `Lasting` alone, so no
    weight can ever have learnt them.
    """

    tokens: Tokens
    """Its keys are those that change, and then those that last."""
    num_lasting: int
    segment_length: int
    distance: int
    num_pairs: int
    num_questions: int
    restated: int
    seed: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def num_changing(self) -> int:
        return self.tokens.num_keys - self.num_lasting

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        number = np.asarray(epoch, np.int64) * self.count + index
        draw, row = Noise(self.seed, 1, number), np.arange(len(index))[:, None]
        tokens = self.tokens.filler(_whole(draw, "filler", (self.segment_length,), self.tokens.num_fillers))
        answers = np.full_like(tokens, IGNORE_INDEX)
        keys, values = self._changing(number[:, None], np.arange(self.num_pairs))
        lasting = number[:, None] % self.num_lasting
        keys = np.concatenate((keys, self.num_changing + lasting), axis=1)
        values = np.concatenate((values, self.lasting_value(lasting)), axis=1)
        ago = self.distance + _whole(draw, "ago", (self.num_questions,), self.distance)
        then = number[:, None] - ago
        asked, told = self._changing(then, _whole(draw, "which", ago.shape[1:], self.num_pairs))
        pieces = _places(draw, "places", self.segment_length, keys.shape[1] + self.num_questions)
        at, ask = pieces[:, : keys.shape[1]], pieces[:, keys.shape[1] :]
        tokens[row, at], tokens[row, at + 1] = self.tokens.key(keys), self.tokens.value(values)
        tokens[row, ask], tokens[row, ask + 1] = QUERY_TOKEN, self.tokens.key(asked)
        answers[row, ask + 1] = np.where(then >= 0, told, IGNORE_INDEX)
        stated = np.stack((self.tokens.key(keys), self.tokens.value(values)), axis=-1)
        return {"tokens": tokens, "answers": answers, "stated": stated, "asked": self.tokens.key(asked)}

    def _changing(self, number: np.ndarray, pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The key that segment `number` states as its `pair`-th, and the value it has there."""
        turn, key = np.divmod(number * self.num_pairs + pair, self.num_changing)
        return key, self._value("changing", key + self.num_changing * (turn // self.restated))

    def lasting_value(self, key: np.ndarray) -> np.ndarray:
        return self._value("lasting", key)

    def _value(self, name: str, what: np.ndarray) -> np.ndarray:
        drawn = Noise(self.seed, 2, what.reshape(-1)).uniform(name)
        return (drawn * self.tokens.num_values).astype(np.int64).reshape(what.shape)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        tokens = self.rows(np.array([index]), np.array([epoch]))["tokens"][0]
        return f"segment {epoch * self.count + index}\n" + " ".join(map(self.tokens.format_token, tokens.tolist()))


@final
@dataclass(frozen=True)
class Lasting(Source):
    """Segments that only ask, for the values that last, each key as often as the others."""

    facts: Facts
    count: int

    def __len__(self) -> int:
        return self.count

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        facts = self.facts
        draw, row = Noise(facts.seed, 3, np.asarray(index, np.int64)), np.arange(len(index))[:, None]
        tokens = facts.tokens.filler(_whole(draw, "filler", (facts.segment_length,), facts.tokens.num_fillers))
        answers = np.full_like(tokens, IGNORE_INDEX)
        key = (np.asarray(index)[:, None] * facts.num_questions + np.arange(facts.num_questions)) % facts.num_lasting
        ask = _places(draw, "places", facts.segment_length, facts.num_questions)
        asked = facts.tokens.key(facts.num_changing + key)
        tokens[row, ask], tokens[row, ask + 1] = QUERY_TOKEN, asked
        answers[row, ask + 1] = facts.lasting_value(key)
        return {"tokens": tokens, "answers": answers, "measured": np.ones(len(index), np.float32)}

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        tokens = self.rows(np.array([index]), np.array([epoch]))["tokens"][0]
        return f"question {index}\n" + " ".join(map(self.facts.tokens.format_token, tokens.tolist()))


def _whole(draw: Noise, name: str, shape: tuple[int, ...], below: int) -> np.ndarray:
    """Whole numbers [n, *shape] from 0 on, all equally likely."""
    return (draw.uniform(name, shape) * below).astype(np.int64)


def _chosen(draw: Noise, name: str, among: int, count: int) -> np.ndarray:
    """[n, count] different numbers of `among`, in any order."""
    return np.argsort(draw.uniform(name, (among,)), axis=1, kind="stable")[:, :count]


def _places(draw: Noise, name: str, length: int, count: int) -> np.ndarray:
    """[n, count] places of pieces of two tokens that do not touch each other's, in any order."""
    free = length - 2 * count
    gaps = np.sort(_chosen(draw, name, free + count, count), axis=1) + np.arange(count)
    order = _chosen(draw, f"{name} in order", count, count)
    return np.take_along_axis(gaps, order, axis=1)
