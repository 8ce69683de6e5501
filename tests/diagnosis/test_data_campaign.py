"""Each illness of data, modules and loading is made on purpose, named, and gone in a run that follows the advice.

The illnesses of a GPU are in test_machine_rules.py, from records of runs on one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.diagnosis.data import MIN_RECALL_GAP
from bottega.diagnosis.modules import MIN_DEAD_FRACTION, find_dead_units
from bottega.run_files.record import read_record
from small_data_illnesses import ILLNESSES, make_dead_filters, make_image_leak
from small_illnesses import check_cycle, train_and_diagnose


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ILLNESSES)
def test_illness_is_named_and_its_advice_removes_it(tmp_path: Path, name: str, seed: int) -> None:
    check_cycle(tmp_path, ILLNESSES[name](tmp_path, seed), seed)
    if name == "class-imbalance":  # is not named again once there are class weights, so what they did is checked
        per_class = read_record(tmp_path / f"{name}-{seed}-treated").evaluation["per_class"]
        assert per_class["rare"]["recall"] > per_class["common"]["recall"] - MIN_RECALL_GAP


def test_leak_of_images_is_named_and_its_advice_removes_it(tmp_path: Path) -> None:
    check_cycle(tmp_path, make_image_leak(tmp_path, 0), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_dead_filters_are_found_and_a_lower_rate_prevents_them(tmp_path: Path, seed: int) -> None:
    """By the rule itself, since the rate, which is found to be too high as well, explains them."""
    illness = make_dead_filters(tmp_path, seed)
    sick = train_and_diagnose(tmp_path, illness, seed)
    finding = find_dead_units(read_record(Path(sick["run"])))
    assert finding is not None
    assert "of the units of convolutions" in finding.evidence
    assert finding.override in [other["override"] for other in sick["findings"]], sick["lines"]
    treated = train_and_diagnose(tmp_path, illness, seed, finding.override)
    record = read_record(Path(treated["run"]))
    assert find_dead_units(record) is None
    fractions = [value for series in record.modules.series["dead_fraction"].values() for value in series.values]
    assert max(fractions) < MIN_DEAD_FRACTION
