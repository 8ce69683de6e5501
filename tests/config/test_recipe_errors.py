"""Recipe errors: all problems at once, each on one line with its location, key, value and nearest valid name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bottega.config.error_messages import format_shape_error
from bottega.config.flags import Override
from bottega.core.errors import UsageError
from bottega.models.experts.config import ExpertsShape
from bottega.tasks.recipes import check_recipe, load_recipe, parse_overrides


def collect_problems(text: str, folder: Path, *overrides: Override, check: bool = True) -> list[str]:
    path = folder / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        (check_recipe if check else load_recipe)([str(path)], overrides)
    return [line.replace(f"{folder}/", "") for line in str(caught.value).splitlines()]


def test_all_problems_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
task: language
training:
  max_steps: 10
  batch_size: many
  learnig_rate: 1e-4
  micro_batch_size: x
  mixed_precision: fp17
  optimizer:
    name: adamww
  groups:
    - pattern: "a("
    - {patern: b}
  ema: 2
trainig: {lr: 1}
model: {size: versee}
data: {train: [[a]]}
checkpoint: {every: 3 blah}
"""
    assert collect_problems(text, tmp_path) == [
        "recipe.yaml:4: training.batch_size: expected a whole number, got 'many'",
        "recipe.yaml:5: training.learnig_rate: unknown key; did you mean learning_rate?",
        "recipe.yaml:6: training.micro_batch_size: expected a whole number or auto, got 'x'",
        "recipe.yaml:7: training.mixed_precision: expected one of auto, fp32, bf16, fp16, got 'fp17'; did you mean fp16?",
        "recipe.yaml:9: training.optimizer.name: expected one of adamw, muon, sgd, lion, adafactor, adam, "
        "got 'adamww'; did you mean adamw?",
        "recipe.yaml:11: training.groups.0.pattern: 'a(' is not a regular expression: "
        "missing ), unterminated subpattern at position 1",
        "recipe.yaml:12: training.groups.1.pattern: missing",
        "recipe.yaml:12: training.groups.1.patern: unknown key; did you mean pattern?",
        "recipe.yaml:13: training.ema: expected a number below 1, got 2",
        "recipe.yaml:14: trainig: unknown key; did you mean training?",
        "recipe.yaml:15: model.size: expected one of nano, verse, stanza, epic, got 'versee'; did you mean verse?",
        "recipe.yaml:16: data.train: expected text, got ['a']",
        'recipe.yaml:17: checkpoint.every: expected a number of steps, "1 epoch", "5%" or "10 min", got \'3 blah\'',
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("training: {batch_size: true}", "expected a whole number, got true"),
        ("training: {batch_size: 1.5}", "expected a whole number, got 1.5"),
        ("training: {batch_size: 0}", "expected a number above 0, got 0"),
        ("training: {learning_rate: .nan}", "expected a number above 0|expected a finite number"),
        ("training: {learning_rate: fast}", "expected a number or auto, got 'fast'"),
        ("training: {gradient_checkpointing: perhaps}", "expected true or false, got 'perhaps'"),
        ("training: {groups: all}", "expected a list, got 'all'"),
        ("training: {groups: []}", "expected a list of at least 1, got []"),
        ("training: 5", "expected a block of keys, got 5"),
        ("training: {scheduler: {eta_min: 0.1, min_ratio: 0.1}}", "keep one"),
        ("samples: {prompts: [[1]]}", "expected text"),
        ("name: ../../etc", "because it names a folder"),
        ("needs: {vae: {}}", "needs.vae: expected either recipe or run"),
        ("techniques: [{name: lara}]", "did you mean lora"),
        ("_target_: os.system", "_target_: unknown key"),
        ("output_dir: ${HOME}/runs", "is not expanded in a recipe"),
        ("data: {validation: {split: 1.5}}", "fraction between 0 and 1"),
        ("data: {tokenizer: {kind: bpee}}", "did you mean bpe"),
        ("vocab_sise: 5", "did you mean vocab_size"),
        ("model: {sequence_length: 5}", "did you mean data.sequence_length"),
    ],
)
def test_each_problem_is_one_line(line: str, expected: str, tmp_path: Path) -> None:
    lines = collect_problems(f"# comment\ntask: language\n{line}\n", tmp_path)
    assert len(lines) == 1
    assert lines[0].startswith("recipe.yaml:3: ")
    assert any(option in lines[0] for option in expected.split("|"))


