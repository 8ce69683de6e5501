"""Every file operation of a training fails once or is the last: the finished run is the one nothing happened to."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_process import build_library, run_process


def run_campaign(folder: Path, text: Path, *, first: int, stride: int, at_least: int) -> None:
    *problems, summary = run_process(build_library(folder), folder, text, first, stride)
    assert problems == []
    assert summary["faults"] >= at_least, "the operations were seen"


def test_a_few_failed_and_killed_operations_change_nothing(tmp_path: Path, text_file: Path) -> None:
    run_campaign(tmp_path, text_file, first=20, stride=90, at_least=6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_failed_and_killed_operation_changes_nothing(tmp_path: Path, text_file: Path) -> None:
    run_campaign(tmp_path, text_file, first=0, stride=1, at_least=500)
