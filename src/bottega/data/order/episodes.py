"""Episodes for meta-learning: support samples of a task to adapt to, and query samples to evaluate on.

S: support samples per episode   Q: query samples per episode
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
"""Task of samples that no episode uses."""
NUM_REGIONS = 64
"""Maximum number of regions of a text that serve as tasks if the data has neither labels nor several sources."""
BLOCK_SAMPLES = 256
"""Number of samples read at once to collect their labels."""


@dataclass(frozen=True)
class Episode:
    """Sample indices of one episode, and the position of each sample's task in `tasks`."""

    tasks: np.ndarray
    support: np.ndarray
    query: np.ndarray
    support_task: np.ndarray
    query_task: np.ndarray


@final
class Episodes(Source):
    """A source of episodes: "support" (n, S, ...) and "query" (n, Q, ...), each with the fields of the samples.

    An episode is a function of seed, index and epoch. With `ways`, it has that many tasks, with `shots` and `queries`
    samples each; otherwise it has one task, and all tasks occur equally often.
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
        relabelled_field: str | None = None,
        name: str = "data.train",
    ) -> None:
        """`tasks` (samples,) is the task of each sample. The field `relabelled_field` becomes the position of the task in
        the episode. `name` is the key of the data for messages."""
        assert len(tasks) == len(source), f"{len(tasks)} tasks for {len(source)} samples"
        self.source, self.tasks, self.seed, self.length = source, np.asarray(tasks), seed, length
        self.shots, self.queries, self.ways, self.relabelled_field = shots, queries, ways, relabelled_field
        num_usable = len(self.task_samples)
        if num_usable < (ways or 1):
            raise DataError(
                f"{name}: {num_usable} of {self.num_tasks} tasks have {shots + queries} samples or more, but an episode needs "
                f"{ways or 1} (techniques: maml: ways {ways or 'null'}, shots {shots}, queries {queries}); lower these or "
                "add data"
            )

    @property
    def num_tasks(self) -> int:
        """Number of tasks, including those with too few samples."""
        return len(np.unique(self.tasks[self.tasks != NO_TASK]))

    @cached_property
    def task_samples(self) -> list[np.ndarray]:
        """The sample indices of each task that has enough of them."""
        order = np.argsort(self.tasks, kind="stable")
        starts = np.flatnonzero(np.diff(self.tasks[order], prepend=NO_TASK - 1))
        groups = np.split(order, starts[1:])
        return [
            samples
            for samples in groups
            if self.tasks[samples[0]] != NO_TASK and len(samples) >= self.shots + self.queries
        ]

    def __len__(self) -> int:
        return self.length

    def draw(self, index: int, epoch: int) -> Episode:
        """Return the episode with this index in this epoch."""
        rng = numpy_generator(self.seed, "episode", epoch, index)
        if self.ways is None:
            cycle, position = divmod(index, len(self.task_samples))
            chosen_tasks = numpy_generator(self.seed, "tasks", epoch, cycle).permutation(len(self.task_samples))[
                position : position + 1
            ]
        else:
            # The order of drawing gives the new labels.
            chosen_tasks = rng.permutation(len(self.task_samples))[: self.ways]
        samples = np.stack(
            [
                rng.choice(self.task_samples[task], self.shots + self.queries, replace=False)
                for task in chosen_tasks.tolist()
            ]
        )
        positions = np.arange(len(chosen_tasks))
        return Episode(
            tasks=np.array([self.tasks[self.task_samples[task][0]] for task in chosen_tasks.tolist()]),
            support=samples[:, : self.shots].ravel(),
            query=samples[:, self.shots :].ravel(),
            support_task=positions.repeat(self.shots),
            query_task=positions.repeat(self.queries),
        )

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        episodes = [self.draw(int(i), int(e)) for i, e in zip(index, epoch, strict=True)]
        num_support = len(episodes[0].support)
        samples_per_episode = num_support + len(episodes[0].query)
        indices = np.concatenate([part for episode in episodes for part in (episode.support, episode.query)])
        # All episodes are read at once, so that the source pads all texts to one length.
        rows = dict(self.source.rows(indices, self._compute_sample_epochs(index, epoch).repeat(samples_per_episode)))
        if self.relabelled_field is not None:
            positions = np.concatenate(
                [part for episode in episodes for part in (episode.support_task, episode.query_task)]
            )
            rows[self.relabelled_field] = positions.astype(np.asarray(rows[self.relabelled_field]).dtype)
        result: dict[str, dict[str, Any]] = {"support": {}, "query": {}}
        for name, value in rows.items():
            if np.ndim(value) == 0:
                result["support"][name] = result["query"][name] = value
                continue
            by_episode = value.reshape(len(episodes), samples_per_episode, *value.shape[1:])
            result["support"][name], result["query"][name] = by_episode[:, :num_support], by_episode[:, num_support:]
        return result

    def _compute_sample_epochs(self, index: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        """Return the epoch of the samples of each episode: each episode has its own, so that augmentation differs."""
        return epoch * self.length + index

    @property
    def fingerprint(self) -> str:
        settings = (self.seed, self.length, self.shots, self.queries, self.ways, self.relabelled_field)
        tasks = hashlib.sha256(np.ascontiguousarray(self.tasks, np.int64).tobytes()).hexdigest()
        return hashlib.sha256(f"{self.source.fingerprint} {settings} {tasks}".encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        episode, sample_epoch = (
            self.draw(index, epoch),
            int(self._compute_sample_epochs(np.array(index), np.array(epoch))),
        )
        tasks = ", ".join(map(str, episode.tasks.tolist()))
        head = f"episode {index}, epoch {epoch}: task{'s' if len(episode.tasks) > 1 else ''} {tasks}"
        if self.relabelled_field is not None:
            head += f", relabelled 0 to {len(episode.tasks) - 1}"
        lines = [
            f"{name}: samples {', '.join(map(str, numbers.tolist()))}"
            for name, numbers in (("support", episode.support), ("query", episode.query))
        ]
        return "\n".join(
            [head, *lines, f"first support sample: {self.source.describe(int(episode.support[0]), sample_epoch)}"]
        )


def group_by_label(source: Source) -> np.ndarray | None:
    """Return the class of each sample (n,), or None if the samples have no labels."""
    labels = read_per_sample(source, _find_labels)
    if labels is None and len(source):
        zero = np.zeros(1, np.int64)
        if "label" not in source.rows(zero, zero):
            return None
        blocks = [
            np.arange(start, min(start + BLOCK_SAMPLES, len(source))) for start in range(0, len(source), BLOCK_SAMPLES)
        ]
        labels = np.concatenate([source.rows(index, np.zeros_like(index))["label"] for index in blocks])
    return None if labels is None else _drop_repeats(source, labels)


def group_by_source(source: Source) -> np.ndarray | None:
    """Return the source of each sample (n,), or None if there is only one source or the sources are unknown."""
    if isinstance(source, Interleaved):
        return _drop_repeats(source, source.source_ids)
    if isinstance(source, Take):
        inner = group_by_source(source.source)
        return None if inner is None else inner[: len(source)]
    if not isinstance(source, Concat) or len(source.sources) < 2:
        return None
    return _drop_repeats(source, np.arange(len(source.sizes)).repeat(source.sizes))


def group_by_region(source: Source, *, size: int, max_regions: int = NUM_REGIONS) -> np.ndarray:
    """Return the region of each sample (n,): consecutive parts of equal length, each of at least `size` samples."""
    num_regions = max(1, min(max_regions, len(source) // size))
    return _drop_repeats(source, np.arange(len(source)) * num_regions // max(1, len(source)))


def group_by_field(source: Source, name: str) -> np.ndarray:
    """Return the task of each sample (n,): samples with the same value of the text field `name` are one task."""
    text_fields: set[str] = set()

    def read(inner: Source) -> np.ndarray | None:
        table = getattr(inner, "table", None)
        if not isinstance(table, Table) or len(table) != len(inner):
            return None
        text_fields.update(field for field, column in table.columns.items() if column.holds == "text")
        return np.array(read_text_column(table, name)) if name in text_fields else None

    values = read_per_sample(source, read)
    if values is None:
        names = ", ".join(sorted({"label", "source", "region", *text_fields}))
        raise UsageError(f"techniques: maml.by: the samples have no field {name!r}; choose from {names}")
    return _drop_repeats(source, np.unique(values, return_inverse=True)[1].reshape(-1))


def _find_labels(source: Source) -> np.ndarray | None:
    labels = getattr(source, "labels", None)
    if labels is None:
        labels = getattr(getattr(source, "conditions", None), "labels", None)
    return labels if isinstance(labels, np.ndarray) and labels.ndim == 1 else None


def _drop_repeats(source: Source, tasks: np.ndarray) -> np.ndarray:
    """Assign NO_TASK to the copies of repeated sources: a support sample must not be a query sample too."""
    return np.where(_find_first_copies(source), tasks, NO_TASK)


def _find_first_copies(source: Source) -> np.ndarray:
    """Return which samples (n,) are not copies that a repeated source adds."""
    if isinstance(source, Take):
        return _find_first_copies(source.source)[: len(source)]
    if isinstance(source, Concat):
        parts = [
            np.concatenate([_find_first_copies(inner), np.zeros(len(inner) * (repeat - 1), np.bool_)])
            for inner, repeat in zip(source.sources, source.repeats, strict=True)
        ]
        return np.concatenate(parts)
    return np.ones(len(source), np.bool_)
