"""Text augmentation for classifiers: replace, insert, swap or delete words (EDA; Wei and Zou, 2019).

A word is text between white space, without the punctuation at its edges; so a text in a script without spaces is one
word and is not changed. All changes affect different words of the original, so that the requested fraction is exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

import numpy as np

from bottega.core.noise import numpy_generator
from bottega.data.text.synonyms import find_synonyms

# White space and punctuation, as a list, because "not a letter" would include vowel signs of Hindi and emoji.
_EDGE_CHARACTERS = (
    r"\s!-/:-@\[-`{-~\u00a1-\u00bf\u2010-\u2027\u2030-\u205e\u3001-\u3003\u3008-\u301f\uff01-\uff0f\uff1a-\uff20"
)
_WORD = re.compile(rf"[^{_EDGE_CHARACTERS}](?:\S*[^{_EDGE_CHARACTERS}])?")


def make_augmented_copies(
    text: str, *, factor: int, techniques: Sequence[str], probability: float, seed: int, key: str | int
) -> list[str]:
    """Return `factor` augmented copies of a text, each a function of (seed, key, its number).

    A copy of a text of two different words or more differs from it, even if the fraction is less than one word. The copies
    equal the text if synonym_replacement is the only technique and no word has a synonym.
    """
    copies = []
    for number in range(factor):
        rng = numpy_generator(seed, "text-augmentation", key, number)
        copy = augment_text(text, techniques=techniques, probability=probability, rng=rng)
        if copy == text and probability > 0:
            copy = _change_words(text, techniques, 0.0, rng, min_changes=1)
        copies.append(copy)
    return copies


def augment_text(text: str, *, techniques: Sequence[str], probability: float, rng: np.random.Generator) -> str:
    """Return the text with a fraction `probability` of its words changed, on average exactly, by random techniques.

    An inserted word is one change, two swapped words are two. Changes that a technique cannot make (no synonym, only one word
    left) go to the other techniques; if none can, fewer words change.
    """
    return _change_words(text, techniques, probability, rng, min_changes=0)


def _change_words(
    text: str, techniques: Sequence[str], probability: float, rng: np.random.Generator, *, min_changes: int
) -> str:
    matches = list(_WORD.finditer(text))
    num_remaining = max(_round_randomly(probability * len(matches), rng), min_changes)
    if not matches or not num_remaining or not techniques:
        return text
    words = _Words(text, matches, rng)
    # In this order, because changes that one technique cannot make go to the next, and insertion can make any number.
    technique_functions = [
        ("synonym_replacement", words.replace),
        ("random_swap", lambda count: words.swap(count, round_up=min_changes > 0)),
        ("random_deletion", words.delete),
        ("random_insertion", words.insert),
    ]
    functions = [function for name, function in technique_functions if name in techniques]
    for number, function in enumerate(functions):
        num_changes = (
            num_remaining
            if number == len(functions) - 1
            else int(rng.binomial(num_remaining, 1 / (len(functions) - number)))
        )
        num_remaining -= num_changes - function(num_changes)
    return words.join()


def _round_randomly(value: float, rng: np.random.Generator) -> int:
    """Round randomly to an integer whose mean is the value."""
    floor = int(value)
    return floor + int(rng.random() < value - floor)


@final
class _Words:
    """The words of a text and the separators around them; the four techniques return how many changes they could not make."""

    def __init__(self, text: str, matches: list[re.Match[str]], rng: np.random.Generator) -> None:
        self.words: list[str | None] = [match[0] for match in matches]
        edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
        self.separators = [text[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        self.inserted: dict[int, list[str]] = {}
        self.original = [match[0] for match in matches]
        self.rng = rng
        self.free_positions = rng.permutation(len(matches)).tolist()

    def replace(self, count: int) -> int:
        candidates = [position for position in self.free_positions if find_synonyms(self.original[position])][:count]
        for position in candidates:
            self.words[position] = self._choose(find_synonyms(self.original[position]))
        self._mark_used(candidates)
        return count - len(candidates)

    def swap(self, count: int, *, round_up: bool) -> int:
        """Swap pairs of words, two changes each; if `count` is odd, its last change becomes a swap half of the time."""
        num_pairs = count // 2 + (count % 2 and int(round_up or self.rng.random() < 0.5))
        swapped_positions: list[int] = []
        # Positions of one and the same word, because swapping two equal words would change nothing.
        unpaired_positions: list[int] = []
        for position in self.free_positions:
            if len(swapped_positions) >= 2 * num_pairs:
                break
            if unpaired_positions and self.original[position] != self.original[unpaired_positions[-1]]:
                partner = unpaired_positions.pop()
                self.words[position], self.words[partner] = self.original[partner], self.original[position]
                swapped_positions += [position, partner]
            else:
                unpaired_positions.append(position)
        self._mark_used(swapped_positions)
        return count - len(swapped_positions) if len(swapped_positions) < 2 * num_pairs else 0

    def delete(self, count: int) -> int:
        deleted_positions = self.free_positions[: min(count, len(self.words) - 1)]
        for position in sorted(deleted_positions):
            self.words[position] = None
            self._remove_space(position)
        self._mark_used(deleted_positions)
        return count - len(deleted_positions)

    def insert(self, count: int) -> int:
        candidates = [word for word in self.original if find_synonyms(word.lower())] if count else []
        # Beside a deleted word there may be no white space left.
        positions = [position for position, word in enumerate(self.words) if word is not None]
        for _ in range(count):
            word = (
                self._choose(find_synonyms(self._choose(candidates).lower()))
                if candidates
                else self._choose(self.original)
            )
            self.inserted.setdefault(positions[int(self.rng.integers(len(positions)))], []).append(word)
        return 0

    def join(self) -> str:
        pieces = [self.separators[0]]
        for position, word in enumerate(self.words):
            if word is not None:
                pieces.append(" ".join([word, *self.inserted.get(position, ())]))
            pieces.append(self.separators[position + 1])
        return "".join(pieces)

    def _remove_space(self, position: int) -> None:
        """Remove one of the white spaces beside a deleted word, preferably not a line or paragraph break."""
        separator_before, separator_after = self.separators[position], self.separators[position + 1]
        left_space = separator_before[len(separator_before.rstrip()) :]
        right_space = separator_after[: len(separator_after) - len(separator_after.lstrip())]
        if left_space and (not right_space or left_space.count("\n") <= right_space.count("\n")):
            self.separators[position] = separator_before.rstrip()
        elif right_space:
            self.separators[position + 1] = separator_after.lstrip()

    def _mark_used(self, positions: list[int]) -> None:
        used = set(positions)
        self.free_positions = [position for position in self.free_positions if position not in used]

    def _choose(self, words: Sequence[str]) -> str:
        return words[int(self.rng.integers(len(words)))]
