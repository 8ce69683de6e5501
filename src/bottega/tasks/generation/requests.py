"""Generation requests as rows of a batch: one row for each sample, with its class, vector or text."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from bottega.core.errors import UsageError
from bottega.models.generator.config import Condition
from bottega.tasks.generation.config import Generator
from bottega.tasks.generation.text_condition import TextCondition

CONDITION_OF_FLAG = {"prompt": "text", "class": "class", "vector": "vector"}
"""Flag -> the condition that the run must have been trained with."""
DEFAULT_COUNT = 16
"""Number of samples without --count: for each requested condition, or in total if no condition is requested."""
SUPPORTED_FLAG = {"none": "nothing", **{condition: f"--{flag}" for flag, condition in CONDITION_OF_FLAG.items()}}


@dataclass(frozen=True)
class RequestEncoder:
    """Encodes the requests that one run supports; `size` is the width of its condition vectors."""

    kind: Condition
    classes: tuple[str, ...]
    size: int
    text: TextCondition | None
    num_values: int
    """Number of values in a sample."""

    def encode(self, request: dict[str, Any], count: int | None) -> dict[str, np.ndarray]:
        """Return the rows of a batch; "number" is the index of a sample, from which its noise is drawn."""
        if count is not None and count < 1:
            raise UsageError(f"--count {count}: expected 1 or more")
        for flag, condition in CONDITION_OF_FLAG.items():
            if request.get(flag) is not None and self.kind != condition:
                raise UsageError(
                    f"--{flag}: this run was trained with condition {self.kind}; it takes {SUPPORTED_FLAG[self.kind]}"
                )
        rows: dict[str, np.ndarray] = {}
        if self.kind == "class":
            rows["label"] = self._resolve_labels(request.get("class"))
        elif self.kind == "vector":
            rows["condition"] = self._parse_vectors(request.get("vector"))
        elif self.text is not None:
            rows |= self.text.encode(self.text.resolve_prompts(request.get("prompt")))
        indices = self._choose_indices(len(next(iter(rows.values()))) if rows else 1, request, count)
        rows = {name: value[indices] for name, value in rows.items()}
        return {**rows, "number": np.arange(len(indices))}

    def list_captions(self, request: dict[str, Any], count: int | None) -> list[str] | None:
        """Return the caption of each sample: its class or prompt; None for other conditions."""
        if self.kind == "class":
            names = [self.classes[label] for label in self._resolve_labels(request.get("class"))]
        else:
            names = self.text.resolve_prompts(request.get("prompt")) if self.text is not None else []
        return [names[index] for index in self._choose_indices(len(names), request, count)] if names else None

    def _choose_indices(self, num_conditions: int, request: dict[str, Any], count: int | None) -> np.ndarray:
        """Return the index of each sample's condition.

        Each requested condition has `count` samples. If none is requested, `count` samples in total go through all conditions.
        """
        num_samples = DEFAULT_COUNT if count is None else count
        if all(request.get(flag) is None for flag in CONDITION_OF_FLAG):
            check_sample_memory(num_samples, num_samples, self.num_values)
            return np.arange(num_samples) % num_conditions
        check_sample_memory(num_samples, num_conditions * num_samples, self.num_values)
        return np.repeat(np.arange(num_conditions), num_samples)

    def example_flags(self) -> str:
        """Return flags to try `bottega generate` with."""
        if self.kind == "class":
            return f" --class {shlex.quote(self.classes[-1])}"
        return f" --prompt {shlex.quote(self.text.prompts[0])}" if self.text is not None else ""

    def _resolve_labels(self, requested: Any) -> np.ndarray:
        names = self.classes
        if requested is None:
            return np.arange(len(names), dtype=np.int32)
        labels = []
        for name in [requested] if isinstance(requested, str | int) else requested:
            text = str(name)
            number = names.index(text) if text in names else int(text) if text.isdecimal() else -1
            if not 0 <= number < len(names):
                listed_names = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                raise UsageError(f"--class {text}: unknown class; the run has {len(names)} classes: {listed_names}")
            labels.append(number)
        return np.array(labels, np.int32)

    def _parse_vectors(self, requested: Any) -> np.ndarray:
        if requested is None:
            raise UsageError(
                f"--vector: this run was trained with vectors; give a vector of {self.size} numbers, such as 0.5,1"
            )
        rows = []
        is_single = isinstance(requested, str | Real) or all(isinstance(x, Real) for x in requested)
        for vector in [requested] if is_single else requested:
            try:
                values = [float(x) for x in (vector.split(",") if isinstance(vector, str) else np.atleast_1d(vector))]
            except (ValueError, TypeError):
                raise UsageError(f"--vector {vector}: expected {self.size} numbers separated by commas") from None
            if not np.isfinite(values).all():
                raise UsageError(f"--vector {vector}: expected finite numbers")
            if len(values) != self.size:
                raise UsageError(
                    f"--vector {vector}: expected {self.size} numbers separated by commas, got {len(values)}"
                )
            rows.append(values)
        return np.array(rows, np.float32)


def select_supported_flags(requests: tuple[str, ...], model: Generator) -> tuple[str, ...]:
    """Return `requests` without the flags of other conditions, and without guidance if it has no effect."""
    unsupported = {flag for flag, condition in CONDITION_OF_FLAG.items() if condition != model.condition}
    if model.condition == "none" or model.condition_dropout == 0:
        unsupported.add("guidance")
    return tuple(name for name in requests if name not in unsupported)


def check_sample_memory(count: int, total: int, values_per_sample: int) -> None:
    """Raise UsageError if `total` samples, which are in memory twice as float32, exceed the memory of this machine.

    `count` is the value of --count, for the message.
    """
    size, memory = 8 * values_per_sample, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total * size > memory:
        raise UsageError(
            f"--count {count}: {total:,} samples take {total * size / 2**30:,.0f} GiB, but this machine has "
            f"{memory / 2**30:,.0f} GiB; generate fewer at a time, each with another --seed"
        )
