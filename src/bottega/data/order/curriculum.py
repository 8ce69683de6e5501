"""Curriculum learning: difficulty scores of samples, their ranking, and the stages that go through it."""

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

# Number of rows read at once: 256 windows of 1,024 tokens are 1 MiB.
BLOCK_ROWS = 256
# Number of stages in which competence rises; it lags behind the formula by at most a fiftieth of the increase.
NUM_LEVELS = 50

ScoreFunction = Callable[[Source], np.ndarray]


def rank_samples(source: Source, by: str | np.ndarray | ScoreFunction) -> np.ndarray:
    """Return all sample indices, the easiest first; ties keep the order of the indices.

    `by` is length, rarity, the name of a score, the scores themselves (n,), or a function that computes them; low is easy.
    A source may have methods `lengths()` and `scores(name)`; otherwise a score is read from the fields of its rows.
    """
    if isinstance(by, str):
        scores = {"length": _read_lengths, "rarity": compute_rarity}.get(by, lambda source: _read_scores(source, by))(
            source
        )
    else:
        scores = np.asarray(by(source) if callable(by) else by)
    if scores.shape != (len(source),) or scores.dtype.kind not in "iufb":
        raise DataError(
            f"data.curriculum.by={_format_criterion(by)} gives {scores.dtype} of shape {list(scores.shape)}; "
            f"expected one number for each of the {len(source)} samples"
        )
    non_finite = np.flatnonzero(~np.isfinite(scores))
    if len(non_finite):
        raise DataError(
            f"data.curriculum.by={_format_criterion(by)} is {scores[non_finite[0]]} for sample {non_finite[0]}; scores "
            "must be finite numbers"
        )
    return np.argsort(scores, kind="stable")


def _format_criterion(by: Any) -> str:
    return by if isinstance(by, str) else getattr(by, "__name__", "scores")


def _read_lengths(source: Source) -> np.ndarray:
    lengths = read_sample_values(source, "lengths")
    if lengths is None:
        raise UsageError(
            "data.curriculum.by=length needs samples of different lengths, but all samples have the same length; use rarity, or "
            "data.padding=true for text, or the name of a field with a score"
        )
    return lengths


def _read_scores(source: Source, name: str) -> np.ndarray:
    scores = read_sample_values(source, "scores", name)
    if scores is not None:
        return scores
    return np.concatenate([np.atleast_1d(_get_field(rows, name)) for rows in _read_blocks(source)])


def _get_field(rows: dict[str, Any], name: str) -> np.ndarray:
    if name not in rows:
        raise UsageError(
            f"data.curriculum.by={name}: the samples have no such field; choose from length, rarity, {', '.join(rows)}"
        )
    return np.asarray(rows[name])


def read_sample_values(source: Source, name: str, *arguments: Any) -> np.ndarray | None:
    """Return the values of all samples from the method `name` of a source, or a score from its table; None if it has neither."""

    def read(inner: Source) -> np.ndarray | None:
        method, table = getattr(inner, name, None), getattr(inner, "table", None)
        if method is not None:
            return np.asarray(method(*arguments))
        if name == "scores" and isinstance(table, Table) and "score" in table.columns:
            return np.asarray(table.values("score"))
        return None

    return read_per_sample(source, read)


def compute_rarity(source: Source) -> np.ndarray:
    """Return the mean of -log(frequency) of each sample's tokens (n,), with frequencies counted in the source itself.

    Samples are read as in epoch 0. Masked tokens do not count.
    """
    counts = np.zeros(0, np.int64)
    for tokens, mask in _iterate_tokens(source):
        block_counts = np.bincount(tokens[mask])
        if len(block_counts) > len(counts):
            block_counts, counts = counts, block_counts
        counts[: len(block_counts)] += block_counts
    surprise = np.zeros(len(counts))
    occurs = counts > 0
    surprise[occurs] = np.log(counts.sum()) - np.log(counts[occurs])
    means = [
        (surprise[tokens] * mask).sum(axis=1) / np.maximum(1, mask.sum(axis=1))
        for tokens, mask in _iterate_tokens(source)
    ]
    return np.concatenate(means)


def _iterate_tokens(source: Source) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for rows in _read_blocks(source):
        name = "input_ids" if "input_ids" in rows else "tokens"
        if name not in rows:
            raise UsageError(
                f"data.curriculum.by=rarity needs tokens, but the samples have {', '.join(rows)}; use the name of a field "
                "with a score"
            )
        mask = rows.get("attention_mask")
        yield rows[name], np.ones(rows[name].shape, bool) if mask is None else np.asarray(mask, dtype=bool)


