"""All rules, and their application to the record of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bottega.core.errors import first_line
from bottega.diagnosis import chance, curves, data, divergence, gradients, modules, rates, resources
from bottega.diagnosis.finding import Finding, NotRecorded
from bottega.run_files.record import RunRecord

Rule = Callable[[RunRecord], Finding | None]
"""Returns a finding, or None if the run is healthy in this respect; raises NotRecorded."""

RULES: dict[str, Rule] = {
    **divergence.RULES,
    **gradients.RULES,
    **rates.RULES,
    **data.RULES,
    **modules.RULES,
    **chance.RULES,
    **curves.RULES,
    **resources.RULES,
}
"""Name of the finding -> its rule, in the order of the output."""

LEARNING_FINDINGS = ("metric-at-chance", "overfitting", "underfitting", "plateau", "slow-convergence")
"""Findings about what was learned, which say little about a run whose updates are wrong."""
MODULE_FINDINGS = ("vanishing-gradients", "dead-units", "collapsed-experts")
"""Findings about modules, which updates that are too large leave behind."""
CONSEQUENCES: dict[str, tuple[str, ...]] = {
    "divergence": ("exploding-gradients", "learning-rate-too-high", *MODULE_FINDINGS, *LEARNING_FINDINGS),
    "exploding-gradients": ("learning-rate-too-high", *MODULE_FINDINGS, *LEARNING_FINDINGS),
    "learning-rate-too-high": ("vanishing-gradients", *LEARNING_FINDINGS),
    "learning-rate-too-low": ("vanishing-gradients", *LEARNING_FINDINGS),
    "dead-units": ("vanishing-gradients", *LEARNING_FINDINGS),  # no gradient passes through units that are not active
    "vanishing-gradients": LEARNING_FINDINGS,
    "collapsed-experts": ("dead-units",),
    "leak-between-splits": ("duplicates",),  # its evidence is the same samples, and its override removes both
    "metric-at-chance": LEARNING_FINDINGS[1:],  # nothing was learned that applies to other data, so no curve says more
}
"""Name of a finding -> findings that it explains, which are left out beside it. Divergence is not found where exploding gradients
are its cause."""


@dataclass(frozen=True)
class Diagnosis:
    """What the rules say of a run."""

    findings: tuple[Finding, ...]
    not_checked: dict[str, str]
    """Name of a rule -> what the run has not recorded."""

    def to_plain_dict(self) -> dict[str, Any]:
        """Return findings and rules that were not applied."""
        return {"findings": [finding.to_plain_dict() for finding in self.findings], "not_checked": self.not_checked}

    def format_lines(self) -> list[str]:
        """Return one line for each finding."""
        return [finding.format_line() for finding in self.findings]


def apply_rules(record: RunRecord) -> Diagnosis:
    """Apply every rule to what a run has recorded."""
    findings: dict[str, Finding] = {}
    not_checked: dict[str, str] = {}
    for name, rule in RULES.items():
        try:
            finding = rule(record)
        except NotRecorded as reason:
            not_checked[name] = str(reason)
            continue
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # The files may be of another version, or edited; the other rules still say what they can.
            not_checked[name] = f"a file of the run has unexpected values ({type(error).__name__}: {first_line(error)})"
            continue
        if finding is not None:
            findings[name] = finding
    explained = {name for cause in findings for name in CONSEQUENCES.get(cause, ())}
    return Diagnosis(tuple(f for name, f in findings.items() if name not in explained), not_checked)
