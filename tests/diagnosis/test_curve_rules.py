"""Rules about curves, rates, gradients and chance on constructed logs: just above and just below their thresholds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.core import checkpoint
from bottega.diagnosis import curves, gradients, rates
from bottega.run_files import logs
from recorded_run import FALLING, NUM_LOGS, apply_all, find, module, write_recorded_run


def test_healthy_log_has_no_findings(tmp_path: Path) -> None:
    diagnosis = apply_all(write_recorded_run(tmp_path / "run"))
    assert diagnosis.findings == ()


@pytest.mark.parametrize(("rise", "is_ill"), [(0.99, False), (1.01, True)])
def test_overfitting_needs_a_rise_of_the_validation_loss(tmp_path: Path, rise: float, is_ill: bool) -> None:
    last = 0.5 * (1 + rise * curves.MIN_OVERFITTING_RISE)
    run = write_recorded_run(tmp_path / "run", validation={"loss": [1.0, 0.5, last, last, last]})
    finding = find(run, "overfitting")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.steps == (160, 400)
        assert "rose from 0.5 to 0.5505" in finding.evidence


def test_overfitting_suggests_the_length_with_the_same_sum_of_learning_rates(tmp_path: Path) -> None:
    """The rate falls in a straight line, so 0.4 of the steps have 1 - 0.6² = 0.64 of the sum."""
    run = write_recorded_run(tmp_path / "run", validation={"loss": [1.0, 0.5, 0.9, 0.9, 0.9]})
    finding = find(run, "overfitting")
    assert finding is not None
    key, _, value = finding.override.partition("=")
    assert key == "training.max_steps"
    assert int(value) == pytest.approx(0.64 * 400, abs=6)


def test_overfitting_in_the_warm_up_suggests_no_fewer_steps_than_to_the_best_evaluation(tmp_path: Path) -> None:
    """At a rate that rises in a straight line from 0, the first fifth of the steps has a 25th of the sum."""
    run = write_recorded_run(
        tmp_path / "run", validation={"loss": [0.5, 0.9, 0.9, 0.9, 0.9]}, settings={"training.num_epochs": 5}
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "learning_rate": row["step"]} if row["kind"] == "train" else row for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    finding = find(run, "overfitting")
    assert finding is not None
    assert finding.override == "training.max_steps=80 training.num_epochs=null"


def test_overfitting_of_a_run_that_was_stopped_never_suggests_a_longer_one(tmp_path: Path) -> None:
    run = write_recorded_run(
        tmp_path / "run", validation={"loss": [1.0, 0.5, 0.9, 0.9, 0.9]}, final_rate=1.0, planned_steps=4000
    )
    finding = find(run, "overfitting")
    assert finding is not None
    assert int(finding.override.partition("=")[2]) == pytest.approx(0.4 * 400, abs=6)


@pytest.mark.parametrize(("last", "is_ill"), [(0.021, False), (0.025, True)])
def test_rise_near_zero_is_not_overfitting(tmp_path: Path, last: float, is_ill: bool) -> None:
    """A training loss that starts at 2.2 makes 0.022 the smallest rise that counts, here from 0.002."""
    validation = {"loss": [0.1, 0.002, *[0.002 + last] * 3]}
    losses = [*FALLING[:-5], *[1e-4] * 5]
    finding = find(write_recorded_run(tmp_path / "run", losses=losses, validation=validation), "overfitting")
    assert (finding is not None) == is_ill


def test_skipped_steps_are_not_divergence_unless_they_are_many(tmp_path: Path) -> None:
    for name, num_bad, is_ill in (("few", 2, False), ("many", 3, True)):
        losses: list[float | None] = [*FALLING]
        for index in range(num_bad):
            losses[10 + index] = None
        finding = find(write_recorded_run(tmp_path / name, losses=losses), "divergence")
        assert (finding is not None) == is_ill, name
        if finding is not None:
            assert finding.evidence == "the loss was not finite in 3 of 40 logged steps"


def test_skipped_steps_of_a_thinned_log_are_compared_with_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 of 40 steps are few, also if only 8 of the other 38 are in memory."""
    monkeypatch.setattr(logs, "MAX_BUFFERED_POINTS", 16)
    monkeypatch.setattr(logs, "MAX_READ_POINTS", 8)
    losses: list[float | None] = [*FALLING[:10], None, None, *FALLING[12:]]
    assert find(write_recorded_run(tmp_path / "run", losses=losses), "divergence") is None


