"""What generated samples are worth: a judge that saw only real data reads them, beside real data held out from training.

All numbers come from the same samples, drawn without guidance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import CheckpointError, DataError, UsageError
from bottega.data.image.augment import normalise
from bottega.data.sources.source import Source
from bottega.run.saved import SavedRun
from bottega.run.train import is_made, load, part
from bottega.tasks import needs
from bottega.tasks.classify.media import ClassifyBranch
from bottega.tasks.evaluation_data import EvaluationData
from bottega.tasks.generation.asked import check_count
from bottega.tasks.generation.branch import GenerationBranch
from bottega.tasks.measures.attributes import attributes, conditional_accuracy
from bottega.tasks.measures.frechet import distance_of_moments, frechet_distance, moments
from bottega.tasks.measures.motion import DIRECTIONS, direction
from bottega.tasks.measures.pitch import note_frequency, pitch, semitones
from bottega.tasks.measures.spread import nearest_distances, nearest_ratio, variance_ratio

COUNTS = {"image": 1000, "video": 1000, "audio": 250}
"""Samples drawn where nobody says how many, unless more are held out. Sounds take longest: their phase is looked for."""
MOST_BYTES, MOST_REFERENCES = 512 << 20, 60_000
"""Samples that are held in memory at once, of the training data and of what is held out: 10,900 pictures of 128 x 128 in
colour. What is more is thinned evenly."""
CHUNK = 256
ASKED = {"label", "condition", "input_ids", "attention_mask"}
HALF_A_SEMITONE = 0.5
GOOD_JUDGE = 0.7
"""How far between guessing (0) and always right (1) on real held-out data a judge must be to be believed."""
UNJUDGED = ("pitch_accuracy", "motion_accuracy")
"""Measured in the samples themselves."""

Say = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Scores:
    """The same measures of generated samples, of real held-out ones, and of real ones through a codec that loses some."""

    generated: dict[str, float]
    real: dict[str, float]
    through_codec: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What is left out, and why."""
    judged: tuple[str, ...] = ()
    """The measures that rest on a judge that is itself weak; empty where it is good enough, or there is none."""


@dataclass(frozen=True)
class Collection:
    """Samples as people know the medium, and what each is or was asked to be: fields of a batch."""

    samples: np.ndarray
    asked: dict[str, np.ndarray]
    available: int = 0
    """How many there are in all; 0 where these were drawn."""

    @property
    def labels(self) -> np.ndarray | None:
        return self.asked.get("label")


