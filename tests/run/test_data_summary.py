"""data.json: the numbers of the data, which are counted once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bottega
import small_texts
from bottega.tasks.table_data import TableData


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    results: list[dict[str, int]] = []
    original = TableData.count_classes

    def count_classes(data: TableData) -> dict[str, int]:
        results.append(original(data))
        return results[-1]

    monkeypatch.setattr(TableData, "count_classes", count_classes)
    return results


def test_a_resumed_run_does_not_count_again(
    tmp_path: Path, counts: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = small_texts.settings(tmp_path, name="run", **{"training.scheduler.name": "constant"})
    run = bottega.train("classify", {**values, "training.max_steps": 1}, quiet=True)
    path = run.path / "data.json"
    first = json.loads(path.read_text())
    assert sum(first["classes"].values()) == first["splits"]["train"]
    assert first["duplicates"]["train"]["compared"] == first["splits"]["train"]
    monkeypatch.setattr(TableData, "compare_splits", lambda data: pytest.fail("compared twice"))
    bottega.train("classify", {**values, "training.max_steps": 2}, quiet=True)
    assert json.loads(path.read_text()) == first
    assert len(counts) == 1


@pytest.mark.parametrize(
    "content", ["", "[]", '{"classes": {"a": 1}}', '{"fingerprint": "another", "classes": {"a": 1}}']
)
def test_a_summary_of_other_data_is_replaced(content: str, tmp_path: Path, counts: list[dict[str, int]]) -> None:
    values = small_texts.settings(tmp_path, name="run", **{"training.max_steps": 1})
    path = bottega.train("classify", values, quiet=True).path / "data.json"
    first = path.read_text()
    path.write_text(content)
    bottega.train("classify", values, quiet=True)
    assert path.read_text() == first
    assert len(counts) == 2
