"""The half of a classifier's branch that says no."""

from __future__ import annotations

from typing import Any, NoReturn

from bottega.core.errors import UsageError
from bottega.core.types import Models


class Teller:
    """It tells classes apart, and nothing can be drawn from it."""

    def sample(self, models: Models, folder: Any, *, device: Any) -> None:
        """Nothing to look at."""

    def example(self) -> None:
        return None

    def generate(self, models: Models, *, device: Any, **asked: Any) -> NoReturn:
        raise UsageError(
            "a classifier does not generate; bottega predict classifies new samples, bottega evaluate measures it"
        )

    def present(self, made: Any, out: Any, *, run: Any, **asked: Any) -> NoReturn:
        raise AssertionError("nothing was generated")
