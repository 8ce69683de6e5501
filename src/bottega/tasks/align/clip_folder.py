"""CLIP models and their tokenizers by the names that recipes use: a run, a folder, or a hub name."""

from __future__ import annotations

from pathlib import Path

from bottega.core.errors import UsageError
from bottega.data.text.captions import CaptionTokenizer
from bottega.models.clip.torch import read_clip_shape
from bottega.models.folders.resolve import resolve_model
from bottega.models.folders.untrusted import require_safetensors

TOKENIZER_FILE = "tokenizer.json"


def resolve_clip_folder(name: str | Path, *, key: str = "model.clip") -> Path:
    """Return the folder of a CLIP; for a run, its export. `key` is the recipe key for error messages."""
    return resolve_model(name, key=key).path.absolute()


def check_clip(folder: Path, *, key: str = "model.clip") -> None:
    """Raise UsageError if the CLIP in a folder cannot be loaded, without loading its weights."""
    read_clip_shape(folder, key=key)
    require_safetensors(folder, key=key)
    load_clip_tokenizer(folder, key=key)


def load_clip_tokenizer(folder: Path, *, key: str = "model.clip") -> CaptionTokenizer:
    """Return the tokenizer of a CLIP folder; it truncates and pads texts to the length of the model."""
    if not (folder / TOKENIZER_FILE).is_file():
        raise UsageError(
            f"{key}: {folder} has no {TOKENIZER_FILE}; AutoTokenizer.from_pretrained(...).save_pretrained(folder) of "
            "transformers writes one"
        )
    return CaptionTokenizer(folder, read_clip_shape(folder, key=key).max_tokens)
