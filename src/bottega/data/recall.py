"""Associative recall: synthetic streams of key-value facts, each queried after it has left the attention window.

The vocabulary is the query token, then keys, values and fillers. A fact is a key followed by its value. A query is the query
token followed by a key, and the target at the key is its value. Answers are never inputs, so that one query does not help the
next.

Every sample is a function of (seed, sample number), whatever the batch, the order or the process. Class and field names
below are part of the data's fingerprint.
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
    """The vocabulary: ids of the query token, keys, values and fillers."""

    num_keys: int
    num_values: int
    num_fillers: int

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return 1 + self.num_keys + self.num_values + self.num_fillers

    def key(self, number: np.ndarray) -> np.ndarray:
        """Return the token ids of keys."""
        return 1 + number

    def value(self, number: np.ndarray) -> np.ndarray:
        """Return the token ids of values."""
        return 1 + self.num_keys + number

    def filler(self, number: np.ndarray) -> np.ndarray:
        """Return the token ids of fillers."""
        return 1 + self.num_keys + self.num_values + number

    def format_token(self, token: int) -> str:
        """Return a readable form: ? for a query, k3, v1, or a dot for a filler."""
        if token == QUERY_TOKEN:
            return "?"
        for prefix, first, count in (("k", 1, self.num_keys), ("v", 1 + self.num_keys, self.num_values)):
            if first <= token < first + count:
                return f"{prefix}{token - first}"
        return "."


@final
@dataclass(frozen=True)
class Streams(Source):
    """Streams of segments: the first states `num_pairs` facts, and each of the `distance` others queries some of them.

    Samples have `tokens`, `(batch, 1 + distance, segment_length)`, and `answers` of the same shape: the index of the value
    at a queried key, -100 elsewhere.
    """

    tokens: Tokens
    segment_length: int
    distance: int
    num_pairs: int
    num_questions: int
    seed: int
    first: int
    """The number of the first stream; held-out data has other numbers."""
    count: int
    is_measured: bool = False
    """Whether the model is also evaluated without its memory."""

    def __len__(self) -> int:
        return self.count

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        noise, size = Noise(self.seed, 0, self.first + np.asarray(index, np.int64)), len(index)
        num_segments = 1 + self.distance
        tokens = self.tokens.filler(
            _draw_integers(noise, "filler", (num_segments, self.segment_length), self.tokens.num_fillers)
        )
        answers = np.full_like(tokens, IGNORE_INDEX)
        keys = _draw_distinct(noise, "keys", self.tokens.num_keys, self.num_pairs)
        values = _draw_integers(noise, "values", (self.num_pairs,), self.tokens.num_values)
        row = np.arange(size)[:, None]
        position = _draw_positions(noise, "stated", self.segment_length, self.num_pairs)
        tokens[row, 0, position] = self.tokens.key(keys)
        tokens[row, 0, position + 1] = self.tokens.value(values)
        for segment in range(1, num_segments):
            queried = _draw_integers(noise, f"asked {segment}", (self.num_questions,), self.num_pairs)
            position = _draw_positions(noise, f"questions {segment}", self.segment_length, self.num_questions)
            tokens[row, segment, position] = QUERY_TOKEN
            tokens[row, segment, position + 1] = self.tokens.key(np.take_along_axis(keys, queried, 1))
            answers[row, segment, position + 1] = np.take_along_axis(values, queried, 1)
        rows: dict[str, Any] = {"tokens": tokens, "answers": answers}
        if self.is_measured:
            rows["measured"] = np.ones(size, np.float32)
        return rows

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
    """An endless stream of segments `(segment_length,)` in order: an epoch continues where the previous one ended.

    Segment i states `num_pairs` keys with changing values, in turn, and one key with a lasting value. It queries facts stated
    `distance` to 2 * `distance` segments ago; as long as no segment is that old, the target of a query is -100. Lasting values
    are queried in `Lasting` only, so that they cannot be learned by the weights.
    """

    tokens: Tokens
    """Keys with changing values come first, then keys with lasting values."""
    num_lasting: int
    segment_length: int
    distance: int
    num_pairs: int
    num_questions: int
    restated: int
    """Number of times that a changing value is stated before the key gets another one."""
    seed: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def num_changing(self) -> int:
        """The number of keys with changing values."""
        return self.tokens.num_keys - self.num_lasting

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        number = np.asarray(epoch, np.int64) * self.count + index
        noise, row = Noise(self.seed, 1, number), np.arange(len(index))[:, None]
        tokens = self.tokens.filler(_draw_integers(noise, "filler", (self.segment_length,), self.tokens.num_fillers))
        answers = np.full_like(tokens, IGNORE_INDEX)
        keys, values = self._compute_changing_fact(number[:, None], np.arange(self.num_pairs))
        lasting = number[:, None] % self.num_lasting
        keys = np.concatenate((keys, self.num_changing + lasting), axis=1)
        values = np.concatenate((values, self.lasting_value(lasting)), axis=1)
        age = self.distance + _draw_integers(noise, "ago", (self.num_questions,), self.distance)
        queried_segment = number[:, None] - age
        queried_keys, queried_values = self._compute_changing_fact(
            queried_segment, _draw_integers(noise, "which", age.shape[1:], self.num_pairs)
        )
        positions = _draw_positions(noise, "places", self.segment_length, keys.shape[1] + self.num_questions)
        stated_at, queried_at = positions[:, : keys.shape[1]], positions[:, keys.shape[1] :]
        tokens[row, stated_at], tokens[row, stated_at + 1] = self.tokens.key(keys), self.tokens.value(values)
        tokens[row, queried_at], tokens[row, queried_at + 1] = QUERY_TOKEN, self.tokens.key(queried_keys)
        answers[row, queried_at + 1] = np.where(queried_segment >= 0, queried_values, IGNORE_INDEX)
        stated = np.stack((self.tokens.key(keys), self.tokens.value(values)), axis=-1)
        return {"tokens": tokens, "answers": answers, "stated": stated, "queried": self.tokens.key(queried_keys)}

    def _compute_changing_fact(self, number: np.ndarray, pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the index of the `pair`-th key that segment `number` states, and the index of its value there."""
        turn, key = np.divmod(number * self.num_pairs + pair, self.num_changing)
        return key, self._draw_value("changing", key + self.num_changing * (turn // self.restated))

    def lasting_value(self, key: np.ndarray) -> np.ndarray:
        """Return the lasting values of keys."""
        return self._draw_value("lasting", key)

    def _draw_value(self, name: str, facts: np.ndarray) -> np.ndarray:
        drawn = Noise(self.seed, 2, facts.reshape(-1)).uniform(name)
        return (drawn * self.tokens.num_values).astype(np.int64).reshape(facts.shape)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        tokens = self.rows(np.array([index]), np.array([epoch]))["tokens"][0]
        return f"segment {epoch * self.count + index}\n" + " ".join(map(self.tokens.format_token, tokens.tolist()))


@final
@dataclass(frozen=True)
class Lasting(Source):
    """Segments that only query the lasting values, all keys equally often."""

    facts: Facts
    count: int

    def __len__(self) -> int:
        return self.count

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        facts = self.facts
        noise, row = Noise(facts.seed, 3, np.asarray(index, np.int64)), np.arange(len(index))[:, None]
        tokens = facts.tokens.filler(_draw_integers(noise, "filler", (facts.segment_length,), facts.tokens.num_fillers))
        answers = np.full_like(tokens, IGNORE_INDEX)
        key = (np.asarray(index)[:, None] * facts.num_questions + np.arange(facts.num_questions)) % facts.num_lasting
        queried_at = _draw_positions(noise, "places", facts.segment_length, facts.num_questions)
        queried_keys = facts.tokens.key(facts.num_changing + key)
        tokens[row, queried_at], tokens[row, queried_at + 1] = QUERY_TOKEN, queried_keys
        answers[row, queried_at + 1] = facts.lasting_value(key)
        return {"tokens": tokens, "answers": answers, "measured": np.ones(len(index), np.float32)}

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        tokens = self.rows(np.array([index]), np.array([epoch]))["tokens"][0]
        return f"question {index}\n" + " ".join(map(self.facts.tokens.format_token, tokens.tolist()))


def _draw_integers(noise: Noise, name: str, shape: tuple[int, ...], limit: int) -> np.ndarray:
    """Draw integers `(samples, *shape)` uniformly from 0 to `limit` - 1."""
    return (noise.uniform(name, shape) * limit).astype(np.int64)


def _draw_distinct(noise: Noise, name: str, limit: int, count: int) -> np.ndarray:
    """Draw `(samples, count)` distinct integers below `limit`, in random order."""
    return np.argsort(noise.uniform(name, (limit,)), axis=1, kind="stable")[:, :count]


def _draw_positions(noise: Noise, name: str, length: int, count: int) -> np.ndarray:
    """Draw `(samples, count)` start positions of token pairs that do not overlap, in random order."""
    num_free = length - 2 * count
    starts = np.sort(_draw_distinct(noise, name, num_free + count, count), axis=1) + np.arange(count)
    order = _draw_distinct(noise, f"{name} in order", count, count)
    return np.take_along_axis(starts, order, axis=1)
