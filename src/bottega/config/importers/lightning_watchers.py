"""Lightning's callbacks and loggers: classes by name, of which those that every run has here are understood."""

from __future__ import annotations

import re

from bottega.config.importers.mapping import Sheet, epochs, number, switch, text, texts, whole
from bottega.config.importers.watched import watched

WATCHERS = (
    "LearningRateMonitor",
    "DeviceStatsMonitor",
    "RichProgressBar",
    "TQDMProgressBar",
    "ModelSummary",
    "RichModelSummary",
    "Timer",
)


def callbacks(sheet: Sheet) -> None:
    for block in _blocks(sheet, "trainer.callbacks"):
        kind, said = str(sheet.get(f"{block}.class_path")).rpartition(".")[2], f"{block}.init_args"
        if kind == "ModelCheckpoint":
            _checkpoint(sheet, said)
        elif kind == "EarlyStopping":
            watched(sheet, metric=f"{said}.monitor", mode=f"{said}.mode", ours="training.early_stopping")
            sheet.convert(f"{said}.patience", "training.early_stopping.patience", whole)
            sheet.convert(f"{said}.min_delta", "training.early_stopping.threshold", lambda v: abs(number(v)))
            sheet.default(f"{said}.patience", 3, "training.early_stopping.patience", 3)
        elif kind in ("EMA", "EMAWeightAveraging", "WeightAveraging"):
            sheet.convert(f"{said}.decay", "training.ema", number)
        if kind in ("ModelCheckpoint", "EarlyStopping", "EMA", "EMAWeightAveraging", "WeightAveraging"):
            sheet.leave(f"{block}.class_path", "meaningless here", "a part of every run here; its settings are taken")
        elif kind in WATCHERS:
            sheet.leave(f"{block}.class_path", "meaningless here", "shown and logged anyway")
        else:
            sheet.leave(f"{block}.class_path", "no counterpart", "no code from a file is run")
        sheet.leave_block(block, "no counterpart", f"of {kind}")


def _blocks(sheet: Sheet, key: str) -> list[str]:
    """The blocks of a list, or the one block that stands in its place."""
    inside = re.compile(rf"({re.escape(key)}(?:\.\d+)?)\..*")
    return list(dict.fromkeys(match[1] for name in sheet.under(key) if (match := inside.match(name))))


def _checkpoint(sheet: Sheet, said: str) -> None:
    sheet.convert(f"{said}.every_n_train_steps", "checkpoint.every", whole)
    if sheet.ours("checkpoint.every"):
        sheet.leave(f"{said}.every_n_epochs", "meaningless here", "every_n_train_steps decides")
    sheet.convert(f"{said}.every_n_epochs", "checkpoint.every", lambda v: epochs(whole(v)))
    sheet.default(f"{said}.every_n_epochs", 1, "checkpoint.every", "1 epoch")
    top = sheet.get(f"{said}.save_top_k")
    if isinstance(top, int) and top > 0:
        sheet.put(f"{said}.save_top_k", "checkpoint.keep", top, note="the newest and the best, not the best so many")
    sheet.leave(f"{said}.save_top_k", "no counterpart", "checkpoint.keep is how many of the newest stay")
    watched(sheet, metric=f"{said}.monitor", mode=f"{said}.mode", ours="evaluation")
    sheet.leave(f"{said}.save_last", "meaningless here", "the newest is always kept")
    for key in ("dirpath", "filename", "auto_insert_metric_name", "verbose", "save_on_train_epoch_end"):
        sheet.leave(f"{said}.{key}", "meaningless here", "checkpoints lie in the run's folder")


def logger(sheet: Sheet) -> None:
    if isinstance(sheet.get("trainer.logger"), bool):
        sheet.put("trainer.logger", "logging.tensorboard", sheet.get("trainer.logger"))
    for block in _blocks(sheet, "trainer.logger"):
        kind, said = str(sheet.get(f"{block}.class_path")).rpartition(".")[2], f"{block}.init_args"
        if kind == "WandbLogger":
            sheet.put(f"{block}.class_path", "logging.wandb.enabled", True)
            for name in ("project", "entity", "name", "notes"):
                sheet.convert(f"{said}.{name}", f"logging.wandb.{name}", text)
            sheet.convert(f"{said}.tags", "logging.wandb.tags", texts)
            sheet.convert(f"{said}.offline", "logging.wandb.offline", switch)
        elif kind == "TensorBoardLogger":
            sheet.put(f"{block}.class_path", "logging.tensorboard", True)
        elif kind == "CSVLogger":
            sheet.leave(f"{block}.class_path", "meaningless here", "metrics are always written to a file as well")
        sheet.leave_block(block, "no counterpart", f"of {kind}")
