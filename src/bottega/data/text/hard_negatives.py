"""Hard negatives: captions that differ from each other in one word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np


@final
class HardNegativeSampler:
    """Draws, for each of some distinct captions, others that differ in exactly one word.

    A group is all captions with the same words around one gap, and holds each at most once, because they are distinct.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        groups: dict[tuple[str, ...], int] = {}
        owner: list[int] = []
        group: list[int] = []
        for number, text in enumerate(texts):
            words = text.lower().split()
            for position in range(len(words)):
                gapped = (*words[:position], "", *words[position + 1 :])
                owner.append(number)
                group.append(groups.setdefault(gapped, len(groups)))
        owners, group_of = np.array(owner, np.int64), np.array(group, np.int64)
        sizes = np.bincount(group_of, minlength=len(groups))
        order = np.argsort(group_of, kind="stable")
        self.members = owners[order]
        starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        rank = np.empty(len(group_of), np.int64)
        rank[order] = np.arange(len(group_of)) - starts[group_of[order]]
        shared = np.flatnonzero(sizes[group_of] > 1)
        self.start, self.size, self.rank = starts[group_of[shared]], sizes[group_of[shared]], rank[shared]
        self.count = np.bincount(owners[shared], minlength=len(texts))
        """For each caption, the number of word positions at which another caption differs alone."""
        self.first = np.concatenate([[0], np.cumsum(self.count)])[:-1]

    def sample(self, captions: np.ndarray, word: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Return a hard negative for each of `captions`, by two 32-bit draws: the position, and the other word.

        A caption without a hard negative is returned unchanged.
        """
        if not len(self.start):
            return captions
        count = self.count[captions]
        at = np.minimum(self.first[captions] + word % np.maximum(count, 1), len(self.start) - 1)
        chosen = other % (self.size[at] - 1)
        chosen += chosen >= self.rank[at]
        return np.where(count > 0, self.members[self.start[at] + chosen], captions)
