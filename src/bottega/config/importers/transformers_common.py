"""Keys that trainers built on transformers share: length, batch, optimizer, schedule, precision, intervals, sharding."""

from __future__ import annotations

import math
import re
from typing import Any

from bottega.config.error_messages import format_value
from bottega.config.importers.metric_names import map_monitored_metric
from bottega.config.importers.translation import (
    Translation,
    format_percent,
    is_disabled,
    parse_boolean,
    parse_integer,
    parse_number,
    parse_text,
)

SHARDING_NOTE = "train does not support it until sharding is implemented; remove it if the model fits on one GPU"
_FULL_PRECISION_STATE = "the same optimizer, with its state in full precision"

OPTIMIZERS: dict[str, tuple[str, str | None]] = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla"), ("adamw", None)),
    **dict.fromkeys(("adamw_torch_npu_fused", "adamw_apex_fused", "adamw_anyprecision"), ("adamw", None)),
    **dict.fromkeys(
        ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit"), ("adamw", _FULL_PRECISION_STATE)
    ),
    **dict.fromkeys(
        ("paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit", "ao_adamw_4bit"), ("adamw", _FULL_PRECISION_STATE)
    ),
    **dict.fromkeys(("ao_adamw_8bit", "ao_adamw_fp8"), ("adamw", _FULL_PRECISION_STATE)),
    **dict.fromkeys(("lion", "lion_32bit", "lion_pytorch"), ("lion", None)),
    **dict.fromkeys(
        ("lion_8bit", "paged_lion", "paged_lion_32bit", "paged_lion_8bit"), ("lion", _FULL_PRECISION_STATE)
    ),
    "optimi_adamw": ("adamw", None),
    "adafactor": ("adafactor", None),
    "muon": ("muon", None),
    "sgd": ("sgd", None),
}
"""Optimizer of transformers -> optimizer here, and what differs."""

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "polynomial": "polynomial",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
    "reduce_lr_on_plateau": "plateau",
    "one_cycle": "one_cycle",
}

_SCHEDULE_DIFFERENCES = {
    "warmup_stable_decay": "decays linearly here",
    # Without a warm-up the schedule of transformers decays over 10,000 steps, ours over a single step.
    "inverse_sqrt": "decays relative to the length of the warm-up; set warmup_steps",
}
"""What differs in a schedule of the same name."""

_SCHEDULER_ARGUMENTS = {
    "num_cycles": ("cycles", parse_integer),
    "power": ("power", parse_number),
    "lr_end": ("eta_min", parse_number),
    "min_lr": ("eta_min", parse_number),
    "min_lr_rate": ("min_ratio", parse_number),
    "min_lr_ratio": ("min_ratio", parse_number),
    "factor": ("factor", parse_number),
    "patience": ("patience", parse_integer),
}
"""lr_scheduler_kwargs -> keys of training.scheduler."""


def map_length(translation: Translation, epochs_key: str, *, default: int) -> None:
    """Map the length of the run; max_steps takes precedence over epochs, as in transformers."""
    if translation.is_pending("max_steps"):
        if isinstance(translation.get("max_steps"), int) and translation.get("max_steps") <= 0:
            translation.skip("max_steps", "not applicable", "turned off in the file")
        else:
            translation.map_converted("max_steps", "training.max_steps", parse_integer)
    if translation.find_mapped("training.max_steps"):
        translation.skip(epochs_key, "not applicable", "max_steps takes precedence")
    elif translation.is_pending(epochs_key):
        amount = translation.get(epochs_key)
        is_fractional = isinstance(amount, float) and math.isfinite(amount) and amount != int(amount)
        note = "a whole number of epochs here; set training.max_steps for a part of one" if is_fractional else None
        translation.map_converted(
            epochs_key, "training.num_epochs", lambda v: math.ceil(v) if is_fractional else parse_integer(v), note=note
        )
    else:
        translation.map_default(epochs_key, default, recipe_key="training.num_epochs", recipe_value=default)


