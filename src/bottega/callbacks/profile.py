"""Profile of some training steps: a trace for Perfetto, and a table of the operations that take most time."""

from __future__ import annotations

import json
from pathlib import Path

from bottega.callbacks.console import Console
from bottega.core.callback import Callback, Progress
from bottega.measurements import StepProfile, StepProfiler
from bottega.storage.durable import writing_folder

TRACE_FILE, OPERATIONS_FILE = "trace.json.gz", "operations.json"
MAX_NAME_WIDTH = 56
"""Characters of an operation's name in the table; names of GPU kernels may have hundreds."""


class ProfileWriter(Callback):
    """Has the profiler record the steps `steps`, counted from 1, and writes the result to `folder` and the console."""

    name = "profile"

    def __init__(self, profiler: StepProfiler, steps: tuple[int, int], folder: Path, console: Console) -> None:
        self.profiler, self.steps, self.folder, self.console = profiler, steps, folder, console
        self._has_warned = self._is_written = False

    def start(self, progress: Progress) -> None:
        first, last = self.steps
        if progress.step >= last:
            self._warn(
                f"profile.steps: the run resumed at step {progress.step}, after the steps {first} to {last}, so nothing is "
                "profiled; choose later steps"
            )
            return
        self.profiler.record(first, last, write=self._write, warn=self._warn)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        self.profiler.finish()
        if not self._is_written and not self._has_warned and error is None:
            self._warn(f"profile.steps: training ended at step {progress.step}, so nothing was profiled")

    def _warn(self, text: str) -> None:
        self._has_warned = True
        self.console.warn(text)

    def _write(self, profile: StepProfile) -> None:
        try:
            with writing_folder(self.folder) as temporary:
                profile.write_trace(temporary / TRACE_FILE)
                text = json.dumps(describe_profile(profile), indent=1) + "\n"
                (temporary / OPERATIONS_FILE).write_text(text, encoding="utf-8")
        except OSError as error:
            self._warn(
                f"{self.folder}: the profile cannot be written ({error.strerror}); training continues without it"
            )
            return
        self._is_written = True
        for line in format_profile(profile):
            self.console.info(line)
        self.console.info(
            f"trace: {self.folder / TRACE_FILE}; open it at https://ui.perfetto.dev, which does not upload it, or offline in "
            "chrome://tracing"
        )


def describe_profile(profile: StepProfile) -> dict[str, object]:
    """Return the content of operations.json."""
    return {
        "steps": list(profile.steps),
        "device": profile.device,
        "wall_ms": profile.wall_ms,
        "total_ms": profile.total_ms,
        "operations": [operation._asdict() for operation in profile.operations],
    }


def format_profile(profile: StepProfile) -> list[str]:
    """Return the lines of the table of operations."""
    names = [shorten_name(operation.name) for operation in profile.operations]
    width = max(map(len, ["operation", *names]))
    first, last = profile.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    kind = "GPU kernels" if any(operation.device != "cpu" for operation in profile.operations) else "operations"
    lines = [
        f"profile of {steps} on {profile.device}: {profile.total_ms:,.1f} ms in {kind}, {profile.wall_ms:,.1f} ms in all",
        f"  {'operation':<{width}}{'calls':>9}{'ms':>11}{'share':>8}",
    ]
    for name, operation in zip(names, profile.operations, strict=True):
        numbers = f"{operation.calls:>9,}{operation.self_ms:>11,.2f}{100 * operation.share:>7.1f}%"
        lines.append(f"  {name:<{width}}{numbers}")
    return lines


def shorten_name(name: str) -> str:
    """Return the name of an operation in one line of at most `MAX_NAME_WIDTH` characters."""
    line = (
        " ".join(name.split()).removeprefix("void ").replace("at::native::", "")
    )  # in most names of torch's own kernels
    return line if len(line) <= MAX_NAME_WIDTH else line[: MAX_NAME_WIDTH - 1] + "…"
