"""Option names of other guides are accepted, or an error gives the name used here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bottega
import small_routing
from bottega import cli
from bottega.config.yaml_io import parse_yaml
from bottega.core.errors import UsageError
from bottega.engines.torch.backend import TorchBackend
from bottega.run.resume import resolve_checkpoint_path
from bottega.run.setting_notes import list_unused_settings
from bottega.tasks.recipes import check_recipe, load_recipe
from config.guide_blocks import PERSONALIZE
from small_run import train, train_arguments, write_text

CONFIGURATION = {
    "max_epochs": 20,
    "batch_size": 64,
    "learning_rate": 0.001,
    "optimizer": "adamw",
    "weight_decay": 0.01,
    "gradient_clipping": 1.0,
    "scheduler": "cosine",
    "warmup_steps": 1000,
    "mixed_precision": True,
    "gradient_checkpointing": True,
    "validation_split": 0.2,
    "early_stopping": True,
    "patience": 5,
    "save_frequency": 5,
    "log_frequency": 100,
    "checkpoint_frequency": 10,
}


def test_more_frequent_of_two_save_frequencies_is_used() -> None:
    resolved = check_recipe(["routing", CONFIGURATION])
    assert str(resolved.recipe.checkpoint.every) == "5 epochs"
    assert any("save_frequency 5 and checkpoint_frequency 10" in note for note in resolved.notes)
    equal = check_recipe(["routing", {**CONFIGURATION, "save_frequency": 10, "checkpoint_frequency": 10}])
    assert str(equal.recipe.checkpoint.every) == "10 epochs"
    assert not any("both set checkpoint.every" in note for note in equal.notes)
    first_off = check_recipe(["routing", {"save_frequency": 0, "checkpoint_frequency": 3}]).recipe
    assert str(first_off.checkpoint.every) == "3 epochs"


def test_curriculum_stages_by_difficulty() -> None:
    guide = [
        {"difficulty": "easy", "batch_size": 64, "learning_rate": 0.001, "epochs": 5},
        {"difficulty": "medium", "batch_size": 32, "learning_rate": 0.0005, "epochs": 10},
        {"difficulty": "hard", "batch_size": 16, "learning_rate": 0.0001, "epochs": 15},
    ]
    recipe = check_recipe(["language", {"data.curriculum.stages": guide}]).recipe
    assert recipe.data.curriculum is not None
    stages = recipe.data.curriculum.stages
    assert [stage.share for stage in stages] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert [str(stage.steps) for stage in stages] == ["5 epochs", "10 epochs", "15 epochs"]
    assert check_recipe([recipe.to_plain_dict()]).recipe == recipe
    for wrong, message in (
        ({"difficulty": "tiny", "epochs": 1}, "expected one of easy, medium, hard, got 'tiny'"),
        ({"difficulty": "easy", "share": 0.9, "epochs": 1}, "both set the fraction of examples"),
        ({"epochs": 1, "steps": 3}, "both set the length of the stage"),
    ):
        with pytest.raises(UsageError, match=message):
            check_recipe(["language", {"data.curriculum.stages": [wrong]}])


def test_cpu_threads_sets_the_thread_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    run = train(tmp_path, write_text(tmp_path / "t.txt"), name="x", cpu_threads=3)
    assert counts == [3]
    bottega.load(run.path)
    TorchBackend().limit_threads(None)
    assert counts == [3, 3]
    single, many = (load_recipe(["language", {"num_threads": count}]).recipe for count in (1, 8))
    assert (single.cpu_threads, many.cpu_threads) == (1, 8)
    assert single.run_name() == many.run_name()
    with pytest.raises(UsageError, match=r"cpu_threads: expected a number above 0"):
        load_recipe(["language", {"cpu_threads": 0}])


@pytest.mark.parametrize(("name", "function"), [("gelu", "gelu"), ("relu", "relu"), ("swish", "silu"), (None, "silu")])
def test_model_activation_sets_the_trunk_activation(name: str | None, function: str, tmp_path: Path) -> None:
    run = bottega.train("routing", {**small_routing.settings(tmp_path), "model.activation": name, "name": "x"})
    model: Any = bottega.load(run.path).model
    assert model.shape.activation == function
    assert {layer.activation for layer in model.model.layers} == {getattr(torch.nn.functional, function)}


def test_activation_is_refused_where_it_has_no_effect() -> None:
    with pytest.raises(UsageError, match="applies to a perceptron trunk"):
        check_recipe(["routing", {"model.activation": "gelu", "model.spike_threshold": 1.0}])
    with pytest.raises(UsageError, match=r"model\.activation: unknown key; the activation of this model is fixed"):
        check_recipe(["classify/transformer", {"model.activation": "gelu"}])
    with pytest.raises(UsageError, match=r"model\.activation: expected one of swiglu, relu2, got 'gelu'"):
        check_recipe(["language", {"model.activation": "gelu"}])


def test_idle_gpus_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    recipe = load_recipe(["language", {"device": "cuda"}]).recipe
    assert list_unused_settings(recipe) == [
        "4 GPUs, 1 used: start with torchrun --nproc_per_node 4 -m bottega train … to use all"
    ]
    assert list_unused_settings(load_recipe(["language", {"device": "cpu"}]).recipe) == []
    assert (
        list_unused_settings(load_recipe(["language", {"device": "cuda", "distributed.enabled": False}]).recipe) == []
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert list_unused_settings(recipe) == []


def test_checkpoint_names_of_the_guide_are_resolved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_text(tmp_path / "t.txt")
    run = train(tmp_path, text, name="x").path
    assert resolve_checkpoint_path(run / "checkpoint-4") == run / "checkpoints" / "step-00000004"
    command = train_arguments(tmp_path, text, "--resume_from", str(run / "checkpoint-4"), name="y")
    assert cli.main(command) == 0
    assert "step-00000004 at step 4 of 8" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"such as runs/NAME/checkpoints/step-00005000"):
        resolve_checkpoint_path(tmp_path / "outputs" / "flickr" / "checkpoint-5000")
    recipe = load_recipe([parse_yaml(PERSONALIZE, "block").value]).recipe
    assert any("checkpoint-1000/ and final_model/ of PMG" in line for line in list_unused_settings(recipe))
