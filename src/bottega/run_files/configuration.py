"""The configuration of a run from its recipe.yaml, as nested values and as flat keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bottega.config.yaml_io import read_yaml
from bottega.core.errors import BottegaError
from bottega.redaction import redact_values

MAX_VALUE_LENGTH = 300


def read_configuration(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the values of a recipe.yaml, nested; {} if it cannot be read, which `notes` then say.

    The values are not validated, so that runs of other versions can be shown too; secrets are redacted.
    """
    try:
        values = read_yaml(path).value
    except (BottegaError, OSError) as error:
        notes.append(f"{path.name} cannot be read: {error.strerror if isinstance(error, OSError) else error}")
        return {}
    return dict(redact_values(values)) if isinstance(values, dict) else {}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as dotted keys; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def get_value(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None."""
    value: Any = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def format_value(value: Any) -> str:
    """Return a value of a recipe as one line of text; numbers with six digits at most."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]} …"
