"""Models from specs: where values come from, in which order, and what is known of a model without memory."""

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


class Own(nn.Module):
    """Somebody's own module, as a plugin would have it."""

    def __init__(self, size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size, bias=bias)


def ones(model: nn.Module, seed: int, *, value: float = 1.0) -> None:
    for parameter in model.parameters():
        if not parameter.is_meta:
            nn.init.constant_(parameter, value + seed)


OWN = ModelSpec(Own, 3, {"bias": False}, initial=Initial(ones, {"value": 2.0}))


class Task(Toy):
    """Whose models are what a test says."""

    given: dict[str, ModelSpec]

    def specs(self) -> dict[str, ModelSpec]:
        return self.given


def weight(model: Any) -> float:
    return float(model.layer.weight.detach()[0, 0])


def saved(folder: Path, value: float, size: int = 3) -> str:
    save_file({"layer.weight": torch.full((size, size), value)}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("is_filled", [False, True])
def test_values_are_those_of_the_rule_or_of_the_folder(tmp_path: Path, is_filled: bool) -> None:
    spec = replace(OWN, is_filled=is_filled)
    model = build_model(spec, 5)
    assert weight(model) == 7
    assert model.layer.bias is None
    assert not model.layer.weight.is_meta
    assert weight(build_model(replace(spec, pretrained=saved(tmp_path, 0.5)), 5)) == 0.5


def test_a_folder_that_lacks_something_leaves_the_rules_values_only_where_the_spec_says_so() -> None:
    kept = replace(OWN, pretrained="anywhere", load=lambda model, folder: None)
    assert weight(build_model(replace(kept, starts_initial=True), 5)) == 7
    assert weight(build_model(kept, 5)) != 7


def test_an_architecture_that_reads_its_folder_by_itself_is_handed_it_and_the_seed() -> None:
    asked: list[Any] = []

    def whole(config: int, **options: Any) -> nn.Module:
        asked.append(options)
        return Own(config)

    spec = ModelSpec(whole, 2, {"more": 1}, pretrained="there", load=None, is_seeded=True)
    build_model(spec, 9)
    assert asked == [{"more": 1, "seed": 9, "folder": "there"}]


def test_without_a_rule_the_seed_alone_decides_and_nothing_outside_is_drawn_from() -> None:
    spec = ModelSpec(Own, 3)
    state = torch.default_generator.get_state()
    one, other = build_model(spec, 4), build_model(spec, 5)
    assert torch.equal(torch.default_generator.get_state(), state)
    torch.rand(3)
    assert torch.equal(one.layer.weight, build_model(spec, 4).layer.weight)
    assert not torch.equal(one.layer.weight, other.layer.weight)


def test_names_mean_functions_classes_and_methods() -> None:
    assert resolve_reference("bottega.models.build:resolve_reference") is resolve_reference
    assert resolve_reference("torch.nn:Linear.forward") is nn.Linear.forward
    assert resolve_reference(ones) is ones


def test_changes_come_last_in_their_order_and_see_all_models() -> None:
    def add(models: Models, seed: int) -> None:
        with torch.no_grad():
            models["model"].layer.weight.add_(models["other"].layer.weight)

    def double(models: Models, seed: int) -> None:
        with torch.no_grad():
            models["model"].layer.weight.mul_(2 * seed)

    other = replace(OWN, initial=Initial(ones, {"value": 10.0}))
    task = Task(given={"model": OWN.changed(add).changed(double), "other": other})
    models = build_models(task, 1)
    assert weight(models["model"]) == (3 + 11) * 2
    assert weight(models["other"]) == 11
    assert OWN.changes == (), "a spec is a value"


def test_parts_are_built_and_changed_first() -> None:
    def double(models: Models, seed: int) -> None:
        with torch.no_grad():
            models["model"].layer.weight.mul_(2)

    spec = ModelSpec(nn.ModuleDict, parts={"a": OWN.changed(double), "b": OWN})
    whole = build_model(spec, 0)
    assert (weight(whole["a"]), weight(whole["b"])) == (4, 2)


def test_an_outline_has_names_and_shapes_and_reads_no_folder() -> None:
    model = build_meta_model(Task(given={"model": replace(OWN, pretrained="not/here")}), 0)
    assert model is not None
    assert {name: (tuple(p.shape), p.is_meta) for name, p in model.named_parameters()} == {
        "layer.weight": ((3, 3), True)
    }


def test_an_outline_refuses_what_a_change_refuses_and_is_none_where_only_files_tell() -> None:
    def refuse(models: Models, seed: int) -> None:
        raise UsageError("no such layer")

    def fail(config: Any) -> nn.Module:
        raise OSError("cannot be read without memory")

    with pytest.raises(UsageError, match="no such layer"):
        build_meta_model(Task(given={"model": OWN.changed(refuse)}), 0)
    assert build_meta_model(Task(given={"model": ModelSpec(fail)}), 0) is None
    assert build_meta_models(Task(given={"model": ModelSpec(fail)}), 0) is None


def test_a_model_that_is_there_is_the_model() -> None:
    model = Own(2)
    assert build_model(ModelSpec.of(model), 0) is model
