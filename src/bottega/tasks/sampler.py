"""Samplers: samples drawn while training, and those that `bottega generate` requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from bottega.core.errors import UsageError
from bottega.core.types import Models
from bottega.tasks.registry import refusal_error


class Sampler(ABC):
    """Draws samples while training and, if the task is generative, on request."""

    recipe: Any
    requests: tuple[str, ...] = ()
    """Names of the flags of `bottega generate` that the task understands; empty if it does not generate."""

    @abstractmethod
    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Draw the samples that `samples` of the recipe describes and write them to `folder`."""

    def generate(self, models: Models, *, device: Any, **request: Any) -> Any:
        """Return what is requested in the form of the medium: texts, or an array."""
        raise refusal_error(self.recipe, "generate")

    def present(self, generated: Any, out: Path | None, *, run: Path, **request: Any) -> dict[str, Any]:
        """Print or write what `generate` returned; return the fields that --json prints."""
        raise AssertionError("nothing was generated")

    def example_flags(self) -> str | None:
        """Return flags to try `bottega generate RUN` with; None if nothing can be generated."""
        return None

    @property
    def supported_requests(self) -> tuple[str, ...]:
        """Those of `requests` that have an effect in this run."""
        return self.requests

    def check_request(self, request: Mapping[str, Any]) -> None:
        """Raise UsageError for a flag that this run does not understand; tasks without requests refuse in `generate`."""
        if not self.requests:
            return
        unknown = [name for name in request if name not in self.requests]
        if unknown:
            supported = ", ".join(f"--{name}" for name in self.supported_requests) or "nothing"
            raise UsageError(f"--{unknown[0]}: this run does not support it; it takes {supported}")

    def check_output(self, path: Path) -> None:
        """Raise UsageError if `present` could not write to `path`, before anything is generated for it."""
        if path.is_dir():
            raise UsageError(f"--out {path} is a folder; give a file in it")


@final
class NoSampler(Sampler):
    """The sampler of a task that draws nothing, such as a classifier."""

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        pass
