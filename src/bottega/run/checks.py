"""Checks of a recipe on this machine: all problems at once, before anything expensive starts.

`bottega train` raises the problems and `bottega plan` prints them, so the two cannot disagree.
"""

from __future__ import annotations

import errno
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bottega.config.conflicts import find_injection, list_missing_teachers
from bottega.config.data import Source
from bottega.config.flags import FlagError, Override
from bottega.config.load import RecipeError, ResolvedRecipe, get_global_batch_size
from bottega.config.recipe import Recipe
from bottega.config.section import Section
from bottega.core.errors import BottegaError, DataError, EnvironmentProblem, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.core.saver import explain_os_error
from bottega.core.task import Task
from bottega.data.formats.files import check_exists
from bottega.engines.backend import open_backend
from bottega.run import resume
from bottega.run.compose import (
    build_plain_loader,
    check_metrics,
    check_profile,
    count_total_steps,
)
from bottega.run.disk_space import check_disk_space
from bottega.run.engine_problems import find_engine_problems
from bottega.run.setting_notes import get_device_type
from bottega.tasks import dependencies
from bottega.tasks.base_model import resolve_base_folder
from bottega.tasks.generation.config import Generator
from bottega.tasks.recipes import check_recipe, load_recipe, parse_overrides
from bottega.tasks.registry import find_spec
from bottega.techniques.training_plan import TrainingPlan
from bottega.world import World


def raise_all(problems: Sequence[BottegaError]) -> None:
    """Raise all problems as one error, a line each, sorted by exit code; the exit code is that of the first."""
    if not problems:
        return
    sorted_problems = sorted(problems, key=lambda problem: problem.code)
    lines = dict.fromkeys(line for problem in sorted_problems for line in str(problem).splitlines())
    error_class = next(
        error_class for error_class in type(sorted_problems[0]).__mro__ if BottegaError in error_class.__bases__
    )
    raise error_class("\n".join(lines)) from sorted_problems[0]


def find_problems(recipe: Recipe) -> list[BottegaError]:
    """Return the problems known without reading the data: options, processes, device, files, dependencies."""
    world = World.from_environment()
    dependency_problems = _collect(lambda: dependencies.check_dependencies(recipe)) or _find_dependency_problems(recipe)
    return [
        *find_unimplemented_options(recipe),
        *find_engine_problems(recipe),
        *_find_package_problems(recipe),
        *_collect(lambda: get_global_batch_size(recipe, world.data_size)),
        *_find_machine_problems(recipe, world.size),
        *_find_shape_problems(recipe),
        *_find_file_problems(recipe),
        *dependency_problems,
    ]


def parse_words(words: Sequence[str]) -> tuple[list[str], list[Override]]:
    """Return the recipes and overrides of a command line; raise its problems together with those of the recipe."""
    try:
        return parse_overrides(words)
    except FlagError as error:
        recipe_problems: list[BottegaError] = []
        try:
            resolved = check_recipe(error.sources, error.overrides) if error.sources else None
            if resolved is not None and len(resolved.task_candidates) == 1:
                recipe_problems = _find_recipe_problems(resolved.recipe)
        except RecipeError as invalid:
            recipe_problems = [invalid, *(_find_recipe_problems(invalid.recipe) if invalid.recipe is not None else [])]
        raise_all([error, *recipe_problems])
        raise


def load_checked_recipe(sources: Sequence[Any], overrides: Sequence[tuple[str, str, str]] = ()) -> ResolvedRecipe:
    """Load a recipe; raise the problems of its schema together with those of this machine."""
    try:
        return load_recipe(sources, overrides)
    except RecipeError as error:
        raise_all([error, *(_find_recipe_problems(error.recipe) if error.recipe is not None else [])])
        raise


