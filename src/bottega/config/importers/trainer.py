"""Translate TrainingArguments of transformers, as `to_json_string()` or the JSON of an example script has them."""

from __future__ import annotations

from bottega.config.importers import transformers_common
from bottega.config.importers.translation import (
    SkippedKeys,
    Translation,
    parse_boolean,
    parse_integer,
    parse_number,
    parse_text,
)

MARKER_KEYS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "lr_scheduler_type", "optim"),
    *("gradient_accumulation_steps", "evaluation_strategy", "eval_strategy", "save_strategy", "logging_strategy"),
    *("warmup_ratio", "adam_beta1", "adam_epsilon", "load_best_model_at_end", "metric_for_best_model", "report_to"),
    *("dataloader_num_workers", "label_smoothing_factor", "save_total_limit", "logging_steps", "overwrite_output_dir"),
)
"""A file of TrainingArguments has at least two of these."""


def translate(translation: Translation) -> None:
    """Translate TrainingArguments, with the model and data arguments of the example scripts."""
    map_arguments(translation)
    _map_script_arguments(translation)
    translation.skip_remaining(SKIPPED_KEYS)
    translation.notes.append("the file has no task: add task, or run bottega train TASK FILE")


def map_arguments(translation: Translation, *, patience_key: str = "early_stopping_patience") -> None:
    """Map TrainingArguments, which LLaMA-Factory accepts too; `patience_key` is the key of the early stopping patience."""
    transformers_common.map_length(translation, "num_train_epochs", default=3)
    for old_key, split in (("per_gpu_train_batch_size", "train"), ("per_gpu_eval_batch_size", "eval")):
        if translation.is_pending(f"per_device_{split}_batch_size"):
            translation.skip(old_key, "not applicable", f"per_device_{split}_batch_size takes precedence")
    has_old_key = translation.is_pending("per_gpu_train_batch_size")
    size_key = "per_gpu_train_batch_size" if has_old_key else "per_device_train_batch_size"
    transformers_common.map_batch_size(translation, size_key, default=8)
    for key in ("per_device_eval_batch_size", "per_gpu_eval_batch_size"):
        translation.map_converted(
            key, "evaluation.batch_size", parse_integer, note="the batch of all processes together"
        )
    if translation.get("auto_find_batch_size"):
        note = "the batch size stays the same; only training.micro_batch_size is halved"
        translation.map_key("auto_find_batch_size", "training.micro_batch_size", "auto", note=note)
    translation.map_table(
        {
            "learning_rate": ("training.learning_rate", parse_number),
            "weight_decay": ("training.weight_decay", parse_number),
            "label_smoothing_factor": ("training.label_smoothing", parse_number),
            "ema_decay": ("training.ema", parse_number),
            "save_total_limit": ("checkpoint.keep", parse_integer),
            "seed": ("seed", parse_integer),
            "output_dir": ("output_dir", parse_text),
            "full_determinism": ("deterministic", parse_boolean),
            "run_name": ("logging.wandb.name", parse_text),
        }
    )
    translation.map_default("learning_rate", 5e-5, recipe_key="training.learning_rate", recipe_value=5e-5)
    translation.map_default("weight_decay", 0.0, recipe_key="training.weight_decay", recipe_value=0.0)
    translation.map_default("seed", 42, recipe_key="seed", recipe_value=42)
    transformers_common.map_optimizer(translation, "optim")
    transformers_common.map_gradient_clipping(translation)
    transformers_common.map_schedule(translation, "lr_scheduler_type", default="linear")
    transformers_common.map_precision(translation, default="fp32")
    logging_steps = translation.get("logging_steps")
    map_cadences(translation, logging_steps if isinstance(logging_steps, int) and logging_steps > 0 else 500)
    transformers_common.map_best_metric(translation, patience_key=patience_key)
    transformers_common.map_reporting(translation)
    translation.map_table(transformers_common.WANDB_KEYS)
    transformers_common.map_wandb_mode(translation)
    transformers_common.map_sharding(translation)
    transformers_common.map_performance_options(translation)
    map_device(translation)


def map_cadences(translation: Translation, default_eval_steps: int) -> None:
    """Map evaluation, checkpoint and logging intervals; `default_eval_steps` is the default of eval_steps."""
    strategies = ("eval_strategy", "evaluation_strategy")
    transformers_common.map_cadence(
        translation,
        "evaluation.every",
        strategy_keys=strategies,
        steps_key="eval_steps",
        default_steps=default_eval_steps,
    )
    transformers_common.map_cadence(
        translation, "checkpoint.every", strategy_keys=("save_strategy",), steps_key="save_steps", default_steps=500
    )
    transformers_common.map_cadence(
        translation, "logging.every", strategy_keys=("logging_strategy",), steps_key="logging_steps", default_steps=500
    )


