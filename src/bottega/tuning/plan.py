"""What a study searches: its recipe, space and metrics, checked before the first trial."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bottega.config.load import RecipeSource
from bottega.config.metrics import HIGHER_IS_BETTER, LOWER_IS_BETTER, infer_metric_mode
from bottega.config.recipe import Recipe
from bottega.config.schema_keys import collect_schema_keys, has_key
from bottega.config.technique_options import is_option_key, list_option_keys
from bottega.config.tune import Tune
from bottega.core.errors import BottegaError, UsageError
from bottega.run.checks import find_problems, raise_all
from bottega.similar_names import find_similar_names
from bottega.tasks import dependencies
from bottega.tasks.recipes import load_recipe
from bottega.tuning.space import Dimension, build_grid, parse_space
from bottega.tuning.study import PROGRESS_UNITS, Objective

STUDIES_FOLDER = Path("studies")
RUN_METRICS = {"parameters": "min", "seconds": "min", "samples_per_second": "max"}
"""Metrics of a run as a whole, which can be traded off against those of an evaluation."""
DEFAULT_NUM_TRIALS = 20
RESERVED_KEYS = (
    *("tune", "name", "output_dir", "samples.every", "checkpoint.keep", "evaluation.metric", "evaluation.mode"),
    *("distributed.processes", "device"),
)
"""Keys that the study sets itself, or that decide where trials run."""
Override = tuple[str, str, str]


class StudyFailed(BottegaError):
    """Every trial of a study failed; the exit code is that of the first."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code if code is not None and code > 0 else 1


@dataclass(frozen=True)
class StudyPlan:
    """A study before its first trial."""

    name: str
    folder: Path
    sources: tuple[RecipeSource, ...]
    overrides: tuple[Override, ...]
    recipe: Recipe
    """The recipe without the searched keys, which trials differ from."""
    options: Tune
    dimensions: tuple[Dimension, ...]
    objectives: tuple[Objective, ...]
    grid: tuple[dict[str, Any], ...] = ()
    """The points of method grid."""
    storage: str | None = None

    @property
    def num_trials(self) -> int | None:
        """The number of trials of the whole study; None if only the timeout ends it."""
        if self.options.method == "grid":
            return min(len(self.grid), self.options.trials or len(self.grid))
        if self.options.trials is None and self.options.timeout is not None:
            return None
        return self.options.trials or DEFAULT_NUM_TRIALS

    @property
    def num_points(self) -> int | None:
        """The number of different trials that the space allows; None if it is not finite, or too large to count."""
        try:
            return len(build_grid(self.dimensions, self.base))
        except UsageError:
            return None

    @property
    def base(self) -> dict[str, Any]:
        """Key -> value in the recipe, of keys that conditions name."""
        keys = {dimension.condition.key for dimension in self.dimensions if dimension.condition is not None}
        return {key: get_value(self.recipe, key) for key in keys}

    @property
    def identity(self) -> dict[str, dict[str, Any]]:
        """What must not change while a study is continued."""
        searched = {dimension.key for dimension in self.dimensions}
        recipe = {key: value for key, value in self.recipe.results_key().items() if key not in searched}
        return {
            "recipe": json.loads(json.dumps(recipe, default=str)),
            "space": {dimension.key: str(dimension) for dimension in self.dimensions},
            "metric": {"metric": ",".join(f"{'-' if o.mode == 'min' else ''}{o.name}" for o in self.objectives)},
            "method": self._describe_method(),
        }

    def _describe_method(self) -> dict[str, Any]:
        """Methods other than these two may change; the points of a grid are numbered by the order of its keys."""
        if self.options.method == "grid":
            return {"method": "grid", "order": [dimension.key for dimension in self.dimensions]}
        return {"method": "pbt" if self.options.method == "pbt" else "search"}

    @property
    def first_evaluation(self) -> int:
        """When a trial is first evaluated, in thousandths of its length; 100 if the recipe does not tell."""
        every, training = self.recipe.evaluation.every, self.recipe.training
        if every is None:
            return PROGRESS_UNITS
        total = {"steps": training.max_steps, "epochs": training.num_epochs, "percent": 100}.get(every.unit)
        fraction = every.amount / total if total else 0.1
        return max(1, min(PROGRESS_UNITS, round(PROGRESS_UNITS * fraction)))

    def build_trial_recipe(self, keys: Mapping[str, Any], *, name: str, **settings: Any) -> Recipe:
        """Return the recipe of a trial; `settings` are further keys, with two underscores for each dot."""
        changes = {
            "evaluation.metric": self.objectives[0].name,
            "evaluation.mode": self.objectives[0].mode,
            "samples.every": None,
            "checkpoint.keep": 1,
            **({"evaluation.baseline": False} if hasattr(self.recipe.evaluation, "baseline") else {}),
            "tune": None,
            "output_dir": str(self.folder / "trials"),
            "name": name,
            **{key.replace("__", "."): value for key, value in settings.items()},
        }
        return load_with(self.sources, self.overrides, {**changes, **keys})


