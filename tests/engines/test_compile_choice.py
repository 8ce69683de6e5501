"""The choice of `training.compile: auto`: when compiling pays, for which kind of model, and what is said about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.model_spec import ModelSpec
from bottega.engines.compile_choice import COSTS, MARGIN, CompileCost, choose_at_start, find_cost
from bottega.run.compose import build_training_plan
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe
from small_multitask import settings as multitask_settings
from toy_task import Toy, training

SECONDS = st.floats(0.0, 1e4)
costs = st.builds(CompileCost, SECONDS, st.floats(0.0, 3.0), SECONDS)
num_steps = st.integers(0, 10**7)


@given(costs, num_steps, num_steps, SECONDS)
def test_compiling_pays_for_more_steps_if_it_pays_for_fewer(cost: CompileCost, a: int, b: int, seconds: float) -> None:
    fewer, more = sorted((a, b))
    assert cost.pays(more, seconds) or not cost.pays(fewer, seconds)
    assert cost.estimate_saving(more, seconds) >= cost.estimate_saving(fewer, seconds)


@given(costs, num_steps, SECONDS, SECONDS)
def test_compiling_pays_for_slower_steps_if_it_pays_for_faster(
    cost: CompileCost, steps: int, a: float, b: float
) -> None:
    faster, slower = sorted((a, b))
    assert cost.pays(steps, slower) or not cost.pays(steps, faster)


@given(costs, num_steps, SECONDS)
def test_compiling_never_pays_if_nothing_is_saved(cost: CompileCost, steps: int, seconds: float) -> None:
    assert not cost._replace(factor=max(1.0, cost.factor)).pays(steps, seconds)
    assert not cost.pays(0, seconds)
    assert not cost.pays(-steps, seconds), "a run past its end"
    assert not cost.pays(steps, 0.0)


@given(costs, num_steps, SECONDS)
def test_what_pays_saves_more_than_it_takes(cost: CompileCost, steps: int, seconds: float) -> None:
    if cost.pays(steps, seconds):
        assert steps * seconds * (1 - cost.factor) > cost.compile_seconds
    elif cost.factor < 1:
        assert steps * seconds * (1 - cost.factor) <= MARGIN * cost.compile_seconds * (1 + 1e-9)


def test_every_measured_cost_is_plausible() -> None:
    for cost in COSTS["cuda"].values():
        assert 0 < cost.compile_seconds < 600
        assert 0 < cost.factor < 1
        assert 0 < cost.step_seconds < 10


class Unwrapped(Toy):
    needs_unwrapped_model: ClassVar[bool] = True


class WithArchitecture(Toy):
    """A task whose model has the architecture of this name; nothing is built."""

    architecture: str

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(self.architecture)}


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("bottega.models.decoder.torch:Transformer", "decoder"),
        ("bottega.models.text_classifier.kim:Kim", "text-cnn"),
        ("bottega.models.routing.torch:RoutingNet", "routing"),
        ("bottega.models.routing_other:Net", "other"),
        ("my_plugin:Net", "other"),
    ],
)
def test_the_kind_of_a_model_is_that_of_its_module(architecture: str, kind: str) -> None:
    assert find_cost(WithArchitecture(architecture=architecture), "cuda") == COSTS["cuda"][kind]


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("image", "dit"),
        ("classify/transformer", "encoder"),
        ("classify/cnn", "text-cnn"),
        ("classify/image", "convnet"),
        ("recall", "recall"),
    ],
)
def test_bundled_recipes_have_the_cost_of_their_kind(recipe: str, kind: str, tmp_path: Path) -> None:
    assert find_cost(open_task(recipe, output_dir=str(tmp_path)), "cuda") == COSTS["cuda"][kind]


def test_a_linear_model_over_ngrams_has_nothing_to_compile(tmp_path: Path) -> None:
    assert find_cost(open_task("classify", output_dir=str(tmp_path)), "cuda") is None


def open_task(recipe: str, **values: Any) -> Any:
    loaded = load_recipe([recipe, values]).recipe
    workload = registry.open_workload(loaded, progress=lambda stage, done, total: None)
    return build_training_plan(loaded, workload).task


def test_the_parts_of_a_multitask_model_add_up(tmp_path: Path) -> None:
    task = open_task("multitask", **multitask_settings(tmp_path))
    parts = [find_cost(part, "cuda") for part in task.parts.values()]
    compiled = [part for part in parts if part in (COSTS["cuda"]["decoder"], COSTS["cuda"]["encoder"])]
    assert len(compiled) >= 2
    cost = find_cost(task, "cuda")
    assert cost is not None
    assert cost.compile_seconds == sum(part.compile_seconds for part in compiled if part is not None)
    savings = sum(part.estimate_saving(100) for part in compiled if part is not None)
    assert cost.estimate_saving(100) == pytest.approx(savings)


def test_a_short_run_is_not_compiled_and_a_long_one_is() -> None:
    choices = {steps: choose_at_start(Toy(), training(), device_type="cuda", num_steps=steps) for steps in (60, 10**6)}
    cost = COSTS["cuda"]["other"]
    seconds, saved = f"{cost.compile_seconds:.0f} s", {n: f"{cost.estimate_saving(n):.0f} s" for n in choices}
    assert not choices[60].is_compiled
    assert choices[60].note == (
        f"training.compile: auto is off for 60 steps (compiling would take about {seconds} and save about {saved[60]}); "
        "training.compile=true compiles anyway"
    )
    assert choices[10**6].is_compiled
    assert choices[10**6].note == (
        f"training.compile: auto is on for 1,000,000 steps (compiling takes about {seconds} and saves about {saved[10**6]}); "
        "training.compile=false starts at once"
    )


@pytest.mark.parametrize("device_type", ["cpu", "mps"])
def test_auto_never_compiles_without_a_gpu(device_type: str) -> None:
    assert choose_at_start(Toy(), training(), device_type=device_type, num_steps=10**9) == (False, None)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("switch", [True, False])
def test_a_value_in_the_recipe_decides(device_type: str, switch: bool) -> None:
    choice = choose_at_start(Toy(), training(compile=switch), device_type=device_type, num_steps=1)
    assert choice == (switch, None)


@pytest.mark.parametrize("switch", ["auto", True])
def test_a_model_that_must_stay_unwrapped_is_never_compiled(switch: Any) -> None:
    choice = choose_at_start(Unwrapped(), training(compile=switch), device_type="cuda", num_steps=10**9)
    assert choice == (False, None)
