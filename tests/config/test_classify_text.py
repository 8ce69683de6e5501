"""Recipes of text classifiers: keys of the published guide, model kinds, losses, and incompatible settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from guide_blocks import (
    CLASSIFIER_ADVANCED,
    CLASSIFIER_BASIC,
    CLASSIFIER_CNN,
    CLASSIFIER_TRANSFORMER,
    TEXT_AUGMENTATION,
)

from bottega.config.load import to_yaml
from bottega.core.errors import UsageError
from bottega.tasks.classify.config import ClassifyRecipe, ImageClassifyRecipe, LossOptions
from bottega.tasks.recipes import check_recipe, load_recipe


def load(**settings: Any) -> ClassifyRecipe:
    recipe = check_recipe(["classify/sst2", {key.replace("__", "."): value for key, value in settings.items()}]).recipe
    assert isinstance(recipe, ClassifyRecipe)
    return recipe


@pytest.mark.parametrize(("block", "kind"), [(CLASSIFIER_TRANSFORMER, "pretrained"), (CLASSIFIER_CNN, "cnn")])
def test_three_files_of_the_guide_make_a_classifier(block: str, kind: str, tmp_path: Path) -> None:
    training = CLASSIFIER_BASIC + CLASSIFIER_ADVANCED.replace("\ntraining:\n", "")
    printed = {"model_config.yaml": block, "training_config.yaml": training, "data_config.yaml": TEXT_AUGMENTATION}
    for name, text in printed.items():
        (tmp_path / name).write_text(text)
    resolved = check_recipe([str(tmp_path / name) for name in printed])
    recipe = resolved.recipe
    assert resolved.task_candidates == ("classify",)
    assert isinstance(recipe, ClassifyRecipe)
    assert (recipe.model.kind, recipe.model.num_labels) == (kind, 2)
    if kind == "cnn":
        model = recipe.model
        assert (model.vocab_size, model.embed_size, model.num_filters, model.dropout) == (30522, 128, 100, 0.5)
        assert model.filter_sizes == (3, 4, 5)
    else:
        assert (recipe.model.from_, recipe.model.num_heads, recipe.model.attention_dropout) == (
            *("bert-base-uncased", 12),
            0.1,
        )
    path = tmp_path / "written.yaml"
    path.write_text(to_yaml(recipe))
    assert check_recipe([path]).recipe == recipe


def test_pretrained_weights_select_the_pretrained_kind() -> None:
    for architecture in ({}, {"model.architecture": "transformer"}, {"model.kind": "pretrained"}):
        values = {"task": "classify", "model.pretrained_model": "some/encoder", **architecture}
        assert check_recipe([values]).recipe.model.kind == "pretrained"  # type: ignore[attr-defined]
    assert check_recipe([{"task": "classify", "model": {"architecture": "transformer"}}]).recipe.model.kind == (  # type: ignore[attr-defined]
        "transformer"
    )
    # Other tasks accept the key but have no such kind.
    language = check_recipe([{"task": "language", "model": {"pretrained_model": "some/model"}}]).recipe
    assert language.model.kind == "transformer"  # type: ignore[attr-defined]
    assert load(model__from="runs/mine").model.kind == "cnn"
    with pytest.raises(UsageError, match=r"model\.from: missing; kind pretrained needs"):
        load_recipe(["classify/pretrained", {"data.train.path": "a.jsonl", "model.from": None}])


def test_default_tokenizer_is_words() -> None:
    assert ClassifyRecipe().data.tokenizer.kind == "words"
    tokenizer = check_recipe(["classify", {"data.tokenizer.vocab_size": 500}]).recipe.data.tokenizer  # type: ignore[attr-defined]
    assert (tokenizer.kind, tokenizer.vocab_size) == ("words", 500)
    with pytest.raises(UsageError, match=r"data\.tokenizer\.kind: .*bpe.* 'words'") as caught:
        check_recipe(["language", {"data.tokenizer.kind": "words"}])
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UsageError, match=r"data\.tokenizer\.path: missing"):
        load_recipe(["classify", {"data.tokenizer.kind": "pretrained"}])


def test_multi_label_cannot_be_stratified() -> None:
    assert load(data__multi_label=True).data.label_separator == ","
    with pytest.raises(UsageError, match="stratified needs one class for each text") as caught:
        load(data__multi_label=True, data__split__by="stratified")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "loss"),
    [
        ({"loss.name": "focal"}, LossOptions(name="focal", gamma=2.0)),
        ({"loss": {"class_weights": "balanced"}}, LossOptions(class_weights="balanced")),
        ({"loss.class_weights": [1, 2.5]}, LossOptions(class_weights=(1.0, 2.5))),
        ({}, None),
    ],
)
def test_loss_options_of_every_medium(values: dict[str, Any], loss: LossOptions | None, tmp_path: Path) -> None:
    for name in ("classify", "classify/image", "classify/audio", "classify/video"):
        recipe = check_recipe([name, values]).recipe
        assert recipe.loss == loss  # type: ignore[attr-defined]
        file = tmp_path / "written.yaml"
        file.write_text(to_yaml(recipe))
        assert check_recipe([file]).recipe == recipe
    # An unset key does not change the run name.
    assert not [key for key in ImageClassifyRecipe().results_key() if key.startswith("loss")]


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("loss.name", "hinge", "loss.name"),
        ("loss.gamma", -1, "loss.gamma"),
        ("loss.class_weights", [1, 0], "loss.class_weights"),
        ("loss.class_weights", "rare", "loss.class_weights"),
        ("model.word_dropout", 1.0, "model.word_dropout"),
        ("model.kind", "lstm", "model.kind"),
        ("data.label_separator", "", "data.label_separator"),
    ],
)
def test_invalid_value_is_refused_by_key(key: str, value: Any, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        check_recipe(["classify", {key: value}])
