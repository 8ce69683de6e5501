"""One process's part in one training: everything between a recipe and the end of its run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bottega.callbacks.console import Console
from bottega.callbacks.divergence import diagnose_losses
from bottega.callbacks.slow_run import SlowRun
from bottega.config.load import to_yaml
from bottega.config.recipe import Recipe
from bottega.core import checkpoint
from bottega.core.callback import Callback, Progress
from bottega.core.engine import Engine
from bottega.core.errors import CheckpointError, Diverged, PeerLost
from bottega.core.loop import Fit, Goal
from bottega.core.rundir import RunDirectory, read_metrics
from bottega.core.saver import Saver, explain, preflight, try_again
from bottega.data.loading.loader import Loader
from bottega.engines.backend import open_backend
from bottega.engines.nonfinite import Recovery
from bottega.run import environment, resume
from bottega.run.checks import find_data_problems, find_size_problems, list_adjusted, raise_together
from bottega.run.compose import (
    build_engine,
    build_loader,
    cadences,
    plan_rates,
    prepare,
    total_steps,
    validation_batches,
    watchers,
)
from bottega.run.lesson import applied
from bottega.run.range_test import settled
from bottega.storage.durable import discard, writing_folder
from bottega.tasks import needs, plugins
from bottega.tasks.branch import Branch
from bottega.tasks.located import STARTED_IN, UPWARDS
from bottega.tasks.start import PLACE, based, local_start
from bottega.techniques.lesson import Lesson
from bottega.world import World


@dataclass(frozen=True)
class Run:
    """What `bottega.train` gives back."""

    path: Path
    step: int
    metrics: dict[str, float]
    """The last evaluation, or the last training step where there was none."""

    def history(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl."""
        return read_metrics(RunDirectory(self.path).metrics)