def test_overconfidence_alone_is_not_overfitting(tmp_path: Path) -> None:
    """A loss that rises by a fifth is tolerated while the accuracy, the metric of the recipe, does not fall."""
    for name, last_accuracy, is_ill in (("equal", 0.80, False), ("worse", 0.70, True)):
        validation = {"loss": [1.0, 0.5, 0.6, 0.6, 0.6], "accuracy": [0.6, 0.8, 0.8, 0.8, last_accuracy]}
        run = write_recorded_run(
            tmp_path / name, validation=validation, settings={"evaluation.metric": "accuracy", "evaluation.mode": None}
        )
        assert (find(run, "overfitting") is not None) == is_ill, name


def test_rise_of_both_losses_is_not_overfitting(tmp_path: Path) -> None:
    losses = [*np.linspace(2, 0.4, 11), *[0.4] * 5, *[0.5] * 24]
    run = write_recorded_run(tmp_path / "run", losses=losses, validation={"loss": [1.0, 0.5, 0.6, 0.6, 0.6]})
    assert find(run, "overfitting") is None


def make_flat(level: float) -> list[float]:
    """Return a loss that starts at 2 and stays at `level` from the second log on."""
    return [2.0] + [level] * (NUM_LOGS - 1)


@pytest.mark.parametrize(
    ("level", "validation_loss", "ratio", "is_ill"),
    [
        (1.01, 1.0, 2e-3, True),
        (0.99, 1.0, 2e-3, False),  # half of the loss was fitted
        (1.01, 1.2, 2e-3, False),  # a gap: it memorises
        (1.01, 1.0, 1e-3, False),  # 400 steps of 0.1 % are too few to judge
    ],
)
def test_underfitting(tmp_path: Path, level: float, validation_loss: float, ratio: float, is_ill: bool) -> None:
    run = write_recorded_run(
        tmp_path / "run",
        losses=make_flat(level),
        validation={"loss": [validation_loss] * 5},
        modules={f"layers.{i}": module(update_ratio=ratio) for i in range(2)},
    )
    finding = find(run, "underfitting")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.override == "model.hidden_size=128"


@pytest.mark.parametrize(
    ("settings", "override"),
    [
        ({"training.weight_decay": 5.0}, "training.weight_decay=0.1"),
        ({"model.dropout": 0.8, "training.label_smoothing": 0.5}, "model.dropout=0.1 training.label_smoothing=0"),
        ({"training.optimizer.name": "sgd", "training.weight_decay": 0.05}, "training.weight_decay=0"),
        ({"training.freeze": ["backbone"]}, "training.freeze=null"),
        ({"model.hidden_size": None, "model.kind": "transformer"}, "model.hidden_size=512"),
        ({"model.hidden_size": 64, "model.kind": "cnn", "model.num_filters": 50}, "model.num_filters=200"),
        ({"task": "routing", "model.expert_size": 16}, "model.hidden_size=128 model.expert_size=64"),
    ],
)
def test_underfitting_blames_regularisation_before_width(
    tmp_path: Path, settings: dict[str, Any], override: str
) -> None:
    run = write_recorded_run(tmp_path / "run", losses=make_flat(1.5), validation={"loss": [1.5] * 5}, settings=settings)
    finding = find(run, "underfitting")
    assert finding is not None
    assert finding.override == override


def test_flat_loss_at_a_high_rate_is_a_plateau_and_not_underfitting(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path / "run", losses=make_flat(1.5), validation={"loss": [1.5] * 5}, final_rate=1.0)
    assert [finding.name for finding in apply_all(run).findings] == ["plateau"]


def test_minimum_of_a_generative_loss_is_not_known(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path / "run", losses=make_flat(1.5), settings={"task": "image"})
    assert "minimum of the loss of image is not known" in apply_all(run).not_checked["underfitting"]


