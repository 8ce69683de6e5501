"""Console output of a run: one live line on a terminal, plain lines elsewhere, and everything in log.txt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bottega.callbacks.log_file import Level, LogFile
from bottega.core.callback import Callback, Progress
from bottega.terminal import ConsoleStream, escape_controls, open_console

MIN_BAR_WIDTH, FIELD_GAP = 10, 2
"""Columns of the shortest progress bar, and between two fields of the live line."""
DROP_ORDER = ("wait ", "mem ", "grad ", "drop ", "lr ", "eta ")
"""Fields that are dropped on a narrow terminal, in this order; step, loss and speed are always shown."""
MAX_DROP_RATE = 0.1
"""Fraction of token-to-expert assignments dropped for lack of capacity above which a warning is printed."""


class Console(Callback):
    """Writes to standard error, so that standard output stays free for results and --json.

    A closed terminal or pipe or a full disk does not end the run: log.txt notes it once.
    """

    name = "console"

    def __init__(
        self, *, unit: str, log: Path | None = None, quiet: bool = False, warnings: bool | None = None
    ) -> None:
        self.unit = unit
        self.log_file = LogFile(log) if log is not None else None
        self.headline: tuple[str, ...] | None = None
        """Metrics of an evaluation that are shown; None shows all."""
        self.rich = open_console(quiet=quiet)
        # A quiet run that still warns needs a second console; otherwise both share one, for the live line.
        self._warning_console = open_console() if quiet and warnings else self.rich
        self._live: Live | None = None
        self._mean_step_seconds: float | None = None
        self._has_warned_of_drops = False
        self._is_unwritable = False

    def info(self, text: str, *, style: str = "") -> None:
        """Print a line and add it to log.txt."""
        self._print(self.rich, text, style=style)
        self._write_log(text)

    def warn(self, text: str) -> None:
        """Print a line that begins with "warning:" and add it to log.txt at that level."""
        line = f"warning: {text}"
        self._print(self._warning_console, line, style="yellow")
        self._write_log(text, "WARNING")

    def _print(self, console: Any, text: str, *, style: str = "") -> None:
        console.print(Text(escape_controls(text), style=style), soft_wrap=True)
        stream = console.file
        if isinstance(stream, ConsoleStream) and stream.error is not None and not self._is_unwritable:
            self._is_unwritable = True
            self._write_log(f"cannot write to standard error ({stream.error.strerror}); training continues", "WARNING")

    def start(self, progress: Progress) -> None:
        if self.rich.is_terminal and not self.rich.quiet:
            self._live = Live(console=self.rich, refresh_per_second=4, transient=True, redirect_stdout=False)
            self._live.start()

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        step_seconds = metrics["step_seconds"]
        self._mean_step_seconds = (
            step_seconds if self._mean_step_seconds is None else 0.8 * self._mean_step_seconds + 0.2 * step_seconds
        )
        fields = self._format_fields(progress, metrics)
        self._warn_about_drops(metrics)
        self._write_log("  ".join(fields))
        if self._live is not None:
            self._live.update(self._build_live_line(progress, fields))
        else:
            self._print(self.rich, "  ".join(fields))

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        text = "  ".join(f"{name} {format_metric(value)}" for name, value in self.headline_metrics(metrics).items())
        mark = "  best so far" if progress.best_step == progress.step else ""
        self.info(f"step {progress.step}  validation  {text}{mark}", style="green" if mark else "")

    def headline_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the headline metrics, with their prequential (online/) and pre-adaptation (_before) variants."""
        if self.headline is None:
            return metrics
        names = {variant for name in self.headline for variant in (name, f"online/{name}", f"{name}_before")}
        return {name: value for name, value in metrics.items() if name in names}

    def _warn_about_drops(self, metrics: dict[str, float]) -> None:
        """Warn once when experts drop many tokens for lack of capacity, which no loss shows."""
        high_rates = [(name, value) for name, value in metrics.items() if _is_drop_rate(name) and value > MAX_DROP_RATE]
        if high_rates and not self._has_warned_of_drops:
            self._has_warned_of_drops = True
            name, value = high_rates[0]
            self.warn(
                f"{name} {value:.2f}: this fraction of tokens exceeds the capacity of its expert and is dropped; raise "
                "model.expert_capacity or model.capacity_factor, or set it to null"
            )

    def after_sample(self, progress: Progress, folder: Path) -> None:
        self._write_log(f"samples in {folder}")

    def after_save(self, progress: Progress, folder: Path) -> None:
        self._write_log(f"saved {folder}")

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _format_fields(self, progress: Progress, metrics: dict[str, float]) -> list[str]:
        width = len(str(progress.total))
        fields = [
            f"step {progress.step:>{width}}/{progress.total}",
            f"loss {metrics['loss']:.4f}",
            f"lr {metrics['learning_rate']:.2e}",
            f"grad {metrics['grad_norm']:.2f}",
            *(f"drop {100 * value:.0f}%" for name, value in metrics.items() if _is_drop_rate(name)),
            f"{format_count(metrics['units_per_second'])} {self.unit}/s",
            f"wait {100 * metrics['data_wait']:.0f}%",
        ]
        memory = metrics.get("gpu_memory_gib", metrics.get("ram_gib"))
        if memory is not None:
            fields.append(f"mem {memory:.1f}G")
        fields.append(f"eta {format_duration((progress.total - progress.step) * (self._mean_step_seconds or 0.0))}")
        return fields

    def _build_live_line(self, progress: Progress, fields: list[str]) -> Any:
        fitting_fields = fit_fields(fields, self.rich.width - MIN_BAR_WIDTH - FIELD_GAP)
        free_width = self.rich.width - sum(len(field) + FIELD_GAP for field in fitting_fields)
        bar = ProgressBar(
            total=progress.total, completed=progress.step, width=max(1, min(3 * MIN_BAR_WIDTH, free_width))
        )
        grid = Table.grid(padding=(0, FIELD_GAP, 0, 0), pad_edge=False)
        for _ in range(1 + len(fitting_fields)):
            grid.add_column(no_wrap=True)
        grid.add_row(bar, *fitting_fields)
        return grid

    def _write_log(self, text: str, level: Level = "INFO") -> None:
        if self.log_file is not None:
            self.log_file.write(text, level)


def fit_fields(fields: list[str], width: int) -> list[str]:
    """Return the fields of the live line that fit into `width` columns, in order; the least important are dropped first."""
    remaining = list(fields)
    for prefix in DROP_ORDER:
        if sum(len(field) + FIELD_GAP for field in remaining) <= width:
            break
        remaining = [field for field in remaining if not field.startswith(prefix)]
    return remaining


def _is_drop_rate(name: str) -> bool:
    return name.rpartition("/")[2] == "drop_rate"


def format_metric(value: float) -> str:
    """Return a metric with four decimals, or in scientific notation from a million on."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4e}"


def format_count(number: float) -> str:
    """Return a count with a unit prefix: 1234567 becomes "1.2M"."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{letter}"
    return f"{number:.0f}"


def format_duration(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole_seconds:02d}" if hours else f"{minutes}:{whole_seconds:02d}"
