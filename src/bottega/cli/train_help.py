"""What `bottega train --help` says of recipes: the keys that people set most, with their defaults out of the schema."""

from __future__ import annotations

import argparse
from typing import Any, cast

KEYS = {
    "data.train.path": "--data",
    "data.validation.split": "",
    "data.online": "--online",
    "training.max_steps": "--max_steps",
    "training.num_epochs": "--num_epochs",
    "training.batch_size": "--batch_size",
    "training.micro_batch_size": "--micro_batch_size",
    "training.learning_rate": "--lr",
    "training.optimizer.name": "--optimizer",
    "training.scheduler.name": "--scheduler",
    "training.scheduler.warmup_steps": "--warmup_steps",
    "training.weight_decay": "--weight_decay",
    "training.mixed_precision": "--mixed_precision",
    "training.early_stopping.patience": "",
    "evaluation.every": "",
    "checkpoint.every": "",
    "checkpoint.keep": "",
    "samples.every": "",
    "logging.wandb.project": "",
    "device": "--device",
    "seed": "--seed",
    "name": "--name",
    "output_dir": "--output_dir",
}
"""Dotted key -> its short form, where people type one."""


def add_keys_to_help(parser: argparse.ArgumentParser) -> None:
    """Write the keys under the options, when somebody asks: the schema is not loaded for anything else."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    plain = parser.format_help

    def format_help() -> str:
        parser.epilog = describe_keys()
        return plain()

    cast(Any, parser).format_help = format_help


def describe_keys() -> str:
    rows = [(f"{short or key:<20}{key if short else ''}".rstrip(), *_field(key)) for key, short in KEYS.items()]
    width = max(len(row[0]) for row in rows) + 2
    lines = [f"  {name:<{width}}{text} [{default}]" for name, text, default in rows]
    return "\n".join(
        [
            "the keys of a recipe that are set most, with their defaults; bundled recipes have some of their own:",
            *lines,
            "",
            "bottega init TASK prints all keys of a task; bottega plan RECIPE shows what would run; see docs/recipes.md",
        ]
    )


def _field(key: str) -> tuple[str, str]:
    """What the schema says of a key, and its default."""
    from typing import get_args

    from bottega.config.recipe import Recipe
    from bottega.config.section import Section
    from bottega.config.yaml_io import dump_yaml

    block: type[Section] = Recipe
    *blocks, last = key.split(".")
    for name in blocks:
        kind = block.model_fields[name].annotation
        choices = [kind, *get_args(kind)]
        block = next(one for one in choices if isinstance(one, type) and issubclass(one, Section))
    default = block.model_construct().model_dump(mode="json")[last]
    description = str(block.model_fields[last].description).partition(";")[0]
    return description, dump_yaml(default, flow=True).strip().removesuffix("\n...").strip()
