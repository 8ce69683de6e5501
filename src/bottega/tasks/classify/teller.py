"""The half of a classifier's branch that says no."""

from __future__ import annotations

from typing import Any

from bottega.core.types import Models


class Teller:
    """It tells classes apart, and nothing can be drawn from it."""

    def sample(self, models: Models, folder: Any, *, device: Any) -> None:
        """Nothing to look at."""

    def example_flags(self) -> None:
        return None
