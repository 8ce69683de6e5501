"""Recipe layers merge recursively: later layers win, and other keys are unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.config.flags import Override
from bottega.config.layers import flatten_layer, merge_layers, nest_entries
from bottega.config.yaml_io import parse_scalar
from bottega.core.errors import UsageError
from bottega.tasks.recipes import check_recipe, load_recipe, parse_overrides

names = st.sampled_from(["a", "b", "c"])
trees = st.dictionaries(
    names, st.recursive(st.integers(), lambda t: st.dictionaries(names, t, min_size=1), max_leaves=5)
)


def flatten(tree: dict[str, Any]) -> Any:
    return flatten_layer(tree, file="f", lines={}).entries


def reference_merge(base: Any, override: Any) -> Any:
    """Merge recursively; the flat merge must give the same result."""
    if not isinstance(base, dict) or not isinstance(override, dict):
        return override
    return {**base, **{k: reference_merge(base[k], v) if k in base else v for k, v in override.items()}}


@settings(deadline=None)
@given(trees, trees, trees)
def test_flat_merge_equals_nested_merge(a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]) -> None:
    assert nest_entries(merge_layers(merge_layers(flatten(a), flatten(b)), flatten(c))) == reference_merge(
        reference_merge(a, b), c
    )


def test_later_sources_win_and_overrides_win_over_all(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("seed: 1\ntraining: {batch_size: 4, learning_rate: 1e-3}\n")
    second.write_text("training: {batch_size: 8}\n")
    recipe = check_recipe([str(first), str(second), {"training.weight_decay": 0.5}], [Override("seed", "3")]).recipe
    assert (recipe.seed, recipe.training.batch_size) == (3, 8)
    assert (recipe.training.learning_rate, recipe.training.weight_decay) == (1e-3, 0.5)
    locations = check_recipe([str(first), str(second)]).key_locations
    assert locations["training.batch_size"] == f"{second}:1"
    assert locations["training.learning_rate"] == f"{first}:2"


def test_scalar_and_block_of_the_same_key_merge() -> None:
    def load_training(*layers: dict[str, Any]) -> Any:
        return check_recipe(list(layers)).recipe.training

    assert load_training({"training.optimizer": "sgd"}, {"training.optimizer.momentum": 0.5}).optimizer.name == "sgd"
    assert (
        load_training(
            {"training.optimizer": {"name": "sgd", "momentum": 0.5}}, {"optimizer": "adamw"}
        ).optimizer.momentum
        == 0.5
    )
    assert (
        load_training({"training.early_stopping": {"patience": 5}}, {"training.early_stopping": False}).early_stopping
        is None
    )
    assert load_training({"training.early_stopping": None}, {"training": {"patience": 5}}).early_stopping.patience == 5
    assert (
        load_training(
            {"training.early_stopping": {"patience": 5}}, {"training.early_stopping": {}}
        ).early_stopping.patience
        == 5
    )


@pytest.mark.parametrize(
    ("base", "over", "removed"),
    [
        ("training.max_steps=5", "training.num_epochs=1", "training.max_steps"),
        ("training.num_epochs=1", "training.max_steps=5", "training.num_epochs"),
        ("model.size=nano", "model.from=gpt2", "model.size"),
        ("data.validation.split=0.1", "data.validation.path=x", "data.validation.split"),
        ("data.train.kind=embedded", "data.train.path=x", "data.train.kind"),
        ("training.scheduler.cycles=2", "training.scheduler.t_max=5", "training.scheduler.cycles"),
    ],
)
def test_later_layer_removes_the_alternative_key(base: str, over: str, removed: str) -> None:
    (below_key, below), (key, text) = base.split("="), over.split("=")
    layer = {below_key: parse_scalar(below)}
    assert removed in check_recipe([layer]).key_locations
    assert removed not in check_recipe([layer], [Override(key, text)]).key_locations


def test_kind_and_split_remain_with_a_new_path() -> None:
    below = {"data": {"train": {"kind": "jsonl", "path": "a"}, "test": {"path": "d", "split": "test"}}}
    data = check_recipe([{"task": "language", **below}, {"data.train.path": "b", "data.test.path": "e"}]).recipe.data
    assert (data.train.kind, data.train.path) == ("jsonl", "b")
    assert data.test is not None
    assert (data.test.path, data.test.split) == ("e", "test")


def test_single_beta_changes_one_of_the_pair() -> None:
    def load_betas(*layers: dict[str, Any]) -> Any:
        return check_recipe(list(layers)).recipe.training.optimizer.betas

    assert load_betas({"training": {"adam_beta2": 0.95}}) == (0.9, 0.95)
    assert load_betas({"training.optimizer.betas": [0.8, 0.9]}, {"training": {"adam_beta1": 0.7}}) == (0.7, 0.9)
    assert load_betas({"training": {"adam_beta1": 0.7}}, {"training.optimizer.betas": [0.8, 0.9]}) == (0.8, 0.9)
    assert load_betas({"training.optimizer": "lion"}) == (0.9, 0.99)


def test_extends_merges_over_the_base_recipe(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("extends: language\nseed: 1\ntraining: {batch_size: 4}\n")
    (tmp_path / "sub" / "child.yaml").write_text("extends: ../base.yaml\ntraining: {batch_size: 8}\n")
    recipe = load_recipe([str(tmp_path / "sub" / "child.yaml")]).recipe
    assert (recipe.task, recipe.seed, recipe.training.batch_size) == ("language", 1, 8)
    assert recipe.run_name().startswith("child-")


def test_circular_extends_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: ./a.yaml\n")
    with pytest.raises(UsageError, match=r"cycle: a.yaml -> b.yaml -> a.yaml"):
        load_recipe([str(tmp_path / "a.yaml")])


# Needs of a recipe


def load_needs(*arguments: str) -> Any:
    return load_recipe(*parse_overrides(["image", *arguments])).recipe.needs


def test_needs_are_set_as_a_block_or_by_key() -> None:
    assert load_needs("needs.judge.settings.training.batch_size=4")["judge"].settings == {"training": {"batch_size": 4}}
    assert load_needs("needs.judge.settings={lr: 0.1}")["judge"].recipe == "classify/image"
    both = load_needs("needs.tokens={recipe: image_tokens}")
    assert (both["judge"].recipe, both["tokens"].recipe) == ("classify/image", "image_tokens")
    assert load_needs("needs.judge=null") == {}
    assert load_recipe(["image", {"needs": {"judge": None}}]).recipe.needs == {}
    for override in ("needs.judge={run: runs/mine}", "needs.judge.run=runs/mine"):
        judge = load_needs(override)["judge"]
        assert (judge.recipe, judge.run) == (None, "runs/mine"), "a finished run replaces the recipe"
    with pytest.raises(UsageError, match=r"needs\.judge\.setings\.x: unknown key"):
        load_needs("needs.judge.setings.x=1")


# Locations of problems


def test_problem_of_a_block_names_the_layer_that_changed_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: audio\ndata: {fft_size: 512, hop_size: 128}\n")
    with pytest.raises(UsageError, match=r"^command line: data: hop_size: 400 is more than half"):
        load_recipe(*parse_overrides([str(file), "data.hop_size=400"]))
    file.write_text("extends: audio\ndata: {fft_size: 512, hop_size: 400}\n")
    with pytest.raises(UsageError, match=r"mine\.yaml:2: data: hop_size: 400"):
        load_recipe([str(file)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["image", "data.image_size=9"], r"command line: model\.patch_size: .* 2 do not divide .* 9 .*; 1, 3, 9 do"),
        (["video", "data.num_frames=5", "model.temporal_patch_size=2"], r"temporal_patch_size: .*\(data\.num_frames\)"),
        (["audio", "data.num_mels=63", "model.axes=2", "model.patch_size=4"], r"patch_size: .*\(data\.num_mels\)"),
    ],
)
def test_patch_sizes_are_checked_without_data(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_recipe(*parse_overrides(arguments))
    changed = ["model.backbone=unet"] if arguments[0] == "image" else ["model.vae=runs/vae"]
    assert check_recipe(*parse_overrides([*arguments, *changed]))


def test_num_heads_alone_adjusts_num_kv_heads() -> None:
    """For sizes and for recipes that set both; a number that divides num_heads is unchanged."""
    from bottega.models.decoder.kinds import resolve_shape_fields

    for recipe in ("language", "language/shakespeare", "language/stanza"):
        for heads in (1, 2, 3, 6, 8):
            resolved = check_recipe([recipe, {"model.num_heads": heads}])
            model: Any = resolved.recipe.model
            fields = resolve_shape_fields(model.kind, model.size, model.get_explicit_dimensions())
            assert fields["num_heads"] == heads
            assert heads % fields["num_kv_heads"] == 0
    resolved = check_recipe(["language/shakespeare", {"model.num_heads": 2}])
    assert "model.num_kv_heads is 2 instead of 4, because num_heads is 2" in resolved.notes
    unchanged = check_recipe(["language/shakespeare", {"model.num_heads": 8}])
    assert unchanged.recipe.model.num_kv_heads == 4  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"num_heads 2 is not a multiple of num_kv_heads 4.*try num_kv_heads 2"):
        check_recipe(["language", {"model.num_heads": 2, "model.num_kv_heads": 4}])
