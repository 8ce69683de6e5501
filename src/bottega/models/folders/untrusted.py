"""What the folder of a model from anywhere may not bring: code of its own, and pickles, which are code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.core.errors import BottegaError, CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.models.folders.json_object import read_json_object


def read_config_without_code(file: Path, *, key: str | None = None) -> dict[str, Any]:
    """A configuration, refused where it names code. `key` is who asks."""
    config = read_json_object(file)
    if config.get("auto_map"):
        raise UsageError(
            f"{_asked(key)}{file} has auto_map, code of its own that trust_remote_code would run; it is never run: take a "
            "model that the library has a class for, or remove auto_map if it has one for this"
        )
    return config


def load_transformers_config(folder: Path, *, key: str, what: str) -> Any:
    """Read by transformers itself, because its files leave out what is as usual. `what` it should be of, in words."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise EnvironmentProblem(f"{key}: {what} needs transformers; pip install 'bottega[hub]'") from error
    read_config_without_code(folder / "config.json", key=key)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # libraries raise classes of their own where a file says what no model has
        raise UsageError(f"{key}: {folder} is no {what} that transformers knows: {first_line(error)}") from error


@contextmanager
def attribute_errors_to(folder: Path | str, *, key: str | None = None) -> Iterator[None]:
    """Turn whatever is raised while a model is built by the files of a folder into an error about that folder.

    Libraries take a configuration at its word, and fail anywhere with any class of exception where it is wrong.
    """
    try:
        yield
    except (BottegaError, MemoryError, ImportError):
        raise
    except Exception as error:
        if "memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
            raise
        raise UsageError(
            f"{_asked(key)}{folder}: its files describe no model that can be built "
            f"({type(error).__name__}: {first_line(error)}); download or export it again"
        ) from error


def require_safetensors(folder: Path, *, key: str | None = None) -> None:
    """That there are weights, and none of them cut: their headers tell how long they must be."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{_asked(key)}{folder}: no *.safetensors in it, and pickles are never opened; convert the model with "
            "transformers: model.save_pretrained(folder)"
        )
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{_asked(key)}{file} is damaged ({first_line(error)}); download or export it again"
            ) from error


def check_loading_info(folder: Path | str, loading_info: Mapping[str, Any]) -> None:
    """What `from_pretrained` tells of its loading: a weight that is not there, or of another shape, is an error, because it
    would be drawn at random."""
    for what, names in (
        ("lacks", loading_info["missing_keys"]),
        ("has another shape of", loading_info["mismatched_keys"]),
    ):
        if names:
            first = sorted(names, key=str)[0]
            named = f"{first[0]} ({list(first[1])}, not {list(first[2])})" if isinstance(first, tuple) else str(first)
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{folder}: {what} {named}{others}; weights and config.json do not belong together: download or export it "
                "again"
            )


def _asked(key: str | None) -> str:
    return "" if key is None else f"{key}: "
