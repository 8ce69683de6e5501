"""No log makes a rule fail: any values, any length, any optimizer."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.diagnosis.finding import NotRecorded
from bottega.diagnosis.rules import RULES
from bottega.run_files.record import read_record
from recorded_run import module, write_recorded_run

LOSSES = st.one_of(
    st.none(), st.sampled_from([0.0, -1.0, 1e-30, 1e30, -1e30, float("nan"), float("inf")]), st.floats(-10, 10)
)
NORMS = st.one_of(st.sampled_from([0.0, 1e-30, 1e30]), st.floats(0, 100))


@st.composite
def draw_logs(draw: Any) -> dict[str, Any]:
    count = draw(st.integers(1, 30))
    num_evaluations = draw(st.integers(0, 12))
    curves = dict(list({"loss": LOSSES, "accuracy": st.floats(0, 1)}.items())[: draw(st.integers(0, 2))])
    settings_of_recipe: dict[str, Any] = {
        "task": draw(st.sampled_from(["classify", "routing", "recall", "language", "image", "mine"])),
        "training.optimizer.name": draw(st.sampled_from(["adamw", "sgd", "lion", "mine"])),
        "training.learning_rate": draw(st.sampled_from(["auto", 1e-3, 10.0])),
        "training.max_grad_norm": draw(st.sampled_from([None, 1.0])),
        "data.num_values": 16,
    }
    if draw(st.booleans()):
        settings_of_recipe |= {"training.max_steps": None, "training.num_epochs": 3}
    return {
        "losses": draw(st.lists(LOSSES, min_size=count, max_size=count)),
        "norms": draw(st.lists(NORMS, min_size=count, max_size=count)),
        "validation": {
            name: draw(st.lists(values, min_size=num_evaluations, max_size=num_evaluations))
            for name, values in curves.items()
        },
        "final_rate": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "modules": {
            f"layers.{i}": module(gradient_norm=draw(NORMS), update_ratio=draw(NORMS))
            for i in range(draw(st.integers(0, 3)))
        },
        "settings": settings_of_recipe,
    }


@settings(max_examples=60)
@given(draw_logs())
def test_rules_return_a_finding_or_say_what_is_missing(logs: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = read_record(write_recorded_run(Path(folder) / "run", **logs))
    for name, rule in RULES.items():
        try:
            finding = rule(record)
        except NotRecorded:
            continue
        if finding is not None:
            assert finding.name == name
            assert all("=" in word for word in (finding.override or "a=b").split())
            assert not any(word in finding.evidence for word in ("None", "nan"))