def map_batch_size(translation: Translation, size_key: str, *, default: int) -> None:
    """Map batch size and accumulation unchanged: with gradient_accumulation_steps, batch_size is per process here too."""
    size = translation.map_converted(size_key, "training.batch_size", parse_integer)
    accumulation_steps = translation.map_converted(
        "gradient_accumulation_steps", "training.gradient_accumulation_steps", parse_integer
    )
    if size is None:
        translation.map_default(size_key, default, recipe_key="training.batch_size", recipe_value=default)
    if accumulation_steps is None:
        translation.map_default(
            "gradient_accumulation_steps", 1, recipe_key="training.gradient_accumulation_steps", recipe_value=1
        )
    add_batch_note(translation, size or default, accumulation_steps or 1)


def add_batch_note(translation: Translation, size: int, accumulation_steps: int) -> None:
    """Add a note with the batch size of an optimizer step."""
    translation.notes.append(
        f"batch: {size} per process x {accumulation_steps} = {size * accumulation_steps} per step with one process, as in the file"
    )


def map_optimizer(translation: Translation, key: str) -> None:
    """Map the optimizer and its arguments."""
    optimizer = str(translation.get(key)).lower() if translation.is_pending(key) else None
    if optimizer is not None and optimizer in OPTIMIZERS:
        name, note = OPTIMIZERS[optimizer]
        translation.map_key(key, "training.optimizer.name", name, note=note)
    elif optimizer is not None:
        translation.skip(key, "no counterpart", "adamw is used; muon, lion, adafactor, sgd and adam are available too")
    beta1, beta2 = translation.get("adam_beta1"), translation.get("adam_beta2")
    row = translation.find_mapped("training.optimizer.name")
    if beta1 is not None or beta2 is not None:
        betas = [0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2]
        for beta_key in ("adam_beta1", "adam_beta2"):
            translation.map_converted(
                beta_key, "training.optimizer.betas", lambda _: [parse_number(beta) for beta in betas]
            )
    elif row is not None and row.recipe_value == "lion":
        translation.map_default(
            "adam_beta1, adam_beta2", [0.9, 0.999], recipe_key="training.optimizer.betas", recipe_value=[0.9, 0.999]
        )
    translation.map_converted("adam_epsilon", "training.optimizer.eps", parse_number)
    if row is not None and row.recipe_value == "sgd":
        translation.map_default("momentum", 0.0, recipe_key="training.optimizer.momentum", recipe_value=0.0)


def map_gradient_clipping(translation: Translation) -> None:
    """Map max_grad_norm; clipping is turned off by 0 in transformers and by null here."""
    note = "null turns it off" if translation.get("max_grad_norm") == 0 else None
    translation.map_converted("max_grad_norm", "training.max_grad_norm", lambda v: parse_number(v) or None, note=note)


def map_schedule(translation: Translation, key: str, *, default: str) -> None:
    """Map the learning-rate schedule with its arguments and warm-up."""
    schedule = str(translation.get(key)).lower() if translation.is_pending(key) else None
    if schedule is None:
        translation.map_default(key, default, recipe_key="training.scheduler.name", recipe_value=SCHEDULES[default])
    elif schedule in SCHEDULES:
        translation.map_key(
            key, "training.scheduler.name", SCHEDULES[schedule], note=_SCHEDULE_DIFFERENCES.get(schedule)
        )
    else:
        translation.skip(key, "no counterpart", "cosine is used; docs/recipes.md lists the others")
    for source_key, (name, convert) in _SCHEDULER_ARGUMENTS.items():
        translation.map_converted(f"lr_scheduler_kwargs.{source_key}", f"training.scheduler.{name}", convert)
    _map_decay_steps(translation)
    if schedule == "polynomial":
        translation.map_default(
            "lr_scheduler_kwargs.lr_end", 1e-7, recipe_key="training.scheduler.eta_min", recipe_value=1e-7
        )
    if schedule == "reduce_lr_on_plateau":
        translation.map_default(
            "lr_scheduler_kwargs.factor", 0.1, recipe_key="training.scheduler.factor", recipe_value=0.1
        )
        translation.map_default(
            "lr_scheduler_kwargs.patience", 10, recipe_key="training.scheduler.patience", recipe_value=10
        )
    _map_warmup(translation, has_no_warmup=schedule in ("constant", "reduce_lr_on_plateau"))


