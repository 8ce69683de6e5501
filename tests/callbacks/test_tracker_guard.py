"""A tracker that fails is reported once and switched off; other callbacks may end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bottega.callbacks.tracker_guard import TrackerGuard
from bottega.core.callback import Callback, Histogram, Progress
from bottega.core.errors import EnvironmentProblem

EVENTS: dict[str, tuple[Any, ...]] = {
    "load_state_dict": ({"id": "a"},),
    "start": (Progress(),),
    "after_step": (Progress(step=1), {"loss": 1.0}),
    "after_inspect": (Progress(step=1), {"head": {"gradient_norm": 1.0}}),
    "after_histograms": (Progress(step=1), {"weights/head": Histogram((0.0, 1.0), (1,))}),
    "after_eval": (Progress(step=1), {"loss": 1.0}),
    "after_sample": (Progress(step=1), Path("samples")),
    "after_save": (Progress(step=1), Path("checkpoint")),
    "rewind": (Progress(),),
    "state_dict": (),
    "finish": (Progress(step=1), None),
}


class FailingTracker(Callback):
    """Records the events that it gets, and raises in one of them."""

    name = "failing"

    def __init__(self, failing_event: str, error: BaseException) -> None:
        self.failing_event, self.error = failing_event, error
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in EVENTS:
            return super().__getattribute__(name)

        def call(*arguments: Any) -> Any:
            assert arguments == EVENTS[name]
            self.events.append(name)
            if name == self.failing_event:
                raise self.error
            return {"id": "b"} if name == "state_dict" else None

        return call


def send_events(tracker: FailingTracker, messages: list[str]) -> dict[str, Any]:
    """Send all events and return the state."""
    guard = TrackerGuard(tracker, messages.append)
    results = {event: getattr(guard, event)(*arguments) for event, arguments in EVENTS.items()}
    assert guard.name == "failing"
    return dict(results["state_dict"])


def test_every_event_of_a_callback_is_passed_on() -> None:
    public = {name for name in vars(Callback) if not name.startswith("_")} - {"name"}
    assert public == set(EVENTS)
    tracker = FailingTracker("", ValueError())
    assert send_events(tracker, messages := []) == {"id": "b"}
    assert tracker.events == list(EVENTS)
    assert messages == []


@pytest.mark.parametrize("event", EVENTS)
def test_tracker_that_fails_is_switched_off(event: str) -> None:
    tracker = FailingTracker(event, ValueError("https://user:secret@host"))
    state = send_events(tracker, messages := [])
    assert messages == ["failing logging failed: ValueError; training continues without it"]
    before = list(EVENTS)[: list(EVENTS).index(event) + 1]
    assert tracker.events == [*before, *(name for name in ("state_dict", "finish") if name not in before)]
    assert state == ({"id": "a"} if event == "state_dict" else {"id": "b"}), "a resume continues the tracker's run"


def test_reasons_are_for_people() -> None:
    for error, reason in (
        (OSError(28, "No space left on device"), "No space left on device"),
        (EnvironmentProblem("not logged in: run x"), "not logged in: run x"),
    ):
        send_events(FailingTracker("start", error), messages := [])
        assert messages == [f"failing logging failed: {reason}; training continues without it"]


def test_interrupts_are_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        send_events(FailingTracker("after_step", KeyboardInterrupt()), [])
