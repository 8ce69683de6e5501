"""metrics.json of the best evaluation during training is valid JSON, whatever the metrics are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from bottega.callbacks.evaluation_tables import EvaluationTables
from bottega.core.callback import Progress


def refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    callback = EvaluationTables(
        tmp_path,
        score=lambda rows: {"auroc": math.nan},
        build_tables=lambda rows: {"confusion": [[1.0, math.nan], (math.inf, 2.0)]},
        warn=lambda text: None,
    )
    metrics = {"loss": 1.5, **callback.score({"label": np.zeros(3)})}
    callback.after_eval(Progress(step=4, best_step=4), metrics)
    fields = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=refuse_constant)
    assert fields["auroc"] is None
    assert fields["confusion"] == [[1.0, None], [None, 2.0]]
    assert fields["loss"] == 1.5
