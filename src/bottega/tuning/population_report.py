"""The result of population-based training: members, the lineage of the winner, study.json, best.yaml and a plot."""

from __future__ import annotations

import itertools
from typing import Any

from bottega.core.rundir import RunDirectory
from bottega.plots.figure import try_plot
from bottega.plots.study import plot_population
from bottega.tuning.plan import StudyPlan
from bottega.tuning.population import Segment
from bottega.tuning.report import write_best_recipe, write_study_json
from bottega.tuning.search import format_keys


def build_report(plan: StudyPlan, segments: dict[str, Segment]) -> dict[str, Any]:
    """Return the content of study.json; `segments` are all segments by name."""
    is_max = plan.objectives[0].mode == "max"
    last_generation = max(segment.generation for segment in segments.values())
    members = [segment for segment in segments.values() if segment.generation == last_generation]
    ranked = sorted(
        (segment for segment in members if segment.value is not None),
        key=lambda segment: (-segment.value if is_max else segment.value, segment.member),  # type: ignore[operator]
    )
    winner = ranked[0]
    lineage = trace_lineage(winner, segments)
    trials = [_describe_member(plan, segment, segments) for segment in sorted(members, key=lambda s: s.member)]
    return {
        "study": plan.name,
        "folder": str(plan.folder),
        "task": plan.recipe.task,
        "recipe": plan.recipe.origin or plan.recipe.task,
        "method": "pbt",
        "pruner": "none",
        "seed": plan.options.seed,
        "metrics": [{"name": objective.name, "mode": objective.mode} for objective in plan.objectives],
        "space": {dimension.key: str(dimension) for dimension in plan.dimensions},
        "counts": {
            "complete": sum(segment.value is not None for segment in members),
            "pruned": 0,
            "failed": sum(segment.value is None for segment in members),
            "running": 0,
        },
        "steps": {
            "trained": sum(segment.end - segment.start for segment in segments.values()),
            "full": len(members) * winner.end,
        },
        "best": next(trial for trial in trials if trial["number"] == winner.member),
        "pareto": [],
        "importances": {},
        "trials": trials,
        "segments": [_describe_segment(plan, segment, segments) for segment in segments.values()],
        "lineage": [_describe_segment(plan, segment, segments) for segment in lineage],
        "summary": _describe_winner(plan, lineage),
        "files": {},
        "notes": [
            f"the trained winner is {plan.folder / 'trials' / winner.name}; best.yaml has the keys of its last interval, and "
            "lineage in study.json those of every interval"
        ],
    }


def trace_lineage(winner: Segment, segments: dict[str, Segment]) -> list[Segment]:
    """Return the segments whose checkpoints led to a segment, from the first one on."""
    lineage = [winner]
    while lineage[0].parent is not None:
        lineage.insert(0, segments[lineage[0].parent])
    return lineage


def write_report(plan: StudyPlan, report: dict[str, Any]) -> None:
    """Write best.yaml, population.png and study.json into the folder of the study."""
    write_best_recipe(plan, report)
    path = plan.folder / "population.png"
    if try_plot(lambda target: plot_population(report, target), path, warn=report["notes"].append):
        report["files"]["population"] = str(path)
    write_study_json(RunDirectory(plan.folder), report)


def _describe_winner(plan: StudyPlan, lineage: list[Segment]) -> str:
    changes = [b for a, b in itertools.pairwise(lineage) if a.keys != b.keys]
    steps = ", ".join(f"from step {segment.start}: {format_keys(segment.keys)}" for segment in [lineage[0], *changes])
    return f"the winner's keys {'changed' if changes else 'did not change'}: {steps}"


def _describe_member(plan: StudyPlan, segment: Segment, segments: dict[str, Segment]) -> dict[str, Any]:
    lineage = trace_lineage(segment, segments)
    curve = [[part.end / segment.end, part.value] for part in lineage if part.value is not None]
    return {
        "number": segment.member,
        "state": "complete" if segment.value is not None else "failed",
        "keys": segment.keys,
        "values": [segment.value] if segment.value is not None else None,
        "curve": curve,
        "step": segment.end,
        "steps": segment.end,
        "seconds": None,
        "run": str(plan.folder / "trials" / segment.name),
        "reason": segment.reason,
        "lines": None,
        "code": segment.code,
        "same_as": None,
    }


def _describe_segment(plan: StudyPlan, segment: Segment, segments: dict[str, Segment]) -> dict[str, Any]:
    return {
        "run": str(plan.folder / "trials" / segment.name),
        "member": segment.member,
        "generation": segment.generation,
        "start": segment.start,
        "step": segment.end,
        "keys": segment.keys,
        "parent": segment.parent,
        "start_value": segments[segment.parent].value if segment.parent is not None else None,
        "value": segment.value,
        "reason": segment.reason,
    }
