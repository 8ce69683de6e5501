"""Aliases of recipe keys: short flags and the names other trainers use, each with the key it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bottega.config.layers import Entry, Layer, Problem
from bottega.similar_names import find_similar_names


@dataclass(frozen=True)
class UnitlessCadence:
    """A cadence without a unit, which is counted in the unit of the run's length: steps or epochs."""

    amount: Any


@dataclass(frozen=True)
class FallbackValue:
    """A value that yields to another alias of the same key in the same layer."""

    value: Any


Settings = dict[str, Any]
"""Key -> value that one alias stands for."""


def _map_unitless_cadence(key: str) -> Callable[[Any], Settings]:
    # Text such as "1 epoch" already has a unit.
    return lambda value: {key: UnitlessCadence(value) if type(value) in (int, float) else value}


def _map_precision(name: str) -> Callable[[Any], Settings]:
    # `fp16: false` is often written beside `bf16: true` and then means nothing; alone it means full precision.
    key = "training.mixed_precision"
    return lambda on: {key: name if on is True else FallbackValue("fp32") if on is False else on}


def _map_early_stopping(value: Any) -> Settings:
    return {"training.early_stopping": {} if value is True else None if value is False else value}


def _map_online(value: Any) -> Settings:
    # An empty block, so that options inside it from earlier layers stay.
    return {"data.online": {} if value is True else None if value is False else value}


def _map_model(value: Any) -> Settings:
    """Map a model to a size, or a path or hub name; a misspelt size stays a size, so that the error can suggest the right one."""
    sizes = ("nano", "verse", "stanza", "epic")
    is_size = value in sizes or (isinstance(value, str) and "/" not in value and bool(find_similar_names(value, sizes)))
    return {"model.size" if is_size else "model.from": value}


def _map_to_list(key: str) -> Callable[[Any], Settings]:
    return lambda value: {key: value if isinstance(value, list) else [value]}


AliasTarget = str | Callable[[Any], Settings]

_TRAINING_ALIASES: dict[str, AliasTarget] = {
    "lr": "training.learning_rate",
    "steps": "training.max_steps",
    "epochs": "training.num_epochs",
    "max_epochs": "training.num_epochs",
    "num_train_epochs": "training.num_epochs",
    "train_batch_size": "training.batch_size",
    "per_device_train_batch_size": "training.batch_size",
    "gradient_clipping": "training.max_grad_norm",
    "gradient_clip_norm": "training.max_grad_norm",
    "activation_checkpointing": "training.gradient_checkpointing",
    "fp16": _map_precision("fp16"),
    "bf16": _map_precision("bf16"),
    "optimizer": "training.optimizer.name",
    "adam_beta1": "training.optimizer.beta1",
    "adam_beta2": "training.optimizer.beta2",
    "adam_epsilon": "training.optimizer.eps",
    "momentum": "training.optimizer.momentum",
    "scheduler": "training.scheduler.name",
    "scheduler_type": "training.scheduler.name",
    "lr_scheduler_type": "training.scheduler.name",
    "warmup_steps": "training.scheduler.warmup_steps",
    "early_stopping": _map_early_stopping,
    "patience": "training.early_stopping.patience",
    "early_stopping_patience": "training.early_stopping.patience",
    "early_stopping_threshold": "training.early_stopping.threshold",
    "dropout": "model.dropout",
    "dropout_rate": "model.dropout",
    "dropout_prob": "model.dropout",
    "expert_dropout": "model.expert_dropout",
    "activation": "model.activation",
    "validation_split": "data.validation.split",
    "validation_frequency": _map_unitless_cadence("evaluation.every"),
    "eval_frequency": _map_unitless_cadence("evaluation.every"),
    "eval_steps": "evaluation.every",
    "validation_steps": "evaluation.every",
    "save_frequency": _map_unitless_cadence("checkpoint.every"),
    "checkpoint_frequency": _map_unitless_cadence("checkpoint.every"),
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    # Always steps: the published configuration that uses this name logs every 100 in a run of 20 epochs.
    "log_frequency": "logging.every",
    "logging_steps": "logging.every",
    "num_workers": "data.workers",
    "dataloader_num_workers": "data.workers",
    "data_loader_num_workers": "data.workers",
    "pin_memory": "data.pin_memory",
    "output_dir": "output_dir",
    "seed": "seed",
    "device": "device",
    "cpu_offloading": "distributed.offload",
    "cpu_threads": "cpu_threads",
    "num_threads": "cpu_threads",
    "routing_loss_weight": "model.routing_loss_weight",
    "expert_capacity": "model.expert_capacity",
}
"""Aliases under `training:`, and alone as a flag or at the top level of a file."""

