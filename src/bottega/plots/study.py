"""Plots of a search: the history of its trials, parallel coordinates, a slice per key, a Pareto front, a population."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bottega.plots.figure import BLUE, COLOURS, GRID, INK, LIGHT, MUTED, ORANGE, add_title, open_figure, shorten

MAX_SLICES = 8
"""Keys that have a slice of their own; the most important ones."""


def plot_history(report: Mapping[str, Any], path: Path) -> None:
    """Plot the value of each trial by its number, and the best so far as a line; pruned and failed trials as marks below."""
    metric, mode = report["metrics"][0]["name"], report["metrics"][0]["mode"]
    complete = [trial for trial in report["trials"] if trial["values"] is not None]
    pruned = [trial for trial in report["trials"] if trial["state"] == "pruned" and trial["curve"]]
    with open_figure(path, width=7.2, height=4.0) as figure:
        axes = figure.add_subplot()
        axes.grid(axis="y")
        axes.plot(
            [trial["number"] for trial in pruned],
            [trial["curve"][-1][1] for trial in pruned],
            "x",
            color=MUTED,
            markersize=5,
            label="pruned, last value",
        )
        numbers, values = [trial["number"] for trial in complete], [trial["values"][0] for trial in complete]
        axes.plot(numbers, values, "o", color=BLUE, markersize=4.5, label="complete")
        better = max if mode == "max" else min
        best = [better(values[: index + 1]) for index in range(len(values))]
        axes.step(numbers, best, where="post", color=ORANGE, linewidth=1.6, label="best so far")
        for trial in (trial for trial in report["trials"] if trial["state"] == "failed"):
            axes.axvline(trial["number"], color=LIGHT, linewidth=1.0, linestyle=":")
        axes.set_xlabel("trial")
        _use_whole_numbers(axes)
        axes.set_ylabel(metric)
        figure.legend(loc="outside lower center", ncols=3)
        add_title(axes, "Trials", f"{report['study']}: {len(report['trials'])} trials, {report['method']}")


def plot_parallel(report: Mapping[str, Any], path: Path) -> None:
    """Plot each complete trial as a line over its keys, coloured by its value; the best one in front."""
    trials = [trial for trial in report["trials"] if trial["values"] is not None]
    keys = list(report["space"])
    scales = {key: _Scale([trial["keys"][key] for trial in trials if key in trial["keys"]]) for key in keys}
    values = [trial["values"][0] for trial in trials]
    low, high = min(values), max(values)
    is_max = report["metrics"][0]["mode"] == "max"
    with open_figure(path, width=max(5.2, 1.6 * (len(keys) + 1) + 1.0), height=4.2) as figure:
        import matplotlib

        colours = matplotlib.colormaps["viridis"]
        axes = figure.add_subplot()
        order = sorted(trials, key=lambda trial: trial["values"][0], reverse=not is_max)
        for position, trial in enumerate(order):
            value = trial["values"][0]
            share = (value - low) / (high - low) if high > low else 1.0
            # A key whose condition does not hold interrupts the line.
            points = [
                (x, scales[key].to_unit(trial["keys"][key]) if key in trial["keys"] else math.nan)
                for x, key in enumerate(keys)
            ]
            is_best = position == len(order) - 1
            axes.plot(
                *zip(*[*points, (len(keys), share)], strict=True),
                color=ORANGE if is_best else colours(share if is_max else 1 - share),
                linewidth=2.2 if is_best else 1.0,
                alpha=1.0 if is_best else 0.55,
                marker=".",
            )
        for x, key in enumerate(keys):
            axes.axvline(x, color=GRID, linewidth=1.0, zorder=0)
            for text, y in scales[key].list_ticks():
                axes.annotate(text, (x, y), (4, 0), textcoords="offset points", fontsize=7.5, color=INK, va="center")
        axes.axvline(len(keys), color=GRID, linewidth=1.0, zorder=0)
        for y, value in ((0.0, low), (1.0, high)):
            axes.annotate(f"{value:.4g}", (len(keys), y), (4, 0), textcoords="offset points", fontsize=7.5, va="center")
        names = [shorten(label_key(key), 16) for key in keys]
        axes.set_xticks(range(len(keys) + 1), [*names, report["metrics"][0]["name"]])
        axes.set_yticks([])
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(axis="x", length=0, labelcolor=INK)
        add_title(axes, "Keys of all trials", "the best in orange; brighter lines are better")


def plot_slices(report: Mapping[str, Any], path: Path) -> None:
    """Plot the value of every complete trial against each key."""
    trials = [trial for trial in report["trials"] if trial["values"] is not None]
    importances = report["importances"]
    keys = sorted(report["space"], key=lambda key: -importances.get(key, 0.0))[:MAX_SLICES]
    columns = min(4, len(keys))
    rows = -(-len(keys) // columns)
    with open_figure(path, width=2.4 * columns + 0.6, height=2.4 * rows + 0.5) as figure:
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for index, axes in enumerate(grid.flat):
            if index >= len(keys):
                axes.set_visible(False)
                continue
            key = keys[index]
            used = [trial for trial in trials if key in trial["keys"]]
            scale = _Scale([trial["keys"][key] for trial in used])
            axes.grid(axis="y")
            axes.plot(
                [scale.to_axis(trial["keys"][key]) for trial in used],
                [trial["values"][0] for trial in used],
                "o",
                color=COLOURS[0],
                markersize=3.5,
                alpha=0.7,
            )
            scale.set_axis(axes)
            share = f"  {importances[key]:.0%}" if key in importances else ""
            axes.set_title(f"{shorten(label_key(key), 18)}{share}", fontsize=9)
            if index % columns == 0:
                axes.set_ylabel(report["metrics"][0]["name"])


def plot_pareto(report: Mapping[str, Any], path: Path) -> None:
    """Plot the first two objectives of all complete trials; those of the Pareto front are joined."""
    first, second = report["metrics"][:2]
    trials = [trial for trial in report["trials"] if trial["values"] is not None]
    front = sorted((t for t in trials if t["number"] in report["pareto"]), key=lambda trial: trial["values"][1])
    with open_figure(path, width=6.0, height=4.2) as figure:
        axes = figure.add_subplot()
        axes.grid()
        axes.plot([t["values"][1] for t in trials], [t["values"][0] for t in trials], "o", color=LIGHT, markersize=5)
        axes.plot([t["values"][1] for t in front], [t["values"][0] for t in front], "o-", color=ORANGE, markersize=5.5)
        values = [trial["values"][1] for trial in trials]
        if min(values) > 0 and max(values) / min(values) > 20:
            _set_log_scale(axes, "x")
        axes.set_xlabel(second["name"])
        axes.set_ylabel(first["name"])
        add_title(axes, "Pareto front", f"{len(front)} of {len(trials)} trials, which no other beats in both metrics")


def plot_population(report: Mapping[str, Any], path: Path) -> None:
    """Plot the metric of each member by step, and each perturbed key; the winner's lineage in front."""
    keys = list(report["space"])
    lineage = {segment["run"] for segment in report["lineage"]}
    with open_figure(path, width=7.2, height=2.6 + 1.6 * len(keys)) as figure:
        grid = figure.subplots(1 + len(keys), 1, sharex=True, squeeze=False)[:, 0]
        for segment in report["segments"]:
            is_winner = segment["run"] in lineage
            style: dict[str, Any] = {
                "color": ORANGE if is_winner else LIGHT,
                "linewidth": 2.0 if is_winner else 0.9,
                "zorder": 3 if is_winner else 1,
            }
            if segment["value"] is not None:
                start = segment["start_value"]
                points = [(segment["step"], segment["value"])]
                if start is not None:
                    points.insert(0, (segment["start"], start))
                grid[0].plot(*zip(*points, strict=True), marker="o", markersize=2.5, **style)
            for axes, key in zip(grid[1:], keys, strict=True):
                value = segment["keys"].get(key)
                if isinstance(value, int | float):
                    axes.plot([segment["start"], segment["step"]], [value, value], **style)
        grid[0].set_ylabel(report["metrics"][0]["name"])
        for axes, key in zip(grid[1:], keys, strict=True):
            values = [s["keys"][key] for s in report["segments"] if isinstance(s["keys"].get(key), int | float)]
            if values and min(values) > 0 and max(values) / min(values) > 20:
                _set_log_scale(axes, "y")
            axes.set_ylabel(shorten(label_key(key), 18))
        grid[-1].set_xlabel("step")
        _use_whole_numbers(grid[-1])
        add_title(grid[0], "Population", "each line is a member; the winner's lineage in orange")