def test_misspelt_size_suggests_the_nearest_size() -> None:
    with pytest.raises(UsageError, match=r"command line: model: .* got 'versee'; did you mean verse"):
        check_recipe(["language"], [Override("model", "versee")])


def test_message_shows_the_key_as_typed(tmp_path: Path) -> None:
    lines = collect_problems("training:\n  train_batch_size: many\n", tmp_path, Override("lr", "abc"))
    assert lines[:2] == [
        "recipe.yaml:2: training.train_batch_size: expected a whole number, got 'many'",
        "command line: lr: expected a number or auto, got 'abc'",
    ]


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        ("batch_size: 8\n  train_batch_size: 6", ("training.train_batch_size", "training.batch_size")),
        ("num_train_epochs: 3\n  max_epochs: 4", ("training.max_epochs", "training.num_train_epochs")),
        (
            "warmup_steps: 3\n  scheduler: {warmup_steps: 4}",
            ("training.scheduler.warmup_steps", "training.warmup_steps"),
        ),
        ("fp16: true\n  bf16: true", ("training.bf16", "training.fp16")),
        # Equal numbers conflict, because save_frequency counts epochs in a run of epochs.
        ("save_frequency: 5\n  save_steps: 5", ("training.save_steps", "training.save_frequency")),
    ],
)
def test_conflicting_aliases_are_refused(lines: str, keys: tuple[str, str], tmp_path: Path) -> None:
    problems = collect_problems(f"training:\n  {lines}\n", tmp_path)
    assert len(problems) == 1
    assert problems[0].startswith(f"recipe.yaml:3: {keys[0]}: conflicts with {keys[1]} at recipe.yaml:2")


def test_consistent_aliases_are_accepted() -> None:
    training: dict[str, Any] = {"batch_size": 6, "train_batch_size": 6, "fp16": False, "bf16": True}
    recipe = check_recipe([{"training": training}]).recipe
    assert (recipe.training.batch_size, recipe.training.mixed_precision) == (6, "bf16")
    assert check_recipe([{"fp16": True}], [Override("fp16", "false")]).recipe.training.mixed_precision == "fp32"


@pytest.mark.parametrize(
    ("value", "precision"), [("no", "fp32"), ("false", "fp32"), ("true", "auto"), ("bf16", "bf16")]
)
def test_mixed_precision_accepts_booleans_and_no(value: str, precision: str) -> None:
    assert check_recipe([], [Override("mixed_precision", value)]).recipe.training.mixed_precision == precision


def test_yes_and_no_are_booleans_for_switches() -> None:
    recipe = check_recipe([], [Override("deterministic", "yes"), Override("compile", "no")]).recipe
    assert recipe.deterministic is True
    assert recipe.training.compile is False


def test_missing_keys_are_named_with_a_remedy(tmp_path: Path) -> None:
    assert collect_problems("task: language\n", tmp_path, check=False) == [
        "training.max_steps: missing; set max_steps or num_epochs",
        "data.train.path: missing; give a file or folder with --data PATH",
        "model.size: missing; give a size (nano, verse, stanza, epic), from, or num_layers and hidden_size",
    ]


def test_missing_and_wrong_keys_are_reported_once_each(tmp_path: Path) -> None:
    text = "task: language\nmodel: {size: nan0}\ntraining: {max_step: 5, batch_size: x}\n"
    assert collect_problems(text, tmp_path, check=False) == [
        "recipe.yaml:2: model.size: expected one of nano, verse, stanza, epic, got 'nan0'; did you mean nano?",
        "recipe.yaml:3: training.batch_size: expected a whole number, got 'x'",
        "recipe.yaml:3: training.max_step: unknown key; did you mean max_steps?",
        "data.train.path: missing; give a file or folder with --data PATH",
    ]

    assert collect_problems(
        "extends: language\ntraining: {max_steps: null, num_epoch: 5}\n", tmp_path, check=False
    ) == ["recipe.yaml:2: training.num_epoch: unknown key; did you mean num_epochs?"]
    lines = collect_problems("task: personalize\nmodel: {diffusion: [1]}\n", tmp_path, check=False)
    assert [line for line in lines if "diffusion" in line] == ["recipe.yaml:2: model.diffusion: expected text, got [1]"]


