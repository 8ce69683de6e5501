"""Values without effect are refused or reported; none is dropped or changed silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bottega
import small_texts
from bottega import cli
from bottega.config.unused_options import OPTIMIZER_OPTIONS, SCHEDULER_OPTIONS, list_unused_options
from bottega.config.yaml_io import parse_yaml
from bottega.core.errors import UsageError
from bottega.tasks.recipes import check_recipe, load_recipe
from config.guide_blocks import PERSONALIZE
from small_run import train, write_text


def test_prepare_writes_to_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_text(tmp_path / "text.txt")
    arguments = ["prepare", "language/shakespeare", "--data", str(text)]
    for flag in ("--out", "--output_dir", "--output-dir"):
        folder = tmp_path / "shards" / flag.strip("-")
        assert cli.main([*arguments, flag, str(folder)]) == 0
        assert (folder / "meta.json").is_file()
    assert cli.main([*arguments, f"output_dir={tmp_path / 'p2'}"]) == 2
    assert "output_dir is the folder of runs" in capsys.readouterr().err
    assert not (tmp_path / "p2").exists()


def pretrained_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    values = {k: v for k, v in small_texts.settings(folder, "transformer").items() if not k.startswith("model.")}
    return {
        **values,
        "model.from": str(small_texts.write_encoder(folder / "encoder")),
        "training.max_steps": 2,
        **changes,
    }


@pytest.mark.parametrize("key", ["hidden_size", "num_layers", "num_heads"])
def test_dimensions_that_differ_from_the_weights_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"model\.{key}: 96 differs from \d+ of model\.from; remove it"):
        bottega.train("classify", pretrained_settings(tmp_path, **{f"model.{key}": 96}))


def test_default_dimensions_give_way_to_the_weights(tmp_path: Path) -> None:
    """The recipe of the run then has no dimensions, or those of the weights."""
    run = bottega.train("classify", pretrained_settings(tmp_path, name="x"))
    model: Any = load_recipe([run.path / "recipe.yaml"]).recipe.model
    assert (model.hidden_size, model.num_layers, model.num_heads, model.dropout) == (None, None, None, None)
    image = check_recipe(["classify/image", {"model.from": "x"}]).recipe.model
    assert image.hidden_size is not None, "Bottega's own networks keep the dimensions of the recipe"  # type: ignore[attr-defined]


def test_dropout_follows_the_recipe(tmp_path: Path) -> None:
    changes = {"model.dropout": 0.25, "model.attention_dropout": 0.125, "name": "x"}
    run = bottega.train("classify", pretrained_settings(tmp_path, **changes))
    config = bottega.load(run.path).workload.shape.config_dict
    assert (config["hidden_dropout_prob"], config["attention_probs_dropout_prob"]) == (0.25, 0.125)


def test_warmup_longer_than_the_run_is_reported(tmp_path: Path) -> None:
    text = write_text(tmp_path / "t.txt")
    run = train(tmp_path, text, name="x", **{"training.max_steps": 4, "training.scheduler.warmup_steps": 500})
    log = (run.path / "log.txt").read_text()
    assert "warmup_steps: 500 is longer than the run and is shortened to its 4" in log
    run = train(tmp_path, text, name="y", **{"training.max_steps": 4, "training.scheduler.warmup_steps": 4})
    assert "is longer than the run" not in (run.path / "log.txt").read_text()


def test_muon_without_a_matrix_is_reported(tmp_path: Path) -> None:
    """Only norms and the embedding are trainable."""
    text = write_text(tmp_path / "t.txt")
    frozen = [{"pattern": r".*_proj\..*", "scale": "none"}, {"pattern": ".*"}]
    muon = {"training.optimizer.name": "muon", "training.groups": frozen}
    run = train(tmp_path, text, name="x", **muon)
    message = (
        "muon is for matrices between hidden states, and this model trains none; AdamW trains all of its parameters"
    )
    assert message in (run.path / "log.txt").read_text()
    run = train(tmp_path, text, name="y", **{"training.optimizer.name": "muon"})
    assert message not in (run.path / "log.txt").read_text()


@pytest.mark.parametrize("option", [*OPTIMIZER_OPTIONS, *SCHEDULER_OPTIONS])
def test_option_without_effect_is_reported(option: str) -> None:
    """An option that one optimizer or scheduler ignores is reported for that one, and only there."""
    values: dict[str, Any] = {"betas": [0.5, 0.6], "nesterov": True, "cycles": 2, "t_max": 3, "patience": 7}
    block, table = ("optimizer", OPTIMIZER_OPTIONS) if option in OPTIMIZER_OPTIONS else ("scheduler", SCHEDULER_OPTIONS)
    names = {
        "optimizer": ("adamw", "sgd", "lion", "adafactor"),
        "scheduler": ("constant", "polynomial", "plateau", "wsd"),
    }
    for name in {*names[block], *table[option]}:
        value = values.get(option, 0.321)
        value = not value if name == "muon" and option == "nesterov" else value
        changes = {f"training.{block}.name": name, f"training.{block}.{option}": value}
        base = "language" if block == "optimizer" else {"task": "language"}
        lines = list_unused_options(check_recipe([base, changes]).recipe)
        assert bool([line for line in lines if f".{option}: has no effect with {name}" in line]) == (
            name not in table[option]
        )


def test_bundled_recipes_have_no_unused_options() -> None:
    from bottega.config import bundled_recipes

    for name in bundled_recipes.list_recipe_names():
        assert list_unused_options(check_recipe([name]).recipe) == []


def test_personalize_guide_has_a_warmup() -> None:
    recipe = load_recipe([parse_yaml(PERSONALIZE, "block").value]).recipe
    scheduler = recipe.training.scheduler
    assert scheduler.name == "linear"
    assert scheduler.warmup_steps.to_steps(1875, 625) == 94
