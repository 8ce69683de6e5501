"""Values that JSON can represent: infinities and NaN become null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def replace_non_finite(value: Any) -> Any:
    """Replace infinities and NaN by None throughout a JSON value, because JSON has neither; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: replace_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