def test_max_steps_and_num_epochs_in_one_layer_are_refused(tmp_path: Path) -> None:
    text = "extends: language\ntraining: {max_steps: 5, num_epochs: 1}\n"
    assert collect_problems(text, tmp_path, check=False) == [
        "recipe.yaml:2: training.num_epochs: cannot be combined with max_steps 5; keep one"
    ]


def test_task_is_inferred_from_the_keys_or_reported_missing(tmp_path: Path) -> None:
    lines = collect_problems("training: {max_steps: 5}\n", tmp_path, check=False)
    assert len(lines) == 1
    assert lines[0].startswith("task: missing; the other keys fit language, classify")
    lines = collect_problems("task: langage\n", tmp_path)
    assert lines[0].endswith("got 'langage'; did you mean language?")
    lines = collect_problems("model: {num_experts: 4, filter_sizes: [3]}\n", tmp_path)
    assert lines[-1].startswith("task: missing; the other keys fit")
    assert check_recipe([{"model": {"spike_threshold": 1.0}}]).task_candidates == ("routing",)


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    for text in ("wandb: {api_key: CANARY}", "hub_token: CANARY", "logging: {wandb: {key: CANARY}}"):
        lines = collect_problems(text + "\n", tmp_path)
        assert "environment" in lines[0]
        assert not any("CANARY" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("langage", "did you mean language"),
        ("language/shakespere", "did you mean language/shakespeare"),
        ("nothing.yaml", "nothing.yaml does not exist"),
        ("../recipes/language", "no bundled recipe"),
    ],
)
def test_unknown_recipe_suggests_the_nearest_name(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe([name])


def test_file_without_keys_is_refused(tmp_path: Path) -> None:
    assert collect_problems("just text\n", tmp_path) == ["recipe.yaml: expected a block of keys, got 'just text'"]
    assert collect_problems("extends: [a]\n", tmp_path) == [
        "recipe.yaml:1: extends: expected a name or a path, got ['a']"
    ]


def test_unknown_key_of_a_block_lists_its_keys() -> None:
    with pytest.raises(UsageError) as caught:
        parse_overrides(["language", "data.online.foo=3"])
    assert str(caught.value) == "data.online.foo: unknown key; use replay or memory"


def test_technique_options_have_the_same_messages_as_other_keys() -> None:
    for value, message in ((-1, "expected at least 0, got -1"), ("a", "expected a number, got 'a'")):
        with pytest.raises(UsageError, match=f"strength: {message}"):
            check_recipe(["language", {"techniques": [{"name": "ewc", "options": {"strength": value}}]}])


def test_invalid_data_option_is_the_only_problem_reported(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n")
    sources, overrides = parse_overrides(
        ["classify/cnn", "--data", str(tmp_path / "a.csv"), "data.train.encoding=latn-1"]
    )
    with pytest.raises(UsageError) as caught:
        load_recipe(sources, overrides)
    assert str(caught.value).count("\n") == 0
    assert "latn-1" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": "many"}, "model.experts_per_token: Input should be a valid integer, .*, got 'many'"),
        ({"top_k": 9}, "model.experts_per_token 9 is more than num_experts 4; lower experts_per_token to 4"),
    ],
)
def test_shape_errors_name_the_recipe_key(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ExpertsShape(**{"hidden_size": 8, "expert_size": 8, "num_experts": 4, **fields})
    assert re.match(message, format_shape_error(caught.value, keys_by_field={"top_k": "experts_per_token"}))


def test_beginning_of_a_recipe_name_suggests_it() -> None:
    with pytest.raises(UsageError, match="lang: no bundled recipe of this name; did you mean language or "):
        load_recipe(["lang"])
