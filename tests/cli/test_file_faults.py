"""Every file operation of a training fails once or is the last: the finished run is the one nothing happened to."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_process import build_library, run_process


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_failed_and_killed_operation_changes_nothing(tmp_path: Path, text_file: Path) -> None:
    *problems, summary = run_process(build_library(tmp_path), tmp_path, text_file, 0, 1)
    assert problems == []
    assert summary["faults"] >= 500, "the operations were seen"
