"""Translate Axolotl's YAML: a base model, data sets, an adapter, and arguments of transformers under other names."""

from __future__ import annotations

from typing import Any

from bottega.config.importers import trainer, transformers_common
from bottega.config.importers.axolotl_skipped_keys import SKIPPED_KEYS
from bottega.config.importers.translation import (
    Translation,
    format_epochs,
    is_disabled,
    parse_boolean,
    parse_integer,
    parse_number,
    parse_text,
    parse_text_list,
)

MARKER_KEYS = (
    "micro_batch_size",
    "datasets",
    "pretraining_dataset",
    "sequence_len",
    "sample_packing",
    "val_set_size",
    "adapter",
    "dataset_prepared_path",
    "lora_r",
    "lr_scheduler",
    "load_in_8bit",
    "load_in_4bit",
    "flash_attention",
    "evals_per_epoch",
    "saves_per_epoch",
    "pad_to_sequence_len",
    "tokenizer_type",
    "special_tokens",
)
"""An Axolotl file has base_model and at least one of these."""

NOT_PLAIN_TEXT_REASON = (
    "chat and instruction prompts are not supported; set data.train.field to one field of plain text"
)
PLAIN_TEXT_TYPES = ("completion", "pretrain")
"""Axolotl's types of data that are plain text."""
DATASET_BUILDERS = ("json", "csv", "parquet", "arrow", "text")
FILE_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
LORA_OPTIONS = "techniques.0.options."


def translate(translation: Translation) -> None:
    """Translate an Axolotl configuration."""
    translation.map_default("(axolotl)", "language models", recipe_key="task", recipe_value="language")
    _map_model(translation)
    _map_data(translation)
    transformers_common.map_length(translation, "num_epochs", default=1)
    _map_batch(translation)
    translation.map_table(
        {
            "learning_rate": ("training.learning_rate", parse_number),
            "weight_decay": ("training.weight_decay", parse_number),
            "save_total_limit": ("checkpoint.keep", parse_integer),
            "seed": ("seed", parse_integer),
            "output_dir": ("output_dir", parse_text),
            "use_tensorboard": ("logging.tensorboard", parse_boolean),
            "wandb_tags": ("logging.wandb.tags", parse_text_list),
        }
    )
    translation.map_default("weight_decay", 0.0, recipe_key="training.weight_decay", recipe_value=0.0)
    translation.map_default("seed", 42, recipe_key="seed", recipe_value=42)
    transformers_common.map_optimizer(translation, "optimizer")
    transformers_common.map_gradient_clipping(translation)
    translation.map_converted("cosine_min_lr_ratio", "training.scheduler.min_ratio", parse_number)
    transformers_common.map_schedule(translation, "lr_scheduler", default="cosine")
    translation.map_default("warmup_ratio", 0.03, recipe_key="training.scheduler.warmup_steps", recipe_value="3%")
    if is_disabled(translation.get("float32")) or not translation.is_pending("float32"):
        transformers_common.map_precision(translation, default="auto")
    else:
        translation.map_key("float32", "training.mixed_precision", "fp32")
        for key in ("bf16", "fp16", "bfloat16", "float16"):
            translation.skip(key, "not applicable", "float32 takes precedence")
    _map_cadences(translation)
    transformers_common.map_best_metric(translation, patience_key="early_stopping_patience")
    translation.map_table(transformers_common.WANDB_KEYS)
    transformers_common.map_wandb_mode(translation)
    transformers_common.map_sharding(translation)
    transformers_common.map_performance_options(translation)
    _map_adapter(translation)
    if translation.is_pending("device"):
        name = str(translation.get("device")).partition(":")[0]
        translation.map_key("device", "device", name)
    translation.skip_remaining(SKIPPED_KEYS, trainer.SKIPPED_KEYS)


def _map_model(translation: Translation) -> None:
    translation.map_converted("base_model", "model.from", parse_text)
    translation.map_converted("sequence_len", "data.sequence_length", parse_integer)
    if translation.is_pending("tokenizer_config"):
        if translation.get("tokenizer_config") == translation.get("base_model"):
            translation.skip("tokenizer_config", "not applicable", "the tokenizer of model.from is used anyway")
        else:
            translation.map_key("tokenizer_config", "data.tokenizer.path", str(translation.get("tokenizer_config")))
            translation.map_key("tokenizer_config", "data.tokenizer.kind", "pretrained")


