"""The same wishes generated with more or less of the personal condition, from the same noise, to measure what
personalisation adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from bottega.core.types import Models
from bottega.tasks.personalize.config import ConditionWeights
from bottega.tasks.personalize.data.condition_tokens import RecordKeywords
from bottega.tasks.personalize.data.records import Record

if TYPE_CHECKING:
    from bottega.tasks.personalize.workload import PersonalizeWorkload

Arm = Literal["none", "keywords", "soft", "both"]
ARMS: tuple[Arm, ...] = get_args(Arm)
"""The wish alone; with keywords of what the user likes; with the trained tokens in their place; with both."""


def generate_arm(
    workload: PersonalizeWorkload,
    models: Models,
    records: Sequence[Record],
    *,
    arm: Arm,
    device: Any,
    seed: int,
    weighting: ConditionWeights | None = None,
    pick: bool = False,
    keywords: Sequence[RecordKeywords] | None = None,
    progress: Any = lambda stage, done, total: None,
    **options: Any,
) -> tuple[np.ndarray, list[RecordKeywords]]:
    """Return images, uint8 (records, height, width, 3), and the keywords used; image n has the same noise in every arm.

    `weighting` weighs all parts of the condition, of which an arm uses its own; None is the first of samples.weightings. With
    `pick`, the arm `both` generates all weightings and picks the best for each user. `keywords` are those of the records, None
    to generate them.
    """
    words = list(keywords) if keywords is not None else workload.keywords(records, models, progress)
    common: dict[str, Any] = {"device": device, "seed": seed, "progress": progress, **options}
    if pick and arm == "both":
        return workload.image_sampler.sample_best(models, records, words, **common)[0], words
    full = weighting if weighting is not None else workload.recipe.samples.weightings[0]
    unused = {"none": ("soft", "keywords"), "keywords": ("soft",)}.get(arm, ())
    weights = full.model_copy(update=dict.fromkeys(unused, 0.0))
    # As in training with keyword dropout: the trained tokens expect an empty text in place of the keywords.
    drop = arm == "soft"
    images = workload.image_sampler.sample_images(models, records, words, weights=weights, drop_keywords=drop, **common)
    return images, words
