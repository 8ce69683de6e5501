"""Translate Lightning's callbacks and loggers: checkpoints, early stopping, weight averaging, TensorBoard and wandb."""

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
    """Map `trainer.callbacks`; classes without a counterpart are left out."""
    for block in _list_blocks(translation, "trainer.callbacks"):
        class_name, init_args = str(translation.get(f"{block}.class_path")).rpartition(".")[2], f"{block}.init_args"
        if class_name == "ModelCheckpoint":
            _map_checkpoint(translation, init_args)
        elif class_name == "EarlyStopping":
            map_monitored_metric(
                translation,
                metric_key=f"{init_args}.monitor",
                mode_key=f"{init_args}.mode",
                recipe_block="training.early_stopping",
            )
            translation.map_converted(f"{init_args}.patience", "training.early_stopping.patience", parse_integer)
            translation.map_converted(
                f"{init_args}.min_delta", "training.early_stopping.threshold", lambda v: abs(parse_number(v))
            )
            translation.map_default(
                f"{init_args}.patience", 3, recipe_key="training.early_stopping.patience", recipe_value=3
            )
        elif class_name in ("EMA", "EMAWeightAveraging", "WeightAveraging"):
            translation.map_converted(f"{init_args}.decay", "training.ema", parse_number)
        if class_name in ("ModelCheckpoint", "EarlyStopping", "EMA", "EMAWeightAveraging", "WeightAveraging"):
            translation.skip(f"{block}.class_path", "not applicable", "part of every run; its settings are taken over")
        elif class_name in MONITORING_CALLBACKS:
            translation.skip(f"{block}.class_path", "not applicable", "shown and logged anyway")
        else:
            translation.skip(f"{block}.class_path", "no counterpart", "custom code is not run")
        translation.skip_block(block, "no counterpart", f"a setting of {class_name}")


def _list_blocks(translation: Translation, key: str) -> list[str]:
    """Return the keys of the blocks of a list, or of the single block given in its place."""
    pattern = re.compile(rf"({re.escape(key)}(?:\.\d+)?)\..*")
    return list(
        dict.fromkeys(match[1] for name in translation.get_pending_values(key) if (match := pattern.match(name)))
    )


def _map_checkpoint(translation: Translation, init_args: str) -> None:
    translation.map_converted(f"{init_args}.every_n_train_steps", "checkpoint.every", parse_integer)
    if translation.find_mapped("checkpoint.every"):
        translation.skip(f"{init_args}.every_n_epochs", "not applicable", "every_n_train_steps takes precedence")
    translation.map_converted(
        f"{init_args}.every_n_epochs", "checkpoint.every", lambda v: format_epochs(parse_integer(v))
    )
    translation.map_default(f"{init_args}.every_n_epochs", 1, recipe_key="checkpoint.every", recipe_value="1 epoch")
    top_k = translation.get(f"{init_args}.save_top_k")
    if isinstance(top_k, int) and top_k > 0:
        translation.map_key(
            f"{init_args}.save_top_k", "checkpoint.keep", top_k, note="the newest and the best, not the best k"
        )
    translation.skip(
        f"{init_args}.save_top_k", "no counterpart", "checkpoint.keep is the number of newest checkpoints to keep"
    )
    map_monitored_metric(
        translation, metric_key=f"{init_args}.monitor", mode_key=f"{init_args}.mode", recipe_block="evaluation"
    )
    translation.skip(f"{init_args}.save_last", "not applicable", "the newest is always kept")
    for key in ("dirpath", "filename", "auto_insert_metric_name", "verbose", "save_on_train_epoch_end"):
        translation.skip(f"{init_args}.{key}", "not applicable", "checkpoints are in the run's folder")


def map_loggers(translation: Translation) -> None:
    """Map `trainer.logger`; loggers without a counterpart are left out."""
    if isinstance(translation.get("trainer.logger"), bool):
        translation.map_key("trainer.logger", "logging.tensorboard", translation.get("trainer.logger"))
    for block in _list_blocks(translation, "trainer.logger"):
        class_name, init_args = str(translation.get(f"{block}.class_path")).rpartition(".")[2], f"{block}.init_args"
        if class_name == "WandbLogger":
            translation.map_key(f"{block}.class_path", "logging.wandb.enabled", True)
            for name in ("project", "entity", "name", "notes"):
                translation.map_converted(f"{init_args}.{name}", f"logging.wandb.{name}", parse_text)
            translation.map_converted(f"{init_args}.tags", "logging.wandb.tags", parse_text_list)
            translation.map_converted(f"{init_args}.offline", "logging.wandb.offline", parse_boolean)
        elif class_name == "TensorBoardLogger":
            translation.map_key(f"{block}.class_path", "logging.tensorboard", True)
        elif class_name == "CSVLogger":
            translation.skip(f"{block}.class_path", "not applicable", "metrics are always written to a file as well")
        translation.skip_block(block, "no counterpart", f"a setting of {class_name}")
