"""The `tune` section: a search for better values of recipe keys, by `bottega tune`. Training ignores it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from bottega.config.section import Number, Section, Whole
from bottega.config.units import Duration, Interval, StepOrTimeCadence

MethodName = Literal["tpe", "random", "grid", "gp", "cmaes", "pbt"]
PrunerName = Literal["none", "median", "hyperband", "asha"]


def _check_time(value: Any) -> Any:
    message = f'expected a time such as "30 min" or "2 h", got {value!r}'
    try:
        interval = None if value is None else Interval.parse(value, allows_time=True)
    except ValueError:
        raise ValueError(message) from None
    if interval is not None and interval.seconds is None:
        raise ValueError(message)
    return interval


Time = Annotated[StepOrTimeCadence, BeforeValidator(_check_time)]


class Tune(Section):
    """What `bottega tune` searches, how, and how long."""

    space: dict[str, Any] = Field(
        default_factory=dict,
        description="key -> values: log(a,b), uniform(a,b), int(a,b), int_log(a,b) or a list; conditional with `if KEY=VALUE`",
    )
    method: MethodName = Field("tpe", description="search method")
    pruner: PrunerName = Field("none", description="how bad trials are ended early")
    trials: Whole | None = Field(
        None, gt=0, description="number of trials; null is 20, or all points of a grid, or ends with the timeout"
    )
    timeout: Time = Field(None, description='time limit of the command, such as "30 min"; the same command continues')
    jobs: Whole | Literal["auto"] = Field("auto", description="trials at a time; auto is as many as fit on the machine")
    metric: str | None = Field(
        None,
        description="metric to optimise, or several separated by commas; -NAME is minimised; null takes evaluation.metric",
    )
    seed: Whole = Field(0, ge=0, lt=2**32, description="seed of the search")
    population: Whole = Field(8, gt=1, description="pbt: number of members")
    every: Duration = Field(Interval(10, "percent"), description="pbt: training between two exploitations")
    exploit: Number = Field(
        0.25, gt=0, le=0.5, description="pbt: fraction of the worst members that copy one of the best"
    )
