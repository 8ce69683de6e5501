"""Search spaces: what can be written, what is refused and how, and the points of a grid."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("optuna")

from hypothesis import given
from hypothesis import strategies as st

from bottega.core.errors import UsageError
from bottega.tuning.plan import plan_study
from bottega.tuning.space import Choices, Condition, Range, build_grid, is_active, parse_space, parse_space_words


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("log(1e-5,1e-2)", Range("log", 1e-5, 1e-2)),
        ("log_uniform(1e-5, 1e-2)", Range("log", 1e-5, 1e-2)),
        ("uniform(0, 0.5)", Range("uniform", 0.0, 0.5)),
        ("int(2,8)", Range("int", 2, 8)),
        ("int_log(16, 512)", Range("int_log", 16, 512)),
        ("[0, 0.1, 0.3]", Choices((0, 0.1, 0.3))),
        ("[adamw, sgd]", Choices(("adamw", "sgd"))),
        ("[[3, 4], [3, 4, 5]]", Choices(([3, 4], [3, 4, 5]))),
        ("log(1e-4, 1e-1, 4)", Choices((1e-4, 1e-3, 1e-2, 1e-1))),
        ("uniform(0, 1, 3)", Choices((0.0, 0.5, 1.0))),
        ("int(1, 9, 3)", Choices((1, 5, 9))),
    ],
)
def test_ranges_and_lists(text: str, values: Range | Choices) -> None:
    (dimension,) = parse_space({"training.learning_rate": text})
    assert dimension.values == values


def test_spaces_of_the_guides_are_accepted_as_printed() -> None:
    """The dictionaries of the fifth guide's three tuners."""
    grid = {
        "learning_rate": [0.0001, 0.001, 0.01, 0.1],
        "batch_size": [16, 32, 64, 128],
        "num_experts": [2, 4, 8],
        "hidden_dim": [256, 512, 1024],
    }
    continuous_space = {
        "learning_rate": (0.00001, 0.1, "log_uniform"),
        "dropout_rate": (0.0, 0.5, "uniform"),
        "weight_decay": (1e-8, 1e-2, "log_uniform"),
        "expert_dropout": (0.0, 0.3, "uniform"),
    }
    categorical_space = {
        "optimizer": ["adamw", "adam", "sgd"],
        "scheduler": ["cosine", "linear", "exponential"],
        "activation": ["gelu", "relu", "swish"],
    }
    recipe = ["routing/synthetic-hard", {"model.routing_loss_weight": 0}]
    assert plan_study(recipe, [], flags={"method": "grid"}, space=grid).num_trials == 4 * 4 * 3 * 3
    assert len(plan_study(recipe, [], flags={}, space=[continuous_space, categorical_space]).dimensions) == 7
    assert [dimension.key for dimension in parse_space(grid)] == [
        "training.learning_rate",
        "training.batch_size",
        "model.num_experts",
        "model.hidden_size",
    ]
    joined = parse_space([continuous_space, categorical_space])
    assert {dimension.key: dimension.values for dimension in joined} == {
        "training.learning_rate": Range("log", 1e-5, 0.1),
        "model.dropout": Range("uniform", 0.0, 0.5),
        "training.weight_decay": Range("log", 1e-8, 1e-2),
        "model.expert_dropout": Range("uniform", 0.0, 0.3),
        "training.optimizer.name": Choices(("adamw", "adam", "sgd")),
        "training.scheduler.name": Choices(("cosine", "linear", "exponential")),
        "model.activation": Choices(("gelu", "relu", "swish")),
    }


