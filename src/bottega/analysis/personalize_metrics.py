"""Metrics of personalised images, one row per record and arm: accuracies, CLIP similarities, SSIM, perceptual distance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch

from bottega.analysis.personalize_arms import TARGET_ARM
from bottega.analysis.personalize_truth import ClipFieldClassifier, FieldPredictions, TruthFields, score_fields
from bottega.core.errors import UsageError
from bottega.tasks.metrics.clip_scores import cosine_similarity, similarity_to_history
from bottega.tasks.metrics.ssim import WINDOW_SIZE, ssim
from bottega.tasks.personalize.data.records import Record

STICKER_PREFIX = "drawn_"
"""Prefix of columns computed by the sticker classifier, which is not a trained model."""


@dataclass(frozen=True)
class People:
    """The records that images are generated for, with keywords, targets and liked images."""

    records: Sequence[Record]
    record_indices: Sequence[int]
    """Indices of the records in their table."""
    keywords: Sequence[Sequence[str]]
    """Keywords that the language model predicts for each record."""
    target_images: np.ndarray
    """The image that each person chose: uint8 (records, height, width, 3)."""
    load_liked_images: Callable[[int], list[np.ndarray]]
    """Index of a record -> the images in its history. They are read when needed: those of all people would not fit in memory."""

    def __len__(self) -> int:
        return len(self.records)


@final
@dataclass(frozen=True)
class ImageMetrics:
    """The metrics of an evaluation, set up once for all arms."""

    people: People
    clip_scorer: Any = None
    """A CLIP whose `encode_images` and `encode_texts` return unit vectors; None if the recipe has no CLIP."""
    perceptual: Any = None
    """An `Lpips` or a `ClipPerceptual`."""
    device: Any = "cpu"
    fields: TruthFields | None = None
    clip_classifier: ClipFieldClassifier | None = None
    sticker_classifier: Callable[[np.ndarray], FieldPredictions] | None = None

    def measure_arm(self, arm: str, images: np.ndarray, **extra: Sequence[Any]) -> list[dict[str, Any]]:
        """Return a row for each image; `images` is uint8 (records, height, width, 3), `extra` are further columns."""
        people, embeddings = (
            self.people,
            self.clip_scorer.encode_images(images) if self.clip_scorer is not None else None,
        )
        assert len(images) == len(people), "one image per record"
        columns: dict[str, Sequence[Any]] = {
            "user": [record.user for record in people.records],
            "arm": [arm] * len(people),
            "record": [int(number) for number in people.record_indices],
            "wish": [record.wish_or_caption for record in people.records],
            "target": [record.target.id for record in people.records],
            "keywords": [list(words) for words in people.keywords],
            **extra,
            **self._classify_images(images, embeddings),
            **(self._compute_clip_similarities(embeddings) if embeddings is not None else {}),
            **(self._compare_with_targets(images) if arm != TARGET_ARM else {}),
        }
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _classify_images(self, images: np.ndarray, embeddings: np.ndarray | None) -> dict[str, Sequence[Any]]:
        """Return whether each image shows what it should, by CLIP and by the sticker classifier."""
        columns: dict[str, Sequence[Any]] = {}
        if self.fields is None:
            return columns
        predictions_by_classifier: dict[str, FieldPredictions] = {}
        if self.clip_classifier is not None and embeddings is not None:
            predictions_by_classifier[""] = self.clip_classifier.classify(embeddings)
        if self.sticker_classifier is not None:
            predictions_by_classifier[STICKER_PREFIX] = self.sticker_classifier(images)
        for prefix, predictions in predictions_by_classifier.items():
            for name, is_right in score_fields(self.fields, predictions, self.people.records).items():
                columns[f"{prefix}{name}_accuracy"] = is_right.astype(int).tolist()
            name = prefix.rstrip("_") or "judge"
            columns[name] = [{key: values[i] for key, values in predictions.items()} for i in range(len(images))]
        return columns

    def _compute_clip_similarities(self, embeddings: np.ndarray) -> dict[str, Sequence[float]]:
        """Return cosines of `embeddings` (records, width) with those of the keywords, the wish and the liked images."""
        keyword_embeddings, wish_embeddings = self._text_embeddings
        to_keywords = cosine_similarity(embeddings, keyword_embeddings)
        to_keywords[[not words for words in self.people.keywords]] = np.nan
        columns = {"clip_preference": to_keywords, "clip_target": cosine_similarity(embeddings, wish_embeddings)}
        if any(len(liked) for liked in self._liked_embeddings):
            columns["clip_history"] = similarity_to_history(embeddings, self._liked_embeddings)
        return {name: values.tolist() for name, values in columns.items()}

    def _compare_with_targets(self, images: np.ndarray) -> dict[str, Sequence[float]]:
        """Return SSIM and perceptual distance to the image that each person chose."""
        targets, columns = self.people.target_images, {}
        if images.shape != targets.shape:
            raise UsageError(
                f"generated images are {_format_size(images)}, targets {_format_size(targets)}; set data.image_size to one size"
            )
        if min(images.shape[1:3]) >= WINDOW_SIZE:
            columns["ssim"] = ssim(images, targets).tolist()
        if self.perceptual is not None:
            values = compute_perceptual_distances(self.perceptual, images, targets, device=self.device)
            columns[self.perceptual.name] = values.tolist()
        return columns

    @cached_property
    def _text_embeddings(self) -> tuple[np.ndarray, np.ndarray]:
        keywords = [", ".join(words) for words in self.people.keywords]
        return self.clip_scorer.encode_texts(keywords), self.clip_scorer.encode_texts(
            [record.wish_or_caption for record in self.people.records]
        )

    @cached_property
    def _liked_embeddings(self) -> list[np.ndarray]:
        liked_images = (self.people.load_liked_images(i) for i in range(len(self.people)))
        return [
            self.clip_scorer.encode_images(np.stack(images)) if images else np.zeros((0, 1), np.float32)
            for images in liked_images
        ]


def _format_size(images: np.ndarray) -> str:
    return f"{images.shape[2]} x {images.shape[1]}"


def compute_perceptual_distances(
    network: Any, a: np.ndarray, b: np.ndarray, *, device: Any, chunk_size: int = 64
) -> np.ndarray:
    """Return the distances (n,) of image pairs, uint8 (n, h, w, 3); `network` is an `Lpips` or a `ClipPerceptual`."""
    assert a.dtype == b.dtype == np.uint8, "expected uint8: the range of floats is unknown"
    assert a.shape == b.shape, f"{a.shape} and {b.shape} are not pairs of images"
    distances = []
    with torch.no_grad():
        for start in range(0, len(a), chunk_size):
            first_images, second_images = (
                torch.from_numpy(x[start : start + chunk_size].astype(np.float32) / 127.5 - 1).to(device)
                for x in (a, b)
            )
            distances.append(network(first_images, second_images).float().cpu().numpy())
    return np.concatenate(distances).astype(np.float64) if distances else np.zeros(0)