class Session:
    """One process's part in one training."""

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        *,
        quiet: bool,
        fresh: bool,
        resume_from: Path | None,
        allow: bool,
    ) -> None:
        self.fresh = fresh
        self.recipe, self.directory, self.resume_from, self.allow = recipe, directory, resume_from, allow
        self.branch: Branch
        is_main = World.current().is_main
        level = recipe.logging.level
        self.console = Console(
            unit="samples",
            log=directory.log if is_main else None,
            quiet=quiet or level in ("WARNING", "ERROR"),
            warnings=not quiet and level != "ERROR",
        )

    def run(self) -> Run:
        recipe, directory, console = self.recipe, self.directory, self.console
        is_main = World.current().is_main  # the others might look before --fresh has set the old run aside
        changes = resume.check_recipe_unchanged(directory, recipe) if is_main else []
        self._placed = needs.placed(recipe)
        # Of a fresh run nothing is there, though another rank may look before the old one is set aside.
        has_begun = not self.fresh and resume.has_begun(directory)
        if has_begun:
            self._placed = based(self._placed, directory.codec)
        codec = directory.codec if has_begun else None
        if codec is None and self.resume_from is not None:
            codec = RunDirectory(resume.named(self.resume_from).parent.parent).codec
        self.branch = branch = prepare(self._placed, console, codec=codec)
        console.unit, console.headline = branch.unit, branch.headline
        if has_begun and (changed := plugins.difference(recipe, directory.path)) is not None:
            console.warn(changed)
        engine: Engine | None = None
        try:
            raise_together(find_size_problems(recipe, branch.task))
            recipe = settled(recipe, branch, directory, resume_from=self.resume_from, console=console)
            lesson = applied(needs.placed(recipe), branch)
            raise_together(find_data_problems(recipe, lesson))
            engine = build_engine(recipe, lesson.task)
            lesson = lesson.with_built(engine)
            return self._run(recipe, branch, lesson, engine, changes)
        except RuntimeError as error:
            loss = open_backend(recipe.engine).describe_lost_rank(error)
            if loss is not None:
                raise PeerLost(loss) from error
            raise
        finally:
            if engine is not None:
                engine.close()

    def _run(self, recipe: Recipe, branch: Branch, lesson: Lesson, engine: Engine, changes: list[str]) -> Run:
        """`recipe` has a number where the one that is kept says `learning_rate: auto`."""
        directory, console = self.directory, self.console
        validation = lesson.validation
        loader = replace(build_loader(recipe, lesson.training, engine, lesson.order), warn=console.warn)
        total = total_steps(recipe, loader)
        plan_rates(recipe, engine, total=total, steps_per_epoch=round(loader.steps_per_epoch))
        fingerprint = environment.fingerprint(
            str(engine.device),
            engine.world,
            data=branch.fingerprint,
            derived=branch.derived,
            frozen=dict(lesson.frozen),
            held_out=branch.held_out,
        )
        found, progress = self._start(engine, loader, total=total, fingerprint=fingerprint)
        rate = recipe.training.learning_rate
        seen = f"{branch.fingerprint} {branch.derived}"
        if not engine.same(f"{progress.step} {rate} {seen} {sorted(lesson.frozen.items())}"):
            raise CheckpointError(
                f"rank {engine.rank} would go on from step {progress.step}, and another rank from elsewhere or with other "
                f"data or parts; {directory.path}, the data and the parts must be the same files for all ranks"
            )
        for change in changes:
            console.say(change)
        if engine.rank == 0:
            self._write_down(branch, engine, progress)
        adjusted = list_adjusted(recipe, lesson) if progress.step < total else []
        for note in (*lesson.notes, *adjusted):
            console.say(note)
        if lesson.begin is not None:
            lesson.begin(engine, loader, resumed=found is not None)
        self._introduce(branch, engine, progress)

        last = _Last()
        callbacks = [*lesson.callbacks, *watchers(recipe, directory, console, is_main=engine.rank == 0), last]
        if engine.rank == 0 and engine.device_type == "cpu":
            callbacks.append(SlowRun(recipe, console.warn))

        def announce(p: Progress, folder: Path) -> None:
            for callback in callbacks:
                callback.after_save(p, folder)

        saver = Saver(
            directory.checkpoints,
            keep=recipe.checkpoint.keep,
            fingerprint=fingerprint,
            announce=announce,
            warn=console.warn,
        )
        saver.resumed_from = found
        fit = Fit(
            engine=engine,
            batches=loader,
            progress=progress,
            every=cadences(recipe, total, loader, has_validation=validation is not None),
            goal=Goal(recipe.evaluation.metric, recipe.evaluation.maximise),
            validation=validation_batches(recipe, validation, loader) if validation is not None else None,
            score=lesson.task.score,
            summarise=lambda metrics: lesson.summary(branch.summarise(metrics)),
            sample=lambda p: self._sample(branch, engine, p),
            has_sample=lambda p: self._sample_folder(p).is_dir(),
            saver=saver,
            callbacks=callbacks,
            recover=self._recovery(engine, loader, saver),
        )
        began = time.monotonic()
        fit.run()
        if lesson.finish is not None and engine.rank == 0:
            lesson.finish(directory, console)
        self._farewell(progress, time.monotonic() - began, is_held_out=validation is not None)
        return Run(directory.path, progress.step, last.metrics or _last_metrics(directory))

    def _start(
        self, engine: Engine, loader: Loader, *, total: int, fingerprint: Mapping[str, Any]
    ) -> tuple[Path | None, Progress]:
        """Fresh, or where the newest good checkpoint stood; and that checkpoint."""
        if engine.rank == 0:
            checkpoint.sweep(self.directory.checkpoints)
        engine.agree(False)  # nobody looks at checkpoints before they are in order
        found = resume.find(self.directory, self.resume_from, self.console.warn)
        if engine.rank == 0:
            newest = found[0] if found is not None and self.resume_from is None else None
            checkpoint.update_links(self.directory.checkpoints, last=newest)
        if found is None:
            return None, Progress(total=total)
        path, manifest = found
        resume.check_data_unchanged(manifest, fingerprint, allow=self.allow, say=self.console.warn)
        resume.check_frozen_unchanged(manifest, fingerprint)
        progress = resume.progress_at(path, loader=loader, total=total, say=self.console.say)
        engine.load(path)
        engine.skip_steps = frozenset(progress.skip_steps)
        if self.recipe.training.micro_batch_size == "auto":
            engine.micro_batch_size = progress.micro_batch_size
        if path.resolve().parent != self.directory.checkpoints.resolve():
            progress.best_step = 0  # that checkpoint is another run's
        done = " (already finished)" if progress.step >= total else ""
        if progress.step > total:
            self.console.say(
                f"{path} is at step {progress.step}, past the {total} of this recipe; nothing is left to train"
            )
        else:
            self.console.say(f"resumed {path} at step {progress.step} of {total}{done}")
        return path, progress

    def _write_down(self, branch: Branch, engine: Engine, progress: Progress) -> None:
        """What this run is, before its first step."""
        directory = self.directory
        directory.truncate_metrics(progress)
        directory.write(directory.recipe, to_yaml(self.recipe))
        facts = environment.describe(str(engine.device), engine.world)
        if (start := local_start(self._placed)) is not None:
            facts[PLACE] = start
        if (plugin := plugins.record(self.recipe, directory.path, has_begun=resume.has_begun(directory))) is not None:
            facts[plugins.RECORD] = plugin
        facts |= {STARTED_IN: os.getcwd(), UPWARDS: os.path.relpath(os.getcwd(), directory.path)}
        directory.write(directory.environment, json.dumps(facts, indent=1) + "\n")
        directory.checkpoints.mkdir(exist_ok=True)
        try:
            if directory.codec.exists() and not resume.has_begun(directory):
                discard(directory.codec)  # what an earlier start wrote there may be of another recipe or data
            branch.save_codec(directory.codec)
        except OSError as error:
            raise explain(error, directory.codec) from None
        preflight(directory.checkpoints, size=engine.checkpoint_bytes(), keep=self.recipe.checkpoint.keep)

    def _introduce(self, branch: Branch, engine: Engine, progress: Progress) -> None:
        every = engine.parameters().values()
        learning, total = sum(one.size for one in every if one.learns), sum(one.size for one in every)
        parameters = f"{total:,} parameters" if learning == total else f"{learning:,} of {total:,} parameters learn"
        active = engine.num_active()
        if active < total:
            parameters += f", {active:,} of them active for a token"
        self.console.say(
            f"{self.directory.path}: {self.recipe.task}, {parameters}, {engine.device} {engine.precision}, "
            f"{engine.world} process{'es' if engine.world > 1 else ''}, {progress.total} steps"
        )

    def _sample(self, branch: Branch, engine: Engine, progress: Progress) -> Path:
        folder = self._sample_folder(progress)
        if engine.rank == 0:
            try:
                try_again(lambda: self._write_samples(branch, engine, folder))
            except (OSError, Diverged) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error).partition(":")[0]
                self.console.warn(f"no samples in {folder}: {reason}; training goes on without them")
        return folder

    def _sample_folder(self, progress: Progress) -> Path:
        return self.directory.samples / f"step-{progress.step:08d}"

    def _write_samples(self, branch: Branch, engine: Engine, folder: Path) -> None:
        with writing_folder(folder) as temporary, engine.sampling() as models:
            branch.sample(models, temporary, device=engine.device)

    def _recovery(self, engine: Engine, loader: Loader, saver: Saver) -> Recovery:
        return Recovery(
            engine=engine,
            loader=loader,
            saver=saver,
            policy=self.recipe.training.on_nonfinite,
            folder=self.directory.path / "nonfinite",
            warn=self.console.warn,
        )

    def _farewell(self, progress: Progress, seconds: float, *, is_held_out: bool) -> None:
        """The end of the story: a sample to look at, where everything is, and what to try next."""
        console, path = self.console, self.directory.path
        if progress.stop:
            console.say(f"stopped early: {progress.stop}")
        newest = max(self.directory.samples.glob("step-*"), default=None)
        if newest is not None:
            _show_samples(console, newest)
        best = (
            f", best {self.recipe.evaluation.metric} {progress.best:.4f} at step {progress.best_step}"
            if progress.best_step
            else ""
        )
        console.say(f"\n{path}: {progress.step} steps in {seconds:.0f} s{best}", style="bold")
        is_main = World.current().is_main
        diverged = diagnose_losses(read_metrics(self.directory.metrics), self.recipe) if is_main else None
        if diverged is not None:
            console.warn(diverged)
        verbs = [f"generate {path}{example}"] if (example := self.branch.example()) is not None else []
        verbs += [f"evaluate {path}{'' if is_held_out else ' --data PATH'}", f"export {path}"]
        for number, verb in enumerate(verbs):
            console.say(f"{'next:' if not number else '':<7}bottega {verb}{plugins.shown_flags()}")


class _Last(Callback):
    """Remembers what `train` returns: the last evaluation, else the last step."""

    name = "last"

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self._evaluated = False

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        if not self._evaluated:
            self.metrics = dict(metrics)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.metrics, self._evaluated = dict(metrics), True


def _show_samples(console: Console, folder: Path) -> None:
    """A text is read here and now; of everything else one is told where it is."""
    text = folder / "00.txt"
    if text.is_file():
        console.say(f"\na sample ({text}):\n", style="bold")
        console.say(text.read_text(encoding="utf-8").strip())
        return
    shown = [
        path for name in ("sheet.png", "sheet.gif", "spectrograms.png", "00.wav") if (path := folder / name).is_file()
    ]
    if shown:
        console.say(f"\nsamples: {', '.join(map(str, shown))}", style="bold")


def _last_metrics(directory: RunDirectory) -> dict[str, float]:
    rows = read_metrics(directory.metrics)
    chosen = next((r for r in reversed(rows) if r.get("kind") == "eval"), rows[-1] if rows else {})
    return {k: v for k, v in chosen.items() if isinstance(v, float)}
