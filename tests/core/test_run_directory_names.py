"""Names inside a run directory, and those of earlier versions that are still read."""

from __future__ import annotations

from pathlib import Path

from bottega.core.rundir import RunDirectory


def test_run_of_an_earlier_version_uses_its_codec_folder(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path).processor == tmp_path / "processor"
    (tmp_path / "codec").mkdir()
    assert RunDirectory(tmp_path).processor == tmp_path / "codec"
