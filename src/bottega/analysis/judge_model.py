"""The classifier that judges generated samples (`needs.judge`), trained on real data."""

from __future__ import annotations

from typing import Any

import numpy as np

from bottega.core.errors import CheckpointError, UsageError
from bottega.data.image.augment import normalise_pixels
from bottega.run.saved import SavedRun
from bottega.run.train import ensure_dependency, is_exported, load
from bottega.tasks import dependencies
from bottega.tasks.classify.media_workload import MediaClassifyWorkload
from bottega.tasks.generation.workload import GenerationWorkload

CHUNK_SIZE = 256
"""Number of samples classified at once."""


class JudgeModel:
    """A classifier that judges generated samples, with its classes mapped to those of the generator."""

    def __init__(self, saved: SavedRun, normalisation: Any) -> None:
        self.saved, self.normalisation = saved, normalisation
        assert isinstance(saved.workload, MediaClassifyWorkload)
        self.workload = saved.workload

    @classmethod
    def open_judge(
        cls, saved: SavedRun, workload: GenerationWorkload, notes: list[str], *, has_own_data: bool = True, quiet: bool
    ) -> JudgeModel | None:
        """Open `needs.judge`, training it first if needed.

        Return None, with a note, if the recipe has no judge, the data has fewer than two classes, or the judge is not
        trained yet and its training data is gone.
        """
        dependency, runs_folder = workload.recipe.needs.get("judge"), saved.directory.path.parent
        num_classes = len(workload.metadata.classes)
        if dependency is None:
            return None
        if num_classes < (2 if dependency.run is None else 1):
            reason = f"the data has {'one class' if num_classes else 'no classes'}, and a judge needs two or more"
            notes.append(f"{reason}; conditional_accuracy and frechet_distance are left out")
            return None
        judge_run = dependencies.find_dependency_run(workload.recipe, "judge", runs_folder=runs_folder)
        if not has_own_data and dependency.run is None and not is_exported(judge_run):
            notes.append("needs.judge is not trained yet, and its data is missing; conditional_accuracy is left out")
            return None
        options: dict[str, Any] = {"quiet": quiet, "runs_folder": runs_folder, "allow_data_change": not has_own_data}
        path = ensure_dependency(workload.recipe, "judge", **options, started_in=workload.data.started_in)
        try:
            # Not the best checkpoint: it was selected on the data held out here, which would favour the real samples.
            loaded = load(path, checkpoint="last", device=str(saved.engine.device))
        except CheckpointError as error:
            raise CheckpointError(f"needs.judge: {path}: {error}; delete it to train it again") from error
        if not isinstance(loaded.workload, MediaClassifyWorkload):
            raise UsageError(f"needs.judge: {path} is not a classifier; give a run of the task classify")
        return cls(loaded, getattr(loaded.recipe.data, "normalise", None))

    def classify(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return class probabilities (samples, classes) and features (samples, features)."""
        probabilities, features = [], []
        with self.saved.engine.sampling() as models:
            for start in range(0, len(samples), CHUNK_SIZE):
                chunk = samples[start : start + CHUNK_SIZE]
                values = normalise_pixels(chunk, mode=self.normalisation) if chunk.dtype == np.uint8 else chunk
                outputs = self.workload.predict_with_features(models, values, device=self.saved.engine.device)
                probabilities.append(outputs[0])
                features.append(outputs[1])
        return np.concatenate(probabilities), np.concatenate(features)

    def map_to_generator_classes(self, predicted: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """Return the generator's class indices of the judge's predictions, -1 for a class that the generator lacks."""
        indices = {name: index for index, name in enumerate(names)}
        return np.array([indices.get(name, -1) for name in self.workload.classes.names])[predicted]
