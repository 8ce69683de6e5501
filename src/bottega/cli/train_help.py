"""The keys of a recipe in `bottega train --help`: the keys that are set most often, with descriptions and defaults from the schema."""

from __future__ import annotations

import argparse
from typing import Any, cast

HELP_KEYS = {
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
"""Dotted key -> its short flag, or "" if there is none."""


def add_keys_to_help(parser: argparse.ArgumentParser) -> None:
    """List the keys below the options; the schema is loaded only when the help is printed."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    original_format_help = parser.format_help

    def format_help() -> str:
        parser.epilog = describe_keys()
        return original_format_help()

    cast(Any, parser).format_help = format_help


def describe_keys() -> str:
    """Return a line for each key: its flag, its dotted name, its description and its default."""
    rows = [
        (f"{flag or key:<20}{key if flag else ''}".rstrip(), *_describe_field(key)) for key, flag in HELP_KEYS.items()
    ]
    width = max(len(row[0]) for row in rows) + 2
    lines = [f"  {name:<{width}}{text} [{default}]" for name, text, default in rows]
    return "\n".join(
        [
            "most used recipe keys, as key=value or --flag value, with [defaults]; bundled recipes override some:",
            *lines,
            "",
            "all keys of a task with their defaults:    bottega init TASK        (explained in docs/recipes.md)",
            "the complete recipe of a command:          bottega plan RECIPE [key=value]...",
            "bundled recipes to start from:             bottega recipes",
        ]
    )


def _describe_field(key: str) -> tuple[str, str]:
    """Return the description of a dotted key and its default as YAML."""
    from typing import get_args

    from bottega.config.recipe import Recipe
    from bottega.config.section import Section
    from bottega.config.yaml_io import dump_yaml

    section: type[Section] = Recipe
    *section_names, field_name = key.split(".")
    for name in section_names:
        annotation = section.model_fields[name].annotation
        choices = [annotation, *get_args(annotation)]
        section = next(choice for choice in choices if isinstance(choice, type) and issubclass(choice, Section))
    default = section.model_construct().model_dump(mode="json")[field_name]
    description = str(section.model_fields[field_name].description).partition(";")[0]
    return description, dump_yaml(default, flow=True).strip().removesuffix("\n...").strip()
