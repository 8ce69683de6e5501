"""The result of a study: study.json, the best recipe, plots, and a summary that says how far the best is from the rest."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.config.load import to_yaml
from bottega.core.rundir import RunDirectory
from bottega.plots.figure import try_plot
from bottega.plots.study import label_key, plot_history, plot_parallel, plot_pareto, plot_slices
from bottega.redaction import redact_text
from bottega.storage.json_values import replace_non_finite
from bottega.terminal import escape_controls
from bottega.tuning.plan import StudyPlan, load_with
from bottega.tuning.search import find_best_trial, format_keys, format_value
from bottega.tuning.study import PROGRESS_UNITS, Study, TrialRecord

MAX_TRIALS_SHOWN = 10
"""Best trials in the printed table."""


def build_report(plan: StudyPlan, study: Study) -> dict[str, Any]:
    """Return the content of study.json."""
    trials = [trial for trial in study.list_trials() if not trial.is_over_limit]
    best = find_best_trial(trials, plan.objectives[0].mode)
    steps = [_count_steps(trial) for trial in trials if trial.state in ("complete", "pruned")]
    return {
        "study": plan.name,
        "folder": str(plan.folder),
        "task": plan.recipe.task,
        "recipe": plan.recipe.origin or plan.recipe.task,
        "method": plan.options.method,
        "pruner": plan.options.pruner,
        "seed": plan.options.seed,
        "metrics": [{"name": objective.name, "mode": objective.mode} for objective in plan.objectives],
        "space": {dimension.key: str(dimension) for dimension in plan.dimensions},
        "counts": {
            state: sum(trial.state == state for trial in trials)
            for state in ("complete", "pruned", "failed", "running")
        },
        "steps": {"trained": sum(done for done, _ in steps), "full": sum(total for _, total in steps)},
        "best": _describe_trial(best) if best is not None else None,
        "pareto": study.find_pareto_front(),
        "importances": study.compute_importances(),
        "trials": [_describe_trial(trial) for trial in trials],
        "summary": describe_lead(plan, trials, best),
        "files": {},
        "notes": [],
    }


def write_report(plan: StudyPlan, report: dict[str, Any]) -> None:
    """Write best.yaml, the plots and study.json into the folder of the study."""
    folder = RunDirectory(plan.folder)
    files = report["files"]
    if report["best"] is not None:
        write_best_recipe(plan, report)
        plots: dict[str, Callable[[dict[str, Any], Path], None]] = {"history": plot_history}
        if report["counts"]["complete"] > 1:
            plots |= {"parallel": plot_parallel, "slices": plot_slices}
        if len(plan.objectives) > 1:
            plots["pareto"] = plot_pareto
        for name, plot in plots.items():
            path = plan.folder / f"{name}.png"
            if try_plot(lambda target, plot=plot: plot(report, target), path, warn=report["notes"].append):  # type: ignore[misc]
                files[name] = str(path)
    write_study_json(folder, report)


def write_study_json(folder: RunDirectory, report: dict[str, Any]) -> None:
    """Write the report to study.json."""
    folder.write(
        folder.path / "study.json", json.dumps(replace_non_finite(report), indent=1, ensure_ascii=False) + "\n"
    )


def write_best_recipe(plan: StudyPlan, report: dict[str, Any]) -> None:
    """Write the recipe with the best keys to best.yaml."""
    best, objective = report["best"], plan.objectives[0]
    changes = {"tune": None, "evaluation.metric": objective.name, "evaluation.mode": objective.mode}
    recipe = load_with(plan.sources, plan.overrides, {**changes, **best["keys"]})
    recipe = recipe.model_copy(update={"name": None, "origin": f"{plan.name}-best"})
    value = best["values"][0]
    header = [
        f"# Best of study {plan.name}: {objective.name} {value:.6g}, trial {best['number']} of {len(report['trials'])}",
        *(f"#   {key}: {format_value(item)}" for key, item in best["keys"].items()),
    ]
    text = escape_controls(redact_text("\n".join(header))) + "\n" + to_yaml(recipe)
    RunDirectory(plan.folder).write(plan.folder / "best.yaml", text, redact=False)
    report["files"]["recipe"] = str(plan.folder / "best.yaml")


def describe_lead(plan: StudyPlan, trials: list[TrialRecord], best: TrialRecord | None) -> str:
    """Return one sentence on how far the best trial is from the others."""
    if best is None or best.values is None:
        return "no trial is complete"
    name = plan.objectives[0].name
    others = [trial for trial in trials if trial.values is not None and trial.keys != best.keys]
    if not others:
        return f"{name} {best.values[0]:.4f} is the only complete trial, so there is nothing to compare it with"
    second = find_best_trial(others, plan.objectives[0].mode)
    assert second is not None
    assert second.values is not None
    median = statistics.median(trial.values[0] for trial in others if trial.values is not None)
    return (
        f"{name} {best.values[0]:.4f} is {abs(best.values[0] - second.values[0]):.4f} from the second best (trial "
        f"{second.number}) and {abs(best.values[0] - median):.4f} from the median of the others; the best of {len(others) + 1} is partly "
        "luck, and one seed does not tell how much: --confirm 3 trains the best and the second best with other seeds"
    )


def format_report(report: dict[str, Any]) -> str:
    """Return the summary that is printed at the end."""
    counts, metrics = report["counts"], report["metrics"]
    states = ", ".join(f"{number} {state}" for state, number in counts.items() if number)
    num_trials, num_copies = len(report["trials"]), sum(trial["same_as"] is not None for trial in report["trials"])
    copies = f"; {num_copies} with the keys and result of another" if num_copies else ""
    lines = [f"{report['folder']}: {num_trials} trial{'s' if num_trials != 1 else ''} ({states}{copies})"]
    trained, full = report["steps"]["trained"], report["steps"]["full"]
    if counts["pruned"] and full:
        lines.append(f"trained {trained:,} of {full:,} steps; pruning saved {1 - trained / full:.0%}")
    if report["best"] is not None:
        lines += ["", *_format_trials(report), ""]
        best = report["best"]
        values = ", ".join(f"{m['name']} {v:.6g}" for m, v in zip(metrics, best["values"], strict=True))
        lines.append(f"best: trial {best['number']}, {values}: {format_keys(best['keys'])}")
        if report["pareto"]:
            lines.append(f"Pareto front: trials {', '.join(map(str, report['pareto']))}")
        if report["importances"]:
            shares = ", ".join(f"{key} {share:.0%}" for key, share in report["importances"].items())
            lines.append(f"importance: {shares}")
    lines.append(report["summary"])
    reasons = [(t["number"], t["reason"]) for t in report["trials"] if t["state"] == "failed"]
    lines += [f"trial {number} failed: {reason}" for number, reason in reasons[:3]]
    if len(reasons) > 3:
        lines.append(f"and {len(reasons) - 3} more failed; study.json has the reasons")
    if "recipe" in report["files"]:
        lines.append(f"next:  bottega train {shlex.quote(report['files']['recipe'])}")
        lines.append(f"       bottega report {shlex.quote(report['folder'])}")
    lines += [f"       {path}" for name, path in report["files"].items() if name != "recipe"]
    return "\n".join(lines + report["notes"])


def rank_trials(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the complete trials of a report, the best first; of equal ones the earlier."""
    complete = [trial for trial in report["trials"] if trial["values"] is not None]
    sign = -1 if report["metrics"][0]["mode"] == "max" else 1
    return sorted(complete, key=lambda trial: (sign * trial["values"][0], trial["number"]))


