"""Lightning's callbacks and loggers: classes by name, of which those that every run has here are understood."""

from __future__ import annotations

import re

from bottega.config.importers.metric_names import map_monitored_metric
from bottega.config.importers.translation import (
    Translation,
    format_epochs,
    parse_boolean,
    parse_integer,
    parse_number,
    parse_text,
    parse_text_list,
)

MONITORING_CALLBACKS = (
    "LearningRateMonitor",
    "DeviceStatsMonitor",
    "RichProgressBar",
    "TQDMProgressBar",
    "ModelSummary",
    "RichModelSummary",
    "Timer",
)


def map_callbacks(translation: Translation) -> None:
    for block in _blocks(translation, "trainer.callbacks"):
        kind, said = str(translation.get(f"{block}.class_path")).rpartition(".")[2], f"{block}.init_args"
        if kind == "ModelCheckpoint":
            _checkpoint(translation, said)
        elif kind == "EarlyStopping":
            map_monitored_metric(
                translation, metric=f"{said}.monitor", mode=f"{said}.mode", recipe_block="training.early_stopping"
            )
            translation.map_converted(f"{said}.patience", "training.early_stopping.patience", parse_integer)
            translation.map_converted(
                f"{said}.min_delta", "training.early_stopping.threshold", lambda v: abs(parse_number(v))
            )
            translation.map_default(f"{said}.patience", 3, "training.early_stopping.patience", 3)
        elif kind in ("EMA", "EMAWeightAveraging", "WeightAveraging"):
            translation.map_converted(f"{said}.decay", "training.ema", parse_number)
        if kind in ("ModelCheckpoint", "EarlyStopping", "EMA", "EMAWeightAveraging", "WeightAveraging"):
            translation.skip(
                f"{block}.class_path", "meaningless here", "part of every run; its settings are taken over"
            )
        elif kind in MONITORING_CALLBACKS:
            translation.skip(f"{block}.class_path", "meaningless here", "shown and logged anyway")
        else:
            translation.skip(f"{block}.class_path", "no counterpart", "code named in a file is not run")
        translation.skip_block(block, "no counterpart", f"of {kind}")


def _blocks(translation: Translation, key: str) -> list[str]:
    """The blocks of a list, or the one block that stands in its place."""
    inside = re.compile(rf"({re.escape(key)}(?:\.\d+)?)\..*")
    return list(dict.fromkeys(match[1] for name in translation.pending_under(key) if (match := inside.match(name))))


def _checkpoint(translation: Translation, said: str) -> None:
    translation.map_converted(f"{said}.every_n_train_steps", "checkpoint.every", parse_integer)
    if translation.find_mapped("checkpoint.every"):
        translation.skip(f"{said}.every_n_epochs", "meaningless here", "every_n_train_steps takes precedence")
    translation.map_converted(f"{said}.every_n_epochs", "checkpoint.every", lambda v: format_epochs(parse_integer(v)))
    translation.map_default(f"{said}.every_n_epochs", 1, "checkpoint.every", "1 epoch")
    top = translation.get(f"{said}.save_top_k")
    if isinstance(top, int) and top > 0:
        translation.map_key(
            f"{said}.save_top_k", "checkpoint.keep", top, note="the newest and the best, not the best k"
        )
    translation.skip(
        f"{said}.save_top_k", "no counterpart", "checkpoint.keep is the number of newest checkpoints to keep"
    )
    map_monitored_metric(translation, metric=f"{said}.monitor", mode=f"{said}.mode", recipe_block="evaluation")
    translation.skip(f"{said}.save_last", "meaningless here", "the newest is always kept")
    for key in ("dirpath", "filename", "auto_insert_metric_name", "verbose", "save_on_train_epoch_end"):
        translation.skip(f"{said}.{key}", "meaningless here", "checkpoints are in the run's folder")


def map_loggers(translation: Translation) -> None:
    if isinstance(translation.get("trainer.logger"), bool):
        translation.map_key("trainer.logger", "logging.tensorboard", translation.get("trainer.logger"))
    for block in _blocks(translation, "trainer.logger"):
        kind, said = str(translation.get(f"{block}.class_path")).rpartition(".")[2], f"{block}.init_args"
        if kind == "WandbLogger":
            translation.map_key(f"{block}.class_path", "logging.wandb.enabled", True)
            for name in ("project", "entity", "name", "notes"):
                translation.map_converted(f"{said}.{name}", f"logging.wandb.{name}", parse_text)
            translation.map_converted(f"{said}.tags", "logging.wandb.tags", parse_text_list)
            translation.map_converted(f"{said}.offline", "logging.wandb.offline", parse_boolean)
        elif kind == "TensorBoardLogger":
            translation.map_key(f"{block}.class_path", "logging.tensorboard", True)
        elif kind == "CSVLogger":
            translation.skip(f"{block}.class_path", "meaningless here", "metrics are always written to a file as well")
        translation.skip_block(block, "no counterpart", f"of {kind}")
