"""Frozen models that a run is built on: known by a hash of what they hold, since the run understands no other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bottega.core.errors import BottegaError, CheckpointError
from bottega.data.formats.fingerprint import hash_files

SETTINGS = ("config.json", "mel.json")
BASE = "base"
"""What stays as it is under parts that were put into it; its hash is over tensors rather than files."""
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
"""Where a recipe names each kind."""


def hash_model_folder(folder: Path) -> str:
    """A hash of all that decides what the model of a folder computes."""
    settings = [folder / name for name in SETTINGS if name == SETTINGS[0] or (folder / name).is_file()]
    return hash_named_files([*settings, *sorted(folder.glob("*.safetensors"))])


def hash_named_files(files: Iterable[Path]) -> str:
    """Of their names and what is in them; where they lie does not matter."""
    files = list(files)
    named = [(file.name, found) for file, found in zip(files, hash_files(files), strict=True)]
    return hashlib.sha256(repr(named).encode()).hexdigest()


def collect_frozen_hashes(*, latents: Any, codes: Any, text: Any) -> dict[str, str]:
    """The hashes of what a generator works in, beside or after, under the names of `KEYS`; each may be None."""
    found = {
        "autoencoder": latents.content if latents is not None else None,
        "tokenizer": codes.metadata.content if codes is not None else None,
        "text encoder": text.metadata.content if text is not None else None,
    }
    if found["text encoder"] is not None:
        found["caption tokenizer"] = text.tokens.fingerprint  # which may lie in another folder than the encoder
    return {name: content for name, content in found.items() if content is not None}


class FrozenModelMissing(CheckpointError):
    """No place has the model, nor another one."""


def check_same_model(what: str, *, now: str | None, before: str | None, name: str, previous: str) -> None:
    """A run goes on with the model it began with, or not at all."""
    if now != before:
        raise CheckpointError(
            f"{name}: is another {what} than this run began with ({previous}); put that one back, or start over with --fresh"
        )


def find_frozen_model(
    what: str,
    content: str | None,
    places: Iterable[Callable[[], Path]],
    *,
    recorded: str,
    owner: Path | None = None,
    hash_folder: Callable[[Path], str] = hash_model_folder,
) -> Path:
    """The first of the places with this content; another model is an error only where no place has the right one.

    `known` is where it was. `part_of` is the run that has it as a part, and so can have it made again. `look` tells the
    content of a folder.
    """
    looked: list[Path] = []
    other: Path | None = None
    for place in places:
        try:
            folder = place()
            looked.append(folder)
            found = hash_folder(folder)
        except BottegaError:
            continue
        if found == content:
            return folder
        other = other or folder
    for folder in (old for one in looked for old in _set_aside(one)):
        try:
            if hash_folder(folder) == content:
                return folder
        except BottegaError:
            continue  # half there
    if other is not None:
        raise CheckpointError(f"{other}: is another {what} than this run was trained with; put that one back")
    remedy = f"bottega train {owner / 'recipe.yaml'} makes it again" if owner is not None else "put it back"
    raise FrozenModelMissing(f"the {what} of this run is gone: {recorded}; {remedy}")


def _set_aside(folder: Path) -> list[Path]:
    """The same folder of older runs: a part that is trained anew for other data leaves the old one as NAME.1, NAME.2."""
    run = folder.parent
    found = run.parent.glob(f"{run.name}.*/{folder.name}")
    return sorted(old for old in found if any((old / name).is_file() for name in (SETTINGS[0], "model_index.json")))
