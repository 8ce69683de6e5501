"""The training session calls the callbacks of techniques."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import small_run
from bottega.core.callback import Callback, Progress
from bottega.run import session


class SaveRecorder(Callback):
    """Records every saved checkpoint."""

    name = "saves"

    def __init__(self) -> None:
        self.saved: list[tuple[int, str]] = []

    def after_save(self, progress: Progress, folder: Path) -> None:
        self.saved.append((progress.step, folder.name))


def test_a_callback_of_a_technique_is_called_for_every_checkpoint(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, build_training_plan = SaveRecorder(), session.build_training_plan

    def with_callback(*arguments: Any) -> Any:
        return replace(build_training_plan(*arguments), callbacks=(recorder,))

    monkeypatch.setattr(session, "build_training_plan", with_callback)
    run = small_run.train(tmp_path, text_file, name="x")
    assert [name for _, name in recorder.saved] == ["step-00000004", "step-00000008"]
    assert run.metrics["loss"] > 0
