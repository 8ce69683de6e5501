"""Axolotl's keys that are left out, with the reason for each."""

from __future__ import annotations

from bottega.config.importers.translation import SkippedKeys

_CHAT = "chat and instruction prompts are not supported"
_KERNEL = "attention and kernels are chosen by the engine"
_QUANTISED = "the base model is not quantised"
_PREFERENCE = "preference optimisation and RL are not supported; task: language predicts the next token"
_PACKED = "documents are joined without gaps"
_TOKENS = "the tokenizer is used unchanged"

SKIPPED_KEYS = SkippedKeys(
    no_counterpart={
        **dict.fromkeys(("chat_template", "chat_template_jinja", "default_system_message", "eot_tokens"), _CHAT),
        **dict.fromkeys(("train_on_inputs", "roles_to_train", "train_on_eos", "datasets.*.conversation"), _CHAT),
        **dict.fromkeys(
            (f"datasets.*.{key}" for key in ("chat_template", "field_messages", "roles", "roles_to_train")), _CHAT
        ),
        **dict.fromkeys(
            (
                f"datasets.*.{key}"
                for key in ("message_field_role", "message_field_content", "message_property_mappings")
            ),
            _CHAT,
        ),
        **dict.fromkeys(
            (f"{name}.*.shards" for name in ("datasets", "test_datasets")),
            "to read a part of the data, set limit of the source (data.train.limit) to a number of samples",
        ),
        **dict.fromkeys(
            ("datasets", "test_datasets", "pretraining_dataset"),
            "a source has no such setting; bottega schema lists those of data.train",
        ),
        **dict.fromkeys(
            ("rl", "trl", "vllm", "reward_model", "process_reward_model", "rl_beta", "orpo_alpha"), _PREFERENCE
        ),
        **dict.fromkeys(("dpo_beta", "rpo_alpha", "simpo_gamma", "cpo_alpha", "kto_desirable_weight"), _PREFERENCE),
        **dict.fromkeys(("kto_undesirable_weight", "max_prompt_len", "dpo_use_weighting"), _PREFERENCE),
        **dict.fromkeys(
            ("load_in_8bit", "load_in_4bit", "gptq", "bnb_config_kwargs", "qat", "quantization"), _QUANTISED
        ),
        **dict.fromkeys(
            ("special_tokens", "tokens", "added_tokens_overrides", "resize_token_embeddings_to_32x"), _TOKENS
        ),
        **dict.fromkeys(("embedding_lr", "embedding_lr_scale", "lr_groups"), "set training.groups, with scale"),
        "unfrozen_parameters": "set training.groups to select what is trained; scale: none freezes parameters",
        "cosine_constant_lr_ratio": "the cosine decays over the whole run",
        "lr_quadratic_warmup": "the warm-up is linear",
        "min_sample_len": "data.filter.min_characters leaves out short texts",
        **dict.fromkeys(("eval_table_size", "eval_max_new_tokens"), "samples.every generates samples during training"),
        **dict.fromkeys(
            ("do_bench_eval", "do_causal_lm_eval", "eval_causal_lm_metrics"), "bottega evaluate measures a run"
        ),
        "curriculum_sampling": "data.curriculum orders by length or a score",
        **dict.fromkeys(
            ("loss_watchdog_threshold", "loss_watchdog_patience"), "training.on_nonfinite watches the loss"
        ),
        **dict.fromkeys(
            ("use_mlflow", "mlflow_tracking_uri", "mlflow_experiment_name", "use_comet"), "not a supported logger"
        ),
        **dict.fromkeys(("comet_api_key", "hf_use_auth_token"), "put secrets into environment variables"),
        **dict.fromkeys(("wandb_run_id", "wandb_watch", "wandb_log_model"), "not sent to Weights & Biases"),
        **dict.fromkeys(("sequence_parallel_degree", "context_parallel_size"), "a sequence stays on one device"),
        **dict.fromkeys(("tensor_parallel_size", "dp_shard_size"), "distributed.strategy is ddp or fsdp"),
        **dict.fromkeys(("adam_beta3", "adam_epsilon2"), "a setting of an optimizer that is not available"),
        **dict.fromkeys(
            ("plugins", "overrides_of_model_config", "model_config", "revision_of_model"),
            "code and settings outside the model's folder are not used",
        ),
        **dict.fromkeys(("relora", "relora_steps", "lisa_n_layers"), "not a technique here"),
        "num_labels": "task: classify has model.num_labels",
        "device_map": "a model is on one device of each process",
        "save_first_step": "the first checkpoint comes after checkpoint.every",
        "shuffle_merged_datasets": "training data is always shuffled",
    },
    not_implemented_yet={
        **dict.fromkeys(
            ("lora_modules_to_save", "lora_fan_in_fan_out", "peft_use_dora", "peft_use_rslora"), "an option of LoRA"
        ),
        **dict.fromkeys(
            ("peft_layers_to_transform", "peft_layers_pattern", "peft_init_lora_weights"), "an option of LoRA"
        ),
        **dict.fromkeys(("lora_model_dir", "loraplus_lr_ratio", "loraplus_lr_embedding", "peft"), "an option of LoRA"),
        "lora_target_parameters": "an option of LoRA",
        "lora_target_linear": "a setting of LoRA; lora_target_modules is used",
    },
    not_applicable={
        **dict.fromkeys(
            ("model_type", "tokenizer_type", "base_model_config", "cls_model_config"), "read from model.from"
        ),
        **dict.fromkeys(("tokenizer_use_fast", "tokenizer_legacy", "processor_type"), "read from model.from"),
        **dict.fromkeys(
            (f"is_{name}_derived_model" for name in ("llama", "mistral", "falcon", "qwen")), "read from model.from"
        ),
        **dict.fromkeys(
            ("flash_attention", "sdp_attention", "xformers_attention", "flex_attention", "eager_attention"), _KERNEL
        ),
        **dict.fromkeys(
            ("s2_attention", "attn_implementation", "flash_attn_cross_entropy", "flash_attn_rms_norm"), _KERNEL
        ),
        **dict.fromkeys(("flash_attn_fuse_qkv", "flash_attn_fuse_mlp", "lora_mlp_kernel", "lora_qkv_kernel"), _KERNEL),
        **dict.fromkeys(("lora_o_kernel", "unsloth_lora_mlp", "unsloth_lora_qkv", "unsloth_lora_o"), _KERNEL),
        **dict.fromkeys(
            ("unsloth_cross_entropy_loss", "liger_rope", "liger_rms_norm", "liger_glu_activation"), _KERNEL
        ),
        **dict.fromkeys(("liger_layer_norm", "liger_fused_linear_cross_entropy", "cut_cross_entropy"), _KERNEL),
        **dict.fromkeys(("pad_to_sequence_len", "eval_sample_packing", "sample_packing_group_size"), _PACKED),
        **dict.fromkeys(("sample_packing_bin_size", "sample_packing_sequentially", "multipack_real_batches"), _PACKED),
        **dict.fromkeys(("pretrain_multipack_attn", "pretrain_multipack_buffer_size", "batch_flattening"), _PACKED),
        **dict.fromkeys(
            ("dataset_prepared_path", "dataset_processes", "dataset_keep_in_memory"),
            "prepared data is cached by a hash of its settings",
        ),
        **dict.fromkeys(
            ("skip_prepare_dataset", "push_dataset_to_hub"), "prepared data is cached by a hash of its settings"
        ),
        **dict.fromkeys(
            ("world_size", "ddp", "use_ray", "ray_num_workers"), "the launcher sets the number of processes"
        ),
        "strict": "every key is always checked",
        "auto_resume_from_checkpoints": "the same command resumes by itself",
        "gc_steps": "an internal setting of Axolotl's training loop",
        **dict.fromkeys(
            ("low_cpu_mem_usage", "lora_on_cpu", "gpu_memory_limit", "max_memory"),
            "an internal setting of Axolotl's model loader",
        ),
        "datasets.*.trust_remote_code": "code from a data set is not run",
        "save_safetensors": "weights are always safetensors",
    },
    harmless_values={"shuffle_merged_datasets": (True,), "train_on_inputs": (False,), "loraplus_lr_embedding": (1e-6,)},
)
