"""A run of the routing task from its rows to its export, and the settings and data it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_routing
from bottega.core.errors import BottegaError, DataError, UsageError
from bottega.models.build import build_models
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.models.multitask import find_shared_layers
from bottega.models.routing.torch import RoutingNet
from bottega.models.ssm.config import SSMShape
from bottega.tasks import registry
from bottega.tasks.recipes import check_recipe, load_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("routing")
    schedule = {"training.max_steps": 150, "training.batch_size": 32, "training.learning_rate": 5e-3}
    spiking = {**small_routing.SPIKING, "model.router": "linear", "model.hidden_size": 32}
    data = {"data.train.path": str(small_routing.write_rows(folder, "many.npz", count=600))}
    cadences = {"samples.every": 150, "evaluation.every": 150}
    return small_routing.train(folder, **schedule, **spiking, **data, **cadences, name="run")


def open_workload(folder: Path, **changes: Any) -> Any:
    recipe = load_recipe(["routing", small_routing.settings(folder, **changes)]).recipe
    return registry.open_workload(recipe, progress=lambda stage, done, total: None)


# Runs, exports and fine-tuning


def test_training_learns_the_rules_and_writes_samples(run: Any) -> None:
    metrics = run.metrics
    assert metrics["accuracy"] > 0.8
    assert metrics["rule_information"] > 0.9
    assert metrics["load_entropy"] > 0.95
    assert sum(metrics[f"load/{expert}"] for expert in range(3)) == pytest.approx(1)
    assert 0 < metrics["firing_rate"] < 1
    assert 0 <= metrics["dead"] < 0.5
    text = (run.path / "samples" / "step-00000150" / "00.txt").read_text()
    for word in ("accuracy", "load entropy", "information", "firing rate"):
        assert word in text
    for name in ("experts.png", "spikes.png"):
        assert (run.path / "samples" / "step-00000150" / name).read_bytes().startswith(b"\x89PNG")


def test_evaluate_repeats_the_metrics_of_training_and_accepts_new_rows(run: Any, tmp_path: Path) -> None:
    again = bottega.load(run.path, checkpoint="last").evaluate()
    assert {name: again[name] for name in run.metrics} == pytest.approx(run.metrics)
    new_rows = small_routing.write_rows(tmp_path, count=300, seed=9)
    metrics = bottega.load(run.path).evaluate(new_rows)
    assert metrics["accuracy"] > 0.75
    without_rules = bottega.load(run.path).evaluate(
        small_routing.write_rows(tmp_path, "blind.npz", count=300, seed=9, without=("rule",))
    )
    assert without_rules["accuracy"] == metrics["accuracy"]
    assert "rule_information" not in without_rules


def test_rows_of_other_widths_and_labels_are_refused(run: Any, tmp_path: Path) -> None:
    saved, rows = bottega.load(run.path), small_routing.make_rows(30)
    np.savez(tmp_path / "wide.npz", x=np.hstack([rows["x"]] * 2), label=rows["label"])
    with pytest.raises(DataError, match=r"wide.npz: its rows have 16 numbers, but this run was trained on rows of 8"):
        saved.evaluate(tmp_path / "wide.npz")
    np.savez(tmp_path / "odd.npz", x=rows["x"], label=np.where(rows["label"] > 0, 7, 0))
    with pytest.raises(DataError, match="7"):
        saved.evaluate(tmp_path / "odd.npz")


def test_training_can_start_from_an_export(run: Any, tmp_path: Path) -> None:
    saved = bottega.load(run.path)
    folder = saved.export(tmp_path / "exported")
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "bottega-routing"
    sizes = {**small_routing.SPIKING, "model.router": "linear", "model.hidden_size": 32, "model.from": str(folder)}
    workload = open_workload(tmp_path, **sizes)
    built = build_models(workload.task, 7)["model"].eval()
    for name, value in saved.model.state_dict().items():
        assert torch.equal(built.state_dict()[name], value), name
    x = torch.from_numpy(small_routing.make_rows(20)["x"])
    saved.model.eval()
    assert torch.equal(built(x).logits, saved.model(x).logits), "inputs are standardised as in the exported run"
    with pytest.raises(UsageError, match=r"model.from: .* has hidden_size 32 \(here 16\); set model.hidden_size=32"):
        open_workload(tmp_path, **{**sizes, "model.hidden_size": 16})
    with pytest.raises(UsageError, match="is not an exported routing model"):
        open_workload(tmp_path, **{**sizes, "model.from": str(run.path / "processor")})


def test_fine_tuning_may_change_dropout_capacity_and_balance(run: Any, tmp_path: Path) -> None:
    """No weight depends on expert dropout, on the capacity, or on the load balancing method."""
    folder = bottega.load(run.path).export(tmp_path / "exported")
    sizes = {**small_routing.SPIKING, "model.router": "linear", "model.hidden_size": 32, "model.from": str(folder)}
    for changes in (
        {"model.dropout": 0.1, "model.expert_dropout": 0.5},
        {"model.capacity_factor": 1.5, "model.balance": "bias"},
        {"model.expert_capacity": 9, "model.balance": "none"},
    ):
        build_models(open_workload(tmp_path, **sizes, **changes).task, 0)
    dropped = small_routing.train(tmp_path, **sizes, **{"model.expert_dropout": 0.5, "training.max_steps": 2})
    assert "experts.router.absent" in bottega.load(dropped.path).model.state_dict()
    again = bottega.load(dropped.path).export(tmp_path / "again")
    build_models(open_workload(tmp_path, **{**sizes, "model.from": str(again)}).task, 0)
    biased = small_routing.train(tmp_path, **sizes, **{"model.balance": "bias", "training.max_steps": 2})
    again = bottega.load(biased.path).export(tmp_path / "biased")
    with pytest.raises(UsageError, match=r"has balance \'bias\' \(here \'loss\'\); set model.balance=bias"):
        open_workload(tmp_path, **{**sizes, "model.from": str(again)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.top_k": 2}, "has top_k 1 (here 2); set model.top_k=1"),
        ({"model.shared_experts": 1}, "has shared_experts 0 (here 1); set model.shared_experts=0"),
        ({"model.spike_threshold": 0.5}, "has spike_threshold 1.0 (here 0.5); set model.spike_threshold=1.0"),
        ({"model.router": "spiking"}, "has router 'linear' (here 'spiking'); set model.router=linear"),
        ({"model.num_layers": 1}, "has num_layers 2 (here 1); set model.num_layers=2"),
    ],
)
def test_a_base_model_of_another_shape_is_refused_by_field(
    run: Any, changes: Any, message: str, tmp_path: Path
) -> None:
    sizes = {**small_routing.SPIKING, "model.router": "linear", "model.hidden_size": 32}
    with pytest.raises(UsageError) as caught:
        open_workload(
            tmp_path, **{**sizes, "model.from": str(bottega.load(run.path).export(tmp_path / "out")), **changes}
        )
    assert str(caught.value).endswith(message)


def test_a_base_model_with_other_labels_is_refused(run: Any, tmp_path: Path) -> None:
    rows = small_routing.make_rows(96)
    np.savez(tmp_path / "named.npz", **{**rows, "label": np.array(["cold", "warm"])[rows["label"]]})
    sizes = {**small_routing.SPIKING, "model.router": "linear", "model.hidden_size": 32}
    start = {"model.from": str(bottega.load(run.path).export(tmp_path / "out"))}
    with pytest.raises(UsageError, match="has label 0 where the data here has cold; use data with the same labels"):
        open_workload(tmp_path, **sizes, **start, **{"data.train.path": str(tmp_path / "named.npz")})


def test_predict_returns_class_probabilities(run: Any) -> None:
    saved, rows = bottega.load(run.path), small_routing.make_rows(300, seed=5)
    with saved.engine.sampling() as models:
        probabilities = saved.workload.predict(models, rows["x"], device=saved.engine.device, batch_size=64)
        with pytest.raises(UsageError, match=r"expected an array of shape \(n, 8\)"):
            saved.workload.predict(models, rows["x"][:, :3], device=saved.engine.device)
    np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)
    assert (probabilities.argmax(1) == rows["label"]).mean() > 0.75


def test_columns_of_any_scale_are_learned(tmp_path: Path) -> None:
    """The columns range over eight orders of magnitude, and one is constant."""
    rows = small_routing.make_rows(120)
    rows["x"] = rows["x"] * np.logspace(-4, 4, 8, dtype=np.float32)
    rows["x"] = np.hstack([rows["x"], np.full((120, 1), 5, np.float32)])
    np.savez(tmp_path / "wild.npz", **rows)
    settings = {**small_routing.settings(tmp_path), "data.train.path": str(tmp_path / "wild.npz")}
    schedule = {"training.max_steps": 100, "training.batch_size": 32, "training.learning_rate": 1e-2}
    assert bottega.train("routing", {**settings, **schedule}).metrics["accuracy"] > 0.75


def test_top_k_capacity_and_expert_dropout_train_together(tmp_path: Path) -> None:
    options = {"model.top_k": 2, "model.capacity_factor": 0.5, "model.expert_dropout": 0.3, "model.balance": "bias"}
    changes = {"model.shared_experts": 1, "model.z_weight": 1e-3, "training.label_smoothing": 0.1}
    result = small_routing.train(tmp_path, **options, **changes)
    steps = [row for row in result.history() if row["kind"] == "train"]
    assert any(row["drop_rate"] > 0 for row in steps)
    assert result.metrics["loss"] < 2


# Shared layers


def test_a_state_space_language_model_shares_the_trunk(tmp_path: Path) -> None:
    workload = open_workload(tmp_path, **{"model.trunk": "state_space", "model.num_layers": 2, "model.token_size": 3})
    ssm = workload.metadata.shape.ssm
    assert ssm == SSMShape(hidden_size=16, head_size=32, norm_epsilon=1e-6)
    text = TransformerShape(
        num_layers=2, hidden_size=16, intermediate_size=0, vocab_size=32, context=64, mixers=("ssm", "ssm"), ssm=ssm
    )
    model = build_models(workload.task, 0)["model"]
    assert isinstance(model, RoutingNet)
    plan = find_shared_layers({"routing": model, "text": Transformer(text)})
    own = {name.removeprefix("model.").rpartition(".")[0] for name, _ in model.model.layers[:2].named_parameters()}
    assert {f"layers.{name}" for name in own} == set(plan)


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.top_k": 4}, "top_k 4 is more than num_experts 3; lower top_k"),
        ({"model.expert_capacity": 0}, "model.expert_capacity: expected a number above 0, got 0"),
        ({"model.capacity_factor": 0.0}, "model.capacity_factor: expected a number above 0, got 0"),
        ({"model.capacity_factor": 1.0, "model.expert_capacity": 4}, "keep one"),
        ({"model.leak": -0.1}, "model.leak: expected at least 0, got -0.1"),
        ({"model.leak": 1.5}, "model.leak: expected at most 1, got 1.5"),
        ({"model.time_steps": 0}, "model.time_steps: expected a number above 0, got 0"),
        ({"model.spike_threshold": 0.0}, "model.spike_threshold: expected a number above 0, got 0"),
        ({"model.refractory": -1}, "model.refractory: expected at least 0, got -1"),
        ({"model.plasticity": True}, "plasticity needs spiking units; set spike_threshold"),
        ({"model.spike_threshold": 1.0, "model.num_layers": 0}, "num_layers 0 leaves no spiking units"),
        ({"model.firing_rate": 0.2}, "firing_rate 0.2 needs spiking units"),
        ({"model.trunk": "state_space", "model.num_layers": 0}, "state_space needs at least one layer"),
        ({"model.num_experts": 1}, "routing_loss_weight needs several experts"),
    ],
)
def test_invalid_model_settings_are_refused_by_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        check_recipe(["routing", small_routing.settings(tmp_path, **changes)])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("without", "changes", "message", "code"),
    [
        (("rule",), {}, "model.routing_loss_weight: 0.5 needs the correct expert of each row", 2),
        (
            (),
            {"model.num_experts": 5},
            "model.num_experts: 5 experts, but model.routing_loss_weight 0.5 needs one for each of the 3 rules",
            2,
        ),
        (("label",), {}, "rows.npz: its rows have no labels", 3),
        ((), {"model.trunk": "state_space", "model.ssm_head_size": 7}, "model.ssm_head_size 7 does not divide", 2),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused(
    without: tuple[str, ...], changes: dict[str, Any], message: str, code: int, tmp_path: Path
) -> None:
    settings = {**small_routing.settings(tmp_path, **changes)}
    small_routing.write_rows(tmp_path, without=without)
    with pytest.raises(BottegaError) as caught:
        registry.open_workload(load_recipe(["routing", settings]).recipe, progress=lambda stage, done, total: None)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.code == code