def score(
    saved: SavedRun,
    *,
    chosen: EvaluationData,
    count: int | None = None,
    inception: Path | None = None,
    seed: int = 0,
    say: Say = lambda stage, done, total: None,
    quiet: bool = True,
) -> Scores:
    """Draw, read and compare. Without a judge among the recipe's needs there is nothing to read with."""
    branch = saved.branch
    assert isinstance(branch, GenerationBranch)
    given, split = chosen.given, str(chosen.split)
    if given is None and split not in branch.prepared.tables:
        raise UsageError(f"this run has no {split} data; name other data with --data")
    if count is not None:  # pixels are kept as bytes
        check_count(count, count, max(1, math.prod(branch.facts.sample) // 8))
    fid = _fid(inception, branch, saved.engine.device) if inception is not None else None
    notes: list[str] = []
    has_own = given is None or _has_own_data(branch, notes)
    # What is wrong with it is said before anything is drawn.
    judge = Judge.of(saved, branch, notes, has_own=has_own, quiet=quiet)
    held_out = collected(branch, [branch.raw_other(given) if given is not None else branch.raw(split)])
    own = [branch.raw(table) for table in branch.prepared.training_tables] if has_own else None
    training = collected(branch, own) if own is not None else None
    count = max(COUNTS[branch.medium], len(held_out.samples)) if count is None else count
    places = _places(count, len(held_out.samples))
    generated = _generated(saved, branch, held_out, places, seed, say)
    several = {"generated": generated, "real": held_out}
    if branch.medium == "audio" or branch.task.latents is not None:
        several["through_codec"] = Collection(_through_codec(saved, branch, held_out.samples), held_out.asked)
    reference = Reference(branch, judge, held_out, training)
    # More samples are nearer to any distribution, so all columns are compared at the same number of them, and of the
    # same classes: as many as were drawn or are held out, whichever is less.
    compared = min(count, len(held_out.samples))
    places_of = dict.fromkeys(several, places[:compared]) | {"generated": np.arange(compared)}
    found = {name: reference.measures(one, places_of[name]) for name, one in several.items()}
    if fid is not None and training is not None:
        for name, one in several.items():
            found[name]["fid"] = fid(one.samples[places_of[name]], training.samples)
    counts = {"generated": len(generated.samples), "real": len(held_out.samples), "compared": compared}
    if training is not None:
        counts |= {"training": len(training.samples), "training_available": training.available}
    judged = _weakly_judged(found["real"], len(branch.facts.classes), notes)
    return Scores(**found, counts=counts, notes=notes, judged=judged)


def _weakly_judged(real: dict[str, float], num_classes: int, notes: list[str]) -> tuple[str, ...]:
    """Return the measures that say little because the judge often errs on real data itself, and note that."""
    accuracy, chance = real.get("conditional_accuracy"), 1 / max(2, num_classes)
    if accuracy is None or not (accuracy - chance) / (1 - chance) < GOOD_JUDGE:
        return ()
    notes.append(
        f"* the judge is weak: of real held-out samples it names {100 * accuracy:.0f} % right (guessing: {100 * chance:.0f} %), "
        "so what it says of generated ones means little; train it longer (needs.judge.settings), or name a better one "
        "(needs.judge.run)"
    )
    return tuple(
        name for name in real if (name.endswith("_accuracy") and name not in UNJUDGED) or name == "frechet_distance"
    )


def _has_own_data(branch: GenerationBranch, notes: list[str]) -> bool:
    """Whether what the run learnt from is still there; beside other data it can be done without."""
    try:
        return bool(branch.prepared.tables)
    except DataError as error:
        reason = str(error).partition(";")[0]
        notes.append(f"{reason}; what is compared with it is left out: frechet_distance, nearest_ratio, fid")
        return False


class Reference:
    """What all samples are compared with, computed once: held-out and training data, as the judge and as pixels."""

    def __init__(
        self, branch: GenerationBranch, judge: Judge | None, held_out: Collection, training: Collection | None
    ) -> None:
        self.branch, self.judge, self.held_out = branch, judge, held_out
        seen = judge.read(training.samples)[1] if judge is not None and training is not None else None
        self.features = moments(seen) if seen is not None else None
        self.training = _comparable(branch, training.samples) if training is not None else None
        self.real = _comparable(branch, held_out.samples)
        self.distances = nearest_distances(self.real, self.training) if self.training is not None else None

    def distance(self, samples: np.ndarray) -> float:
        """The Frechet distance of their features to the training data's."""
        assert self.judge is not None
        assert self.features is not None
        return distance_of_moments(moments(self.judge.read(samples)[1]), self.features)

    def measures(self, one: Collection, compared: np.ndarray) -> dict[str, float]:
        """`compared` are the places of the samples whose distribution is compared."""
        found: dict[str, float] = {}
        names, is_real = self.branch.facts.classes, one is self.held_out
        if self.judge is not None:
            chances, features = self.judge.read(one.samples)
            if one.labels is not None:
                found |= conditional_accuracy(self.judge.to_ours(chances.argmax(1), names), one.labels, names)
            if self.features is not None:
                found["frechet_distance"] = distance_of_moments(moments(features[compared]), self.features)
        if one.labels is not None:
            found |= _medium_measures(self.branch, one)
        values = self.real if is_real else _comparable(self.branch, one.samples)
        if one.labels is not None and self.held_out.labels is not None:
            found["variance_ratio"] = variance_ratio(values, one.labels, self.real, self.held_out.labels)
        if self.training is not None and self.distances is not None:
            distances = self.distances if is_real else nearest_distances(values, self.training)
            found["nearest_ratio"] = nearest_ratio(distances, self.distances)
        return found


def _medium_measures(branch: GenerationBranch, one: Collection) -> dict[str, float]:
    """What can be measured in the samples themselves, without anybody's judgement."""
    names = branch.facts.classes
    assert one.labels is not None
    if branch.medium == "audio":
        notes = [note_frequency(name) for name in names]
        if names and all(note is not None for note in notes):
            wanted = np.array(notes, np.float64)[one.labels]
            assert branch.mel is not None
            apart = np.abs(semitones(pitch(one.samples, branch.mel.mel.sample_rate), wanted))
            return {"pitch_accuracy": float((apart <= HALF_A_SEMITONE).mean())}
    if branch.medium == "video":
        ways = attributes(names).get("direction", list(names))
        if ways and all(way in DIRECTIONS for way in ways):
            went = [direction(video) for video in one.samples.astype(np.float32)]
            return {
                "motion_accuracy": float(np.mean([way == ways[i] for way, i in zip(went, one.labels, strict=True)]))
            }
    return {}


class Judge:
    """The part that reads, with its classes in the order of the generator's."""

    def __init__(self, saved: SavedRun, how: Any) -> None:
        self.saved, self.how = saved, how
        assert isinstance(saved.branch, ClassifyBranch)
        self.branch = saved.branch

    @classmethod
    def of(
        cls, saved: SavedRun, branch: GenerationBranch, notes: list[str], *, has_own: bool = True, quiet: bool
    ) -> Judge | None:
        """None where there is none, or nothing to train it on: one class, or data that is not there any more."""
        need, number, beside = branch.recipe.needs.get("judge"), len(branch.facts.classes), saved.directory.path.parent
        if need is None:
            return None
        if number < (2 if need.run is None else 1):
            said = f"the data has {'one class' if number else 'no classes'}, and a judge tells two or more apart"
            notes.append(f"{said}; conditional_accuracy and frechet_distance are left out")
            return None
        if not has_own and need.run is None and not is_made(needs.part_run(branch.recipe, "judge", beside=beside)):
            notes.append("needs.judge: is not trained yet, and learns from that data; conditional_accuracy is left out")
            return None
        how: dict[str, Any] = {"quiet": quiet, "beside": beside, "allow_data_change": not has_own}
        path = part(branch.recipe, "judge", **how, started_in=branch.started_in)
        try:
            # Not its best step: that was chosen on the data which are held out here, and would flatter the real ones.
            opened = load(path, checkpoint="last", device=str(saved.engine.device))
        except CheckpointError as error:
            raise CheckpointError(f"needs.judge: {path}: {error}; delete it to have it trained again") from error
        if not isinstance(opened.branch, ClassifyBranch):
            raise UsageError(f"needs.judge: {path} is not a classifier")
        return cls(opened, getattr(opened.recipe.data, "normalise", None))

    def read(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chances, features = [], []
        with self.saved.engine.sampling() as models:
            for first in range(0, len(samples), CHUNK):
                part = samples[first : first + CHUNK]
                values = normalise(part, how=self.how) if part.dtype == np.uint8 else part
                found = self.branch.read(models, values, device=self.saved.engine.device)
                chances.append(found[0])
                features.append(found[1])
        return np.concatenate(chances), np.concatenate(features)

    def to_ours(self, predicted: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        places = {name: number for number, name in enumerate(names)}
        return np.array([places.get(name, -1) for name in self.branch.classes.names])[predicted]


def _places(count: int, available: int) -> np.ndarray:
    """Which of the held-out samples each that is drawn is asked to be like: all over and over, or an even choice. The
    first of a folder sorted by class would all be of one."""
    return np.arange(count) % available if count >= available else np.arange(count) * available // count


def _generated(
    saved: SavedRun, branch: GenerationBranch, held_out: Collection, places: np.ndarray, seed: int, say: Say
) -> Collection:
    """Asked for what the held-out samples are, so that both have the same classes."""
    asked = {name: value[places] for name, value in held_out.asked.items()}
    rows, count, made = {**asked, "number": np.arange(len(places))}, len(places), []
    with saved.engine.sampling() as models:
        for first in range(0, count, CHUNK):
            part = {name: value[first : first + CHUNK] for name, value in rows.items()}
            size = len(part["number"])

            def tell(stage: str, done: int, total: int, before: int = first, size: int = size) -> None:
                say(stage, before * total // size + done, count * total // size)

            # A sample is a function of its number, so it is the same in parts; all of it as floats would be large.
            x = branch.draw(models, part, device=saved.engine.device, seed=seed, guidance=1.0, say=tell)
            made.append(branch.medium_of(x))
    return Collection(np.concatenate(made), asked)


def collected(branch: GenerationBranch, sources: list[Source]) -> Collection:
    """In memory as people know the medium, evenly thinned where it is more than `MOST_BYTES` or `MOST_REFERENCES`."""
    total = sum(map(len, sources))
    first = next((source for source in sources if len(source)), None)
    if first is None:
        raise UsageError("there are no samples to compare with: what is measured is empty; name other data")
    size = _as_known(branch, first.rows(np.arange(1), np.zeros(1, np.int64))).nbytes
    if branch.mel is not None:  # whose spectrograms, as floats, may be the larger
        size = max(size, 4 * math.prod(branch.mel.shape))
    step = max(1, -(-total // MOST_REFERENCES), -(-total * size // MOST_BYTES))
    places = [np.arange(len(source))[::step] for source in sources]
    samples: np.ndarray | None = None
    asked: dict[str, list[np.ndarray]] = {}
    filled = 0
    for source, chosen in zip(sources, places, strict=True):
        for start in range(0, len(chosen), CHUNK):
            index = chosen[start : start + CHUNK]
            rows = source.rows(index, np.zeros_like(index))
            values = _as_known(branch, rows)
            if samples is None:  # once, because joining the parts in the end would hold all of it twice
                samples = np.empty((sum(map(len, places)), *values.shape[1:]), values.dtype)
            samples[filled : filled + len(index)] = values
            filled += len(index)
            for name in ASKED & rows.keys():
                asked.setdefault(name, []).append(rows[name])
    assert samples is not None
    return Collection(samples, {name: np.concatenate(parts) for name, parts in asked.items()}, total)


def _as_known(branch: GenerationBranch, rows: Any) -> np.ndarray:
    values: np.ndarray = rows["audio"] if branch.medium == "audio" else branch.medium_of(rows[branch.medium])
    return values


def _comparable(branch: GenerationBranch, samples: np.ndarray) -> np.ndarray:
    """In which distances and variances mean something: pixels, and the logarithm of a sound's bands.

    Pixels stay bytes: only ratios are measured, which no scale changes, and as floats they would be four times as many.
    """
    if branch.mel is None:
        return samples
    return np.concatenate([branch.mel.encode(samples[i : i + CHUNK]) for i in range(0, len(samples), CHUNK)])


def _through_codec(saved: SavedRun, branch: GenerationBranch, samples: np.ndarray) -> np.ndarray:
    """Real samples as a perfect model would give them back: encoded and decoded."""
    with saved.engine.sampling() as models:
        parts = [
            branch.round_trip(models, samples[i : i + CHUNK], saved.engine.device)
            for i in range(0, len(samples), CHUNK)
        ]
    return np.concatenate(parts)


def _fid(weights: Path, branch: GenerationBranch, device: Any) -> Callable[[np.ndarray, np.ndarray], float]:
    """The usual FID, for pictures; clips are read frame by frame."""
    if branch.medium == "audio":
        raise UsageError("--inception: sounds are no pictures; leave it out")
    import torch

    from bottega.models.metric_networks.inception import load_inception

    network = load_inception(weights, device=device)

    def read(samples: np.ndarray) -> np.ndarray:
        frames = samples.reshape(-1, *samples.shape[-3:])
        return np.concatenate(
            [
                network(torch.from_numpy(frames[i : i + CHUNK]).to(device)).cpu().numpy()
                for i in range(0, len(frames), CHUNK)
            ]
        )

    known: list[np.ndarray] = []

    def distance(samples: np.ndarray, training: np.ndarray) -> float:
        known[:] = known or [read(training)]
        return frechet_distance(read(samples), known[0])

    return distance
