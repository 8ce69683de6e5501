"""A fake engine: every method that a test does not override raises NotImplementedError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bottega.core.engine import Engine


def _refuse(*args: Any, **named: Any) -> Any:
    raise NotImplementedError


if TYPE_CHECKING:
    FakeEngine = Engine
else:
    FakeEngine = type("FakeEngine", (Engine,), dict.fromkeys(Engine.__abstractmethods__, _refuse))
