"""Objectives of generation: every file of the folder defines one, and a new objective takes one new file."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from bottega.tasks.generation import objectives
from bottega.tasks.generation.config import Generator
from bottega.tasks.generation.objectives import ObjectiveName, find_objective, list_objective_names
from bottega.tasks.generation.objectives.base import Objective
from bottega.tasks.generation.paths import NoisePath as NoisePath
from package_with_file import run_with_file

FOLDER = Path(objectives.__file__).parent
NEW = '''
from bottega.tasks.generation.objectives.base import VariancePreserving


class CleanPrediction(VariancePreserving):
    """The data themselves are predicted."""

    prediction_type = "sample"

    def target(self, clean, noise, alpha, sigma):
        return clean

    def split_prediction(self, predicted, x, alpha, sigma):
        return predicted, (x - alpha * predicted) / sigma

    def min_snr_weight(self, snr, max_snr):
        return snr.clamp(max=max_snr)


OBJECTIVE = CleanPrediction
'''
TRAIN = """
import json, sys
from pathlib import Path

import bottega
import small_media

folder = Path(sys.argv[1])
options = {"training.max_steps": 2, "model.objective": "clean", "samples.every": 2, "samples.count": 2}
run = small_media.train(folder, name="new", **options)
bottega.load(run.path).export(folder / "exported")
print(json.dumps(bottega.load(run.path).generate(count=2, steps=3).shape))
"""


def test_every_file_defines_an_objective() -> None:
    files = {file.stem for file in FOLDER.glob("*.py")} - {"__init__", "base"}
    assert set(list_objective_names()) == set(get_args(ObjectiveName)) == files
    assert list_objective_names()[:3] == ("flow", "noise", "v"), "the order in which a schema lists them"
    objective_classes = [find_objective(name) for name in list_objective_names()]
    assert len(set(objective_classes)) == len(objective_classes)
    for name, objective_class in zip(list_objective_names(), objective_classes, strict=True):
        assert issubclass(objective_class, Objective)
        assert not inspect.isabstract(objective_class)
        assert NoisePath(objective=name).scheduler(None)[0].endswith("Scheduler")
        assert Generator(objective=name).objective == name


@pytest.mark.parametrize("name", ["base", "__init__", "velocity", "Flow"])
def test_unknown_objectives_are_refused(name: str) -> None:
    for section in (NoisePath, Generator):
        with pytest.raises(ValidationError, match="'flow', 'noise' or 'v'"):
            section.model_validate({"objective": name})


def test_a_new_objective_is_one_file(tmp_path: Path) -> None:
    """A copy of the package with one more file trains, samples, reloads and exports the objective."""
    assert json.loads(run_with_file("tasks/generation/objectives/clean.py", NEW, TRAIN, tmp_path)) == [2, 8, 8, 1]
    scheduler = json.loads((tmp_path / "exported" / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "sample"
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["task"]["path"]["objective"] == "clean"
