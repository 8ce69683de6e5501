"""Classification losses: every file of the folder defines one, and a new loss takes one new file."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from bottega.tasks.classify import losses
from bottega.tasks.classify.config import LossOptions
from bottega.tasks.classify.losses import LossName, find_loss, list_loss_names
from bottega.tasks.classify.losses.base import ClassificationLoss
from package_with_file import run_with_file

NEW = '''
from bottega.tasks.classify.losses.base import ClassificationLoss


class Brier(ClassificationLoss):
    """The squared distance of the probabilities from the truth."""

    is_cross_entropy = False

    def per_example(self, logits, labels, operations):
        probabilities = operations.softmax(logits)
        return (probabilities**2).sum(1) - 2 * operations.select_class(probabilities, labels) + 1

    def per_label(self, logits, labels, operations):
        return (operations.sigmoid(logits) - labels) ** 2


LOSS = Brier
'''
TRAIN = """
import json, sys
from pathlib import Path

import bottega
import small_media
from bottega.metrics_log import read_metrics

folder = Path(sys.argv[1])
options = {key: value for key, value in small_media.image(folder).items() if not key.startswith(("model.", "samples."))}
options |= {"model.hidden_size": 8, "data.input": "image", "training.max_steps": 2, "evaluation.every": 2}
run = bottega.train("classify/image", {**options, "name": "new", "loss.name": "brier", "loss.gamma": 1.0})
rows = read_metrics(Path(run.path) / "metrics.jsonl")
print(json.dumps([row["objective"] for row in rows if row["kind"] == "eval"]))
"""


def test_every_file_defines_a_loss() -> None:
    files = {file.stem for file in Path(losses.__file__).parent.glob("*.py")} - {"__init__", "base"}
    assert set(list_loss_names()) == set(get_args(LossName)) == files
    assert list_loss_names()[:2] == ("cross_entropy", "focal"), "the order in which a schema lists them"
    loss_classes = [find_loss(name) for name in list_loss_names()]
    assert len(set(loss_classes)) == len(loss_classes)
    for name, kind in zip(list_loss_names(), loss_classes, strict=True):
        assert issubclass(kind, ClassificationLoss)
        assert not inspect.isabstract(kind)
        assert LossOptions(name=name).name == name


@pytest.mark.parametrize("name", ["base", "__init__", "hinge"])
def test_unknown_losses_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="'cross_entropy' or 'focal'"):
        LossOptions(name=name)


JAX = """
import jax.numpy as jnp

from bottega.tasks.classify.jax import OPERATIONS
from bottega.tasks.classify.losses import find_loss

loss = find_loss("brier")(gamma=0.0, label_smoothing=0.0)
logits, labels = jnp.zeros((1, 4)), jnp.array([2])
print(loss.per_example(logits, labels, OPERATIONS)[0], loss.per_label(logits, jnp.eye(4)[labels], OPERATIONS).sum())
"""


def test_a_new_loss_is_one_file_for_both_frameworks(tmp_path: Path) -> None:
    assert run_with_file("tasks/classify/losses/brier.py", NEW, JAX, tmp_path) == "0.75 1.0"


def test_a_new_loss_is_one_file(tmp_path: Path) -> None:
    """A copy of the package with that file trains with it and reports its value in evaluations."""
    values = json.loads(run_with_file("tasks/classify/losses/brier.py", NEW, TRAIN, tmp_path))
    assert values
    assert all(0 < value < 2 for value in values), "the range of a Brier score"
