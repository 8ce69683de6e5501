"""Counts of records read, dropped and bad, and the check that not too many are bad."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bottega.core.errors import DataError
from bottega.data.records.record import BadRecord

# Maximum number of bad records that are listed by name; the others are only counted.
MAX_NAMED_RECORDS = 100
DEFAULT_MAX_BAD = 0.001


@dataclass
class Tally:
    """Counts of one preparation. The field names are keys of meta.json."""

    records: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def count_bad(self, bad: BadRecord, *, stop: bool) -> None:
        """Count a bad record; raise DataError with `stop`, or if it is unsafe."""
        if stop or bad.is_unsafe:
            raise DataError(str(bad))
        self.bad += 1
        if len(self.named) < MAX_NAMED_RECORDS:
            self.named.append(str(bad))

    def add(self, counts: dict[str, Any]) -> None:
        """Add the counts of a job, as plain values."""
        self.records += counts["records"]
        self.bad += counts["bad"]
        self.named += counts["named"][: MAX_NAMED_RECORDS - len(self.named)]
        self.dropped = dict(Counter(self.dropped) + Counter(counts["dropped"]))

    def check(self, max_bad: float | None) -> None:
        """Raise DataError if the fraction of bad records exceeds `max_bad`."""
        limit = DEFAULT_MAX_BAD if max_bad is None else max_bad
        if self.bad > limit * self.records:
            others = f" (and {self.bad - 1:,} more)" if self.bad > 1 else ""
            raise DataError(
                f"{self.named[0]}{others}; {self.bad:,} of {self.records:,} records are bad, more than data.max_bad="
                f"{limit:g} allows; repair them, or raise it"
            )
