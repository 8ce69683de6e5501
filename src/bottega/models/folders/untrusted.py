"""Safety checks for model folders from untrusted sources: no code, no pickles, no incomplete weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.core.errors import BottegaError, CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.models.folders.json_object import read_json_object


def read_config_without_code(file: Path, *, key: str | None = None) -> dict[str, Any]:
    """Return the configuration in `file`; raise `UsageError` if it names code to run. `key` is the recipe key, for errors."""
    config = read_json_object(file)
    if config.get("auto_map"):
        raise UsageError(
            f"{_format_prefix(key)}{file} has auto_map, custom code that is never run (trust_remote_code); use a model that "
            "transformers has a class for, or remove auto_map if it has one for this model"
        )
    return config


def load_transformers_config(folder: Path, *, key: str, description: str) -> Any:
    """Return the configuration of a folder as transformers reads it, with the defaults that the file leaves out.

    `description` names the expected model in errors, such as "text encoder".
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise EnvironmentProblem(f"{key}: {description} needs transformers; pip install 'bottega[hub]'") from error
    read_config_without_code(folder / "config.json", key=key)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the libraries raise classes of their own for a wrong file
        raise UsageError(
            f"{key}: transformers cannot read the configuration of the {description} in {folder}: {first_line(error)}"
        ) from error


@contextmanager
def attribute_errors_to(folder: Path | str, *, key: str | None = None) -> Iterator[None]:
    """Turn any exception raised while a model is built from the files of a folder into a UsageError about that folder.

    Libraries do not validate a configuration; a wrong one fails anywhere, with any class of exception.
    """
    try:
        yield
    except (BottegaError, MemoryError, ImportError):
        raise
    except Exception as error:
        if "memory" in str(error) or type(error).__name__ == "OutOfMemoryError":
            raise
        raise UsageError(
            f"{_format_prefix(key)}{folder}: no model can be built from its files "
            f"({type(error).__name__}: {first_line(error)}); download or export it again"
        ) from error


def require_safetensors(folder: Path, *, key: str | None = None) -> None:
    """Refuse a folder without safetensors, or with a truncated one: the header states how long a file must be."""
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{_format_prefix(key)}{folder} has no *.safetensors, and pickles are never opened; convert the model with "
            "transformers: model.save_pretrained(folder)"
        )
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{_format_prefix(key)}{file} is damaged ({first_line(error)}); download or export it again"
            ) from error


def check_loading_info(folder: Path | str, loading_info: Mapping[str, Any]) -> None:
    """Refuse missing weights and mismatched shapes in the loading info of `from_pretrained`.

    The libraries would initialise these weights at random.
    """
    for problem, names in (
        ("lacks", loading_info["missing_keys"]),
        ("has the wrong shape of", loading_info["mismatched_keys"]),
    ):
        if names:
            first_key = sorted(names, key=str)[0]
            name = (
                f"{first_key[0]} ({list(first_key[1])}, not {list(first_key[2])})"
                if isinstance(first_key, tuple)
                else str(first_key)
            )
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{folder} {problem} {name}{others}; the weights do not match config.json: download or export the model "
                "again"
            )


def _format_prefix(key: str | None) -> str:
    return "" if key is None else f"{key}: "
