"""Plots show what they are given: every run, every spike, every class; and a missing matplotlib costs the plot alone."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.plots import figure as figures_module
from bottega.plots.classification import plot_calibration, plot_confusion_matrix
from bottega.plots.comparison import plot_condition_bars, plot_groups
from bottega.plots.figure import BLUE, PlotsUnavailable, is_plot_warning, open_figure, try_plot
from bottega.plots.heatmap import plot_experts, plot_forgetting
from bottega.plots.lr_range import plot_range_test
from bottega.plots.spectrogram import Panel, plot_panels
from bottega.plots.spikes import MAX_UNITS, plot_spikes
from recorded_figures import list_texts, record_figures

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return record_figures(monkeypatch)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(figures_module, "_reported_reasons", set())


@pytest.mark.parametrize("count", [1, 2, 11, 60, 400])
def test_confusion_matrix_of_any_number_of_classes_fits_the_screen(count: int, tmp_path: Path) -> None:
    names = tuple(f"a class with a rather long name, {n} über $x 猫" for n in range(count))
    plot_confusion_matrix(np.diag(np.arange(count)) + 1, names, tmp_path / "deep" / "c.png")
    with Image.open(tmp_path / "deep" / "c.png") as image:
        assert max(image.size) < 2400


def test_confusion_matrix_has_a_count_in_each_filled_cell(figures: list[Any], tmp_path: Path) -> None:
    plot_confusion_matrix(np.array([[90, 0], [7, 1003]]), ("no", "yes"), tmp_path / "c.png")
    texts = list_texts(figures[0])
    assert {"90", "7", "1,003", "no", "yes", "predicted class", "true class"} <= set(texts)
    assert "1,093 of 1,100 correct (99.4 %)" in texts


def test_calibration_has_a_bar_for_each_filled_bin(figures: list[Any], tmp_path: Path) -> None:
    edges, counts = np.linspace(0, 1, 5), np.array([0, 10, 0, 30])
    confidence = np.array([np.nan, 0.4, np.nan, 0.9])
    plot_calibration(edges, counts, confidence, np.array([np.nan, 0.5, np.nan, 0.7]), tmp_path / "c.png")
    top, bottom = figures[0].axes
    assert [bar.get_height() for bar in top.patches] == [0.5, 0.7]
    assert [bar.get_height() for bar in bottom.patches] == [10, 30]
    assert "40 predictions; expected calibration error 0.175" in list_texts(figures[0])


def build_group(label: str, values: list[float]) -> dict[str, Any]:
    points = dict(enumerate(values))
    shared = {"label": label, "name": f"runs/{label}", "kind": "seeds", "n": len(values)}
    return {**shared, "mean": float(np.mean(values)), "points": points}


def test_every_run_is_a_dot_of_its_own(figures: list[Any], tmp_path: Path) -> None:
    groups = [build_group("A", [0.8, 0.8, 0.8, 0.7]), build_group("B", [0.9, 0.9, 0.95, 0.91])]
    plot_groups(groups, [(0.7, 0.85), (0.85, 0.96)], tmp_path / "p.png", title="accuracy", subtitle="")
    lines = figures[0].axes[0].lines
    dots = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines if line.get_marker() == "o"}
    assert len(dots) == 8
    assert sorted(y for _, y in dots) == sorted([0.8, 0.8, 0.8, 0.7, 0.9, 0.9, 0.95, 0.91])
    joining_lines = [line for line in lines if line.get_marker() == "None" and len(line.get_xdata()) == 2]
    assert len(joining_lines) == 4


def test_text_of_a_comparison_fits_the_figure(figures: list[Any], tmp_path: Path) -> None:
    single = {**build_group("A", [0.8]), "points": {}}
    conclusion = "B - A: no difference shown (McNemar's test (exact binomial), n = 10 of 12 people where only one is right, p = 0.1)"
    path = tmp_path / "p.png"
    plot_groups([single, single], [(0.7, 0.9)] * 2, path, title="t", subtitle="s", conclusions=[conclusion])
    figure = figures[0]
    ends = [text.get_window_extent().x1 for text in figure.axes[0].findobj() if hasattr(text, "get_text")]
    assert max(ends) <= figure.bbox.width
    assert not any(line.get_marker() == "o" for line in figure.axes[0].lines)


def test_bars_have_a_legend_for_each_condition_and_a_line_at_chance(figures: list[Any], tmp_path: Path) -> None:
    value = {"mean": 0.5, "low": 0.4, "high": 0.6}
    conditions = {"none": {"accuracy": value}, "both": {"accuracy": value, "wish": value}}
    labels, colours = {"none": "prompt only", "both": "all"}, {"none": "#8d8b9b", "both": BLUE}
    path = tmp_path / "b.png"
    plot_condition_bars(
        conditions,
        ["accuracy", "wish"],
        path,
        title="t",
        subtitle="s",
        labels=labels,
        colours=colours,
        chance={"wish": 0.2},
    )
    assert len(figures[0].axes[0].patches) == 3
    assert {"none: prompt only", "both: all", "chance"} <= set(list_texts(figures[0]))


def test_range_test_marks_the_suggestion_and_cuts_a_diverging_loss(figures: list[Any], tmp_path: Path) -> None:
    rates, losses = np.logspace(-5, 0, 6).tolist(), [2.5, 2.4, 2.0, 1.5, 1.4, 90.0]
    report = {"curve": {"rate": rates, "loss": losses, "smoothed": losses}, "start_loss": 2.5, "lowest_loss": 1.4}
    plot_range_test({**report, "suggestion": 1e-2, "steepest": 1e-3, "minimum": 0.1}, tmp_path / "r.png")
    axes = figures[0].axes[0]
    assert list(axes.lines[2].get_xdata()) == [1e-2, 1e-2]
    assert axes.get_ylim()[1] == pytest.approx(2.5 + 0.7 * 1.1)
    assert {"1e-5", "1e-3", "0.1", "1"} <= set(list_texts(figures[0]))


def test_forgetting_matrix_leaves_missing_values_blank(figures: list[Any], tmp_path: Path) -> None:
    matrix = [[0.9, None], [0.7, 0.8]]
    plot_forgetting(matrix, ["digits", "letters"], tmp_path / "f.png", metric="accuracy", maximise=True)
    assert {"0.900", "0.700", "0.800"} <= set(list_texts(figures[0]))
    plot_forgetting([[None]], ["digits"], tmp_path / "f.png", metric="loss", maximise=False)


def test_experts_with_and_without_known_rules(figures: list[Any], tmp_path: Path) -> None:
    load, counts = np.array([0.75, 0.25]), np.array([[3, 1]])
    labels = ["0.75", "0.25"]
    plot_experts(load, counts, tmp_path / "e.png", load_labels=labels, cell_labels=[labels], subtitle="known")
    plot_experts(load, None, tmp_path / "e.png", load_labels=labels, cell_labels=[], subtitle="unknown")
    assert [len(figure.axes) for figure in figures] == [2, 1]
    assert "rule 0" in list_texts(figures[0])


def test_every_spike_of_the_first_units_is_shown(figures: list[Any], tmp_path: Path) -> None:
    spikes = np.zeros((6, 2, MAX_UNITS + 10), np.float32)
    spikes[2, 0, 5] = spikes[4, 1, [3, 9]] = spikes[5, 1, MAX_UNITS + 1] = 1
    images = np.zeros((2, 4, 4, 1))
    plot_spikes([spikes], tmp_path / "s.png", images=images, captions=["a", "b, is a"], is_correct=[True, False])
    shown = [axes.images[0].get_array() for axes in figures[0].axes[2:]]
    assert [int(np.sum(array)) for array in shown] == [1, 2]
    assert shown[0].shape == (MAX_UNITS, 6)
    assert {"a", "b, is a"} <= set(list_texts(figures[0]))


def test_spectrograms_share_one_scale(figures: list[Any], tmp_path: Path) -> None:
    panels = [Panel(name, "1.00 s", np.full((4, 6), -20.0), seconds=1.0, kilohertz=8.0) for name in ("a", "b")]
    plot_panels(panels, tmp_path / "s.png", range_decibels=80)
    assert [axes.images[0].get_clim() for axes in figures[0].axes[:2]] == [(-80, 0)] * 2
    assert {"a", "b", "seconds", "kHz"} <= set(list_texts(figures[0]))


def test_a_plot_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="halfway"), open_figure(tmp_path / "p.png", width=2, height=2):
        raise ValueError("halfway")
    assert list(tmp_path.iterdir()) == []


def test_the_style_of_matplotlib_is_restored(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    with open_figure(tmp_path / "p.png", width=2, height=2) as figure:
        figure.add_subplot()
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


@pytest.mark.usefixtures("no_matplotlib")
def test_missing_matplotlib_is_reported_once_with_the_extra(tmp_path: Path) -> None:
    warnings: list[str] = []
    plot = partial(plot_forgetting, [[0.5]], ["a"], metric="loss", maximise=False)
    with pytest.raises(PlotsUnavailable):
        plot(tmp_path / "f.png")
    for name in ("f.png", "g.png", "f.png"):
        assert not try_plot(plot, tmp_path / name, warn=warnings.append)
    assert len(warnings) == 1
    assert warnings[0].startswith("no f.png: plots need matplotlib; pip install 'bottega[plots]'")
    assert is_plot_warning(warnings[0])


@pytest.mark.usefixtures("no_matplotlib")
def test_evaluation_without_matplotlib_writes_its_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import bottega
    import small_texts
    from bottega import cli

    run = bottega.train("classify", {**small_texts.settings(tmp_path), "name": "run"}).path
    assert cli.main(["evaluate", str(run), "--out", str(run / "results")]) == 0
    assert capsys.readouterr().out.count("pip install 'bottega[plots]'") == 1
    assert {path.name for path in (run / "results").iterdir()} == {"metrics.json", "predictions.jsonl"}
