"""Routing on the user's own tables: columns matched by name, and errors that name the faulty column or cell."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_routing
from bottega import cli
from bottega.config.data import get_source_names
from bottega.core.errors import DataError, UsageError
from bottega.metrics_log import read_metrics
from bottega.tasks.recipes import check_recipe, load_recipe
from bottega.tasks.routing.plots import describe_routing, format_fractions
from bottega.tasks.routing.workload import RoutingWorkload

NAMES = [f"c{number}" for number in range(small_routing.INPUTS)]


def write_table(path: Path, *, columns: Sequence[str] = (*NAMES, "rule", "label"), **changed: Any) -> str:
    """Write the rows of small_routing as CSV with named columns; `changed` replaces a column or adds one."""
    rows = small_routing.make_rows(96)
    values: dict[str, Any] = {name: rows["x"][:, i] for i, name in enumerate(NAMES)}
    values |= {"rule": rows["rule"], "label": rows["label"], **changed}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(values[name] for name in columns), strict=True))
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    data = {"data.train.path": write_table(folder / "own.csv"), "training.max_steps": 4}
    return small_routing.train(folder, **data, name="run").path


def refusal_message(folder: Path, path: str, **changes: Any) -> str:
    with pytest.raises(DataError) as caught:
        small_routing.train(folder, **{"data.train.path": path, **changes})
    assert caught.value.code == 3
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_the_order_of_columns_does_not_matter(run: Path, tmp_path: Path) -> None:
    saved = bottega.load(run)
    metrics = saved.evaluate(write_table(tmp_path / "own.csv", columns=["rule", *NAMES, "label"]))
    permuted = write_table(tmp_path / "permuted.csv", columns=["label", *reversed(NAMES), "rule"])
    assert saved.evaluate(permuted) == pytest.approx(metrics)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["other", *NAMES[1:], "label"], "has no column 'c0' and has an unknown column 'other'"),
        ([*NAMES[:-1], "label"], "has no column 'c7'; the inputs are 'c0'"),
        ([*NAMES, "other", "label"], "has an unknown column 'other'"),
    ],
)
def test_missing_and_unknown_columns_are_refused_by_name(
    run: Path, tmp_path: Path, columns: list[str], message: str
) -> None:
    path = write_table(tmp_path / "other.csv", columns=columns, other=np.ones(96))
    with pytest.raises(DataError) as caught:
        bottega.load(run).evaluate(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_unnamed_columns_are_refused_after_training_on_named_ones(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="has no column names; give it a header with the columns that this run was trained on: 'c0'"
    ):
        bottega.load(run).evaluate(small_routing.write_rows(tmp_path))


def test_a_rule_without_an_expert_is_refused_by_its_row(run: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path / "r5.csv", rule=[0, 1, 2, 4] * 24)
    with pytest.raises(DataError) as caught:
        bottega.load(run).evaluate(path)
    assert str(caught.value).startswith("r5.csv:5: has rule 4, but this run has 3 experts")


def test_a_column_of_text_is_left_out_and_logged(run: Path, tmp_path: Path) -> None:
    path = write_table(tmp_path / "city.csv", columns=["city", *NAMES, "rule", "label"], city=["Rome", ""] * 48)
    result = small_routing.train(tmp_path, **{"data.train.path": path, "training.max_steps": 1})
    assert "column 'city' is not numeric and is left out" in (result.path / "log.txt").read_text()
    assert bottega.load(result.path).workload.metadata.columns == tuple(NAMES)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", "own.csv, line 4: column 'c3' is 'abc', which is not a number"),
        ("nan", "own.csv, line 4: column 'c3' is nan, which is not finite; replace it, or remove the row"),
        ("-inf", "own.csv, line 4: column 'c3' is -inf, which is not finite"),
        ("1e300", "own.csv, line 4: column 'c3' is 1e+300, above the largest float32, 3.4e+38"),
    ],
)
def test_a_cell_that_is_not_a_finite_number_is_refused_by_line_and_column(
    tmp_path: Path, value: str, message: str
) -> None:
    cells = ["1"] * 96
    cells[2] = value
    assert message in refusal_message(tmp_path, write_table(tmp_path / "own.csv", c3=cells))


def test_label_columns_with_unusable_values_are_refused(tmp_path: Path) -> None:
    message = (
        "own.csv: 96 rows have 96 different labels, so this column is probably not the label; "
        "set data.train.label to the right one"
    )
    assert refusal_message(tmp_path, write_table(tmp_path / "own.csv", label=range(96))).endswith(message)
    message_of_one_class = refusal_message(tmp_path, write_table(tmp_path / "own.csv", label=[1] * 96))
    assert "are of the class '1'" in message_of_one_class
    assert "set data.train.label to another column" in message_of_one_class
    with pytest.raises(DataError, match=r"; raise data.num_samples$"):
        small_routing.train(
            tmp_path,
            **{"data.train.path": None, "data.train.kind": "synthetic", "data.num_samples": 2, "model.num_experts": 4},
        )


def test_predict_prints_class_expert_and_row(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_table(tmp_path / "new.csv", columns=["id", *reversed(NAMES)], id=range(96))
    assert cli.main(["predict", str(run), "--data", path, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["predictions"]
    assert rows == bottega.predict(run, data=path)
    assert [row["row"] for row in rows[:2]] == ["new.csv:2", "new.csv:3"]
    saved = bottega.load(run)
    with saved.engine.sampling() as models:
        probabilities, chosen = saved.workload.predict_with_experts(
            models, small_routing.make_rows(96)["x"], device=saved.engine.device
        )
    assert [row["predicted"] for row in rows] == [str(label) for label in probabilities.argmax(1)]
    np.testing.assert_allclose([row["probability"] for row in rows], probabilities.max(1), rtol=1e-5)
    assert [row["expert"] for row in rows] == chosen[:, 0].tolist()
    assert cli.main(["predict", str(run), "--data", path]) == 0
    assert capsys.readouterr().out.splitlines()[0].split("\t")[2:] == [f"e{chosen[0, 0]}", "new.csv:2"]
    for arguments, message in (
        ([], "give a table with --data FILE"),
        (["mistyped.csv"], "mistyped.csv is neither an existing file nor numbers such as 0.5,1,-2; give a table with"),
        (["0.5,1", path], "0.5,1 is a row of numbers, but other inputs are not; give a table"),
    ):
        assert cli.main(["predict", str(run), *arguments]) == 2
        assert message in capsys.readouterr().err
    bad = write_table(tmp_path / "bad.csv", columns=["other", *NAMES[1:]], other=np.ones(96))
    assert cli.main(["predict", str(run), "--data", bad]) == 3
    assert "has no column 'c0'" in capsys.readouterr().err


def test_the_log_shows_headline_metrics_and_the_file_has_all(run: Path) -> None:
    saved, lines = bottega.load(run), (run / "log.txt").read_text().splitlines()
    line = next(line for line in lines if "validation" in line)
    shown = ["loss", "accuracy", "load_entropy", "rule_information"]
    assert [name for name in saved.workload.metrics if f" {name} " in line] == shown
    record = next(row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "eval")
    assert set(saved.workload.metrics) <= set(record)


def test_headline_metrics_of_a_sequence_include_each_source() -> None:
    recipe = load_recipe(["routing/continual"]).recipe
    workload = RoutingWorkload.__new__(RoutingWorkload)
    workload.recipe = recipe  # type: ignore[assignment]
    names = get_source_names(recipe.data.sources or ())
    assert len(names) > 1
    assert {"accuracy", "forgetting", *(f"{name}/{recipe.evaluation.metric}" for name in names)} <= set(
        workload.headline
    )


def test_description_names_the_first_of_several_experts() -> None:
    counts, load = np.array([[3, 1], [0, 4]]), np.array([0.4, 0.6])
    fields: dict[str, Any] = {
        "accuracy": 0.5,
        "bayes_accuracy": None,
        "samples": "8 samples",
        "load": load,
        "firing_rate": None,
    }
    assert "mutual information of rule and expert)" in describe_routing(**fields, counts=counts, top_k=1)
    several = describe_routing(**fields, counts=counts, top_k=2)
    assert "mutual information of rule and the first of 2 experts)" in several
    assert several.count("the first of 2 experts") == 2


def test_formatted_fractions_add_up_to_one() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 7, 30):
        for _ in range(50):
            counts = rng.integers(0, 50, size)
            shown = [float(text) for text in format_fractions(counts)]
            assert round(sum(shown), 6) == (1 if counts.sum() else 0)
            np.testing.assert_allclose(shown, counts / max(1, counts.sum()), atol=0.0101)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"online": True, "training.num_epochs": 3},
            "training.num_epochs: a stream (data.online) is one pass over the data, got 3",
        ),
        (
            {"model.num_experts": 3},
            "model.num_experts: 3 experts, but model.routing_loss_weight 0.5 needs one for each",
        ),
        ({"data.num_rules": 5}, "needs one for each of the 5 rules; set it to 5, or the weight to 0"),
        ({"model.spike_threshold": None}, "set spike_threshold: 1.0, or plasticity: false"),
        ({"online": True, "data.online": False}, "conflicts with online at settings: false and true for data.online"),
    ],
)
def test_check_recipe_refuses_what_training_would_refuse(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_recipe(["routing", settings])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_any_number_of_experts_is_accepted_without_rules_or_routing_loss(tmp_path: Path) -> None:
    check_recipe(["routing", {"model.num_experts": 3, "model.routing_loss_weight": 0.0}])
    check_recipe(["routing", {"model.num_experts": 3, "data.train.path": write_table(tmp_path / "own.csv")}])
    check_recipe(["routing", {"online": True}])
