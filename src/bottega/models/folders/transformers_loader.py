"""An encoder of transformers out of a local folder: safetensors only, no code of the folder's own, and without chatter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.core.errors import CheckpointError, first_line
from bottega.models.folders.untrusted import require_safetensors


def load_encoder(kind: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The model in float32 by a class of transformers, and what transformers says of missing and mismatched weights."""
    require_safetensors(folder)
    import torch
    import transformers

    try:
        with quiet_logging(transformers):
            return kind.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be loaded as a text encoder: {first_line(error)}") from error


@contextmanager
def quiet_logging(transformers: Any) -> Iterator[None]:
    """Without bars, and without a table of the weights that half a model has no use for."""
    logging = transformers.utils.logging
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


@contextmanager
def isolated_rng() -> Iterator[None]:
    """transformers draws initial values from torch's global generator; they are all overwritten, so nobody notices."""
    import torch

    with torch.random.fork_rng(devices=[]):
        yield
