"""Configuration blocks of five published guides load unchanged with the documented meaning."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from guide_blocks import (
    ALL,
    BLOCKS,
    CLASSIFIER_ADVANCED,
    CLASSIFIER_BASIC,
    CLASSIFIER_TRANSFORMER,
    LANGUAGE_FLAGS,
    MEDIA_SETTINGS,
    MEMORY_SETTINGS,
    PERSONALIZE,
    ROUTING_ADVANCED,
    ROUTING_QUICK,
    TEXT_AUGMENTATION,
)

from bottega.config.load import get_global_batch_size, to_yaml
from bottega.config.recipe import Recipe
from bottega.config.yaml_io import parse_yaml
from bottega.tasks.language.config import LanguageRecipe
from bottega.tasks.personalize.config import PersonalizeRecipe
from bottega.tasks.recipes import check_recipe, load_recipe, parse_overrides
from bottega.tasks.registry import TASKS
from bottega.tasks.routing.config import RoutingRecipe


def load_block(text: str, folder: Path) -> Recipe:
    path = folder / "block.yaml"
    path.write_text(text)
    return check_recipe([str(path)]).recipe


@pytest.mark.parametrize("name", BLOCKS)
def test_guide_block_fits_its_task_and_round_trips(name: str, tmp_path: Path) -> None:
    text, task = BLOCKS[name]
    path = tmp_path / "block.yaml"
    path.write_text(text)
    resolved = check_recipe([str(path)])
    assert set(resolved.task_candidates) == (set(TASKS) if task == ALL else {task})
    copy = tmp_path / "written.yaml"
    copy.write_text(to_yaml(resolved.recipe))
    assert check_recipe([str(copy)]).recipe == resolved.recipe


def _guide_files() -> list[Path]:
    data = os.environ.get("BOTTEGA_DATA")
    return sorted(Path(data).parent.joinpath("guides").glob("*.txt")) if data else []


@pytest.mark.skipif(not _guide_files(), reason="the guide files are not available")
def test_every_block_of_the_guide_files_loads(tmp_path: Path) -> None:
    blocks = [b for f in _guide_files() for b in re.findall(r"```yaml\n(.*?)```", f.read_text(), re.DOTALL)]
    assert len(blocks) == len(BLOCKS)
    for block in blocks:
        load_block(block, tmp_path)


def test_classifier_blocks(tmp_path: Path) -> None:
    recipe = load_block(CLASSIFIER_BASIC, tmp_path)
    training = recipe.training
    assert (training.learning_rate, training.batch_size, training.num_epochs) == (2e-5, 16, 10)
    assert training.scheduler.warmup_steps.to_steps(1000, 10) == 500
    assert training.mixed_precision == "fp16"
    assert (recipe.logging.every.amount, recipe.evaluation.every) == (100, type(recipe.logging.every)(500))
    recipe = load_block(CLASSIFIER_ADVANCED, tmp_path)
    assert recipe.training.optimizer.betas == (0.9, 0.999)
    assert recipe.training.scheduler.name == "linear"
    assert recipe.training.early_stopping is not None
    assert (recipe.training.early_stopping.patience, recipe.training.early_stopping.threshold) == (3, 0.01)
    assert (recipe.checkpoint.every.to_recipe_value(), recipe.checkpoint.keep) == (1000, 3)  # type: ignore[union-attr]


def test_three_files_make_one_classifier(tmp_path: Path) -> None:
    files = {
        "model_config.yaml": CLASSIFIER_TRANSFORMER,
        "training_config.yaml": CLASSIFIER_BASIC + CLASSIFIER_ADVANCED.replace("\ntraining:\n", ""),
        "data_config.yaml": TEXT_AUGMENTATION + "  train: {path: train.json}\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in files]
    sources, overrides = parse_overrides([*paths[:2], "--data_config", paths[2]])
    resolved = load_recipe(sources, overrides)
    assert resolved.task_candidates == ("classify",)
    recipe = resolved.recipe
    assert recipe.model.from_ == "bert-base-uncased"  # type: ignore[attr-defined]
    assert recipe.model.dropout == 0.1
    assert recipe.data.augmentation.probability == 0.1  # type: ignore[attr-defined]
    assert recipe.run_name().startswith("model_config-")


def test_personalize_block(tmp_path: Path) -> None:
    recipe = load_block(PERSONALIZE, tmp_path)
    assert isinstance(recipe, PersonalizeRecipe)
    assert recipe.data.collection == "flickr"
    assert recipe.data.validation is not None
    assert recipe.data.validation.path == "./datasets/FLICKR/processed_dataset/val.json"
    assert recipe.model.language_model == "meta-llama/Llama-2-7b-chat-hf"
    assert get_global_batch_size(recipe, 1) == 24
    assert not load_recipe([parse_yaml(PERSONALIZE, "block").value]).recipe.find_missing_keys()


def test_routing_blocks(tmp_path: Path) -> None:
    quick = load_block(ROUTING_QUICK, tmp_path)
    assert isinstance(quick, RoutingRecipe)
    assert str(quick.evaluation.every) == "1 epoch"
    assert str(quick.checkpoint.every) == "5 epochs"
    assert quick.training.mixed_precision == "auto"
    assert not quick.logging.wandb.is_active
    assert (quick.model.hidden_size, quick.model.expert_capacity, quick.model.plasticity) == (512, 100, True)
    advanced = load_block(ROUTING_ADVANCED, tmp_path)
    assert isinstance(advanced, RoutingRecipe)
    assert (advanced.training.scheduler.t_max, advanced.training.scheduler.eta_min) == (10000, 1e-6)
    assert advanced.model.dropout == 0.1
    assert (advanced.model.expert_dropout, advanced.model.capacity_factor) == (0.1, 1.25)
    assert (advanced.distributed.enabled, advanced.distributed.processes) == (False, 4)
    assert advanced.distributed.offload
    assert advanced.training.gradient_accumulation_steps == 4
    assert advanced.data.augmentation is not None
    assert advanced.data.augmentation.mask_probability == 0.15


def test_flat_settings_are_accepted_at_the_top_level() -> None:
    recipe = check_recipe([MEDIA_SETTINGS]).recipe
    assert str(recipe.evaluation.every) == "1000 steps"
    assert str(recipe.checkpoint.every) == "5000 steps"
    assert recipe.training.max_grad_norm == 1.0
    recipe = check_recipe([MEMORY_SETTINGS]).recipe
    assert (recipe.data.workers, recipe.distributed.offload, recipe.training.gradient_checkpointing) == (4, True, True)


def test_language_flags() -> None:
    sources, overrides = parse_overrides(["language/verse", *LANGUAGE_FLAGS.split()])
    resolved = load_recipe(sources, overrides)
    recipe = resolved.recipe
    assert isinstance(recipe, LanguageRecipe)
    assert (recipe.model.size, recipe.data.train.path, recipe.data.train.kind) == ("verse", "/path/to/dataset", "jsonl")
    assert recipe.data.sequence_length == 2048
    assert recipe.training.learning_rate == 3e-5
    assert get_global_batch_size(recipe, 4) == 128
    assert any("16 per process x accumulation 2 = 32 global" in note for note in resolved.notes)