@pytest.mark.parametrize(
    ("fall", "final_rate", "is_ill"),
    [
        (0.9 * curves.FLAT_FRACTION, 1.0, True),
        (1.1 * curves.FLAT_FRACTION, 1.0, False),  # still falling
        (0.9 * curves.FLAT_FRACTION, 0.29, False),  # the rate has decayed
    ],
)
def test_plateau(tmp_path: Path, fall: float, final_rate: float, is_ill: bool) -> None:
    losses = [2.0, *[1.0] * 19, *[1.0 - 2.0 * fall] * 20]
    run = write_recorded_run(
        tmp_path / "run",
        losses=losses,
        final_rate=final_rate,
        validation={"loss": [1.5, 1.1, 1.05, 1.05, 1.05]},
        settings={"training.scheduler.name": "constant"},
    )
    finding = find(run, "plateau")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.override == "training.scheduler.name=cosine"
        assert finding.steps == (210, 400)


def test_plateau_under_a_cosine_schedule_that_early_stopping_cut_has_no_override(tmp_path: Path) -> None:
    run = write_recorded_run(
        tmp_path / "run", losses=make_flat(0.5), validation={"loss": [0.5] * 5}, final_rate=0.8, planned_steps=1000
    )
    progress = {"step": 400, "total": 1000, "stop": "no better loss for 3 evaluations"}
    checkpoint.write(run / "checkpoints", step=400, files={}, progress=progress, fingerprint={})
    finding = find(run, "plateau")
    assert finding is not None
    assert finding.override is None


def test_plateau_is_not_found_while_the_validation_loss_falls_or_near_zero(tmp_path: Path) -> None:
    constant = {"training.scheduler.name": "constant"}
    falling = write_recorded_run(
        tmp_path / "falling",
        losses=make_flat(1.0),
        final_rate=1.0,
        validation={"loss": [1.5, 1.3, 1.1, 1.0, 0.9]},
        settings=constant,
    )
    assert find(falling, "plateau") is None
    converged = write_recorded_run(
        tmp_path / "converged",
        losses=make_flat(0.05),
        final_rate=1.0,
        validation={"loss": [0.2] * 5},
        settings=constant,
    )
    assert find(converged, "plateau") is None


STRAIGHT = tuple(np.linspace(2.0, 1.0, NUM_LOGS))


@pytest.mark.parametrize(
    ("losses", "final_rate", "validation", "is_ill"),
    [
        (STRAIGHT, 1.0, [1.9, 1.7, 1.5, 1.3, 1.1], True),
        (FALLING, 1.0, [1.5, 1.0, 0.6, 0.4, 0.3], False),
        (STRAIGHT, 0.0, [1.9, 1.7, 1.5, 1.3, 1.1], False),  # a completed decay
        (STRAIGHT, 1.0, [1.9, 1.4, 1.2, 1.2, 1.2], False),  # it falls on the training data alone
    ],
)
def test_slow_convergence(
    tmp_path: Path, losses: tuple[float, ...], final_rate: float, validation: list[float], is_ill: bool
) -> None:
    run = write_recorded_run(tmp_path / "run", losses=losses, final_rate=final_rate, validation={"loss": validation})
    finding = find(run, "slow-convergence")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.override == "training.max_steps=800"


def test_slow_convergence_with_small_updates_suggests_a_higher_rate(tmp_path: Path) -> None:
    run = write_recorded_run(
        tmp_path / "run",
        losses=STRAIGHT,
        final_rate=1.0,
        validation={"loss": [1.9, 1.7, 1.5, 1.3, 1.1]},
        modules={"layers.0": module(update_ratio=4e-4), "layers.1": module(update_ratio=4e-4)},
        settings={"training.scheduler.name": "constant"},
    )
    finding = find(run, "slow-convergence")
    assert finding is not None
    assert finding.override == "training.learning_rate=0.002 training.scheduler.name=cosine"


