"""From easy to hard: how hard each sample is, the ranking that follows, and the stages that go through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np

from bottega.config.data import Competence, Curriculum
from bottega.core.errors import DataError, UsageError
from bottega.data.order.orders import CurriculumStage
from bottega.data.sources.per_sample import read_per_sample
from bottega.data.sources.source import Source
from bottega.data.tables.shards import Table

# Rows looked at at once: 256 windows of 1,024 tokens are 1 MiB.
BLOCK = 256
# Steps in which competence rises; between two of them it lags by at most a fiftieth of what there is to add.
LEVELS = 50

ScoreFunction = Callable[[Source], np.ndarray]


def rank_samples(source: Source, by: str | np.ndarray | ScoreFunction) -> np.ndarray:
    """All sample numbers, the easiest first; equal ones in the order of their numbers.

    `by` is length, rarity, the name of a score, the scores themselves [n], or what computes them; small is easy. A source
    may offer `lengths()` and `scores(name)`; a score is otherwise looked for among the fields of its rows.
    """
    if isinstance(by, str):
        scores = {"length": _lengths, "rarity": compute_rarity}.get(by, lambda source: _field(source, by))(source)
    else:
        scores = np.asarray(by(source) if callable(by) else by)
    if scores.shape != (len(source),) or scores.dtype.kind not in "iufb":
        raise DataError(
            f"data.curriculum.by={_name(by)} gives {scores.dtype} {list(scores.shape)}, not one number for each of the "
            f"{len(source)} samples"
        )
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise DataError(f"data.curriculum.by={_name(by)} is {scores[wrong[0]]} for sample {wrong[0]}; give it a number")
    return np.argsort(scores, kind="stable")


def _name(by: Any) -> str:
    return by if isinstance(by, str) else getattr(by, "__name__", "scores")


def _lengths(source: Source) -> np.ndarray:
    lengths = read_sample_values(source, "lengths")
    if lengths is None:
        raise UsageError(
            "data.curriculum.by=length: these samples are all of one length; use rarity or data.padding=true for text, or "
            "the name of a field with a score"
        )
    return lengths


def _field(source: Source, name: str) -> np.ndarray:
    scores = read_sample_values(source, "scores", name)
    if scores is not None:
        return scores
    return np.concatenate([np.atleast_1d(_value(rows, name)) for rows in _blocks(source)])


def _value(rows: dict[str, Any], name: str) -> np.ndarray:
    if name not in rows:
        raise UsageError(
            f"data.curriculum.by={name}: the samples have no such field; there is length, rarity, {', '.join(rows)}"
        )
    return np.asarray(rows[name])


def read_sample_values(source: Source, name: str, *arguments: Any) -> np.ndarray | None:
    """What a source says of all its samples at once by a method of this name; None where it says nothing."""

    def read(one: Source) -> np.ndarray | None:
        method, table = getattr(one, name, None), getattr(one, "table", None)
        if method is not None:
            return np.asarray(method(*arguments))
        if name == "scores" and isinstance(table, Table) and "score" in table.columns:
            return np.asarray(table.values("score"))
        return None

    return read_per_sample(source, read)


def compute_rarity(source: Source) -> np.ndarray:
    """The mean of -log(frequency) of a sample's tokens, the frequency being that in the source itself.

    Samples are taken as they are in epoch 0. What attention_mask leaves out does not count.
    """
    counts = np.zeros(0, np.int64)
    for tokens, mask in _tokens(source):
        seen = np.bincount(tokens[mask])
        if len(seen) > len(counts):
            seen, counts = counts, seen
        counts[: len(seen)] += seen
    surprise = np.zeros(len(counts))
    known = counts > 0
    surprise[known] = np.log(counts.sum()) - np.log(counts[known])
    means = [
        (surprise[tokens] * mask).sum(axis=1) / np.maximum(1, mask.sum(axis=1)) for tokens, mask in _tokens(source)
    ]
    return np.concatenate(means)


def _tokens(source: Source) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for rows in _blocks(source):
        name = "input_ids" if "input_ids" in rows else "tokens"
        if name not in rows:
            raise UsageError(
                f"data.curriculum.by=rarity needs tokens, and the samples have {', '.join(rows)}; use the name of a field "
                "with a score"
            )
        mask = rows.get("attention_mask")
        yield rows[name], np.ones(rows[name].shape, bool) if mask is None else np.asarray(mask, dtype=bool)


def _blocks(source: Source) -> Iterator[dict[str, Any]]:
    for first in range(0, len(source), BLOCK):
        index = np.arange(first, min(first + BLOCK, len(source)))
        yield source.rows(index, np.zeros_like(index))


def plan_stages(
    curriculum: Curriculum,
    *,
    size: int,
    total_steps: int,
    steps_per_epoch: int,
    batch_size: int,
    batch_multiplier: int = 1,
) -> tuple[CurriculumStage, ...]:
    """The stages in steps and samples. A stage's own batch size counts `times` (accumulated steps times processes)."""
    if curriculum.competence is not None:
        steps = curriculum.competence.steps.to_steps(total_steps, steps_per_epoch)
        return _levels(curriculum.competence, size=size, steps=steps, total=total_steps, batch_size=batch_size)
    found: list[CurriculumStage] = []
    problems: list[str] = []
    for i, (first, stage) in enumerate(
        zip(stage_first_steps(curriculum, total_steps, steps_per_epoch), curriculum.stages, strict=True)
    ):
        name = f"data.curriculum.stages[{i}]"
        one = CurriculumStage(
            first_step=first,
            batch_size=batch_size if stage.batch_size is None else stage.batch_size * batch_multiplier,
            num_samples=max(1, round(stage.share * size)),
            replay_fraction=stage.replay,
        )
        if first >= total_steps:
            problems.append(
                f"{name} would begin at step {first}, and the run has {total_steps}; shorten those before it"
            )
        if stage.steps.amount == 0:
            problems.append(f"{name}.steps is 0; leave the stage out or give it steps")
        if one.num_samples < one.batch_size:
            problems.append(
                f"{name} has {one.num_samples} samples (share {stage.share:g} of {size}), fewer than one batch of "
                f"{one.batch_size}; raise its share or lower its batch_size"
            )
        if one.replay_fraction and (not found or one.num_samples <= found[-1].num_samples):
            reason = "adds no samples to the stage before it" if found else "has no stage before it"
            problems.append(f"{name}.replay={one.replay_fraction:g}: the stage {reason}; leave replay out")
        found.append(one)
    if problems:
        raise UsageError("; ".join(problems))
    return tuple(found)