def test_a_condition_follows_the_key_it_names() -> None:
    dimensions = parse_space(
        {
            "training.optimizer.momentum": "uniform(0.5, 0.99) if optimizer=sgd",
            "training.optimizer.betas": "[[0.9, 0.95], [0.9, 0.999]] if training.optimizer.name in [adamw, lion]",
            "training.optimizer.name": "[sgd, adamw, lion]",
        }
    )
    name, momentum, betas = dimensions
    assert name.key == "training.optimizer.name"
    assert momentum.condition == Condition("training.optimizer.name", ("sgd",))
    assert betas.condition == Condition("training.optimizer.name", ("adamw", "lion"))
    assert is_active(momentum, {"training.optimizer.name": "sgd"})
    assert not is_active(momentum, {"training.optimizer.name": "lion"})


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "the search space is empty"),
        ({"lr": "log(0, 1)"}, "the lowest value must be above 0"),
        ({"lr": "log(1e-2, 1e-4)"}, "the lowest value must be below the highest"),
        ({"lr": "uniform(1)"}, "expected two numbers"),
        ({"lr": "uniform(a, b)"}, "expected two numbers"),
        ({"lr": "normal(0, 1)"}, "normal is not a range; choose from log, uniform, int, int_log"),
        ({"lr": "int(0.5, 2)"}, "expected whole numbers"),
        ({"lr": "1e-3"}, "is one value; give several"),
        ({"lr": 0.1}, "is one value; give several"),
        ({"lr": []}, "the list is empty"),
        ({"lr": [1e-3, 1e-3]}, "0.001 is listed twice"),
        ({"lr": "log(1e-4,1e-2", "seed": "[1]"}, "is one value"),
        ({"lr": "log(1e-4,1e-2)", "training.learning_rate": "[1]"}, "given twice"),
        ({"lr": "[1, 2] if dropout=0", "dropout": "[0, 1] if lr=1"}, "depends on itself"),
    ],
)
def test_a_bad_space_is_refused_in_one_line(space: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match="(?s)" + message.replace("(", r"\(")) as caught:
        parse_space(space)
    assert "\n" not in str(caught.value)


def test_all_problems_of_a_space_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_space({"lr": "log(0,1)", "dropout": "3", "seed": "[]"})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "--space training.learning_rate",
        "--space model.dropout",
        "--space seed",
    ]


@pytest.mark.parametrize("word", ["lr", "lr=", "=log(1,2)"])
def test_words_of_the_command_line_need_key_and_values(word: str) -> None:
    with pytest.raises(UsageError, match="expected KEY=VALUES"):
        parse_space_words([word])


def test_grid_leaves_out_keys_whose_condition_is_false() -> None:
    dimensions = parse_space({"o": "[sgd, adamw]", "m": "[0.5, 0.9] if o=sgd", "n": "int(1, 2)"})
    assert build_grid(dimensions, {}) == [
        {"o": "sgd", "n": 1, "m": 0.5},
        {"o": "sgd", "n": 1, "m": 0.9},
        {"o": "sgd", "n": 2, "m": 0.5},
        {"o": "sgd", "n": 2, "m": 0.9},
        {"o": "adamw", "n": 1},
        {"o": "adamw", "n": 2},
    ]


def test_a_grid_needs_single_values_and_a_bounded_size() -> None:
    with pytest.raises(UsageError, match=r"a grid needs single values; .*log\(0.001, 1, 5\)"):
        build_grid(parse_space({"lr": "log(1e-3, 1)"}), {})
    with pytest.raises(UsageError, match="the grid has 1,000,000 points"):
        build_grid(parse_space({"a": "int(1,1000)", "b": "int(1,1000)"}), {})


@given(
    low=st.floats(1e-8, 1e3),
    factor=st.floats(1.5, 1e6),
    count=st.integers(2, 12),
    kind=st.sampled_from(["log", "uniform"]),
)
def test_spread_values_reach_both_ends_in_order(low: float, factor: float, count: int, kind: str) -> None:
    (dimension,) = parse_space({"x": f"{kind}({low!r}, {low * factor!r}, {count})"})
    assert isinstance(dimension.values, Choices)
    values = dimension.values.values
    assert math.isclose(values[0], low, rel_tol=1e-5)
    assert math.isclose(values[-1], low * factor, rel_tol=1e-5)
    assert list(values) == sorted(values)
