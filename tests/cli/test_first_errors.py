"""First mistakes of a new user: refused before data is read, with the right location and what to write instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bottega
import small_multitask
import small_texts
from bottega import cli
from bottega.analysis.ledger import list_step_samples
from bottega.config import bundled_recipes
from bottega.core.errors import UsageError
from bottega.tasks.recipes import check_recipe, load_recipe
from small_run import train, write_text

DISTILL = "techniques=[{name: distill, options: {teacher: nowhere, hidden: 1}}]"


def run_refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must exit with code 2; return its standard error."""
    assert cli.main(list(arguments)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["language", "techniques=[lora, adapter]"], "techniques: lora and adapter change the same layers; keep one"),
        (["language", "techniques=[lora, lora]"], "techniques: lora is listed 2 times; keep one"),
        (["language", "techniques=[ewc]"], "techniques: ewc needs sources that are trained on one after the other"),
        (
            ["classify/image", "techniques=[replay]"],
            "techniques: replay needs sources that are trained on one after the other",
        ),
        (
            ["language", "techniques=[maml, lora]"],
            "techniques: maml adapts the modules of lora; list it after lora",
        ),
        (
            ["classify", "techniques=[maml]", "training.mixed_precision=fp16"],
            "the inner steps of maml have no loss scaling",
        ),
        (["image_vae/digits", "techniques=[lora]"], "techniques: lora does not support image_vae; train it in full"),
        (
            ["language", "model.kind=moe", "model.expert_dropout=0.2", "techniques=[lora]"],
            "model.expert_dropout: lora keeps the routers frozen with all experts; remove it",
        ),
        (
            ["routing", "model.balance=bias", "techniques=[adapter]"],
            "model.balance: adapter keeps the routers frozen, with their current bias; remove bias",
        ),
        (["multitask", "techniques=[lora]"], "techniques: lora does not support several tasks; remove it"),
        (["recall", "techniques=[maml]"], "techniques: maml does not support recall, whose data is generated"),
        (["recall/lasting", "techniques=[lora, ewc]"], "techniques: ewc does not support recall"),
        (["recall", "techniques=[replay]"], "techniques: replay does not support recall"),
        (["recall", "data.path=x"], "the data of recall is generated; remove path and kind"),
        (["recall", "data.train.path=x"], "the data of recall is generated; remove path and kind"),
        (
            ["recall", "data.num_pairs=16", "data.num_keys=9"],
            "num_pairs: 16 facts need 16 distinct keys, but num_keys is 9; raise num_keys to 16",
        ),
        (["recall/lasting", "model.memory.episodic_slots=4"], "cannot hold 288 facts; raise it to 224"),
        (["recall", "model.kind=hybrid", "model.attention_every=1"], "attention_every: 1, but then no layer has a"),
        (
            ["recall", "model.kind=hybrid", "model.attention_every=3"],
            "attention_every: 3, but then none of 2 layers has",
        ),
        (["multitask", "data.weights=foo"], "expected one of fixed, uncertainty, pcgrad, dynamic, got 'foo'"),
        (["routing", "data.online.replay=1.5"], "data.online.replay: expected a number below 1, got 1.5"),
        (["routing", "data.online.replay=1"], "data.online.replay: expected a number below 1, got 1"),
        (["language", DISTILL, "training.compile=true"], "training.compile: techniques.distill.hidden"),
        (["language", "model.num_heads=2", "model.num_kv_heads=4"], "num_heads 2 is not a multiple of num_kv_heads 4"),
        (["language", "model.head_size=7"], "head_size 7 is odd"),
        (["classify/transformer", "model.num_heads=3"], "hidden_size 128 does not give each of 3 heads an even number"),
        (["language", DISTILL], "techniques.distill.teacher: nowhere does not exist"),
    ],
)
def test_plan_and_train_refuse_with_the_same_message(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in run_refused(capsys, "plan", *arguments, "--check")
    if "nowhere" not in arguments[-1]:  # train checks this one after the data is read
        assert message in run_refused(capsys, "train", *arguments, f"output_dir={tmp_path}")
        assert list(tmp_path.iterdir()) == [], "no run was started"


def test_partial_recipe_may_leave_keys_to_another_file(tmp_path: Path) -> None:
    partial = {"task": "classify", "techniques": ["ewc"]}
    assert check_recipe([partial]).recipe.techniques[0].name == "ewc"
    with pytest.raises(UsageError, match="one after the other"):
        check_recipe([partial, {"data.train.path": "x.csv"}])
    # A recipe under `needs` trains on the sources of its parent.
    sources = [{"kind": "embedded", "name": name, "labels": [number]} for number, name in enumerate("ab")]
    teacher = {"recipe": "classify/image", "settings": {"techniques": ["replay"]}}
    resolved = load_recipe(
        ["classify/image", {"data.sources": sources, "data.mixture": "sequence", "needs.x": teacher}]
    )
    from bottega.tasks.dependencies import build_dependency_recipe

    assert build_dependency_recipe(resolved.recipe, "x").data.mixture == "sequence"


def test_recipe_loads_without_its_teacher() -> None:
    distilled = {"techniques": [{"name": "distill", "options": {"teacher": "gone"}}]}
    assert load_recipe(["language", distilled]).recipe.techniques


def test_plan_lists_each_technique_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "techniques=[{name: lora, options: {rank: 4, targets: [q_proj, v_proj]}}]",
        "lr=auto",
        "data.split.folds=5",
    ]
    assert cli.main(["plan", "language", *arguments, "data.validation={}", "--check"]) == 0
    lines = capsys.readouterr().err.splitlines()
    lines = lines[[line.startswith("bottega: valid") for line in lines].index(True) :]
    assert lines[1] == "bottega: techniques: lora (rank 4, dropout 0, targets [q_proj, v_proj])"
    assert lines[2].startswith("bottega: training.learning_rate: auto, found by a range test")
    assert lines[3].startswith("bottega: data.split: fold 0 of 5 is held out; bottega crossval")
    assert cli.main(["plan", "language", "--check"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1


FILE = """\
extends: classify/image
techniques:
  - name: lora
    options:
      rank: 4
data:
  sources:
    - kind: embedded
      labels: [0]
"""


def test_error_names_the_source_of_the_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, later = tmp_path / "my.yaml", tmp_path / "later.yaml"
    mine.write_text(FILE)
    for word, key in (
        ("techniques=[{name: lora, options: {rank: 0}}]", "techniques.0.options: rank: "),
        ("data.sources=[{kind: embedded, labels: []}]", "data.sources.0.labels: "),
    ):
        message = run_refused(capsys, "plan", str(mine), word, "--check")
        assert message.startswith(f"bottega: command line: {key}"), message
    later.write_text("seed: 1\ntechniques: [{name: lora, options: {rank: 0}}]\n")
    assert run_refused(capsys, "plan", str(mine), str(later), "--check").startswith(f"bottega: {later}:2: techniques.0")
    mine.write_text(FILE.replace("rank: 4", "rank: 0"))
    assert run_refused(capsys, "plan", str(mine), "seed=1", "--check").startswith(
        f"bottega: {mine}:4: techniques.0.options"
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.sources.0.labels=[0,99]", "data.sources.0.labels: give the whole list: data.sources=[{…}]"),
        ("techniques.0.options.rank=3", "techniques.0.options.rank: give the whole list: techniques=[{…}]"),
        ("--training.groups.0.scale", "--training.groups.0.scale: give the whole list: training.groups=[{…}]"),
        ("techniques=lora", "techniques: expected a list, got 'lora'; write [lora]"),
        ("techniques=lora,ewc", "techniques: expected a list, got 'lora,ewc'; write [lora, ewc]"),
        ("training.freeze=backbone", "training.freeze: expected a list, got 'backbone'; write [backbone]"),
        ("techniques=[{name: adapter, options: {train: head}}]", "train: expected a list, got 'head'; write [head]"),
    ],
)
def test_wrong_list_syntax_is_explained(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in run_refused(capsys, "plan", "classify/image", word, "--check")


def test_single_list_item_in_a_dict_is_explained() -> None:
    with pytest.raises(UsageError, match=r"data\.sources: expected a list, .*give the whole list"):
        check_recipe(["classify/image", {"data.sources.0.labels": [0]}])


def test_a_resumed_run_names_the_option_that_changed(tmp_path: Path, text_file: Path) -> None:
    def start(*techniques: Any) -> None:
        train(tmp_path, text_file, **{"name": "x", "training.max_steps": 2, "techniques": list(techniques)})

    start({"name": "lora", "options": {"rank": 4, "targets": ["q_proj"]}})
    for techniques, message in (
        ([{"name": "lora", "options": {"rank": 3, "targets": ["q_proj"]}}], r"techniques\.0\.options\.rank: 4 -> 3"),
        ([{"name": "lora", "options": {"rank": 4}}], r"techniques\.0\.options\.targets: \['q_proj'\] -> None"),
        (["adapter"], r"techniques\.0\.name: lora -> adapter"),
        ([{"name": "lora", "options": {"rank": 4}}, "maml"], r"techniques: \[lora\] -> \[lora, maml\]"),
        ([], r"techniques: \[lora\] -> \[\]"),
    ):
        with pytest.raises(UsageError, match=rf"another recipe \({message}\); choose"):
            start(*techniques)


def test_ledger_names_the_sources(tmp_path: Path) -> None:
    paths = [write_text(tmp_path / f"{name}.txt", seed=number) for number, name in enumerate("ab")]
    sources = [{"path": str(paths[0]), "name": "mails"}, {"path": str(paths[1])}]
    run = train(tmp_path, paths[0], **{"name": "two", "data.train.path": None, "data.sources": sources})
    described = [
        text for step in (1, 2, 3, 4) for text in list_step_samples(run.path, step=step, replay=False)["described"]
    ]
    assert {text.split(": ")[0] for text in described} == {"mails", "data.sources[1]"}


def _next_commands(text: str) -> list[str]:
    return [line.strip() for line in text[text.index("next:") :].removeprefix("next:").splitlines()]


def _to_overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def test_train_prints_the_next_commands(tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = small_texts.settings(tmp_path, **{"name": "texts", "training.max_steps": 1})
    assert cli.main(["train", "classify", *_to_overrides(texts)]) == 0
    run = tmp_path / "texts"
    command = f'bottega predict {run} "your text"'
    assert _next_commands(capsys.readouterr().err)[-3:] == [f"bottega evaluate {run}", f"bottega export {run}", command]
    assert cli.main(["train", "classify", *_to_overrides(texts), "--quiet"]) == 0
    assert capsys.readouterr().err == ""

    parts = {**small_multitask.settings(tmp_path / "parts"), "name": "parts", "training.max_steps": 1}
    assert cli.main(["train", "multitask", *_to_overrides(parts)]) == 0
    run = tmp_path / "parts" / "parts"
    commands = _next_commands(capsys.readouterr().err)
    assert commands[-1] == f'bottega predict {run} "your text"'
    assert commands[0] == f"bottega generate {run} --part text", "no default prompt for the user's own text"


def test_default_prompts_apply_to_the_default_data_only(tmp_path: Path) -> None:
    def prompts(*sources: Any) -> tuple[str, ...]:
        return load_recipe(list(sources)).recipe.samples.prompts  # type: ignore[attr-defined]

    mine = tmp_path / "mine.yaml"
    mine.write_text('extends: language\nsamples: {prompts: ["Dear "]}\n')
    other = {"data.train.path": "x.txt"}
    assert prompts("language") == ("def ",)
    assert prompts("language", other) == ("\n",)
    assert prompts("language", {"data.sources": [{"path": "x.txt"}]}) == ("\n",)
    assert prompts("language", {**other, "samples.prompts": ["def "]}) == ("def ",)
    assert prompts(str(mine), other) == ("Dear ",), "set by the user, for any data"


def test_every_bundled_recipe_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    table = page[page.index("## Bundled recipes") :]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    listed = [name.strip(" `") for cell in first_cells for name in cell.split(",")]
    assert sorted(listed) == bundled_recipes.list_recipe_names()


def test_python_api_refuses_conflicting_techniques(tmp_path: Path, text_file: Path) -> None:
    with pytest.raises(UsageError, match="techniques: lora and adapter change the same layers"):
        bottega.train("language", {"data.train.path": str(text_file), "techniques": ["lora", "adapter"]})
