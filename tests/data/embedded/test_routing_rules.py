"""Synthetic routing samples: the rules that label them, their Bayes accuracy, and how they are prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.analysis.data_report import describe_data, format_report
from bottega.core.errors import DataError, UsageError
from bottega.data.embedded.rules import (
    SAMPLES_PER_BLOCK,
    SAMPLES_PER_SPLIT,
    RuleOptions,
    compute_bayes_accuracy,
    compute_label_posterior,
    compute_rule_posterior,
    draw_samples,
    get_rule_family,
)
from bottega.data.numbers.config import MAX_RULES, RoutingData
from bottega.data.order.episodes import Episodes, group_by_label, group_by_source
from bottega.data.order.interleaved import Interleaved
from bottega.data.order.sequential import Sequential
from bottega.data.prepare.media import prepare_vectors
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.samples import open_media_source
from bottega.run.prepare import open_preview
from bottega.tasks.recipes import load_recipe
from bottega.tasks.routing.config import RoutingRecipe
from operations import count_operations

OPTIONS = [
    RuleOptions(),
    RuleOptions(difficulty="hard"),
    RuleOptions(separation=2.5, label_noise=0.2, num_inputs=20),
    RuleOptions(num_rules=7, num_labels=3, num_inputs=40, separation=3.0, difficulty="hard", rule_seed=5),
    RuleOptions(num_rules=1, num_labels=2, num_inputs=12, separation=3.0, label_noise=0.0),
]
OPTION_IDS = [f"{options.difficulty}-{options.num_rules}-{options.separation:g}" for options in OPTIONS]


def quiet(stage: str, done: int, total: int) -> None: ...


def build_recipe(**data: Any) -> RoutingRecipe:
    recipe = load_recipe([{"task": "routing", "training": {"max_steps": 1}, "data": data}]).recipe
    assert isinstance(recipe, RoutingRecipe)
    return recipe


def prepare_rules(**data: Any) -> PreparedData:
    return prepare_vectors(build_recipe(**data).data, progress=quiet)


# The rules


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_bayes_accuracy_matches_the_posterior(options: RuleOptions) -> None:
    """Within four standard errors of 200,000 samples, for the mean of the largest posterior and its calibration."""
    samples = draw_samples(options, 17, 200_000)
    posterior = compute_label_posterior(options, samples["x"])
    np.testing.assert_allclose(posterior.sum(axis=1), 1.0, atol=1e-12)
    best, is_right = posterior.max(axis=1), posterior.argmax(axis=1) == samples["label"]
    error = 4 * np.sqrt((best * (1 - best)).mean() / len(best))
    assert abs(is_right.mean() - best.mean()) < error
    assert abs(compute_bayes_accuracy(options) - best.mean()) < error
    for low, high in ((0.0, 0.5), (0.5, 0.7), (0.7, 0.9)):  # also for ambiguous samples
        selected = (best >= low) & (best < high)
        if selected.sum() > 500:
            assert abs(is_right[selected].mean() - best[selected].mean()) < 4 * 0.5 / np.sqrt(selected.sum())


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_hiding_the_gate_or_the_content_lowers_accuracy(options: RuleOptions) -> None:
    """Without the gate inputs or the content inputs, the best prediction is worse than with all inputs."""
    samples = draw_samples(options, 0, 40_000)
    x, label = samples["x"], samples["label"]
    full_accuracy = (compute_label_posterior(options, x).argmax(axis=1) == label).mean()
    for hidden in (slice(0, options.gate_inputs), slice(options.gate_inputs, None)):
        if options.num_rules == 1 and hidden.start == 0:
            continue  # a single rule needs no gate
        masked = x.copy()
        masked[:, hidden] = 0
        assert (compute_label_posterior(options, masked).argmax(axis=1) == label).mean() < full_accuracy - 0.05


def test_rules_are_distinct_and_give_different_labels() -> None:
    for options in (
        *OPTIONS,
        RuleOptions(num_rules=MAX_RULES, num_labels=2),
        RuleOptions(num_rules=MAX_RULES, num_inputs=200),
    ):
        labels = get_rule_family(options).labels
        assert labels.shape == (options.num_rules, options.num_cells)
        assert len(np.unique(labels, axis=0)) == options.num_rules
        assert all(len(np.unique(row)) == options.num_labels for row in labels)
        first = labels[: options.num_labels]
        for cell in range(options.num_cells):  # each of these rules gives the cell a different label
            assert len(np.unique(first[:, cell])) == len(first)


def test_hard_rules_are_not_linearly_separable() -> None:
    """A linear classifier of one rule is far below the Bayes accuracy for hard rules, and near it for plain ones."""

    def linear_accuracy(options: RuleOptions) -> float:
        samples = draw_samples(options, 0, 30_000)
        selected = samples["rule"] == 0
        x = np.c_[samples["x"][selected].astype(np.float64), np.ones(selected.sum())]
        target = np.eye(options.num_labels)[samples["label"][selected]]
        half = len(x) // 2
        weights = np.linalg.lstsq(x[:half], target[:half], rcond=None)[0]
        return float(((x[half:] @ weights).argmax(axis=1) == samples["label"][selected][half:]).mean())

    assert linear_accuracy(RuleOptions()) > compute_bayes_accuracy(RuleOptions()) - 0.05
    hard = RuleOptions(difficulty="hard")
    assert linear_accuracy(hard) < compute_bayes_accuracy(hard) - 0.3


def test_rule_overlap_decreases_with_separation() -> None:
    accuracies = []
    for separation in (1.0, 2.0, 4.0, 8.0):
        options = RuleOptions(separation=separation)
        samples = draw_samples(options, 0, 20_000)
        posterior = compute_rule_posterior(options, samples["x"])
        accuracies.append(float((posterior.argmax(axis=1) == samples["rule"]).mean()))
        gates = get_rule_family(options).gates
        distances = np.linalg.norm(gates[:, None] - gates[None], axis=-1)[~np.eye(4, dtype=bool)]
        np.testing.assert_allclose(distances, separation, atol=1e-9)
    assert accuracies == sorted(accuracies)
    assert accuracies[0] < 0.6
    assert accuracies[-1] > 0.999


def test_a_sample_is_a_function_of_the_seed_and_its_index() -> None:
    options = RuleOptions(num_inputs=16)
    samples = draw_samples(options, 0, 3 * SAMPLES_PER_BLOCK)
    for first, count in ((0, 1), (SAMPLES_PER_BLOCK - 3, 7), (1500, 1000)):
        for name, values in draw_samples(options, first, count).items():
            np.testing.assert_array_equal(values, samples[name][first : first + count])
    assert {name: values.dtype.str for name, values in samples.items()} == {"x": "<f4", "label": "<i4", "rule": "<i4"}
    assert len(np.unique(draw_samples(options, SAMPLES_PER_SPLIT, SAMPLES_PER_BLOCK)["x"][:, 0])) > 500
    assert not np.isin(draw_samples(options, SAMPLES_PER_SPLIT, 50)["x"][:, 0], samples["x"][:50, 0]).all()
    for other in (RuleOptions(num_inputs=16, rule_seed=1), RuleOptions(num_inputs=16, rule=1)):
        assert not np.array_equal(draw_samples(other, 0, 10)["x"], samples["x"][:10])
        assert not np.array_equal(get_rule_family(other).labels, get_rule_family(options).labels)
        assert not np.array_equal(get_rule_family(other).gates, get_rule_family(options).gates)
        # Families of one seed use the same content cells, so that features learned for one family transfer to the next.
        assert np.array_equal(get_rule_family(other).cells, get_rule_family(options).cells) == (other.rule_seed == 0)
    # The last bits of a product differ between processors, and must not be in the data.
    assert (np.rint(samples["x"] * 1024) == samples["x"] * 1024).all()


# Prepared data


def test_prepared_data_records_rules_classes_and_bayes_accuracy() -> None:
    prepared = prepare_rules(num_samples=300, num_inputs=20, test={"num_samples": 120})
    assert {name: counts["rows"] for name, counts in prepared.tables.items()} == {
        "test": 120,
        "train": 240,
        "validation": 60,
    }
    assert prepared.metadata["num_rules"] == 4
    assert prepared.metadata["classes"] == ["0", "1", "2", "3"]
    options = RuleOptions(num_inputs=20)
    for table, accuracy in prepared.metadata["bayes_accuracy"].items():
        x = prepared.table(table).values("x").reshape(-1, 20)
        assert accuracy == pytest.approx(compute_label_posterior(options, x).max(axis=1).mean(), abs=1e-5)
    report = describe_data(open_preview(prepared))
    assert sum(report["rules"]["train"].values()) == 240
    text = format_report({**report, "examples": [], "pictures": []})
    assert "rules       4" in text
    assert "accuracy of the best possible classifier" in text
    assert set(report["duplicates"]) >= {"train", "test", "train and test", "train and validation"}
    assert set(report["duplicates"].values()) == {0}  # no sample is in two tables


def test_a_batch_has_inputs_label_and_rule() -> None:
    recipe = build_recipe(num_samples=100, num_inputs=20)
    prepared = prepare_vectors(recipe.data, progress=quiet)
    rows = open_media_source(recipe, prepared, "train", is_training=True).rows(np.arange(7), np.zeros(7, np.int64))
    forms = {name: (value.dtype.str, value.shape) for name, value in rows.items()}
    assert forms == {"x": ("<f4", (7, 20)), "label": ("<i4", (7,)), "rule": ("<i4", (7,))}
    raw = draw_samples(RuleOptions(num_inputs=20), 0, 100)
    indices = [int(np.flatnonzero((raw["x"] == x).all(axis=1))[0]) for x in rows["x"]]
    np.testing.assert_array_equal(raw["label"][indices], rows["label"])
    np.testing.assert_array_equal(raw["rule"][indices], rows["rule"])


def test_samples_are_drawn_by_the_block() -> None:
    options = RuleOptions(num_inputs=20, rule_seed=77)
    few, many = (count_operations(lambda n=n: draw_samples(options, 0, n * SAMPLES_PER_BLOCK)) for n in (1, 9))
    assert many - few < 8 * 200
    assert len(draw_samples(options, 0, 70_000)["label"]) == 70_000


SEQUENCE: dict[str, Any] = {
    "sources": [{"rule": 1}, {"rule": 2, "num_samples": 60}],
    "num_samples": 100,
    "num_inputs": 16,
}


def test_sequence_of_rule_families_is_evaluated_per_family() -> None:
    prepared = prepare_rules(**SEQUENCE, mixture="sequence", validation={"split": 0.25}, test={"num_samples": 30})
    assert prepared.metadata["by_source"]["test"] == [30, 30]
    assert sum(prepared.metadata["by_source"]["validation"]) == 40
    x = prepared.table("test").values("x").reshape(-1, 16)
    for rule, inputs in ((1, x[:30]), (2, x[30:])):
        expected = draw_samples(
            RuleOptions(num_inputs=16, rule=rule), 2 * SAMPLES_PER_SPLIT + (rule - 1) * (SAMPLES_PER_SPLIT >> 10), 30
        )["x"]
        np.testing.assert_array_equal(inputs, expected)
    order = Sequential((5, 3), seed=0)
    assert order.size == 8  # sources of the same form can be ordered sequentially


def test_each_rule_family_is_one_task() -> None:
    recipe = build_recipe(**SEQUENCE, validation={"rules": [7, 8, 9], "num_samples": 40})
    prepared = prepare_vectors(recipe.data, progress=quiet)
    held_out = Interleaved(
        open_media_source(recipe, prepared, "validation", is_training=False),
        prepared.metadata["by_source"]["validation"],
        name="x",
    )
    tasks = group_by_source(held_out)
    assert tasks is not None
    assert np.bincount(tasks).tolist() == [40, 40, 40]
    episodes = Episodes(held_out, tasks, shots=4, queries=6, length=12, seed=0)
    for number in range(12):
        drawn = episodes.draw(number, 0)
        assert len(set(tasks[np.r_[drawn.support, drawn.query]])) == 1
    rows = episodes.rows(np.arange(3), np.zeros(3, np.int64))
    assert rows["support"]["x"].shape == (3, 4, 16)
    assert rows["query"]["rule"].shape == (3, 6)
    assert group_by_label(held_out) is not None


# Rows from a user's file


def write_rows(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["rule", "expert"])
def test_rule_column_is_the_correct_expert(tmp_path: Path, name: str) -> None:
    file = write_rows(tmp_path / "rows.csv", f"a,b,{name},label", "1,2,0,x", "3,4,2,y", "5,6,1,x", "7,8,2,y")
    recipe = build_recipe(train={"path": str(file)}, validation=None)
    prepared = prepare_vectors(recipe.data, progress=quiet)
    assert prepared.metadata["num_rules"] == 3
    assert "bayes_accuracy" not in prepared.metadata
    rows = open_media_source(recipe, prepared, "train", is_training=True).rows(np.arange(4), np.zeros(4, np.int64))
    np.testing.assert_array_equal(rows["x"], [[1, 2], [3, 4], [5, 6], [7, 8]])
    np.testing.assert_array_equal(rows["rule"], [0, 2, 1, 2])


def test_rows_without_a_rule_column_have_no_rule(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.csv", "a,b,label", "1,2,x", "3,4,y")
    recipe = build_recipe(train={"path": str(file)}, validation=None)
    prepared = prepare_vectors(recipe.data, progress=quiet)
    assert "num_rules" not in prepared.metadata
    rows = open_media_source(recipe, prepared, "train", is_training=True).rows(np.arange(2), np.zeros(2, np.int64))
    assert set(rows) == {"x", "label"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("64", "column 'rule' is 64; expected the index of the correct expert, from 0 to 63"),
        ("-1", "'rule' is -1"),
        ("0.5", "rename the column if it is an input"),
        ("left", "'rule' is left"),
        ("", "has no rule, but other rows have one; fill in all rows"),
    ],
)
def test_invalid_rule_value_is_refused(tmp_path: Path, value: str, message: str) -> None:
    file = write_rows(tmp_path / "rows.csv", "a,rule,label", "1,0,x", f"2,{value},y")
    with pytest.raises(DataError, match=r"rows\.csv") as caught:
        prepare_rules(train={"path": str(file)}, validation=None)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"num_rules": 0}, "data.num_rules: expected a number above 0, got 0"),
        ({"num_rules": 65}, "data.num_rules: expected at most 64, got 65"),
        ({"num_labels": 1}, "data.num_labels: expected at least 2, got 1"),
        ({"num_inputs": 11}, "num_inputs: 11 is too small for 4 rules and 4 labels (plain); use 12 or more"),
        ({"num_inputs": 5, "difficulty": "hard"}, "use 6 or more"),
        (
            {"label_noise": 0.75},
            "label_noise: 0.75 makes the correct label no more frequent than any other of 4; use less",
        ),
        ({"train": {"kind": "synthetic", "path": "x.csv"}}, "synthetic data is generated, not read"),
        ({"train": {"path": "x.csv", "rule": 3}}, "rule: applies to synthetic data only, and this source is a file"),
        ({"replay": {"kind": "synthetic"}}, "replay: must not be synthetic"),
        ({**SEQUENCE, "mixture": "sequence", "validation": {"rules": [3]}}, "validation.rules: with mixture: sequence"),
        ({"separation": 0}, "data.separation: expected a number above 0, got 0"),
    ],
)
def test_invalid_rule_options_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_recipe(**data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_suggested_minimum_of_inputs_is_accepted() -> None:
    for difficulty in ("plain", "hard"):
        for rules, labels in ((4, 4), (MAX_RULES, 2), (1, MAX_RULES)):
            with pytest.raises(ValueError, match="or more") as caught:
                RoutingData(num_inputs=1, num_rules=rules, num_labels=labels, difficulty=difficulty)
            min_inputs = int(str(caught.value).split("use ")[1].split()[0])
            options = RuleOptions(num_inputs=min_inputs, num_rules=rules, num_labels=labels, difficulty=difficulty)
            assert draw_samples(options, 0, 5)["x"].shape == (5, min_inputs)
            assert options.num_inputs - options.gate_inputs > 0
