"""Quality of generated samples: measured with a classifier of real data (the judge), and compared with held-out data.

All numbers come from the same samples, drawn without guidance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bottega.analysis.judge_model import JudgeModel
from bottega.core.errors import DataError, UsageError
from bottega.data.sources.source import Source
from bottega.run.saved import SavedRun
from bottega.tasks.evaluation_data import EvaluationData
from bottega.tasks.generation.requests import check_sample_memory
from bottega.tasks.generation.workload import GenerationWorkload
from bottega.tasks.metrics.attributes import conditional_accuracy, parse_attributes
from bottega.tasks.metrics.frechet import distance_of_moments, feature_moments, frechet_distance
from bottega.tasks.metrics.motion import DIRECTIONS, detect_motion_direction
from bottega.tasks.metrics.pitch import estimate_pitch, parse_note_frequency, semitone_difference
from bottega.tasks.metrics.spread import nearest_distances, nearest_ratio, variance_ratio

DEFAULT_COUNTS = {"image": 1000, "video": 1000, "audio": 250}
"""Default number of samples per medium, unless more are held out. Audio is slowest, because its phase is reconstructed."""
MAX_BYTES, MAX_REFERENCES = 512 << 20, 60_000
"""Maximum size and number of the samples in memory, for the training data and again for the held-out data: 512 MiB are 10,900
RGB images of 128 x 128. Larger data is subsampled evenly."""
CHUNK_SIZE = 256
"""Number of samples processed at once."""
CONDITION_FIELDS = {"label", "condition", "input_ids", "attention_mask"}
HALF_A_SEMITONE = 0.5
MIN_JUDGE_SKILL = 0.7
"""Accuracy on real held-out data, scaled from chance (0) to perfect (1), below which the judge is reported as weak."""
JUDGE_FREE_MEASURES = ("pitch_accuracy", "motion_accuracy")
"""Measures of the samples themselves, without the judge."""

ProgressCallback = Callable[[str, int, int], None]


@dataclass(frozen=True)
class GenerationScores:
    """The same measures of generated samples, of real held-out ones, and of these after the lossy mel processor or autoencoder."""

    generated: dict[str, float]
    real: dict[str, float]
    through_processor: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Measures that are left out, and why."""
    weakly_judged: tuple[str, ...] = ()
    """The measures that depend on a weak judge; empty if the judge is good enough or there is none."""


