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

# Listed, because "not a letter" would include vowel signs of Hindi and emoji.
_EDGE = r"\s!-/:-@\[-`{-~\u00a1-\u00bf\u2010-\u2027\u2030-\u205e\u3001-\u3003\u3008-\u301f\uff01-\uff0f\uff1a-\uff20"
_WORD = re.compile(rf"[^{_EDGE}](?:\S*[^{_EDGE}])?")


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
            copy = _change_words(text, techniques, 0.0, rng, at_least=1)
        copies.append(copy)
    return copies


def augment_text(text: str, *, techniques: Sequence[str], probability: float, rng: np.random.Generator) -> str:
    """Return the text with a fraction `probability` of its words changed, on average exactly, by random techniques.

    An inserted word is one change, two swapped words are two. Changes that a technique cannot make (no synonym, only one word
    left) go to the other techniques; if none can, fewer words change.
    """
    return _change_words(text, techniques, probability, rng, at_least=0)


def _change_words(
    text: str, techniques: Sequence[str], probability: float, rng: np.random.Generator, *, at_least: int
) -> str:
    matches = list(_WORD.finditer(text))
    remaining = max(_round_randomly(probability * len(matches), rng), at_least)
    if not matches or not remaining or not techniques:
        return text
    words = _Words(text, matches, rng)
    # In this order: changes that one technique cannot make go to the next; insertion always can.
    chain = [
        ("synonym_replacement", words.replace),
        ("random_swap", lambda count: words.swap(count, round_up=at_least > 0)),
        ("random_deletion", words.delete),
        ("random_insertion", words.insert),
    ]
    steps = [step for name, step in chain if name in techniques]
    for number, step in enumerate(steps):
        num_changes = remaining if number == len(steps) - 1 else int(rng.binomial(remaining, 1 / (len(steps) - number)))
        remaining -= num_changes - step(num_changes)
    return words.text()


def _round_randomly(value: float, rng: np.random.Generator) -> int:
    """Round randomly to an integer whose mean is the value."""
    floor = int(value)
    return floor + int(rng.random() < value - floor)


@final
class _Words:
    """The words of a text and the separators between them. Each method returns how many changes it could not make."""

    def __init__(self, text: str, matches: list[re.Match[str]], rng: np.random.Generator) -> None:
        self.words: list[str | None] = [match[0] for match in matches]
        edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
        self.between = [text[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
        self.inserted: dict[int, list[str]] = {}
        self.original = [match[0] for match in matches]
        self.rng = rng
        self.free = rng.permutation(len(matches)).tolist()

    def replace(self, count: int) -> int:
        candidates = [position for position in self.free if find_synonyms(self.original[position])][:count]
        for position in candidates:
            self.words[position] = self._choose(find_synonyms(self.original[position]))
        self._use(candidates)
        return count - len(candidates)

    def swap(self, count: int, *, round_up: bool) -> int:
        """Swap pairs of words, two changes each; an odd change becomes a swap half of the time."""
        pairs = count // 2 + (count % 2 and int(round_up or self.rng.random() < 0.5))
        used: list[int] = []
        held: list[int] = []  # All of one word; a pair of equal words would be no change.
        for position in self.free:
            if len(used) >= 2 * pairs:
                break
            if held and self.original[position] != self.original[held[-1]]:
                other = held.pop()
                self.words[position], self.words[other] = self.original[other], self.original[position]
                used += [position, other]
            else:
                held.append(position)
        self._use(used)
        return count - len(used) if len(used) < 2 * pairs else 0

    def delete(self, count: int) -> int:
        chosen = self.free[: min(count, len(self.words) - 1)]
        for position in sorted(chosen):
            self.words[position] = None
            self._close(position)
        self._use(chosen)
        return count - len(chosen)

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

    def text(self) -> str:
        pieces = [self.between[0]]
        for position, word in enumerate(self.words):
            if word is not None:
                pieces.append(" ".join([word, *self.inserted.get(position, ())]))
            pieces.append(self.between[position + 1])
        return "".join(pieces)

    def _close(self, position: int) -> None:
        """Remove one of the white spaces beside a deleted word, preferably not a line or paragraph break."""
        before, after = self.between[position], self.between[position + 1]
        left, right = before[len(before.rstrip()) :], after[: len(after) - len(after.lstrip())]
        if left and (not right or left.count("\n") <= right.count("\n")):
            self.between[position] = before.rstrip()
        elif right:
            self.between[position + 1] = after.lstrip()

    def _use(self, positions: list[int]) -> None:
        used = set(positions)
        self.free = [position for position in self.free if position not in used]

    def _choose(self, words: Sequence[str]) -> str:
        return words[int(self.rng.integers(len(words)))]
