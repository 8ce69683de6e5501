"""The data of a workload: samples for training, validation and test, their order, and hashes that identify them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from bottega.data.order.orders import Order
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source


class TaskData(ABC):
    """Samples of one run, and of other data that a user names, in the form that the run's model reads."""

    started_in: tuple[Path, ...] = ()
    """Folders in which the training of a finished run may have been started, most likely first."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the prepared data; a resumed run must find the same."""

    @property
    def derived_fingerprint(self) -> str | None:
        """Hash of what other models computed from the data for training, which may differ on another machine."""
        return None

    @property
    def held_out(self) -> dict[str, str]:
        """Table -> hash of the keys and labels of held-out samples, and TABLE.content -> hash of their files if known."""
        return {}

    @property
    def notes(self) -> list[str]:
        """Notes to the user about the data, such as what was left out and why."""
        return []

    def count_classes(self) -> dict[str, int]:
        """Return the number of training samples of each class; {} if the data has no classes, or several labels a sample."""
        return {}

    def compare_splits(self) -> dict[str, Any]:
        """Return the number of duplicates in the training data and of held-out samples that are in it too; {} if unknown.

        `key` is the recipe key of the compared data; for the others see `data.prepare.split_comparison`.
        """
        return {}

    @property
    def order(self) -> Order | None:
        """Order in which several sources are mixed; None is a plain shuffle."""
        return None

    @abstractmethod
    def training(self) -> Source:
        """Return the training samples."""

    @abstractmethod
    def validation(self) -> Source | None:
        """Return the validation samples, if any are held out."""

    @abstractmethod
    def test(self) -> Source | None:
        """Return the test samples, if any are held out; training never reads them."""

    def training_samples(self) -> Source:
        """Return the training samples without augmentation and in their stored order, to be evaluated."""
        return self.training()

    def split(self, name: str) -> Source | None:
        """Return one split of the run's own data (train, validation or test), or None if it has no such split."""
        if name == "train":
            return self.training_samples()
        return self.test() if name == "test" else self.validation()

    @abstractmethod
    def read_external(self, external: ExternalData) -> Source:
        """Return the samples of data other than the run's own, processed in the same way as the run's own."""
