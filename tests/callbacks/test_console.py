"""The live line of a training fits the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console as Rich

from bottega.callbacks.console import Console, format_metric
from bottega.core.callback import Progress

METRICS = {
    "loss": 4.8298,
    "learning_rate": 6e-4,
    "grad_norm": 2.13,
    "units_per_second": 11_700.0,
    "data_wait": 0.0,
    "ram_gib": 0.5,
    "step_seconds": 0.3,
}


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_progress_line_is_not_truncated(width: int) -> None:
    console, screen = Console(unit="tokens"), io.StringIO()
    console.rich = Rich(file=screen, width=width, force_terminal=True, color_system=None)
    progress = Progress(step=1_000, total=20_000)
    fields = console._format_fields(progress, METRICS)
    console.rich.print(console._build_live_line(progress, fields))
    (line,) = screen.getvalue().splitlines()
    assert len(line) <= width
    assert "\u2026" not in line
    for field in ("step  1000/20000", "loss 4.8298", "11.7k tokens/s"):
        assert field in line
    assert all(field in line for field in fields) or width < 120


@pytest.mark.parametrize(("value", "logged"), [(0.5, "0.5000"), (54321.0, "54321.0000"), (1.04e193, "1.0400e+193")])
def test_large_metrics_use_scientific_notation(value: float, logged: str) -> None:
    assert format_metric(value) == logged
