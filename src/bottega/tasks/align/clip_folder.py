"""A CLIP and its tokenizer by the name that a recipe has for them: a run, a folder, or a model of the hub."""

from __future__ import annotations

from pathlib import Path

from bottega.core.errors import UsageError
from bottega.data.text.captions import CaptionTokenizer
from bottega.models.clip.torch import read_clip_shape
from bottega.models.folders.resolve import resolve_model
from bottega.models.folders.untrusted import require_safetensors

TOKENIZER = "tokenizer.json"


def resolve_clip_folder(name: str | Path, *, key: str = "model.clip") -> Path:
    """Where its weights lie; of a run, in what it exported. `key` is who asks."""
    return resolve_model(name, key=key).path.absolute()


def check_clip(folder: Path, *, key: str = "model.clip") -> None:
    """What would keep it from being opened, as far as that is seen without opening it."""
    read_clip_shape(folder, key=key)
    require_safetensors(folder, key=key)
    load_clip_tokens(folder, key=key)


def load_clip_tokens(folder: Path, *, key: str = "model.clip") -> CaptionTokenizer:
    """Texts as rows of tokens, cut and filled up to the length that the model of a folder reads."""
    if not (folder / TOKENIZER).is_file():
        raise UsageError(
            f"{key}: {folder} has no {TOKENIZER}; AutoTokenizer.from_pretrained(...).save_pretrained(folder) of "
            "transformers writes one"
        )
    return CaptionTokenizer(folder, read_clip_shape(folder, key=key).max_tokens)
