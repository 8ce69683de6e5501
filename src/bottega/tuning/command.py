"""`bottega tune` and `bottega.tune`: search the keys of a recipe, then write the best recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.callbacks.progress_bars import progress_bars
from bottega.config.load import RecipeSource
from bottega.core.errors import EnvironmentProblem, Interrupted, UsageError
from bottega.core.rundir import RunDirectory
from bottega.run.job_pool import plan_job_environments
from bottega.tasks.recipes import parse_overrides
from bottega.terminal import open_console
from bottega.world import is_launched

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from bottega.tuning.plan import StudyPlan
    from bottega.tuning.study_folder import StudyFolder


MAX_JOBS = 1024
"""Upper limit of trials at a time where only the timeout limits their number."""


def tune(
    recipe: RecipeSource | Sequence[RecipeSource],
    overrides: Mapping[str, Any] | None = None,
    *,
    space: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    trials: int | None = None,
    metric: str | None = None,
    method: str | None = None,
    pruner: str | None = None,
    jobs: int | str | None = None,
    timeout: str | float | None = None,
    study: str | None = None,
    storage: str | None = None,
    confirm: int = 0,
    verify: bool = False,
    out: str | Path | None = None,
    fresh: bool = False,
    quiet: bool = True,
) -> dict[str, Any]:
    """`bottega.tune`: search the keys of a recipe, and return the content of study.json.

    `space` maps keys to `"log(1e-5, 1e-2)"`, a list of values, or a tuple such as `(1e-5, 0.1, "log_uniform")`; several spaces are
    joined. `timeout` is in seconds, or text such as "30 min". `confirm` trains the best with so many further seeds; `verify` trains the
    winner of pbt again and compares the weights. The same call continues where an earlier one stopped.
    """
    from bottega.run.saved import strip_flag_dashes

    sources = [recipe] if isinstance(recipe, str | Path | Mapping) else list(recipe)
    flags = {
        "trials": trials,
        "metric": metric,
        "method": method,
        "pruner": pruner,
        "jobs": jobs,
        "timeout": f"{timeout:g} s" if isinstance(timeout, int | float) else timeout,
    }
    try:
        return run_study(
            [*sources, overrides or {}],
            [],
            flags=flags,
            space=space,
            study=study,
            storage=storage,
            confirm=confirm,
            verify=verify,
            out=Path(out) if out is not None else None,
            fresh=fresh,
            quiet=quiet,
        )
    except UsageError as error:
        raise strip_flag_dashes(error) from None


def tune_command(words: list[str], **options: Any) -> dict[str, Any]:
    """Run `bottega tune` with the recipe and overrides of the command line."""
    sources, overrides = parse_overrides(words)
    if not sources:
        raise UsageError(
            "no recipe given; run bottega tune RECIPE, such as bottega tune classify/cnn "
            "--space 'training.learning_rate=log(1e-5,1e-2)'"
        )
    return run_study(sources, overrides, **options)


def run_study(
    sources: Sequence[RecipeSource],
    overrides: Sequence[tuple[str, str, str]],
    *,
    flags: Mapping[str, Any],
    space: Any,
    study: str | None,
    storage: str | None,
    confirm: int,
    verify: bool,
    out: Path | None,
    fresh: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Plan a study, search, and write its report; return the content of study.json."""
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise EnvironmentProblem("tune needs optuna; pip install 'bottega[tune]'") from None
    from bottega.tuning.plan import check_metrics_available, plan_study
    from bottega.tuning.population import check_population, run_population
    from bottega.tuning.samplers import check_packages
    from bottega.tuning.study import open_storage
    from bottega.tuning.study_folder import open_study_folder, rename_study

    if is_launched():
        raise UsageError("tune starts processes of its own; start it without torchrun")
    if confirm < 0 or confirm == 1:
        raise UsageError(f"--confirm {confirm}: expected 2 or more seeds, or 0")
    plan = plan_study(sources, overrides, flags=flags, space=space, study=study, storage=storage, out=out)
    is_population = plan.options.method == "pbt"
    boundaries = check_population(plan) if is_population else []
    check_packages(plan.options.method)
    if confirm and is_population:
        raise UsageError(
            "--confirm: the winner of pbt has a schedule of keys, not one recipe to train again; remove it"
        )
    if verify and not is_population:
        raise UsageError(f"--verify: replays the winner of pbt, not of {plan.options.method}; remove it")
    if fresh and storage is not None:
        raise UsageError("--fresh: a study in a database cannot be renamed; choose another --study")
    environments = plan_job_environments(
        plan.recipe.device,
        plan.options.jobs,
        num_runs=plan.options.population if is_population else plan.num_trials or MAX_JOBS,
        num_processes=plan.recipe.distributed.processes or 1,
        strict=True,
    )
    console = open_console(quiet=quiet)
    with progress_bars(console) as bar:
        data_fingerprint = check_metrics_available(plan, bar)
    # Opened before anything is written, so that an unreachable database leaves no folder.
    database = open_storage(plan.storage, plan.folder) if plan.storage is not None else None
    if fresh and plan.folder.exists():
        rename_study(plan.folder)
    with open_study_folder(plan.folder, study=plan.name, storage=plan.storage) as folder:
        if is_population:
            return run_population(plan, boundaries, environments, console, verify=verify)
        identity = {**plan.identity, "data": {"data": data_fingerprint}}
        study_storage = database or open_storage(None, plan.folder)
        return _search(plan, identity, folder, study_storage, environments, console, confirm=confirm)


def _search(
    plan: StudyPlan,
    identity: dict[str, Any],
    folder: StudyFolder,
    storage: BaseStorage,
    environments: list[dict[str, str]],
    console: Any,
    *,
    confirm: int,
) -> dict[str, Any]:
    from bottega.tuning.confirm import confirm_best
    from bottega.tuning.display import show_search
    from bottega.tuning.plan import StudyFailed
    from bottega.tuning.report import build_report, write_report, write_study_json
    from bottega.tuning.search import Search
    from bottega.tuning.study import Study

    study = Study(
        storage,
        plan.name,
        dimensions=plan.dimensions,
        base=plan.base,
        objectives=plan.objectives,
        method=plan.options.method,
        pruner=plan.options.pruner,
        seed=plan.options.seed,
        grid=plan.grid,
        first_evaluation=plan.first_evaluation,
        identity=identity,
    )
    with show_search(plan, console) as (log, show):
        num_finished = sum(trial.is_finished and not trial.is_over_limit for trial in study.list_trials())
        limit = plan.num_trials if plan.num_trials is not None else "any number of"
        log(f"{plan.folder}: {limit} trials, {num_finished} already finished, {len(environments)} at a time")
        if plan.options.pruner != "none" and plan.first_evaluation > 500:
            log("evaluation.every: each trial is evaluated once or twice, too late to prune; set evaluation.every=10%")
        search = Search(plan, study, folder, environments, log=log, show=show)
        stop = search.run()
    report = build_report(plan, study)
    report["finished"] = search.is_finished
    write_report(plan, report)
    if stop.received is not None:
        raise Interrupted(
            f"stopped by {stop.received.name}; trials that ran have saved a checkpoint, and the same command continues the study",
            stop.exit_code,
        )
    if report["trials"] and report["counts"]["failed"] == len(report["trials"]):
        first = report["trials"][0]
        raise StudyFailed(f"every trial of {plan.folder} failed; the first: {first['reason']}", first["code"])
    if confirm and report["best"] is not None and search.is_finished:
        confirm_best(plan, report, environments, console, num_seeds=confirm)
        write_study_json(RunDirectory(plan.folder), report)
    return report
