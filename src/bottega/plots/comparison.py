"""Plots of groups: runs with the mean and interval of each group, and bars by condition."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bottega.plots.figure import COLOURS, INK, LIGHT, add_title, open_figure


def plot_groups(
    groups: Sequence[Mapping[str, Any]],
    intervals: Sequence[tuple[float, float]],
    path: Path,
    *,
    title: str,
    subtitle: str,
    conclusions: Sequence[str] = (),
) -> None:
    """Plot each group's runs as dots beside its mean and interval; lines join the runs of one seed or fold.

    A group is {"label", "name", "kind", "n", "mean", "points"}, where `points` maps a seed or fold to its value and is empty if
    only the mean over samples is known. `conclusions` are written below, one line each.
    """
    width = max(1.8 * len(groups) + 1.2, 5.2, 0.072 * max(map(len, [subtitle, *conclusions])) + 1.0)
    inch = len(groups) / (width - 1)  # the length of an inch in units of the horizontal axis
    with open_figure(path, width=width, height=4.4 + 0.18 * len(conclusions)) as figure:
        axes = figure.add_subplot()
        axes.grid(axis="y")
        plotted_values = [
            *itertools.chain(*intervals),
            *(value for group in groups for value in group["points"].values()),
        ]
        dots = [
            _place_dots(group["points"], x, inch=inch, min_distance=0.025 * (max(plotted_values) - min(plotted_values)))
            for x, group in enumerate(groups)
        ]
        for left, right in itertools.pairwise(dots):
            for key in sorted(left.keys() & right.keys()):
                axes.plot(*zip(left[key], right[key], strict=True), color=LIGHT, linewidth=0.8, zorder=1)
        for x, (group, (low, high)) in enumerate(zip(groups, intervals, strict=True)):
            colour, mean_x = COLOURS[x % len(COLOURS)], x + 0.3 * inch if dots[x] else x
            errors = [[max(0.0, group["mean"] - low)], [max(0.0, high - group["mean"])]]
            axes.errorbar(
                mean_x,
                group["mean"],
                yerr=errors,
                color=colour,
                capsize=4,
                linewidth=1.5,
                marker="_",
                markersize=18,
                mew=3,
            )
            for dot in dots[x].values():
                axes.plot(*dot, "o", color=colour, mec="white", mew=0.8, markersize=6.5)
        max_characters = int(12.5 * width / len(groups))
        names = [_keep_end(group["name"], max_characters) for group in groups]
        heads = [f"{group['label']}   {group['n']:,} {group['kind']}".strip() for group in groups]
        axes.set_xticks(range(len(groups)), [f"{head}\n{name}" for head, name in zip(heads, names, strict=True)])
        for tick, colour in zip(axes.get_xticklabels(), itertools.cycle(COLOURS), strict=False):
            tick.set_color(colour)
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.margins(y=0.08)
        if conclusions:
            axes.set_xlabel("\n".join(conclusions), loc="left", labelpad=10, color=INK)
        add_title(axes, title, subtitle)


def plot_condition_bars(
    conditions: Mapping[str, Mapping[str, Mapping[str, float]]],
    measures: Sequence[str],
    path: Path,
    *,
    title: str,
    subtitle: str,
    labels: Mapping[str, str],
    colours: Mapping[str, str],
    chance: Mapping[str, float],
) -> None:
    """Plot fractions from 0 to 1 as bars with their intervals: a group for each measure, a bar for each condition.

    `conditions` maps condition -> measure -> {"mean", "low", "high"}; a dashed line marks the `chance` level of a measure.
    """
    bar_width = 0.85 / len(conditions)
    width = max(7.0, 0.4 * len(conditions) * len(measures) + 1.2)
    with open_figure(path, width=width, height=4.2) as figure:
        axes = figure.add_subplot()
        axes.grid(axis="y")
        for number, (name, values) in enumerate(conditions.items()):
            plotted = [(position, values[measure]) for position, measure in enumerate(measures) if measure in values]
            x = [position + (number - (len(conditions) - 1) / 2) * bar_width for position, _ in plotted]
            means = [value["mean"] for _, value in plotted]
            errors = [
                [max(0.0, value["mean"] - value["low"]) for _, value in plotted],
                [max(0.0, value["high"] - value["mean"]) for _, value in plotted],
            ]
            axes.bar(x, means, 0.86 * bar_width, color=colours[name], label=f"{name}: {labels[name]}")
            axes.errorbar(x, means, yerr=errors, fmt="none", ecolor=INK, elinewidth=1.0, capsize=2.5)
        levels = [(position, chance[measure]) for position, measure in enumerate(measures) if measure in chance]
        for number, (position, level) in enumerate(levels):
            label = "chance" if number == 0 else None
            axes.hlines(
                level, position - 0.47, position + 0.47, colors=INK, linestyles="--", linewidth=1.2, label=label
            )
        axes.set_xticks(range(len(measures)), [measure.replace("_", " ") for measure in measures])
        axes.tick_params(axis="x", length=0, labelcolor=INK)
        axes.set_xlim(-0.55, len(measures) - 0.45)
        axes.set_ylim(0, 1.02)
        figure.legend(loc="outside lower center", ncols=min(4, len(conditions) + 1))
        add_title(axes, title, subtitle)


def _place_dots(
    points: Mapping[int, float], x: float, *, inch: float, min_distance: float
) -> dict[int, tuple[float, float]]:
    """Return the position of each run's dot; a dot that would hide another one moves to its left."""
    dots: dict[int, tuple[float, float]] = {}
    for key, value in sorted(points.items(), key=lambda point: point[1]):
        taken_x = {dot_x for dot_x, dot_y in dots.values() if abs(dot_y - value) <= min_distance}
        dots[key] = next(new_x for i in range(len(points)) if (new_x := x - 0.11 * inch * i) not in taken_x), value
    return dots


def _keep_end(name: str, length: int) -> str:
    """Return the end of a path that is too long, because the end is what distinguishes runs."""
    return name if len(name) <= length else f"…{name[1 - length :]}"
