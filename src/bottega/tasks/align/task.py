"""Contrastive alignment of images and captions with the pairwise sigmoid loss of SigLIP (Zhai et al., 2023).

A softmax over the batch would need the whole batch on one device. Here each image has its own negative captions, drawn from
the data as a function of its row, so the loss is a sum over rows and does not depend on how a batch is split.
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

CHUNK_SIZE = 1024
"""Number of images that are compared with all captions at once."""


class Alignment(Task):
    """Pairwise sigmoid loss over images, their captions and N negatives each.

    A batch holds `image` (b, height, width, channels) from -1 to 1; `texts` (b, 1 + N, tokens), the image's own caption
    first; `caption` (b, 1 + N), an id that is equal for equal captions; `counts` (b, 1 + N), false for drawn captions
    that equal the image's own and so are not negatives; and optionally `weight` (b,), where 0 marks padding rows.
    """

    shape: ClipShape
    negatives: int = Field(gt=0)
    pretrained: str | None = None
    """Folder of a CLIP whose weights training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        options = {"negatives": self.negatives}
        architecture = "bottega.models.clip.torch:build_clip"
        model = ModelSpec(architecture, self.shape, options, pretrained=self.pretrained, load=None, is_seeded=True)
        return {"model": model}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        size = (np.asarray(batch["weight"]) > 0).sum() if "weight" in batch else len(batch["image"])
        return {"loss": float(size)}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        outputs = models["model"](batch["image"], batch["texts"], batch["caption"])
        scores, counts = outputs.scores, batch["counts"]
        mask = (batch["weight"] > 0).float() if "weight" in batch else torch.ones_like(scores[:, 0])
        # The first text of each row belongs to its image, the others do not.
        sign = torch.full_like(scores, -1.0)
        sign[:, 0] = 1.0
        row_losses = (F.softplus(-sign * scores) * counts).mean(1)
        best_negative = scores.detach()[:, 1:].masked_fill(~counts[:, 1:], -torch.inf).amax(1)
        is_correct = (scores.detach()[:, 0] > best_negative).float()
        return Loss(
            terms={"loss": ((row_losses * mask).sum(), 1.0)},
            metrics={"accuracy": ((is_correct * mask).sum(), mask.sum())},
            rows={
                "image_embedding": outputs.images.detach(),
                "text_embedding": outputs.texts.detach(),
                "caption": batch["caption"][:, 0],
            },
        )

    def score(self, rows: Rows) -> dict[str, float]:
        """Return the fraction of images whose own caption scores highest among all distinct captions of the data."""
        caption_ids, first_rows = np.unique(rows["caption"], return_index=True)
        text_embeddings, hits = rows["text_embedding"][first_rows], 0
        for start in range(0, len(rows["image_embedding"]), CHUNK_SIZE):
            best = (rows["image_embedding"][start : start + CHUNK_SIZE] @ text_embeddings.T).argmax(1)
            hits += int((caption_ids[best] == rows["caption"][start : start + CHUNK_SIZE]).sum())
        return {"caption_recall": hits / len(rows["image_embedding"])}
