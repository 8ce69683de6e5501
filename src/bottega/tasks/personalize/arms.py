"""The same wishes drawn with more or less of what is known of a person, each from the same noise: what personalising adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from bottega.core.types import Models
from bottega.tasks.personalize.config import ConditionWeights
from bottega.tasks.personalize.data.condition_tokens import Said
from bottega.tasks.personalize.data.records import Record

if TYPE_CHECKING:
    from bottega.tasks.personalize.workload import PersonalizeWorkload

Arm = Literal["none", "keywords", "soft", "both"]
ARMS: tuple[Arm, ...] = get_args(Arm)
"""Keywords of the wish alone; with those of what a person likes; with the trained tokens in their place; with both."""


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
    keywords: Sequence[Said] | None = None,
    say: Any = lambda stage, done, total: None,
    **how: Any,
) -> tuple[np.ndarray, list[Said]]:
    """uint8 [n, h, w, 3] and the keywords that were used; picture n begins with the same noise in every arm.

    `weighting` is of all parts, and the recipe's first where nobody says; of it an arm takes its own parts. With `pick` the
    arm of both draws all weightings and takes the best of each person. `keywords` are those of the records, where known.
    """
    said = list(keywords) if keywords is not None else workload.keywords(records, models, say)
    common: dict[str, Any] = {"device": device, "seed": seed, "say": say, **how}
    if pick and arm == "both":
        return workload.image_sampler.sample_best(models, records, said, **common)[0], said
    whole = weighting if weighting is not None else workload.recipe.samples.weightings[0]
    left_out = {"none": ("soft", "keywords"), "keywords": ("soft",)}.get(arm, ())
    weights = whole.model_copy(update=dict.fromkeys(left_out, 0.0))
    # As training does it: the empty text stands where keywords would, which the trained tokens are used to.
    drop = arm == "soft"
    return workload.image_sampler.sample_images(
        models, records, said, weights=weights, drop_keywords=drop, **common
    ), said
