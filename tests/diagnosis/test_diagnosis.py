"""Applying all rules: short, changing and damaged records; causes before consequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.diagnosis.finding import PAGE
from bottega.diagnosis.rules import CONSEQUENCES, RULES
from recorded_run import NUM_LOGS, apply_all, module, write_recorded_run

CURVE_RULES = ("overfitting", "underfitting", "plateau", "slow-convergence")


def test_consequences_are_names_of_rules_and_without_cycles() -> None:
    assert set(CONSEQUENCES) <= set(RULES)
    for cause, names in CONSEQUENCES.items():
        assert set(names) <= set(RULES)
        assert all(cause not in CONSEQUENCES.get(name, ()) for name in names), cause


def test_every_rule_has_a_section_of_the_page() -> None:
    page = (Path(__file__).parents[2] / PAGE).read_text()
    assert [name for name in RULES if f"\n## {name}\n" not in page] == []


def test_diverged_run_has_one_finding(tmp_path: Path) -> None:
    run = write_recorded_run(
        tmp_path / "run",
        losses=[2.0 * 1.5**index for index in range(NUM_LOGS)],
        norms=[1.5**index for index in range(NUM_LOGS)],
        validation={"loss": [2.0, 1e2, 1e3, 1e4, 1e5], "accuracy": [0.5] * 5},
        modules={"layers.0": module(update_ratio=0.3), "layers.1": module(update_ratio=0.3)},
    )
    (finding,) = apply_all(run).findings
    assert finding.name == "divergence"
    assert finding.override == "training.learning_rate=0.0001"


def test_loss_that_was_not_finite_is_a_divergence(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path / "run", losses=[2.0, 1.9, 1.8, None], validation={})
    (finding,) = apply_all(run).findings
    assert finding.name == "divergence"
    assert finding.evidence == "the loss was not finite in 1 of 4 logged steps"
    first = write_recorded_run(tmp_path / "first", losses=[None], validation={})
    (finding,) = apply_all(first).findings
    assert (finding.name, finding.steps) == ("divergence", None)


def test_short_run_is_not_judged(tmp_path: Path) -> None:
    diagnosis = apply_all(write_recorded_run(tmp_path / "run", losses=[2.0, 1.9, 1.8], validation={"loss": [1.0]}))
    assert diagnosis.findings == ()
    assert set(CURVE_RULES) <= set(diagnosis.not_checked)
    assert (
        diagnosis.not_checked["learning-rate-too-low"]
        == "3 logged steps with loss, at least 8 needed; see logging.every"
    )
    assert diagnosis.not_checked["overfitting"] == "1 evaluation with loss, at least 4 needed; see evaluation.every"


@pytest.mark.parametrize("key", ["data.curriculum", "data.online"])
def test_changing_data_is_not_judged_by_its_curve(tmp_path: Path, key: str) -> None:
    run = write_recorded_run(
        tmp_path / "run", losses=[1.0] * 20 + [2.5] * 20, validation={"loss": [1.0, 0.5, 3.0, 3.0]}, settings={key: {}}
    )
    diagnosis = apply_all(run)
    assert diagnosis.findings == ()
    assert "the data changes during training" in diagnosis.not_checked["overfitting"]
