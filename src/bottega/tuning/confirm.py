"""Train the best trial, the second best and the unchanged recipe with further seeds, and compare them."""

from __future__ import annotations

from typing import Any

from bottega.analysis.compare import compare
from bottega.analysis.crossval_jobs import train_folds
from bottega.callbacks.progress_bars import progress_bars
from bottega.config.load import to_yaml
from bottega.core.rundir import RunDirectory
from bottega.run.job_pool import Job
from bottega.terminal import escape_controls
from bottega.tuning.plan import StudyPlan
from bottega.tuning.report import rank_trials
from bottega.tuning.trial_run import TrialRun


def confirm_best(
    plan: StudyPlan, report: dict[str, Any], environments: list[dict[str, str]], console: Any, *, num_seeds: int
) -> None:
    """Train each configuration with `num_seeds` seeds; add `confirmation`, the report of compare, to the report.

    The seeds differ from the one that the trials had, because the best trial was chosen for its luck with that seed, too.
    """

    def log(text: str) -> None:
        console.print(escape_controls(text), soft_wrap=True, markup=False)

    second = next((trial for trial in rank_trials(report) if trial["keys"] != report["best"]["keys"]), None)
    configurations = {"best": report["best"]["keys"], "base": {}}
    if second is not None:
        configurations["second"] = second["keys"]
    seeds = [plan.recipe.seed + 1 + number for number in range(num_seeds)]
    jobs: list[Job] = []
    groups: dict[str, list[str]] = {}
    for label, keys in configurations.items():
        for seed in seeds:
            name = f"{label}-s{seed}"
            without_seed = {key: value for key, value in keys.items() if key != "seed"}
            recipe = plan.build_trial_recipe(
                without_seed, name=name, seed=seed, output_dir=str(plan.folder / "confirm")
            )
            file = plan.folder / "recipes" / f"confirm-{name}.yaml"
            run = RunDirectory(plan.folder / "confirm" / name)
            file.parent.mkdir(parents=True, exist_ok=True)
            run.write(file, to_yaml(recipe), redact=False)
            job = Job(run, file, num_processes=recipe.distributed.processes or 1)
            groups.setdefault(label, []).append(str(run.path))
            if not TrialRun(0, {}, recipe, job).is_finished():
                jobs.append(job)
    log(f"training {', '.join(groups)} with seeds {', '.join(map(str, seeds))}: {len(jobs)} runs")
    with progress_bars(console, in_bytes=False) as bar:
        train_folds(jobs, environments, log=log, report_progress=bar)
    names: list[str] = [label for label in ("base", "second", "best") if label in groups]
    comparison = compare([",".join(groups[label]) for label in names], metric=plan.objectives[0].name)
    for group, label in zip(comparison["groups"], names, strict=True):
        group["name"] = label
    report["confirmation"] = comparison
    report["summary"] = _describe(comparison)


def _describe(comparison: dict[str, Any]) -> str:
    groups = {group["label"]: group for group in comparison["groups"]}
    means = ", ".join(f"{group['name']} {group['mean']:.4f}" for group in groups.values())
    num_seeds = comparison["groups"][0]["n"]
    differences = [
        f"{groups[pair['second']]['name']} against {groups[pair['first']]['name']}: {pair['difference']:+.4f}, "
        f"p {pair['p_adjusted']:.2g}"
        for pair in comparison["pairs"]
    ]
    return f"with {num_seeds} new seeds each, {comparison['metric']}: {means}; {'; '.join(differences)}"
