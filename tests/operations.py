"""Operation counts for tests of complexity; unlike seconds, they are the same on every machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_operations(work: Callable[[], object]) -> int:
    """Return the number of Python lines that `work` executes plus the C functions it calls, on this thread.

    A vectorised call counts once for any number of elements: a count that does not grow with the data means that there
    is no Python loop over it. Garbage collection is off meanwhile, because the finalisers that it runs would be counted.
    """
    count = 0

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "c_call"

    trace, profile, is_collecting = sys.gettrace(), sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.settrace(on_line)
    sys.setprofile(on_call)
    try:
        work()
    finally:
        sys.setprofile(profile)
        sys.settrace(trace)
        if is_collecting:
            gc.enable()
    return count


class CountedText(str):
    """A string that counts comparisons: a set lookup needs few, a search in a list one per element."""

    __slots__ = ()
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedText.comparisons += 1
        return str.__eq__(self, other)
