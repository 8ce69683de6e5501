"""Invalid launcher variables and deeply nested files."""

from __future__ import annotations

from pathlib import Path

import pytest

import bottega
from bottega.cli import main
from bottega.core.errors import UsageError
from small_run import train_arguments, write_text


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"),
        ({"WORLD_SIZE": "1.5"}, "WORLD_SIZE is '1.5'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '9999"),
        ({"RANK": "abc"}, "RANK is 'abc'"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"RANK": "7", "WORLD_SIZE": "2"}, "RANK is 7, expected less than WORLD_SIZE, which is 2"),
        ({"RANK": "1"}, "RANK is 1, expected less than WORLD_SIZE, which is 1"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "zz"}, "MASTER_PORT is 'zz'"),
    ],
)
def test_invalid_launcher_variables_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    reason: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(train_arguments(tmp_path / "runs", write_text(tmp_path / "t.txt"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert "torchrun" in line
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UsageError, match="environment variable"):
        bottega.train("language", {"data.train.path": str(tmp_path / "t.txt"), "output_dir": str(tmp_path / "runs")})


def test_deeply_nested_metadata_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "meta.json").write_text("[" * 100_000)
    (tmp_path / "train.bin").write_bytes(b"x")
    for kind in ("shards", "auto"):
        assert main(["data", "language", "--data", str(tmp_path), f"data.train.kind={kind}"]) in (2, 3)
        (line,) = capsys.readouterr().err.splitlines()
        assert str(tmp_path) in line
