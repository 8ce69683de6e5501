"""Scores of candidate images by CLIP: similarity to what the user likes and to the wish (PMG, Shen et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch

from bottega.data.image.augment import normalise_pixels
from bottega.data.text.captions import CaptionTokenizer
from bottega.models.clip.torch import load_clip
from bottega.tasks.align.clip_folder import load_clip_tokenizer

MIN_COSINE = 1e-4
"""Lower bound of a cosine before its logarithm is taken, since a cosine may be 0 or negative. Those of useful images are
higher."""
BATCH_SIZE = 64


class Scores(NamedTuple):
    """Cosine similarities of one image to what the user likes (None without keywords) and to the wish, the target."""

    preference: float | None
    target: float

    def compute_total(self, preference_weight: float) -> float:
        """Return preference_weight * log(preference) + (1 - preference_weight) * log(target), or log(target) alone."""
        target = np.log(max(self.target, MIN_COSINE))
        if self.preference is None:
            return float(target)
        return float(preference_weight * np.log(max(self.preference, MIN_COSINE)) + (1 - preference_weight) * target)


@final
@dataclass(frozen=True)
class ClipScorer:
    """A CLIP model with its tokenizer."""

    clip: Any
    tokenizer: CaptionTokenizer
    device: Any

    @classmethod
    def load(cls, folder: Path, device: Any) -> ClipScorer:
        """Load a CLIP model and its tokenizer from a folder."""
        return cls(load_clip(folder).to(device), load_clip_tokenizer(folder), device)

    @torch.no_grad()
    def encode_images(self, images: np.ndarray) -> np.ndarray:
        """Return unit vectors, (images, dimensions), of uint8 images (images, height, width, 3)."""
        chunks = np.split(images, range(BATCH_SIZE, len(images), BATCH_SIZE))
        batches = [torch.from_numpy(normalise_pixels(chunk, mode="symmetric")).to(self.device) for chunk in chunks]
        return np.concatenate([self.clip.encode_images(batch).float().cpu().numpy() for batch in batches])

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors, (texts, dimensions)."""
        tokens = self.tokenizer.encode(texts)
        embeddings = [
            self.clip.encode_texts(
                *(
                    torch.from_numpy(tokens[name][start : start + BATCH_SIZE]).to(self.device)
                    for name in ("input_ids", "attention_mask")
                )
            )
            for start in range(0, len(texts), BATCH_SIZE)
        ]
        return torch.cat(embeddings).float().cpu().numpy()

    def score_candidates(
        self, candidates: Sequence[np.ndarray], *, likes: Sequence[str], wishes: Sequence[str]
    ) -> list[list[Scores]]:
        """Return the scores by candidate, then by image.

        Each candidate is an array with one image for each user, in the same order. `likes` are the keywords of each user as
        text, empty for a user without keywords.
        """
        text_vectors = [self.encode_texts(texts) for texts in (likes, wishes)]
        scores = []
        for images in candidates:
            image_vectors = self.encode_images(images)
            cosines = [np.einsum("np,np->n", image_vectors, vectors).tolist() for vectors in text_vectors]
            rows = zip(likes, *cosines, strict=True)
            scores.append([Scores(preference if words else None, target) for words, preference, target in rows])
        return scores


def pick_best(candidates: Sequence[Sequence[Scores]], preference_weight: float) -> list[int]:
    """Return for each image the index of the candidate with the best total; ties go to the first.

    `candidates` are scores by candidate, then by image.
    """
    totals = np.array([[scores.compute_total(preference_weight) for scores in row] for row in candidates])
    return totals.argmax(0).tolist()