def load_with(sources: Sequence[RecipeSource], overrides: Sequence[Override], keys: Mapping[str, Any]) -> Recipe:
    """Load a recipe with further keys, which replace overrides of the same key; defaults follow from the keys."""
    unchanged = [override for override in overrides if _resolve_key(override[0]) not in keys]
    # Quoted text is taken as it is, without escapes.
    texts = {key: f'"{value}"' if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
    added = [(key, text, "tune") for key, text in texts.items()]
    return load_recipe(list(sources), [*unchanged, *added]).recipe


def plan_study(
    sources: Sequence[RecipeSource],
    overrides: Sequence[Override],
    *,
    flags: Mapping[str, Any],
    space: Any = None,
    study: str | None = None,
    storage: str | None = None,
    out: Path | None = None,
) -> StudyPlan:
    """Return the checked plan of a study; `flags` replace keys of the `tune` section that are not None.

    Raises UsageError with every problem of the space, the metric and the recipe.
    """
    recipe = load_recipe(list(sources), list(overrides)).recipe
    set_flags = {f"tune.{key}": value for key, value in flags.items() if value is not None}
    if set_flags:
        try:
            recipe = load_with(sources, overrides, set_flags)
        except UsageError as error:
            raise UsageError(str(error).replace("tune: tune.", "--")) from None
    options = recipe.tune or Tune()
    dimensions = tuple(parse_space(space if space else options.space))
    objectives = _parse_objectives(options.metric, recipe)
    plan = StudyPlan("", Path(), tuple(sources), tuple(overrides), recipe, options, dimensions, objectives)
    problems = [problem for dimension in dimensions for problem in _find_key_problems(plan, dimension)]
    if problems:
        raise UsageError("\n".join(dict.fromkeys(problems)))
    problems = _find_value_problems(plan)
    if problems:
        raise UsageError("\n".join(dict.fromkeys(problems)))
    if len(objectives) > 1:
        _check_tradeoff(options)
    # Several processes are started for each trial, not for this command.
    one_process = recipe.distributed.model_copy(update={"processes": None})
    raise_all(find_problems(recipe.model_copy(update={"distributed": one_process})))
    name = study if study is not None else _default_name(plan)
    if "/" in name or name in ("", ".", ".."):
        raise UsageError(f"--study {name}: expected a name without /; --out sets the folder")
    grid = tuple(build_grid(dimensions, plan.base)) if options.method == "grid" else ()
    return replace(plan, name=name, folder=out or STUDIES_FOLDER / name, grid=grid, storage=storage)


def check_metrics_available(plan: StudyPlan, report_progress: Any) -> str | None:
    """Raise UsageError if the recipe has no validation data or does not measure a metric; return the hash of the data.

    None if dependencies must be trained before the data can be read.
    """
    from bottega.run.compose import build_training_plan
    from bottega.tasks import registry

    recipe = plan.build_trial_recipe(
        {}, name="check", evaluation__metric=plan.recipe.evaluation.metric, evaluation__mode=None
    )
    if dependencies.find_referenced_dependencies(recipe) or getattr(recipe.data, "latents", False):
        return None  # the workload cannot be opened before dependencies are trained and latents computed
    # On the CPU: nothing is computed here, and the trials need the GPU memory.
    resolved = dependencies.resolve_references(recipe.model_copy(update={"device": "cpu"}))
    workload = registry.open_workload(resolved, progress=report_progress)
    training_plan = build_training_plan(resolved, workload)
    if training_plan.validation is None:
        raise UsageError("tune needs validation data, but data.validation is null; set it to a fraction such as 0.1")
    metrics = [*training_plan.metrics, *RUN_METRICS]
    for objective in plan.objectives:
        if objective.name not in metrics:
            similar = find_similar_names(objective.name, metrics)
            hint = f"did you mean {similar[0]}?" if similar else f"choose from {', '.join(metrics)}"
            raise UsageError(f"--metric {objective.name}: not measured; {hint}")
    return workload.data.fingerprint


def get_value(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key of a recipe as a recipe file writes it; None if it is not set."""
    value: Any = recipe.to_plain_dict()
    for part in key.split("."):
        if isinstance(value, list):  # techniques.lora.rank
            value = next(
                (item["options"] for item in value if isinstance(item, dict) and item.get("name") == part), None
            )
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _parse_objectives(text: str | None, recipe: Recipe) -> tuple[Objective, ...]:
    """Return the metrics to optimise: `accuracy,-parameters` maximises the first and minimises the second."""
    if text is None:
        return (Objective(recipe.evaluation.metric, recipe.evaluation.resolved_mode),)
    objectives: list[Objective] = []
    for word in (part.strip() for part in text.split(",")):
        name = word.lstrip("+-")
        if not name:
            raise UsageError(f"--metric {text}: expected names separated by commas, such as accuracy,-parameters")
        inferred_mode = RUN_METRICS.get(name) or infer_metric_mode(name)
        if name == recipe.evaluation.metric:
            inferred_mode = recipe.evaluation.resolved_mode
        signed_mode = {"-": "min", "+": "max"}.get(word[0])
        if signed_mode is not None and inferred_mode is not None and signed_mode != inferred_mode:
            better = "higher" if inferred_mode == "max" else "lower"
            raise UsageError(f"--metric {word}: {better} {name} is better; remove the sign")
        if signed_mode is None and inferred_mode is None:
            similar = find_similar_names(name, [*LOWER_IS_BETTER, *HIGHER_IS_BETTER, *RUN_METRICS])
            if similar:
                raise UsageError(f"--metric {name}: not measured; did you mean {similar[0]}?")
            raise UsageError(f"--metric {name}: write -{name} to minimise it or +{name} to maximise it")
        objectives.append(Objective(name, signed_mode or inferred_mode))  # type: ignore[arg-type]
    names = [objective.name for objective in objectives]
    if len(set(names)) < len(names):
        raise UsageError(f"--metric {text}: a metric is given twice; keep one")
    if names[0] in RUN_METRICS:
        raise UsageError(f"--metric {text}: put a metric of the evaluation first, such as accuracy,-{names[0]}")
    return tuple(objectives)


def _check_tradeoff(options: Tune) -> None:
    if options.method in ("cmaes", "pbt"):
        raise UsageError(f"--metric {options.metric}: {options.method} optimises one metric; use --method tpe")
    if options.pruner != "none":
        raise UsageError(f"--pruner {options.pruner}: trials are pruned by one metric, not by a trade-off; remove it")


def _find_key_problems(plan: StudyPlan, dimension: Dimension) -> list[str]:
    schema, problems = type(plan.recipe), []
    keys = [dimension.key] + ([dimension.condition.key] if dimension.condition is not None else [])
    for key in keys:
        if key in RESERVED_KEYS or key.startswith("tune."):
            problems.append(f"--space {key}: set by the study itself; remove it")
        elif not has_key(key, schema) and not is_option_key(key):
            flags = [name for name in collect_schema_keys(schema) if "*" not in name] + list_option_keys()
            similar = find_similar_names(key, flags) or [
                name for name in flags if name.rpartition(".")[2] == key.rpartition(".")[2]
            ]
            problems.append(f"--space {key}: unknown key" + (f"; did you mean {similar[0]}?" if similar else ""))
    return problems


def _find_value_problems(plan: StudyPlan) -> list[str]:
    """Load the recipe with each value of each dimension, so that no trial fails for a value the schema refuses."""
    problems: list[str] = []
    for dimension in plan.dimensions:
        for value in dimension.list_test_values():
            keys: dict[str, Any] = {dimension.key: value}
            if dimension.condition is not None:
                keys = {dimension.condition.key: dimension.condition.values[0], **keys}
            try:
                plan.build_trial_recipe(keys, name="check")
            except UsageError as error:
                lines = str(error).splitlines()
                own_lines = [line.removeprefix("tune: ") for line in lines if line.startswith("tune: ")]
                other_lines = [
                    f"{dimension.key}: {json.dumps(value)} does not go with the recipe: {line}" for line in lines
                ]
                problems += [f"--space {line}" for line in own_lines or other_lines]
    return problems


def _default_name(plan: StudyPlan) -> str:
    """Return the recipe's name and a hash of the study's identity, so that the same command continues it."""
    text = json.dumps(plan.identity, sort_keys=True)
    prefix = plan.recipe.name or plan.recipe.model_copy(update={"name": None}).run_name().rpartition("-")[0]
    return f"{prefix}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _resolve_key(key: str) -> str:
    from bottega.config.aliases import resolve_alias

    return next(iter(resolve_alias(key, 0)))