def _find_recipe_problems(recipe: Recipe) -> list[BottegaError]:
    """Return the problems of a recipe from which the invalid keys were removed."""
    world_size = World.from_environment().size
    return [
        *find_unimplemented_options(recipe),
        *_find_machine_problems(recipe, world_size),
        *_find_file_problems(recipe),
    ]


def find_unimplemented_options(recipe: Recipe) -> list[BottegaError]:
    """Return a problem for each requested option that the schema accepts but that is not implemented."""
    is_distributed = recipe.distributed.enabled is not False
    requested = {
        "distributed.strategy: fsdp": is_distributed
        and recipe.distributed.strategy == "fsdp"
        and recipe.engine == "torch",
        "training.label_smoothing": recipe.training.label_smoothing > 0
        and not find_spec(recipe).supports_label_smoothing,
    }
    return [
        UsageError(f"{key} is not implemented yet; remove it")
        for key, is_requested in requested.items()
        if is_requested
    ]


def find_data_problems(recipe: Recipe, plan: TrainingPlan) -> list[BottegaError]:
    """Return the problems known once the data is prepared: too few samples, a metric that is not measured."""
    data_size = World.from_environment().data_size

    def check_length() -> None:
        loader = build_plain_loader(recipe, plan.training, data_size=data_size, order=plan.order)
        check_profile(recipe, count_total_steps(recipe, loader))

    return _collect(
        check_length, lambda: check_metrics(recipe, plan.metrics, has_validation=plan.validation is not None)
    )


def find_model_problems(recipe: Recipe, plan: TrainingPlan) -> list[BottegaError]:
    """Return a problem for each setting that the model does not support, by its shape: nothing is allocated or computed."""
    return open_backend(recipe.engine).find_model_problems(plan.task, recipe.training, seed=recipe.seed)


def find_size_problems(recipe: Recipe, task: Task) -> list[BottegaError]:
    """Return a problem if the model does not fit in memory, estimated from its shape before it is built."""

    def check() -> None:
        backend, is_frozen = open_backend(recipe.engine), find_injection(recipe) is not None
        estimate = backend.estimate_memory(task, recipe.training, seed=recipe.seed, is_frozen=is_frozen)
        backend.check_memory(estimate, recipe.device)

    return _collect(check)


def find_directory_problems(recipe: Recipe) -> list[BottegaError]:
    """Return the problems of the run directory: not writable, not a run, in use, or of another recipe."""
    run = RunDirectory(Path(recipe.output_dir) / recipe.run_name())
    if not run.path.is_dir():
        return _collect(lambda: _check_writable(run))
    checks = (run.check_usable, Lock(run).check_free, lambda: _check_writable(run))
    return _collect(*checks) or _collect(lambda: resume.check_recipe_unchanged(run, recipe))


def _check_writable(run: RunDirectory) -> None:
    """Raise the error that training would raise if it could not write the run directory."""
    existing = _find_nearest_existing(run.path)
    error_number = 0 if os.access(existing, os.W_OK | os.X_OK) else errno.EACCES
    if not existing.is_dir():
        error_number = errno.EEXIST if existing == Path(os.path.abspath(run.path)) else errno.ENOTDIR
    if error_number:
        raise explain_os_error(OSError(error_number, os.strerror(error_number)), run.path)


def _find_nearest_existing(path: Path) -> Path:
    """Return `path` if it exists, or else the nearest folder above it that does."""
    absolute = Path(os.path.abspath(path))
    return next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))


def find_disk_problems(recipe: Recipe, task: Task, *, has_validation: bool) -> list[BottegaError]:
    """Return a problem if the checkpoints do not fit on the disk, estimated from the shape of the model.

    `train` starts if two of them fit, with a warning, and ends with the same exit code once the disk is full.
    """
    backend, is_frozen = open_backend(recipe.engine), find_injection(recipe) is not None
    estimate = backend.estimate_memory(task, recipe.training, seed=recipe.seed, is_frozen=is_frozen)
    folder = find_checkpoint_folder(recipe)
    shortages: list[str] = []
    problems = _collect(
        lambda: check_disk_space(
            folder,
            size=estimate.checkpoint,
            keep=recipe.checkpoint.keep,
            has_best=has_validation,
            warn=shortages.append,
        )
    )
    return [*problems, *map(EnvironmentProblem, shortages)]


