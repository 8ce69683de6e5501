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
"""The condition of each arm: the wish alone; the wish and keywords of what the user likes; the wish and the trained tokens;
the wish, the keywords and the trained tokens."""


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

    `weighting` has a weight for every part of the condition; the weights of parts that the arm leaves out are set to 0. None
    is the first of samples.weightings. With `pick`, the arm `both` generates all weightings and picks the best for each user.
    `keywords` are the keywords of the records; None generates them.
    """
    record_keywords = list(keywords) if keywords is not None else workload.generate_keywords(records, models, progress)
    common_options: dict[str, Any] = {"device": device, "seed": seed, "progress": progress, **options}
    if pick and arm == "both":
        images, *_ = workload.image_sampler.sample_best(models, records, record_keywords, **common_options)
        return images, record_keywords
    all_weights = weighting if weighting is not None else workload.recipe.samples.weightings[0]
    unused_parts = {"none": ("soft", "keywords"), "keywords": ("soft",)}.get(arm, ())
    weights = all_weights.model_copy(update=dict.fromkeys(unused_parts, 0.0))
    # As in training with keyword dropout: beside the trained tokens, an empty text takes the place of the keywords.
    drop_keywords = arm == "soft"
    images = workload.image_sampler.sample_images(
        models, records, record_keywords, weights=weights, drop_keywords=drop_keywords, **common_options
    )
    return images, record_keywords
