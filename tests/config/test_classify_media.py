"""Recipes of image, audio and video classifiers: one task whose schema follows from data.input."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.config.flags import Override
from bottega.config.load import to_yaml
from bottega.config.schema_keys import collect_schema_keys
from bottega.core.errors import UsageError
from bottega.tasks.recipes import build_json_schema, check_recipe, load_recipe, parse_overrides, render_recipe_template
from bottega.tasks.registry import TASKS

MEDIA = ("image", "audio", "video")


@pytest.mark.parametrize("medium", MEDIA)
def test_input_selects_the_recipe_class_and_it_round_trips(medium: str, tmp_path: Path) -> None:
    resolved = check_recipe([{"task": "classify", "data.input": medium, "training.label_smoothing": 0.1}])
    assert type(resolved.recipe) is TASKS["classify"].inputs[medium]
    assert resolved.recipe.samples.every is None
    path = tmp_path / "written.yaml"
    path.write_text(to_yaml(resolved.recipe))
    assert check_recipe([str(path)]).recipe == resolved.recipe
    assert check_recipe([str(path)]).recipe.run_name() == resolved.recipe.run_name()


def test_default_input_is_text() -> None:
    assert type(check_recipe([{"task": "classify"}]).recipe) is TASKS["classify"].recipe
    assert type(check_recipe([{"task": "classify", "data.input": "text"}]).recipe) is TASKS["classify"].recipe


def test_a_later_layer_may_change_the_input() -> None:
    resolved = check_recipe([{"task": "classify", "data.input": "image"}], [Override("data.input", "audio")])
    assert type(resolved.recipe) is TASKS["classify"].inputs["audio"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data.input": "imgae"},
            "data.input: expected one of text, image, audio, video, got 'imgae'; did you mean image",
        ),
        ({"data.input": 3}, "data.input: expected one of text, image, audio, video, got 3"),
        ({"data.input": ["image"]}, "data.input: expected one of text, image, audio, video"),
        ({"image_size": 28}, "image_size: unknown key without data.input=image; add that"),
        ({"data.input": "image", "data.seconds": 1.0}, "data.seconds: unknown key without data.input=audio; add that"),
        ({"data.input": "image", "model.kind": "cnn"}, "model.kind: expected one of convnet, spiking, got 'cnn'"),
        ({"data.input": "audio", "data.hop_sise": 3}, "data.hop_sise: unknown key; did you mean hop_size?"),
        ({"data.input": "video", "data.num_frames": 0}, "data.num_frames: expected a number above 0, got 0"),
        ({"data.input": "image", "model.num_filters": 8}, "model.num_filters: unknown key without data.input=text"),
    ],
)
def test_invalid_keys_of_each_input_are_refused_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_recipe([{"task": "classify", **settings}])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_other_tasks_have_no_input() -> None:
    with pytest.raises(UsageError, match=r"data\.input: unknown key"):
        check_recipe([{"task": "image", "data.input": "image"}])
    assert "classify" in check_recipe([{"data.input": "video"}]).task_candidates
    assert "image" not in check_recipe([{"data.input": "video"}]).task_candidates


def test_training_needs_a_source() -> None:
    with pytest.raises(UsageError, match=r"data\.train\.path: missing"):
        load_recipe([{"task": "classify", "data.input": "image", "training.max_steps": 1}])


@pytest.mark.parametrize("medium", MEDIA)
def test_every_key_has_a_description_and_a_flag_and_is_in_the_commented_recipe(medium: str, tmp_path: Path) -> None:
    keys = collect_schema_keys(TASKS["classify"].inputs[medium])
    assert [key for key, info in keys.items() if not info.description] == []
    plain = [key for key in keys if "*" not in key]
    _, overrides = parse_overrides([word for key in plain for word in (f"--{key}", "1")])
    assert [override.key for override in overrides] == plain
    path = tmp_path / "new.yaml"
    path.write_text(render_recipe_template(f"classify/{medium}"))
    recipe = load_recipe([str(path)]).recipe
    assert type(recipe) is TASKS["classify"].inputs[medium]
    assert recipe.model_copy(update={"origin": None, "training": None, "data": None}) == check_recipe(
        [{"task": "classify", "data.input": medium}]
    ).recipe.model_copy(update={"training": None, "data": None})


def test_json_schema_has_all_inputs_under_classify() -> None:
    schema = build_json_schema()
    forms = {f"#/$defs/{form.__name__}" for form in TASKS["classify"].inputs.values()}
    assert schema["discriminator"]["mapping"]["classify"] == "#/$defs/classify"
    assert {choice["$ref"] for choice in schema["$defs"]["classify"]["anyOf"]} == forms
    assert {"$ref": "#/$defs/classify"} in schema["oneOf"]
    assert all("extends" in schema["$defs"][form.__name__]["properties"] for form in TASKS.schemas)
    inputs = {
        form: schema["$defs"][f"{form}ClassifyData"]["properties"]["input"] for form in ("Image", "Audio", "Video")
    }
    assert {form: field["const"] for form, field in inputs.items()} == {
        "Image": "image",
        "Audio": "audio",
        "Video": "video",
    }