def find_checkpoint_folder(recipe: Recipe) -> Path:
    """Return the folder of the checkpoints, or the nearest one above it that exists."""
    run = RunDirectory(Path(recipe.output_dir) / recipe.run_name())
    return run.checkpoints if run.checkpoints.is_dir() else _find_nearest_existing(run.path)


def _collect(*checks: Callable[[], Any]) -> list[BottegaError]:
    """Run every check and return the errors they raise."""
    problems: list[BottegaError] = []
    for check in checks:
        try:
            check()
        except BottegaError as error:
            problems.append(error)
    return problems


def _find_package_problems(recipe: Recipe) -> list[BottegaError]:
    if not recipe.logging.wandb.is_active or importlib.util.find_spec("wandb") is not None:
        return []
    remedy = "pip install 'bottega[wandb]', or set logging.wandb.enabled=false"
    return [EnvironmentProblem(f"logging.wandb needs the package wandb; {remedy}")]


def _find_machine_problems(recipe: Recipe, world_size: int) -> list[BottegaError]:
    backend = open_backend(recipe.engine)
    problems = _collect(lambda: backend.device_type(recipe.device)) or _collect(
        lambda: backend.check_precision(recipe.training.mixed_precision, recipe.device)
    )
    return problems + [UsageError(text) for text in _find_process_problems(recipe, world_size, get_device_type(recipe))]


def _find_process_problems(recipe: Recipe, world_size: int, device: str) -> Iterator[str]:
    if recipe.engine == "jax":
        yield from _find_jax_process_problems(recipe)
        return
    distributed = recipe.distributed
    for axis, size in (("shard", distributed.shard), ("tensor", distributed.tensor)):
        if size is not None and size > 1:
            yield f"distributed.{axis}: {size} is not implemented yet with engine=torch; use engine=jax, or remove it"
    expected, key = distributed.processes, "processes"
    if expected is None:
        expected, key = distributed.replicate, "replicate"
    if distributed.enabled is False:
        if world_size > 1:
            yield f"distributed.enabled is false, but {world_size} processes were started; start one, or remove the key"
        return
    advice = f"start them with torchrun --nproc_per_node {expected or 'N'} -m bottega train …"
    if expected is not None and expected != world_size:
        yield f"distributed.{key} is {expected}, but the number of processes started is {world_size}; {advice}"
    elif distributed.enabled and world_size == 1:
        yield f"distributed.enabled is true, but one process was started; {advice}, or remove the key"
    backend_name = "nccl" if device == "cuda" else "gloo"
    if distributed.backend not in ("auto", backend_name):
        yield (
            f"distributed.backend: {distributed.backend} is not used on device {device}, where processes communicate "
            f"over {backend_name}; remove it"
        )
    if distributed.offload and device != "cpu":
        yield "distributed.offload is not implemented yet; remove it"


def _find_shape_problems(recipe: Recipe) -> list[BottegaError]:
    model = recipe.model
    if not isinstance(model, Generator) or model.backbone == "unet":
        return []
    # Rotary positions of the language model over codes need an even head size.
    prefix, factor = ("twice ", 2) if model.backbone == "tokens" else ("", 1)
    if model.hidden_size % (factor * model.num_heads) == 0:
        return []
    return [
        UsageError(
            f"model.hidden_size: {model.hidden_size} is not a multiple of {prefix}num_heads {model.num_heads}; change one of them"
        )
    ]