def map_device(translation: Translation) -> None:
    """Map the device, and leave out data_seed, since one seed is used for everything."""
    for key, name in (("use_cpu", "cpu"), ("no_cuda", "cpu"), ("use_mps_device", "mps")):
        if translation.get(key):
            translation.map_key(key, "device", name)
    is_same_seed = (
        translation.get("data_seed") == translation.get("seed") if translation.is_pending("data_seed") else False
    )
    reason = (
        "there is one seed for everything"
        if is_same_seed
        else "there is one seed for everything; the order of the data follows it"
    )
    translation.skip("data_seed", "not applicable" if is_same_seed else "no counterpart", reason)


def _map_script_arguments(translation: Translation) -> None:
    """Map the model and data arguments that the example scripts of transformers add."""
    translation.map_converted("model_name_or_path", "model.from", parse_text)
    if translation.is_pending("tokenizer_name"):
        translation.map_key("tokenizer_name", "data.tokenizer.kind", "pretrained")
        translation.map_key("tokenizer_name", "data.tokenizer.path", str(translation.get("tokenizer_name")))
    if translation.is_pending("train_file"):
        translation.skip("dataset_name", "not applicable", "train_file is given")
        translation.map_converted("train_file", "data.train.path", parse_text)
    elif translation.is_pending("dataset_name"):
        name = str(translation.get("dataset_name"))
        translation.map_key("dataset_name", "data.train.path", name)
        translation.map_key("dataset_name", "data.train.kind", "huggingface")
    translation.map_table(
        {
            "dataset_config_name": ("data.train.subset", parse_text),
            "validation_file": ("data.validation.path", parse_text),
            "test_file": ("data.test.path", parse_text),
            "text_column_name": ("data.train.field", parse_text),
            "text_column": ("data.train.field", parse_text),
            "label_column_name": ("data.train.label", parse_text),
            "max_train_samples": ("data.limit", parse_integer),
        }
    )
    if translation.find_mapped("data.validation.path"):
        translation.skip("validation_split_percentage", "not applicable", "validation_file is given")
    translation.map_converted("validation_split_percentage", "data.validation.split", lambda v: parse_number(v) / 100)
    for key in ("block_size", "max_seq_length", "max_source_length", "max_length"):
        translation.map_converted(key, "data.sequence_length", parse_integer)


_NO_UPLOADS = "nothing is uploaded; bottega export writes a folder that can be uploaded"
_SET_BY_LAUNCHER = "the launcher sets the number of processes"
_INTERNAL_SETTING = "an internal setting of the Trainer's training loop"
_UNSUPPORTED_LOGGER = "only TensorBoard and Weights & Biases are supported"
_CHOSEN_BY_ENGINE = "chosen by the engine here"