def stage_first_steps(curriculum: Curriculum, total_steps: int, steps_per_epoch: int) -> tuple[int, ...]:
    """The step at which each of the declared stages begins."""
    lengths = [stage.steps.to_steps(total_steps, steps_per_epoch) for stage in curriculum.stages]
    return tuple(accumulate(lengths[:-1], initial=0))


def competence_at(step: int, competence: Competence, *, steps: int) -> float:
    """The share of the samples, the easiest ones, that a learner is up to at a step (Platanios et al., 2019)."""
    start = competence.initial**competence.power
    return min(1.0, (step * (1 - start) / steps + start) ** (1 / competence.power))


def _levels(
    competence: Competence, *, size: int, steps: int, total: int, batch_size: int
) -> tuple[CurriculumStage, ...]:
    """Competence as short stages: each begins where it has reached the next level, and so never sees more than it may."""
    name = "data.curriculum.competence"
    if steps == 0:
        raise UsageError(f"{name}.steps is 0, and all samples are there from the start; leave the curriculum out")
    if steps > total:
        raise UsageError(
            f"{name}.steps is {steps}, and the run has {total}, so the hardest samples would never be seen; lower it"
        )
    start = competence.initial**competence.power
    counts: dict[int, int] = {}
    for level in range(LEVELS + 1):
        share = competence.initial + (1 - competence.initial) * level / LEVELS
        first = math.ceil(steps * (share**competence.power - start) / (1 - start) - 1e-9)
        # Of the levels that one step reaches, the last counts.
        counts[min(max(first, 0), steps)] = max(1, math.floor(share * size + 1e-9))
    if counts[0] < batch_size:
        raise UsageError(
            f"{name}.initial={competence.initial:g} of {size} samples is {counts[0]}, fewer than one batch of "
            f"{batch_size}; raise it or lower training.batch_size"
        )
    return tuple(CurriculumStage(first, batch_size, count) for first, count in counts.items())
