"""A finding: something that is wrong with a run, the numbers that show it, and an override to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAGE = "docs/verbs/diagnose.md"
"""The page that explains each finding, under a heading of its name."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run. The fields are keys of `bottega diagnose --json`."""

    name: str
    """Lower-case words with hyphens, such as learning-rate-too-high."""
    evidence: str
    """What was recorded, in numbers, as a clause without a full stop."""
    steps: tuple[int, int] | None
    """First and last step of the evidence; None if it concerns the data."""
    override: str | None
    """Keys to set in the next run, as words of the command line: one or more key=value. None if no setting helps."""

    @property
    def page(self) -> str:
        """Where the finding is explained."""
        return f"{PAGE}#{self.name}"

    @property
    def title(self) -> str:
        """The name in plain words."""
        return self.name.replace("-", " ")

    def format_line(self) -> str:
        """Return one line: name, evidence, steps, what to try, and the page."""
        steps = f" ({self.describe_steps()})" if self.steps is not None else ""
        advice = f"; try {self.override}" if self.override is not None else ""
        return f"{self.title}: {self.evidence}{steps}{advice}; see {self.page}"

    def describe_steps(self) -> str:
        """Return the step range, such as "steps 100 to 900"; empty without one."""
        if self.steps is None:
            return ""
        first, last = self.steps
        return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"

    def to_plain_dict(self) -> dict[str, Any]:
        """Return the fields and the page."""
        return {
            "name": self.name,
            "evidence": self.evidence,
            "steps": list(self.steps) if self.steps is not None else None,
            "override": self.override,
            "page": self.page,
        }


class NotRecorded(Exception):
    """A rule cannot be applied because the run has not recorded what it needs; the message says what."""