_STANDALONE_TRAINING_KEYS = (
    "max_steps",
    "num_epochs",
    "batch_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "weight_decay",
    "mixed_precision",
    "max_grad_norm",
    "gradient_checkpointing",
    "label_smoothing",
    "on_nonfinite",
    "ema",
    "compile",
)
"""Keys of `training` that also work alone."""

_TOP_LEVEL_ALIASES: dict[str, AliasTarget] = {
    "model": _map_model,
    "size": "model.size",
    "data": "data.train.path",
    "input_dir": "data.train.path",
    "dataset_type": "data.train.kind",
    "max_tokens": "data.sequence_length",
    "block_size": "data.sequence_length",
    "sequence_length": "data.sequence_length",
    "max_sequence_length": "data.sequence_length",
    "image_size": "data.image_size",
    "workers": "data.workers",
    "limit": "data.limit",
    "online": _map_online,
    "tokenizer": "data.tokenizer.kind",
    "vocab_size": "data.tokenizer.vocab_size",
    "prompt": _map_to_list("samples.prompts"),
    "wandb_enabled": "logging.wandb.enabled",
    "profile": "profile.steps",
    "num_experts": "model.num_experts",
    "num_samples": "data.num_samples",
    "hidden_dim": "model.hidden_size",
}

_NESTED_ALIASES: dict[str, AliasTarget] = {
    "training.memory.offload_to_cpu": "distributed.offload",
    "training.memory.gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "training.optimizer.type": "training.optimizer.name",
    "training.scheduler.type": "training.scheduler.name",
    "training.early_stopping.enabled": _map_early_stopping,
    "distributed.world_size": "distributed.processes",
    "logging.wandb_enabled": "logging.wandb.enabled",
    "logging.save_frequency": _map_unitless_cadence("checkpoint.every"),
    "logging.log_frequency": "logging.every",
    "samples.prompt": _map_to_list("samples.prompts"),
    "data.train": "data.train.path",
    "data.path": "data.train.path",
    "data.validation": lambda value: {"data.validation." + ("split" if isinstance(value, float) else "path"): value},
    "data.test": lambda value: {"data.test." + ("split" if isinstance(value, float) else "path"): value},
    "data.tokenizer": "data.tokenizer.kind",
    "data.online": _map_online,
    "data.num_workers": "data.workers",
    "data.validation_split": "data.validation.split",
    "dataset.name": "data.collection",
    "dataset.train_json": "data.train.path",
    "dataset.val_json": "data.validation.path",
    "pmg.num_image_prompt": "model.num_image_tokens",
    "pmg.num_prefix_prompt": "model.num_prefix_tokens",
    "pmg.max_sequence_length": "data.sequence_length",
    "pmg.image_size": "data.image_size",
    "model.architecture": "model.kind",
    "model.pretrained_model": "model.from",
    "model.num_attention_heads": "model.num_heads",
    "model.hidden_dropout_prob": "model.dropout",
    "model.dropout_prob": "model.dropout",
    "model.attention_probs_dropout_prob": "model.attention_dropout",
    "model.stable_diffusion": "model.diffusion",
    "model.llama": "model.language_model",
    "model.hidden_dim": "model.hidden_size",
    "model.expert_dim": "model.expert_size",
    "model.plasticity_enabled": "model.plasticity",
}

