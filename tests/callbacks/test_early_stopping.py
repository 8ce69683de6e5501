"""Early stopping and reducing the learning rate on a plateau."""

from __future__ import annotations

import json
import math

import pytest

from bottega.callbacks.early_stopping import EarlyStopping, ReduceOnPlateau
from bottega.core.callback import Progress
from bottega.core.errors import UsageError


def stop_after(values: list[float], *, patience: int = 2, threshold: float = 0.0, maximise: bool = False) -> int | None:
    """Return after how many evaluations with these values the run stops; None if it does not."""
    rule, progress = EarlyStopping(metric="m", maximise=maximise, patience=patience, threshold=threshold), Progress()
    for number, value in enumerate(values, 1):
        rule.after_eval(progress, {"m": value})
        if progress.stop is not None:
            return number
    return None


def test_stops_after_patience_evaluations_without_improvement() -> None:
    assert stop_after([5, 4, 4, 4, 3], patience=2) == 4
    assert stop_after([5, 4, 4, 3, 3, 2], patience=2) is None
    assert stop_after([5, 6], patience=1) == 2
    assert stop_after([1, 2, 3, 3, 2], patience=2, maximise=True) == 5


def test_gain_within_the_threshold_is_not_an_improvement() -> None:
    assert stop_after([5, 4.95, 4.91], threshold=0.1) == 3
    assert stop_after([5, 4.95, 4.85, 4.8], threshold=0.1) is None, "relative to the best, not to the last"


def test_nan_is_not_an_improvement() -> None:
    assert stop_after([math.nan, math.nan], patience=2) == 2
    assert stop_after([math.nan, 5, 4, 3, 2]) is None
    assert stop_after([5, math.nan, 4, math.nan, 3], patience=2) is None
    assert stop_after([5, -math.inf, -math.inf], patience=2) == 3
    rule = EarlyStopping(metric="m", maximise=False, patience=9, threshold=0.0)
    rule.after_eval(Progress(), {"m": math.nan})
    json.dumps(rule.state_dict(), allow_nan=False)


def test_missing_metric_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"training\.early_stopping\.metric: 'f1' is not measured; choose from loss, acc"
    ):
        EarlyStopping(metric="f1", maximise=True, patience=1, threshold=0.0).after_eval(
            Progress(), {"loss": 1.0, "acc": 0.5}
        )


@pytest.mark.parametrize("kind", [EarlyStopping, ReduceOnPlateau])
def test_patience_survives_a_checkpoint(kind: type) -> None:
    options = {"factor": 0.5, "floor": 0.0} if kind is ReduceOnPlateau else {}
    first, second = (kind(metric="m", maximise=False, patience=3, threshold=0.0, **options) for _ in range(2))
    for value in (5.0, 6.0, 6.0):
        first.after_eval(Progress(), {"m": value})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    outcomes = []
    for rule in (first, second):
        progress = Progress()
        rule.after_eval(progress, {"m": 6.0})
        outcomes.append((progress.stop, progress.learning_rate_scale))
    assert outcomes[0] == outcomes[1] != (None, 1.0)
    second.load_state_dict({})
    assert second.state_dict() == {"best": None, "waited": 0}, "a new run has no state"


@pytest.mark.parametrize("patience", [0, 1])
def test_a_plateau_without_patience_waits_for_the_first_bad_evaluation(patience: int) -> None:
    rule, progress = (
        ReduceOnPlateau(metric="m", maximise=False, patience=patience, threshold=0.0, factor=0.5, floor=0.2),
        Progress(),
    )
    scales = []
    for value in (5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0):
        rule.after_eval(progress, {"m": value})
        scales.append(progress.learning_rate_scale)
    assert scales == [1, 1, 0.5, 0.5, 0.25, 0.2, 0.2]
