"""Personalised images: one candidate for each weighting of the condition, of which CLIP picks the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from bottega.core.noise import Noise
from bottega.core.types import Models
from bottega.data.image.augment import denormalise_pixels
from bottega.data.image.write import write_images
from bottega.data.output_files import build_numbered_paths, explain_write_errors, is_folder, replace_previous_files
from bottega.data.prepare.jobs import ProgressCallback
from bottega.models.device import uses_bfloat16
from bottega.tasks.generation.sampling_options import check_guidance, check_steps, require_finite
from bottega.tasks.personalize.clip_scorer import ClipScorer, Scores, pick_best
from bottega.tasks.personalize.config import ConditionWeights, PersonalizeRecipe
from bottega.tasks.personalize.contact_sheets import MAX_HISTORY_SHOWN, GeneratedRow, UserSummary, write_contact_sheet
from bottega.tasks.personalize.data.condition_tokens import ConditionTokenizer, RecordKeywords
from bottega.tasks.personalize.data.records import Record
from bottega.tasks.personalize.task import NEGATIVE, Personalize
from bottega.tasks.personalize.user_requests import UserRequest

MAX_PIXELS = 1 << 20
"""Maximum number of pixels in a batch: four images of 512 x 512."""
MAX_BATCH_SIZE = 64


@dataclass(frozen=True)
class ImageChoice:
    """What one image was generated from: its user and wish, the keywords, and the selected weighting."""

    user: str
    wish: str
    keywords: RecordKeywords
    weighting: ConditionWeights
    scores: Scores | None
    """None without a CLIP."""

    @property
    def caption(self) -> str:
        """The weights of soft prompt, keywords and target, as "0.5 / 0.25 / 0.25"."""
        weights = self.weighting
        return f"{weights.soft:g} / {weights.keywords:g} / {weights.target:g}"

    def to_json(self) -> dict[str, Any]:
        """Return the request, the weighting and the scores, as --json prints them."""
        scores = None if self.scores is None else self.scores._asdict()
        keywords = {"preference": list(self.keywords.preference), "target": list(self.keywords.target)}
        request = {"user": self.user, "wish": self.wish, "keywords": keywords}
        return {**request, "weighting": self.weighting.model_dump(), "scores": scores}


@final
@dataclass(frozen=True, repr=False, eq=False)
class PersonalImages:
    """Generated images, uint8 (images, height, width, 3), usable as a numpy array, with the choice behind each."""

    images: np.ndarray
    choices: tuple[ImageChoice, ...]
    summaries: tuple[UserSummary, ...]
    """The request of each group of `images_per_request` images, in order."""
    images_per_request: int
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        height, width = self.images.shape[1:3]
        num_users = len({summary.user for summary in self.summaries})
        images = "1 image" if len(self) == 1 else f"{len(self):,} images"
        return f"{images} of {width} x {height} for {f'{num_users:,} users' if num_users > 1 else '1 user'}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.images.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.images[index]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.images)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.images, dtype=dtype, copy=True if copy is None else copy)

    def __len__(self) -> int:
        return len(self.images)

    def write(self, target: Path) -> dict[str, Any]:
        """Write single files and a contact sheet into a folder, or one contact sheet; return what --json prints."""
        with explain_write_errors(target):
            files = replace_previous_files(target, lambda: self._write_files(target))
        images = [choice.to_json() for choice in self.choices]
        if is_folder(target):
            images = [{"file": str(file), **fields} for file, fields in zip(files, images, strict=False)]
        notes = {"notes": list(self.notes)} if self.notes else {}
        return {"files": [str(path) for path in files], "count": len(self), "pictures": images, **notes}

    def _write_files(self, target: Path) -> list[Path]:
        if not is_folder(target):
            if len(self) == 1 or target.suffix.lower() != ".png":
                return write_images(self.images, target)
            self.write_sheet(target)
            return [target]
        paths = build_numbered_paths(target, len(self), ".png")
        for image, path in zip(self.images, paths, strict=True):
            write_images(image[None], path)
        self.write_sheet(target / "sheet.png")
        return [*paths, target / "sheet.png"]

    def write_sheet(self, path: Path) -> None:
        """Write a contact sheet of all images by user and wish."""
        rows = []
        for number, summary in enumerate(self.summaries):
            request_images = slice(number * self.images_per_request, (number + 1) * self.images_per_request)
            captions = [choice.caption for choice in self.choices[request_images]]
            rows.append(GeneratedRow(summary, list(self.images[request_images]), captions))
        write_contact_sheet(rows, path)


@final
class ImageSampler:
    """Generates the images of one run; `clip` is the folder of the CLIP that picks among candidates.

    `zero_unconditional` is whether the generator was trained with zeros in place of an empty negative prompt.
    """

    def __init__(
        self,
        recipe: PersonalizeRecipe,
        task: Personalize,
        tokenizer: ConditionTokenizer,
        *,
        clip: str | None,
        zero_unconditional: bool,
    ) -> None:
        self.recipe, self.task, self.tokenizer = recipe, task, tokenizer
        self._clip_folder, self._zero_unconditional = clip, zero_unconditional
        self._clip_scorers: dict[str, ClipScorer] = {}

    def load_clip_scorer(self, device: Any) -> ClipScorer | None:
        """Return the CLIP on `device`, which is loaded once, or None if model.clip is not set."""
        if self._clip_folder is None:
            return None
        name = str(device)
        if name not in self._clip_scorers:
            self._clip_scorers[name] = ClipScorer.load(Path(self._clip_folder), device)
        return self._clip_scorers[name]

    def generate(
        self,
        models: Models,
        requests: Sequence[UserRequest],
        keywords: Sequence[RecordKeywords],
        *,
        images_per_request: int,
        device: Any,
        seed: int,
        progress: ProgressCallback,
        **options: Any,
    ) -> PersonalImages:
        """Generate `images_per_request` images for each request; `options` are those of `sample_images`."""
        records = [request.record for request in requests for _ in range(images_per_request)]
        repeated_keywords = [words for words in keywords for _ in range(images_per_request)]
        images, weightings, scores = self.sample_best(
            models, records, repeated_keywords, device=device, seed=seed, progress=progress, **options
        )
        choices = [
            ImageChoice(record.user, record.wish_or_caption, words, weighting, score)
            for record, words, weighting, score in zip(records, repeated_keywords, weightings, scores, strict=True)
        ]
        summaries = tuple(summarize_user(request, words) for request, words in zip(requests, keywords, strict=True))
        notes: tuple[str, ...] = ()
        if self._clip_folder is None and len(self.recipe.samples.weightings) > 1:
            notes = ("model.clip is not set, so the first of samples.weightings is used instead of the best",)
        return PersonalImages(images, tuple(choices), summaries, images_per_request, notes)

    def sample_best(
        self,
        models: Models,
        records: Sequence[Record],
        keywords: Sequence[RecordKeywords],
        *,
        device: Any,
        seed: int,
        progress: ProgressCallback,
        **options: Any,
    ) -> tuple[np.ndarray, list[ConditionWeights], list[Scores | None]]:
        """Return the best image of each record over all weightings, from the same noise, with its weighting and its scores."""
        clip_scorer, weightings = self.load_clip_scorer(device), self.recipe.samples.weightings
        tried_weightings = weightings if clip_scorer is not None else weightings[:1]
        candidates = []
        for number, weights in enumerate(tried_weightings):
            report = partial(_report_candidate, progress, number, len(tried_weightings))
            candidates.append(
                self.sample_images(
                    models, records, keywords, weights=weights, device=device, seed=seed, progress=report, **options
                )
            )
        if clip_scorer is None:
            return candidates[0], [tried_weightings[0]] * len(records), [None] * len(records)
        likes, wishes = [words.texts[0] for words in keywords], [record.wish_or_caption for record in records]
        scores = clip_scorer.score_candidates(candidates, likes=likes, wishes=wishes)
        best_candidates = pick_best(scores, self.recipe.samples.preference_weight)
        images = np.stack([candidates[choice][row] for row, choice in enumerate(best_candidates)])
        return (
            images,
            [tried_weightings[choice] for choice in best_candidates],
            [scores[choice][row] for row, choice in enumerate(best_candidates)],
        )

    def sample_images(
        self,
        models: Models,
        records: Sequence[Record],
        keywords: Sequence[RecordKeywords],
        *,
        weights: ConditionWeights,
        device: Any,
        seed: int,
        progress: ProgressCallback,
        drop_keywords: bool = False,
        steps: int | None = None,
        sampler: Any = None,
        guidance: float | None = None,
        negative_prompt: str | None = None,
    ) -> np.ndarray:
        """Return one image for each record, uint8 (records, height, width, 3).

        The initial noise of image n depends on the seed and n alone. Options that are None are those of the recipe's samples.
        """
        samples = self.recipe.samples
        steps, sampler = samples.steps if steps is None else steps, samples.sampler if sampler is None else sampler
        guidance = samples.guidance if guidance is None else guidance
        negative_text = samples.negative_prompt if negative_prompt is None else negative_prompt
        check_steps(steps, sampler, self.task.path.max_steps, prefix="--")
        check_guidance(guidance, prefix="--")
        rows = self.tokenizer.encode(records, keywords)
        rows |= self.tokenizer.encode_texts(NEGATIVE, [negative_text] * len(records))
        options = {"weights": weights, "steps": steps, "method": sampler, "guidance": guidance}
        options |= {"drop_keywords": drop_keywords}
        options["zero_negative"] = not negative_text and self._zero_unconditional
        batch_size = max(1, min(MAX_BATCH_SIZE, MAX_PIXELS // self.task.image_size**2))
        image_batches = []
        for start in range(0, len(records), batch_size):
            batch = {
                name: torch.from_numpy(value[start : start + batch_size]).to(device) for name, value in rows.items()
            }
            count = len(records[start : start + batch_size])
            rng = Noise(seed, 0, torch.arange(start, start + count, device=device), torch)
            report = partial(_report_batch, progress, start, count, len(records))
            is_bfloat16 = uses_bfloat16(device, self.recipe.training.mixed_precision)
            with torch.autocast("cuda", torch.bfloat16, enabled=is_bfloat16):
                x = self.task.sample(models, batch, rng, **options, progress=report)
            image_batches.append(x.float().cpu().numpy())
        return denormalise_pixels(require_finite(np.concatenate(image_batches)), mode="symmetric")


def summarize_user(request: UserRequest, keywords: RecordKeywords) -> UserSummary:
    """Return what a contact sheet shows of a user: the last liked images, keywords and wish."""
    record = request.record
    recent_items = record.history[-MAX_HISTORY_SHOWN:]
    images = [image for item in recent_items if (image := request.load_image(item)) is not None]
    num_hidden = len(record.history) - len(images)
    return UserSummary(record.user, images, num_hidden, keywords.texts[0], record.wish_or_caption)


def _report_batch(progress: ProgressCallback, num_before: int, count: int, total: int, done: int, steps: int) -> None:
    progress("pictures", num_before * steps + done * count, total * steps)


def _report_candidate(
    progress: ProgressCallback, number: int, num_candidates: int, stage: str, done: int, total: int
) -> None:
    progress(stage, number * total + done, num_candidates * total)
