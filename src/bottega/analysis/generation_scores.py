"""Quality of generated samples, measured with a classifier trained on real data alone (the judge) and beside held-out data.

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
from bottega.data.image.augment import normalise_pixels
from bottega.data.sources.source import Source
from bottega.run.saved import SavedRun
from bottega.run.train import ensure_dependency, is_exported, load
from bottega.tasks import dependencies
from bottega.tasks.classify.media_workload import MediaClassifyWorkload
from bottega.tasks.evaluation_data import EvaluationData
from bottega.tasks.generation.requests import check_sample_memory
from bottega.tasks.generation.workload import GenerationWorkload
from bottega.tasks.measures.attributes import conditional_accuracy, parse_attributes
from bottega.tasks.measures.frechet import distance_of_moments, feature_moments, frechet_distance
from bottega.tasks.measures.motion import DIRECTIONS, motion_direction
from bottega.tasks.measures.pitch import estimate_pitch, note_frequency, semitone_difference
from bottega.tasks.measures.spread import nearest_distances, nearest_ratio, variance_ratio

DEFAULT_COUNTS = {"image": 1000, "video": 1000, "audio": 250}
"""Samples drawn where nobody says how many, unless more are held out. Sounds take longest: their phase is looked for."""
MAX_BYTES, MAX_REFERENCES = 512 << 20, 60_000
"""Samples that are held in memory at once, of the training data and of what is held out: 10,900 pictures of 128 x 128 in
colour. What is more is thinned evenly."""
CHUNK = 256
CONDITION_FIELDS = {"label", "condition", "input_ids", "attention_mask"}
HALF_A_SEMITONE = 0.5
MIN_JUDGE_SKILL = 0.7
"""How far between guessing (0) and always right (1) on real held-out data a judge must be to be believed."""
JUDGE_FREE_MEASURES = ("pitch_accuracy", "motion_accuracy")
"""Measured in the samples themselves."""

ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True)
class GenerationScores:
    """The same measures of generated samples, of real held-out ones, and of real ones through a codec that loses some."""

    generated: dict[str, float]
    real: dict[str, float]
    through_processor: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What is left out, and why."""
    weakly_judged: tuple[str, ...] = ()
    """The measures that rest on a judge that is itself weak; empty where it is good enough, or there is none."""


@dataclass(frozen=True)
class SampleSet:
    """Samples as people know the medium, and what each is or was asked to be: fields of a batch."""

    samples: np.ndarray
    conditions: dict[str, np.ndarray]
    num_available: int = 0
    """How many there are in all; 0 where these were drawn."""

    @property
    def labels(self) -> np.ndarray | None:
        return self.conditions.get("label")


