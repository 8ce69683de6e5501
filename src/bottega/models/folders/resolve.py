"""Resolves the name of a model in a recipe to a folder: a run's export, a local folder, or a download from the hub.

Every key that names a model goes through `resolve_model`: `model.from`, autoencoders, tokenizers, text encoders, CLIP,
frozen language models, pipelines, teachers. Imports no framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bottega.core.errors import EnvironmentProblem, UsageError, first_line
from bottega.core.rundir import is_run
from bottega.models.folders.hub_access import offline_if_hub_unreachable

CONFIG, MODEL_INDEX, FINAL = "config.json", "model_index.json", "final"
"""Files that identify a model and a diffusers pipeline; the folder of a run's export."""
PEFT_CONFIG, OWN_ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "bottega.json", "adapter"
"""Files that identify an adapter of peft and one of ours; the folder of an export's adapter."""
DOWNLOAD_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

Kind = Literal["run", "pipeline", "adapter", "model", "unknown"]
Origin = Literal["dependency", "run", "folder", "hub"]
"""Where a model came from: a run that the recipe lists under `needs`, another run, a local folder, or the hub."""


@dataclass(frozen=True)
class ModelFolder:
    """A resolved model: its folder, what the folder holds, and where it came from."""

    path: Path
    kind: Kind
    origin: Origin


def resolve_model(
    name: str | Path,
    *,
    key: str,
    required_file: str | None = CONFIG,
    missing_message: str | None = None,
    local_only: bool = False,
    patterns: Sequence[str] = DOWNLOAD_PATTERNS,
) -> ModelFolder:
    """Return the folder that `name` refers to; `key` is the recipe key, for errors.

    A run must have exported `required_file` (None: any export). A local folder is returned unchecked. Any other name is
    downloaded from the hub, limited to files that match `patterns`, unless it looks like a path, `local_only` is set, or
    `missing_message` gives the error for a missing folder.
    """
    path = Path(name).expanduser()
    if is_run(path):
        return resolve_export(path, key=key, required_file=required_file, display_name=str(name))
    if path.is_dir():
        return ModelFolder(path, detect_folder_kind(path), "folder")
    if missing_message is not None:
        raise UsageError(f"{key}: {path} {missing_message}")
    if local_only or is_local_path(str(name)):
        raise UsageError(f"{key}: {name} is not a local folder; correct the path")
    snapshot = _download(str(name), key=key, patterns=patterns)
    return ModelFolder(snapshot, detect_folder_kind(snapshot), "hub")


def resolve_export(
    run: Path, *, key: str, required_file: str | None = CONFIG, display_name: str | None = None, origin: Origin = "run"
) -> ModelFolder:
    """Return the export of a run; `display_name` is the run as the user named it."""
    final = run / FINAL
    if required_file is not None and not (final / required_file).is_file():
        raise not_exported_error(display_name or run, key=key)
    return ModelFolder(final, detect_folder_kind(final), origin)


def detect_folder_kind(folder: Path) -> Kind:
    """Return what a folder holds, by the files in it; with model_index.json it is a pipeline even if it has a config.json."""
    if is_run(folder):
        return "run"
    if (folder / MODEL_INDEX).is_file():
        return "pipeline"
    if (folder / PEFT_CONFIG).is_file():
        return "adapter"
    if (folder / CONFIG).is_file():
        return "model"
    return "adapter" if find_own_adapter(folder) is not None else "unknown"


def find_own_adapter(folder: Path) -> Path | None:
    """Return the folder of our adapter format: the folder itself or its `adapter/`; None if neither has one."""
    return next((path for path in (folder, folder / ADAPTER) if (path / OWN_ADAPTER_CONFIG).is_file()), None)


def find_component_folder(folder: Path, component: str) -> Path:
    """Return the folder of a pipeline's component, such as vae; `folder` itself if it has no such component."""
    return folder / component if (folder / component / CONFIG).is_file() else folder


def require_config(folder: Path, *, key: str, description: str) -> None:
    """Raise `UsageError` if a folder has no config.json."""
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{key}: {folder} has no {CONFIG}; give the folder of a saved {description}")


def not_exported_error(run: str | Path, *, key: str) -> UsageError:
    """Return the error for a run without an export."""
    return UsageError(f"{key}: {run} is a run that was not exported; run bottega export {run} first")


def is_local_path(name: str) -> bool:
    """Return whether a name is a path rather than owner/model on the hub.

    A name is a path if it starts like one, has more than one slash, or if the folder before its slash exists. Paths are never
    looked up on the hub: the lookup would reveal local folder names, and could find another model of the same name.
    """
    has_path_prefix = name.startswith((".", "/", "~", "runs/"))
    return has_path_prefix or name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def _download(name: str, *, key: str, patterns: Sequence[str]) -> Path:
    """Download the files of a hub model that match `patterns`; none of them can run code."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise EnvironmentProblem(
            f"{key}: {name} is not a local folder, and the hub needs huggingface_hub; pip install 'bottega[hub]'"
        ) from error
    try:
        with offline_if_hub_unreachable() as unreachable_reason:
            return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise UsageError(f"{key}: {name!r} is neither a local folder nor a hub name such as Qwen/Qwen3-0.6B") from error
    except GatedRepoError as error:  # a subclass of RepositoryNotFoundError
        raise UsageError(
            f"{key}: {name} is a gated model; accept its terms on its page on the hub and log in, or use a local folder"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{key}: {name} is not a local folder, and the hub has no such model; correct it, or log in if it is private"
        ) from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        problem = unreachable_reason or "the hub could not be reached"
        raise EnvironmentProblem(
            f"{key}: {name} is not a local folder, and {problem}; correct the path, or check the network and try again"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = first_line(error)
        raise EnvironmentProblem(
            f"{key}: {name} is not a local folder, and could not be downloaded ({reason}); try again"
        ) from error


def resolve_tokenizer(name: str) -> Path:
    """Return the tokenizer.json or folder that `data.tokenizer.path` names; a hub name downloads the tokenizer's files only."""
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")):
        return path
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise EnvironmentProblem(
            f"tokenizer {name!r} is not a local folder, and the hub needs huggingface_hub; pip install 'bottega[hub]'"
        ) from error
    with offline_if_hub_unreachable() as unreachable_reason:
        try:
            path = Path(hf_hub_download(name, "tokenizer.json"))
        except (OSError, ValueError) as error:
            reason = unreachable_reason or str(error).strip().split("\n")[0]
            raise EnvironmentProblem(
                f"tokenizer {name!r} is neither a local folder nor on the hub: {reason}; "
                "correct the name, or check the network"
            ) from error
        try:
            hf_hub_download(name, "tokenizer_config.json")
        except (EntryNotFoundError, OSError):
            pass  # optional: only the end-of-text token is read from it
    return path.parent
