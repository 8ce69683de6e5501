"""A workload: a task opened for one recipe, with its data, processor, sampler, exporter and predictor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from bottega.config.data import get_source_names
from bottega.core.errors import UsageError
from bottega.core.task import Task
from bottega.core.types import Models, Rows
from bottega.tasks.prediction import NewSamples
from bottega.tasks.processor import Processor
from bottega.tasks.registry import refusal_error
from bottega.tasks.sampler import Sampler
from bottega.tasks.task_data import TaskData

PredictionInput = Literal["texts", "rows", "files"]


@final
@dataclass(frozen=True)
class Predictor:
    """Predictions for new samples (`bottega predict`)."""

    input: PredictionInput
    """The form in which samples are given."""
    predict: Callable[..., list[dict[str, Any]]]
    """(models, new samples, *, device) -> a dict for each sample: "predicted", and "text", "file" or "row" to identify it."""


@final
@dataclass(frozen=True)
class Baseline:
    """A simple model that was fitted to the same training samples, to compare a run with."""

    name: str
    metrics: dict[str, float]
    """Of the validation samples, under the names of the run's own metrics."""
    seconds: float
    notes: tuple[str, ...] = ()
    """What was left out, such as "20,000 of 120,000 training texts"."""


class Workload(ABC):
    """A task opened for one recipe. A reopened workload prepares its training data only when it is used."""

    recipe: Any
    task: Task
    data: TaskData
    processor: Processor
    """What is saved with the run so that it can be used without its data."""
    sampler: Sampler
    predictor: Predictor | None = None
    """None if the task makes no predictions for new samples."""
    metrics: tuple[str, ...] = ("loss",)
    """Names of the metrics that an evaluation computes."""
    unit: str = "samples"
    """Unit of the throughput, such as images or tokens."""

    @property
    def headline(self) -> tuple[str, ...] | None:
        """Metrics shown on the console; None shows all. Log files always hold all of them."""
        return None

    @property
    def frozen_hashes(self) -> dict[str, str]:
        """Name -> hash of each model that the run uses and does not train; a resumed run must find the same."""
        return {}

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add metrics that are functions of the means, such as perplexity."""
        return metrics

    def build_evaluation_tables(self, rows: Rows) -> dict[str, Any]:
        """Return tables of an evaluation's rows for the report, as plain values; {} if the task has none."""
        return {}

    def fit_baseline(self) -> Baseline | None:
        """Fit a simple model to the training samples and measure it on the validation samples; None if the task has none."""
        return None

    @abstractmethod
    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write the model in a layout that other libraries open.

        Return fields of its model card: library, pipeline tag, and under `needs` the models that are not included.
        """

    def predict_samples(
        self, models: Models, new_samples: NewSamples, *, part: str | None, device: Any
    ) -> list[dict[str, Any]]:
        """Return predictions for new samples; `part` selects the task of a multitask run."""
        if part is not None:
            raise UsageError(f"--part {part}: this run has one task only; remove --part")
        if self.predictor is None:
            raise refusal_error(self.recipe, "predict")
        return self.predictor.predict(models, new_samples, device=device)


def choose_headline_metrics(recipe: Any, *names: str) -> tuple[str, ...]:
    """Return `names` and the metrics that select the best checkpoint and stop early, without duplicates.

    If data.mixture is sequence, the selecting metric of each source and the metrics of continual learning follow.
    """
    metric, early_stopping = recipe.evaluation.metric, recipe.training.early_stopping
    metrics = [*names, metric, *([early_stopping.metric] if early_stopping is not None else [])]
    if recipe.data.mixture == "sequence":
        metrics += [f"{name}/{metric}" for name in get_source_names(recipe.data.sources or ())]
        metrics += ["average", "backward_transfer", "forgetting"]
    return tuple(dict.fromkeys(metrics))
