"""Heat maps of small matrices with their values: forgetting over a sequence of sources, and experts by rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bottega.plots.figure import BLUE, INK, ORANGE, add_title, open_figure, shorten


def plot_forgetting(
    matrix: Sequence[Sequence[float | None]], names: Sequence[str], path: Path, *, metric: str, maximise: bool
) -> None:
    """Plot the metric of each source (columns) after training on each source (rows); bluer is better."""
    values = np.array([[np.nan if value is None else value for value in row] for row in matrix], np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    scale = (values - low) / (high - low) if high > low else np.ones_like(values)
    short_names = [shorten(name, 16) for name in names]
    count, label_width = len(names), 0.085 * max(map(len, short_names)) + 0.6
    cell_width = max(0.62, 0.085 * max(map(len, short_names)))
    with open_figure(path, width=max(cell_width * count + label_width + 0.4, 5.2), height=0.46 * count + 1.5) as figure:
        axes = figure.add_subplot()
        cell_labels = [["" if np.isnan(value) else f"{value:.3f}" for value in row] for row in values]
        _draw_cells(axes, scale if maximise else 1 - scale, cell_labels)
        axes.set_xticks(range(count), short_names)
        axes.set_yticks(range(count), short_names)
        axes.set_xlabel("evaluated on")
        axes.set_ylabel("after training on")
        better = "larger" if maximise else "smaller"
        add_title(axes, f"{metric} of each source over the sequence", f"{better} is better, and bluer")


def plot_experts(
    load: np.ndarray,
    counts: np.ndarray | None,
    path: Path,
    *,
    load_labels: Sequence[str],
    cell_labels: Sequence[Sequence[str]],
    subtitle: str,
) -> None:
    """Plot how often each expert is chosen, `load` (experts,), and above it how often for each rule, `counts` (rules, experts)."""
    num_experts, num_rules = len(load), len(counts) if counts is not None else 0
    width, height = max(0.5 * num_experts + 1.2, 4.6), 0.42 * num_rules + 2.5
    with open_figure(path, width=width, height=height) as figure:
        if counts is not None:
            top, axes = figure.subplots(2, 1, sharex=True, height_ratios=(0.42 * num_rules, 1.5))
            _draw_cells(top, counts / np.maximum(counts.sum(1, keepdims=True), 1), cell_labels)
            top.set_yticks(range(num_rules), [f"rule {rule}" for rule in range(num_rules)])
            top.tick_params(labelbottom=False)
        else:
            top = axes = figure.add_subplot()
        axes.bar(range(num_experts), load, 0.7, color=BLUE)
        axes.axhline(1 / num_experts, color=ORANGE, linewidth=1.2, label="even load")
        for expert, label in enumerate(load_labels):
            axes.annotate(label, (expert, load[expert]), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
        axes.set_ylim(0, 1.35 * max(float(load.max()), 1 / num_experts))
        axes.set_xticks(range(num_experts), map(str, range(num_experts)))
        axes.tick_params(axis="x", which="both", length=0)
        axes.set(xlabel="expert", ylabel="load")
        axes.legend(loc="upper right", borderaxespad=0)
        add_title(top, "Choice of experts", subtitle)


def _draw_cells(axes: Any, strength: np.ndarray, cell_labels: Sequence[Sequence[str]]) -> None:
    """Draw (rows, columns) between 0 and 1 from white to blue, with a text in each cell; NaN stays white."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("", ["#f3f6fb", BLUE])
    axes.imshow(strength, cmap=colours, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for (row, column), value in np.ndenumerate(strength):
        colour = "white" if value > 0.55 else INK
        axes.text(column, row, cell_labels[row][column], ha="center", va="center", color=colour, fontsize=8)
    rows, columns = strength.shape
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