def _read_blocks(source: Source) -> Iterator[dict[str, Any]]:
    for start in range(0, len(source), BLOCK_ROWS):
        index = np.arange(start, min(start + BLOCK_ROWS, len(source)))
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
    """Return the stages of a recipe in steps and samples.

    `batch_size` is the global batch size; a stage's own batch size is multiplied by `batch_multiplier` (accumulated
    micro-batches times processes).
    """
    if curriculum.competence is not None:
        steps = curriculum.competence.steps.to_steps(total_steps, steps_per_epoch)
        return _plan_competence_stages(
            curriculum.competence, size=size, steps=steps, total_steps=total_steps, batch_size=batch_size
        )
    planned: list[CurriculumStage] = []
    problems: list[str] = []
    for i, (first_step, stage) in enumerate(
        zip(compute_first_steps(curriculum, total_steps, steps_per_epoch), curriculum.stages, strict=True)
    ):
        key = f"data.curriculum.stages[{i}]"
        planned_stage = CurriculumStage(
            first_step=first_step,
            batch_size=batch_size if stage.batch_size is None else stage.batch_size * batch_multiplier,
            num_samples=max(1, round(stage.share * size)),
            replay_fraction=stage.replay,
        )
        if first_step >= total_steps:
            problems.append(
                f"{key} would begin at step {first_step}, but the run has {total_steps} steps; shorten the stages before it"
            )
        if stage.steps.amount == 0:
            problems.append(f"{key}.steps is 0; give it a positive number of steps, or remove the stage")
        if planned_stage.num_samples < planned_stage.batch_size:
            problems.append(
                f"{key} has {planned_stage.num_samples} samples (share {stage.share:g} of {size}), fewer than one batch of "
                f"{planned_stage.batch_size}; raise its share or lower its batch_size"
            )
        if planned_stage.replay_fraction and (not planned or planned_stage.num_samples <= planned[-1].num_samples):
            reason = "adds no samples to the stage before it" if planned else "is the first"
            problems.append(f"{key}.replay={planned_stage.replay_fraction:g}: this stage {reason}; remove replay")
        planned.append(planned_stage)
    if problems:
        raise UsageError("; ".join(problems))
    return tuple(planned)


def compute_first_steps(curriculum: Curriculum, total_steps: int, steps_per_epoch: int) -> tuple[int, ...]:
    """Return the first step of each declared stage."""
    lengths = [stage.steps.to_steps(total_steps, steps_per_epoch) for stage in curriculum.stages]
    return tuple(accumulate(lengths[:-1], initial=0))


def compute_competence(step: int, competence: Competence, *, steps: int) -> float:
    """Return the fraction of samples, the easiest ones, that are used at a step (Platanios et al., 2019).

    It grows from `competence.initial` at step 0 to 1 at step `steps`.
    """
    initial_power = competence.initial**competence.power
    return min(1.0, (step * (1 - initial_power) / steps + initial_power) ** (1 / competence.power))


def _plan_competence_stages(
    competence: Competence, *, size: int, steps: int, total_steps: int, batch_size: int
) -> tuple[CurriculumStage, ...]:
    """Return short stages that approximate competence over `steps` steps; each begins once competence reaches its level."""
    key = "data.curriculum.competence"
    if steps == 0:
        raise UsageError(f"{key}.steps is 0, so that all samples are used from the start; remove the curriculum")
    if steps > total_steps:
        raise UsageError(
            f"{key}.steps is {steps}, but the run has {total_steps} steps, so the hardest samples would never be used; lower it"
        )
    initial_power = competence.initial**competence.power
    num_samples_at: dict[int, int] = {}
    for level in range(NUM_LEVELS + 1):
        fraction = competence.initial + (1 - competence.initial) * level / NUM_LEVELS
        first_step = math.ceil(steps * (fraction**competence.power - initial_power) / (1 - initial_power) - 1e-9)
        # If one step reaches several levels, the last of them overwrites the others.
        num_samples_at[min(max(first_step, 0), steps)] = max(1, math.floor(fraction * size + 1e-9))
    if num_samples_at[0] < batch_size:
        raise UsageError(
            f"{key}.initial={competence.initial:g} of {size} samples is {num_samples_at[0]}, fewer than one batch of "
            f"{batch_size}; raise it or lower training.batch_size"
        )
    return tuple(CurriculumStage(first_step, batch_size, count) for first_step, count in num_samples_at.items())
