"""What the run asks of a branch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bottega.core.errors import UsageError
from bottega.core.task import Task
from bottega.core.types import Models
from bottega.data.order.orders import Order
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.tasks.registry import refusal_error

if TYPE_CHECKING:
    from bottega.tasks.prediction import NewSamples


class Workload(ABC):
    """A task with its data and codec. A reopened branch has no training data of its own until asked."""

    recipe: Any
    task: Task
    metrics: tuple[str, ...] = ("loss",)
    """What an evaluation measures."""
    unit: str = "samples"
    """What a second's work is counted in."""
    requests: tuple[str, ...] = ()
    """What `generate` can be told, by the names of its flags."""

    predicts: Literal["texts", "rows", "files"] | None = None
    """What `predict` takes, where new samples can be asked about. Of several tasks, the first of these is asked."""

    started_in: tuple[Path, ...] = ()
    """Of a finished run: the folders that its training may have been started in, the likeliest first."""

    @property
    def headline(self) -> tuple[str, ...] | None:
        """The measures that a person follows on the screen; None is all of them. Files have all in any case."""
        return None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the prepared data; a resumed run must find the same."""

    @property
    def derived_fingerprint(self) -> str | None:
        """A hash of what models said of the data, where training goes by that; the same data can be told otherwise on
        another machine, and a resumed run must not be."""
        return None

    @property
    def frozen_hashes(self) -> dict[str, str]:
        """Name -> hash of the models it is built on and does not train; a resumed run must find the same."""
        return {}

    @property
    def held_out(self) -> dict[str, str]:
        """Table -> hash of the keys and labels of the samples that it holds back from training, however they are read; and
        TABLE.content -> hash of the files that they come from, where that is known."""
        return {}

    @abstractmethod
    def training(self) -> Source: ...

    @property
    def notes(self) -> list[str]:
        """What a person should know of the data: what was left out of it, and why."""
        return []

    @property
    def order(self) -> Order | None:
        """How several sources are mixed; None is the plain shuffle."""
        return None

    @abstractmethod
    def validation(self) -> Source | None: ...

    @abstractmethod
    def test(self) -> Source | None:
        """What the recipe sets aside for the end, never looked at while training."""

    def training_samples(self) -> Source:
        """The training samples, unchanged and in order, to be measured."""
        return self.training()

    def split(self, split: str) -> Source | None:
        """One part of the run's own data: train, validation or test. None where it has none."""
        if split == "train":
            return self.training_samples()
        return self.test() if split == "test" else self.validation()

    @abstractmethod
    def read_given(self, given: ExternalData) -> Source:
        """Other data than the run's own, seen through this run's codec."""

    @abstractmethod
    def save_processor(self, folder: Path) -> None: ...

    @abstractmethod
    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Draw what the recipe asks for and write it where a person would look."""

    def generate(self, models: Models, *, device: Any, **asked: Any) -> Any:
        """What was asked for, as this medium holds it: texts, or an array."""
        raise refusal_error(self.recipe, "generate")

    def example_flags(self) -> str | None:
        """What a person could add to `bottega generate RUN`; None where nothing can be generated."""
        return ""

    def check_output(self, path: Path) -> None:
        """Refuses what `present` could not write to, before anything is made for it."""
        if path.is_dir():
            raise UsageError(f"--out {path}: is a folder; name a file in it")

    def present(self, made: Any, out: Path | None, *, run: Path, **asked: Any) -> dict[str, Any]:
        """Show or write what `generate` made; gives what --json prints."""
        raise AssertionError("nothing was generated")

    @abstractmethod
    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """The model in the layout of the ecosystem. Gives what its card says: library, pipeline tag, and
        under `needs` which models are not in it."""

    def predict_samples(
        self, models: Models, new: NewSamples, *, part: str | None, device: Any
    ) -> list[dict[str, Any]]:
        """What `bottega predict` says of new samples; `part` is for a run of several tasks."""
        if part is not None:
            raise UsageError(f"--part {part}: this is a run of one task; leave it out")
        return self.predict_new(models, new, device=device)

    def predict_new(self, models: Models, new: NewSamples, *, device: Any) -> list[dict[str, Any]]:
        """A dict for each sample: "predicted", and "text", "file" or "row" for which one it is."""
        raise refusal_error(self.recipe, "predict")

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics

    @property
    def supported_requests(self) -> tuple[str, ...]:
        """Those of the requests that this very run has a use for."""
        return self.requests

    def check_request(self, asked: Mapping[str, Any]) -> None:
        """A flag that this task has no use for is an error, not a silence. Where nothing can be generated, `generate` says so."""
        if not self.requests:
            return
        unknown = [name for name in asked if name not in self.requests]
        if unknown:
            named = ", ".join(f"--{name}" for name in self.supported_requests) or "nothing"
            raise UsageError(f"--{unknown[0]}: this run cannot be told that; it takes {named}")
