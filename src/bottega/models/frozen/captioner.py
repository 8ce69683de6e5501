"""What pictures show, in words: a captioning model of transformers from a local folder, without code of the folder's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.models.folders.tokenizer_limits import check_tokenizer
from bottega.models.folders.transformers_loader import quiet_logging
from bottega.models.folders.untrusted import read_config_without_code, require_safetensors

KEY = "data.captions"
KINDS = ("blip", "blip-2", "git", "vision-encoder-decoder")
"""Those that caption without being asked a question. One that must be asked would caption the question too."""
MAX_TOKENS = 40


def load_captioner(folder: Path) -> Callable[[Sequence[np.ndarray]], list[str]]:
    """A function of pictures, uint8 [h, w, 3] of any size. The same picture always has the same caption: nothing is drawn."""
    _check(folder)
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentProblem(
            f"{KEY}: captioning models need transformers, which is not installed: pip install 'bottega[hub]'"
        ) from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet_logging(transformers):
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, **options
            )
            look = transformers.AutoImageProcessor.from_pretrained(folder, **options)
            words: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # libraries raise what happens where a file is wrong
        raise CheckpointError(f"{KEY}: {folder} cannot be loaded as a captioning model: {first_line(error)}") from error
    model = model.eval().requires_grad_(False).to(device)
    silence = words.eos_token_id if words.pad_token_id is None else words.pad_token_id
    begins = getattr(model.config.get_text_config(), "bos_token_id", None)
    first = silence if begins is None else begins

    def describe(pictures: Sequence[np.ndarray]) -> list[str]:
        from PIL import Image

        images = [Image.fromarray(picture) for picture in pictures]
        pixels = look(images=images, return_tensors="pt")["pixel_values"].to(device)
        with torch.no_grad(), quiet_logging(transformers):
            ids = model.generate(pixel_values=pixels, max_new_tokens=MAX_TOKENS, do_sample=False, num_beams=1)
        # BLIP begins with a token that its tokenizer does not count among the special ones.
        ids = ids.masked_fill(ids == first, silence)
        return [text.strip() for text in words.batch_decode(ids, skip_special_tokens=True)]

    return describe


def _check(folder: Path) -> None:
    kind = read_config_without_code(folder / "config.json", key=KEY).get("model_type")
    if kind not in KINDS:
        raise UsageError(f"{KEY}: {folder} is of the kind {kind}; captions come from {', '.join(KINDS)}")
    require_safetensors(folder, key=KEY)
    check_tokenizer(folder)
