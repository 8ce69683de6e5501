"""LLaMA-Factory's YAML: the arguments of transformers, and beside them stage, method, template and data by name."""

from __future__ import annotations

from bottega.config.importers import trainer
from bottega.config.importers.axolotl import LORA, held_out
from bottega.config.importers.mapping import Left, Sheet, number, switch, text, texts, whole

MARKS = (
    *("stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_target", "lora_rank", "val_size"),
    *("neat_packing", "quantization_bit", "adapter_name_or_path"),
)
"""Keys of which such a file has at least one beside model_name_or_path."""


def translate(sheet: Sheet) -> None:
    _stage(sheet)
    sheet.convert("model_name_or_path", "model.from", text)
    sheet.convert("cutoff_len", "data.sequence_length", whole)
    sheet.default("cutoff_len", 2048, "data.sequence_length", 2048)
    _data(sheet)
    if sheet.is_open("disable_gradient_checkpointing"):
        key = "disable_gradient_checkpointing"
        sheet.convert(key, "training.gradient_checkpointing", lambda v: not switch(v))
        sheet.leave("gradient_checkpointing", "meaningless here", f"{key} decides")
    if sheet.get("use_muon"):
        sheet.put("use_muon", "training.optimizer.name", "muon")
        sheet.leave("optim", "meaningless here", "use_muon decides")
    trainer.arguments(sheet, patience="early_stopping_steps")
    # Theirs recomputes activations unless told not to.
    sheet.default("disable_gradient_checkpointing", False, "training.gradient_checkpointing", True)
    _method(sheet)
    sheet.finish(LEFT, trainer.LEFT)


def _stage(sheet: Sheet) -> None:
    stage = sheet.get("stage")
    if stage in ("pt", "sft"):
        note = None if stage == "pt" else "all tokens are learned, not only the answers"
        sheet.put("stage", "task", "language", note=note)
    else:
        sheet.leave(
            "stage", "no counterpart", "learning from preferences or rewards; task: language predicts the next token"
        )
        sheet.default("stage", stage or "sft", "task", "language")


def _data(sheet: Sheet) -> None:
    named = "a name in their dataset_info.json; put the file itself into {}"
    sheet.leave("dataset", "no counterpart", named.format("data.train.path"))
    sheet.leave("eval_dataset", "no counterpart", named.format("data.validation.path"))
    sheet.convert("max_samples", "data.limit", whole, note="of all data together here")
    if sheet.get("val_size") or not sheet.is_open("eval_dataset"):
        held_out(sheet, "val_size")
    packed = sheet.get("packing")
    if sheet.get("neat_packing"):
        sheet.put("neat_packing", "data.separate_documents", True)
        sheet.leave("packing", "meaningless here", "documents are joined without gaps anyway")
    elif packed or (packed is None and sheet.get("stage") == "pt"):
        sheet.leave("packing", "meaningless here", "documents are joined without gaps anyway")
    elif packed is not None:
        sheet.put("packing", "data.padding", True)
    else:
        sheet.default("packing", False, "data.padding", True)


def _method(sheet: Sheet) -> None:
    method = sheet.get("finetuning_type")
    if method in (None, "lora"):
        if method is None:
            sheet.default("finetuning_type", "lora", "techniques.0.name", "lora")
        else:
            sheet.put("finetuning_type", "techniques.0.name", "lora")
        rank = sheet.convert("lora_rank", f"{LORA}rank", whole)
        if rank is None:
            sheet.default("lora_rank", 8, f"{LORA}rank", 8)
        sheet.convert("lora_alpha", f"{LORA}alpha", number)
        sheet.default("lora_alpha", 2 * (rank or 8), f"{LORA}alpha", 2 * (rank or 8))
        sheet.convert("lora_dropout", f"{LORA}dropout", number)
        sheet.convert("lora_target", f"{LORA}targets", lambda v: "all-linear" if v in ("all", ["all"]) else texts(v))
        sheet.default("lora_target", "all", f"{LORA}targets", "all-linear")
        return
    if method == "full":
        sheet.leave("finetuning_type", "meaningless here", "everything learns unless something says otherwise")
    else:
        sheet.leave("finetuning_type", "no counterpart", "rows of training.groups say what learns; scale none freezes")
    for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target"):
        if sheet.is_open(key):
            sheet.leave(key, "meaningless here", "finetuning_type is not lora")


