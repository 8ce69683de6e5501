"""One style for every plot. matplotlib is used without a display, and imported only when something is drawn.

matplotlib comes with the extra `plots`. If it is missing, `open_figure` raises `PlotsUnavailable`, and `try_plot` reports
once which command installs it, so that no run ends because a plot cannot be drawn.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.core.errors import EnvironmentProblem
from bottega.storage.durable import replacing_file
from bottega.terminal import print_notice

INK, MUTED, GRID, LIGHT = "#1c1b29", "#6d6b7b", "#e6e6ec", "#c9c8d3"
BLUE, ORANGE = "#2a5db0", "#d1602f"
# Distinguishable in greyscale and for colour-blind readers.
COLOURS = (BLUE, ORANGE, "#2e8b6f", "#8a4fa3", "#a8862a", "#5d6470")
DPI = 160
MISSING_MATPLOTLIB = "plots need matplotlib; pip install 'bottega[plots]'"
STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # class names may hold dollar signs
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelsize": 9,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LIGHT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT,
    "ytick.color": LIGHT,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": MUTED,
    "figure.dpi": DPI,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
}

_reported_reasons: set[str] = set()


class PlotsUnavailable(EnvironmentProblem):
    """matplotlib cannot be imported."""


@contextmanager
def open_figure(path: Path, *, width: float, height: float) -> Iterator[Any]:
    """Yield a matplotlib `Figure` of `width` x `height` inches in our style, and write it to `path` as PNG afterwards."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs that it looks for fonts
    try:
        import matplotlib
        import PIL  # noqa: F401  # which writes the PNG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsUnavailable(f"{MISSING_MATPLOTLIB} ({error})") from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with warnings.catch_warnings(), replacing_file(path) as temporary:
            # A letter that no font has is drawn as a box.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(temporary, format="png", metadata={"Software": None})


def try_plot(plot: Callable[[Path], None], path: Path, *, warn: Callable[[str], None] | None = None) -> bool:
    """Call `plot(path)` and return whether the file was written; report why not, a missing matplotlib once per process."""
    try:
        plot(path)
    except (EnvironmentProblem, OSError) as error:
        reason = str(error)
        if reason not in _reported_reasons:
            (warn or _print_warning)(f"no {path.name}: {reason}")
        if isinstance(error, PlotsUnavailable):
            _reported_reasons.add(reason)
        return False
    return True


def is_plot_warning(text: str) -> bool:
    """Return whether `text` is the report of `try_plot` that a plot could not be written."""
    return text.startswith("no ") and text.partition(": ")[0].endswith(".png")


def _print_warning(text: str) -> None:
    print_notice(f"bottega: {text}")


def shorten(name: str, length: int) -> str:
    """Return `name` in one line of at most `length` characters; an ellipsis stands for what is cut."""
    name = " ".join(name.split())
    return name if len(name) <= length else f"{name[: length - 1]}…"


def add_title(axes: Any, title: str, subtitle: str = "") -> None:
    """Write a title, and below it a smaller line, flush with the left edge of `axes`."""
    axes.set_title(f"{title}\n" if subtitle else title)
    if subtitle:
        axes.annotate(
            subtitle, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=MUTED, fontsize=8.5
        )