def test_a_run_in_training_is_not_judged_by_its_end(tmp_path: Path) -> None:
    run = write_recorded_run(
        tmp_path / "run",
        losses=STRAIGHT,
        final_rate=1.0,
        validation={"loss": [1.9, 1.7, 1.5, 1.3, 1.1]},
        planned_steps=1000,
    )
    reason = apply_all(run).not_checked["slow-convergence"]
    assert reason == "the run has 400 of 1,000 steps; this is judged at its end"
    progress = {"step": 400, "total": 1000, "stop": "no better loss for 3 evaluations"}
    checkpoint.write(run / "checkpoints", step=400, files={}, progress=progress, fingerprint={})
    assert find(run, "slow-convergence") is not None, "early stopping has ended it"


ROUGH = (1.5, *[1.0 + 0.1 * (index % 2) for index in range(1, NUM_LOGS)])

ROUGHER = (1.5, *[1.0 + 0.12 * (index % 2) for index in range(1, NUM_LOGS)])


@pytest.mark.parametrize(
    ("ratio", "losses", "is_ill"),
    [
        (1.01, ROUGH, False),  # 10 % of the level, not more
        (1.01, ROUGHER, True),
        (0.99, ROUGHER, False),
        (1.01, (1.0, 1.31, *[0.7] * 38), True),
        (1.01, (1.0, 1.29, *[0.7] * 38), False),
        (2.01, (1.0, 1.29, *[0.7] * 38), True),
    ],
)
def test_rate_too_high_needs_large_updates_and_an_unstable_loss(
    tmp_path: Path, ratio: float, losses: tuple[float, ...], is_ill: bool
) -> None:
    run = write_recorded_run(
        tmp_path / "run",
        losses=losses,
        final_rate=0.6,
        modules={f"layers.{i}": module(update_ratio=ratio * rates.HIGH_UPDATE_RATIO) for i in range(2)},
        settings={"training.learning_rate": 0.5},
    )
    finding = find(run, "learning-rate-too-high")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.override == "training.learning_rate=0.003"


@pytest.mark.parametrize(
    ("highest", "end", "is_ill"),
    [(1.01, 1.7, True), (0.99, 1.7, False), (1.01, 1.5, False)],  # 1.5: the loss fell by a quarter
)
def test_large_first_updates_without_progress_are_a_high_rate(
    tmp_path: Path, highest: float, end: float, is_ill: bool
) -> None:
    """The weights grow with the first updates, and all later ones are small beside them."""
    run = write_recorded_run(tmp_path / "run", losses=make_flat(end), settings={"training.learning_rate": 0.1})
    rows = (run / "modules.jsonl").read_text().splitlines(keepends=True)
    large = {f"layers.{i}": module(update_ratio=highest * rates.HIGHEST_UPDATE_RATIO) for i in range(2)}
    rows[0] = json.dumps({"step": 10, "kind": "modules", "samples": 10, "modules": large}) + "\n"
    (run / "modules.jsonl").write_text("".join(rows))
    finding = find(run, "learning-rate-too-high")
    assert (finding is not None) == is_ill
    assert finding is None or "by up to 8.1 %" in finding.evidence


def test_weights_that_shrink_by_their_decay_are_not_a_high_rate(tmp_path: Path) -> None:
    run = write_recorded_run(
        tmp_path / "run",
        losses=make_flat(1.7),
        validation={"loss": [1.7] * 5},
        modules={f"layers.{i}": module(update_ratio=0.09) for i in range(2)},
        settings={"training.learning_rate": 1e-3, "training.weight_decay": 100.0},
    )
    assert [finding.override for finding in apply_all(run).findings] == ["training.weight_decay=0.1"]


@pytest.mark.parametrize(("ratio", "end", "is_ill"), [(0.99, 1.81, True), (1.01, 1.81, False), (0.99, 1.79, False)])
def test_rate_too_low_needs_small_updates_and_a_small_fall(
    tmp_path: Path, ratio: float, end: float, is_ill: bool
) -> None:
    run = write_recorded_run(
        tmp_path / "run",
        losses=make_flat(end),
        modules={f"layers.{i}": module(update_ratio=ratio * rates.LOW_UPDATE_RATIO) for i in range(2)},
        settings={"training.learning_rate": 1e-5},
    )
    finding = find(run, "learning-rate-too-low")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.override == "training.learning_rate=0.0002"