_CHAT = "prompts are not built from chats or instructions"
_LORA = "of LoRA"
_FREEZE = "rows of training.groups say what learns; scale none freezes"
_PREFERENCE = "learning from preferences or rewards"
_QUANTISED = "the base is not quantised here"
_KERNEL = "attention and kernels are chosen by the engine"
_MIXING = "data.mixture, once data.sources names the files"
_SAMPLES = "samples.* says how samples are drawn"
_OPTIMIZER = "not an update rule here"
_TOKENS = "the tokenizer is taken as it is"
_MEDIA = "a language model of text alone"

LEFT = Left(
    nothing={
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
            ("use_llama_pro", "mixture_of_depths", "rope_scaling", "shift_attn"), "the model is taken as it is"
        ),
        **dict.fromkeys(
            ("moe_aux_loss_coef", "upcast_layernorm", "upcast_lmhead_output"), "the model is taken as it is"
        ),
        "train_from_scratch": "leave model.from out and say the model's size",
        **dict.fromkeys(("resize_vocab", "add_tokens", "add_special_tokens", "split_special_tokens"), _TOKENS),
        **dict.fromkeys(("temperature", "top_p", "top_k", "max_new_tokens", "do_sample", "num_beams"), _SAMPLES),
        **dict.fromkeys(("repetition_penalty", "eval_num_beams"), _SAMPLES),
        **dict.fromkeys(
            ("hf_hub_token", "ms_hub_token", "om_hub_token", "swanlab_api_key"), "secrets belong in the environment"
        ),
        **dict.fromkeys(("use_swanlab", "swanlab_project", "swanlab_run_name", "swanlab_mode"), "not written to"),
        **dict.fromkeys(("compute_accuracy", "use_dft_loss"), "the loss and its metrics belong to the task"),
        "disable_shuffling": "always shuffled",
        "model_revision": "name a folder in model.from to pin a version",
        "eval_on_each_dataset": "one source measures progress here",
        **dict.fromkeys(("export_dir", "export_size", "export_device"), "bottega export writes a folder"),
        "use_muon": "training.optimizer.name: muon",
        "early_stopping_steps": "training.early_stopping.patience",
    },
    later={
        **dict.fromkeys(("use_rslora", "use_dora", "pissa_init", "pissa_iter", "pissa_convert"), _LORA),
        **dict.fromkeys(("additional_target", "adapter_name_or_path", "adapter_folder", "create_new_adapter"), _LORA),
        **dict.fromkeys(("loraplus_lr_ratio", "loraplus_lr_embedding"), _LORA),
        **dict.fromkeys(("oft_rank", "oft_block_size", "oft_target"), "lora is the adapter that is understood"),
    },
    idle={
        "dataset_dir": "a path in data.train.path starts from where the command runs",
        **dict.fromkeys(
            ("overwrite_cache", "preprocessing_num_workers", "preprocessing_batch_size"),
            "prepared data are kept by what made them",
        ),
        **dict.fromkeys(
            ("tokenized_path", "cache_dir", "data_shared_file_system"), "prepared data are kept by what made them"
        ),
        **dict.fromkeys(("streaming", "buffer_size"), "prepared data are read from disk as they are needed"),
        **dict.fromkeys(
            ("flash_attn", "use_unsloth", "use_unsloth_gc", "enable_liger_kernel", "use_reentrant_gc"), _KERNEL
        ),
        "plot_loss": "the curves are in the run's folder",
        "include_effective_tokens_per_second": "tokens are always counted",
        **dict.fromkeys(
            ("low_cpu_mem_usage", "use_fast_tokenizer", "use_kv_cache", "print_param_status"),
            "a detail of how they load",
        ),
        **dict.fromkeys(("infer_backend", "infer_dtype", "offload_folder"), "of drawing, not of training"),
        "ignore_pad_token_for_loss": "what fills up an example is never learned",
        "ray_run_name": "processes are counted by the launcher",
    },
    usual={
        "mix_strategy": ("concat",),
        "model_revision": ("main",),
        "freeze_vision_tower": (True,),
        "freeze_multi_modal_projector": (True,),
        "loraplus_lr_embedding": (1e-6,),
    },
)