def _map_decay_steps(translation: Translation) -> None:
    """Map num_decay_steps to a fraction of the run, which needs the length of the run."""
    key, max_steps_row = "lr_scheduler_kwargs.num_decay_steps", translation.find_mapped("training.max_steps")
    if max_steps_row is not None:
        translation.map_converted(
            key, "training.scheduler.decay_fraction", lambda v: parse_integer(v) / max_steps_row.recipe_value
        )
    translation.skip(
        key, "no counterpart", "training.scheduler.decay_fraction is a fraction of the run; needs max_steps"
    )


def _map_warmup(translation: Translation, *, has_no_warmup: bool) -> None:
    key, recipe_key = "warmup_steps", "training.scheduler.warmup_steps"
    for source_key in ("warmup_steps", "warmup_ratio"):
        if has_no_warmup:
            translation.skip(source_key, "not applicable", "the trainer's schedule of this name has no warm-up")
    steps = translation.get(key)
    if isinstance(steps, int | float) and 0 < steps < 1:
        translation.map_converted(key, recipe_key, format_percent)
    elif steps or not translation.get("warmup_ratio"):
        translation.map_converted(key, recipe_key, parse_integer)
    else:
        translation.skip(key, "not applicable", "0, so warmup_ratio takes precedence")
    if translation.find_mapped(recipe_key):
        translation.skip("warmup_ratio", "not applicable", "warmup_steps takes precedence")
    translation.map_converted("warmup_ratio", recipe_key, lambda v: format_percent(parse_number(v)))


def map_precision(translation: Translation, *, default: str) -> None:
    """Map the precision switches of transformers to one key."""
    switches = [("bf16", "bf16"), ("bfloat16", "bf16"), ("pure_bf16", "bf16"), ("fp16", "fp16"), ("float16", "fp16")]
    key = "training.mixed_precision"
    for source_key, name in switches:
        value = translation.get(source_key)
        if value is None or is_disabled(value) or translation.find_mapped(key):
            continue
        is_pure = source_key in ("bfloat16", "pure_bf16", "float16") or value == "full"
        note = "weights stay in fp32 here" if is_pure else None
        translation.map_key(source_key, key, "auto" if str(value).lower() == "auto" else name, note=note)
    precision_row = translation.find_mapped(key)
    for source_key, _ in switches:
        if precision_row is None and translation.is_pending(source_key):
            translation.map_key(source_key, key, "fp32")
        elif precision_row is not None:
            translation.skip(source_key, "not applicable", f"{precision_row.source_key} takes precedence")
    if translation.find_mapped(key) is None:
        translation.map_default("bf16", "auto" if default == "auto" else False, recipe_key=key, recipe_value=default)


