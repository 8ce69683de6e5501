"""Models from specs: initial values, order of changes, and meta models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bottega.core.errors import UsageError
from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.types import Models
from bottega.models.build import build_meta_model, build_meta_models, build_model, build_models, resolve_reference
from toy_task import Toy


class PluginModel(nn.Module):
    """A module as a plugin would define it."""

    def __init__(self, size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size, bias=bias)


def fill_constant(model: nn.Module, seed: int, *, value: float = 1.0) -> None:
    for parameter in model.parameters():
        if not parameter.is_meta:
            nn.init.constant_(parameter, value + seed)


SPEC = ModelSpec(PluginModel, 3, {"bias": False}, initial=Initial(fill_constant, {"value": 2.0}))


class SpecTask(Toy):
    """A task with the given model specs."""

    model_specs: dict[str, ModelSpec]

    def specs(self) -> dict[str, ModelSpec]:
        return self.model_specs


def first_weight(model: Any) -> float:
    return float(model.layer.weight.detach()[0, 0])


def save_weights(folder: Path, value: float, size: int = 3) -> str:
    save_file({"layer.weight": torch.full((size, size), value)}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("is_filled", [False, True])
def test_values_come_from_the_initialiser_or_the_folder(tmp_path: Path, is_filled: bool) -> None:
    spec = replace(SPEC, is_filled=is_filled)
    model = build_model(spec, 5)
    assert first_weight(model) == 7
    assert model.layer.bias is None
    assert not model.layer.weight.is_meta
    assert first_weight(build_model(replace(spec, pretrained=save_weights(tmp_path, 0.5)), 5)) == 0.5


def test_initial_values_remain_only_with_starts_initial() -> None:
    spec = replace(SPEC, pretrained="anywhere", load=lambda model, folder: None)
    assert first_weight(build_model(replace(spec, starts_initial=True), 5)) == 7
    assert first_weight(build_model(spec, 5)) != 7


def test_self_loading_architecture_receives_folder_and_seed() -> None:
    calls: list[Any] = []

    def build(config: int, **options: Any) -> nn.Module:
        calls.append(options)
        return PluginModel(config)

    spec = ModelSpec(build, 2, {"more": 1}, pretrained="there", load=None, is_seeded=True)
    build_model(spec, 9)
    assert calls == [{"more": 1, "seed": 9, "folder": "there"}]


def test_default_initialisation_depends_on_the_seed_only_and_leaves_the_global_rng() -> None:
    spec = ModelSpec(PluginModel, 3)
    state = torch.default_generator.get_state()
    first, second = build_model(spec, 4), build_model(spec, 5)
    assert torch.equal(torch.default_generator.get_state(), state)
    torch.rand(3)
    assert torch.equal(first.layer.weight, build_model(spec, 4).layer.weight)
    assert not torch.equal(first.layer.weight, second.layer.weight)


def test_references_resolve_to_functions_classes_and_methods() -> None:
    assert resolve_reference("bottega.models.build:resolve_reference") is resolve_reference
    assert resolve_reference("torch.nn:Linear.forward") is nn.Linear.forward
    assert resolve_reference(fill_constant) is fill_constant


def test_changes_apply_last_in_order_with_access_to_all_models() -> None:
    def add(models: Models, seed: int) -> None:
        with torch.no_grad():
            models["model"].layer.weight.add_(models["other"].layer.weight)

    def double(models: Models, seed: int) -> None:
        with torch.no_grad():
            models["model"].layer.weight.mul_(2 * seed)

    other = replace(SPEC, initial=Initial(fill_constant, {"value": 10.0}))
    task = SpecTask(model_specs={"model": SPEC.with_change(add).with_change(double), "other": other})
    models = build_models(task, 1)
    assert first_weight(models["model"]) == (3 + 11) * 2
    assert first_weight(models["other"]) == 11
    assert SPEC.changes == (), "specs are immutable"


def test_parts_are_built_and_changed_before_the_model() -> None:
    def double(models: Models, seed: int) -> None:
        with torch.no_grad():
            models["model"].layer.weight.mul_(2)

    spec = ModelSpec(nn.ModuleDict, parts={"a": SPEC.with_change(double), "b": SPEC})
    model = build_model(spec, 0)
    assert (first_weight(model["a"]), first_weight(model["b"])) == (4, 2)


def test_meta_model_has_names_and_shapes_and_reads_no_folder() -> None:
    model = build_meta_model(SpecTask(model_specs={"model": replace(SPEC, pretrained="not/here")}), 0)
    assert model is not None
    assert {name: (tuple(p.shape), p.is_meta) for name, p in model.named_parameters()} == {
        "layer.weight": ((3, 3), True)
    }


def test_meta_model_raises_errors_of_changes_and_is_none_when_files_are_required() -> None:
    def refuse(models: Models, seed: int) -> None:
        raise UsageError("no such layer")

    def fail(config: Any) -> nn.Module:
        raise OSError("cannot be read without memory")

    with pytest.raises(UsageError, match="no such layer"):
        build_meta_model(SpecTask(model_specs={"model": SPEC.with_change(refuse)}), 0)
    assert build_meta_model(SpecTask(model_specs={"model": ModelSpec(fail)}), 0) is None
    assert build_meta_models(SpecTask(model_specs={"model": ModelSpec(fail)}), 0) is None


def test_spec_of_a_model_returns_that_model() -> None:
    model = PluginModel(2)
    assert build_model(ModelSpec.of(model), 0) is model
