"""Every file operation of a run fails once or is followed by a kill: the finished run is bitwise equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_process import build_library, run_process


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_run_is_bitwise_equal_after_any_failed_or_killed_operation(tmp_path: Path, text_file: Path) -> None:
    *problems, summary = run_process(build_library(tmp_path), tmp_path, text_file, 0, 1)
    assert problems == []
    assert summary["faults"] >= 500, "the operations were intercepted"
