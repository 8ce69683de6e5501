"""Image captioning with a model of transformers from a local folder; no code of the folder is run."""

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
MODEL_TYPES = ("blip", "blip-2", "git", "vision-encoder-decoder")
"""Model types that caption without a text prompt; the others would repeat the prompt in the caption."""
MAX_TOKENS = 40


def load_captioner(folder: Path) -> Callable[[Sequence[np.ndarray]], list[str]]:
    """Return a function from images, uint8 (height, width, 3) of any size, to captions. Decoding is greedy."""
    _check_folder(folder)
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentProblem(f"{KEY}: captioning models need transformers; pip install 'bottega[hub]'") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet_logging():
            model = transformers.AutoModelForImageTextToText.from_pretrained(
                folder, use_safetensors=True, dtype=torch.float32, **options
            )
            image_processor = transformers.AutoImageProcessor.from_pretrained(folder, **options)
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # libraries raise any class if a file is wrong
        raise CheckpointError(f"{KEY}: {folder} cannot be loaded as a captioning model: {first_line(error)}") from error
    model = model.eval().requires_grad_(False).to(device)
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    bos_token = getattr(model.config.get_text_config(), "bos_token_id", None)
    start_token = padding if bos_token is None else bos_token

    def caption_images(images: Sequence[np.ndarray]) -> list[str]:
        from PIL import Image

        inputs = [Image.fromarray(image) for image in images]
        pixels = image_processor(images=inputs, return_tensors="pt")["pixel_values"].to(device)
        with torch.no_grad(), quiet_logging():
            ids = model.generate(pixel_values=pixels, max_new_tokens=MAX_TOKENS, do_sample=False, num_beams=1)
        # BLIP starts with a token that its tokenizer does not list as special.
        ids = ids.masked_fill(ids == start_token, padding)
        return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    return caption_images


def _check_folder(folder: Path) -> None:
    model_type = read_config_without_code(folder / "config.json", key=KEY).get("model_type")
    if model_type not in MODEL_TYPES:
        raise UsageError(
            f"{KEY}: {folder} contains a {model_type}; supported captioning models are {', '.join(MODEL_TYPES)}"
        )
    require_safetensors(folder, key=KEY)
    check_tokenizer(folder)
