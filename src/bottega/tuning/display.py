"""The live table of a search on a terminal; elsewhere each event is a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bottega.plots.study import label_key
from bottega.terminal import escape_controls
from bottega.tuning.plan import StudyPlan
from bottega.tuning.search import SearchStatus, format_value
from bottega.tuning.study import TrialRecord
from bottega.tuning.trial_run import TrialRun, find_best_row

REFRESH_SECONDS = 1.0
"""Seconds between two drawings of the table, which take some milliseconds each."""
MAX_ENDED_ROWS = 8
"""Ended trials that are shown, besides those that run."""
STATE_STYLES = {"running": "bold", "complete": "", "pruned": "dim", "failed": "red"}


@contextmanager
def show_search(
    plan: StudyPlan, console: Any
) -> Iterator[tuple[Callable[[str], None], Callable[[SearchStatus], None]]]:
    """Yield `log(text)`, which prints a line, and `show(status)`, which redraws the table on a terminal."""
    from rich.live import Live

    def log(text: str) -> None:
        console.print(escape_controls(text), soft_wrap=True, markup=False)

    if not console.is_terminal or console.quiet:
        yield log, lambda status: None
        return
    drawn_at = 0.0
    with Live(console=console, auto_refresh=False, redirect_stdout=False, transient=True) as live:

        def show(status: SearchStatus) -> None:
            nonlocal drawn_at
            if time.monotonic() - drawn_at >= REFRESH_SECONDS:
                live.update(build_table(plan, status), refresh=True)
                drawn_at = time.monotonic()

        yield log, show


def build_table(plan: StudyPlan, status: SearchStatus) -> Any:
    """Return the table: trials that run, and those that ended last; above it the best so far and the remaining time."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1))
    keys = [dimension.key for dimension in plan.dimensions]
    table.add_column("trial", justify="right")
    for key in keys:
        table.add_column(label_key(key), justify="right", overflow="ellipsis", max_width=14)
    for name in ("steps", plan.objectives[0].name):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    ended = [trial for trial in status.trials if trial.is_finished and not trial.is_over_limit]
    rows = sorted(ended[-MAX_ENDED_ROWS:], key=lambda trial: trial.number)
    best = status.best.number if status.best is not None else None
    for trial in rows:
        table.add_row(*_format_ended(trial, keys, is_best=trial.number == best), style=STATE_STYLES[trial.state])
    for trial_run in sorted(status.active.values(), key=lambda trial: trial.number):
        table.add_row(*_format_active(trial_run, keys, plan), style=STATE_STYLES["running"])
    layout = Table.grid()
    layout.add_row(Text(escape_controls(describe_status(plan, status)), style="bold"))
    layout.add_row(table)
    return layout


def describe_status(plan: StudyPlan, status: SearchStatus) -> str:
    """Return study, number of trials, the best so far and the remaining time in one line."""
    ended = [trial for trial in status.trials if trial.is_finished and not trial.is_over_limit]
    limit = plan.num_trials
    parts = [plan.name, f"{len(ended)} of {limit} trials" if limit is not None else f"{len(ended)} trials"]
    if status.best is not None and status.best.values is not None:
        parts.append(f"best {plan.objectives[0].name} {status.best.values[0]:.4f} (trial {status.best.number})")
    remaining = estimate_remaining(plan, status, num_ended=len(ended))
    if remaining is not None:
        parts.append(f"eta {int(remaining) // 3600}:{int(remaining) // 60 % 60:02d}:{int(remaining) % 60:02d}")
    return "  ".join(parts)


def estimate_remaining(plan: StudyPlan, status: SearchStatus, *, num_ended: int) -> float | None:
    """Return the seconds until all trials have ended, at the rate so far; None before the first has ended."""
    elapsed = time.monotonic() - status.started_at
    timeout = plan.options.timeout.amount - elapsed if plan.options.timeout is not None else None
    if not status.num_ended_here or plan.num_trials is None:
        return timeout
    fractions = [run.rows.step / total for run in status.active.values() if (total := run.read_total_steps())]
    per_trial = elapsed / (status.num_ended_here + sum(fractions))
    remaining = max(0.0, plan.num_trials - num_ended - sum(fractions)) * per_trial
    return remaining if timeout is None else min(remaining, timeout)


def _format_ended(trial: TrialRecord, keys: list[str], *, is_best: bool) -> list[str]:
    if trial.values is not None:
        value = f"{trial.values[0]:.4f}"
    else:
        value = f"{list(trial.curve.values())[-1]:.4f}" if trial.curve else ""
    steps = str(trial.attributes.get("step", "")) if trial.attributes.get("step") is not None else ""
    reason = f": {trial.attributes.get('reason', '')}"[:40] if trial.state == "failed" else ""
    state = "best" if is_best else f"{trial.state}{reason}"
    return [str(trial.number), *_format_keys(trial.keys, keys), steps, value, escape_controls(state)]


def _format_active(trial: TrialRun, keys: list[str], plan: StudyPlan) -> list[str]:
    best = find_best_row(trial.rows.evaluations, plan.objectives[0])
    value = f"{best[plan.objectives[0].name]:.4f}" if best is not None else ""
    total = trial.read_total_steps()
    steps = f"{trial.rows.step}/{total}" if total else str(trial.rows.step)
    searched = {key: trial.keys[key] for key in keys if key in trial.keys}
    return [str(trial.number), *_format_keys(searched, keys), steps, value, "running"]


def _format_keys(values: dict[str, Any], keys: list[str]) -> list[str]:
    return [escape_controls(format_value(values[key])) if key in values else "" for key in keys]