def map_cadence(
    translation: Translation,
    recipe_key: str,
    *,
    strategy_keys: tuple[str, ...],
    steps_key: str,
    default_steps: Any = None,
) -> None:
    """Map a strategy (steps, epoch, no) and a number of steps to one key.

    `default_steps` is the number of steps if the strategy is steps and the file gives no number.
    """
    strategy_key = next((key for key in strategy_keys if translation.is_pending(key)), None)
    strategy = "steps" if strategy_key is None else str(translation.get(strategy_key)).lower()
    if strategy_key is not None and strategy == "epoch":
        translation.map_key(strategy_key, recipe_key, "1 epoch")
    elif strategy_key is not None and strategy == "best":
        translation.skip(strategy_key, "not applicable", "the best checkpoint is always kept")
    elif strategy_key is not None and strategy in ("no", "false", "none"):
        if recipe_key == "logging.every":
            translation.skip(strategy_key, "no counterpart", "the log is always written; logging.every sets how often")
        else:
            translation.map_key(strategy_key, recipe_key, None, note="null means at the end only")
    elif strategy == "steps":
        every = translation.map_converted(steps_key, recipe_key, _parse_interval)
        if strategy_key is not None and every is None and default_steps is not None:
            translation.map_key(strategy_key, recipe_key, default_steps)
        elif strategy_key is not None and every is not None:
            translation.map_key(strategy_key, recipe_key, every)
    if strategy_key is not None:
        translation.skip(
            strategy_key,
            "invalid value",
            f"expected steps, epoch or no, got {format_value(translation.get(strategy_key))}",
        )
    translation.skip(steps_key, "not applicable", f"{strategy_key} is {strategy}")


def _parse_interval(value: Any) -> Any:
    """Parse a number of steps; below 1 it is a fraction of the run."""
    amount = parse_number(value)
    if amount <= 0:
        raise ValueError(f"expected a number of steps, got {format_value(value)}")
    return format_percent(amount) if amount < 1 else parse_integer(amount)


def map_best_metric(translation: Translation, *, patience_key: str) -> None:
    """Map the metric of the best checkpoint, and early stopping."""
    metric = map_monitored_metric(
        translation, metric_key="metric_for_best_model", mode_key="greater_is_better", recipe_block="evaluation"
    )
    patience = translation.map_converted(patience_key, "training.early_stopping.patience", parse_integer)
    translation.map_converted("early_stopping_threshold", "training.early_stopping.threshold", parse_number)
    if patience is not None and metric is not None:
        translation.map_default(
            "metric_for_best_model", metric, recipe_key="training.early_stopping.metric", recipe_value=metric
        )
    translation.skip("load_best_model_at_end", "not applicable", "the best checkpoint is always kept, and exported")


def map_reporting(translation: Translation, key: str = "report_to") -> None:
    """Map the loggers of `report_to`: TensorBoard and Weights & Biases."""
    if not translation.is_pending(key):
        return
    value = translation.get(key)
    loggers = [str(part).lower() for part in (value if isinstance(value, list) else str(value).split(","))]
    unsupported_loggers = sorted({part.strip() for part in loggers} - {"wandb", "tensorboard", "none", "all", ""})
    if loggers == ["all"]:
        translation.skip(key, "not applicable", "TensorBoard is written; logging.wandb.project adds Weights & Biases")
        return
    note = f"no counterpart: {', '.join(unsupported_loggers)}" if unsupported_loggers else None
    translation.map_key(key, "logging.tensorboard", "tensorboard" in loggers, note=note)
    if "wandb" in loggers:
        translation.map_key(key, "logging.wandb.enabled", True)


WANDB_KEYS = {
    "use_wandb": ("logging.wandb.enabled", parse_boolean),
    "wandb_project": ("logging.wandb.project", parse_text),
    "wandb_entity": ("logging.wandb.entity", parse_text),
    "wandb_name": ("logging.wandb.name", parse_text),
    "wandb_notes": ("logging.wandb.notes", parse_text),
}


def map_wandb_mode(translation: Translation) -> None:
    """Map wandb_mode: offline or disabled."""
    mode = translation.get("wandb_mode")
    if mode == "offline":
        translation.map_key("wandb_mode", "logging.wandb.offline", True)
    elif mode == "disabled":
        translation.skip("use_wandb", "not applicable", "wandb_mode is disabled")
        translation.map_key("wandb_mode", "logging.wandb.enabled", False)
    else:
        translation.skip("wandb_mode", "not applicable", "this is always done here")


