"""Which way a metric is better: known by its name, said where it is not, and refused where the two disagree."""

from __future__ import annotations

from typing import Any

import pytest

from bottega.config.metrics import get_metric_bounds, infer_metric_mode
from bottega.config.recipe import diff_recipes
from bottega.core.errors import UsageError
from bottega.tasks.recipes import load_recipe


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        *(
            (name, "min")
            for name in ("loss", "perplexity", "bits_per_byte", "ece", "forgetting", "objective", "low/loss")
        ),
        *(
            (name, "max")
            for name in ("accuracy", "macro_f1", "auroc", "exact_match", "label_accuracy", "sst2/accuracy")
        ),
        ("backward_transfer", "max"),
        ("something", None),
    ],
)
def test_a_name_says_which_way_is_better(metric: str, direction: str | None) -> None:
    assert infer_metric_mode(metric) == direction
    for key in ("evaluation", "training.early_stopping"):
        recipe: Any = load_recipe(["classify", {f"{key}.metric": metric}]).recipe
        block = recipe.evaluation if key == "evaluation" else recipe.training.early_stopping
        assert block.is_maximised == (direction == "max")
        if direction is not None:
            wrong = {f"{key}.metric": metric, f"{key}.mode": "max" if direction == "min" else "min"}
            with pytest.raises(UsageError, match=rf"{key}.mode: \w+ {metric} is better, got \w+; remove it"):
                load_recipe(["classify", wrong])


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_an_unknown_metric_the_recipe_says_it(mode: str) -> None:
    recipe = load_recipe(["classify", {"evaluation.metric": "something", "evaluation.mode": mode}]).recipe
    assert recipe.evaluation.is_maximised == (mode == "max")


def test_said_or_not_it_is_the_same_run() -> None:
    unsaid, said = (load_recipe(["classify", more]).recipe for more in ({}, {"evaluation.mode": "max"}))
    assert diff_recipes(unsaid, said) == []
    assert unsaid.run_name() == said.run_name()


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        *(
            (name, (0, 1))
            for name in (
                *(
                    "accuracy",
                    "bayes_accuracy",
                    "retrieval_accuracy",
                    "routing/accuracy",
                    "accuracy_before",
                    "macro_f1",
                ),
                *("load_entropy", "gate_entropy", "rule_information", "load/0", "routing/load/12", "firing_rate"),
                *("dead", "saturated", "drop_rate", "text/load_max"),
            )
        ),
        ("perplexity", (1, float("inf"))),
        ("text/bits_per_byte", (0, float("inf"))),
        *((name, (float("-inf"), float("inf"))) for name in ("loss", "forgetting", "load/a", "workload/0", "psnr")),
    ],
)
def test_what_a_metric_can_be(metric: str, expected: tuple[float, float]) -> None:
    assert get_metric_bounds(metric) == expected
