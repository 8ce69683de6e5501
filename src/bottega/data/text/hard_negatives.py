"""Hard negatives: captions that differ from each other in one word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np


@final
class HardNegativeSampler:
    """Draws captions that differ from a given caption in exactly one word.

    A group is all captions that agree in every word but the one at a given position. The captions are distinct, so a group
    holds each at most once. An entry is one position of one caption at which its group has other captions.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        group_indices: dict[tuple[str, ...], int] = {}
        caption_list: list[int] = []
        group_list: list[int] = []
        for number, text in enumerate(texts):
            words = text.lower().split()
            for position in range(len(words)):
                words_around = (*words[:position], "", *words[position + 1 :])
                caption_list.append(number)
                group_list.append(group_indices.setdefault(words_around, len(group_indices)))
        caption, group = np.array(caption_list, np.int64), np.array(group_list, np.int64)
        sizes = np.bincount(group, minlength=len(group_indices))
        order = np.argsort(group, kind="stable")
        self.members = caption[order]
        """The captions of all groups, group by group."""
        starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
        rank = np.empty(len(group), np.int64)
        rank[order] = np.arange(len(group)) - starts[group[order]]
        entries = np.flatnonzero(sizes[group] > 1)
        self.group_start, self.group_size = starts[group[entries]], sizes[group[entries]]
        """For each entry, where its group starts in `members`, and the number of captions in the group."""
        self.rank = rank[entries]
        """For each entry, the index of its caption within the group."""
        self.num_entries = np.bincount(caption[entries], minlength=len(texts))
        """For each caption, the number of word positions at which it has hard negatives."""
        self.first_entry = np.concatenate([[0], np.cumsum(self.num_entries)])[:-1]

    def sample(self, captions: np.ndarray, position_draw: np.ndarray, word_draw: np.ndarray) -> np.ndarray:
        """Return the index of a hard negative for each caption index in `captions`.

        `position_draw` and `word_draw` are random 32-bit integers: one chooses the position of the word that differs, the
        other a caption that differs there. A caption without a hard negative is returned unchanged.
        """
        if not len(self.group_start):
            return captions
        num_entries = self.num_entries[captions]
        entry = self.first_entry[captions] + position_draw % np.maximum(num_entries, 1)
        entry = np.minimum(entry, len(self.group_start) - 1)
        rank = word_draw % (self.group_size[entry] - 1)
        rank += rank >= self.rank[entry]
        return np.where(num_entries > 0, self.members[self.group_start[entry] + rank], captions)
