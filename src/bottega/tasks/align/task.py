"""Alignment: does a caption belong to a picture? Asked of each pair by itself, as SigLIP does (Zhai et al., 2023).

A softmax over the batch would need all of it in one place. Here each picture brings the captions that it is told apart
from, drawn from the data as a function of its row, so the loss is a sum over rows and the same under any split.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models, Rows
from bottega.models.clip.config import ClipShape

CHUNK = 1024
"""Pictures that are compared with all captions at once."""


class Alignment(Task):
    """A batch holds `image` [b, H, W, C] from -1 to 1, `texts` [b, 1 + N, T] whose first is the picture's own caption,
    `caption` [b, 1 + N], equal where captions are, and `counts` [b, 1 + N], false where one is no negative.

    Optional: `weight` [b], where 0 marks a padding row that counts nowhere.
    """

    shape: ClipShape
    negatives: int = Field(gt=0)
    pretrained: str | None = None
    """A folder of a CLIP whose weights the training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        options = {"negatives": self.negatives}
        architecture = "bottega.models.clip.torch:build_clip"
        model = ModelSpec(architecture, self.shape, options, pretrained=self.pretrained, load=None, is_seeded=True)
        return {"model": model}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        size = (np.asarray(batch["weight"]) > 0).sum() if "weight" in batch else len(batch["image"])
        return {"loss": float(size)}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        found = models["model"](batch["image"], batch["texts"], batch["caption"])
        scores, counts = found.scores, batch["counts"]
        kept = (batch["weight"] > 0).float() if "weight" in batch else torch.ones_like(scores[:, 0])
        # The first of each row belongs to its picture, all others do not.
        sign = torch.full_like(scores, -1.0)
        sign[:, 0] = 1.0
        each = (F.softplus(-sign * scores) * counts).mean(1)
        best = scores.detach()[:, 1:].masked_fill(~counts[:, 1:], -torch.inf).amax(1)
        right = (scores.detach()[:, 0] > best).float()
        return Loss(
            terms={"loss": ((each * kept).sum(), 1.0)},
            metrics={"accuracy": ((right * kept).sum(), kept.sum())},
            rows={"picture": found.images.detach(), "words": found.texts.detach(), "caption": batch["caption"][:, 0]},
        )

    def score(self, rows: Rows) -> dict[str, float]:
        """The share of pictures to which, among all distinct captions of the data, their own fits best."""
        numbers, first = np.unique(rows["caption"], return_index=True)
        words, hits = rows["words"][first], 0
        for start in range(0, len(rows["picture"]), CHUNK):
            best = (rows["picture"][start : start + CHUNK] @ words.T).argmax(1)
            hits += int((numbers[best] == rows["caption"][start : start + CHUNK]).sum())
        return {"caption_recall": hits / len(rows["picture"])}