def score_samples(
    saved: SavedRun,
    *,
    data: EvaluationData,
    count: int | None = None,
    inception: Path | None = None,
    seed: int = 0,
    report_progress: ProgressCallback = lambda stage, done, total: None,
    quiet: bool = True,
) -> GenerationScores:
    """Draw, read and compare. Without a judge among the recipe's needs there is nothing to read with."""
    workload = saved.workload
    assert isinstance(workload, GenerationWorkload)
    given, split = data.given, str(data.split)
    if given is None and split not in workload.data.prepared.tables:
        raise UsageError(f"this run has no {split} data; name other data with --data")
    if count is not None:  # pixels are kept as bytes
        check_sample_memory(count, count, max(1, math.prod(workload.metadata.sample) // 8))
    fid = _fid(inception, workload, saved.engine.device) if inception is not None else None
    notes: list[str] = []
    has_own = given is None or _has_own_data(workload, notes)
    # What is wrong with it is said before anything is drawn.
    judge = JudgeModel.open_judge(saved, workload, notes, has_own=has_own, quiet=quiet)
    held_out = collect_samples(
        workload, [workload.read_external_raw(given) if given is not None else workload.read_raw(split)]
    )
    own = [workload.read_raw(table) for table in workload.data.prepared.training_tables] if has_own else None
    training = collect_samples(workload, own) if own is not None else None
    count = max(DEFAULT_COUNTS[workload.medium.name], len(held_out.samples)) if count is None else count
    places = _places(count, len(held_out.samples))
    generated = _generated(saved, workload, held_out, places, seed, report_progress)
    several = {"generated": generated, "real": held_out}
    if workload.medium.name == "audio" or workload.task.latents is not None:
        several["through_processor"] = SampleSet(
            _through_processor(saved, workload, held_out.samples), held_out.conditions
        )
    reference = Reference(workload, judge, held_out, training)
    # More samples are nearer to any distribution, so all columns are compared at the same number of them, and of the
    # same classes: as many as were drawn or are held out, whichever is less.
    compared = min(count, len(held_out.samples))
    places_of = dict.fromkeys(several, places[:compared]) | {"generated": np.arange(compared)}
    found = {name: reference.measure(one, places_of[name]) for name, one in several.items()}
    if fid is not None and training is not None:
        for name, one in several.items():
            found[name]["fid"] = fid(one.samples[places_of[name]], training.samples)
    counts = {"generated": len(generated.samples), "real": len(held_out.samples), "compared": compared}
    if training is not None:
        counts |= {"training": len(training.samples), "training_available": training.num_available}
    judged = _weakly_judged(found["real"], len(workload.metadata.classes), notes)
    return GenerationScores(**found, counts=counts, notes=notes, weakly_judged=judged)


def _weakly_judged(real: dict[str, float], num_classes: int, notes: list[str]) -> tuple[str, ...]:
    """Return the measures that say little because the judge often errs on real data itself, and note that."""
    accuracy, chance = real.get("conditional_accuracy"), 1 / max(2, num_classes)
    if accuracy is None or not (accuracy - chance) / (1 - chance) < MIN_JUDGE_SKILL:
        return ()
    notes.append(
        f"* the judge is weak: of real held-out samples it names {100 * accuracy:.0f} % right (guessing: {100 * chance:.0f} %), "
        "so what it says of generated ones means little; train it longer (needs.judge.settings), or name a better one "
        "(needs.judge.run)"
    )
    return tuple(
        name
        for name in real
        if (name.endswith("_accuracy") and name not in JUDGE_FREE_MEASURES) or name == "frechet_distance"
    )


def _has_own_data(workload: GenerationWorkload, notes: list[str]) -> bool:
    """Whether what the run learnt from is still there; beside other data it can be done without."""
    try:
        return bool(workload.data.prepared.tables)
    except DataError as error:
        reason = str(error).partition(";")[0]
        notes.append(f"{reason}; what is compared with it is left out: frechet_distance, nearest_ratio, fid")
        return False


class Reference:
    """What all samples are compared with, computed once: held-out and training data, as the judge and as pixels."""

    def __init__(
        self, workload: GenerationWorkload, judge: JudgeModel | None, held_out: SampleSet, training: SampleSet | None
    ) -> None:
        self.workload, self.judge, self.held_out = workload, judge, held_out
        seen = judge.classify(training.samples)[1] if judge is not None and training is not None else None
        self.features = feature_moments(seen) if seen is not None else None
        self.training = _comparable(workload, training.samples) if training is not None else None
        self.real = _comparable(workload, held_out.samples)
        self.distances = nearest_distances(self.real, self.training) if self.training is not None else None

    def frechet_distance_to_training(self, samples: np.ndarray) -> float:
        """The Frechet distance of their features to the training data's."""
        assert self.judge is not None
        assert self.features is not None
        return distance_of_moments(feature_moments(self.judge.classify(samples)[1]), self.features)

    def measure(self, one: SampleSet, compared: np.ndarray) -> dict[str, float]:
        """`compared` are the places of the samples whose distribution is compared."""
        found: dict[str, float] = {}
        names, is_real = self.workload.metadata.classes, one is self.held_out
        if self.judge is not None:
            chances, features = self.judge.classify(one.samples)
            if one.labels is not None:
                found |= conditional_accuracy(
                    self.judge.map_to_generator_classes(chances.argmax(1), names), one.labels, names
                )
            if self.features is not None:
                found["frechet_distance"] = distance_of_moments(feature_moments(features[compared]), self.features)
        if one.labels is not None:
            found |= _medium_measures(self.workload, one)
        values = self.real if is_real else _comparable(self.workload, one.samples)
        if one.labels is not None and self.held_out.labels is not None:
            found["variance_ratio"] = variance_ratio(values, one.labels, self.real, self.held_out.labels)
        if self.training is not None and self.distances is not None:
            distances = self.distances if is_real else nearest_distances(values, self.training)
            found["nearest_ratio"] = nearest_ratio(distances, self.distances)
        return found


def _medium_measures(workload: GenerationWorkload, one: SampleSet) -> dict[str, float]:
    """What can be measured in the samples themselves, without anybody's judgement."""
    names = workload.metadata.classes
    assert one.labels is not None
    if workload.medium.name == "audio":
        notes = [note_frequency(name) for name in names]
        if names and all(note is not None for note in notes):
            wanted = np.array(notes, np.float64)[one.labels]
            assert workload.mel is not None
            apart = np.abs(semitone_difference(estimate_pitch(one.samples, workload.mel.mel.sample_rate), wanted))
            return {"pitch_accuracy": float((apart <= HALF_A_SEMITONE).mean())}
    if workload.medium.name == "video":
        ways = parse_attributes(names).get("direction", list(names))
        if ways and all(way in DIRECTIONS for way in ways):
            went = [motion_direction(video) for video in one.samples.astype(np.float32)]
            return {
                "motion_accuracy": float(np.mean([way == ways[i] for way, i in zip(went, one.labels, strict=True)]))
            }
    return {}


class JudgeModel:
    """The part that reads, with its classes in the order of the generator's."""

    def __init__(self, saved: SavedRun, how: Any) -> None:
        self.saved, self.normalisation = saved, how
        assert isinstance(saved.workload, MediaClassifyWorkload)
        self.workload = saved.workload

    @classmethod
    def open_judge(
        cls, saved: SavedRun, workload: GenerationWorkload, notes: list[str], *, has_own: bool = True, quiet: bool
    ) -> JudgeModel | None:
        """None where there is none, or nothing to train it on: one class, or data that is not there any more."""
        need, number, beside = (
            workload.recipe.needs.get("judge"),
            len(workload.metadata.classes),
            saved.directory.path.parent,
        )
        if need is None:
            return None
        if number < (2 if need.run is None else 1):
            said = f"the data has {'one class' if number else 'no classes'}, and a judge tells two or more apart"
            notes.append(f"{said}; conditional_accuracy and frechet_distance are left out")
            return None
        if (
            not has_own
            and need.run is None
            and not is_exported(dependencies.dependency_run(workload.recipe, "judge", beside=beside))
        ):
            notes.append("needs.judge: is not trained yet, and learns from that data; conditional_accuracy is left out")
            return None
        how: dict[str, Any] = {"quiet": quiet, "beside": beside, "allow_data_change": not has_own}
        path = ensure_dependency(workload.recipe, "judge", **how, started_in=workload.data.started_in)
        try:
            # Not its best step: that was chosen on the data which are held out here, and would flatter the real ones.
            opened = load(path, checkpoint="last", device=str(saved.engine.device))
        except CheckpointError as error:
            raise CheckpointError(f"needs.judge: {path}: {error}; delete it to have it trained again") from error
        if not isinstance(opened.workload, MediaClassifyWorkload):
            raise UsageError(f"needs.judge: {path} is not a classifier")
        return cls(opened, getattr(opened.recipe.data, "normalise", None))

    def classify(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chances, features = [], []
        with self.saved.engine.sampling() as models:
            for first in range(0, len(samples), CHUNK):
                part = samples[first : first + CHUNK]
                values = normalise_pixels(part, mode=self.normalisation) if part.dtype == np.uint8 else part
                found = self.workload.predict_with_features(models, values, device=self.saved.engine.device)
                chances.append(found[0])
                features.append(found[1])
        return np.concatenate(chances), np.concatenate(features)

    def map_to_generator_classes(self, predicted: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        places = {name: number for number, name in enumerate(names)}
        return np.array([places.get(name, -1) for name in self.workload.classes.names])[predicted]


def _places(count: int, available: int) -> np.ndarray:
    """Which of the held-out samples each that is drawn is asked to be like: all over and over, or an even choice. The
    first of a folder sorted by class would all be of one."""
    return np.arange(count) % available if count >= available else np.arange(count) * available // count


def _generated(
    saved: SavedRun,
    workload: GenerationWorkload,
    held_out: SampleSet,
    places: np.ndarray,
    seed: int,
    say: ProgressCallback,
) -> SampleSet:
    """Asked for what the held-out samples are, so that both have the same classes."""
    asked = {name: value[places] for name, value in held_out.conditions.items()}
    rows, count, made = {**asked, "number": np.arange(len(places))}, len(places), []
    with saved.engine.sampling() as models:
        for first in range(0, count, CHUNK):
            part = {name: value[first : first + CHUNK] for name, value in rows.items()}
            size = len(part["number"])

            def tell(stage: str, done: int, total: int, before: int = first, size: int = size) -> None:
                say(stage, before * total // size + done, count * total // size)

            # A sample is a function of its number, so it is the same in parts; all of it as floats would be large.
            x = workload.sampler.draw(models, part, device=saved.engine.device, seed=seed, guidance=1.0, say=tell)
            made.append(workload.medium.from_values(x, device=saved.engine.device))
    return SampleSet(np.concatenate(made), asked)


def collect_samples(workload: GenerationWorkload, sources: list[Source]) -> SampleSet:
    """In memory as people know the medium, evenly thinned where it is more than `MOST_BYTES` or `MOST_REFERENCES`."""
    total = sum(map(len, sources))
    first = next((source for source in sources if len(source)), None)
    if first is None:
        raise UsageError("there are no samples to compare with: what is measured is empty; name other data")
    size = _as_known(workload, first.rows(np.arange(1), np.zeros(1, np.int64))).nbytes
    if workload.mel is not None:  # whose spectrograms, as floats, may be the larger
        size = max(size, 4 * math.prod(workload.mel.shape))
    step = max(1, -(-total // MAX_REFERENCES), -(-total * size // MAX_BYTES))
    places = [np.arange(len(source))[::step] for source in sources]
    samples: np.ndarray | None = None
    asked: dict[str, list[np.ndarray]] = {}
    filled = 0
    for source, chosen in zip(sources, places, strict=True):
        for start in range(0, len(chosen), CHUNK):
            index = chosen[start : start + CHUNK]
            rows = source.rows(index, np.zeros_like(index))
            values = _as_known(workload, rows)
            if samples is None:  # once, because joining the parts in the end would hold all of it twice
                samples = np.empty((sum(map(len, places)), *values.shape[1:]), values.dtype)
            samples[filled : filled + len(index)] = values
            filled += len(index)
            for name in CONDITION_FIELDS & rows.keys():
                asked.setdefault(name, []).append(rows[name])
    assert samples is not None
    return SampleSet(samples, {name: np.concatenate(parts) for name, parts in asked.items()}, total)


def _as_known(workload: GenerationWorkload, rows: Any) -> np.ndarray:
    values: np.ndarray = (
        rows["audio"] if workload.medium.name == "audio" else workload.medium.from_values(rows[workload.medium.name])
    )
    return values


def _comparable(workload: GenerationWorkload, samples: np.ndarray) -> np.ndarray:
    """In which distances and variances mean something: pixels, and the logarithm of a sound's bands.

    Pixels stay bytes: only ratios are measured, which no scale changes, and as floats they would be four times as many.
    """
    if workload.mel is None:
        return samples
    return np.concatenate([workload.mel.encode(samples[i : i + CHUNK]) for i in range(0, len(samples), CHUNK)])


def _through_processor(saved: SavedRun, workload: GenerationWorkload, samples: np.ndarray) -> np.ndarray:
    """Real samples as a perfect model would give them back: encoded and decoded."""
    with saved.engine.sampling() as models:
        parts = [
            workload.round_trip(models, samples[i : i + CHUNK], saved.engine.device)
            for i in range(0, len(samples), CHUNK)
        ]
    return np.concatenate(parts)


def _fid(weights: Path, workload: GenerationWorkload, device: Any) -> Callable[[np.ndarray, np.ndarray], float]:
    """The usual FID, for pictures; clips are read frame by frame."""
    if workload.medium.name == "audio":
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
