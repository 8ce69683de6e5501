"""Loading recipes: stable run names, YAML round trips, flags, and the JSON schema."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bottega.config.flags import Override
from bottega.config.load import get_global_batch_size, to_yaml
from bottega.config.recipe import diff_recipes
from bottega.config.schema_keys import collect_schema_keys
from bottega.core.errors import UsageError
from bottega.tasks.recipes import (
    build_json_schema,
    check_recipe,
    list_bundled_recipes,
    load_recipe,
    parse_overrides,
    render_recipe_template,
)
from bottega.tasks.registry import TASKS

DATA = [Override("data", "corpus.txt")]
BUNDLED = [name for name, _, _ in list_bundled_recipes()]


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_recipes_load_and_round_trip(name: str, tmp_path: Path) -> None:
    lacks_data = any(key.startswith("data.") for key, _ in check_recipe([name]).recipe.find_missing_keys())
    recipe = load_recipe([name], DATA if lacks_data else ()).recipe
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(recipe))
    loaded = load_recipe([str(path)]).recipe
    assert loaded == recipe
    assert loaded.run_name() == recipe.run_name()
    assert recipe.run_name().startswith(name.replace("/", "-") + "-")


def test_bundled_recipes_have_a_task_and_a_description() -> None:
    assert {"language", "language/shakespeare", "language/verse", "language/stanza", "language/epic"} <= set(BUNDLED)
    assert all(task in TASKS and about for _, task, about in list_bundled_recipes())
    load_recipe(["language"])
    with pytest.raises(UsageError, match=r"^data.train.path: missing"):
        load_recipe(["language/shakespeare"])


def test_file_does_not_shadow_a_bundled_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("language").write_text("seed: 5\n")
    Path("language.yaml").write_text("extends: language\nseed: 5\n")
    assert load_recipe(["language"]).recipe.seed == 0
    assert load_recipe(["language.yaml"]).recipe.seed == 5


NEUTRAL = {
    "output_dir": "x",
    "device": "cpu",
    "logging.every": "5",
    "checkpoint.every": "10 min",
    "samples.count": "2",
    "data.workers": "3",
    "data.prefetch": "3",
    "training.compile": "false",
    "training.micro_batch_size": "2",
    "distributed.processes": "2",
}
CHANGING = {"seed": "1", "training.learning_rate": "1e-3", "data.limit": "10", "model.dropout": "0.5", "max_steps": "7"}


def test_default_name_depends_on_keys_that_change_results() -> None:
    base = load_recipe(["language"]).recipe
    for key, text in NEUTRAL.items():
        other = load_recipe(["language"], [Override(key, text)]).recipe
        assert other != base
        assert (key, other.run_name(), diff_recipes(base, other)) == (key, base.run_name(), [])
    names = {load_recipe(["language"], [Override(*item)]).recipe.run_name() for item in CHANGING.items()}
    assert len(names | {base.run_name()}) == len(CHANGING) + 1
    assert load_recipe(["language"], [Override("name", "mine")]).recipe.run_name() == "mine"


def test_diff_has_the_old_and_the_new_value() -> None:
    old = load_recipe(["language"]).recipe
    new = load_recipe(["language"], [Override("lr", "1e-5"), Override("ema", "0.9"), Override("max_grad_norm", "null")])
    assert diff_recipes(old, new.recipe) == [
        ("training.learning_rate", old.training.learning_rate, 1e-5),
        ("training.max_grad_norm", 1.0, None),
        ("training.ema", None, 0.9),
    ]


def test_global_batch_size() -> None:
    recipe = check_recipe([{"training": {"batch_size": 12}}]).recipe
    assert [get_global_batch_size(recipe, world) for world in (1, 3, 4)] == [12, 12, 12]
    with pytest.raises(UsageError, match=r"is not divisible by 5 processes; .*: 1, 2, 3, 4, 6, 12$"):
        get_global_batch_size(recipe, 5)
    accumulated = check_recipe([{"training": {"batch_size": 12, "gradient_accumulation_steps": 2}}]).recipe
    assert get_global_batch_size(accumulated, 5) == 120


@pytest.mark.parametrize(
    ("length", "every"),
    [
        ({"max_steps": 50}, "5 steps"),
        ({"num_epochs": 50}, "5 epochs"),
        ({"max_epochs": 9}, "5 epochs"),
        ({}, "5 steps"),
    ],
)
def test_unitless_cadences_follow_the_length_of_the_run(length: dict[str, Any], every: str) -> None:
    recipe = check_recipe([{"training": {"save_frequency": 5, "eval_steps": 5}}, {"training": length}]).recipe
    assert str(recipe.checkpoint.every) == every
    assert str(recipe.evaluation.every) == "5 steps"


def test_early_stopping_spellings() -> None:
    def load_early_stopping(**training: Any) -> Any:
        return check_recipe([{"training": training}]).recipe.training.early_stopping

    assert load_early_stopping() is None
    assert load_early_stopping(early_stopping=True).patience == 3
    assert load_early_stopping(early_stopping=True, patience=7).patience == 7
    assert load_early_stopping(early_stopping_threshold=0.5).threshold == 0.5
    assert load_early_stopping(early_stopping=False, patience=7) is None


@pytest.mark.parametrize(
    ("value", "size", "source"),
    [("verse", "verse", None), ("gpt2", None, "gpt2"), ("org/verse", None, "org/verse"), ("./run", None, "./run")],
)
def test_model_is_a_size_or_a_path(value: str, size: str | None, source: str | None) -> None:
    model: Any = load_recipe(["language"], [Override("model", value)]).recipe.model
    assert (model.size, model.from_) == (size, source)


def test_accelerate_file_is_a_separate_layer(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: 'no'\nuse_cpu: true\n"
                    "num_processes: 8\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
                    "fsdp_config: {fsdp_offload_params: true, fsdp_version: 2}\n")  # fmt: skip
    resolved = load_recipe([str(path), "language"])
    recipe, distributed = resolved.recipe, resolved.recipe.distributed
    assert (recipe.training.mixed_precision, recipe.device) == ("fp32", "cpu")
    assert (distributed.strategy, distributed.processes, distributed.machines) == ("fsdp", 8, 2)
    assert (distributed.machine_rank, distributed.main_address, distributed.main_port) == (1, "10.0.0.1", 29500)
    assert distributed.offload
    assert any("fsdp_version" in note for note in resolved.notes)
    assert recipe.run_name().startswith("language-")
    path.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: XLA\nmixed_precision: fp8\ngpu_ids: '0,1'\nfoo: 1\n"
    )
    with pytest.raises(UsageError) as caught:
        check_recipe([str(path)])
    lines = str(caught.value).splitlines()
    assert [line.split(":")[1] for line in lines if line.startswith(str(path))] == ["2", "3", "4", "5"]


def test_flags_are_parsed() -> None:
    command_line = "language training.ema=0.9 --training.max-steps 5 --lr=1 --batch-size 16 --config a.yaml"
    sources, overrides = parse_overrides(
        [*command_line.split(), "--deterministic", "false", "--scheduler.warmup_steps", "5%"]
    )
    assert sources == ["language", "a.yaml"]
    assert [(o.key, o.text) for o in overrides] == [
        ("training.ema", "0.9"),
        ("training.max_steps", "5"),
        ("lr", "1"),
        ("batch_size", "16"),
        ("deterministic", "false"),
        ("scheduler.warmup_steps", "5%"),
    ]


def test_unknown_flags_suggest_the_nearest_names() -> None:
    with pytest.raises(UsageError) as caught:
        parse_overrides(
            ["--learnig_rate", "1", "--lr", "--wandb.api_key", "CANARY", "trainin.ema=1", "-v", "--batch_size"]
        )
    assert str(caught.value).splitlines() == [
        "--learnig_rate: unknown flag; did you mean --learning_rate?",
        "--lr: needs a value: --lr VALUE",
        "--wandb.api_key: unknown key; put secrets into environment variables, never into a recipe",
        "trainin.ema: unknown key; did you mean training.ema?",
        "-v: unknown flag; settings are written --key value or key=value",
        "--batch_size: needs a value: --batch_size VALUE",
    ]


def test_aliased_flags_must_agree_and_a_repeated_flag_replaces() -> None:
    with pytest.raises(UsageError, match="command line: learning_rate: conflicts with lr"):
        check_recipe([], [Override("lr", "1"), Override("learning_rate", "2")])
    assert check_recipe([], [Override("lr", "1"), Override("lr", "2")]).recipe.training.learning_rate == 2


@pytest.mark.parametrize("task", TASKS)
def test_every_key_is_described_and_the_commented_recipe_loads(task: str, tmp_path: Path) -> None:
    keys = collect_schema_keys(TASKS[task].recipe)
    assert [key for key, info in keys.items() if not info.description] == []
    path = tmp_path / "new.yaml"
    path.write_text(render_recipe_template(task))
    resolved = load_recipe([str(path)])
    assert resolved.recipe.task == task
    missing = {key.split(".")[0] for key in keys} - {key.split(".")[0] for key in resolved.key_locations} - {"task"}
    assert missing == set()
    assert all("#" in line for line in path.read_text().splitlines() if line.strip())


def test_json_schema_has_a_definition_for_each_task() -> None:
    schema = build_json_schema()
    assert set(schema["discriminator"]["mapping"]) == set(TASKS)
    assert len(schema["oneOf"]) == len(TASKS)
    language = schema["$defs"]["LanguageRecipe"]
    assert language["additionalProperties"] is False
    assert {"extends", "model", "training"} <= set(language["properties"])
    assert schema["$defs"]["Training"]["properties"]["batch_size"]["exclusiveMinimum"] == 0
    assert "from" in schema["$defs"]["LanguageModel"]["properties"]


def test_recipes_are_frozen_and_hold_no_secrets() -> None:
    recipe = load_recipe(["language"]).recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.batch_size = 5  # type: ignore[misc]
    names = {key.rpartition(".")[2] for spec in TASKS.values() for key in collect_schema_keys(spec.recipe)}
    assert not names & {"api_key", "token", "password", "secret", "key"}


def test_loading_a_recipe_imports_no_heavy_packages() -> None:
    """Every command waits for this import; torch alone would take seconds."""
    script = (
        "import sys; import bottega.tasks.recipes as load; load.load_recipe(['language']);"
        "print(*{name.partition('.')[0] for name in sys.modules} - {*sys.stdlib_module_names})"
    )
    process = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {name for name in process.stdout.split() if not name.startswith("_")}
    assert imported <= {"bottega", "pydantic", "yaml"} | {
        "annotated_types",
        "cython_runtime",
        "pydantic_core",
        "typing_extensions",
        "typing_inspection",
    }
