"""From a name in a recipe to the folder of a model: a run, a folder here, or a name of the hub.

Everything that names a model or a part of one comes through `resolve_model`: `model.from`, autoencoders, tokenizers, text
encoders, CLIP, frozen language models, pipelines, teachers; parts of a recipe (needs.NAME) through `resolve_named` of
tasks/needs.py. Of a run the folder is what it has exported. Loads no framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bottega.core.errors import EnvironmentProblem, UsageError, first_line
from bottega.core.rundir import is_run
from bottega.models.folders.hub_access import offline_if_hub_unreachable

CONFIG, INDEX, FINAL = "config.json", "model_index.json", "final"
"""Of one model, of a pipeline of diffusers; where a run's export lies."""
PEFT, OWN_ADAPTER, ADAPTER = "adapter_config.json", "bottega.json", "adapter"
"""Of an adapter of peft, of one of ours; where an export has it."""
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]

Kind = Literal["run", "pipeline", "adapter", "model", "unknown"]
Origin = Literal["part", "run", "folder", "hub"]


@dataclass(frozen=True)
class ModelFolder:
    """Where a model lies, what its folder holds, and what the name was of."""

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
    patterns: Sequence[str] = PATTERNS,
) -> ModelFolder:
    """Return the folder that `name` means; `key` is the key of the recipe that has it, for messages.

    A run must have exported the file `holds` (None: any). A folder is taken as it is. Anything else is asked of the hub, for
    the files that match `patterns`, unless it reads as a path, `is_local` is set, or `missing` says what else to tell.
    """
    place = Path(name).expanduser()
    if is_run(place):
        return resolve_export(place, key=key, required_file=required_file, display_name=str(name))
    if place.is_dir():
        return ModelFolder(place, folder_kind(place), "folder")
    if missing_message is not None:
        raise UsageError(f"{key}: {place} {missing_message}")
    if local_only or is_local_path(str(name)):
        raise UsageError(f"{key}: {name} is not a folder here; correct the path, or put the folder there")
    fetched = _download(str(name), key=key, patterns=patterns)
    return ModelFolder(fetched, folder_kind(fetched), "hub")


def resolve_export(
    run: Path, *, key: str, required_file: str | None = CONFIG, display_name: str | None = None, origin: Origin = "run"
) -> ModelFolder:
    """What a run has exported; `shown` is the run as a person named it."""
    final = run / FINAL
    if required_file is not None and not (final / required_file).is_file():
        raise not_exported_error(display_name or run, key=key)
    return ModelFolder(final, folder_kind(final), origin)


def folder_kind(folder: Path) -> Kind:
    """Tell what a folder holds by the files in it. A pipeline of ours has a config.json too, and is a pipeline."""
    if is_run(folder):
        return "run"
    if (folder / INDEX).is_file():
        return "pipeline"
    if (folder / PEFT).is_file():
        return "adapter"
    if (folder / CONFIG).is_file():
        return "model"
    return "adapter" if find_own_adapter(folder) is not None else "unknown"


def find_own_adapter(folder: Path) -> Path | None:
    """The adapter of ours in a folder: itself, or what an export has beside."""
    return next((one for one in (folder, folder / ADAPTER) if (one / OWN_ADAPTER).is_file()), None)


def find_component_folder(folder: Path, part: str) -> Path:
    """The part of a pipeline, such as vae or text_encoder, where the folder has it; else the folder, which may be one."""
    return folder / part if (folder / part / CONFIG).is_file() else folder


def require_config(folder: Path, *, key: str, what: str) -> None:
    """Refuse a folder without the configuration of a model."""
    if not (folder / CONFIG).is_file():
        raise UsageError(f"{key}: {folder} has no {CONFIG}; give the folder of a saved {what}")


def not_exported_error(run: str | Path, *, key: str) -> UsageError:
    return UsageError(f"{key}: {run} is a run that was not exported; say bottega export {run} first")


def is_local_path(name: str) -> bool:
    """Whether a name is a path and not owner/model: by how it begins, by more than one slash, or because the folder before
    the slash is here. A path is never asked of the network: that would be told what our folders are called, and might have
    something else under the name."""
    begins = name.startswith((".", "/", "~", "runs/"))
    return begins or name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def _download(name: str, *, key: str, patterns: Sequence[str]) -> Path:
    """The snapshot of a hub name, without anything that could run code."""
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
            f"{key}: {name} is not a folder here, and the hub needs a package; pip install 'bottega[hub]'"
        ) from error
    try:
        with offline_if_hub_unreachable() as silence:
            return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise UsageError(f"{key}: {name!r} is neither a folder here nor a hub name such as Qwen/Qwen3-0.6B") from error
    except GatedRepoError as error:  # a kind of the next one
        raise UsageError(
            f"{key}: {name} is given only to those who agree to its terms; do so on its page on the hub and log in, or "
            "name a folder that has it"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{key}: {name} is not a folder here, and the hub shows no such model; correct it, or log in if it is private"
        ) from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        why = silence or "the hub could not be reached"
        raise EnvironmentProblem(
            f"{key}: {name} is not a folder here, and {why}; correct the path, or check the network and try again"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = first_line(error)
        raise EnvironmentProblem(
            f"{key}: {name} is not a folder here, and could not be downloaded ({reason}); try again"
        ) from error


def resolve_tokenizer(name: str) -> Path:
    """The tokenizer.json or the folder that `data.tokenizer.path` names; of the hub these files alone are fetched."""
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "/", "~")):
        return path
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise EnvironmentProblem(
            f"tokenizer {name!r} is not a folder here, and huggingface_hub is not installed"
        ) from error
    with offline_if_hub_unreachable() as silence:
        try:
            path = Path(hf_hub_download(name, "tokenizer.json"))
        except (OSError, ValueError) as error:
            reason = silence or str(error).strip().split("\n")[0]
            raise EnvironmentProblem(
                f"tokenizer {name!r} is neither a folder here nor can it be fetched from the hub: {reason}"
            ) from error
        try:
            hf_hub_download(name, "tokenizer_config.json")
        except (EntryNotFoundError, OSError):
            pass  # optional: it only says which token ends a text
    return path.parent
