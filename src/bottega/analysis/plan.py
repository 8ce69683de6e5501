"""`bottega plan`: check a recipe as `train` would, print the resolved recipe, and predict what the run needs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from bottega.analysis.fit import fit_memory, format_fit
from bottega.analysis.prediction import MemoryPredictor, format_prediction, predict_run
from bottega.analysis.probe import format_probe, probe_run
from bottega.callbacks.console import Console
from bottega.callbacks.progress_bars import progress_bars
from bottega.config.load import ResolvedRecipe, get_global_batch_size, to_yaml
from bottega.config.recipe import Recipe
from bottega.core.errors import BottegaError, DataError, MissingDevice, UsageError
from bottega.engines.backend import open_backend
from bottega.redaction import redact_values
from bottega.run.checks import (
    find_data_problems,
    find_directory_problems,
    find_disk_problems,
    find_model_problems,
    find_problems,
    find_size_problems,
    load_checked_recipe,
    parse_words,
    raise_all,
)
from bottega.run.compose import build_training_plan, prepare_workload
from bottega.run.setting_notes import list_adjusted_settings, list_unused_settings
from bottega.run.train import ensure_dependency, is_exported, prepare_data
from bottega.tasks import dependencies
from bottega.tasks.personalize.config import PersonalizeRecipe
from bottega.tasks.recipes import check_recipe
from bottega.tasks.registry import find_spec
from bottega.techniques.training_plan import TrainingPlan
from bottega.terminal import print_notice, print_result
from bottega.world import World


@dataclass(frozen=True)
class PlanOptions:
    """What `bottega plan` does beyond checking a recipe."""

    predict: bool = True
    """Predict parameters, memory, steps and disk."""
    fit: int | None = None
    """Bytes of memory that training has to fit into."""
    probe: bool = False
    """Measure a few training steps."""
    price: float | None = None
    """Price of a second of the machine."""

    @property
    def needs_data(self) -> bool:
        """Whether the data and the models behind it have to be opened, however long that takes."""
        return self.probe or self.fit is not None


DEFAULT_OPTIONS = PlanOptions()


def plan_command(words: list[str], *, show: bool, options: PlanOptions = DEFAULT_OPTIONS) -> dict[str, Any]:
    """Find every problem that `train` would, in one error with its exit code; else print the resolved recipe.

    A file that fits several tasks is a partial recipe, and is only checked against their schemas.
    """
    if not words:
        raise UsageError("name a recipe: bottega plan language; bottega recipes lists them")
    sources, overrides = parse_words(words)
    return plan_recipe(sources, overrides, show=show, options=options)


def plan_recipe(
    sources: list[Any], overrides: Any = (), *, show: bool, options: PlanOptions = DEFAULT_OPTIONS
) -> dict[str, Any]:
    """Check recipes given by name, file or dict, and predict what the run needs; with `show`, print the result.

    A device that is not here, and memory or disk that is too small, do not prevent a prediction: these problems are in
    `problems` of the report, with their `exit_code`. All others are raised.
    """
    resolved = _resolve_recipe(sources, overrides)
    recipe, tasks = resolved.recipe, list(resolved.task_candidates)
    notes = list(resolved.notes)
    machine_problems: list[BottegaError] = []
    plan: TrainingPlan | None = None
    if len(tasks) > 1 and options.needs_data:
        raise UsageError(
            f"bottega plan: --fit and --probe need the task: the keys are valid for {', '.join(tasks)}; set one"
        )
    if len(tasks) == 1:
        problems = [*find_problems(recipe), *find_directory_problems(recipe)]
        machine_problems = [problem for problem in problems if isinstance(problem, MissingDevice)]
        if len(machine_problems) < len(problems) or (machine_problems and options.probe):
            raise_all(problems)
        if options.probe:
            for name in dependencies.find_referenced_dependencies(recipe):
                ensure_dependency(recipe, name, quiet=not show)
        notes += list_unused_settings(recipe)
        plan, more_notes, size_problems = _check_data(
            recipe,
            quiet=not show,
            has_device=not machine_problems,
            opens_slow_data=options.needs_data,
        )
        notes += more_notes
        machine_problems += size_problems
        if options.probe:
            raise_all(machine_problems)
        if plan is None and options.needs_data:
            raise UsageError(
                f"bottega plan: {more_notes[0]}; without --fit and --probe the rest of the recipe is checked"
            )
    problems = machine_problems if options.fit is None else []  # with it, the run is planned for another machine
    if show:
        for note in notes:
            print_notice(f"bottega: {note}")
        print_result(to_yaml(recipe), end="", is_data=True)
        if not problems:
            print_notice(f"bottega: {_summarise_run(recipe) if len(tasks) == 1 else 'valid for ' + ', '.join(tasks)}")
        for line in _list_additions(recipe):
            print_notice(f"bottega: {line}")
    report = {"valid": True, "tasks": tasks, "notes": notes, "recipe": redact_values(recipe.to_plain_dict())}
    if plan is not None and options.predict:
        report |= _predict(recipe, plan, options, show=show)
    if problems:
        report |= {"valid": False, "problems": [str(problem) for problem in problems]}
        report["exit_code"] = min(problem.code for problem in problems)
        for problem in problems if show else ():
            print_notice(f"bottega: {problem}")
    return report


def _predict(recipe: Recipe, plan: TrainingPlan, options: PlanOptions, *, show: bool) -> dict[str, Any]:
    """Predict the run, find what fits, and measure it, as `options` say; return these parts of the report."""
    report: dict[str, Any] = {}
    predictor = MemoryPredictor(recipe, plan, device_type=_choose_device_type(recipe, options))

    def publish(name: str, value: dict[str, Any], text: str) -> None:
        report[name] = value
        if show:
            print_notice(f"\n{text}")

    prediction = predict_run(predictor)
    publish("prediction", prediction.to_plain_dict(), format_prediction(prediction))
    if options.fit is not None:
        with progress_bars(Console(unit="samples", quiet=not show).rich, in_bytes=False) as report_progress:
            fit = fit_memory(
                predictor, options.fit, report_progress=lambda done, total: report_progress("settings", done, total)
            )
        publish("fit", fit, format_fit(fit))
    if options.probe:
        probe = probe_run(recipe, plan, prediction, price=options.price)
        publish("probe", probe, format_probe(probe, prediction))
    return report


def _choose_device_type(recipe: Recipe, options: PlanOptions) -> str:
    """Return the type of device to predict for: that of the recipe, here or not; a GPU for `--fit` unless it says otherwise."""
    if recipe.device != "auto":
        return recipe.device
    return "cuda" if options.fit is not None else open_backend(recipe.engine).device_type("auto")


def _resolve_recipe(sources: list[Any], overrides: Any) -> ResolvedRecipe:
    try:
        partial_recipe = check_recipe(sources, overrides)
    except BottegaError:
        partial_recipe = None
    return (
        partial_recipe
        if partial_recipe is not None and len(partial_recipe.task_candidates) > 1
        else load_checked_recipe(sources, overrides)
    )


def _check_data(
    recipe: Recipe, *, quiet: bool, has_device: bool, opens_slow_data: bool
) -> tuple[TrainingPlan | None, list[str], list[BottegaError]]:
    """Prepare the data as `train` would (which then reads it from the cache), and check the recipe against it.

    Return the training plan, notes, and what does not fit on this machine. There is no plan, and a note says so, if something
    must be trained or downloaded first, or if opening the data takes long and `opens_slow_data` is false.
    """
    untrained_dependencies = [
        f"needs.{name}"
        for name in dependencies.find_referenced_dependencies(recipe)
        if not is_exported(dependencies.find_dependency_run(recipe, name))
    ]
    base = getattr(recipe.model, "from_", None)
    if (
        base is not None
        and not base.startswith(dependencies.REFERENCE_PREFIX)
        and not os.path.isdir(os.path.expanduser(base))
    ):
        note = f"model.from: {base} is not downloaded yet; what depends on it is checked when train downloads it"
        return None, [note], []
    is_slow = isinstance(recipe, PersonalizeRecipe) or getattr(recipe.data, "latents", False)
    if untrained_dependencies or (is_slow and not opens_slow_data):
        prepared = prepare_data(recipe, quiet=quiet)
        if prepared is not None:
            _check_rows(recipe, sum(prepared.tables[table]["rows"] for table in prepared.training_tables))
        names = ", ".join(untrained_dependencies)
        if not names:
            return (
                None,
                ["the memory is not predicted, because frozen models would have to run first; --memory measures it"],
                [],
            )
        return None, [f"{names}: to be trained first; what depends on it is not checked"], []
    resolved = dependencies.resolve_references(recipe)
    workload = prepare_workload(resolved, Console(unit="samples", quiet=quiet))
    problems = find_size_problems(recipe, workload.task) if has_device else []
    plan = build_training_plan(resolved, workload)
    problems = problems or find_disk_problems(recipe, workload.task, has_validation=plan.validation is not None)
    invalid = [*find_data_problems(recipe, plan), *find_model_problems(recipe, plan)]
    raise_all([*invalid, *problems] if invalid else [])
    return plan, [*plan.notes, *list_adjusted_settings(recipe, plan)], problems


def _check_rows(recipe: Recipe, num_rows: int) -> None:
    batch_size = get_global_batch_size(recipe, World.from_environment().data_size)
    if num_rows < batch_size and find_spec(recipe).rows_are_samples:
        raise DataError(
            f"the training data has {num_rows} samples, fewer than one batch of {batch_size}; lower training.batch_size or add data"
        )


def _summarise_run(recipe: Recipe) -> str:
    """Return the length, batch size, optimizer and folder of a run in one line."""
    training = recipe.training
    length = (
        f"{training.max_steps} steps"
        if training.max_steps
        else f"{training.num_epochs} epochs"
        if training.num_epochs
        else "no length yet"
    )
    batch = f"batches of {training.batch_size * (training.gradient_accumulation_steps or 1)}"
    rate = "a learning rate from a range test" if training.learning_rate == "auto" else f"{training.learning_rate:g}"
    optimizer = f"{training.optimizer.name} at {rate}, {training.scheduler.name}"
    return f"valid; {recipe.task}: {length}, {batch}, {optimizer}, in {recipe.output_dir}/{recipe.run_name()}"


def _list_additions(recipe: Recipe) -> list[str]:
    """Return a line for each technique and for each other addition to plain training."""
    lines = []
    for technique in recipe.techniques:
        options = technique.model_dump(mode="json", by_alias=True).get("options", {})
        values = ", ".join(f"{key} {_format_value(value)}" for key, value in options.items() if value is not None)
        lines.append(f"techniques: {technique.name}" + (f" ({values})" if values else ""))
    if recipe.training.learning_rate == "auto":
        lines.append("training.learning_rate: auto, found by a range test before the first step, as in bottega lr-find")
    lines += list_precompute_notes(recipe)
    split = recipe.data.split
    if split is not None and split.folds is not None:
        lines.append(
            f"data.split: fold {split.fold} of {split.folds} is held out; bottega crossval trains one model per fold"
        )
    return lines


def list_precompute_notes(recipe: Recipe) -> list[str]:
    """Return a note on which states of a frozen language model can be precomputed."""
    num_prefix_tokens = getattr(recipe.model, "num_prefix_tokens", None)
    if num_prefix_tokens is None:
        return []
    if num_prefix_tokens:
        return [
            f"model.num_prefix_tokens {num_prefix_tokens}: every state of the language model depends on trained weights, so none "
            "can be precomputed; 0 runs the history without gradients"
        ]
    return ["model.num_prefix_tokens 0: no gradient passes through the history, so its activations are not saved"]


def _format_value(value: Any) -> str:
    return (
        f"[{', '.join(map(str, value))}]"
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
