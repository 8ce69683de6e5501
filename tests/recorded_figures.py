"""Record the matplotlib figures that a test draws, to check lines and texts rather than pixels."""

from __future__ import annotations

from typing import Any

import pytest


def record_figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list to which every figure is added when it is saved."""
    from matplotlib.figure import Figure

    figures: list[Any] = []
    save = Figure.savefig

    def record(self: Any, *arguments: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", record)
    return figures


def list_texts(figure: Any) -> list[str]:
    """Return all texts of a figure: titles, labels, ticks and annotations."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]
