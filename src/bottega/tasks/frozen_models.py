"""Frozen models that a run is built on, identified by a hash of their files, so that a changed one is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bottega.core.errors import BottegaError, CheckpointError
from bottega.data.formats.fingerprint import hash_files

CONFIG_FILE, MEL_FILE = "config.json", "mel.json"
CONFIG_FILES = (CONFIG_FILE, MEL_FILE)
BASE = "base"
"""The frozen base model under injected layers; its hash is over tensors rather than files."""
RECIPE_KEYS = {
    BASE: "model.from",
    "teacher": "techniques.distill.teacher",
    "autoencoder": "model.vae",
    "tokenizer": "model.tokenizer",
    "text encoder": "model.text.from",
    "caption tokenizer": "model.text.from",
    "language model": "model.language_model",
    "language model's tokenizer": "model.language_model",
    "CLIP": "model.clip",
    **{
        f"image generator's {part}": "model.diffusion"
        for part in (
            "unet",
            "transformer",
            "vae",
            "text_encoder",
            "text_encoder_2",
            "text_encoder_3",
            "tokens and schedule",
        )
    },
}
"""Kind of frozen model -> the recipe key that names it."""


def hash_model_folder(folder: Path) -> str:
    """Return a hash of the configuration and weights of the model in a folder."""
    mel = folder / MEL_FILE
    configs = [folder / CONFIG_FILE, *([mel] if mel.is_file() else [])]
    return hash_named_files([*configs, *sorted(folder.glob("*.safetensors"))])


def hash_named_files(files: Iterable[Path]) -> str:
    """Return a hash of the names and contents of files; their folders do not matter."""
    files = list(files)
    hashes = [(file.name, digest) for file, digest in zip(files, hash_files(files), strict=True)]
    return hashlib.sha256(repr(hashes).encode()).hexdigest()


def collect_frozen_hashes(*, latents: Any, code_tokenizer: Any, text: Any) -> dict[str, str]:
    """Return the hashes of a generator's frozen models by the names of `RECIPE_KEYS`.

    `latents` is the metadata of the autoencoder, `text` the text condition; each is None if the generator has none.
    """
    hashes = {
        "autoencoder": latents.content if latents is not None else None,
        "tokenizer": code_tokenizer.metadata.content if code_tokenizer is not None else None,
        "text encoder": text.metadata.content if text is not None else None,
    }
    if hashes["text encoder"] is not None:
        hashes["caption tokenizer"] = (
            text.caption_tokenizer.fingerprint
        )  # its folder may differ from that of the encoder
    return {name: content for name, content in hashes.items() if content is not None}


class FrozenModelMissing(CheckpointError):
    """No candidate folder contains the frozen model."""


def check_same_model(
    kind: str, *, current_hash: str | None, recorded_hash: str | None, name: str, recorded: str
) -> None:
    """Raise CheckpointError if a resumed run would use another frozen model than it started with.

    In the message, `name` stands for the model that the run would use now, and `recorded` for the one it started with.
    """
    if current_hash != recorded_hash:
        raise CheckpointError(
            f"{name} is not the {kind} that this run started with ({recorded}); restore it, or start over with --fresh"
        )


def find_frozen_model(
    kind: str,
    expected_hash: str | None,
    candidates: Iterable[Callable[[], Path]],
    *,
    recorded_folder: str,
    owner: Path | None = None,
    hash_folder: Callable[[Path], str] = hash_model_folder,
) -> Path:
    """Return the first of `candidates` whose model has the hash `expected_hash`; raise CheckpointError if none has.

    `recorded_folder` is the folder at training time, for the message. `owner` is the run that has the model as a dependency, and so
    can train it again. `hash_folder` computes the hash of a folder.
    """
    checked_folders: list[Path] = []
    mismatched: Path | None = None
    for find_folder in candidates:
        try:
            folder = find_folder()
            checked_folders.append(folder)
            digest = hash_folder(folder)
        except BottegaError:
            continue
        if digest == expected_hash:
            return folder
        mismatched = mismatched or folder
    for folder in (old for path in checked_folders for old in _list_previous_runs(path)):
        try:
            if hash_folder(folder) == expected_hash:
                return folder
        except BottegaError:
            continue  # incomplete
    if mismatched is not None:
        raise CheckpointError(f"{mismatched} is not the {kind} that this run was trained with; restore it")
    remedy = f"bottega train {owner / 'recipe.yaml'} trains it again" if owner is not None else "restore it"
    raise FrozenModelMissing(f"the {kind} of this run no longer exists: {recorded_folder}; {remedy}")


def _list_previous_runs(folder: Path) -> list[Path]:
    """Return the same folder in older runs: a dependency trained again for other data leaves them as NAME.1, NAME.2."""
    run = folder.parent
    candidates = run.parent.glob(f"{run.name}.*/{folder.name}")
    return sorted(
        old for old in candidates if any((old / name).is_file() for name in (CONFIG_FILE, "model_index.json"))
    )
