"""Metric modes: inferred from the name, set explicitly for unknown metrics, refused on conflict."""

from __future__ import annotations

from typing import Any

import pytest

from bottega.config.metrics import get_metric_bounds, infer_metric_mode
from bottega.config.recipe import diff_recipes
from bottega.core.errors import UsageError
from bottega.tasks.recipes import load_recipe


@pytest.mark.parametrize(
    ("metric", "mode"),
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
def test_mode_is_inferred_from_the_metric_name(metric: str, mode: str | None) -> None:
    assert infer_metric_mode(metric) == mode
    for key in ("evaluation", "training.early_stopping"):
        recipe: Any = load_recipe(["classify", {f"{key}.metric": metric}]).recipe
        block = recipe.evaluation if key == "evaluation" else recipe.training.early_stopping
        assert block.is_maximised == (mode == "max")
        if mode is not None:
            wrong = {f"{key}.metric": metric, f"{key}.mode": "max" if mode == "min" else "min"}
            with pytest.raises(UsageError, match=rf"{key}.mode: \w+ {metric} is better, got \w+; remove it"):
                load_recipe(["classify", wrong])


@pytest.mark.parametrize("mode", ["min", "max"])
def test_mode_of_an_unknown_metric_comes_from_the_recipe(mode: str) -> None:
    recipe = load_recipe(["classify", {"evaluation.metric": "something", "evaluation.mode": mode}]).recipe
    assert recipe.evaluation.is_maximised == (mode == "max")


def test_explicit_mode_does_not_change_the_run() -> None:
    implicit, explicit = (load_recipe(["classify", changes]).recipe for changes in ({}, {"evaluation.mode": "max"}))
    assert diff_recipes(implicit, explicit) == []
    assert implicit.run_name() == explicit.run_name()


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
def test_metric_bounds(metric: str, expected: tuple[float, float]) -> None:
    assert get_metric_bounds(metric) == expected
