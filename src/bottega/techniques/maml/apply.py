"""Meta-learning in a recipe: samples are drawn as episodes of many tasks, and the model adapts to each."""

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

MIN_EPISODES = 1000
"""Minimum number of episodes of an epoch. They are drawn at random, so the number only defines the length of an epoch."""
NUM_EVALUATION_EPISODES = 64
"""Number of episodes of an evaluation."""
DERIVED_METRICS = (
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
"""Metrics that are not means over examples, so they are not reported before and after each inner step."""


def apply(plan: TrainingPlan, options: Any, recipe: Recipe, workload: Workload) -> TrainingPlan:
    """Return the plan with episodes as samples and a task that adapts to each."""
    assert isinstance(options, MamlOptions)
    _check_conflicts(plan, options, recipe)
    division = _divide_into_tasks(plan, options, recipe)
    training = division.build_episodes(plan.training, name="data.train", seed=recipe.seed, is_training=True)
    held_out = plan.validation
    # The same episodes for every seed, so that runs that differ in the seed alone are comparable.
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
            select_adapted=_build_trained_selector(recipe.training),
        ),
        training=training,
        order=None,
        validation=validation,
        metrics=_list_metrics(plan.metrics, options.inner_steps),
        notes=(*plan.notes, *_describe_episodes(training, validation, division)),
    )


def _build_trained_selector(training: Training) -> Callable[[tuple[str, ...]], frozenset[str]]:
    """Return a function that selects the parameters trained at some step of the run, whether unfrozen yet or not."""

    @cache
    def select(names: tuple[str, ...]) -> frozenset[str]:
        settings = resolve_parameter_settings(training, names)
        return frozenset(name for name, setting in settings.items() if setting.scale is not None)

    return select


