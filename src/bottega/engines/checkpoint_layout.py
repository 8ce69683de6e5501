"""Whether the tensors of a checkpoint fit a model, for any engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bottega.core.errors import CheckpointError


def check_same_layout(loaded: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError unless names, shapes and dtypes are equal; nothing is cast or filled in silently."""
    problems = [f"{name} is missing" for name in expected if name not in loaded]
    problems += [f"{name} is not in the model" for name in loaded if name not in expected]
    for name in expected.keys() & loaded.keys():
        a, b = loaded[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            problems.append(f"{name} is {a.dtype} {tuple(a.shape)}, the model has {b.dtype} {tuple(b.shape)}")
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(sorted(problems)[:10])}{more}")
