"""Samples of a generator: drawn while it trains, and on request."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.model_spec import resolve_reference
from bottega.core.types import Batch, Models
from bottega.data.output_files import explain_write_errors, is_folder, replace_previous_files, require_suffix
from bottega.models import find_framework
from bottega.tasks.generation.media import Medium
from bottega.tasks.generation.metadata import GeneratorMetadata
from bottega.tasks.generation.requests import RequestEncoder, select_supported_flags
from bottega.tasks.generation.sampling_options import (
    list_sampling_options,
    require_finite,
    resolve_sampling_options,
)
from bottega.tasks.generation.text_condition import TextCondition
from bottega.tasks.sampler import Sampler

Progress = Callable[[str, int, int], None]
DRAW_ROWS = "bottega.tasks.generation.{framework}:draw_rows"


def _ignore_progress(stage: str, done: int, total: int) -> None:
    pass


@final
class GenerationSampler(Sampler):
    """Draws samples of a medium from noise, or code by code."""

    def __init__(
        self,
        recipe: Any,
        task: Any,
        medium: Medium,
        metadata: GeneratorMetadata,
        *,
        text: TextCondition | None,
        read_training_vectors: Callable[[int], list[list[float]]],
    ) -> None:
        """`read_training_vectors(count)` returns the condition vectors of `count` training samples."""
        self.recipe, self.task, self.medium, self.metadata, self.text = recipe, task, medium, metadata, text
        self._read_training_vectors = read_training_vectors
        self.requests = ("prompt", "class", "vector", "count", "seed", *list_sampling_options(recipe.model))
        condition, size = metadata.shape.condition, math.prod(metadata.sample)
        self.encoder = RequestEncoder(condition.kind, metadata.classes, condition.size, text, size)

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Write a contact sheet that goes through the classes or prompts in turn."""
        options = self.recipe.samples
        request: dict[str, Any] = {}
        if self.recipe.model.condition in ("class", "text"):
            flag, names = ("class", self.metadata.classes) if self.text is None else ("prompt", self.text.prompts)
            request = {flag: [names[i % len(names)] for i in range(options.count)]}
        elif self.recipe.model.condition == "vector":
            request = {"vector": self._read_training_vectors(options.count)}
        count = 1 if request else options.count
        samples = self.generate(models, device=device, **request, count=count, seed=self.recipe.seed)
        self.medium.write(samples, folder, self.encoder.list_captions(request, count))

    def generate(
        self,
        models: Models,
        *,
        device: Any,
        count: int | None = None,
        seed: int = 0,
        stream: Any = None,
        batch_size: int = 256,
        progress: Progress = _ignore_progress,
        **request: Any,
    ) -> np.ndarray:
        """Return pixels uint8 (n, h, w, c), audio float32 (n, samples), or clips uint8 (n, frames, h, w, c).

        `request` holds the condition and the sampling options.
        """
        options = {name: request.pop(name) for name in list_sampling_options(self.recipe.model) if name in request}
        rows = self.encode_request(request, count)
        values = self.draw(models, rows, device=device, seed=seed, batch_size=batch_size, progress=progress, **options)
        return self.medium.from_values(values, device=device)

    def draw(
        self,
        models: Models,
        rows: Batch,
        *,
        device: Any,
        seed: int,
        batch_size: int = 256,
        progress: Progress = _ignore_progress,
        **options: Any,
    ) -> np.ndarray:
        """Return the model's values, one sample for each row; a sample depends on its number and the seed alone.

        `device` is one of the framework of the models.
        """
        options = resolve_sampling_options(self.recipe, self.task, options)
        draw_rows = resolve_reference(DRAW_ROWS, find_framework(models["model"]))
        total, samples = int(rows["number"].shape[0]), []
        for start in range(0, total, batch_size):
            chunk = {name: value[start : start + batch_size] for name, value in rows.items()}

            def report(done: int, num_steps: int, num_previous: int = start, size: int = batch_size) -> None:
                progress(
                    "samples", num_previous * num_steps + done * min(size, total - num_previous), total * num_steps
                )

            values = draw_rows(
                self.task,
                models,
                chunk,
                seed=seed,
                device=device,
                precision=self.recipe.training.mixed_precision,
                progress=report,
                **options,
            )
            samples.append(values)
        return require_finite(np.concatenate(samples))

    def encode_request(self, request: dict[str, Any], count: int | None) -> dict[str, np.ndarray]:
        """Return the rows of a batch for a request; raise UsageError if this run does not support it."""
        self.check_request({name: value for name, value in request.items() if value is not None})
        return self.encoder.encode(request, count)

    @property
    def supported_requests(self) -> tuple[str, ...]:
        return select_supported_flags(self.requests, self.recipe.model)

    def example_flags(self) -> str:
        return self.encoder.example_flags()

    def check_output(self, path: Path) -> None:
        if not is_folder(path):
            require_suffix(path, self.medium.suffixes)

    def present(
        self, generated: np.ndarray, out: Path | None, *, run: Path, count: int | None = None, **request: Any
    ) -> dict[str, Any]:
        target = out or run / "generated"
        captions = self.encoder.list_captions(request, count)
        with explain_write_errors(target):
            files = replace_previous_files(target, lambda: self.medium.write(generated, target, captions))
        return {"files": [str(path) for path in files], "count": len(generated)}
