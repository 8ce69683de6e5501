"""`bottega.augment`: augment one sample as training would."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import ValidationError

from bottega.config.section import Section
from bottega.core.errors import UsageError


def augment(
    sample: str | np.ndarray, *, rate: int | None = None, seed: int = 0, epoch: int = 0, index: int = 0, **options: Any
) -> Any:
    """Return an augmented copy of a sample; `options` are the keys of `data.augmentation` of its medium.

    For a text the result is a list of `augmentation_factor` texts, otherwise an array of the same shape as the sample: an
    image is uint8 `(height, width, channels)`, a video uint8 `(frames, height, width, channels)`, with all frames augmented
    alike, and audio float32 `(samples,)` at the sample rate `rate` in Hz. The result is a function of the
    sample, `seed`, `index` and, except for a text, `epoch`.
    """
    if isinstance(sample, str):
        from bottega.data.text.augment import make_augmented_copies
        from bottega.data.text.config import TextAugmentation

        text_options = _parse_options(TextAugmentation, options)
        return make_augmented_copies(
            sample,
            factor=text_options.augmentation_factor,
            techniques=text_options.techniques,
            probability=text_options.probability,
            seed=seed,
            key=index,
        )
    array = np.asarray(sample)
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        from bottega.data.image.augment import augment_images
        from bottega.data.image.config import ImageAugmentation

        image_options = _parse_options(ImageAugmentation, options)
        epochs, indices = np.array([epoch]), np.array([index])
        return augment_images(array[None].copy(), image_options, seed=seed, epoch=epochs, index=indices)[0]
    if array.dtype.kind == "f" and array.ndim == 1:
        from bottega.data.audio.augment import augment_audio
        from bottega.data.audio.config import AudioAugmentation

        audio_options = _parse_options(AudioAugmentation, options)
        if audio_options.frequency_mask and rate is None:
            raise UsageError("rate is missing; frequency_mask needs the sample rate of the audio")
        return augment_audio(array.astype(np.float32), audio_options, rate=rate or 0, random_key=(seed, epoch, index))
    raise UsageError(
        f"an array of {array.dtype} with shape {array.shape} cannot be augmented; expected a text, an image uint8 "
        "(height, width, channels), a video uint8 (frames, height, width, channels) or audio float32 (samples,)"
    )


def _parse_options(schema: Any, values: dict[str, Any]) -> Any:
    assert issubclass(schema, Section)
    try:
        return schema(**values)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(map(str, detail["loc"]))
        names = ", ".join(schema.model_fields)
        raise UsageError(f"{key}: {detail['msg']}; options of this medium: {names}") from None
