"""Translate LightningCLI's YAML: the Trainer's arguments, and classes with their init_args."""

from __future__ import annotations

import math
import re
from typing import Any

from bottega.config.error_messages import format_value
from bottega.config.importers.lightning_callbacks import map_callbacks, map_loggers
from bottega.config.importers.transformers_common import SHARDING_NOTE, add_batch_note
from bottega.config.importers.translation import (
    SkippedKeys,
    Translation,
    format_epochs,
    format_percent,
    parse_boolean,
    parse_integer,
    parse_number,
    parse_text,
)

MARKER_KEYS = (
    *(
        "max_epochs",
        "max_steps",
        "accelerator",
        "devices",
        "precision",
        "accumulate_grad_batches",
        "callbacks",
        "logger",
    ),
    *("gradient_clip_val", "val_check_interval", "check_val_every_n_epoch", "log_every_n_steps", "strategy"),
    *("limit_train_batches", "limit_val_batches", "num_nodes", "fast_dev_run", "default_root_dir"),
)
"""The block `trainer` of a Lightning file has at least one of these."""

PRECISIONS = {
    **dict.fromkeys(("32", "32-true"), "fp32"),
    **dict.fromkeys(("16", "16-mixed", "16-true"), "fp16"),
    **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true"), "bf16"),
}
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Adafactor": "adafactor", "Muon": "muon", "Lion": "lion"}
DEFAULT_WEIGHT_DECAYS = {"AdamW": 0.01, "Adam": 0.0, "SGD": 0.0, "Adafactor": 0.0, "Muon": 0.1, "Lion": 0.0}
"""Weight decay of each optimizer in torch, used if the file gives none."""
SCHEDULES = {
    "CosineAnnealingLR": "cosine",
    "CosineAnnealingWarmRestarts": "cosine_with_restarts",
    "LinearLR": "linear",
    "PolynomialLR": "polynomial",
    "ConstantLR": "constant",
    "ExponentialLR": "exponential",
    "ReduceLROnPlateau": "plateau",
    "OneCycleLR": "one_cycle",
}


def translate(translation: Translation) -> None:
    """Translate a LightningCLI configuration."""
    _map_length(translation)
    _map_batch(translation)
    _map_clipping(translation)
    _map_precision(translation)
    _map_evaluation(translation)
    _map_processes(translation)
    _map_optimizer(translation)
    _map_schedule(translation)
    map_callbacks(translation)
    map_loggers(translation)
    _map_class_arguments(translation)
    translation.map_table(
        {
            "trainer.log_every_n_steps": ("logging.every", parse_integer),
            "trainer.default_root_dir": ("output_dir", parse_text),
            "trainer.deterministic": ("deterministic", lambda v: v == "warn" or parse_boolean(v)),
        }
    )
    if type(translation.get("seed_everything")) is int:
        translation.map_key("seed_everything", "seed", translation.get("seed_everything"))
    translation.skip_remaining(SKIPPED_KEYS)
    translation.notes.append("model and data are Python classes in the file: add task, model and data.train.path")


def _map_length(translation: Translation) -> None:
    for key, recipe_key in (("max_steps", "training.max_steps"), ("max_epochs", "training.num_epochs")):
        if translation.get(f"trainer.{key}") == -1:
            translation.skip(f"trainer.{key}", "not applicable", "turned off in the file")
        if translation.find_mapped("training.max_steps") is None:
            translation.map_converted(f"trainer.{key}", recipe_key, parse_integer)
        translation.skip(
            f"trainer.{key}", "no counterpart", "either max_steps or num_epochs ends a run, not the first of both"
        )
    if not (translation.find_mapped("training.max_steps") or translation.find_mapped("training.num_epochs")):
        translation.map_default("trainer.max_epochs", 1000, recipe_key="training.num_epochs", recipe_value=1000)


