"""Reads the JSON files of a model folder, and refuses those that cannot describe a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bottega.core.errors import CheckpointError, UsageError

MAX_BYTES = 64 << 20
"""Maximum size of a file in bytes. The index of a model with thousands of weight files has 2 MB."""
_NUMERIC_KEY = re.compile(
    r"(num|n|max|min)_\w+|\w*_(size|dim|layers|heads|channels|positions|embeddings|eps|epsilon|theta|dropout|factor)"
    r"|(d_model|d_ff|d_kv|dim|depth|width|expand|dropout)"
)
"""Configuration keys whose values are numbers in every library."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; a config.json is also checked for values that no model can have."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(
                f"{path} has {path.stat().st_size:,} bytes; the limit is {MAX_BYTES:,}; give the folder of a saved model"
            )
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}; give the folder of a saved model") from error
    except RecursionError:
        raise UsageError(
            f"the JSON in {path} is nested too deeply for a model's configuration; give the folder of a saved model"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download or export the model again") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: expected a JSON object, got a {type(value).__name__}; download or export the model again"
        )
    if path.name == "config.json":
        _check_config(value, path)
    return value


def _check_config(config: dict[str, Any], path: Path) -> None:
    """Refuse quantized weights and text in place of numbers, in nested configurations too."""
    if config.get("quantization_config") is not None:
        raise UsageError(
            f"{path} has a quantization_config, and quantized weights are not supported; use the folder of "
            "the original weights"
        )
    for key, value in config.items():
        if isinstance(value, str) and _NUMERIC_KEY.fullmatch(key):
            excerpt = value if len(value) <= 40 else value[:37] + "..."
            raise UsageError(f"{path}: {key} must be a number, but is {excerpt!r}")
        if isinstance(value, dict) and key.endswith("_config"):
            _check_config(value, path)