SKIPPED_KEYS = SkippedKeys(
    no_counterpart={
        **dict.fromkeys(
            ("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push"), _NO_UPLOADS
        ),
        **dict.fromkeys(("hub_revision", "push_to_hub_model_id", "push_to_hub_organization"), _NO_UPLOADS),
        **dict.fromkeys(("hub_token", "push_to_hub_token"), "put secrets into environment variables"),
        # These four are mapped above if true; reached only if false.
        **dict.fromkeys(("use_cpu", "no_cuda", "use_mps_device"), "set device"),
        "auto_find_batch_size": "training.micro_batch_size: auto finds what fits",
        "lr_scheduler_kwargs": "not a setting of training.scheduler",
        "optim_args": "training.optimizer has betas, eps, momentum and nesterov",
        "optim_target_modules": "training.groups selects parameters and scales their learning rates",
        "neftune_noise_alpha": "no noise is added to embeddings",
        "group_by_length": "batches are shuffled; data.curriculum can order by length",
        "train_sampling_strategy": "batches are shuffled; data.curriculum can order by length",
        "length_column_name": "lengths are computed from the data",
        "eval_delay": "the first evaluation comes after evaluation.every",
        "eval_on_start": "the first evaluation comes after evaluation.every",
        "logging_first_step": "the first line comes after logging.every",
        "include_for_metrics": "metrics belong to the task",
        "label_names": "data.train.label is the field of the class",
        "predict_with_generate": "samples.every generates samples during training",
        "generation_max_length": "samples.max_new_tokens is the length of samples",
        "max_eval_samples": "evaluation.max_batches is the limit, in batches",
        **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _UNSUPPORTED_LOGGER),
        "fsdp_config": "a setting of the Trainer's sharding",
        "deepspeed": "a setting of DeepSpeed",
        "project": "a setting of Trackio; use logging.wandb.project",
        "fp16_full_eval": "evaluation follows training.mixed_precision",
        "bf16_full_eval": "evaluation follows training.mixed_precision",
        "fp8": "training.mixed_precision is fp32, bf16 or fp16",
        "save_only_model": "a checkpoint contains everything needed to resume",
        "parallelism_config": "distributed.strategy is ddp or fsdp",
        "mp_parameters": "distributed.strategy is ddp or fsdp",
        "torch_compile_backend": _CHOSEN_BY_ENGINE,
        "torch_compile_mode": _CHOSEN_BY_ENGINE,
        "task_name": "set task and data.train.path",
        "config_name": "the configuration is read from model.from",
        "trust_remote_code": "code from a model or data set is not run",
    },
    not_applicable={
        **dict.fromkeys(
            ("do_train", "do_eval", "do_predict"), "a separate command: bottega train, evaluate or generate"
        ),
        "resume_from_checkpoint": "the same command resumes by itself; train --resume_from starts from a checkpoint",
        "overwrite_output_dir": "a run resumes; train --fresh starts over and keeps the old one",
        "ignore_data_skip": "the order is a function of the step, so nothing is skipped",
        "restore_callback_states_from_checkpoint": "a resume always restores everything",
        "save_safetensors": "weights are always safetensors",
        "logging_dir": "events are in the run's folder",
        "disable_tqdm": "use train --quiet for less output",
        "tf32": "the engine chooses the precision of matrix products",
        "dataloader_drop_last": "epochs follow each other without a gap, so every batch is full",
        "remove_unused_columns": "only the fields that are needed are read",
        "gradient_checkpointing_kwargs": _CHOSEN_BY_ENGINE,
        **dict.fromkeys(
            ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), _INTERNAL_SETTING
        ),
        **dict.fromkeys(("ddp_static_graph", "ddp_timeout", "ddp_timeout_delta"), _INTERNAL_SETTING),
        "ddp_backend": "chosen by the device: nccl on GPUs, gloo elsewhere",
        **dict.fromkeys(("local_rank", "tpu_num_cores", "_n_gpu"), _SET_BY_LAUNCHER),
        **dict.fromkeys(("dataloader_persistent_workers", "dataloader_multiprocessing_context"), _INTERNAL_SETTING),
        **dict.fromkeys(
            ("dataloader_in_order", "torch_empty_cache_steps", "skip_memory_metrics", "debug"), _INTERNAL_SETTING
        ),
        **dict.fromkeys(
            ("logging_nan_inf_filter", "log_on_each_node", "save_on_each_node", "use_legacy_prediction_loop"),
            _INTERNAL_SETTING,
        ),
        **dict.fromkeys(
            ("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object"), _INTERNAL_SETTING
        ),
        **dict.fromkeys(
            ("batch_eval_metrics", "prediction_loss_only", "use_cache", "enable_jit_checkpoint"), _INTERNAL_SETTING
        ),
        **dict.fromkeys(("include_num_input_tokens_seen", "include_tokens_per_second"), "tokens are always counted"),
        "average_tokens_across_devices": "means are always over all tokens of the batch",
        "accelerator_config": _INTERNAL_SETTING,
        "log_level": "logging.level; the levels of transformers differ",
        "log_level_replica": "only the first process logs",
        **dict.fromkeys(
            ("use_liger_kernel", "liger_kernel_config", "torchdynamo", "jit_mode_eval", "use_ipex"), _CHOSEN_BY_ENGINE
        ),
        **dict.fromkeys(("fp16_opt_level", "fp16_backend", "half_precision_backend"), _CHOSEN_BY_ENGINE),
        **dict.fromkeys(
            ("cache_dir", "overwrite_cache", "preprocessing_num_workers"),
            "prepared data is cached by a hash of its settings",
        ),
        "framework": "engine: torch is the default",
    },
    harmless_values={
        "hub_strategy": ("every_save",),
        "project": ("huggingface",),
        "train_sampling_strategy": ("random",),
        "length_column_name": ("length",),
        "hub_token": ("<HUB_TOKEN>",),
        "push_to_hub_token": ("<PUSH_TO_HUB_TOKEN>",),
        "torch_compile_backend": ("inductor",),
        "torch_compile_mode": ("default",),
        "generation_max_length": (20,),
    },
)
"""TrainingArguments and arguments of the example scripts that are left out."""
