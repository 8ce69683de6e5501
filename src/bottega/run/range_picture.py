"""The picture of a range test: the loss over the rate, with what is suggested marked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bottega.data.image.canvas import BLUE, FAINT, GRID, INK, ORANGE, Canvas
from bottega.storage.durable import replacing_file

LEFT, TOP, WIDTH, HEIGHT = 66.0, 68.0, 560.0, 280.0
PALE = "#c9c8d3"


def draw(report: dict[str, Any], path: Path) -> None:
    curve = report["curve"]
    start, lowest = report["start_loss"], report["lowest_loss"]
    # What diverges would press everything else flat.
    bottom, top = min([lowest, *curve["loss"]]) - 0.1 * (start - lowest), start + 0.7 * (start - lowest)
    left, right = math.log10(curve["rate"][0]), math.log10(curve["rate"][-1])
    page = Canvas(LEFT + WIDTH + 30, TOP + HEIGHT + 62)

    def x_of(rate: float) -> float:
        return LEFT + WIDTH * (math.log10(rate) - left) / (right - left)

    def y_of(loss: float) -> float:
        return TOP + HEIGHT * (top - loss) / (top - bottom)

    page.draw_text(LEFT, 20, "learning-rate range test", anchor="lm", size=16)
    page.draw_text(
        LEFT,
        43,
        f"suggested {report['suggestion']:.2e}, steepest {report['steepest']:.2e}, minimum {report['minimum']:.2e}",
        anchor="lm",
        fill=FAINT,
    )
    for exponent in range(math.ceil(left - 1e-9), math.floor(right + 1e-9) + 1):
        x = x_of(10.0**exponent)
        page.draw_line(x, TOP, x, TOP + HEIGHT, fill=GRID)
        page.draw_text(x, TOP + HEIGHT + 16, f"1e{exponent}" if exponent else "1", size=11, fill=FAINT)
    for value in _round_values(bottom, top):
        page.draw_line(LEFT, y_of(value), LEFT + WIDTH, y_of(value), fill=GRID)
        page.draw_text(LEFT - 8, y_of(value), f"{value:.4g}", anchor="rm", size=11, fill=FAINT)
    places = [x_of(rate) for rate in curve["rate"]]
    for name, fill, thick in (("loss", PALE, 1.0), ("smoothed", BLUE, 2.5)):
        for piece in below(TOP, list(zip(places, map(y_of, curve[name]), strict=True))):
            page.draw_line(*(end for point in piece for end in point), fill=fill, thick=thick)
    x = x_of(report["suggestion"])
    page.draw_line(x, TOP, x, TOP + HEIGHT, fill=ORANGE, thick=1.5)
    side = ("rm", -6) if x > LEFT + WIDTH / 2 else ("lm", 6)
    page.draw_text(x + side[1], TOP + 12, f"{report['suggestion']:.2e}", anchor=side[0], fill=ORANGE)
    page.draw_text(
        LEFT + WIDTH / 2, TOP + HEIGHT + 42, "learning rate; grey: each step; cut off at the top", size=12, fill=INK
    )
    page.draw_text(LEFT - 8, TOP - 10, "loss", anchor="rm", size=12, fill=INK)
    with replacing_file(path) as temporary:
        page.save(temporary)


def below(edge: float, points: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The pieces of a line that are not above a height, each up to where it crosses it; heights grow downwards."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for number, (x, y) in enumerate(points):
        before = points[number - 1] if number else (x, y)
        if (y < edge) != (before[1] < edge):
            crossing = (before[0] + (x - before[0]) * (edge - before[1]) / (y - before[1]), edge)
            pieces[-1].append(crossing)
        if y >= edge:
            pieces[-1].append((x, y))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if len(piece) > 1]


def _round_values(low: float, high: float) -> list[float]:
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * times for times in (1, 2, 5, 10) if (high - low) / (power * times) <= 6)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
