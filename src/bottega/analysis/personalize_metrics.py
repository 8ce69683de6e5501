"""All that is measured of one person's picture, however it was drawn: one row a person and arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.analysis.personalize_arms import TARGET_ARM
from bottega.analysis.personalize_truth import ClipFieldClassifier, FieldPredictions, TruthFields, score_fields
from bottega.core.errors import UsageError
from bottega.tasks.measures.clip_scores import cosine_similarity, similarity_to_history
from bottega.tasks.measures.perceptual import perceptual_distances
from bottega.tasks.measures.ssim import WINDOW, ssim
from bottega.tasks.personalize.data.records import Record

STICKER_PREFIX = "drawn_"
"""Before what was read off a sticker without any learnt model."""


@dataclass(frozen=True)
class People:
    """Whom pictures are drawn for."""

    records: Sequence[Record]
    record_indices: Sequence[int]
    """Of the records, in their table."""
    keywords: Sequence[Sequence[str]]
    """What the language model says each likes."""
    target_images: np.ndarray
    """What each took then: uint8 [n, h, w, 3]."""
    load_liked_images: Callable[[int], list[np.ndarray]]
    """What a person liked before, by their place, as far as there are pictures of it. Read when it is asked for: hundreds of
    large pictures for each of hundreds of people would not fit."""

    def __len__(self) -> int:
        return len(self.records)


@final
@dataclass(frozen=True)
class ImageMetrics:
    """What pictures are measured with, made once for all arms."""

    people: People
    judge: Any = None
    """A CLIP: `pictures` and `texts` as unit vectors; None where the recipe names none."""
    perceptual: Any = None
    """An `Lpips` or a `ClipPerceptual`."""
    device: Any = "cpu"
    fields: TruthFields | None = None
    clip_classifier: ClipFieldClassifier | None = None
    sticker_reader: Callable[[np.ndarray], FieldPredictions] | None = None

    def measure_arm(self, arm: str, pictures: np.ndarray, **beside: Sequence[Any]) -> list[dict[str, Any]]:
        """Of uint8 [n, h, w, 3], one a person, in their order; `beside` are fields that only this arm has."""
        people, seen = self.people, self.judge.encode_images(pictures) if self.judge is not None else None
        assert len(pictures) == len(people), "one picture a person"
        columns: dict[str, Sequence[Any]] = {
            "user": [record.user for record in people.records],
            "arm": [arm] * len(people),
            "record": [int(number) for number in people.record_indices],
            "wish": [record.wish_or_caption for record in people.records],
            "target": [record.target.id for record in people.records],
            "keywords": [list(words) for words in people.keywords],
            **beside,
            **self._shown(pictures, seen),
            **(self._near(seen) if seen is not None else {}),
            **(self._alike(pictures) if arm != TARGET_ARM else {}),
        }
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _shown(self, pictures: np.ndarray, seen: np.ndarray | None) -> dict[str, Sequence[Any]]:
        """Whether the picture shows what it should, by each who can tell."""
        found: dict[str, Sequence[Any]] = {}
        if self.fields is None:
            return found
        readers: dict[str, FieldPredictions] = {}
        if self.clip_classifier is not None and seen is not None:
            readers[""] = self.clip_classifier.classify(seen)
        if self.sticker_reader is not None:
            readers[STICKER_PREFIX] = self.sticker_reader(pictures)
        for prefix, told in readers.items():
            for name, is_right in score_fields(self.fields, told, self.people.records).items():
                found[f"{prefix}{name}_accuracy"] = is_right.astype(int).tolist()
            name = prefix.rstrip("_") or "judge"
            found[name] = [{key: values[i] for key, values in told.items()} for i in range(len(pictures))]
        return found

    def _near(self, seen: np.ndarray) -> dict[str, Sequence[float]]:
        """Cosines of the judge's vectors [n, d] with the keywords, the wish and the liked pictures."""
        likes, wishes = self._texts
        to_likes = cosine_similarity(seen, likes)
        to_likes[[not words for words in self.people.keywords]] = np.nan
        found = {"clip_preference": to_likes, "clip_target": cosine_similarity(seen, wishes)}
        if any(len(one) for one in self._liked):
            found["clip_history"] = similarity_to_history(seen, self._liked)
        return {name: values.tolist() for name, values in found.items()}

    def _alike(self, pictures: np.ndarray) -> dict[str, Sequence[float]]:
        """How like the picture that the person did take."""
        targets, found = self.people.target_images, {}
        if pictures.shape != targets.shape:
            raise UsageError(
                f"pictures drawn are {_size(pictures)}, targets {_size(targets)}; set data.image_size to one"
            )
        if min(pictures.shape[1:3]) >= WINDOW:
            found["ssim"] = ssim(pictures, targets).tolist()
        if self.perceptual is not None:
            values = perceptual_distances(self.perceptual, pictures, targets, device=self.device)
            found[self.perceptual.name] = values.tolist()
        return found

    @cached_property
    def _texts(self) -> tuple[np.ndarray, np.ndarray]:
        likes = [", ".join(words) for words in self.people.keywords]
        return self.judge.encode_texts(likes), self.judge.encode_texts(
            [record.wish_or_caption for record in self.people.records]
        )

    @cached_property
    def _liked(self) -> list[np.ndarray]:
        found = (self.people.load_liked_images(number) for number in range(len(self.people)))
        return [self.judge.encode_images(np.stack(one)) if one else np.zeros((0, 1), np.float32) for one in found]


def _size(pictures: np.ndarray) -> str:
    return f"{pictures.shape[2]} x {pictures.shape[1]}"
