"""What became of the records: how many were read, which of them are bad, and whether that is too many."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bottega.core.errors import DataError
from bottega.data.records.record import BadRecord

# Bad records that are named; beyond that they are only counted.
NAMED = 100
DEFAULT_MAX_BAD = 0.001


@dataclass
class Tally:
    records: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def count_bad(self, bad: BadRecord, *, stop: bool) -> None:
        """Count a bad record; with `stop`, or where it is refused, it ends it all."""
        if stop or bad.is_unsafe:
            raise DataError(str(bad))
        self.bad += 1
        if len(self.named) < NAMED:
            self.named.append(str(bad))

    def add(self, other: dict[str, Any]) -> None:
        self.records += other["records"]
        self.bad += other["bad"]
        self.named += other["named"][: NAMED - len(self.named)]
        self.dropped = dict(Counter(self.dropped) + Counter(other["dropped"]))

    def check(self, max_bad: float | None) -> None:
        """That no more records are bad than may be."""
        most = DEFAULT_MAX_BAD if max_bad is None else max_bad
        if self.bad > most * self.records:
            others = f" (and {self.bad - 1:,} more)" if self.bad > 1 else ""
            raise DataError(
                f"{self.named[0]}{others}; {self.bad:,} of {self.records:,} records are bad, more than data.max_bad="
                f"{most:g} allows"
            )
