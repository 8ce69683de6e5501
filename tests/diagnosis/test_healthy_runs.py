"""Recorded runs that are healthy, of all tasks, come out clean, also when they are diagnosed while they train.

tools/record_healthy_runs.py has trained them; command.txt of each has its command.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from bottega.tasks.registry import TASKS
from recorded_run import apply_all

FIRST_EPOCH = ("slow-data",)
"""Findings that are right at first: sounds are decoded once, and their spectrograms are cached."""
HEALTHY = sorted((Path(__file__).parent / "healthy").iterdir())


def test_healthy_runs_cover_all_tasks() -> None:
    tasks = {yaml.safe_load((run / "recipe.yaml").read_text())["task"] for run in HEALTHY}
    assert len(HEALTHY) >= 20
    assert {task.partition("/")[0] for task in TASKS} == tasks


@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.name)
def test_healthy_run_comes_out_clean(run: Path) -> None:
    assert [finding.to_plain_dict() for finding in apply_all(run).findings] == []


@pytest.mark.parametrize("run", HEALTHY, ids=lambda run: run.name)
def test_healthy_run_comes_out_clean_while_it_trains(run: Path, tmp_path: Path) -> None:
    for fraction in (0.25, 0.5, 0.75):
        copy = tmp_path / str(fraction)
        shutil.copytree(run, copy)
        last_step = fraction * json.loads((run / "environment.json").read_text())["steps"]
        for name in ("metrics.jsonl", "modules.jsonl"):
            lines = (copy / name).read_text().splitlines(keepends=True)
            (copy / name).write_text("".join(line for line in lines if json.loads(line)["step"] <= last_step))
        findings = [finding for finding in apply_all(copy).findings if finding.name not in FIRST_EPOCH]
        assert findings == [], fraction
