"""The model card of an export."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bottega.core.rundir import RunDirectory
from bottega.run.export import RunExporter
from bottega.tasks.recipes import load_recipe, parse_overrides
from fake_engine import FakeEngine


class EngineWithoutParameters(FakeEngine):
    def parameters(self) -> dict[str, Any]:
        return {}

    def num_active_parameters(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("best", "best_step", "line"),
    [
        (0.25, 3, "- best loss 0.2500 at step 3\n"),
        (0.0, 3, "- best loss 0.0000 at step 3\n"),
        (None, 0, ""),
        # A step of another run or batch size is saved as 0.
        (0.25, 0, ""),
    ],
)
def test_model_card_has_the_best_metric(best: float | None, best_step: int, line: str, tmp_path: Path) -> None:
    exporter = RunExporter(
        directory=RunDirectory(tmp_path),
        recipe=load_recipe(*parse_overrides(["language"])).recipe,
        workload=SimpleNamespace(),  # type: ignore[arg-type]
        engine=EngineWithoutParameters(),
        progress={"step": 4, "best": best, "best_step": best_step},
        injected=None,
        base_hash=None,
    )
    card = exporter.build_model_card({})
    assert f"checkpoint at step 4\n{line}" in card
    assert ("- best" in card) == bool(line)
