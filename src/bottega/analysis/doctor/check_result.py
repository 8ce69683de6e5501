"""What a check reports: lines to read, values for --json, notes, and problems with their remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bottega.core.errors import EnvironmentProblem

NO_BREAK = "\N{NO-BREAK SPACE}"
"""Stands for a space of a line that the line must not be wrapped at."""


@dataclass(frozen=True)
class Problem:
    """Something that does not work on this machine, and what to do about it.

    `stops_training` is True if not even one process could train on the selected device; otherwise the problem only limits what can be
    done here: another device, several processes, an optional package.
    """

    check: str
    message: str
    remedy: str
    stops_training: bool = False


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    title: str
    lines: tuple[tuple[str, str], ...] = ()
    """Label and text of each line of the report."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Plain values for --json, by the name of their field in the report."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MachineReport:
    """The results of all checks; `device` is the one that training would use."""

    header: Mapping[str, str]
    device: str
    results: tuple[CheckResult, ...]
    not_checked: tuple[str, ...] = ()

    @property
    def problems(self) -> list[Problem]:
        """All problems, in the order of the checks."""
        return [problem for result in self.results for problem in result.problems]

    @property
    def notes(self) -> list[str]:
        """All notes, in the order of the checks."""
        return [note for result in self.results for note in result.notes]

    @property
    def exit_code(self) -> int:
        """5 if a problem stops training, otherwise 0."""
        return EnvironmentProblem.code if any(problem.stops_training for problem in self.problems) else 0

    def to_plain_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for --json and the library."""
        values = {name: value for result in self.results for name, value in result.values.items()}
        return {
            **self.header,
            "device": self.device,
            **values,
            "notes": self.notes,
            "problems": [asdict(problem) for problem in self.problems],
            "not_checked": list(self.not_checked),
            "exit_code": self.exit_code,
        }
