"""The trainer of an opened recipe, with its callbacks, saver, samples and recovery from steps that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bottega.callbacks.console import Console
from bottega.callbacks.evaluation_tables import EvaluationTables
from bottega.callbacks.slow_run import SlowRunWarning
from bottega.config.recipe import Recipe
from bottega.core.callback import Callback, Progress
from bottega.core.engine import Engine
from bottega.core.errors import Diverged
from bottega.core.rundir import RunDirectory
from bottega.core.saver import Saver, retry
from bottega.core.trainer import BestMetric, Trainer
from bottega.core.types import Models, Rows
from bottega.data.loading.loader import Loader
from bottega.engines.nonfinite import NonfiniteRecovery
from bottega.run.auto_compile import build_compile_callback
from bottega.run.compose import build_callbacks, build_monitors, make_validation_batches, resolve_cadences
from bottega.storage.durable import writing_folder
from bottega.tasks.workload import Workload
from bottega.techniques.training_plan import TrainingPlan


@dataclass(frozen=True)
class TrainerSetup:
    """A recipe with everything opened that its training works on; in `recipe` the learning rate is a number."""

    recipe: Recipe
    directory: RunDirectory
    console: Console
    workload: Workload
    plan: TrainingPlan
    engine: Engine
    loader: Loader

    def build_trainer(
        self,
        progress: Progress,
        *,
        compute: Mapping[str, float],
        last_callback: Callback,
        fingerprint: Mapping[str, Any],
        resumed_from: Path | None,
        until: int | None,
    ) -> Trainer:
        """Return the trainer that continues from `progress`; `last_callback` comes after those that add metrics."""
        recipe, workload, plan, engine, loader = self.recipe, self.workload, self.plan, self.engine, self.loader
        callbacks, score = self._build_callbacks(compute, last_callback)
        saver = self._build_saver(callbacks, fingerprint=fingerprint, resumed_from=resumed_from)
        validation = plan.validation
        cadences = resolve_cadences(recipe, progress.total, loader, has_validation=validation is not None)
        if until is not None:
            cadences = replace(cadences, evaluate_at=cadences.evaluate_at | {until})
        return Trainer(
            engine=engine,
            batches=loader,
            progress=progress,
            cadences=cadences,
            best_metric=BestMetric(recipe.evaluation.metric, recipe.evaluation.is_maximised),
            validation=make_validation_batches(recipe, validation, loader) if validation is not None else None,
            score=score,
            summarise=lambda metrics: plan.summarise(workload.summarise(metrics)),
            sample=self._generate_samples,
            has_sample=lambda current: self._get_sample_folder(current).is_dir(),
            saver=saver,
            callbacks=callbacks,
            recover=self._build_recovery(saver),
            pause_at=until,
        )

    def _build_callbacks(
        self, compute: Mapping[str, float], last_callback: Callback
    ) -> tuple[list[Callback], Callable[[Rows], dict[str, float]]]:
        """Return all callbacks, and the function that scores the rows of an evaluation."""
        recipe, directory, console, plan = self.recipe, self.directory, self.console, self.plan
        is_main = self.engine.rank == 0
        callbacks = [
            *plan.callbacks,
            *build_compile_callback(recipe, self.engine, console),
            *build_callbacks(recipe, directory, console, is_main=is_main, compute=compute, metrics=plan.metrics),
            last_callback,
        ]
        if not is_main:
            return callbacks, plan.task.score
        tables = EvaluationTables(
            directory.path / "evaluation" / "validation",
            score=plan.task.score,
            build_tables=self.workload.build_evaluation_tables,
            warn=console.warn,
        )
        callbacks += [tables, *build_monitors(recipe, directory, self.engine, console)]
        if self.engine.device_type == "cpu":
            callbacks.append(SlowRunWarning(recipe, console.warn))
        return callbacks, tables.score

    def _build_saver(
        self, callbacks: Sequence[Callback], *, fingerprint: Mapping[str, Any], resumed_from: Path | None
    ) -> Saver:
        def announce(saved_progress: Progress, folder: Path) -> None:
            for callback in callbacks:
                callback.after_save(saved_progress, folder)

        saver = Saver(
            self.directory.checkpoints,
            keep=self.recipe.checkpoint.keep,
            fingerprint=fingerprint,
            announce=announce,
            warn=self.console.warn,
        )
        saver.resumed_from = resumed_from
        return saver

    def _build_recovery(self, saver: Saver) -> NonfiniteRecovery:
        return NonfiniteRecovery(
            engine=self.engine,
            loader=self.loader,
            saver=saver,
            policy=self.recipe.training.on_nonfinite,
            folder=self.directory.path / "nonfinite",
            warn=self.console.warn,
        )

    def _generate_samples(self, progress: Progress) -> Path:
        folder = self._get_sample_folder(progress)
        with self.engine.sampling() as models:  # on all ranks, which may have to gather the weights
            if self.engine.rank == 0:
                try:
                    retry(lambda: self._write_samples(models, folder))
                except (OSError, Diverged) as error:
                    reason = error.strerror if isinstance(error, OSError) else str(error).partition(":")[0]
                    self.console.warn(f"no samples in {folder}: {reason}; training continues without them")
        return folder

    def _get_sample_folder(self, progress: Progress) -> Path:
        return self.directory.samples / f"step-{progress.step:08d}"

    def _write_samples(self, models: Models, folder: Path) -> None:
        with writing_folder(folder) as temporary:
            self.workload.sampler.sample(models, temporary, device=self.engine.device)
