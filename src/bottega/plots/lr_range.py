"""Plot of a learning-rate range test: the loss over the learning rate, with the suggestion marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bottega.plots.figure import BLUE, LIGHT, ORANGE, add_title, open_figure


def plot_range_test(report: dict[str, Any], path: Path) -> None:
    """Plot the loss of each step and the smoothed loss; a diverging loss is cut off at the top."""
    curve, start, lowest = report["curve"], report["start_loss"], report["lowest_loss"]
    with open_figure(path, width=6.6, height=4.0) as figure:
        axes = figure.add_subplot()
        axes.grid(True)
        axes.semilogx(curve["rate"], curve["loss"], color=LIGHT, linewidth=1.0, label="each step")
        axes.semilogx(curve["rate"], curve["smoothed"], color=BLUE, linewidth=2.2, label="smoothed")
        axes.axvline(report["suggestion"], color=ORANGE, linewidth=1.5, label=f"suggested: {report['suggestion']:.2e}")
        axes.set_xlim(curve["rate"][0], curve["rate"][-1])
        # A loss that diverges would press everything else flat.
        axes.set_ylim(min([lowest, *curve["loss"]]) - 0.1 * (start - lowest), start + 0.7 * (start - lowest))
        axes.xaxis.set_major_formatter(
            lambda rate, _: f"{rate:g}" if rate > 1e-3 else f"{rate:.0e}".replace("e-0", "e-")
        )
        axes.minorticks_off()
        axes.set(xlabel="learning rate", ylabel="loss")
        axes.legend(loc="best")
        subtitle = f"steepest {report['steepest']:.2e}, minimum {report['minimum']:.2e}"
        add_title(axes, "Learning-rate range test", subtitle)
