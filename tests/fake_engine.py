"""An engine for tests of what stands around one: whatever a test does not override is not to be asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bottega.core.engine import Engine


def _refuse(*args: Any, **named: Any) -> Any:
    raise NotImplementedError


if TYPE_CHECKING:
    FakeEngine = Engine
else:
    FakeEngine = type("FakeEngine", (Engine,), dict.fromkeys(Engine.__abstractmethods__, _refuse))