PREFIX_ALIASES = {
    "wandb.": "logging.wandb.",
    "optimizer.": "training.optimizer.",
    "scheduler.": "training.scheduler.",
    "early_stopping.": "training.early_stopping.",
    "training.distributed.": "distributed.",
    "training.augmentation.": "data.augmentation.",
    "training.routing.": "model.",
}
"""Blocks that published configurations put elsewhere: their prefix -> ours."""

ALIASES: dict[str, AliasTarget] = {
    **_TOP_LEVEL_ALIASES,
    **_NESTED_ALIASES,
    **{key: f"training.{key}" for key in _STANDALONE_TRAINING_KEYS},
    **{key: target for key, target in _TRAINING_ALIASES.items() if key != target},
    **{f"training.{key}": target for key, target in _TRAINING_ALIASES.items()},
}


def apply_aliases(layer: Layer) -> Layer:
    """Return the layer with the keys of the schema. Two aliases of one key with different values become a problem."""
    result = Layer(lines=layer.lines, problems=list(layer.problems), notes=list(layer.notes))
    for typed_key, entry in layer.entries.items():
        for key, value in resolve_alias(typed_key, entry.value).items():
            if isinstance(value, FallbackValue):
                _add_entry(result, key, replace(entry, value=value.value, is_fallback=True))
            else:
                _add_entry(result, key, replace(entry, value=value))
    for key in [key for key, entry in result.entries.items() if entry.value is None]:
        # The block is turned off in this layer, so keys inside it in the same layer have no effect.
        for inner in [inner for inner in result.entries if inner.startswith(key + ".")]:
            del result.entries[inner]
    return result


def resolve_alias(key: str, value: Any) -> Settings:
    """Return the schema's key for `key`, with the value converted if the alias differs in more than the name."""
    for prefix, replacement in PREFIX_ALIASES.items():
        if key.startswith(prefix):
            key = replacement + key.removeprefix(prefix)
            break
    target = ALIASES.get(key)
    if target is None or (value in (None, {}) and _is_block(key)):
        return {key: value}
    return {target: value} if isinstance(target, str) else target(value)


def _is_block(key: str) -> bool:
    """Return whether the alias is also the name of a block: `model: verse` is an alias, `model: {}` is not."""
    return key in (
        "model",
        "data",
        "profile",
        "data.train",
        "data.validation",
        "data.test",
        "data.tokenizer",
    ) or key in (
        "training.optimizer",
        "training.scheduler",
        "training.early_stopping",
    )


def _add_entry(layer: Layer, key: str, entry: Entry) -> None:
    previous = layer.entries.get(key)
    if previous is None or (previous.is_fallback and not entry.is_fallback):
        layer.entries[key] = entry
    elif (
        key == "checkpoint.every"
        and isinstance(previous.value, UnitlessCadence)
        and isinstance(entry.value, UnitlessCadence)
    ):
        _keep_more_frequent(layer, key, previous, entry)
    elif previous.value != entry.value and not entry.is_fallback:
        values = f"{_format_entry(entry, key)} and {_format_entry(previous, key)} for {key}"
        message = f"conflicts with {previous.typed_key} at {previous.location}: {values}; keep one"
        layer.problems.append(Problem(entry.location, entry.typed_key, message, key))


def _keep_more_frequent(layer: Layer, key: str, first: Entry, second: Entry) -> None:
    """Keep the shorter of two checkpoint cadences, with a note.

    One published configuration sets save_frequency for weights and checkpoint_frequency for states to resume from; a checkpoint here is both.
    """
    amounts = [(entry.value.amount, entry) for entry in (first, second) if entry.value.amount]
    more_frequent = min(amounts, key=lambda pair: pair[0])[1] if amounts else first
    layer.entries[key] = more_frequent
    if first.value != second.value:
        layer.notes.append(
            f"{first.typed_key} {first.value.amount} and {second.typed_key} {second.value.amount} both set checkpoint.every; the more "
            f"frequent one, {more_frequent.value.amount}, is used"
        )


def _format_entry(entry: Entry, key: str) -> str:
    if key == "data.online" and entry.value in ({}, None):
        return "false" if entry.value is None else "true"
    return repr(entry.value.amount if isinstance(entry.value, UnitlessCadence) else entry.value)
