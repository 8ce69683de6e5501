"""Parameters of a model by the parts that a person would name, from the names of the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from bottega.engines.backend import ModelPart

MAX_PARTS, MAX_DEPTH = 12, 4
MAX_SHARE = 0.95
"""A part with a larger share of the parameters tells nothing, so it is shown by its own parts."""


def count_parts(model: str, counts: Mapping[str, int], trainable: Mapping[str, int]) -> list[ModelPart]:
    """Return a model and its parts, from the sizes of all its parameters and of those that are trained."""
    depth = _choose_depth(counts)
    trainable_sizes = _sum_by_part(trainable, depth)
    parts = [
        ModelPart(model, part, size, trainable_sizes.get(part, 0)) for part, size in _sum_by_part(counts, depth).items()
    ]
    return [ModelPart(model, None, sum(counts.values()), sum(trainable.values())), *parts]


def _choose_depth(counts: Mapping[str, int]) -> int:
    """Return how many components of a parameter's name tell its part: more than one if nearly all share the first."""
    for depth in range(1, MAX_DEPTH):
        sizes = _sum_by_part(counts, depth)
        is_last = _sum_by_part(counts, depth + 1) == sizes or len(_sum_by_part(counts, depth + 1)) > MAX_PARTS
        if is_last or max(sizes.values()) <= MAX_SHARE * sum(sizes.values()):
            return depth
    return MAX_DEPTH


def _sum_by_part(counts: Mapping[str, int], depth: int) -> dict[str, int]:
    """Return the sum of the counts by the first `depth` components of each name, up to the number of a block."""
    sizes: dict[str, int] = {}
    for path, size in counts.items():
        module = path.split(".")[:-1] or [path]
        components = itertools.takewhile(lambda component: not component.isdecimal(), module)
        part = ".".join(itertools.islice(components, depth)) or module[0]
        sizes[part] = sizes.get(part, 0) + size
    return sizes
