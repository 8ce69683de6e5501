"""Every override that is suggested loads with the recipe it is suggested for, of any task."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega.diagnosis import chance, overrides
from bottega.run_files.record import RunRecord, read_record
from bottega.tasks.recipes import load_recipe, parse_overrides

HEALTHY = sorted((Path(__file__).parent / "healthy").iterdir())
SUGGESTIONS: dict[str, Callable[[RunRecord], str | None]] = {
    "lower rate": overrides.suggest_lower_rate,
    "higher rate": lambda record: overrides.suggest_higher_rate(record, 1e-5),
    "clipping": overrides.suggest_clipping,
    "longer": overrides.suggest_longer_run,
    "shorter": lambda record: overrides.suggest_shorter_run(record, 20),
    "decay": overrides.suggest_decay,
    "capacity": overrides.suggest_capacity,
    "fewer layers": overrides.suggest_fewer_layers,
    "faster": overrides.suggest_faster_training,
}


@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.name)
def test_suggested_overrides_load(run: Path) -> None:
    record = read_record(run)
    suggestions = dict(SUGGESTIONS)
    if record.get("task") in ("classify", "routing", "recall", "align"):
        suggestions["chance"] = chance.suggest_against_chance
    for name, suggest in suggestions.items():
        if (override := suggest(record)) is None:
            continue
        words = shlex.split(override)
        _, settings = parse_overrides(words)
        assert len(settings) == len(words), name
        before = load_recipe([run / "recipe.yaml"]).recipe
        after = load_recipe([run / "recipe.yaml"], settings).recipe
        assert after != before, f"{name}: {override} changes nothing"


def test_rates_have_one_digit() -> None:
    assert [overrides.round_rate(rate) for rate in (0.00312, 4.9e-5, 0.3, 1.0)] == ["0.003", "5e-05", "0.3", "1"]