def _set_log_scale(axes: Any, direction: str) -> None:
    """Make an axis logarithmic, with labels such as 0.001: matplotlib's own are TeX, which our style prints as it is."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set(**{f"{direction}scale": "log"})
    axis = axes.xaxis if direction == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def label_key(key: str) -> str:
    """Return a short name of a key: its last part, or the block of a name (`optimizer` for training.optimizer.name)."""
    *blocks, last = key.split(".")
    return blocks[-1] if last == "name" and blocks else last


def _use_whole_numbers(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


class _Scale:
    """The axis of a key: numbers, logarithmic if they span more than a factor of 20, or categories."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.is_numeric = bool(values) and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        )
        self.is_log = self.is_numeric and min(values) > 0 and max(values) / min(values) > 20
        self.categories = [] if self.is_numeric else sorted({str(value) for value in values})
        self.low = min(map(self._transform, values)) if self.is_numeric else 0.0
        self.high = max(map(self._transform, values)) if self.is_numeric else max(1.0, len(self.categories) - 1.0)

    def _transform(self, value: float) -> float:
        return math.log10(value) if self.is_log else float(value)

    def to_unit(self, value: Any) -> float:
        """Return the position of a value between 0 and 1."""
        number = self._transform(value) if self.is_numeric else float(self.categories.index(str(value)))
        return (number - self.low) / (self.high - self.low) if self.high > self.low else 0.5

    def to_axis(self, value: Any) -> float:
        """Return the position of a value on a matplotlib axis."""
        return float(value) if self.is_numeric else float(self.categories.index(str(value)))

    def list_ticks(self) -> list[tuple[str, float]]:
        """Return (label, position between 0 and 1)."""
        if not self.is_numeric:
            return [(shorten(name, 12), self.to_unit(name)) for name in self.categories]
        ends = {self.low, self.high}
        return [(f"{10**end if self.is_log else end:.4g}", self._unit(end)) for end in sorted(ends)]

    def _unit(self, number: float) -> float:
        return (number - self.low) / (self.high - self.low) if self.high > self.low else 0.5

    def set_axis(self, axes: Any) -> None:
        """Set the scale and the ticks of an axis."""
        if self.is_log:
            _set_log_scale(axes, "x")
        if not self.is_numeric:
            axes.set_xticks(range(len(self.categories)), [shorten(name, 10) for name in self.categories])
            axes.set_xlim(-0.5, len(self.categories) - 0.5)
