"""What the folder of a model from anywhere may not bring: code of its own, and pickles, which are code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.models.json_object import read_object


def read_plain(file: Path, *, key: str | None = None) -> dict[str, Any]:
    """A configuration, refused where it names code. `key` is who asks."""
    config = read_object(file)
    if config.get("auto_map"):
        raise UsageError(
            f"{_asked(key)}{file} has auto_map, code of its own that trust_remote_code would run; it is never run: take a "
            "model that the library has a class for, or remove auto_map if it has one for this"
        )
    return config


def transformers_config(folder: Path, *, key: str, what: str) -> Any:
    """Read by transformers itself, because its files leave out what is as usual. `what` it should be of, in words."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise EnvironmentProblem(f"{key}: {what} needs transformers; pip install 'bottega[hub]'") from error
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # libraries raise classes of their own where a file says what no model has
        raise UsageError(f"{key}: {folder} is no {what} that transformers knows: {first_line(error)}") from error


def require_safetensors(folder: Path, *, key: str | None = None) -> None:
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{_asked(key)}{folder}: no *.safetensors in it, and pickles are never opened; convert the model with "
            "transformers: model.save_pretrained(folder)"
        )


def _asked(key: str | None) -> str:
    return "" if key is None else f"{key}: "
