"""Pictures for people: several weightings of what is known of each, and the best of them as a CLIP judges."""

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
from bottega.tasks.generation.sampling_options import check_guidance, check_steps, require_finite, uses_bfloat16
from bottega.tasks.personalize.clip_judge import ClipJudge, Scores, pick_best
from bottega.tasks.personalize.config import ConditionWeights, PersonalizeRecipe
from bottega.tasks.personalize.contact_sheets import MAX_HISTORY_SHOWN, GeneratedRow, UserSummary, write_contact_sheet
from bottega.tasks.personalize.data.condition_tokens import Said
from bottega.tasks.personalize.data.records import Record
from bottega.tasks.personalize.frozen_models import PersonalizeMetadata
from bottega.tasks.personalize.keywords import Say
from bottega.tasks.personalize.prompts import Teller
from bottega.tasks.personalize.task import NEGATIVE, Personalize
from bottega.tasks.personalize.user_requests import UserRequest

AT_ONCE = 1 << 20
"""Pixels that are drawn together: four pictures of 512 x 512."""
MOST = 64


@dataclass(frozen=True)
class ImageChoice:
    """Of one picture: whose it is, what was said, and which weighting was taken."""

    user: str
    wish: str
    keywords: Said
    weighting: ConditionWeights
    scores: Scores | None
    """None where no CLIP judges."""

    @property
    def caption(self) -> str:
        w = self.weighting
        return f"{w.soft:g} / {w.keywords:g} / {w.target:g}"

    def to_json(self) -> dict[str, Any]:
        scores = None if self.scores is None else self.scores._asdict()
        keywords = {"preference": list(self.keywords.preference), "target": list(self.keywords.target)}
        shown = {"user": self.user, "wish": self.wish, "keywords": keywords}
        return {**shown, "weighting": self.weighting.model_dump(), "scores": scores}


@final
@dataclass(frozen=True, repr=False, eq=False)
class PersonalImages:
    """Pictures uint8 [n, h, w, 3], which it can be used as; and of each, why it is as it is."""

    images: np.ndarray
    choices: tuple[ImageChoice, ...]
    summaries: tuple[UserSummary, ...]
    """Whom they are for, each with `each` pictures in turn."""
    images_per_request: int
    notes: tuple[str, ...] = ()

    @property
    def pictures(self) -> np.ndarray:
        """The same as `images`, under its earlier name."""
        return self.images

    def __repr__(self) -> str:
        height, width = self.images.shape[1:3]
        num_people = len({known.user for known in self.summaries})
        pictures = "1 picture" if len(self) == 1 else f"{len(self):,} pictures"
        return f"{pictures} of {width} x {height} for {f'{num_people:,} people' if num_people > 1 else '1 person'}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.images.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.images.dtype

    def __getitem__(self, which: Any) -> np.ndarray:
        return self.images[which]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.images)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.images, dtype=dtype, copy=True if copy is None else copy)

    def __len__(self) -> int:
        return len(self.images)

    def write(self, target: Path) -> dict[str, Any]:
        """As single files with a sheet beside them, or as one sheet; what --json prints."""
        with explain_write_errors(target):
            files = replace_previous_files(target, lambda: self._written(target))
        told = [choice.to_json() for choice in self.choices]
        if is_folder(target):
            told = [{"file": str(file), **one} for file, one in zip(files, told, strict=False)]
        notes = {"notes": list(self.notes)} if self.notes else {}
        return {"files": [str(path) for path in files], "count": len(self), "pictures": told, **notes}

    def _written(self, target: Path) -> list[Path]:
        if not is_folder(target):
            if len(self) == 1 or target.suffix.lower() != ".png":
                return write_images(self.images, target)
            self.write_sheet(target)
            return [target]
        singles = build_numbered_paths(target, len(self), ".png")
        for picture, file in zip(self.images, singles, strict=True):
            write_images(picture[None], file)
        self.write_sheet(target / "sheet.png")
        return [*singles, target / "sheet.png"]

    def write_sheet(self, path: Path) -> None:
        answers = []
        for number, known in enumerate(self.summaries):
            own = slice(number * self.images_per_request, (number + 1) * self.images_per_request)
            captions = [choice.caption for choice in self.choices[own]]
            answers.append(GeneratedRow(known, list(self.images[own]), captions))
        write_contact_sheet(answers, path)