@pytest.mark.parametrize(("factor", "num_rows", "is_ill"), [(1.01, 2, True), (0.99, 2, False), (1.01, 1, False)])
def test_exploding_gradients(tmp_path: Path, factor: float, num_rows: int, is_ill: bool) -> None:
    norms = [2.0] * (NUM_LOGS - num_rows) + [2.0 * factor * gradients.EXPLODING_FACTOR] * num_rows
    run = write_recorded_run(tmp_path / "run", norms=norms, settings={"training.max_grad_norm": None})
    finding = find(run, "exploding-gradients")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.override == "training.max_grad_norm=1.0"
        assert finding.steps == (390, 400)


def test_explosion_at_a_high_rate_suggests_a_lower_one_too(tmp_path: Path) -> None:
    norms = [2.0] * 20 + [1e6] * 20
    settings = {
        "training.max_grad_norm": None,
        "training.optimizer.name": "sgd",
        "training.learning_rate": 30.0,
    }
    finding = find(write_recorded_run(tmp_path / "run", norms=norms, settings=settings), "exploding-gradients")
    assert finding is not None
    assert finding.override == "training.max_grad_norm=1.0 training.learning_rate=0.1"


@pytest.mark.parametrize(("optimizer", "cause"), [("sgd", "exploding-gradients"), ("adamw", "divergence")])
def test_cause_of_a_divergence_depends_on_the_optimizer(tmp_path: Path, optimizer: str, cause: str) -> None:
    """The update of Adam does not grow with the gradient, so clipping would not help."""
    run = write_recorded_run(
        tmp_path / "run",
        losses=[2.0 * 1.5**index for index in range(NUM_LOGS)],
        norms=[1.5**index for index in range(NUM_LOGS)],
        validation={"loss": [2.0, 1e3, 1e4, 1e5, 1e6]},
        settings={"training.optimizer.name": optimizer, "training.max_grad_norm": None},
    )
    assert [finding.name for finding in apply_all(run).findings] == [cause]


@pytest.mark.parametrize(("ratio", "end", "is_ill"), [(0.99, 1.9, True), (1.01, 1.9, False), (0.99, 1.5, False)])
def test_vanishing_gradients(tmp_path: Path, ratio: float, end: float, is_ill: bool) -> None:
    modules = {
        "layers.0": module(gradient_norm=ratio * gradients.VANISHING_RATIO),
        "layers.1": module(gradient_norm=0.1),
        "norm": module(gradient_norm=1e-6),  # a vector, whose gradient is small in healthy runs too
        "head": module(gradient_norm=1.0),
    }
    run = write_recorded_run(tmp_path / "run", losses=make_flat(end), modules=modules)
    finding = find(run, "vanishing-gradients")
    assert (finding is not None) == is_ill
    if finding is not None:
        assert finding.override == "model.num_layers=2"
        assert "layers.0 was 0.0099, that of head 1" in finding.evidence


def test_accuracy_of_a_run_that_has_just_begun_is_not_judged(tmp_path: Path) -> None:
    run = write_recorded_run(tmp_path / "run", validation={"accuracy": [0.5, 0.5]}, planned_steps=10_000)
    assert apply_all(run).not_checked["metric-at-chance"].startswith("the run has 400 of 10,000 steps")


@pytest.mark.parametrize(("errors", "is_ill"), [(1.9, True), (2.1, False)])
def test_accuracy_within_two_standard_errors_of_the_largest_class_is_chance(
    tmp_path: Path, errors: float, is_ill: bool
) -> None:
    accuracy = 0.5 + errors * math.sqrt(0.25 / 400)
    run = write_recorded_run(
        tmp_path / "run", losses=make_flat(1.9), validation={"loss": [1.9] * 5, "accuracy": [accuracy] * 5}
    )
    finding = find(run, "metric-at-chance")
    assert (finding is not None) == is_ill
    assert finding is None or finding.override == "model.hidden_size=128"


def test_accuracy_that_no_classifier_could_exceed_is_not_checked(tmp_path: Path) -> None:
    """With 98 % of one class, 100 validation samples cannot show more than a guess, whatever the accuracy is."""
    run = write_recorded_run(
        tmp_path / "run",
        validation={"accuracy": [0.9, 1.0, 1.0]},
        data={"classes": {"a": 980, "b": 20}, "splits": {"train": 1000, "validation": 100}},
    )
    assert "cannot tell more from it" in apply_all(run).not_checked["metric-at-chance"]


