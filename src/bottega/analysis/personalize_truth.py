"""Ground truth of personalised images, and classifiers that predict it from an image: zero-shot CLIP, and rules for stickers.

The classes come from the data: each field of `Record.truth`, with all values that occur. A field whose value
occurs in the wish (the prompt of the person) belongs to the wish; all others are preferences of the person.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from bottega.tasks.metrics.clip_scores import classify_zero_shot
from bottega.tasks.personalize.data.records import Record

MAX_PROMPTS_PER_CLASS, MAX_TOTAL_PROMPTS = 32, 4096
"""Maximum number of prompts per class, and of prompts in total: each costs a forward pass of the text encoder."""
MIN_STICKER_ACCURACY = 0.9
"""Accuracy on the real targets that the sticker classifier needs in order to be used as a metric."""

FieldPredictions = dict[str, list[str]]
"""Field -> the predicted value for each image."""


@dataclass(frozen=True)
class TruthFields:
    """The labelled fields of a split: which are preferences, which belong to the wish, and their values."""

    preference: tuple[str, ...]
    wish: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    """Field -> its values in all of the data."""

    @property
    def chance_accuracy(self) -> dict[str, float]:
        """Accuracy of a uniform guess, by column."""
        accuracy = {name: 1 / len(self.values[name]) for name in self.preference}
        accuracy["preference"] = math.prod(accuracy.values())
        accuracy["wish"] = math.prod(1 / len(self.values[name]) for name in self.wish)
        return {name: accuracy[name] for name in self.columns}

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns: preference, each preference field if there are several, and wish."""
        single_fields = self.preference if len(self.preference) > 1 else ()
        return (*(("preference",) if self.preference else ()), *single_fields, *(("wish",) if self.wish else ()))


def find_truth_fields(records: Sequence[Record], all_records: Iterable[Record]) -> TruthFields | None:
    """Return the fields of all `records` that have several values in the data; None if there are none.

    The values are those in `records` and in `all_records`.
    """
    names = [name for name in records[0].truth if all(name in record.truth for record in records)] if records else []
    if not names:
        return None
    values: dict[str, set[str]] = {name: set() for name in names}
    for record in (*records, *all_records):
        for name in names:
            if name in record.truth:
                values[name].add(record.truth[name])
    varying = [name for name in names if len(values[name]) > 1]
    wish = tuple(name for name in varying if all(_contains_word(r.wish_or_caption, r.truth[name]) for r in records))
    preference = tuple(name for name in varying if name not in wish)
    return TruthFields(preference, wish, {name: tuple(sorted(values[name])) for name in varying}) if varying else None


def build_preference_keys(
    records: Sequence[Record], keywords: Sequence[Sequence[str]], fields: TruthFields | None
) -> list[tuple[str, ...]]:
    """Return for each record the preferences by which people are grouped.

    These are the true ones, or without labels the keywords of all records of the user. A user with neither is
    a group of their own.
    """
    if fields is not None and fields.preference:
        return [tuple(record.truth[name] for name in fields.preference) for record in records]
    keywords_by_user: dict[str, set[str]] = {}
    for record, words in zip(records, keywords, strict=True):
        keywords_by_user.setdefault(record.user, set()).update(word.casefold() for word in words)
    # No keyword is empty, so ("", user) cannot equal the keywords of another user.
    return [tuple(sorted(keywords_by_user[record.user])) or ("", record.user) for record in records]


@dataclass(frozen=True)
class PromptSet:
    """Zero-shot prompts for each combination of the values of some fields."""

    names: tuple[str, ...]
    choices: list[tuple[str, ...]]
    """All combinations of values of the fields."""
    texts: list[list[str]]
    """For each choice, the same captions with its words filled in."""


def build_prompts(fields: TruthFields, captions: Iterable[str]) -> list[PromptSet]:
    """Build zero-shot prompts from captions of the data.

    If some captions name all fields, one set of prompts covers all of them: four half-trained CLIPs then classified 55 %
    of real target images correctly, against 51 % with one set for each field. If no caption does, or if there would be
    too many prompts, each field has its own set; the prompts of a field that no caption names are its values alone. All
    choices are filled into the same captions, so that the other words of a caption favour no choice.
    """
    distinct_captions = sorted(set(captions))
    names = tuple(fields.values)
    joint_prompts = _fill_captions(fields, names, distinct_captions)
    if joint_prompts is not None:
        return [joint_prompts]
    by_field = {name: _fill_captions(fields, (name,), distinct_captions) for name in names}
    return [
        prompts
        or PromptSet((name,), [(word,) for word in fields.values[name]], [[word] for word in fields.values[name]])
        for name, prompts in by_field.items()
    ]