def map_sharding(translation: Translation) -> None:
    """Map DeepSpeed and FSDP: the sharding strategy, and offloading to host memory."""
    if isinstance(translation.get("deepspeed"), str) and translation.get("deepspeed"):
        name = translation.get("deepspeed")
        stage = re.search(r"(?:zero|stage|z)[_-]?([0-3])", name, re.IGNORECASE)
        _map_zero_stage(translation, "deepspeed", stage and int(stage[1]))
        if "offload" in name.lower() and translation.find_mapped("distributed.strategy"):
            translation.map_key("deepspeed", "distributed.offload", True, note=SHARDING_NOTE)
    if translation.is_pending("deepspeed.zero_optimization.stage"):
        _map_zero_stage(
            translation, "deepspeed.zero_optimization.stage", translation.get("deepspeed.zero_optimization.stage")
        )
    if translation.get("deepspeed.zero_optimization.offload_optimizer.device") == "cpu":
        translation.map_key(
            "deepspeed.zero_optimization.offload_optimizer.device", "distributed.offload", True, note=SHARDING_NOTE
        )
    translation.skip_block("deepspeed", "no counterpart", "a setting of DeepSpeed")
    fsdp = translation.get("fsdp")
    if fsdp is not None and not is_disabled(fsdp):
        words = " ".join(map(str, fsdp)) if isinstance(fsdp, list) else str(fsdp)
        is_replicated = "no_shard" in words
        note = None if is_replicated else SHARDING_NOTE
        translation.map_key("fsdp", "distributed.strategy", "ddp" if is_replicated else "fsdp", note=note)
        if "offload" in words:
            translation.map_key("fsdp", "distributed.offload", True, note=SHARDING_NOTE)
        for key in ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params"):
            translation.map_converted(key, "distributed.offload", parse_boolean)
    elif translation.is_pending("fsdp_version") or any(
        not is_disabled(value) for value in translation.get_pending_values("fsdp_config").values()
    ):
        # In newer versions of transformers the block of settings alone turns FSDP on.
        key = (
            "fsdp_version"
            if translation.is_pending("fsdp_version")
            else next(iter(translation.get_pending_values("fsdp_config")))
        )
        translation.map_key(key, "distributed.strategy", "fsdp", note=SHARDING_NOTE)
        translation.map_converted("fsdp_config.offload_params", "distributed.offload", parse_boolean)
    translation.map_converted("fsdp_config.activation_checkpointing", "training.gradient_checkpointing", parse_boolean)
    translation.skip_block("fsdp_config", "no counterpart", "a setting of the Trainer's sharding")


def _map_zero_stage(translation: Translation, key: str, stage: Any) -> None:
    if stage in (1, 2, 3):
        translation.map_key(key, "distributed.strategy", "fsdp", note=f"ZeRO-{stage}; {SHARDING_NOTE}")
    elif stage == 0:
        translation.map_key(key, "distributed.strategy", "ddp")
    else:
        translation.skip(key, "no counterpart", "DeepSpeed's own file; distributed.strategy is ddp or fsdp here")


def map_performance_options(translation: Translation) -> None:
    """Map compilation, gradient checkpointing and data loading."""
    if str(translation.get("gradient_checkpointing")).startswith("offload"):
        note = "activations are recomputed and not moved to host memory"
        translation.map_key("gradient_checkpointing", "training.gradient_checkpointing", True, note=note)
    translation.map_table(
        {
            "gradient_checkpointing": ("training.gradient_checkpointing", parse_boolean),
            "torch_compile": ("training.compile", lambda v: v if v == "auto" else parse_boolean(v)),
            "dataloader_num_workers": ("data.workers", parse_integer),
            "dataloader_pin_memory": ("data.pin_memory", parse_boolean),
        }
    )
    row = translation.find_mapped("data.workers")
    workers = max(1, row.recipe_value) if row else 1
    prefetch_note = "per worker in the file, in total here" if workers > 1 else None
    translation.map_converted(
        "dataloader_prefetch_factor", "data.prefetch", lambda v: parse_integer(v) * workers, note=prefetch_note
    )
