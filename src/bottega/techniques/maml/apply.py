"""Meta-learning: the samples as episodes of many tasks, and a task that adapts to each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from bottega.config.parameter_groups import resolve_parameter_settings
from bottega.config.recipe import Recipe
from bottega.config.training import Training
from bottega.core.errors import DataError, UsageError
from bottega.data.order import episodes
from bottega.data.order.episodes import Episodes
from bottega.data.sources.source import Source
from bottega.tasks.workload import Workload
from bottega.techniques.maml.config import MamlOptions
from bottega.techniques.maml.torch import Maml
from bottega.techniques.training_plan import TrainingPlan

LEAST = 1000
"""Episodes of an epoch, where the samples are fewer: they are drawn anew each time, so it is only a name for so many."""
MEASURED = 64
"""Episodes of an evaluation."""
DERIVED = (
    "perplexity",
    "macro_f1",
    "weighted_f1",
    "ece",
    "auroc",
    "load_entropy",
    "rule_information",
    "dead",
    "saturated",
)
"""Measures that are no means over examples, so that there is none before the steps or after each."""
OTHERS = ("ewc", "replay")
"""Techniques that have an order of their own."""


def apply(plan: TrainingPlan, options: Any, recipe: Recipe, workload: Workload) -> TrainingPlan:
    assert isinstance(options, MamlOptions)
    _check(plan, options, recipe)
    division = _division(plan, options, recipe)
    training = division.build_episodes(plan.training, name="data.train", seed=recipe.seed, is_training=True)
    held_out = plan.validation
    # The same episodes whatever the seed: runs that differ in it alone are measured on the same questions.
    validation = (
        division.build_episodes(held_out, name="data.validation", seed=0, is_training=False) if held_out else None
    )
    return replace(
        plan,
        task=Maml(
            inner=plan.task,
            method=options.method,
            inner_steps=options.inner_steps,
            inner_rate=options.inner_rate,
            adapts=_never_frozen(recipe.training),
        ),
        training=training,
        order=None,
        validation=validation,
        metrics=_metrics(plan.metrics, options.inner_steps),
        notes=(*plan.notes, *_notes(training, validation, division)),
    )


def _never_frozen(training: Training) -> Callable[[tuple[str, ...]], frozenset[str]]:
    """Which parameters learn at some time of the run, whatever has been thawed so far."""

    @cache
    def found(names: tuple[str, ...]) -> frozenset[str]:
        settings = resolve_parameter_settings(training, names)
        return frozenset(name for name, one in settings.items() if one.scale is not None)

    return found


@dataclass(frozen=True)
class EpisodeDivision:
    """How samples become tasks, and tasks episodes."""

    by: str
    tasks: Callable[[Source], np.ndarray]
    options: MamlOptions
    is_classify: bool

    def build_episodes(self, source: Source, *, name: str, seed: int, is_training: bool) -> Episodes:
        options, numbered = self.options, self.is_classify and self.by == "label"
        tasks = self.tasks(source)
        size = options.shots + options.queries
        ways = None
        if numbered:
            enough = int((np.bincount(tasks[tasks != episodes.NO_TASK]) >= size).sum())
            ways = options.ways or max(2, enough)
            if enough < ways:
                raise DataError(
                    f"{name}: an episode takes {ways} classes with {size} samples of each ({options.shots} shots and "
                    f"{options.queries} queries), and there are {enough} such classes of {len(np.unique(tasks[tasks >= 0]))}; "
                    "lower ways, shots or queries of techniques.maml, or add data"
                )
        # Plain training is told the classes as they are; with numbers that change it could learn nothing at all.
        keeps = not numbered or (is_training and options.method == "none")
        return Episodes(
            source,
            tasks,
            shots=options.shots,
            queries=options.queries,
            length=max(LEAST, len(source) // (size * (ways or 1))) if is_training else MEASURED,
            seed=seed,
            ways=ways,
            renumbered=None if keeps else "label",
            name=name,
        )


def _division(plan: TrainingPlan, options: MamlOptions, recipe: Recipe) -> EpisodeDivision:
    """By what is asked for, or by the first of label, source and region that there is."""
    source, is_text, size = plan.training, recipe.task == "language", options.shots + options.queries
    labels, sources = episodes.group_by_label(source), episodes.group_by_source(source)
    by = options.by or ("label" if labels is not None else "source" if sources is not None else "region")
    if by == "label" and labels is None:
        several = getattr(recipe.data, "multi_label", False)
        raise _wrong(
            "by", "label", "a text has several" if several else "the samples have none", "name source or region"
        )
    if by == "source" and sources is None:
        raise _wrong("by", "source", "there is one", "give several as data.sources, or name label or region")
    if by == "region" and options.by is None and not is_text:
        raise _wrong("by", "null", "the samples have no label and come from one source", "give data.sources or labels")
    is_classify = recipe.task == "classify"
    if options.ways is not None and not (is_classify and by == "label"):
        raise _wrong("ways", options.ways, "an episode has several classes in task classify, by label", "leave it out")
    if options.ways == 1:
        raise _wrong("ways", 1, "of a single class there is nothing to tell", "give 2 or more, or leave it out")
    loss = getattr(recipe, "loss", None)
    if is_classify and by == "label" and loss is not None and loss.class_weights is not None:
        raise UsageError(
            "loss.class_weights: classes have other numbers in each episode of maml, and all are drawn alike; leave it out"
        )

    def tasks(one: Source) -> np.ndarray:
        if by == "label":
            found = episodes.group_by_label(one)
        elif by == "source":
            # What is held out is one table, with the sources one after the other.
            found = episodes.group_by_source(one)
        else:
            found = None if by == "region" else episodes.group_by_field(one, by)
        return episodes.group_by_region(one, size=size) if found is None else found

    return EpisodeDivision(by, tasks, options, is_classify)


def _check(plan: TrainingPlan, options: MamlOptions, recipe: Recipe) -> None:
    """What an episode cannot be made of, or adapted with."""
    names = [technique.name for technique in recipe.techniques]
    other = next((name for name in names if name in OTHERS), None)
    if other is not None:
        raise UsageError(f"techniques: {other} goes through its sources in order, and maml draws episodes; keep one")
    if names[-1] != "maml":
        raise UsageError(f"techniques: maml adapts what the others have made; list it after {names[-1]}")
    if recipe.data.curriculum is not None or plan.order is not None:
        key = "curriculum" if recipe.data.curriculum is not None else "replay" if recipe.data.replay else "mixture"
        raise UsageError(f"data.{key}: maml draws its tasks evenly, in an order of its own; leave it out")
    if recipe.training.gradient_checkpointing:
        raise UsageError(
            "training.gradient_checkpointing: maml would compute blocks again with other weights; leave it out"
        )
    if recipe.training.mixed_precision == "fp16":
        raise UsageError("training.mixed_precision: the inner steps of maml have no loss scale; use bf16 or fp32")
    if plan.task.gradient_surgery:
        raise UsageError(
            "techniques: maml differentiates the sum of the terms; weigh them in another way than by pcgrad"
        )
    if options.method == "maml" and getattr(recipe.data, "separate_documents", False):
        from bottega.models.device import choose_device

        if choose_device(recipe.device).type == "cuda":
            raise UsageError(
                "data.separate_documents: its attention on a GPU has no second derivative; use method fomaml or reptile"
            )


def _wrong(key: str, value: Any, why: str, remedy: str) -> UsageError:
    return UsageError(f"techniques: maml.{key}: {value}, and {why}; {remedy}")


def _metrics(measured: tuple[str, ...], steps: int) -> tuple[str, ...]:
    means = [name for name in measured if name not in DERIVED and not name.startswith("load/")]
    kept = [*means, *(name for name in measured if name == "perplexity")]
    return (*kept, *(f"{name}_before" for name in means), *(f"loss_{n}" for n in range(1, steps + 1)))


def _notes(training: Episodes, validation: Episodes | None, division: EpisodeDivision) -> list[str]:
    options = division.options
    several = f"{training.ways} of " if training.ways is not None else "one of "
    each = " of each" if training.ways is not None else ""
    found = [
        f"episodes: {several}{len(training.task_samples):,} tasks by {division.by}, {options.shots} samples to adapt to and "
        f"{options.queries} to measure{each}, {options.inner_steps} steps at {options.inner_rate:g}"
    ]
    for name, one in (("training", training), ("validation", validation)):
        few = one.num_tasks - len(one.task_samples) if one is not None else 0
        if few:
            found.append(f"{few:,} tasks of the {name} data have fewer than {options.shots + options.queries} samples")
    return found
