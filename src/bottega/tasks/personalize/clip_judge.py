"""Which of several pictures is best: near to what the person likes and to what is wished for, as a CLIP sees them."""

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
from bottega.tasks.align.clip_folder import load_clip_tokens

LEAST = 1e-4
"""A cosine may be 0 or below, which has no logarithm; no picture that is worth anything is as far as this."""
AT_ONCE = 64


class Scores(NamedTuple):
    """Of one picture. `preference` and `target` are cosines; where nothing is known of what a person likes, the wish
    decides alone and `preference` is None."""

    preference: float | None
    target: float

    def total(self, preference_weight: float) -> float:
        """PMG's: the share of preference times log d_p, and the rest times log d_t."""
        target = np.log(max(self.target, LEAST))
        if self.preference is None:
            return float(target)
        return float(preference_weight * np.log(max(self.preference, LEAST)) + (1 - preference_weight) * target)


@final
@dataclass(frozen=True)
class ClipJudge:
    """A CLIP with its words."""

    clip: Any
    tokens: CaptionTokenizer
    device: Any

    @classmethod
    def load(cls, folder: Path, device: Any) -> ClipJudge:
        return cls(load_clip(folder).to(device), load_clip_tokens(folder), device)

    @torch.no_grad()
    def encode_images(self, pictures: np.ndarray) -> np.ndarray:
        """Unit vectors [n, P] of uint8 [n, h, w, 3]."""
        parts = np.split(pictures, range(AT_ONCE, len(pictures), AT_ONCE))
        seen = [torch.from_numpy(normalise_pixels(part, mode="symmetric")).to(self.device) for part in parts]
        return np.concatenate([self.clip.images(part).float().cpu().numpy() for part in seen])

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors [n, P]."""
        rows = self.tokens.encode(texts)
        parts = [
            self.clip.texts(
                *(
                    torch.from_numpy(rows[name][at : at + AT_ONCE]).to(self.device)
                    for name in ("input_ids", "attention_mask")
                )
            )
            for at in range(0, len(texts), AT_ONCE)
        ]
        return torch.cat(parts).float().cpu().numpy()

    def score_candidates(
        self, candidates: Sequence[np.ndarray], *, likes: Sequence[str], wishes: Sequence[str]
    ) -> list[list[Scores]]:
        """Of each picture of several candidates for the same people. `likes` are keywords as text, empty where there are
        none."""
        texts = [self.encode_texts(several) for several in (likes, wishes)]
        found = []
        for pictures in candidates:
            seen = self.encode_images(pictures)
            both = [np.einsum("np,np->n", seen, one).tolist() for one in texts]
            rows = zip(likes, *both, strict=True)
            found.append([Scores(preference if said else None, target) for said, preference, target in rows])
        return found


def pick_best(candidates: Sequence[Sequence[Scores]], preference_weight: float) -> list[int]:
    """Of scores [weightings][pictures]: the number of the best weighting for each picture, the first of equal ones."""
    totals = np.array([[one.total(preference_weight) for one in row] for row in candidates])
    return totals.argmax(0).tolist()
