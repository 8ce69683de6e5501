"""What a personalised picture should show, where the data knows it, and what it does show: as a CLIP reads it, and as a
ruler does where stickers were drawn by code.

The words are those of the data: every field of `Record.truth`, with all values that occur. A field that the wish names is
the wish's; all others are what the person likes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from bottega.tasks.measures.clip_scores import classify_zero_shot
from bottega.tasks.personalize.data.records import Record

MAX_PROMPTS, MAX_TEXTS = 32, 4096
"""Captions that words are tried in, and texts in all: each costs a pass of the text tower."""
MIN_READER_ACCURACY = 0.9
"""Share of the real targets that the ruler must read right before anything else is measured with it."""

FieldPredictions = dict[str, list[str]]
"""Field -> what each picture shows."""


@dataclass(frozen=True)
class TruthFields:
    """What is known of the people of a split."""

    preference: tuple[str, ...]
    wish: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]
    """Field -> its values in all of the data."""

    @property
    def chance_accuracy(self) -> dict[str, float]:
        """What somebody who guesses gets."""
        found = {name: 1 / len(self.words[name]) for name in self.preference}
        found["preference"] = math.prod(found.values())
        found["wish"] = math.prod(1 / len(self.words[name]) for name in self.wish)
        return {name: found[name] for name in self.columns}

    @property
    def columns(self) -> tuple[str, ...]:
        """preference, each of its fields where they are several, and wish."""
        several = self.preference if len(self.preference) > 1 else ()
        return (*(("preference",) if self.preference else ()), *several, *(("wish",) if self.wish else ()))


def find_truth_fields(records: Sequence[Record], all_records: Iterable[Record]) -> TruthFields | None:
    """`every` is all that the data has, so that words of people elsewhere can be guessed, too; None where nothing is known."""
    names = [name for name in records[0].truth if all(name in record.truth for record in records)] if records else []
    if not names:
        return None
    words: dict[str, set[str]] = {name: set() for name in names}
    for record in (*records, *all_records):
        for name in names:
            if name in record.truth:
                words[name].add(record.truth[name])
    told_apart = [name for name in names if len(words[name]) > 1]
    wish = tuple(name for name in told_apart if all(_says(r.wish_or_caption, r.truth[name]) for r in records))
    preference = tuple(name for name in told_apart if name not in wish)
    return (
        TruthFields(preference, wish, {name: tuple(sorted(words[name])) for name in told_apart}) if told_apart else None
    )


def preference_keys(
    records: Sequence[Record], keywords: Sequence[Sequence[str]], fields: TruthFields | None
) -> list[tuple[str, ...]]:
    """What makes two people alike: what is true of them; where nobody knows that, the keywords of all their records; and
    of whom nothing is said, they are like nobody else."""
    if fields is not None and fields.preference:
        return [tuple(record.truth[name] for name in fields.preference) for record in records]
    said: dict[str, set[str]] = {}
    for record, words in zip(records, keywords, strict=True):
        said.setdefault(record.user, set()).update(word.casefold() for word in words)
    # No keyword is empty, so nobody's name is taken for one.
    return [tuple(sorted(said[record.user])) or ("", record.user) for record in records]


@dataclass(frozen=True)
class PromptSet:
    """Texts to look for, in which the values of some fields stand together."""

    names: tuple[str, ...]
    choices: list[tuple[str, ...]]
    """All values of the fields with each other."""
    texts: list[list[str]]
    """Of each choice, the same captions with its words in them."""


def build_prompts(fields: TruthFields, captions: Iterable[str]) -> list[PromptSet]:
    """All fields at once where captions name them all, because words change what is next to them: four half-trained CLIPs
    read 55 % of real favourites so, and 51 % one field at a time. Else, or where that would be too many texts, each by
    itself; a field that no caption names by its bare words.

    All choices stand in the same captions of the data, so that none is preferred for what else is said there."""
    several = sorted(set(captions))
    every = tuple(fields.words)
    together = _prompts(fields, every, several)
    if together is not None:
        return [together]
    apart = {name: _prompts(fields, (name,), several) for name in every}
    return [
        found or PromptSet((name,), [(word,) for word in fields.words[name]], [[word] for word in fields.words[name]])
        for name, found in apart.items()
    ]


def _prompts(fields: TruthFields, names: tuple[str, ...], captions: Sequence[str]) -> PromptSet | None:
    field_of = {word.lower(): name for name in reversed(names) for word in fields.words[name]}
    longest_first = sorted(field_of, key=len, reverse=True)
    any_word = re.compile(rf"(?:\b(an?)\s)?\b({'|'.join(map(re.escape, longest_first))})\b", re.IGNORECASE)

    def named(text: str) -> list[str]:
        return sorted(field_of[match[2].lower()] for match in any_word.finditer(text))

    def filled(text: str, choice: tuple[str, ...]) -> str:
        words = dict(zip(names, choice, strict=True))
        return any_word.sub(lambda match: _put(match, words[field_of[match[2].lower()]]), text)

    choices = list(product(*(fields.words[name] for name in names)))
    most = min(MAX_PROMPTS, MAX_TEXTS // len(choices))
    # Captions that differ in these words alone are one.
    fitting = list(dict.fromkeys(filled(text, choices[0]) for text in captions if named(text) == sorted(names)))
    chosen = [fitting[i * len(fitting) // most] for i in range(most)] if len(fitting) > most else fitting
    return (
        PromptSet(names, choices, [[filled(text, choice) for text in chosen] for choice in choices]) if chosen else None
    )


def _put(match: re.Match[str], word: str) -> str:
    if match[1] is None:
        return word
    article = "an" if word[0].lower() in "aeiou" else "a"
    return f"{article.capitalize() if match[1][0].isupper() else article} {word}"


def _says(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


class ClipFieldClassifier:
    """A CLIP that says which of the words fit, from its vectors alone."""

    def __init__(
        self, fields: TruthFields, captions: Iterable[str], texts: Callable[[Sequence[str]], np.ndarray]
    ) -> None:
        self.prompts = build_prompts(fields, captions)
        self.vectors = [_means(one, texts) for one in self.prompts]

    def classify(self, pictures: np.ndarray) -> FieldPredictions:
        """Of unit vectors [n, d]."""
        found: FieldPredictions = {}
        for prompts, vectors in zip(self.prompts, self.vectors, strict=True):
            chosen = [prompts.choices[i] for i in classify_zero_shot(pictures, vectors)]
            found |= {name: [choice[at] for choice in chosen] for at, name in enumerate(prompts.names)}
        return found


def _means(prompts: PromptSet, texts: Callable[[Sequence[str]], np.ndarray]) -> np.ndarray:
    """[choices, d]: the unit vectors of each choice's captions, averaged as CLIP's prompts are."""
    found = texts([text for said in prompts.texts for text in said])
    return found.reshape(len(prompts.choices), -1, found.shape[1]).astype(np.float64).mean(1)


def open_sticker_reader(fields: TruthFields) -> Callable[[np.ndarray], FieldPredictions] | None:
    """What reads stickers without having learnt anything; None where the words are not theirs."""
    from bottega.data.embedded import stickers

    known = {"shape": stickers.SHAPES, "colour": stickers.COLOURS, "pattern": stickers.PATTERNS}
    if not fields.words.keys() <= known.keys() or any(set(fields.words[n]) - set(known[n]) for n in fields.words):
        return None
    from bottega.data.embedded.sticker_recognition import recognise_stickers

    return lambda pictures: {
        name: list(values) for name, values in recognise_stickers(pictures).items() if name in fields.words
    }


def score_fields(fields: TruthFields, told: FieldPredictions, records: Sequence[Record]) -> dict[str, np.ndarray]:
    """Column -> whether each picture is right [n]: in all that its person likes, in each of it, and in what was wished."""
    each = {
        name: np.array([told[name][i] == record.truth[name] for i, record in enumerate(records)], bool)
        for name in fields.words
    }
    found = {name: each[name] for name in fields.preference}
    for column, names in (("preference", fields.preference), ("wish", fields.wish)):
        if names:
            found[column] = np.logical_and.reduce([each[name] for name in names])
    return {name: found[name] for name in fields.columns}


def match_keywords(fields: TruthFields, keywords: Sequence[str]) -> dict[str, str]:
    """Field -> the first of its words that is among the keywords; a list of all words names the first, not all."""
    found: dict[str, str] = {}
    text = ", ".join(keywords)
    for name in fields.preference:
        places = {w: m.start() for w in fields.words[name] if (m := re.search(rf"\b{re.escape(w)}\b", text, re.I))}
        if places:
            found[name] = min(places, key=lambda word: places[word])
    return found


def score_keywords(
    fields: TruthFields, keywords: Sequence[Sequence[str]], records: Sequence[Record]
) -> dict[str, np.ndarray]:
    """Column -> whether the keywords of each person name the favourite [n]."""
    told = [match_keywords(fields, one) for one in keywords]
    each = {
        name: np.array([t.get(name) == r.truth[name] for t, r in zip(told, records, strict=True)], bool)
        for name in fields.preference
    }
    both = {"preference": np.logical_and.reduce(list(each.values()))} if each else {}
    return {**both, **(each if len(each) > 1 else {})}