def _fill_captions(fields: TruthFields, names: tuple[str, ...], captions: Sequence[str]) -> PromptSet | None:
    field_by_word = {word.lower(): name for name in reversed(names) for word in fields.values[name]}
    longest_first = sorted(field_by_word, key=len, reverse=True)
    pattern = re.compile(rf"(?:\b(an?)\s)?\b({'|'.join(map(re.escape, longest_first))})\b", re.IGNORECASE)

    def find_fields(text: str) -> list[str]:
        return sorted(field_by_word[match[2].lower()] for match in pattern.finditer(text))

    def fill_words(text: str, choice: tuple[str, ...]) -> str:
        words = dict(zip(names, choice, strict=True))
        return pattern.sub(lambda match: _match_article(match, words[field_by_word[match[2].lower()]]), text)

    choices = list(product(*(fields.values[name] for name in names)))
    limit = min(MAX_PROMPTS_PER_CLASS, MAX_TOTAL_PROMPTS // len(choices))
    # Captions that differ only in these words count once.
    templates = list(
        dict.fromkeys(fill_words(text, choices[0]) for text in captions if find_fields(text) == sorted(names))
    )
    chosen_templates = (
        [templates[i * len(templates) // limit] for i in range(limit)] if len(templates) > limit else templates
    )
    return (
        PromptSet(names, choices, [[fill_words(text, choice) for text in chosen_templates] for choice in choices])
        if chosen_templates
        else None
    )


def _match_article(match: re.Match[str], word: str) -> str:
    if match[1] is None:
        return word
    article = "an" if word[0].lower() in "aeiou" else "a"
    return f"{article.capitalize() if match[1][0].isupper() else article} {word}"


def _contains_word(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


class ClipFieldClassifier:
    """Zero-shot classifier of the fields, on CLIP embeddings."""

    def __init__(
        self, fields: TruthFields, captions: Iterable[str], embed_texts: Callable[[Sequence[str]], np.ndarray]
    ) -> None:
        self.prompts = build_prompts(fields, captions)
        self.class_embeddings = [_average_embeddings(prompts, embed_texts) for prompts in self.prompts]

    def classify(self, embeddings: np.ndarray) -> FieldPredictions:
        """Return the predicted values of each field for unit image embeddings (images, width)."""
        predictions: FieldPredictions = {}
        for prompts, class_embeddings in zip(self.prompts, self.class_embeddings, strict=True):
            predicted_choices = [prompts.choices[i] for i in classify_zero_shot(embeddings, class_embeddings)]
            predictions |= {
                name: [choice[position] for choice in predicted_choices] for position, name in enumerate(prompts.names)
            }
        return predictions


def _average_embeddings(prompts: PromptSet, embed_texts: Callable[[Sequence[str]], np.ndarray]) -> np.ndarray:
    """Return the mean text embedding of each choice over its captions, (choices, width), like CLIP's prompt ensembles."""
    embeddings = embed_texts([text for choice_texts in prompts.texts for text in choice_texts])
    return embeddings.reshape(len(prompts.choices), -1, embeddings.shape[1]).astype(np.float64).mean(1)


def find_sticker_classifier(fields: TruthFields) -> Callable[[np.ndarray], FieldPredictions] | None:
    """Return a rule-based classifier of synthetic stickers; None if the values of the fields are not those of stickers."""
    from bottega.data.embedded import stickers

    classes = {"shape": stickers.SHAPES, "colour": stickers.COLOURS, "pattern": stickers.PATTERNS}
    if not fields.values.keys() <= classes.keys() or any(
        set(fields.values[n]) - set(classes[n]) for n in fields.values
    ):
        return None
    from bottega.data.embedded.sticker_recognition import recognise_stickers

    return lambda images: {
        name: list(values) for name, values in recognise_stickers(images).items() if name in fields.values
    }


def score_fields(
    fields: TruthFields, predictions: FieldPredictions, records: Sequence[Record]
) -> dict[str, np.ndarray]:
    """Return column -> whether each image is right, bool (images,): in all preferences, in each of them, and in the wish."""
    by_field = {
        name: np.array([predictions[name][i] == record.truth[name] for i, record in enumerate(records)], bool)
        for name in fields.values
    }
    scores = {name: by_field[name] for name in fields.preference}
    for column, names in (("preference", fields.preference), ("wish", fields.wish)):
        if names:
            scores[column] = np.logical_and.reduce([by_field[name] for name in names])
    return {name: scores[name] for name in fields.columns}


def match_keywords(fields: TruthFields, keywords: Sequence[str]) -> dict[str, str]:
    """Return field -> the value that the keywords name first; later ones are ignored, so that listing all values does not help."""
    matches: dict[str, str] = {}
    text = ", ".join(keywords)
    for name in fields.preference:
        starts = {w: m.start() for w in fields.values[name] if (m := re.search(rf"\b{re.escape(w)}\b", text, re.I))}
        if starts:
            matches[name] = min(starts, key=lambda word: starts[word])
    return matches


def score_keywords(
    fields: TruthFields, keywords: Sequence[Sequence[str]], records: Sequence[Record]
) -> dict[str, np.ndarray]:
    """Return column -> whether the keywords of each record name the preferred value, bool (records,)."""
    matches = [match_keywords(fields, words) for words in keywords]
    by_field = {
        name: np.array(
            [matched.get(name) == record.truth[name] for matched, record in zip(matches, records, strict=True)], bool
        )
        for name in fields.preference
    }
    overall = {"preference": np.logical_and.reduce(list(by_field.values()))} if by_field else {}
    return {**overall, **(by_field if len(by_field) > 1 else {})}
