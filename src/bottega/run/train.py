"""Training from a recipe: the runs it depends on, then the session; `bottega.train` and `bottega.load`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.callbacks.log_file import Level, LogFile
from bottega.config.launch import check_launch_variables
from bottega.config.load import ResolvedRecipe
from bottega.config.recipe import Recipe
from bottega.core import checkpoint
from bottega.core.errors import Interrupted, UsageError, describe_error
from bottega.core.rundir import Lock, RunDirectory
from bottega.engines.backend import open_backend
from bottega.run import resume
from bottega.run.checks import find_problems, load_checked_recipe, parse_words, raise_all
from bottega.run.dependencies import lock_dependency, train_in_subprocess, wait_for_dependency
from bottega.run.prepare import prepare_recipe
from bottega.run.session import Run, Session
from bottega.run.setting_notes import list_unused_settings
from bottega.storage.durable import remove_leftovers, rename_aside
from bottega.tasks.data_paths import resolve_paths
from bottega.tasks.dependencies import (
    REFERENCE_PREFIX,
    build_dependency_recipe,
    find_dependency_run,
    find_referenced_dependencies,
)
from bottega.tasks.registry import find_spec
from bottega.terminal import open_console, print_notice
from bottega.world import World

if TYPE_CHECKING:
    from bottega.data.prepare.prepared import PreparedData
    from bottega.run.saved import SavedRun

__all__ = ["Run", "ensure_dependency", "load", "train", "train_command"]


def train(
    recipe: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]],
    overrides: Mapping[str, Any] | None = None,
    *,
    quiet: bool = True,
    fresh: bool = False,
) -> Run:
    """Train a recipe given by name, file or dict; of several, later ones and `overrides` win.

    The same call resumes the same run. `fresh` renames an existing run and starts a new one.
    """
    check_launch_variables()
    sources = [recipe] if isinstance(recipe, str | Path | Mapping) else list(recipe)
    resolved = load_checked_recipe([*sources, overrides or {}])
    return _train(resolved, quiet=quiet, fresh=fresh)


def load(path: str | Path, *, checkpoint: str | int = "best", device: str = "auto") -> SavedRun:
    """Open a run directory to evaluate, predict, generate or export; `checkpoint` is best, last or a step."""
    from bottega.run.saved import open_run, strip_flag_dashes

    try:
        return open_run(Path(path), checkpoint=checkpoint, device=device)
    except UsageError as error:
        raise strip_flag_dashes(error) from None


def train_command(
    words: list[str],
    *,
    fresh: bool,
    resume_from: Path | None,
    allow_data_change: bool,
    quiet: bool,
    until: int | None = None,
) -> dict[str, Any]:
    """Run `bottega train`; return the result that --json prints."""
    if until is not None and until < 1:
        raise UsageError(f"--until {until}: expected a step, 1 or more")
    sources, overrides = parse_words(words)
    if not sources:
        raise UsageError("no recipe given; run bottega train RECIPE, such as bottega train language")
    run = _train(
        load_checked_recipe(sources, overrides),
        quiet=quiet,
        fresh=fresh,
        resume_from=resume_from,
        allow_data_change=allow_data_change,
        until=until,
    )
    return {"run": str(run.path), "step": run.step, "metrics": run.metrics}


def _train(resolved: ResolvedRecipe, **options: Any) -> Run:
    """Train; with several ranks, each monitors the others from the start."""
    if World.from_environment().size == 1:
        return _train_rank(resolved, **options)
    recipe = resolved.recipe
    log = RunDirectory(Path(recipe.output_dir) / recipe.run_name()).log
    with open_backend(recipe.engine).watch_ranks(log):
        return _train_rank(resolved, **options)


def _train_rank(
    resolved: ResolvedRecipe,
    *,
    quiet: bool,
    fresh: bool = False,
    resume_from: Path | None = None,
    allow_data_change: bool = False,
    until: int | None = None,
) -> Run:
    recipe = resolved.recipe
    raise_all(find_problems(recipe))  # before waiting for other processes or training a dependency
    dependencies = find_referenced_dependencies(recipe)
    directory = RunDirectory(Path(recipe.output_dir) / recipe.run_name())
    is_main = World.from_environment().is_main

    def start_session() -> Session:
        for name in dependencies:
            ensure_dependency(recipe, name, quiet=quiet, allow_data_change=allow_data_change)
        is_silent = quiet or not is_main
        return Session(
            recipe,
            directory,
            quiet=is_silent,
            fresh=fresh,
            resume_from=resume_from,
            allow_data_change=allow_data_change,
            until=until,
        )

    if not is_main:
        return start_session().run()
    if fresh and directory.path.exists():
        set_aside(directory.path)
    with lock_directory(directory):
        if dependencies:
            _check_resumable(recipe, directory, resume_from, allow_data_change=allow_data_change, quiet=quiet)
        session = start_session()
        for note in (*resolved.notes, *list_unused_settings(recipe)):
            session.console.info(note)
        return session.run()


@contextmanager
def lock_directory(directory: RunDirectory, *, has_log: bool = True) -> Iterator[None]:
    """Create and lock a run directory, and delete leftovers in it.

    An error that ends the run is written to its log. A start that fails before anything was written leaves no folder.
    """
    missing_folders = [folder for folder in (directory.path, *directory.path.parents) if not folder.exists()]
    directory.create()
    with Lock(directory):
        try:
            for folder in (directory.path, directory.samples):
                if folder.is_dir():
                    remove_leftovers(folder)
            yield
        except BaseException as error:
            level: Level = "WARNING" if isinstance(error, Interrupted | KeyboardInterrupt) else "ERROR"
            if has_log and isinstance(error, Exception | KeyboardInterrupt):
                LogFile(directory.log).write(describe_error(error)[1], level)
            if not directory.recipe.exists():
                directory.remove_if_unused(missing_folders)
            raise


def _check_resumable(
    recipe: Recipe, directory: RunDirectory, resume_from: Path | None, *, allow_data_change: bool, quiet: bool
) -> None:
    """Raise if the run cannot be resumed, before its dependencies are trained; the session checks again."""
    resume.check_recipe_unchanged(directory, recipe)
    data_fingerprint = _compute_data_fingerprint(recipe, quiet=quiet)
    manifest = next((manifest for _, manifest in checkpoint.list_checkpoints(directory.checkpoints)), None)
    if manifest is None and resume_from is not None:
        manifest = checkpoint.read_manifest(resume.resolve_checkpoint_path(resume_from))
    if manifest is not None and data_fingerprint is not None:
        fingerprint = {**manifest.fingerprint, "data": data_fingerprint}
        resume.check_data_unchanged(manifest, fingerprint, allow=allow_data_change, report=lambda text: None)


def ensure_dependency(
    recipe: Recipe,
    name: str,
    *,
    quiet: bool = True,
    runs_folder: Path | None = None,
    allow_data_change: bool = False,
    started_in: tuple[Path, ...] = (),
) -> Path:
    """Return the exported run of the dependency `name`, training it first if it does not exist.

    A dependency is identified by its recipe and its data: a judge must not have been trained on samples that are now held out.
    `started_in` are folders that relative data paths of the recipe may start from, besides the working directory.
    """
    run, need = find_dependency_run(recipe, name, runs_folder=runs_folder), recipe.needs[name]
    if need.run is not None:
        RunDirectory(run).must_exist()
        return run
    dependency = build_dependency_recipe(recipe, name).model_copy(update={"output_dir": str(run.parent)})
    resolved_data = resolve_paths(dependency.data, started_in)
    if resolved_data != dependency.data:  # the name stays that of the original recipe
        dependency = dependency.model_copy(update={"data": resolved_data, "name": run.name})
    is_main = World.from_environment().is_main
    data_fingerprint = (
        None
        if need.own_data or allow_data_change
        else _compute_data_fingerprint(dependency, quiet=quiet or not is_main)
    )
    if _is_ready(run, data_fingerprint):
        return run
    if not is_main:
        # Prepare the data before the wait, because that may take longer than the timeout of the wait.
        _compute_data_fingerprint(dependency, quiet=True)
        wait_for_dependency(run, lambda: _is_ready(run, data_fingerprint), name=name, quiet=quiet)
        return run
    with lock_dependency(run, quiet=quiet):
        if not _is_ready(run, data_fingerprint):  # another process may have trained it meanwhile
            _train_dependency(
                dependency, run, data_fingerprint, name=name, quiet=quiet, allow_data_change=allow_data_change
            )
    return run


def _train_dependency(
    recipe: Recipe, run: Path, data_fingerprint: str | None, *, name: str, quiet: bool, allow_data_change: bool
) -> None:
    is_started = (run / "final").exists() or bool(checkpoint.list_checkpoints(run / "checkpoints"))
    if data_fingerprint is not None and is_started and _read_data_fingerprint(run) != data_fingerprint:
        set_aside(run, reason=f"needs.{name} was trained on other data and is trained again; ")
    if not quiet:
        print_notice(f"bottega: training needs.{name} first: {run}")
    recipe = _fit_batch_size(recipe, run, name=name, quiet=quiet)
    if World.from_environment().size > 1:
        train_in_subprocess(recipe, run, name=name, quiet=quiet, allow_data_change=allow_data_change)
        return
    _train(ResolvedRecipe(recipe, (recipe.task,)), quiet=quiet, allow_data_change=allow_data_change)
    load(run).export()


def _fit_batch_size(recipe: Recipe, run: Path, *, name: str, quiet: bool) -> Recipe:
    """Lower the batch size of a dependency that has fewer samples than one batch.

    Its name, a hash of the original recipe, stays the same; the same data gives the same size again.
    """
    prepared = prepare_data(recipe, quiet=quiet) if find_spec(recipe).rows_are_samples else None
    if prepared is None:
        return recipe
    num_samples = sum(prepared.tables[table]["rows"] for table in prepared.training_tables)
    num_passes = recipe.training.gradient_accumulation_steps or 1
    if num_samples >= recipe.training.batch_size * num_passes or num_samples < num_passes:
        return recipe
    size = 1 << (num_samples // num_passes).bit_length() - 1
    if not quiet:
        print_notice(
            f"bottega: needs.{name}: training.batch_size is lowered from {recipe.training.batch_size} to {size}, "
            f"because there are {num_samples:,} training samples"
        )
    training = recipe.training.model_copy(update={"batch_size": size})
    return recipe.model_copy(update={"training": training, "name": run.name})


def _is_ready(run: Path, data_fingerprint: str | None) -> bool:
    """Return whether a dependency is exported and was trained on the data with this fingerprint; None is any data."""
    return is_exported(run) and (data_fingerprint is None or _read_data_fingerprint(run) == data_fingerprint)


def is_exported(run: Path) -> bool:
    """Return whether a dependency is trained and exported, on any data."""
    return (run / "final" / "README.md").is_file()


def _read_data_fingerprint(run: Path) -> str | None:
    """Return the fingerprint of the data that a run was trained on; None if it has no checkpoint."""
    fingerprints = [
        manifest.fingerprint.get("data") for _, manifest in checkpoint.list_checkpoints(run / "checkpoints")
    ]
    return str(fingerprints[0]) if fingerprints else None


def _compute_data_fingerprint(recipe: Recipe, *, quiet: bool) -> str | None:
    """Return the fingerprint of a recipe's data; None if it cannot be known before a dependency is trained."""
    prepared = prepare_data(recipe, quiet=quiet)
    return prepared.fingerprint if prepared is not None else None


def prepare_data(recipe: Recipe, *, quiet: bool) -> PreparedData | None:
    """Return a recipe's prepared data, preparing it if needed, as training would do next.

    None if it is tokenised by a dependency that may not be trained yet.
    """
    from bottega.callbacks.progress_bars import progress_bars

    if str(getattr(recipe.model, "from_", None)).startswith(REFERENCE_PREFIX):
        return None
    if getattr(recipe.data, "latents", False):  # an autoencoder computes them
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"latents": False})})
    with progress_bars(open_console(quiet=quiet)) as progress:
        return prepare_recipe(recipe, progress)


def set_aside(path: Path, *, reason: str = "", subject: str = "run is") -> None:
    """Rename a run directory to the next free name, so that --fresh deletes nothing.

    The notice is `reason`, then "the old `subject` renamed to" the new path.
    """
    RunDirectory(path).check_is_run()
    with Lock(RunDirectory(path)):
        new_path = rename_aside(path)
    print_notice(f"bottega: {reason}the old {subject} renamed to {new_path}")
