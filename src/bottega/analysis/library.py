"""Verbs as library calls: they return plain values, and errors name arguments, not flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.analysis.runs import list_runs
from bottega.config.launch import check_launch_variables
from bottega.core.errors import UsageError

RecipeLike = str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]]


def lr_find(
    recipe: RecipeLike,
    overrides: Mapping[str, Any] | None = None,
    *,
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
    out: str | Path | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """`bottega.lr_find`: a learning-rate range test of a recipe, or from a run directory; `suggestion` is the rate to use.

    With `out`, the curve and the numbers are written to that folder.
    """
    from bottega.analysis.lr_find import find_learning_rate, is_run_directory, write_report
    from bottega.tasks.recipes import load_recipe

    with _translate_errors():
        options: dict[str, Any] = {"low": low, "high": high, "steps": steps, "quiet": quiet}
        if isinstance(recipe, str | Path) and is_run_directory(recipe):
            if overrides:
                raise UsageError(f"{recipe} is a run and has its own recipe; remove the overrides")
            report = find_learning_rate(None, run=Path(recipe), **options)
        else:
            report = find_learning_rate(
                load_recipe([*_list_sources(recipe), overrides or {}]).recipe, run=None, **options
            )
        return report if out is None else write_report(report, Path(out))


def compare(
    *groups: str | Path, metric: str | None = None, split: str | None = None, alpha: float = 0.05
) -> dict[str, Any]:
    """`bottega.compare`: test whether groups of runs (directories, or patterns of them) differ."""
    from bottega.analysis.compare import compare as compare_groups

    with _translate_errors():
        return compare_groups([str(group) for group in groups], metric=metric, split=split, alpha=alpha)


def doctor(*, device: str = "auto", folder: str | Path = "runs", quick: bool = False) -> dict[str, Any]:
    """`bottega.doctor`: whether this machine can train; `problems` has what does not work, each with a `remedy`.

    `folder` is where runs would be written. With `quick`, what takes seconds is left out. `exit_code` is 5 if a problem stops
    training. Raises EnvironmentProblem if the device does not exist.
    """
    from bottega.analysis.doctor.examine import examine_machine

    with _translate_errors():
        return examine_machine(device=device, folder=Path(folder), is_quick=quick).to_plain_dict()


def plan(
    recipe: RecipeLike,
    overrides: Mapping[str, Any] | None = None,
    *,
    fit: str | None = None,
    probe: bool = False,
    price: str | None = None,
) -> dict[str, Any]:
    """`bottega.plan`: the resolved recipe under `recipe`, and what the run will need under `prediction`.

    Every problem that training would find is raised; those of this machine alone (no such device, too little memory or disk)
    are in `problems`. `fit`, such as "24GB", adds what fits into the memory of a GPU; `probe` measures a few steps, and with
    `price`, such as "2.5/h", the cost of the run.
    """
    from bottega.analysis.fit import parse_memory
    from bottega.analysis.plan import PlanOptions, plan_recipe
    from bottega.analysis.probe import parse_price

    with _translate_errors():
        if price is not None and not probe:
            raise UsageError("price needs probe=True, which measures the time of a step")
        options = PlanOptions(
            fit=None if fit is None else parse_memory(fit),
            probe=probe,
            price=None if price is None else parse_price(price),
        )
        return plan_recipe([*_list_sources(recipe), overrides or {}], show=False, options=options)


def runs(folder: str | Path = "runs") -> list[dict[str, Any]]:
    """`bottega.runs`: the runs of a folder, newest first, each with task, step, best metric and state."""
    return list_runs(Path(folder))


def _list_sources(recipe: RecipeLike) -> list[Any]:
    return [recipe] if isinstance(recipe, str | Path | Mapping) else list(recipe)


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise usage errors with the names of arguments in place of flags."""
    check_launch_variables()
    try:
        yield
    except UsageError as error:
        from bottega.run.saved import strip_flag_dashes

        raise strip_flag_dashes(error) from None