@final
class PersonalSampler:
    """Draws for one run."""

    def __init__(
        self, recipe: PersonalizeRecipe, task: Personalize, teller: Teller, facts: PersonalizeMetadata
    ) -> None:
        self.recipe, self.task, self.teller, self.facts = recipe, task, teller, facts
        self._judges: dict[str, ClipJudge] = {}

    def load_judge(self, device: Any) -> ClipJudge | None:
        if self.facts.clip is None:
            return None
        name = str(device)
        if name not in self._judges:
            self._judges[name] = ClipJudge.load(Path(self.facts.clip.folder), device)
        return self._judges[name]

    def generate(
        self,
        models: Models,
        people: Sequence[UserRequest],
        said: Sequence[Said],
        *,
        each: int,
        device: Any,
        seed: int,
        say: Say,
        **how: Any,
    ) -> PersonalImages:
        records = [person.record for person in people for _ in range(each)]
        repeated = [one for one in said for _ in range(each)]
        pictures, chosen, scores = self.sample_best(models, records, repeated, device=device, seed=seed, say=say, **how)
        choices = [
            ImageChoice(record.user, record.wish_or_caption, one, weighting, score)
            for record, one, weighting, score in zip(records, repeated, chosen, scores, strict=True)
        ]
        notes = [
            "there is no CLIP to judge (model.clip), so the first of samples.weightings is drawn and none is picked"
        ]
        known = tuple(self.summarize_user(person, one) for person, one in zip(people, said, strict=True))
        is_judged = self.facts.clip is not None or len(self.recipe.samples.weightings) == 1
        return PersonalImages(pictures, tuple(choices), known, each, () if is_judged else tuple(notes))

    def sample_best(
        self,
        models: Models,
        records: Sequence[Record],
        said: Sequence[Said],
        *,
        device: Any,
        seed: int,
        say: Say,
        **how: Any,
    ) -> tuple[np.ndarray, list[ConditionWeights], list[Scores | None]]:
        """One picture for each record: the best of all weightings, each from the same noise."""
        judge, weightings = self.load_judge(device), self.recipe.samples.weightings
        asked = weightings if judge is not None else weightings[:1]
        total = len(asked)
        drawn = []
        for number, weights in enumerate(asked):
            told = partial(_shifted, say, number, total)
            drawn.append(
                self.sample_images(models, records, said, weights=weights, device=device, seed=seed, say=told, **how)
            )
        if judge is None:
            return drawn[0], [asked[0]] * len(records), [None] * len(records)
        words = {"likes": [one.texts[0] for one in said], "wishes": [record.wish_or_caption for record in records]}
        scores = judge.score_candidates(drawn, **words)
        taken = pick_best(scores, self.recipe.samples.preference_weight)
        pictures = np.stack([drawn[choice][row] for row, choice in enumerate(taken)])
        return pictures, [asked[choice] for choice in taken], [scores[choice][row] for row, choice in enumerate(taken)]

    def sample_images(
        self,
        models: Models,
        records: Sequence[Record],
        said: Sequence[Said],
        *,
        weights: ConditionWeights,
        device: Any,
        seed: int,
        say: Say,
        drop_keywords: bool = False,
        steps: int | None = None,
        sampler: Any = None,
        guidance: float | None = None,
        negative_prompt: str | None = None,
    ) -> np.ndarray:
        """uint8 [n, h, w, 3], one for each record. Picture n begins with the noise f(seed, n), whatever else is asked."""
        samples = self.recipe.samples
        steps, sampler = samples.steps if steps is None else steps, samples.sampler if sampler is None else sampler
        guidance = samples.guidance if guidance is None else guidance
        negative = samples.negative_prompt if negative_prompt is None else negative_prompt
        check_steps(steps, sampler, self.task.path.max_steps, prefix="--")
        check_guidance(guidance, prefix="--")
        rows = self.teller.sayings.encode(records, said)
        rows |= self.teller.sayings.encode_texts(NEGATIVE, [negative] * len(records))
        how = {"weights": weights, "steps": steps, "method": sampler, "guidance": guidance}
        how |= {"drop_keywords": drop_keywords}
        how["zero_negative"] = not negative and self.teller.texts.facts.zero_unconditional
        size = max(1, min(MOST, AT_ONCE // self.task.image_size**2))
        made = []
        for start in range(0, len(records), size):
            part = {name: torch.from_numpy(value[start : start + size]).to(device) for name, value in rows.items()}
            count = len(records[start : start + size])
            rng = Noise(seed, 0, torch.arange(start, start + count, device=device), torch)
            told = partial(_within, say, start, count, len(records))
            with torch.autocast(
                "cuda", torch.bfloat16, enabled=uses_bfloat16(device, self.recipe.training.mixed_precision)
            ):
                x = self.task.sample(models, part, rng, **how, progress=told)
            made.append(x.float().cpu().numpy())
        return denormalise_pixels(require_finite(np.concatenate(made)), mode="symmetric")

    def summarize_user(self, person: UserRequest, said: Said) -> UserSummary:
        record = person.record
        shown = [
            picture for item in record.history[-MAX_HISTORY_SHOWN:] if (picture := person.load_image(item)) is not None
        ]
        return UserSummary(record.user, shown, len(record.history) - len(shown), said.texts[0], record.wish_or_caption)


def _within(say: Say, before: int, count: int, total: int, done: int, steps: int) -> None:
    say("pictures", before * steps + done * count, total * steps)


def _shifted(say: Say, number: int, of: int, stage: str, done: int, total: int) -> None:
    say(stage, number * total + done, of * total)