def _format_trials(report: dict[str, Any]) -> list[str]:
    from bottega.analysis.compare import format_table

    keys, metrics = list(report["space"]), report["metrics"]
    head = ["trial", *map(label_key, keys), *(metric["name"] for metric in metrics)]
    rows = [
        [
            str(trial["number"]),
            *(format_value(trial["keys"][key]) if key in trial["keys"] else "" for key in keys),
            *(f"{value:.6g}" for value in trial["values"]),
        ]
        for trial in rank_trials(report)[:MAX_TRIALS_SHOWN]
    ]
    return format_table([head, *rows], right=tuple(range(len(head))))


def _describe_trial(trial: TrialRecord) -> dict[str, Any]:
    attributes = trial.attributes
    return {
        "number": trial.number,
        "state": trial.state,
        "keys": trial.keys,
        "values": list(trial.values) if trial.values is not None else None,
        "curve": sorted([progress / PROGRESS_UNITS, value] for progress, value in trial.curve.items()),
        "step": attributes.get("step"),
        "steps": attributes.get("steps"),
        "seconds": trial.seconds,
        "run": attributes.get("run"),
        "reason": attributes.get("reason"),
        "lines": attributes.get("lines"),
        "code": attributes.get("code"),
        "same_as": attributes.get("same_as"),
    }


def _count_steps(trial: TrialRecord) -> tuple[int, int]:
    """Return the steps that a trial has trained, and those of its whole run; none if it took the result of another one."""
    if "same_as" in trial.attributes:
        return 0, 0
    return trial.attributes.get("step") or 0, trial.attributes.get("steps") or 0
