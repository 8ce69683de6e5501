"""Counts what Python does, for tests of how work grows: a count is the same on every machine, seconds are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_operations(work: Callable[[], object]) -> int:
    """Return how many lines of Python `work` executes, and how many C functions it calls, on this thread.

    A vectorised call counts once, however many elements it has: a count that does not grow with the data says that no
    element is visited by Python itself.
    """
    count = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "c_call"

    trace, profile = sys.gettrace(), sys.getprofile()
    sys.settrace(on_line)
    sys.setprofile(on_call)
    try:
        work()
    finally:
        sys.setprofile(profile)
        sys.settrace(trace)
    return count


class CountedText(str):
    """A text that counts how often it is compared with another: a look-up in a set asks few, a list all of them."""

    __slots__ = ()
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedText.comparisons += 1
        return str.__eq__(self, other)