def _map_batch(translation: Translation) -> None:
    """Map the batch sizes: micro_batch_size is per process; batch_size, if given, is that of an optimizer step."""
    micro_batch_size, batch_size = translation.get("micro_batch_size"), translation.get("batch_size")
    if (
        isinstance(micro_batch_size, int)
        and isinstance(batch_size, int)
        and micro_batch_size > 0
        and not translation.get("gradient_accumulation_steps")
    ):
        accumulation_steps = max(1, batch_size // micro_batch_size)
        translation.map_key(
            "batch_size",
            "training.gradient_accumulation_steps",
            accumulation_steps,
            note=f"{batch_size} / {micro_batch_size}",
        )
        translation.map_key("micro_batch_size", "training.batch_size", micro_batch_size)
        transformers_common.add_batch_note(translation, micro_batch_size, accumulation_steps)
    else:
        translation.skip(
            "batch_size", "not applicable", "micro_batch_size x gradient_accumulation_steps takes precedence"
        )
        transformers_common.map_batch_size(translation, "micro_batch_size", default=1)
    translation.map_converted(
        "eval_batch_size", "evaluation.batch_size", parse_integer, note="the batch of all processes together"
    )


def _map_cadences(translation: Translation) -> None:
    for source_key, recipe_key, steps_key, strategy_keys in (
        ("evals_per_epoch", "evaluation.every", "eval_steps", ("eval_strategy", "evaluation_strategy")),
        ("saves_per_epoch", "checkpoint.every", "save_steps", ("save_strategy",)),
    ):
        per_epoch = translation.get(source_key)
        if translation.is_pending(source_key) and not is_disabled(per_epoch):
            translation.map_converted(source_key, recipe_key, lambda v: format_epochs(1 / parse_number(v)))
            for key in (steps_key, *strategy_keys):
                translation.skip(key, "not applicable", f"{source_key} takes precedence")
        elif translation.is_pending(steps_key) and not is_disabled(translation.get(steps_key)):
            for key in strategy_keys:
                translation.skip(key, "not applicable", f"{steps_key} takes precedence")
            transformers_common.map_cadence(translation, recipe_key, strategy_keys=(), steps_key=steps_key)
        else:
            transformers_common.map_cadence(translation, recipe_key, strategy_keys=strategy_keys, steps_key=steps_key)
    translation.map_default("save_strategy", "epoch", recipe_key="checkpoint.every", recipe_value="1 epoch")
    transformers_common.map_cadence(
        translation, "logging.every", strategy_keys=("logging_strategy",), steps_key="logging_steps"
    )


def _map_data(translation: Translation) -> None:
    key = "pretraining_dataset" if translation.get_pending_values("pretraining_dataset") else "datasets"
    _map_sources(translation, key, "data.train", list_key="data.sources")
    if isinstance(translation.get("pretraining_dataset"), str):
        _map_path(translation, "pretraining_dataset", "data.train", None)
    _map_sources(translation, "test_datasets", "data.validation", list_key=None)
    map_validation_split(translation, "val_set_size")
    _map_packing(translation)
    if translation.get("dataset_exact_deduplication"):
        translation.map_key("dataset_exact_deduplication", "data.deduplicate.method", "exact")


def map_validation_split(translation: Translation, key: str) -> None:
    """Map the size of a validation split, which must be a fraction.

    No split becomes an explicit null, because a recipe without the key holds out a default fraction.
    """
    if translation.find_mapped("data.validation.path"):
        translation.skip(key, "not applicable", "validation has data of its own")
        return
    size = translation.get(key)
    if size is not None and is_disabled(size):
        translation.map_key(key, "data.validation", None, note="no validation split")
    elif isinstance(size, int | float) and size >= 1:
        translation.skip(
            key, "no counterpart", "a number of examples; data.validation.split is a fraction, such as 0.05"
        )
    elif translation.is_pending(key):
        translation.map_converted(key, "data.validation.split", lambda v: float(parse_number(v)))
    else:
        translation.map_default(key, 0, recipe_key="data.validation", recipe_value=None)


def _map_packing(translation: Translation) -> None:
    if translation.is_pending("sample_packing"):
        if translation.get("sample_packing"):
            note = "unlike in Axolotl, a document that does not fit continues in the next example"
            translation.map_key("sample_packing", "data.separate_documents", True, note=note)
        else:
            translation.map_key("sample_packing", "data.padding", True)


def _map_sources(translation: Translation, key: str, recipe_key: str, *, list_key: str | None) -> None:
    """Map a list of data sets: a single one to `recipe_key`, several to `list_key`, with each example once in an epoch.

    Without a `list_key`, only the first of several is mapped.
    """
    indices = [
        name
        for name in dict.fromkeys(name.split(".")[1] for name in translation.get_pending_values(key))
        if name.isdigit()
    ]
    for index in indices:
        if len(indices) > 1 and list_key is None and index != indices[0]:
            translation.skip_block(f"{key}.{index}", "no counterpart", "evaluation uses one source; join the files")
            continue
        target = recipe_key if len(indices) == 1 or list_key is None else f"{list_key}.{index}"
        _map_source(translation, f"{key}.{index}", target)
    if len(indices) > 1 and list_key is not None:
        translation.map_default(key, f"{len(indices)} data sets", recipe_key="data.mixture", recipe_value="concatenate")


def _map_source(translation: Translation, source_key: str, recipe_key: str) -> None:
    files = translation.get(f"{source_key}.data_files")
    if isinstance(files, list) and len(files) > 1:
        translation.skip(
            f"{source_key}.data_files",
            "no counterpart",
            "one path per source; use a pattern such as data/*.jsonl for several",
        )
    elif files:
        translation.skip(f"{source_key}.path", "not applicable", "data_files takes precedence")
        _map_path(translation, f"{source_key}.data_files", recipe_key, translation.get(f"{source_key}.ds_type"))
    _map_path(translation, f"{source_key}.path", recipe_key, translation.get(f"{source_key}.ds_type"))
    translation.skip(f"{source_key}.ds_type", "not applicable", "inferred from the file's name")
    translation.map_converted(f"{source_key}.name", f"{recipe_key}.subset", parse_text)
    translation.map_converted(f"{source_key}.split", f"{recipe_key}.split", parse_text)
    for key in ("field", "text_column"):
        translation.map_converted(f"{source_key}.{key}", f"{recipe_key}.field", parse_text)
    if translation.get(f"{source_key}.type") in PLAIN_TEXT_TYPES:
        translation.skip(f"{source_key}.type", "not applicable", "the task trains on plain text")
        translation.map_default(f"{source_key}.field", "text", recipe_key=f"{recipe_key}.field", recipe_value="text")
    else:
        translation.skip(f"{source_key}.type", "no counterpart", NOT_PLAIN_TEXT_REASON)
        translation.skip_block(f"{source_key}.type", "no counterpart", NOT_PLAIN_TEXT_REASON)


def _map_path(translation: Translation, source_key: str, recipe_key: str, kind: Any) -> None:
    """Map a path to a file or a data set of the hub, by how it is written: the file need not exist on this machine."""
    if not translation.is_pending(source_key):
        return
    path = translation.map_converted(
        source_key, f"{recipe_key}.path", lambda v: parse_text(v[0] if isinstance(v, list) and v else v)
    )
    if path is None:
        return
    has_suffix = path.lower().endswith(FILE_SUFFIXES)
    is_hub = (
        not has_suffix and path.count("/") <= 1 and "://" not in path and not path.startswith((".", "/", "~", "data/"))
    )
    if is_hub:
        translation.map_key(
            source_key, f"{recipe_key}.kind", "huggingface", note=None if "/" in path else "taken as a name on the hub"
        )
    elif not has_suffix and str(kind) in DATASET_BUILDERS:
        translation.map_key(source_key, f"{recipe_key}.kind", str(kind))


def _map_adapter(translation: Translation) -> None:
    adapter = translation.get("adapter")
    if adapter in ("lora", "qlora"):
        note = "the base model is not quantised" if adapter == "qlora" else None
        translation.map_key("adapter", "techniques.0.name", "lora", note=note)
        translation.map_converted("lora_r", f"{LORA_OPTIONS}rank", parse_integer)
        translation.map_converted("lora_alpha", f"{LORA_OPTIONS}alpha", parse_number)
        translation.map_converted("lora_dropout", f"{LORA_OPTIONS}dropout", parse_number)
        translation.map_converted("lora_target_modules", f"{LORA_OPTIONS}targets", parse_text_list)
        if translation.get("lora_target_linear") and translation.find_mapped(f"{LORA_OPTIONS}targets") is None:
            translation.map_key("lora_target_linear", f"{LORA_OPTIONS}targets", "all-linear")
    elif adapter is not None and not is_disabled(adapter):
        translation.skip("adapter", "no counterpart", "lora is the only supported adapter")
    if translation.find_mapped("techniques.0.name") is None:
        has_other_adapter = adapter is not None and not is_disabled(adapter)
        reason = f"adapter is {adapter}, not lora" if has_other_adapter else "the file sets no adapter"
        for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear"):
            if translation.is_pending(key):
                translation.skip(key, "not applicable", reason)