@dataclass(frozen=True)
class EpisodeDivision:
    """How samples are divided into tasks, and tasks into episodes."""

    by: str
    group_into_tasks: Callable[[Source], np.ndarray]
    options: MamlOptions
    is_classify: bool

    def build_episodes(self, source: Source, *, name: str, seed: int, is_training: bool) -> Episodes:
        """Return the episodes of a source."""
        options, is_by_class = self.options, self.is_classify and self.by == "label"
        tasks = self.group_into_tasks(source)
        size = options.shots + options.queries
        ways = None
        if is_by_class:
            num_classes = int((np.bincount(tasks[tasks != episodes.NO_TASK]) >= size).sum())
            ways = options.ways or max(2, num_classes)
            if num_classes < ways:
                raise DataError(
                    f"{name}: an episode needs {ways} classes with {size} samples each ({options.shots} shots and "
                    f"{options.queries} queries), but only {num_classes} of {len(np.unique(tasks[tasks >= 0]))} classes have "
                    "that many; lower ways, shots or queries of techniques.maml, or add data"
                )
        # Plain training keeps the class numbers; with numbers that change in each episode it could not learn.
        keeps_labels = not is_by_class or (is_training and options.method == "none")
        return Episodes(
            source,
            tasks,
            shots=options.shots,
            queries=options.queries,
            length=max(MIN_EPISODES, len(source) // (size * (ways or 1))) if is_training else NUM_EVALUATION_EPISODES,
            seed=seed,
            ways=ways,
            relabelled_field=None if keeps_labels else "label",
            name=name,
        )


def _divide_into_tasks(plan: TrainingPlan, options: MamlOptions, recipe: Recipe) -> EpisodeDivision:
    """Divide by the option `by`, or by the first of label, source and region that exists."""
    source, is_text, size = plan.training, recipe.task == "language", options.shots + options.queries
    labels, sources = episodes.group_by_label(source), episodes.group_by_source(source)
    by = options.by or ("label" if labels is not None else "source" if sources is not None else "region")
    if by == "label" and labels is None:
        is_multi_label = getattr(recipe.data, "multi_label", False)
        raise _build_option_error(
            "by",
            "label",
            "a text has several labels" if is_multi_label else "samples have no labels",
            "use source or region",
        )
    if by == "source" and sources is None:
        raise _build_option_error(
            "by", "source", "there is only one source", "give several as data.sources, or use label or region"
        )
    if by == "region" and options.by is None and not is_text:
        raise _build_option_error(
            "by", "null", "samples have no labels and only one source", "add data.sources or labels"
        )
    is_classify = recipe.task == "classify"
    if options.ways is not None and not (is_classify and by == "label"):
        raise _build_option_error("ways", options.ways, "ways applies only to task classify, by label", "remove it")
    if options.ways == 1:
        raise _build_option_error(
            "ways", 1, "an episode needs at least two classes", "set it to 2 or more, or remove it"
        )
    loss = getattr(recipe, "loss", None)
    if is_classify and by == "label" and loss is not None and loss.class_weights is not None:
        raise UsageError(
            "loss.class_weights: maml renumbers the classes in each episode and draws all equally often; remove it"
        )

    def group_into_tasks(samples: Source) -> np.ndarray:
        if by == "label":
            numbers = episodes.group_by_label(samples)
        elif by == "source":
            # Held-out data is one table, with the sources one after the other.
            numbers = episodes.group_by_source(samples)
        else:
            numbers = None if by == "region" else episodes.group_by_field(samples, by)
        return episodes.group_by_region(samples, size=size) if numbers is None else numbers

    return EpisodeDivision(by, group_into_tasks, options, is_classify)


def _check_conflicts(plan: TrainingPlan, options: MamlOptions, recipe: Recipe) -> None:
    """Raise UsageError for conflicts that only the data, the task or the device shows; maml/config.py declares the others."""
    if plan.order is not None:
        key = "replay" if recipe.data.replay else "mixture"
        raise UsageError(f"data.{key}: maml draws its tasks uniformly, in its own order; remove it")
    if plan.task.gradient_surgery:
        raise UsageError(
            "techniques: maml differentiates the sum of the loss terms, so it does not support pcgrad; use another balance"
        )
    if options.method == "maml" and getattr(recipe.model, "ngrams", None) is not None:
        raise UsageError(
            "model: its table of n-grams has no second derivative; set techniques.maml.method to fomaml or reptile"
        )
    if options.method == "maml" and getattr(recipe.data, "separate_documents", False):
        from bottega.models.device import choose_device

        if choose_device(recipe.device).type == "cuda":
            raise UsageError(
                "data.separate_documents: its attention on a GPU has no second derivative; set techniques.maml.method to "
                "fomaml or reptile"
            )


def _build_option_error(key: str, value: Any, reason: str, remedy: str) -> UsageError:
    return UsageError(f"techniques: maml.{key} is {value}, but {reason}; {remedy}")


def _list_metrics(metrics: tuple[str, ...], inner_steps: int) -> tuple[str, ...]:
    """Return the reported metrics: those that are means, before and after adaptation, and the loss after each inner step."""
    means = [name for name in metrics if name not in DERIVED_METRICS and not name.startswith("load/")]
    names = [*means, *(name for name in metrics if name == "perplexity")]
    return (*names, *(f"{name}_before" for name in means), *(f"loss_{n}" for n in range(1, inner_steps + 1)))


def _describe_episodes(training: Episodes, validation: Episodes | None, division: EpisodeDivision) -> list[str]:
    options = division.options
    ways = f"{training.ways} of " if training.ways is not None else "one of "
    per_class = " of each" if training.ways is not None else ""
    notes = [
        f"episodes: {ways}{len(training.task_samples):,} tasks by {division.by}, {options.shots} support and "
        f"{options.queries} query samples{per_class}, {options.inner_steps} inner steps at rate {options.inner_rate:g}"
    ]
    for name, split in (("training", training), ("validation", validation)):
        num_small = split.num_tasks - len(split.task_samples) if split is not None else 0
        if num_small:
            size = options.shots + options.queries
            notes.append(f"{num_small:,} tasks of the {name} data have fewer than {size} samples and are left out")
    return notes
