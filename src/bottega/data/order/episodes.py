"""Episodes: of one task among many, a few samples to adapt to and a few others to measure it with.

S: samples to adapt to   Q: samples that measure it
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError, UsageError
from bottega.core.noise import numpy_generator
from bottega.data.order.interleaved import Interleaved
from bottega.data.sources.combine import Concat
from bottega.data.sources.per_sample import read_per_sample
from bottega.data.sources.source import Source
from bottega.data.sources.take import Take
from bottega.data.tables.classes import read_text_column
from bottega.data.tables.shards import Table

NO_TASK = -1
"""The task of a sample that no episode has."""
REGIONS = 64
"""Parts of a text that stand for tasks where nothing else does."""
BLOCK = 256
"""Samples looked at at once, where only they themselves say what they are."""


@dataclass(frozen=True)
class Episode:
    """Sample numbers, and of each the number of its task among those of the episode."""

    tasks: np.ndarray
    support: np.ndarray
    query: np.ndarray
    support_task: np.ndarray
    query_task: np.ndarray


@final
class Episodes(Source):
    """ "support" and "query", each the fields of the samples with an axis more: [n, S, ...] and [n, Q, ...].

    Which samples an episode has is f(seed, its number, epoch). With `ways`, so many tasks stand in one episode, `shots`
    and `queries` of each; else it is one task, and all of them have their turn equally often.
    """

    def __init__(
        self,
        source: Source,
        tasks: np.ndarray,
        *,
        shots: int,
        queries: int,
        length: int,
        seed: int,
        ways: int | None = None,
        renumbered: str | None = None,
        name: str = "data.train",
    ) -> None:
        """`tasks` [samples] says whose each is. The field `renumbered` becomes the place of its task in the episode.
        `name` is for messages."""
        assert len(tasks) == len(source), "one task for each sample"
        self.source, self.tasks, self.seed, self.length = source, np.asarray(tasks), seed, length
        self.shots, self.queries, self.ways, self.relabelled_field = shots, queries, ways, renumbered
        found = len(self.task_samples)
        if found < (ways or 1):
            raise DataError(
                f"{name}: {found} of {self.num_tasks} tasks have {shots + queries} samples or more, and an episode takes "
                f"{ways or 1} (techniques: maml: ways {ways or 'null'}, shots {shots}, queries {queries}); lower these or "
                "add data"
            )

    @property
    def num_tasks(self) -> int:
        """With those that have too few samples."""
        return len(np.unique(self.tasks[self.tasks != NO_TASK]))

    @cached_property
    def task_samples(self) -> list[np.ndarray]:
        """The samples of each task that has enough of them."""
        order = np.argsort(self.tasks, kind="stable")
        starts = np.flatnonzero(np.diff(self.tasks[order], prepend=NO_TASK - 1))
        parts = np.split(order, starts[1:])
        return [p for p in parts if self.tasks[p[0]] != NO_TASK and len(p) >= self.shots + self.queries]

    def __len__(self) -> int:
        return self.length

    def draw(self, index: int, epoch: int) -> Episode:
        rng = numpy_generator(self.seed, "episode", epoch, index)
        if self.ways is None:
            turn, place = divmod(index, len(self.task_samples))
            chosen = numpy_generator(self.seed, "tasks", epoch, turn).permutation(len(self.task_samples))[
                place : place + 1
            ]
        else:
            # In the order they are drawn in, which numbers them anew.
            chosen = rng.permutation(len(self.task_samples))[: self.ways]
        drawn = np.stack(
            [rng.choice(self.task_samples[one], self.shots + self.queries, replace=False) for one in chosen.tolist()]
        )
        places = np.arange(len(chosen))
        return Episode(
            tasks=np.array([self.tasks[self.task_samples[one][0]] for one in chosen.tolist()]),
            support=drawn[:, : self.shots].ravel(),
            query=drawn[:, self.shots :].ravel(),
            support_task=places.repeat(self.shots),
            query_task=places.repeat(self.queries),
        )

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        drawn = [self.draw(int(i), int(e)) for i, e in zip(index, epoch, strict=True)]
        support = len(drawn[0].support)
        size = support + len(drawn[0].query)
        wanted = np.concatenate([part for one in drawn for part in (one.support, one.query)])
        # All at once, so that the source fills all texts up to one length.
        rows = dict(self.source.rows(wanted, self._seen(index, epoch).repeat(size)))
        if self.relabelled_field is not None:
            places = np.concatenate([part for one in drawn for part in (one.support_task, one.query_task)])
            rows[self.relabelled_field] = places.astype(np.asarray(rows[self.relabelled_field]).dtype)
        found: dict[str, dict[str, Any]] = {"support": {}, "query": {}}
        for name, value in rows.items():
            if np.ndim(value) == 0:
                found["support"][name] = found["query"][name] = value
                continue
            whole = value.reshape(len(drawn), size, *value.shape[1:])
            found["support"][name], found["query"][name] = whole[:, :support], whole[:, support:]
        return found

    def _seen(self, index: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """Each episode is an epoch of the samples: those that come again are changed, or cut, in another way."""
        return epoch * self.length + index

    @property
    def fingerprint(self) -> str:
        drawn = (self.seed, self.length, self.shots, self.queries, self.ways, self.relabelled_field)
        tasks = hashlib.sha256(np.ascontiguousarray(self.tasks, np.int64).tobytes()).hexdigest()
        return hashlib.sha256(f"{self.source.fingerprint} {drawn} {tasks}".encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        one, seen = self.draw(index, epoch), int(self._seen(np.array(index), np.array(epoch)))
        named = ", ".join(map(str, one.tasks.tolist()))
        head = f"episode {index}, epoch {epoch}: task{'s' if len(one.tasks) > 1 else ''} {named}"
        if self.relabelled_field is not None:
            head += f", numbered anew from 0 to {len(one.tasks) - 1}"
        lines = [
            f"{name}: samples {', '.join(map(str, numbers.tolist()))}"
            for name, numbers in (("support", one.support), ("query", one.query))
        ]
        return "\n".join([head, *lines, f"the first: {self.source.describe(int(one.support[0]), seen)}"])


def group_by_label(source: Source) -> np.ndarray | None:
    """The class of each sample, or None where they have none."""
    found = read_per_sample(source, _labels)
    if found is None and len(source):
        zero = np.zeros(1, np.int64)
        if "label" not in source.rows(zero, zero):
            return None
        blocks = [np.arange(at, min(at + BLOCK, len(source))) for at in range(0, len(source), BLOCK)]
        found = np.concatenate([source.rows(index, np.zeros_like(index))["label"] for index in blocks])
    return None if found is None else _once(source, found)


def group_by_source(source: Source) -> np.ndarray | None:
    """Which of several sources each sample is of, or None where there is one, or it is not known."""
    if isinstance(source, Interleaved):
        return _once(source, source.source_ids)
    if isinstance(source, Take):
        inner = group_by_source(source.source)
        return None if inner is None else inner[: len(source)]
    if not isinstance(source, Concat) or len(source.sources) < 2:
        return None
    return _once(source, np.arange(len(source.sizes)).repeat(source.sizes))


def group_by_region(source: Source, *, size: int, parts: int = REGIONS) -> np.ndarray:
    """Parts of equal length, in the order of the samples; fewer where a part would be smaller than `size` samples."""
    number = max(1, min(parts, len(source) // size))
    return _once(source, np.arange(len(source)) * number // max(1, len(source)))


def group_by_field(source: Source, name: str) -> np.ndarray:
    """Samples of which a field says the same are of one task."""
    there: set[str] = set()

    def read(one: Source) -> np.ndarray | None:
        table = getattr(one, "table", None)
        if not isinstance(table, Table) or len(table) != len(one):
            return None
        there.update(column for column, form in table.columns.items() if form.holds == "text")
        return np.array(read_text_column(table, name)) if name in there else None

    found = read_per_sample(source, read)
    if found is None:
        names = ", ".join(sorted({"label", "source", "region", *there}))
        raise UsageError(f"techniques: maml.by: the samples have no field {name!r}; there is {names}")
    return _once(source, np.unique(found, return_inverse=True)[1].reshape(-1))


def _labels(source: Source) -> np.ndarray | None:
    found = getattr(source, "labels", None)
    if found is None:
        found = getattr(getattr(source, "conditions", None), "labels", None)
    return found if isinstance(found, np.ndarray) and found.ndim == 1 else None


def _once(source: Source, tasks: np.ndarray) -> np.ndarray:
    """Without the copies of a source that is repeated: what was adapted to must not come again as a question."""
    return np.where(_is_first(source), tasks, NO_TASK)


def _is_first(source: Source) -> np.ndarray:
    if isinstance(source, Take):
        return _is_first(source.source)[: len(source)]
    if isinstance(source, Concat):
        parts = [
            np.concatenate([_is_first(one), np.zeros(len(one) * (n - 1), np.bool_)])
            for one, n in zip(source.sources, source.repeats, strict=True)
        ]
        return np.concatenate(parts)
    return np.ones(len(source), np.bool_)
