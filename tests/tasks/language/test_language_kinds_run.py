"""Runs of every kind of language model: evaluation, generation, export, fine-tuning, adapters and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import bottega
import small_run
from bottega import cli
from bottega.core.errors import UsageError
from bottega.models.build import build_models
from bottega.tasks import registry
from bottega.tasks.recipes import check_recipe, load_recipe
from small_run import differing_tensors, read_tensors

NO_ATTENTION = dict.fromkeys(
    ("model.num_heads", "model.num_kv_heads", "model.head_size", "model.intermediate_size"), None
)
STATE_SPACE = {"model.state_size": 8, "model.ssm_head_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "moe": {"model.kind": "moe", "model.num_experts": 4, "model.balance": "bias"},
    "ssm": {"model.kind": "ssm", **STATE_SPACE, **NO_ATTENTION},
    "hybrid": {"model.kind": "hybrid", **STATE_SPACE, "model.attention_every": 2, "model.num_layers": 2},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run.write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    result = small_run.train(folder, text, name=request.param, **KINDS[request.param])
    bottega.load(result.path).export()
    return result


def test_evaluate_and_generate(run: Any) -> None:
    saved = bottega.load(run.path)
    metrics = saved.evaluate()
    assert metrics["loss"] > 0
    if run.path.name == "moe":
        assert {"load_entropy", "load_max", "load_min", "load/0", "load/3"} <= metrics.keys()
        rows = [row for row in run.history() if row["kind"] == "train"]
        assert all({"router_z", "load_entropy", "gate_entropy"} <= row.keys() for row in rows)
        biases = {k: v for k, v in read_tensors(run.path).items() if k.endswith("router.bias")}
        assert biases
        assert all(v.any() for v in biases.values()), "router biases are updated without a gradient"
    assert saved.generate(prompt="alpha", max_tokens=5) == saved.generate(prompt="alpha", max_tokens=5)


def test_export_names_its_library_and_can_be_fine_tuned(run: Any, text: Path, tmp_path: Path) -> None:
    final = run.path / "final"
    is_transformers_layout = run.path.name == "ssm"
    config = json.loads((final / "config.json").read_text())
    assert config["model_type"] == ("mamba2" if is_transformers_layout else "bottega-decoder")
    assert (
        f"library_name: {'transformers' if is_transformers_layout else 'bottega'}" in (final / "README.md").read_text()
    )
    dims = [key for key in small_run.SMALL if key.startswith("model.")]
    # The dimensions come from the exported model, not from the recipe.
    options = {**dict.fromkeys(dims, None), "model.from": str(run.path), "training.max_steps": 2, "evaluation.every": 1}
    recipe = load_recipe(["language/shakespeare", small_run.settings(tmp_path, text, **options)]).recipe
    built = build_models(registry.open_workload(recipe, progress=lambda stage, done, total: None).task, 0)[
        "model"
    ].state_dict()
    saved = bottega.load(run.path).model.state_dict()
    assert built.keys() == saved.keys()
    assert all(torch.equal(built[name], tensor) for name, tensor in saved.items())
    again = small_run.train(tmp_path, text, name="again", **options)
    assert again.step == 2


def test_model_keys_must_agree_with_the_base_model(run: Any, text: Path, tmp_path: Path) -> None:
    dims = dict.fromkeys([key for key in small_run.SMALL if key.startswith("model.")], None)
    wrong = {"moe": ("num_experts", 3), "ssm": ("state_size", 9), "hybrid": ("attention_every", 3)}
    key, value = wrong[run.path.name]
    with pytest.raises(UsageError, match=rf"model\.{key}: {value} differs from .* of model\.from; remove it"):
        small_run.train(tmp_path, text, **dims, **{"model.from": str(run.path), f"model.{key}": value})
    other = "ssm" if run.path.name != "ssm" else "moe"
    with pytest.raises(UsageError, match=r"model\.kind: \w+ differs from \w+ of model\.from"):
        small_run.train(tmp_path, text, **dims, **{"model.from": str(run.path), "model.kind": other})
    if run.path.name == "moe":
        with pytest.raises(UsageError, match=r"model\.balance: loss differs from bias of model\.from"):
            small_run.train(tmp_path, text, **dims, **{"model.from": str(run.path), "model.balance": "loss"})
        with pytest.raises(UsageError, match=r"model\.balance_weight: 0\.1, but balance: bias has no balancing loss"):
            small_run.train(tmp_path, text, **dims, **{"model.from": str(run.path), "model.balance_weight": 0.1})


REASONS = {"moe": "its experts are chosen with a bias (balance: bias)", "hybrid": "it has state spaces and attention"}


def test_export_explains_why_transformers_cannot_open_it(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    reason = REASONS.get(run.path.name)
    message = (
        "written in Bottega's own layout (bottega-decoder), which model.from reads; transformers has no class for it"
    )
    assert lines == ([f"{message}, because {reason}"] if reason is not None else [])


def test_the_export_folder_may_be_a_string(run: Any, tmp_path: Path) -> None:
    folder = bottega.load(run.path, device="cpu").export(str(tmp_path / "text"))
    assert folder == tmp_path / "text"
    assert (folder / "config.json").is_file()


def test_the_log_states_total_and_active_parameters(run: Any) -> None:
    shape = bottega.load(run.path, device="cpu").workload.shape
    log = (run.path / "log.txt").read_text()
    counts = f"{shape.num_parameters():,} parameters"
    if shape.experts is not None:
        counts += f", {shape.num_active_parameters():,} active per token"
    assert f"{counts}, cpu" in log
    assert (shape.num_parameters() > shape.num_active_parameters()) == (shape.experts is not None)


@pytest.mark.parametrize("technique", ["lora", "adapter"])
def test_lora_and_adapter_train(run: Any, text: Path, tmp_path: Path, technique: str) -> None:
    dims = dict.fromkeys([key for key in small_run.SMALL if key.startswith("model.")], None)
    options = {**dims, "model.from": str(run.path), "techniques": [{"name": technique}], "training.max_steps": 2}
    adapted = small_run.train(tmp_path, text, name="adapted", **options, **{"evaluation.every": 2})
    trained = {name.partition("/")[2] for name in read_tensors(adapted.path) if name.startswith("model.safetensors/")}
    assert any("lora" in name or "adapter" in name for name in trained)
    assert not any("router." in name or ".experts." in name for name in trained), "stacked experts are not adapted"
    if run.path.name == "moe":
        entropies = [row["load_entropy"] for row in adapted.history() if row["kind"] == "train"]
        assert len(set(entropies)) == len(entropies) == 2, "computed for each step, not from the running load"


def test_resume_is_bitwise_equal(text: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {**KINDS["moe"], "training.scheduler.name": "constant", "checkpoint.every": 3}
    uninterrupted = small_run.train(tmp_path / "a", text, name="run", **options, **{"training.max_steps": 6})
    small_run.train(tmp_path / "b", text, name="run", **options, **{"training.max_steps": 3})
    resumed = small_run.train(tmp_path / "b", text, name="run", **options, **{"training.max_steps": 6})
    assert differing_tensors(read_tensors(uninterrupted.path), read_tensors(resumed.path)) == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"num_experts": 4}, "model.num_experts: 4, but kind transformer has no experts; set model.kind: moe"),
        ({"kind": "ssm", "expert_size": 4}, "model.expert_size: 4, but kind ssm has no experts; set model.num_experts"),
        ({"kind": "moe", "state_size": 4}, "model.state_size: 4, but kind moe has no state space"),
        (
            {"kind": "moe", "activation": "relu2"},
            "model.activation: relu2, but experts have SwiGLU only; remove the key",
        ),
        ({"kind": "ssm", "activation": "relu2"}, "model.activation: relu2, but kind ssm has no MLP"),
        (
            {"from": "somewhere", "zero_init_residual": True},
            "model.zero_init_residual: true has no effect on weights that are loaded",
        ),
        ({"kind": "ssm", "value_embeddings": True}, "model.value_embeddings: True, but kind ssm has no attention"),
        ({"kind": "ssm", "num_heads": 4}, "model.num_heads: 4, but kind ssm has no attention; set it to null"),
        ({"kind": "ssm", "intermediate_size": 4}, "model.intermediate_size: 4, but kind ssm has no MLP"),
        ({"kind": "moe", "attention_every": 2}, "model.attention_every: 2, but kind moe does not alternate"),
        (
            {"kind": "hybrid", "attention_every": 5},
            "model.attention_every: 5, but then none of 4 layers has attention; use 4 at most, or use kind: ssm",
        ),
        (
            {"kind": "hybrid", "attention_every": 1},
            "model.attention_every: 1, but then no layer has a state space; use 2 or more, or kind: transformer",
        ),
        (
            {"kind": "moe", "balance": "bias", "balance_weight": 0.1},
            "model.balance_weight: 0.1, but balance: bias has no balancing loss; remove the key, or set model.balance",
        ),
        ({"kind": "moe", "balance": "none", "balance_weight": 0.0}, "model.balance_weight: 0.0, but balance: none has"),
        (
            {"kind": "moe", "num_experts": 2, "experts_per_token": 3},
            "model.experts_per_token: experts_per_token 3 is more",
        ),
        ({"kind": "moe", "expert_capacity": 0}, "model.expert_capacity: expected a number above 0"),
        ({"kind": "moe", "capacity_factor": 0.0}, "model.capacity_factor: expected a number above 0"),
        (
            {"kind": "moe", "capacity_factor": 1.0, "expert_capacity": 3},
            "model.expert_capacity: expert_capacity 3 and capacity_factor 1 both set",
        ),
        ({"kind": "ssm", "ssm_head_size": 7}, "model.ssm_head_size: ssm_head_size 7 does not divide the 256 channels"),
        (
            {"kind": "moe", "experts_every": 9},
            "model.experts_every: experts_every is 9, but then none of the 4 layers has experts",
        ),
    ],
)
def test_invalid_settings_of_a_kind_are_refused_by_key(model: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_recipe(["language", {f"model.{key}": value for key, value in model.items()}])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "model", [{"balance": "bias"}, {"balance": "none"}, {"balance": "loss", "balance_weight": 0.1}]
)
def test_consistent_balancing_settings_are_accepted(model: dict[str, Any]) -> None:
    check_recipe(["language", {"model.kind": "moe", **{f"model.{key}": value for key, value in model.items()}}])


def test_the_run_name_depends_on_keys_that_are_set_only() -> None:
    """New keys default to null, so that a run of an older recipe keeps its name."""
    recipe = load_recipe(["language"]).recipe
    keys = {key for key in recipe.results_key() if key.startswith("model.")}
    assert keys == {"model.kind", "model.size", "model.tie_embeddings"}