def _find_file_problems(recipe: Recipe) -> list[BottegaError]:
    checks: list[Callable[[], Any]] = [
        partial(check_exists, str(source.path))
        for source in _iter_sources(recipe.data)
        if source.path is not None and source.kind not in ("embedded", "huggingface", "synthetic")
    ]
    tokenizer = getattr(recipe.data, "tokenizer", None)
    path = getattr(tokenizer, "path", None)
    if path is not None and path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        checks.append(
            _make_failing_check(DataError(f"data.tokenizer.path: {path} does not exist; give a file or a folder"))
        )
    base = getattr(recipe.model, "from_", None)
    run = RunDirectory(Path(recipe.output_dir) / recipe.run_name())
    if base is not None and not base.startswith(dependencies.REFERENCE_PREFIX) and not resume.has_begun(run):
        checks.append(lambda: _check_local_base(base))
    return _collect(*checks, *(_make_failing_check(UsageError(text)) for text in list_missing_teachers(recipe)))


def _check_local_base(name: str) -> None:
    """Raise if a local folder does not exist; a hub name is looked up when it is needed."""
    from bottega.models.folders.resolve import is_local_path

    if is_local_path(name) or Path(name).expanduser().is_dir():
        resolve_base_folder(name, is_local=True)


def _make_failing_check(error: BottegaError) -> Callable[[], None]:
    """Return a check that always fails with `error`."""

    def check() -> None:
        raise error

    return check


def _iter_sources(value: Any) -> Iterator[Source]:
    """Yield every data source in a section of a recipe, or in a value within one."""
    if isinstance(value, Source):
        yield value
    elif isinstance(value, Section):
        for field in type(value).model_fields:
            yield from _iter_sources(getattr(value, field))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _iter_sources(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iter_sources(item)


def _find_dependency_problems(recipe: Recipe) -> list[BottegaError]:
    """Return the problems of the runs that this one depends on: a missing run, or a recipe that cannot be trained."""
    problems: list[BottegaError] = []
    for name in dependencies.find_referenced_dependencies(recipe):
        need = recipe.needs.get(name)
        if need is not None and need.run is not None:
            run = RunDirectory(dependencies.find_dependency_run(recipe, name))
            problems += _collect(run.must_exist)
        elif need is not None:
            problems += _find_dependency_recipe_problems(recipe, name)
    return problems


def _find_dependency_recipe_problems(recipe: Recipe, name: str) -> list[BottegaError]:
    """Return the problems of one dependency's recipe, except those that its parent `recipe` has too."""
    dependency = dependencies.build_dependency_recipe(recipe, name)
    problems = [
        *find_unimplemented_options(dependency),
        *_find_machine_problems(dependency, 1),
        *_find_shape_problems(dependency),
        *_find_file_problems(dependency),
    ]
    parent_problems = {str(problem) for problem in [*_find_machine_problems(recipe, 1), *_find_file_problems(recipe)]}
    dependency_problems = [
        type(problem)(f"needs.{name}: {problem}") for problem in problems if str(problem) not in parent_problems
    ]
    return [*dependency_problems, *_find_dependency_problems(dependency)]


def _find_jax_process_problems(recipe: Recipe) -> Iterator[str]:
    """Yield what `distributed` asks for that JAX does not have."""
    distributed = recipe.distributed
    if (
        World.from_environment().size > 1
        and recipe.task == "classify"
        and getattr(recipe.data, "input", None) == "text"
    ):
        yield (
            "engine: jax trains a classifier of texts in one process, because several would pad their texts to different lengths; "
            "start one process, which may use several devices (distributed.replicate)"
        )
    size, axes = math.prod(distributed.mesh.values()), (distributed.replicate, distributed.shard, distributed.tensor)
    if distributed.processes not in (None, size) and any(axes):
        yield (
            f"distributed.processes is {distributed.processes}, but replicate x shard x tensor is {size}; remove one of them"
        )
    if distributed.offload:
        yield "distributed.offload is not available with engine=jax; use distributed.shard to split the optimizer state"
