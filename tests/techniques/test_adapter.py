"""Bottleneck adapters: identity at initialisation, an unchanged base, and an export of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bottega
import small_media
import small_run
import small_texts
from bottega.core.errors import CheckpointError, UsageError
from bottega.core.noise import Noise
from bottega.models.build import build_models
from bottega.models.decoder.config import TransformerShape
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.models.text_classifier.config import KimShape
from bottega.tasks.classify.task import Classification
from bottega.tasks.generation.task import Generation
from bottega.tasks.language.task import Language
from bottega.techniques.adapter.torch import Adapter, Bottleneck
from small_run import differing_tensors, read_tensors

STEADY = {"training.scheduler.name": "constant", "training.scheduler.warmup_steps": 0}
SHAPE = TransformerShape(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    head_size=8,
    intermediate_size=32,
    vocab_size=20,
    context=16,
)
TOKENS = {"input_ids": torch.arange(30).view(3, 10) % 20}


def compute_loss(task: Any, model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return task.loss({"model": model.eval()}, TOKENS, Noise(0, 0, torch.arange(3), torch)).terms["loss"][0]


def find_bottlenecks(model: nn.Module) -> dict[str, Bottleneck]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Bottleneck)}


def test_adapter_is_the_identity_initially_and_each_layer_affects_the_loss() -> None:
    task = Language(shape=SHAPE)
    plain, model = build_models(task, 3)["model"], build_models(Adapter(inner=task, size=4), 3)["model"]
    before = compute_loss(task, plain)
    assert torch.equal(compute_loss(task, model), before)
    layers = find_bottlenecks(model)
    ends = ("self_attn.o_proj", "mlp.down_proj")
    assert list(layers) == [f"model.layers.{number}.{end}" for number in (0, 1) for end in ends]
    for name, layer in layers.items():
        with torch.no_grad():
            layer.adapter_up.copy_(torch.linspace(-1, 1, 64).view(16, 4).sin())
        assert not torch.equal(compute_loss(task, model), before), name
        nn.init.zeros_(layer.adapter_up)
    assert torch.equal(compute_loss(task, model), before)


def test_adapters_follow_output_projections_of_other_architectures(tmp_path: Path) -> None:
    from bottega.models.text_classifier.pretrained import read_pretrained_shape

    folder = small_texts.write_encoder(tmp_path)
    shape = read_pretrained_shape(folder, ["a", "b", "c"])
    task = Classification(key="text", shape=shape, pretrained=str(folder))
    ends = ("attention.output.dense", "output.dense")
    expected = [f"backbone.encoder.layer.{number}.{end}" for number in (0, 1) for end in ends]
    assert list(find_bottlenecks(build_models(Adapter(inner=task), 0)["model"])) == expected
    backbone = DiTShape(grid=(8, 8), channels=1, patch=(2, 2), hidden_size=16, num_layers=1, num_heads=2)
    generator = GeneratorShape(backbone=backbone, condition=ConditionShape(kind="none", hidden_size=16))
    bottlenecks = find_bottlenecks(build_models(Adapter(inner=Generation(key="image", shape=generator)), 0)["model"])
    assert list(bottlenecks) == ["backbone.blocks.0.attn.to_out", "backbone.blocks.0.down"]


def test_unknown_targets_are_refused() -> None:
    task = Language(shape=SHAPE)
    with pytest.raises(UsageError, match=r"adapter\.targets: 'o_prj' matches no layer.*did you mean o_proj"):
        build_models(Adapter(inner=task, targets=("o_prj",)), 0)
    kim = KimShape(vocab_size=20, num_labels=3, embed_size=8, num_filters=6, filter_sizes=(2, 3))
    with pytest.raises(UsageError, match=r"adapter\.targets: Kim has no matrix inside numbered blocks"):
        build_models(Adapter(inner=Classification(key="text", shape=kim)), 0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    settings = {**small_media.image(folder), "name": "base", "training.max_steps": 4}
    run = bottega.train("image", settings)
    bottega.load(run.path, device="cpu").export()
    return run.path


def settings(medium: str, folder: Path, base: Path) -> tuple[str, dict[str, Any]]:
    if medium == "image":
        return "image", {**small_media.image(folder), "model.from": str(base)}
    if medium == "classify":
        return "classify", small_texts.settings(folder)
    text = small_run.write_text(folder / "text.txt")
    return "language/shakespeare", small_run.settings(folder, text)


@pytest.mark.parametrize("medium", ["language", "classify", "image"])
def test_run_saves_trained_weights_resumes_bitwise_and_loads(base: Path, tmp_path: Path, medium: str) -> None:
    recipe, values = settings(medium, tmp_path, base)
    values |= {**STEADY, "training.ema": 0.9, "techniques": [{"name": "adapter", "options": {"size": 4}}]}
    straight = bottega.train(recipe, {**values, "name": "straight"})
    bottega.train(recipe, {**values, "name": "cut", "training.max_steps": 4})
    bottega.train(recipe, {**values, "name": "cut"})
    final = read_tensors(straight.path)
    assert differing_tensors(final, read_tensors(tmp_path / "cut")) == []
    saved = {name.partition("/")[2] for name in final if name.startswith("model.safetensors/")}
    assert all(".adapter_" in name or name.startswith("head.") for name in saved)
    loaded = bottega.load(straight.path, checkpoint="last", device="cpu")
    assert loaded.evaluate() == pytest.approx(straight.metrics, rel=1e-6)
    base_state, state = build_models(loaded.workload.task, 0)["model"].state_dict(), loaded.model.state_dict()
    assert all(torch.equal(state[name], base_state[name]) for name in base_state if not name.startswith("head."))


def test_export_contains_the_adapter_only(base: Path, tmp_path: Path) -> None:
    recipe, values = settings("image", tmp_path, base)
    run = bottega.train(recipe, {**values, "name": "drawn", "techniques": ["adapter"]})
    saved = bottega.load(run.path, device="cpu")
    folder = saved.export()
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "adapter"]
    metadata = json.loads((folder / "adapter" / "bottega.json").read_text())
    assert (metadata["kind"], metadata["size"], metadata["base"]) == ("bottleneck", 32, saved.base_hash)
    assert metadata["layers"] == list(find_bottlenecks(saved.model))
    state = saved.model.state_dict()
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert weights.keys() == {name for name in state if ".adapter_" in name}
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.items())
    assert "this export contains nothing else" in (folder / "README.md").read_text()


def test_training_starts_from_an_exported_adapter(base: Path, tmp_path: Path) -> None:
    recipe, values = settings("image", tmp_path, base)
    values |= {**STEADY, "training.weight_decay": 0.0}
    technique: dict[str, Any] = {"name": "adapter", "options": {"size": 4, "train": ["backbone.out"]}}
    first = bottega.train(
        recipe, {**values, "name": "first", "techniques": [technique], "training.learning_rate": 0.05}
    )
    folder = bottega.load(first.path, checkpoint="last", device="cpu").export() / "adapter"
    options = {**technique["options"], "start": str(folder)}

    def train_from_start(name: str, **changes: Any) -> Any:
        techniques = [{"name": "adapter", "options": {**options, **changes.pop("options", {})}}]
        still = {"training.learning_rate": 1e-30, "name": name, "techniques": techniques}
        return bottega.train(recipe, {**values, **still, **changes})

    second = train_from_start("second", **{"training.max_steps": 4})
    first_weights, second_weights = (
        load_file(run.path / "checkpoints" / "last" / "model.safetensors") for run in (first, second)
    )
    assert first_weights.keys() == second_weights.keys()
    assert all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)
    assert any(torch.any(first_weights[name]) for name in first_weights if name.endswith("adapter_up"))
    train_from_start("more", options={"train": ["backbone.out", "backbone.modulation_out"]})
    for change, message in (
        ({"options": {"size": 8}}, r"adapter\.size is 8, but .* has 4; set it to that value"),
        (
            {"options": {"targets": ["to_out"]}},
            r"adapter\.targets: .* contains .*\.down\..*; its layers are down, to_out",
        ),
        ({"options": {"train": []}}, r"contains backbone\.out\..*, which is not trained here"),
        ({"options": {"start": str(tmp_path)}}, r"techniques\.adapter\.start: .*bottega\.json does not exist"),
        ({"model.from": None}, r"techniques\.adapter\.start: .* over another base model \(.*base/final; .* differs\)"),
    ):
        with pytest.raises(UsageError, match=message):
            train_from_start("no", **change)
    metadata = json.loads((folder / "bottega.json").read_text())
    (folder / "bottega.json").write_text(json.dumps({**metadata, "kind": "lora"}))
    with pytest.raises(UsageError, match="is an adapter of kind lora, not bottleneck"):
        train_from_start("no")
    (folder / "bottega.json").write_text(json.dumps({**metadata, "version": 0}))
    with pytest.raises(CheckpointError, match="export the run again"):
        train_from_start("no")
    shutil.rmtree(folder)
    assert train_from_start("second").step > 4  # a resumed run does not read the start again
