"""Reports of a routing run: a summary in text, a plot of the expert load by rule, and a raster plot of spikes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bottega.data.image.canvas import BLUE, FAINT, GRID, INK, ORANGE, PAPER, Canvas
from bottega.tasks.measures import routing as measures

CELL = 44.0
MOST_UNITS = 96
"""Of each layer, rows of the raster that one can look at."""
SHOWN = 4
"""Samples in a raster, one beside the other."""


def describe_routing(
    *,
    accuracy: float,
    bayes: float | None,
    samples: str,
    load: np.ndarray,
    counts: np.ndarray | None,
    top_k: int,
    firing: float | None,
) -> str:
    """`counts` are of the first choice alone, where a sample is sent to `top_k` experts."""
    best = f", and {bayes:.4f} is the best there can be (Bayes)" if bayes is not None else ""
    lines = [f"accuracy      {accuracy:.4f} of {samples}{best}"]
    if len(load) > 1:
        lines.append(f"load          {'  '.join(f'{share:.3f}' for share in load)}")
        lines.append(f"load entropy  {measures.load_entropy(load):.4f} of the most there can be")
    if counts is not None and len(load) > 1:
        whose = "expert" if top_k == 1 else f"first of {top_k} experts"
        lines.append(
            f"information   {measures.normalised_mutual_information(counts):.4f} of what the {whose} can say of the rule"
        )
    if firing is not None:
        lines.append(f"firing rate   {firing:.4f} spikes a unit and step")
    if counts is not None and len(load) > 1:
        width = max(7, len(f"{counts.max():,}") + 2)
        lines += ["", "rule" + "".join(f"{f'e{e}':>{width}}" for e in range(counts.shape[1])) + f"   ({_who(top_k)})"]
        lines += [f"{rule:<4}" + "".join(f"{cell:>{width},}" for cell in row) for rule, row in enumerate(counts)]
    return "\n".join(lines)


def _who(top_k: int) -> str:
    return "expert" if top_k == 1 else f"the first of {top_k} experts"


def format_fractions(counts: np.ndarray) -> list[str]:
    """Shares with two digits that add up to 1: those that are cut most are rounded up."""
    exact = 100 * counts / max(float(counts.sum()), 1e-12)
    whole = np.floor(exact + 1e-9).astype(int)
    if counts.sum() > 0:
        whole[np.argsort(whole - exact, kind="stable")[: 100 - whole.sum()]] += 1
    return [f"{value / 100:.2f}" for value in whole]


def draw_experts(load: np.ndarray, counts: np.ndarray | None, path: Path, *, top_k: int = 1) -> None:
    """A row for each rule, a column for each expert, the colour the share of the rule; below it how often each is used."""
    rules, experts = counts.shape if counts is not None else (0, len(load))
    left, top, bars = 70.0, 66.0, 90.0
    page = Canvas(
        max(left + CELL * experts + 24, 330 if top_k == 1 or counts is None else 470), top + CELL * rules + bars + 56
    )
    page.draw_text(24, 20, "which expert is asked", anchor="lm", size=16)
    first = f", a column {_who(top_k)}" if top_k > 1 else ""
    known = f"a row is the rule that holds{first}" if counts is not None else "the rule of these samples is not known"
    page.draw_text(24, 42, f"{known}; bars: how often", anchor="lm", fill=FAINT)
    for rule in range(rules):
        assert counts is not None
        y, row = top + CELL * rule, counts[rule]
        page.draw_text(left - 10, y + CELL / 2, f"rule {rule}", anchor="rm", fill=FAINT)
        for expert, words in enumerate(format_fractions(row)):
            share, x = row[expert] / max(1, row.sum()), left + CELL * expert
            page.draw_box(x + 1, y + 1, x + CELL - 1, y + CELL - 1, _between(PAPER, BLUE, 0.06 + 0.94 * share))
            page.draw_text(x + CELL / 2, y + CELL / 2, words, fill=PAPER if share > 0.5 else INK)
    floor = top + CELL * rules + bars
    even = floor - (bars - 14) / experts / max(float(load.max()), 1 / experts)
    page.draw_line(left, even, left + CELL * experts, even, fill=ORANGE)
    page.draw_text(left - 10, even, "even", anchor="rm", size=11, fill=ORANGE)
    page.draw_text(left - 10, floor + 14, "expert", anchor="rm", size=11, fill=FAINT)
    page.draw_text(left - 10, floor + 30, "share", anchor="rm", size=11, fill=FAINT)
    for expert, (share, words) in enumerate(zip(load, format_fractions(load), strict=True)):
        x = left + CELL * expert
        page.draw_box(
            x + 6, floor - (bars - 14) * share / max(float(load.max()), 1 / experts), x + CELL - 6, floor, BLUE
        )
        page.draw_text(x + CELL / 2, floor + 14, str(expert), fill=FAINT)
        page.draw_text(x + CELL / 2, floor + 30, words, size=11, fill=FAINT)
    page.save(path)


def draw_raster(spikes: np.ndarray, num_layers: int, path: Path) -> None:
    """Spikes [S, B, U] of the first samples: a line for each unit, a column for each time step, layers from above."""
    units = spikes.shape[2] // num_layers
    layers = [part[:, :SHOWN, :MOST_UNITS] for part in np.split(spikes, num_layers, axis=2)]
    steps, samples, _ = layers[0].shape
    step, line, left, top = 10.0, 1.5, 76.0, 66.0
    tall = sum(layer.shape[2] * line + 12 for layer in layers)
    page = Canvas(max(left + samples * (steps * step + 14) + 24, 470 if units > MOST_UNITS else 330), top + tall + 24)
    page.draw_text(24, 20, "spikes over time", anchor="lm", size=16)
    some = f", the first {MOST_UNITS} of {units} of a layer" if units > MOST_UNITS else ""
    page.draw_text(24, 42, f"{samples} samples, {steps} steps each; a line is a unit{some}", anchor="lm", fill=FAINT)
    y = top
    for number, layer in enumerate(layers, start=1):
        high = layer.shape[2] * line
        page.draw_text(left - 10, y + high / 2, f"layer {number}", anchor="rm", size=11, fill=FAINT)
        for sample in range(samples):
            x = left + sample * (steps * step + 14)
            page.draw_box(x, y, x + steps * step, y + high, GRID)
            for when, unit in np.argwhere(layer[:, sample] > 0):
                page.draw_box(
                    x + when * step + 1, y + unit * line, x + (when + 1) * step - 1, y + (unit + 1) * line, INK
                )
        y += high + 12
    page.save(path)


def _between(one: str, other: str, share: float) -> str:
    ends = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in (one, other)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))