def test_chance_is_that_of_the_validation_classes(tmp_path: Path) -> None:
    """The training data is balanced, and 0.8 is the share of the largest class of the validation data."""
    run = write_recorded_run(tmp_path / "run", validation={"accuracy": [0.8, 0.8, 0.8]})
    assert find(run, "metric-at-chance") is None
    (run / "evaluation" / "validation").mkdir(parents=True)
    per_class = {"a": {"support": 320, "recall": 1.0}, "b": {"support": 80, "recall": 0.0}}
    (run / "evaluation" / "validation" / "metrics.json").write_text(json.dumps({"per_class": per_class}))
    finding = find(run, "metric-at-chance")
    assert finding is not None
    assert "guessing gives 0.800" in finding.evidence


def test_classifier_that_ranks_well_is_not_at_chance(tmp_path: Path) -> None:
    for name, auroc, is_ill in (("guess", 0.59, True), ("ranks", 0.61, False)):
        validation = {"loss": [1.9] * 5, "accuracy": [0.5] * 5, "auroc": [auroc] * 5}
        run = write_recorded_run(tmp_path / name, losses=make_flat(1.9), validation=validation)
        assert (find(run, "metric-at-chance") is not None) == is_ill


@pytest.mark.parametrize(
    ("settings", "override"),
    [
        ({"training.learning_rate": 0.5}, "training.learning_rate=0.003"),
        ({"training.learning_rate": 0.5, "training.weight_decay": 10.0}, "training.weight_decay=0.1"),
        ({"training.freeze": ["backbone"]}, "training.freeze=null"),
        ({"model.hidden_size": None, "model.kind": "transformer"}, "model.hidden_size=512"),
        ({"model.hidden_size": 64, "model.kind": "cnn", "model.num_filters": 50}, "model.num_filters=200"),
        ({"task": "routing", "model.expert_size": 16}, "model.hidden_size=128 model.expert_size=64"),
    ],
)
def test_nothing_learned_at_chance_suggests_what_held_it_back(
    tmp_path: Path, settings: dict[str, Any], override: str
) -> None:
    validation = {"loss": [1.9] * 5, "accuracy": [0.5] * 5}
    run = write_recorded_run(tmp_path / "run", losses=make_flat(1.9), validation=validation, settings=settings)
    (finding,) = apply_all(run).findings
    assert (finding.name, finding.override) == ("metric-at-chance", override)


@pytest.mark.parametrize(
    ("settings", "override"),
    [
        ({"data.split.by": "hash"}, "data.split.by=stratified"),
        ({"data.split.by": "group"}, "data.split.seed=1"),
        ({"data.limit": 100}, "data.limit=null"),
        ({"task": "routing", "data.num_samples": 100}, "data.num_samples=400"),
        ({}, "data.split.seed=1"),
    ],
)
def test_memorised_data_at_chance_suggests_other_data(tmp_path: Path, settings: dict[str, Any], override: str) -> None:
    validation = {"loss": [1.0, 1.5, 2.0, 2.5, 3.0], "accuracy": [0.5] * 5}
    run = write_recorded_run(tmp_path / "run", validation=validation, settings=settings)
    assert [finding.name for finding in apply_all(run).findings] == ["metric-at-chance"], "not overfitting as well"
    assert find(run, "metric-at-chance").override == override  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "metric"),
    [
        ({"task": "recall", "data.num_values": 16}, "retrieval_accuracy"),
        ({"task": "align", "model.negatives": 15}, "accuracy"),
    ],
)
def test_chance_of_retrieval_and_alignment(tmp_path: Path, settings: dict[str, Any], metric: str) -> None:
    for name, value, is_ill in (("low", 0.07, True), ("high", 0.2, False)):
        validation = {"loss": [2.7] * 5, metric: [value] * 5}
        run = write_recorded_run(tmp_path / name, losses=make_flat(2.7), validation=validation, settings=settings)
        assert (find(run, "metric-at-chance") is not None) == is_ill
