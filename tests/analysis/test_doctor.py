"""`bottega doctor` tells required packages from optional ones."""

from __future__ import annotations

import pytest

from bottega.analysis import doctor


def test_missing_required_package_is_not_called_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_find_version", lambda name: None if name in ("scipy", "optuna") else "1.0")
    monkeypatch.setattr(doctor, "_list_devices", list)
    report = doctor.examine_environment()
    lines = doctor.format_report(report).splitlines()
    assert "scipy        not installed (required)" in lines
    assert "optuna       not installed (optional: bottega[tune])" in lines
    assert "scipy is missing; pip install bottega" in report["problems"]
    assert report["exit_code"] == 5
