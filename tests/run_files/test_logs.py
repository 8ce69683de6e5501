"""Logs of runs and the charts of a report: thinning keeps extremes, damaged logs are read as far as they go."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.callbacks.resources import MACHINE_METRICS
from bottega.reporting.charts import SECTIONS, build_chart, build_charts
from bottega.run_files import logs
from bottega.run_files.logs import Series, read_metrics_log, read_module_log, select_points


@given(st.lists(st.floats(-1e9, 1e9), max_size=300), st.integers(4, 60))
def test_thinning_keeps_extremes_and_ends(values: list[float], count: int) -> None:
    column = np.array(values)
    index, bounds = select_points(column, count)
    assert bounds[0] == 0
    assert bounds[-1] == len(values)
    assert len(index) <= max(count, 4)
    assert (np.diff(index) > 0).all()
    if values:
        assert {0, len(values) - 1} <= set(index.tolist())
        assert column[index].min() == column.min()
        assert column[index].max() == column.max()


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400))
def test_series_that_are_thinned_while_they_are_read_keep_extremes(values: list[float]) -> None:
    series = Series()
    limits = logs.MAX_BUFFERED_POINTS, logs.MAX_READ_POINTS
    logs.MAX_BUFFERED_POINTS, logs.MAX_READ_POINTS = 64, 16
    try:
        for step, value in enumerate(values):
            series.add(step, step, value)
    finally:
        logs.MAX_BUFFERED_POINTS, logs.MAX_READ_POINTS = limits
    assert len(series) < 64
    assert min(series.values) == min(values)
    assert max(series.values) == max(values)
    points = series.thin(10)
    assert points.steps[-1] == len(values) - 1
    assert points.weights.sum() == pytest.approx(len(values))
    scale = max(map(abs, values)) or 1
    assert (points.weights * points.means).sum() / scale == pytest.approx(sum(values) / scale, abs=1e-9)


def test_a_smoothed_curve_is_drawn_from_means_not_from_extremes() -> None:
    """A loss of 1 with a spike of 10 in every fiftieth step: its extremes would average to 5.5."""
    series = Series()
    for step in range(20_000):
        series.add(step, step, 10.0 if step % 50 == 0 else 1.0)
    [columns] = [
        entry["points"] for entry in build_chart("loss", [(0, "training", series)], limit=200, title="")["series"]
    ]
    assert np.mean(columns[2]) > 5
    assert np.mean(columns[3]) == pytest.approx(1.18, abs=0.01)


def test_a_short_series_needs_no_means() -> None:
    series = Series()
    series.add(1, 1, 0.5)
    assert len(build_chart("loss", [(0, "training", series)], limit=200, title="")["series"][0]["points"]) == 3


def test_every_metric_of_the_machine_has_a_place() -> None:
    assert set(MACHINE_METRICS) <= {name for names in SECTIONS.values() for name in names}


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    good = {"step": 1, "kind": "train", "samples": 4, "loss": 2.0, "grad_norm": None, "step_seconds": 0.5}
    lines = [json.dumps(good), '{"step": 2, "ki', "[]", '{"step": "x", "kind": "train"}', "\x00\xff", "[" * 100_000]
    lines += ['{"step": Infinity, "kind": "train"}', '{"step": 1' + "0" * 400 + ', "kind": "train"}']
    lines.append(json.dumps({**good, "step": 3, "loss": 1.0, "huge": 10**400, "step_seconds": 0.5}))
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    log = read_metrics_log(path)
    assert log.num_rows == 2
    assert log.num_bad_lines == 7
    assert list(log.get("train", "loss").values) == [2.0, 1.0]  # type: ignore[union-attr]
    assert log.num_nonfinite == {"grad_norm": 2, "huge": 1}
    assert log.seconds == 1.5


def test_missing_logs_are_empty(tmp_path: Path) -> None:
    assert read_metrics_log(tmp_path / "none").num_rows == 0
    assert read_module_log(tmp_path / "none").series == {}


def test_metrics_of_several_runs_share_a_chart_and_none_is_lost(tmp_path: Path) -> None:
    logs = []
    for number in range(2):
        path = tmp_path / str(number)
        row = {"step": 1, "kind": "train", "samples": 1, "loss": 1.0, "own_term": 2.0, "matmul_share": 0.4}
        path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "kind": "eval", "accuracy": 0.5}) + "\n")
        logs.append(read_metrics_log(path))
    charts = build_charts(logs, best_metrics=["accuracy"], units=["tokens"])
    drawn = {
        (chart["metric"], series["run"], series["label"])
        for section in charts.values()
        for chart in section
        for series in chart["series"]
    }
    expected = {(name, run, "training") for name in ("loss", "own_term", "matmul_share") for run in (0, 1)}
    expected |= {(name, run, "validation") for name in ("loss", "accuracy") for run in (0, 1)}
    assert drawn >= expected
    assert charts["validation"][0]["metric"] == "accuracy"


def test_a_page_of_many_runs_has_few_points(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    names = [f"metric_{i}" for i in range(20)]
    rows = ({"step": i, "kind": "train", "samples": i, **dict.fromkeys(names, 1.0 * i)} for i in range(3000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = build_charts([read_metrics_log(path)] * 30, best_metrics=[], units=[])
    points = sum(len(s["points"][0]) for section in charts.values() for chart in section for s in chart["series"])
    assert points <= logs.MAX_READ_POINTS * 2
    assert len(json.dumps(charts)) < 1.5e6
