"""Translate LLaMA-Factory's YAML: arguments of transformers, with stage, fine-tuning method, template and named data."""

from __future__ import annotations

from bottega.config.importers import trainer
from bottega.config.importers.axolotl import LORA_OPTIONS, map_validation_split
from bottega.config.importers.translation import (
    SkippedKeys,
    Translation,
    parse_boolean,
    parse_integer,
    parse_number,
    parse_text,
    parse_text_list,
)

MARKER_KEYS = (
    *("stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_target", "lora_rank", "val_size"),
    *("neat_packing", "quantization_bit", "adapter_name_or_path"),
)
"""A LLaMA-Factory file has model_name_or_path and at least one of these."""


def translate(translation: Translation) -> None:
    """Translate a LLaMA-Factory configuration."""
    _map_stage(translation)
    translation.map_converted("model_name_or_path", "model.from", parse_text)
    translation.map_converted("cutoff_len", "data.sequence_length", parse_integer)
    translation.map_default("cutoff_len", 2048, recipe_key="data.sequence_length", recipe_value=2048)
    _map_data(translation)
    if translation.is_pending("disable_gradient_checkpointing"):
        key = "disable_gradient_checkpointing"
        translation.map_converted(key, "training.gradient_checkpointing", lambda v: not parse_boolean(v))
        translation.skip("gradient_checkpointing", "not applicable", f"{key} takes precedence")
    if translation.get("use_muon"):
        translation.map_key("use_muon", "training.optimizer.name", "muon")
        translation.skip("optim", "not applicable", "use_muon takes precedence")
    trainer.map_arguments(translation, patience_key="early_stopping_steps")
    # LLaMA-Factory uses gradient checkpointing by default.
    translation.map_default(
        "disable_gradient_checkpointing", False, recipe_key="training.gradient_checkpointing", recipe_value=True
    )
    _map_method(translation)
    translation.skip_remaining(SKIPPED_KEYS, trainer.SKIPPED_KEYS)


def _map_stage(translation: Translation) -> None:
    stage = translation.get("stage")
    if stage in ("pt", "sft"):
        note = None if stage == "pt" else "the loss covers all tokens, not only the answers"
        translation.map_key("stage", "task", "language", note=note)
    else:
        translation.skip(
            "stage",
            "no counterpart",
            "preference optimisation and RL are not supported; task: language predicts the next token",
        )
        translation.map_default("stage", stage or "sft", recipe_key="task", recipe_value="language")


def _map_data(translation: Translation) -> None:
    reason = "a name in LLaMA-Factory's dataset_info.json; set {} to the file itself"
    translation.skip("dataset", "no counterpart", reason.format("data.train.path"))
    translation.skip("eval_dataset", "no counterpart", reason.format("data.validation.path"))
    translation.map_converted("max_samples", "data.limit", parse_integer, note="the limit is for all data together")
    if translation.get("eval_dataset") and not translation.get("val_size"):
        # The recipe keeps its own split until the file is named: null would switch validation off.
        translation.skip("val_size", "not applicable", "eval_dataset takes precedence")
    else:
        map_validation_split(translation, "val_size")
    packing = translation.get("packing")
    if translation.get("neat_packing"):
        translation.map_key("neat_packing", "data.separate_documents", True)
        translation.skip("packing", "not applicable", "documents are joined without gaps anyway")
    elif packing or (packing is None and translation.get("stage") == "pt"):
        translation.skip("packing", "not applicable", "documents are joined without gaps anyway")
    elif packing is not None:
        translation.map_key("packing", "data.padding", True)
    else:
        translation.map_default("packing", False, recipe_key="data.padding", recipe_value=True)


def _map_method(translation: Translation) -> None:
    method = translation.get("finetuning_type")
    if method in (None, "lora"):
        if method is None:
            translation.map_default("finetuning_type", "lora", recipe_key="techniques.0.name", recipe_value="lora")
        else:
            translation.map_key("finetuning_type", "techniques.0.name", "lora")
        rank = translation.map_converted("lora_rank", f"{LORA_OPTIONS}rank", parse_integer)
        if rank is None:
            translation.map_default("lora_rank", 8, recipe_key=f"{LORA_OPTIONS}rank", recipe_value=8)
        translation.map_converted("lora_alpha", f"{LORA_OPTIONS}alpha", parse_number)
        translation.map_default(
            "lora_alpha", 2 * (rank or 8), recipe_key=f"{LORA_OPTIONS}alpha", recipe_value=2 * (rank or 8)
        )
        translation.map_converted("lora_dropout", f"{LORA_OPTIONS}dropout", parse_number)
        translation.map_converted(
            "lora_target",
            f"{LORA_OPTIONS}targets",
            lambda v: "all-linear" if v in ("all", ["all"]) else parse_text_list(v),
        )
        translation.map_default("lora_target", "all", recipe_key=f"{LORA_OPTIONS}targets", recipe_value="all-linear")
        return
    if method == "full":
        translation.skip(
            "finetuning_type", "not applicable", "all parameters are trained unless a setting freezes them"
        )
    else:
        translation.skip("finetuning_type", "no counterpart", _FREEZE)
    for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target"):
        if translation.is_pending(key):
            translation.skip(key, "not applicable", "finetuning_type is not lora")


_CHAT = "chat and instruction prompts are not supported"
_LORA = "an option of LoRA"
_FREEZE = "set training.groups to select what is trained; scale: none freezes parameters"
_PREFERENCE = "preference optimisation and RL are not supported"
_QUANTISED = "the base model is not quantised"
_KERNEL = "attention and kernels are chosen by the engine"
_MIXING = "set data.mixture with several data.sources"
_SAMPLES = "samples.* sets how samples are generated"
_OPTIMIZER = "not an available optimizer"
_TOKENS = "the tokenizer is used unchanged"
_MEDIA = "only language models of text are supported"

