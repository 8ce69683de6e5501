"""`bottega.augment`: one sample changed as training would change it, to look at or to use elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import ValidationError

from bottega.config.section import Section
from bottega.core.errors import UsageError


def augment(
    sample: str | np.ndarray, *, rate: int | None = None, seed: int = 0, epoch: int = 0, index: int = 0, **options: Any
) -> Any:
    """Return a changed copy of a sample; `options` are the keys of `data.augmentation` of its medium.

    A text gives a list of `augmentation_factor` texts. An image uint8 [h, w, c], the frames uint8 [f, h, w, c] of a video,
    all changed alike, and a sound float32 [samples] at `rate` give an array of the same shape. The result is a function of
    the sample, `seed`, `epoch` and `index`.
    """
    if isinstance(sample, str):
        from bottega.data.text.augment import make_augmented_copies
        from bottega.data.text.config import TextAugmentation

        text = _options(TextAugmentation, options)
        return make_augmented_copies(
            sample,
            factor=text.augmentation_factor,
            techniques=text.techniques,
            probability=text.probability,
            seed=seed,
            key=index,
        )
    pixels = np.asarray(sample)
    if pixels.dtype == np.uint8 and pixels.ndim in (3, 4):
        from bottega.data.image.augment import augment_images as augment_images
        from bottega.data.image.config import ImageAugmentation

        image = _options(ImageAugmentation, options)
        at, number = np.array([epoch]), np.array([index])
        return augment_images(pixels[None].copy(), image, seed=seed, epoch=at, index=number)[0]
    if pixels.dtype.kind == "f" and pixels.ndim == 1:
        from bottega.data.audio.augment import augment_audio as augment_sound
        from bottega.data.audio.config import AudioAugmentation

        sound = _options(AudioAugmentation, options)
        if sound.frequency_mask and rate is None:
            raise UsageError("rate: missing; frequency_mask needs the samples a second of the sound")
        return augment_sound(pixels.astype(np.float32), sound, rate=rate or 0, random_key=(seed, epoch, index))
    raise UsageError(
        f"an array {pixels.dtype} {list(pixels.shape)} is not a sample that can be augmented: expected a text, an image "
        "uint8 [h, w, c], frames uint8 [f, h, w, c] or a sound float32 [samples]"
    )


def _options(schema: Any, values: dict[str, Any]) -> Any:
    assert issubclass(schema, Section)
    try:
        return schema(**values)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(map(str, detail["loc"]))
        known = ", ".join(schema.model_fields)
        raise UsageError(f"{key}: {detail['msg']}; options of this medium are {known}") from None