def _map_batch(translation: Translation) -> None:
    """Map the batch size of the data loader, which is per process, and the number of batches in an optimizer step."""
    size_keys = [
        key for key in translation.source_values if re.search(r"^(data|model)(\.init_args)?\.(train_)?batch_size$", key)
    ]
    size = translation.map_converted(size_keys[0], "training.batch_size", parse_integer) if size_keys else None
    for key in size_keys[1:]:
        translation.skip(key, "not applicable", f"{size_keys[0]} takes precedence")
    for block in ("data", "data.init_args"):
        for key in ("eval_batch_size", "val_batch_size"):
            translation.map_converted(
                f"{block}.{key}", "evaluation.batch_size", parse_integer, note="the batch of all processes together"
            )
    key = "trainer.accumulate_grad_batches"
    accumulation_steps = translation.map_converted(key, "training.gradient_accumulation_steps", parse_integer)
    if accumulation_steps is None:
        translation.map_default(key, 1, recipe_key="training.gradient_accumulation_steps", recipe_value=1)
    if size is None:
        translation.notes.append("the file has no batch size; set training.batch_size, the batch of one process")
    else:
        add_batch_note(translation, size, accumulation_steps or 1)


def _map_clipping(translation: Translation) -> None:
    value_key, algorithm_key = "trainer.gradient_clip_val", "trainer.gradient_clip_algorithm"
    if translation.get(algorithm_key) == "value":
        translation.skip(
            value_key, "no counterpart", "gradients are clipped by their norm; gradient_clip_algorithm is value"
        )
        translation.skip(algorithm_key, "no counterpart", "gradients are clipped by their norm")
    translation.skip(algorithm_key, "not applicable", "this is always done here")
    translation.map_converted(value_key, "training.max_grad_norm", lambda v: parse_number(v) or None)
    translation.map_default(value_key, None, recipe_key="training.max_grad_norm", recipe_value=None)


def _map_precision(translation: Translation) -> None:
    key = "trainer.precision"
    precision = str(translation.get(key))
    if precision in PRECISIONS:
        note = "weights stay in fp32 here" if precision in ("16-true", "bf16-true") else None
        translation.map_key(key, "training.mixed_precision", PRECISIONS[precision], note=note)
    elif translation.is_pending(key):
        translation.skip(key, "no counterpart", "training.mixed_precision is fp32, bf16 or fp16")
    else:
        translation.map_default(key, "32-true", recipe_key="training.mixed_precision", recipe_value="fp32")


