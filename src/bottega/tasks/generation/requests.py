"""What a person asks a generator for, as rows of a batch: classes, vectors or texts, each so many times."""

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
"""Flag -> the condition that a run must have been trained with."""
DEFAULT_COUNT = 16
"""Of each that is asked for, where nobody says how many; and in all, where nobody says of what."""
TAKES = {"none": "nothing", **{condition: f"--{flag}" for flag, condition in CONDITION_OF_FLAG.items()}}


@dataclass(frozen=True)
class RequestEncoder:
    """What one run can be asked for. `size` is the width of its vectors."""

    kind: Condition
    classes: tuple[str, ...]
    size: int
    text: TextCondition | None
    values: int
    """Numbers in a sample."""

    def encode(self, asked: dict[str, Any], count: int | None) -> dict[str, np.ndarray]:
        """ "number" is the place that noise is drawn for."""
        if count is not None and count < 1:
            raise UsageError(f"--count {count}: at least one sample is asked for")
        for flag, needed in CONDITION_OF_FLAG.items():
            if asked.get(flag) is not None and self.kind != needed:
                raise UsageError(
                    f"--{flag}: this run was trained with condition {self.kind}; it takes {TAKES[self.kind]}"
                )
        rows: dict[str, np.ndarray] = {}
        if self.kind == "class":
            rows["label"] = self._labels(asked.get("class"))
        elif self.kind == "vector":
            rows["condition"] = self._vectors(asked.get("vector"))
        elif self.text is not None:
            rows |= self.text.encode(self.text.resolve_prompts(asked.get("prompt")))
        places = self._places(len(next(iter(rows.values()))) if rows else 1, asked, count)
        rows = {name: value[places] for name, value in rows.items()}
        return {**rows, "number": np.arange(len(places))}

    def captions(self, asked: dict[str, Any], count: int | None) -> list[str] | None:
        """What stands below each sample."""
        if self.kind == "class":
            names = [self.classes[label] for label in self._labels(asked.get("class"))]
        else:
            names = self.text.resolve_prompts(asked.get("prompt")) if self.text is not None else []
        return [names[place] for place in self._places(len(names), asked, count)] if names else None

    def _places(self, number: int, asked: dict[str, Any], count: int | None) -> np.ndarray:
        """Which of so many things each sample is. Of each that was asked for `count`; else `count` in all, in turn."""
        each = DEFAULT_COUNT if count is None else count
        if all(asked.get(flag) is None for flag in CONDITION_OF_FLAG):
            check_sample_memory(each, each, self.values)
            return np.arange(each) % number
        check_sample_memory(each, number * each, self.values)
        return np.repeat(np.arange(number), each)

    def example_flags(self) -> str:
        """Flags to try."""
        if self.kind == "class":
            return f" --class {shlex.quote(self.classes[-1])}"
        return f" --prompt {shlex.quote(self.text.prompts[0])}" if self.text is not None else ""

    def _labels(self, wanted: Any) -> np.ndarray:
        names = self.classes
        if wanted is None:
            return np.arange(len(names), dtype=np.int32)
        found = []
        for one in [wanted] if isinstance(wanted, str | int) else wanted:
            text = str(one)
            number = names.index(text) if text in names else int(text) if text.isdecimal() else -1
            if not 0 <= number < len(names):
                shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                raise UsageError(f"--class {text}: the run has {len(names)} classes: {shown}")
            found.append(number)
        return np.array(found, np.int32)

    def _vectors(self, wanted: Any) -> np.ndarray:
        if wanted is None:
            raise UsageError(
                f"--vector: this run was trained with vectors; give one of {self.size} numbers, such as 0.5,1"
            )
        rows = []
        is_one = isinstance(wanted, str | Real) or all(isinstance(x, Real) for x in wanted)
        for one in [wanted] if is_one else wanted:
            try:
                values = [float(x) for x in (one.split(",") if isinstance(one, str) else np.atleast_1d(one))]
            except (ValueError, TypeError):
                raise UsageError(f"--vector {one}: expected {self.size} numbers between commas") from None
            if not np.isfinite(values).all():
                raise UsageError(f"--vector {one}: expected finite numbers")
            if len(values) != self.size:
                raise UsageError(f"--vector {one}: expected {self.size} numbers between commas, got {len(values)}")
            rows.append(values)
        return np.array(rows, np.float32)


def supported_flags(requests: tuple[str, ...], model: Generator) -> tuple[str, ...]:
    """Without what belongs to another condition."""
    others = {flag for flag, condition in CONDITION_OF_FLAG.items() if condition != model.condition}
    if model.condition == "none" or model.condition_dropout == 0:
        others.add("guidance")
    return tuple(name for name in requests if name not in others)


def check_sample_memory(count: int, total: int, values: int) -> None:
    """All samples are in memory at once, as floats and then joined; more than there is would end the process."""
    each, there = 8 * values, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total * each > there:
        raise UsageError(
            f"--count {count}: {total:,} samples take {total * each / 2**30:,.0f} GiB, and this machine has "
            f"{there / 2**30:,.0f}; ask for fewer, several times with another --seed"
        )