@dataclass(frozen=True)
class SampleSet:
    """Samples as pixels or waveforms, with their conditions (label, vector or text) as fields of a batch."""

    samples: np.ndarray
    conditions: dict[str, np.ndarray]
    num_available: int = 0
    """Size of the data before subsampling; 0 for generated samples."""

    @property
    def labels(self) -> np.ndarray | None:
        """Class indices, or None for unlabelled samples."""
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
    """Draw samples and score them beside held-out data; without `needs.judge`, the measures that need a judge are left out.

    `count` defaults to `DEFAULT_COUNTS`, or to the number of held-out samples if that is larger. `inception` is a file of
    Inception weights; with it, FID is computed too.
    """
    workload = saved.workload
    assert isinstance(workload, GenerationWorkload)
    external, split = data.external, str(data.split)
    if external is None and split not in workload.data.prepared.tables:
        raise UsageError(f"this run has no {split} data; give other data with --data")
    if count is not None:  # pixels are held as bytes
        check_sample_memory(count, count, max(1, math.prod(workload.metadata.sample) // 8))
    compute_fid = _build_fid_function(inception, workload, saved.engine.device) if inception is not None else None
    notes: list[str] = []
    has_training_data = external is None or _has_own_data(workload, notes)
    # Before sampling, so that a problem with the judge is reported at once.
    judge = JudgeModel.open_judge(saved, workload, notes, has_own_data=has_training_data, quiet=quiet)
    held_out = collect_samples(
        workload, [workload.read_external_raw(external) if external is not None else workload.read_raw(split)]
    )
    training_sources = (
        [workload.read_raw(table) for table in workload.data.prepared.training_tables] if has_training_data else None
    )
    training = collect_samples(workload, training_sources) if training_sources is not None else None
    count = max(DEFAULT_COUNTS[workload.medium.name], len(held_out.samples)) if count is None else count
    indices = _choose_matching_indices(count, len(held_out.samples))
    generated = _draw_samples(saved, workload, held_out, indices, seed, report_progress)
    sample_sets = {"generated": generated, "real": held_out}
    if workload.medium.name == "audio" or workload.task.latents is not None:
        sample_sets["through_processor"] = SampleSet(
            _round_trip(saved, workload, held_out.samples), held_out.conditions
        )
    reference = Reference(workload, judge, held_out, training)
    # The Frechet distance falls with the number of samples, so all columns use the same number of samples of the same
    # classes: the number drawn or the number held out, whichever is smaller.
    num_compared = min(count, len(held_out.samples))
    compared_indices = dict.fromkeys(sample_sets, indices[:num_compared]) | {"generated": np.arange(num_compared)}
    scores = {name: reference.measure(sample_set, compared_indices[name]) for name, sample_set in sample_sets.items()}
    if compute_fid is not None and training is not None:
        for name, sample_set in sample_sets.items():
            scores[name]["fid"] = compute_fid(sample_set.samples[compared_indices[name]], training.samples)
    counts = {"generated": len(generated.samples), "real": len(held_out.samples), "compared": num_compared}
    if training is not None:
        counts |= {"training": len(training.samples), "training_available": training.num_available}
    weakly_judged = _find_weak_judge_measures(scores["real"], len(workload.metadata.classes), notes)
    return GenerationScores(**scores, counts=counts, notes=notes, weakly_judged=weakly_judged)


def _find_weak_judge_measures(real: dict[str, float], num_classes: int, notes: list[str]) -> tuple[str, ...]:
    """Return the measures that are unreliable because the judge is weak on real data, and add a note."""
    accuracy, chance = real.get("conditional_accuracy"), 1 / max(2, num_classes)
    if accuracy is None or not (accuracy - chance) / (1 - chance) < MIN_JUDGE_SKILL:
        return ()
    notes.append(
        f"* the judge is weak: its accuracy on real held-out samples is {100 * accuracy:.0f} % (chance: {100 * chance:.0f} %), "
        "so its measures of generated samples are unreliable; train it longer (needs.judge.settings), or use a better one "
        "(needs.judge.run)"
    )
    return tuple(
        name
        for name in real
        if (name.endswith("_accuracy") and name not in JUDGE_FREE_MEASURES) or name == "frechet_distance"
    )


def _has_own_data(workload: GenerationWorkload, notes: list[str]) -> bool:
    """Return whether the training data of the run still exists; other data can be scored without it, which is noted."""
    try:
        return bool(workload.data.prepared.tables)
    except DataError as error:
        reason = str(error).partition(";")[0]
        notes.append(f"{reason}; measures that compare with it are left out: frechet_distance, nearest_ratio, fid")
        return False


class Reference:
    """Held-out and training data that samples are compared with: judge features and comparable values, computed once."""

    def __init__(
        self, workload: GenerationWorkload, judge: JudgeModel | None, held_out: SampleSet, training: SampleSet | None
    ) -> None:
        self.workload, self.judge, self.held_out = workload, judge, held_out
        features = judge.classify(training.samples)[1] if judge is not None and training is not None else None
        self.training_moments = feature_moments(features) if features is not None else None
        self.training_values = _to_comparable(workload, training.samples) if training is not None else None
        self.held_out_values = _to_comparable(workload, held_out.samples)
        self.held_out_distances = (
            nearest_distances(self.held_out_values, self.training_values) if self.training_values is not None else None
        )

    def frechet_distance_to_training(self, samples: np.ndarray) -> float:
        """Return the Frechet distance between the judge features of `samples` and those of the training data."""
        assert self.judge is not None
        assert self.training_moments is not None
        return distance_of_moments(feature_moments(self.judge.classify(samples)[1]), self.training_moments)

    def measure(self, sample_set: SampleSet, compared_indices: np.ndarray) -> dict[str, float]:
        """Return all measures of a set; the Frechet distance uses the samples with the indices `compared_indices`."""
        measures: dict[str, float] = {}
        names, is_real = self.workload.metadata.classes, sample_set is self.held_out
        if self.judge is not None:
            probabilities, features = self.judge.classify(sample_set.samples)
            if sample_set.labels is not None:
                measures |= conditional_accuracy(
                    self.judge.map_to_generator_classes(probabilities.argmax(1), names), sample_set.labels, names
                )
            if self.training_moments is not None:
                measures["frechet_distance"] = distance_of_moments(
                    feature_moments(features[compared_indices]), self.training_moments
                )
        if sample_set.labels is not None:
            measures |= _measure_medium(self.workload, sample_set)
        values = self.held_out_values if is_real else _to_comparable(self.workload, sample_set.samples)
        if sample_set.labels is not None and self.held_out.labels is not None:
            measures["variance_ratio"] = variance_ratio(
                values, sample_set.labels, self.held_out_values, self.held_out.labels
            )
        if self.training_values is not None and self.held_out_distances is not None:
            distances = self.held_out_distances if is_real else nearest_distances(values, self.training_values)
            measures["nearest_ratio"] = nearest_ratio(distances, self.held_out_distances)
        return measures


def _measure_medium(workload: GenerationWorkload, sample_set: SampleSet) -> dict[str, float]:
    """Return measures of the samples themselves, without the judge: pitch of audio, direction of motion in video."""
    names = workload.metadata.classes
    assert sample_set.labels is not None
    if workload.medium.name == "audio":
        notes = [parse_note_frequency(name) for name in names]
        if names and all(note is not None for note in notes):
            expected = np.array(notes, np.float64)[sample_set.labels]
            assert workload.mel is not None
            pitch = estimate_pitch(sample_set.samples, workload.mel.mel.sample_rate)
            return {"pitch_accuracy": float((np.abs(semitone_difference(pitch, expected)) <= HALF_A_SEMITONE).mean())}
    if workload.medium.name == "video":
        directions = parse_attributes(names).get("direction", list(names))
        if directions and all(direction in DIRECTIONS for direction in directions):
            estimated = [detect_motion_direction(video) for video in sample_set.samples.astype(np.float32)]
            hits = [name == directions[i] for name, i in zip(estimated, sample_set.labels, strict=True)]
            return {"motion_accuracy": float(np.mean(hits))}
    return {}


def _choose_matching_indices(count: int, num_available: int) -> np.ndarray:
    """Return for each of `count` samples the index of the held-out sample whose condition it gets.

    These are all held-out samples in turn, or an evenly spaced subset: the first ones of a folder sorted by class would all
    have the same class.
    """
    return np.arange(count) % num_available if count >= num_available else np.arange(count) * num_available // count


def _draw_samples(
    saved: SavedRun,
    workload: GenerationWorkload,
    held_out: SampleSet,
    indices: np.ndarray,
    seed: int,
    report_progress: ProgressCallback,
) -> SampleSet:
    """Draw samples under the conditions of the held-out samples `indices`, so that both have the same classes."""
    conditions = {name: value[indices] for name, value in held_out.conditions.items()}
    rows, count, chunks = {**conditions, "number": np.arange(len(indices))}, len(indices), []
    with saved.engine.sampling() as models:
        for start in range(0, count, CHUNK_SIZE):
            chunk = {name: value[start : start + CHUNK_SIZE] for name, value in rows.items()}
            size = len(chunk["number"])

            def report_chunk(stage: str, done: int, total: int, num_before: int = start, size: int = size) -> None:
                report_progress(stage, num_before * total // size + done, count * total // size)

            # A sample is a function of its number, so chunks do not change it; all samples at once would be large as floats.
            x = workload.sampler.draw(
                models, chunk, device=saved.engine.device, seed=seed, guidance=1.0, progress=report_chunk
            )
            chunks.append(workload.medium.from_values(x, device=saved.engine.device))
    return SampleSet(np.concatenate(chunks), conditions)


def collect_samples(workload: GenerationWorkload, sources: list[Source]) -> SampleSet:
    """Load the samples of `sources` as pixels or waveforms, evenly subsampled to `MAX_BYTES` and `MAX_REFERENCES`."""
    total = sum(map(len, sources))
    first_source = next((source for source in sources if len(source)), None)
    if first_source is None:
        raise UsageError("there are no samples to compare with: the data is empty; give other data")
    size = _to_samples(workload, first_source.rows(np.arange(1), np.zeros(1, np.int64))).nbytes
    if workload.mel is not None:  # spectrograms as floats may be larger
        size = max(size, 4 * math.prod(workload.mel.shape))
    step = max(1, -(-total // MAX_REFERENCES), -(-total * size // MAX_BYTES))
    indices = [np.arange(len(source))[::step] for source in sources]
    samples: np.ndarray | None = None
    conditions: dict[str, list[np.ndarray]] = {}
    num_filled = 0
    for source, source_indices in zip(sources, indices, strict=True):
        for start in range(0, len(source_indices), CHUNK_SIZE):
            index = source_indices[start : start + CHUNK_SIZE]
            rows = source.rows(index, np.zeros_like(index))
            values = _to_samples(workload, rows)
            if samples is None:  # preallocated, because concatenating chunks at the end would hold all samples twice
                samples = np.empty((sum(map(len, indices)), *values.shape[1:]), values.dtype)
            samples[num_filled : num_filled + len(index)] = values
            num_filled += len(index)
            for name in CONDITION_FIELDS & rows.keys():
                conditions.setdefault(name, []).append(rows[name])
    assert samples is not None
    return SampleSet(samples, {name: np.concatenate(chunks) for name, chunks in conditions.items()}, total)


def _to_samples(workload: GenerationWorkload, rows: Any) -> np.ndarray:
    """Return rows of a source as waveforms, or as pixels in bytes."""
    values: np.ndarray = (
        rows["audio"] if workload.medium.name == "audio" else workload.medium.from_values(rows[workload.medium.name])
    )
    return values


def _to_comparable(workload: GenerationWorkload, samples: np.ndarray) -> np.ndarray:
    """Return values in which distances and variances are meaningful: pixels, or log-mel spectrograms of audio.

    Pixels stay bytes: only ratios are measured, which do not depend on the scale, and floats would take four times the memory.
    """
    if workload.mel is None:
        return samples
    return np.concatenate(
        [workload.mel.encode(samples[i : i + CHUNK_SIZE]) for i in range(0, len(samples), CHUNK_SIZE)]
    )


def _round_trip(saved: SavedRun, workload: GenerationWorkload, samples: np.ndarray) -> np.ndarray:
    """Return real samples encoded and decoded: the best that a perfect model could generate."""
    with saved.engine.sampling() as models:
        chunks = [
            workload.round_trip(models, samples[i : i + CHUNK_SIZE], saved.engine.device)
            for i in range(0, len(samples), CHUNK_SIZE)
        ]
    return np.concatenate(chunks)


def _build_fid_function(
    weights: Path, workload: GenerationWorkload, device: Any
) -> Callable[[np.ndarray, np.ndarray], float]:
    """Return a function that computes FID between samples and training data; videos are compared frame by frame."""
    if workload.medium.name == "audio":
        raise UsageError("--inception: FID is defined for images and video, not for audio; remove it")
    import torch

    from bottega.models.metric_networks.inception import load_inception

    network = load_inception(weights, device=device)

    def compute_features(samples: np.ndarray) -> np.ndarray:
        frames = samples.reshape(-1, *samples.shape[-3:])
        return np.concatenate(
            [
                network(torch.from_numpy(frames[i : i + CHUNK_SIZE]).to(device)).cpu().numpy()
                for i in range(0, len(frames), CHUNK_SIZE)
            ]
        )

    training_features: list[np.ndarray] = []

    def compute_distance(samples: np.ndarray, training: np.ndarray) -> float:
        training_features[:] = training_features or [compute_features(training)]
        return frechet_distance(compute_features(samples), training_features[0])

    return compute_distance