def _map_evaluation(translation: Translation) -> None:
    """Map the evaluation interval: a fraction of an epoch, a number of batches, or a number of epochs."""
    interval_key, epochs_key = "trainer.val_check_interval", "trainer.check_val_every_n_epoch"
    value, row = translation.get(interval_key), translation.find_mapped("training.gradient_accumulation_steps")
    accumulation_steps = row.recipe_value if row and isinstance(row.recipe_value, int) and row.recipe_value > 0 else 1
    if type(value) is int:
        note = f"{value} batches in the file" if accumulation_steps > 1 else None
        translation.map_key(interval_key, "evaluation.every", max(1, value // accumulation_steps), note=note)
    elif value is not None and value != 1.0:
        translation.map_converted(interval_key, "evaluation.every", _parse_epoch_fraction)
    if translation.find_mapped("evaluation.every"):
        translation.skip(epochs_key, "not applicable", "val_check_interval takes precedence")
    translation.map_converted(epochs_key, "evaluation.every", lambda v: format_epochs(parse_integer(v)))
    translation.map_default(epochs_key, 1, recipe_key="evaluation.every", recipe_value="1 epoch")
    limit_key = "trainer.limit_val_batches"
    if translation.get(limit_key) == 0 and translation.is_pending(limit_key):
        translation.map_key(limit_key, "data.validation", None, note="evaluation is off")
    elif type(translation.get(limit_key)) is int:
        translation.map_key(limit_key, "evaluation.max_batches", translation.get(limit_key))


def _parse_epoch_fraction(value: Any) -> str:
    fraction = parse_number(value)
    if not 0 < fraction <= 1:
        raise ValueError(f"expected a fraction of an epoch, got {format_value(value)}")
    return format_epochs(fraction)


def _map_processes(translation: Translation) -> None:
    device_names = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps", "auto": "auto"}
    accelerator = str(translation.get("trainer.accelerator"))
    if accelerator in device_names:
        translation.map_key("trainer.accelerator", "device", device_names[accelerator])
    translation.skip("trainer.accelerator", "no counterpart", "device is cpu, cuda or mps")
    machines = translation.map_converted("trainer.num_nodes", "distributed.machines", parse_integer) or 1
    devices = translation.get("trainer.devices")
    num_devices = len(devices) if isinstance(devices, list) else int(devices) if str(devices).isdigit() else None
    if num_devices and num_devices * machines > 1:
        note = "start them with torchrun" if not isinstance(devices, list) else "select them with CUDA_VISIBLE_DEVICES"
        translation.map_key("trainer.devices", "distributed.processes", num_devices * machines, note=note)
    translation.skip("trainer.devices", "not applicable", "one process, or as many as the launcher starts")
    strategy = str(translation.get("trainer.strategy")).lower()
    strategy_class = str(translation.get("trainer.strategy.class_path")).lower()
    key = "trainer.strategy" if translation.is_pending("trainer.strategy") else "trainer.strategy.class_path"
    if not translation.is_pending(key):
        return
    if any("fsdp" in name or "deepspeed" in name for name in (strategy, strategy_class)):
        translation.map_key(key, "distributed.strategy", "fsdp", note=SHARDING_NOTE)
        if "offload" in strategy:
            translation.map_key(key, "distributed.offload", True, note=SHARDING_NOTE)
    elif any("ddp" in name for name in (strategy, strategy_class)):
        translation.map_key(key, "distributed.strategy", "ddp")
    elif strategy == "auto":
        translation.map_key(key, "distributed.strategy", "auto")
    else:
        translation.skip(key, "no counterpart", "distributed.strategy is ddp or fsdp")


def _map_optimizer(translation: Translation) -> None:
    """Map the optimizer, at the top or an argument of the model; its arguments are under init_args or beside class_path."""
    block = next(
        (b for b in ("optimizer", "model.init_args.optimizer", "model.optimizer") if translation.get_pending_values(b)),
        None,
    )
    for model_block in ("model.init_args", "model"):
        for name in ("learning_rate", "lr"):
            translation.map_converted(f"{model_block}.{name}", "training.learning_rate", parse_number)
        translation.map_converted(f"{model_block}.weight_decay", "training.weight_decay", parse_number)
    if block is None:
        translation.notes.append(
            "the file has no optimizer, and one created in the model's code is not taken over; set training.optimizer"
        )
        return
    name = str(translation.get(f"{block}.class_path")).rpartition(".")[2]
    if name in OPTIMIZERS:
        translation.map_key(f"{block}.class_path", "training.optimizer.name", OPTIMIZERS[name])
    else:
        translation.skip(
            f"{block}.class_path",
            "no counterpart",
            "adamw is used; muon, lion, adafactor, sgd and adam are available too",
        )
    for key in (f"{block}.init_args", block):
        translation.map_table(
            {
                f"{key}.lr": ("training.learning_rate", parse_number),
                f"{key}.weight_decay": ("training.weight_decay", parse_number),
                f"{key}.betas": ("training.optimizer.betas", _parse_pair),
                f"{key}.eps": ("training.optimizer.eps", parse_number),
                f"{key}.momentum": ("training.optimizer.momentum", parse_number),
                f"{key}.nesterov": ("training.optimizer.nesterov", parse_boolean),
            }
        )
    if name in OPTIMIZERS:
        translation.map_default(f"{block}.init_args.lr", 1e-3, recipe_key="training.learning_rate", recipe_value=1e-3)
        decay = DEFAULT_WEIGHT_DECAYS[name]
        translation.map_default(
            f"{block}.init_args.weight_decay", decay, recipe_key="training.weight_decay", recipe_value=decay
        )
    if name == "SGD":
        translation.map_default(
            f"{block}.init_args.momentum", 0.0, recipe_key="training.optimizer.momentum", recipe_value=0.0
        )
    if not translation.get_pending_values("lr_scheduler") and not translation.get_pending_values(
        "model.init_args.lr_scheduler"
    ):
        translation.map_default("lr_scheduler", None, recipe_key="training.scheduler.name", recipe_value="constant")
    translation.skip_block(block, "no counterpart", "training.optimizer has betas, eps, momentum and nesterov")


def _parse_pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"expected two numbers, got {format_value(value)}")
    return [parse_number(part) for part in value]


def _map_schedule(translation: Translation) -> None:
    block = next(
        (b for b in ("lr_scheduler", "model.init_args.lr_scheduler") if translation.get_pending_values(b)), None
    )
    for key in ("model.init_args.warmup_steps", "model.warmup_steps"):
        translation.map_converted(key, "training.scheduler.warmup_steps", parse_integer)
    if block is None:
        return
    name = str(translation.get(f"{block}.class_path")).rpartition(".")[2]
    if name not in SCHEDULES:
        translation.skip(f"{block}.class_path", "no counterpart", "cosine is used; docs/recipes.md lists the others")
        translation.skip_block(block, "no counterpart", "a setting of a schedule that is not available")
        return
    translation.map_key(f"{block}.class_path", "training.scheduler.name", SCHEDULES[name])
    key, recipe_block = f"{block}.init_args", "training.scheduler"
    if name == "ExponentialLR":
        _map_exponential(translation, f"{key}.gamma")
    if name == "OneCycleLR":
        translation.map_converted(f"{key}.max_lr", "training.learning_rate", parse_number)
        translation.map_converted(
            f"{key}.pct_start", f"{recipe_block}.warmup_steps", lambda v: format_percent(parse_number(v))
        )
    if name == "ReduceLROnPlateau":
        translation.map_converted(f"{key}.factor", f"{recipe_block}.factor", parse_number)
        translation.map_converted(f"{key}.patience", f"{recipe_block}.patience", parse_integer)
        translation.map_default(f"{key}.factor", 0.1, recipe_key=f"{recipe_block}.factor", recipe_value=0.1)
        translation.map_default(f"{key}.patience", 10, recipe_key=f"{recipe_block}.patience", recipe_value=10)
    translation.map_converted(f"{key}.eta_min", f"{recipe_block}.eta_min", parse_number)
    translation.map_converted(f"{key}.power", f"{recipe_block}.power", parse_number)
    for argument in ("T_max", "total_iters", "total_steps"):
        translation.skip(f"{key}.{argument}", "not applicable", "the schedule is as long as the run")
    translation.skip_block(block, "no counterpart", "not a setting of training.scheduler")


def _map_exponential(translation: Translation, key: str) -> None:
    """Map gamma: a factor per epoch in torch, the factor over the whole run here."""
    row = translation.find_mapped("training.num_epochs")
    factor = translation.get(key)
    if row is not None and isinstance(factor, float) and 0 < factor <= 1:
        total = max(1e-12, math.pow(factor, row.recipe_value))
        translation.map_key(key, "training.scheduler.gamma", total, note="over the whole run")
    translation.skip(
        key, "no counterpart", "training.scheduler.gamma is the factor over the whole run; needs max_epochs"
    )


def _map_class_arguments(translation: Translation) -> None:
    """Map arguments of the model and the data that have conventional names."""
    for prefix in ("model.init_args", "model"):
        for name in ("pretrained_model_name_or_path", "model_name_or_path", "model_name"):
            translation.map_converted(f"{prefix}.{name}", "model.from", parse_text)
        translation.map_converted(f"{prefix}.dropout", "model.dropout", parse_number)
        translation.map_converted(f"{prefix}.label_smoothing", "training.label_smoothing", parse_number)
        translation.map_converted(f"{prefix}.ema_decay", "training.ema", parse_number)
        translation.map_converted(f"{prefix}.gradient_checkpointing", "training.gradient_checkpointing", parse_boolean)
    for prefix in ("data.init_args", "data"):
        translation.map_converted(f"{prefix}.num_workers", "data.workers", parse_integer)
        translation.map_converted(f"{prefix}.pin_memory", "data.pin_memory", parse_boolean)
        for name in ("data_dir", "data_path", "root", "train_file", "path"):
            translation.map_converted(f"{prefix}.{name}", "data.train.path", parse_text)
        for name in ("val_split", "validation_split"):
            if isinstance(translation.get(f"{prefix}.{name}"), float):
                translation.map_converted(f"{prefix}.{name}", "data.validation.split", parse_number)
        for name in ("max_seq_length", "sequence_length", "block_size", "max_length"):
            translation.map_converted(f"{prefix}.{name}", "data.sequence_length", parse_integer)


_INTERNAL_SETTING = "an internal setting of Lightning's training loop"
_USES_ALL_DATA = "a run uses all of its data; data.limit takes the first N samples"

SKIPPED_KEYS = SkippedKeys(
    no_counterpart={
        "model": "an argument of a class that is not loaded",
        "data": "an argument of a class that is not loaded",
        "model.class_path": "custom code is not run; set task and model",
        "data.class_path": "custom code is not run; set data.train.path",
        **dict.fromkeys(("trainer.limit_train_batches", "trainer.overfit_batches"), _USES_ALL_DATA),
        "trainer.limit_val_batches": "evaluation.max_batches is a number of batches",
        "trainer.max_time": "the length of a run is given in steps or epochs",
        **dict.fromkeys(("trainer.min_epochs", "trainer.min_steps"), "training.early_stopping has patience only"),
        "trainer.fast_dev_run": "bottega plan FILE --check, or training.max_steps=1",
        "trainer.strategy": "a setting of Lightning's strategy",
        "trainer.plugins": "custom code is not run",
        "trainer.profiler": "bottega inspect and the log show where time goes",
        "trainer.sync_batchnorm": "batch statistics are computed per process",
        "trainer.reload_dataloaders_every_n_epochs": "the data does not change during a run",
    },
    not_applicable={
        "ckpt_path": "the same command resumes by itself; train --resume_from starts from a checkpoint",
        "seed_everything": "a run always has a seed; set seed",
        "trainer.val_check_interval": "once an epoch, as set by check_val_every_n_epoch",
        "trainer.enable_checkpointing": "checkpoints are always saved; set checkpoint.every",
        "trainer.enable_progress_bar": "always shown; use train --quiet for less output",
        "trainer.enable_model_summary": "bottega inspect shows the model",
        **dict.fromkeys(
            ("trainer.num_sanity_val_steps", "trainer.inference_mode", "trainer.benchmark"), _INTERNAL_SETTING
        ),
        **dict.fromkeys(
            ("trainer.detect_anomaly", "trainer.barebones", "trainer.use_distributed_sampler"), _INTERNAL_SETTING
        ),
        **dict.fromkeys(
            ("trainer.limit_test_batches", "trainer.limit_predict_batches"), "a setting of testing, not of training"
        ),
        **dict.fromkeys(("trainer.model_registry", "trainer.enable_autolog_hparams"), _INTERNAL_SETTING),
    },
    harmless_values={
        **dict.fromkeys(("trainer.limit_train_batches", "trainer.limit_val_batches"), (1.0,)),
        "trainer.overfit_batches": (0.0,),
    },
)
