"""Training session of one process: prepare, resume, train, and report the result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bottega.callbacks.console import Console
from bottega.config.load import to_yaml
from bottega.config.recipe import Recipe
from bottega.core import checkpoint
from bottega.core.callback import Callback, Progress
from bottega.core.engine import Engine
from bottega.core.errors import CheckpointError, Diverged, OutOfMemory, PeerLost, describe_error
from bottega.core.rundir import RunDirectory
from bottega.core.saver import explain_os_error
from bottega.data.loading.loader import Loader
from bottega.engines.backend import open_backend
from bottega.engines.out_of_memory import build_out_of_memory_error
from bottega.metrics_log import MODULES_LOG, read_metrics, truncate_metrics
from bottega.run import environment, resume
from bottega.run.auto_learning_rate import resolve_learning_rate
from bottega.run.checks import find_data_problems, find_size_problems, raise_all
from bottega.run.compose import (
    build_engine,
    build_loader,
    build_training_plan,
    count_total_steps,
    prepare_workload,
    set_learning_rate_schedule,
)
from bottega.run.data_summary import write_data_summary
from bottega.run.disk_space import check_disk_space
from bottega.run.model_size import count_parameters, describe_parameters, measure_compute
from bottega.run.result import announce_result, conclude_run
from bottega.run.setting_notes import list_adjusted_settings
from bottega.run.trainer_setup import TrainerSetup
from bottega.storage.durable import delete_folder
from bottega.tasks import dependencies, plugins
from bottega.tasks.base_model import BASE_FOLDER, find_local_base_folder, relocate_base_model
from bottega.tasks.data_paths import START_FOLDER, START_FOLDER_FROM_RUN
from bottega.tasks.workload import Workload
from bottega.techniques.training_plan import TrainingPlan
from bottega.world import World


@dataclass(frozen=True)
class Run:
    """Result of `bottega.train`."""

    path: Path
    step: int
    metrics: dict[str, float]
    """Metrics of the last evaluation, or of the last training step if there was none."""

    def history(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        return read_metrics(RunDirectory(self.path).metrics)


class Session:
    """One process's part in the training of one run; `run()` trains it."""

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        *,
        quiet: bool,
        fresh: bool,
        resume_from: Path | None,
        allow_data_change: bool,
        until: int | None = None,
    ) -> None:
        """`until` is a step to pause at: the run is saved and evaluated there, and a later session continues it."""
        self.recipe, self.directory = recipe, directory
        self.fresh, self.resume_from, self.allow_data_change = fresh, resume_from, allow_data_change
        self.until = until
        self.workload: Workload
        is_main = World.from_environment().is_main
        level = recipe.logging.level
        self.console = Console(
            unit="samples",
            log=directory.log if is_main else None,
            quiet=quiet or level in ("WARNING", "ERROR"),
            warnings=not quiet and level != "ERROR",
        )

    def run(self) -> Run:
        """Prepare the data, build the engine, and train from the newest checkpoint or from the start."""
        recipe, directory, console = self.recipe, self.directory, self.console
        is_main = World.from_environment().is_main  # the others might read before --fresh has renamed the old run
        change_notes = resume.check_recipe_unchanged(directory, recipe) if is_main else []
        self._resolved_recipe = dependencies.resolve_references(recipe)
        # With --fresh there is nothing to resume, even if this rank looks before rank 0 has renamed the old run.
        has_begun = not self.fresh and resume.has_begun(directory)
        if has_begun:
            self._resolved_recipe = relocate_base_model(self._resolved_recipe, directory.processor)
        processor = directory.processor if has_begun else None
        if processor is None and self.resume_from is not None:
            processor = RunDirectory(resume.resolve_checkpoint_path(self.resume_from).parent.parent).processor
        self.workload = workload = prepare_workload(self._resolved_recipe, console, processor=processor)
        console.unit, console.headline = workload.unit, workload.headline
        if has_begun and (plugin_note := plugins.describe_plugin_change(recipe, directory.path)) is not None:
            console.warn(plugin_note)
        engine: Engine | None = None
        try:
            raise_all(find_size_problems(recipe, workload.task))
            recipe = resolve_learning_rate(recipe, workload, directory, resume_from=self.resume_from, console=console)
            plan = build_training_plan(dependencies.resolve_references(recipe), workload)
            raise_all(find_data_problems(recipe, plan))
            engine = build_engine(recipe, plan.task)
            plan = plan.complete(engine)
            return self._train(recipe, workload, plan, engine, change_notes)
        except (RuntimeError, MemoryError, ValueError) as error:  # JAX raises ValueError for a failed collective
            lost_rank = open_backend(recipe.engine).describe_lost_rank(error)
            if lost_rank is not None:
                raise PeerLost(lost_rank) from error
            if engine is not None and describe_error(error)[0] == OutOfMemory.code:
                memory, advice = engine.memory_use(at_peak=False), "use a smaller model or a smaller batch"
                raise build_out_of_memory_error(memory, advice=advice) from error
            raise
        finally:
            if engine is not None:
                engine.close()

    def _train(
        self, recipe: Recipe, workload: Workload, plan: TrainingPlan, engine: Engine, change_notes: list[str]
    ) -> Run:
        """Train. In `recipe` the learning rate is a number, even if the saved recipe has `learning_rate: auto`."""
        directory, console = self.directory, self.console
        loader = replace(build_loader(recipe, plan.training, engine, plan.order), warn=console.warn)
        total = count_total_steps(recipe, loader)
        set_learning_rate_schedule(recipe, engine, total=total, steps_per_epoch=round(loader.steps_per_epoch))
        fingerprint = environment.build_fingerprint(
            recipe.engine,
            str(engine.device),
            engine.world_size,
            data=workload.data.fingerprint,
            derived=workload.data.derived_fingerprint,
            frozen=dict(plan.frozen),
            held_out=workload.data.held_out,
        )
        resumed_from, progress = self._load_checkpoint(engine, loader, total=total, fingerprint=fingerprint)
        self._check_ranks_agree(recipe, workload, plan, engine, progress)
        for note in change_notes:
            console.info(note)
        compute = measure_compute(recipe, engine, loader, progress)
        if engine.rank == 0:
            self._write_metadata(workload, plan, engine, progress, compute)
        adjustment_notes = list_adjusted_settings(recipe, plan) if progress.step < total else []
        for note in (*plan.notes, *adjustment_notes):
            console.info(note)
        if plan.on_train_start is not None:
            plan.on_train_start(engine, loader, resumed=resumed_from is not None)
        self._print_summary(workload, engine, progress)

        last_metrics = _LastMetrics()
        setup = TrainerSetup(recipe, directory, console, workload, plan, engine, loader)
        trainer = setup.build_trainer(
            progress,
            compute=compute,
            last_callback=last_metrics,
            fingerprint=fingerprint,
            resumed_from=resumed_from,
            until=self.until,
        )
        start = time.monotonic()
        try:
            trainer.run()
        except Diverged as error:
            conclude_run(recipe, directory, console, failure=error)  # the report shows how the loss diverged
            raise
        if self.until is not None and progress.step < total and progress.stop is None:
            console.info(f"{directory.path}: paused at step {progress.step} of {total}; without --until it continues")
            return Run(directory.path, progress.step, last_metrics.metrics or _read_last_metrics(directory))
        if plan.on_train_end is not None and engine.rank == 0:
            plan.on_train_end(directory, console)
        announce_result(
            self.recipe,
            directory,
            workload,
            progress,
            console,
            seconds=time.monotonic() - start,
            has_validation=plan.validation is not None,
        )
        return Run(directory.path, progress.step, last_metrics.metrics or _read_last_metrics(directory))

    def _check_ranks_agree(
        self, recipe: Recipe, workload: Workload, plan: TrainingPlan, engine: Engine, progress: Progress
    ) -> None:
        """Raise CheckpointError if ranks would start at different steps or with other data or dependencies."""
        rate = recipe.training.learning_rate
        data_hashes = f"{workload.data.fingerprint} {workload.data.derived_fingerprint}"
        if not engine.all_ranks_equal(f"{progress.step} {rate} {data_hashes} {sorted(plan.frozen.items())}"):
            raise CheckpointError(
                f"rank {engine.rank} would resume at step {progress.step}, but another rank at another step, or with "
                f"other data or dependencies; {self.directory.path}, the data and the dependencies must be the same "
                "files for all ranks"
            )

    def _load_checkpoint(
        self, engine: Engine, loader: Loader, *, total: int, fingerprint: Mapping[str, Any]
    ) -> tuple[Path | None, Progress]:
        """Load the checkpoint to resume, if any; return its path and the progress to start from."""
        if engine.rank == 0:
            checkpoint.remove_partial_checkpoints(self.directory.checkpoints)
        engine.any_rank(False)  # a barrier: no rank reads checkpoints before leftovers are removed
        checkpoint_and_manifest = resume.find_checkpoint(self.directory, self.resume_from, self.console.warn)
        if engine.rank == 0:
            newest = (
                checkpoint_and_manifest[0] if checkpoint_and_manifest is not None and self.resume_from is None else None
            )
            checkpoint.update_links(self.directory.checkpoints, last=newest)
        if checkpoint_and_manifest is None:
            return None, Progress(total=total)
        path, manifest = checkpoint_and_manifest
        resume.check_data_unchanged(manifest, fingerprint, allow=self.allow_data_change, report=self.console.warn)
        resume.check_frozen_unchanged(manifest, fingerprint)
        progress = resume.load_progress(path, loader=loader, total=total, report=self.console.info)
        engine.load(path)
        engine.skip_steps = frozenset(progress.skip_steps)
        if self.recipe.training.micro_batch_size == "auto":
            engine.micro_batch_size = progress.micro_batch_size
        if path.resolve().parent != self.directory.checkpoints.resolve():
            progress.best_step = 0  # the best checkpoint belongs to another run
        finished_note = " (already finished)" if progress.step >= total else ""
        if progress.step > total:
            self.console.info(
                f"{path} is at step {progress.step}, past the {total} steps of this recipe; nothing is left to train"
            )
        else:
            self.console.info(f"resumed {path} at step {progress.step} of {total}{finished_note}")
        return path, progress

    def _write_metadata(
        self,
        workload: Workload,
        plan: TrainingPlan,
        engine: Engine,
        progress: Progress,
        compute: Mapping[str, float],
    ) -> None:
        """Write recipe, environment and processor of the run before its first step."""
        directory = self.directory
        for log in (directory.metrics, directory.path / MODULES_LOG):
            truncate_metrics(log, progress)
        directory.write(directory.recipe, to_yaml(self.recipe), redact=False)
        metadata = environment.describe_environment(self.recipe.engine, str(engine.device), engine.world_size)
        metadata |= {"steps": progress.total, **count_parameters(engine), **compute, "unit": workload.unit}
        if (base_folder := find_local_base_folder(self._resolved_recipe)) is not None:
            metadata[BASE_FOLDER] = base_folder
        if (
            plugin_fields := plugins.build_plugin_record(
                self.recipe, directory.path, has_begun=resume.has_begun(directory)
            )
        ) is not None:
            metadata[plugins.RECORD_KEY] = plugin_fields
        metadata |= {START_FOLDER: os.getcwd(), START_FOLDER_FROM_RUN: os.path.relpath(os.getcwd(), directory.path)}
        directory.write(directory.environment, json.dumps(metadata, indent=1) + "\n")
        write_data_summary(directory, plan, workload)
        directory.checkpoints.mkdir(exist_ok=True)
        try:
            if directory.processor.exists() and not resume.has_begun(directory):
                delete_folder(directory.processor)  # written by an earlier start, maybe of another recipe or data
            workload.processor.save(directory.processor)
        except OSError as error:
            raise explain_os_error(error, directory.processor) from None
        check_disk_space(
            directory.checkpoints,
            size=engine.checkpoint_bytes(),
            keep=self.recipe.checkpoint.keep,
            has_best=plan.validation is not None,
            warn=self.console.warn,
        )

    def _print_summary(self, workload: Workload, engine: Engine, progress: Progress) -> None:
        """Print task, model size, device and length of the run."""
        size_text = describe_parameters(engine)
        num_active = engine.num_active_parameters()
        if num_active < count_parameters(engine)["parameters"]:
            size_text += f", {num_active:,} active per token"
        self.console.info(
            f"{self.directory.path}: {self.recipe.task}, {size_text}, {engine.device} {engine.precision}, "
            f"{engine.world_size} process{'es' if engine.world_size > 1 else ''}, {progress.total} steps"
        )


class _LastMetrics(Callback):
    """Records the metrics that `train` returns: those of the last evaluation, else of the last step."""

    name = "last"

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._has_evaluated = False

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        if not self._has_evaluated:
            self.metrics = dict(metrics)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.metrics, self._has_evaluated = dict(metrics), True


def _read_last_metrics(directory: RunDirectory) -> dict[str, float]:
    rows = read_metrics(directory.metrics)
    last_row = next((row for row in reversed(rows) if row.get("kind") == "eval"), rows[-1] if rows else {})
    return {name: value for name, value in last_row.items() if isinstance(value, float)}