SKIPPED_KEYS = SkippedKeys(
    no_counterpart={
        **dict.fromkeys(("template", "train_on_prompt", "mask_history", "tool_format", "default_system"), _CHAT),
        "enable_thinking": _CHAT,
        **dict.fromkeys(("mix_strategy", "interleave_probs"), _MIXING),
        **dict.fromkeys(("freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"), _FREEZE),
        **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model"), _MEDIA),
        **dict.fromkeys(("media_dir", "image_max_pixels", "image_min_pixels", "video_max_pixels", "video_fps"), _MEDIA),
        **dict.fromkeys(("video_maxlen", "audio_sampling_rate", "video_min_pixels"), _MEDIA),
        **dict.fromkeys(
            ("pref_beta", "pref_ftx", "pref_loss", "dpo_label_smoothing", "kto_chosen_weight"), _PREFERENCE
        ),
        **dict.fromkeys(
            ("kto_rejected_weight", "simpo_gamma", "ppo_epochs", "ppo_buffer_size", "ppo_target"), _PREFERENCE
        ),
        **dict.fromkeys(
            ("ppo_score_norm", "ppo_whiten_rewards", "ref_model", "reward_model", "reward_model_type"), _PREFERENCE
        ),
        **dict.fromkeys(
            ("quantization_bit", "quantization_method", "quantization_type", "double_quantization"), _QUANTISED
        ),
        **dict.fromkeys(("use_galore", "galore_rank", "galore_target", "galore_scale", "use_apollo"), _OPTIMIZER),
        **dict.fromkeys(
            ("use_badam", "badam_mode", "use_adam_mini", "apollo_rank", "galore_update_interval"), _OPTIMIZER
        ),
        **dict.fromkeys(
            ("use_llama_pro", "mixture_of_depths", "rope_scaling", "shift_attn"), "the model is used unchanged"
        ),
        **dict.fromkeys(
            ("moe_aux_loss_coef", "upcast_layernorm", "upcast_lmhead_output"), "the model is used unchanged"
        ),
        "train_from_scratch": "remove model.from and set model.size",
        **dict.fromkeys(("resize_vocab", "add_tokens", "add_special_tokens", "split_special_tokens"), _TOKENS),
        **dict.fromkeys(("temperature", "top_p", "top_k", "max_new_tokens", "do_sample", "num_beams"), _SAMPLES),
        **dict.fromkeys(("repetition_penalty", "eval_num_beams"), _SAMPLES),
        **dict.fromkeys(
            ("hf_hub_token", "ms_hub_token", "om_hub_token", "swanlab_api_key"),
            "put secrets into environment variables",
        ),
        **dict.fromkeys(
            ("use_swanlab", "swanlab_project", "swanlab_run_name", "swanlab_mode"), "not a supported logger"
        ),
        **dict.fromkeys(("compute_accuracy", "use_dft_loss"), "the loss and its metrics belong to the task"),
        "disable_shuffling": "training data is always shuffled",
        "model_revision": "set model.from to a folder to pin a version",
        "eval_on_each_dataset": "evaluation uses one source",
        **dict.fromkeys(("export_dir", "export_size", "export_device"), "bottega export writes a folder"),
        "use_muon": "set training.optimizer.name to muon",
        "early_stopping_steps": "set training.early_stopping.patience",
    },
    not_implemented_yet={
        **dict.fromkeys(("use_rslora", "use_dora", "pissa_init", "pissa_iter", "pissa_convert"), _LORA),
        **dict.fromkeys(("additional_target", "adapter_name_or_path", "adapter_folder", "create_new_adapter"), _LORA),
        **dict.fromkeys(("loraplus_lr_ratio", "loraplus_lr_embedding"), _LORA),
        **dict.fromkeys(("oft_rank", "oft_block_size", "oft_target"), "lora is the only supported adapter"),
    },
    not_applicable={
        "dataset_dir": "data.train.path is relative to the working directory",
        **dict.fromkeys(
            ("overwrite_cache", "preprocessing_num_workers", "preprocessing_batch_size"),
            "prepared data is cached by a hash of its settings",
        ),
        **dict.fromkeys(
            ("tokenized_path", "cache_dir", "data_shared_file_system"),
            "prepared data is cached by a hash of its settings",
        ),
        **dict.fromkeys(("streaming", "buffer_size"), "prepared data is read from disk as needed"),
        **dict.fromkeys(
            ("flash_attn", "use_unsloth", "use_unsloth_gc", "enable_liger_kernel", "use_reentrant_gc"), _KERNEL
        ),
        "plot_loss": "the curves are in the run's folder",
        "include_effective_tokens_per_second": "tokens are always counted",
        **dict.fromkeys(
            ("low_cpu_mem_usage", "use_fast_tokenizer", "use_kv_cache", "print_param_status"),
            "an internal setting of LLaMA-Factory's model loader",
        ),
        **dict.fromkeys(("infer_backend", "infer_dtype", "offload_folder"), "a setting of inference, not of training"),
        "ignore_pad_token_for_loss": "padding never counts in the loss",
        "ray_run_name": "processes are started by a launcher, not by Ray",
    },
    harmless_values={
        "mix_strategy": ("concat",),
        "model_revision": ("main",),
        "freeze_vision_tower": (True,),
        "freeze_multi_modal_projector": (True,),
        "loraplus_lr_embedding": (1e-6,),
    },
)
