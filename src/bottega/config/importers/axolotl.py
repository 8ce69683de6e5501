"""Axolotl's YAML: a base model, a list of data sets, an adapter, and the arguments of transformers under other names."""

from __future__ import annotations

from typing import Any

from bottega.config.importers import family, trainer
from bottega.config.importers.mapping import Left, Sheet, epochs, is_off, number, switch, text, texts, whole

MARKS = (
    *(
        "micro_batch_size",
        "datasets",
        "pretraining_dataset",
        "sequence_len",
        "sample_packing",
        "val_set_size",
        "adapter",
    ),
    *("dataset_prepared_path", "lora_r", "lr_scheduler", "load_in_8bit", "load_in_4bit", "flash_attention"),
    *("evals_per_epoch", "saves_per_epoch", "pad_to_sequence_len", "tokenizer_type", "special_tokens"),
)
"""Keys of which such a file has at least one beside base_model."""

NOT_PLAIN = "prompts are not built from chats or instructions; name one field of plain text in data.train.field"
PLAIN = ("completion", "pretrain")
"""Their types of data whose text is learned as it stands."""
BUILDERS = ("json", "csv", "parquet", "arrow", "text")
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".gz", ".zst")
LORA = "techniques.0.options."


def translate(sheet: Sheet) -> None:
    sheet.default("(axolotl)", "language models", "task", "language")
    _model(sheet)
    _data(sheet)
    family.length(sheet, "num_epochs", default=1)
    _batch(sheet)
    sheet.direct(
        {
            "learning_rate": ("training.learning_rate", number),
            "weight_decay": ("training.weight_decay", number),
            "save_total_limit": ("checkpoint.keep", whole),
            "seed": ("seed", whole),
            "output_dir": ("output_dir", text),
            "use_tensorboard": ("logging.tensorboard", switch),
            "wandb_tags": ("logging.wandb.tags", texts),
        }
    )
    sheet.default("weight_decay", 0.0, "training.weight_decay", 0.0)
    sheet.default("seed", 42, "seed", 42)
    family.optimizer(sheet, "optimizer")
    family.clipping(sheet)
    sheet.convert("cosine_min_lr_ratio", "training.scheduler.min_ratio", number)
    family.schedule(sheet, "lr_scheduler", default="cosine")
    sheet.default("warmup_ratio", 0.03, "training.scheduler.warmup_steps", "3%")
    if is_off(sheet.get("float32")) or not sheet.is_open("float32"):
        family.precision(sheet, default="auto")
    else:
        sheet.put("float32", "training.mixed_precision", "fp32")
        for key in ("bf16", "fp16", "bfloat16", "float16"):
            sheet.leave(key, "meaningless here", "float32 decides")
    _cadences(sheet)
    family.best(sheet, patience="early_stopping_patience")
    sheet.direct(family.WANDB)
    family.wandb_mode(sheet)
    family.sharding(sheet)
    family.switches(sheet)
    _adapter(sheet)
    if sheet.is_open("device"):
        name = str(sheet.get("device")).partition(":")[0]
        sheet.put("device", "device", name)
    sheet.finish(LEFT, trainer.LEFT)


def _model(sheet: Sheet) -> None:
    sheet.convert("base_model", "model.from", text)
    sheet.convert("sequence_len", "data.sequence_length", whole)
    if sheet.is_open("tokenizer_config"):
        if sheet.get("tokenizer_config") == sheet.get("base_model"):
            sheet.leave("tokenizer_config", "meaningless here", "the tokenizer of model.from is used anyway")
        else:
            sheet.put("tokenizer_config", "data.tokenizer.path", str(sheet.get("tokenizer_config")))
            sheet.put("tokenizer_config", "data.tokenizer.kind", "pretrained")


def _batch(sheet: Sheet) -> None:
    """micro_batch_size is their batch of one process; batch_size, where it is given, the product."""
    micro, total = sheet.get("micro_batch_size"), sheet.get("batch_size")
    if isinstance(micro, int) and isinstance(total, int) and micro > 0 and not sheet.get("gradient_accumulation_steps"):
        passes = max(1, total // micro)
        sheet.put("batch_size", "training.gradient_accumulation_steps", passes, note=f"{total} / {micro}")
        sheet.put("micro_batch_size", "training.batch_size", micro)
        family.batch_note(sheet, micro, passes)
    else:
        sheet.leave("batch_size", "meaningless here", "micro_batch_size x gradient_accumulation_steps decide")
        family.batch(sheet, "micro_batch_size", default=1)
    sheet.convert("eval_batch_size", "evaluation.batch_size", whole, note="over all processes here")


def _cadences(sheet: Sheet) -> None:
    for theirs, ours, steps, strategy in (
        ("evals_per_epoch", "evaluation.every", "eval_steps", ("eval_strategy", "evaluation_strategy")),
        ("saves_per_epoch", "checkpoint.every", "save_steps", ("save_strategy",)),
    ):
        times = sheet.get(theirs)
        if sheet.is_open(theirs) and not is_off(times):
            sheet.convert(theirs, ours, lambda v: epochs(1 / number(v)))
            for key in (steps, *strategy):
                sheet.leave(key, "meaningless here", f"{theirs} is given and decides")
        elif sheet.is_open(steps) and not is_off(sheet.get(steps)):
            for key in strategy:
                sheet.leave(key, "meaningless here", f"{steps} is given and decides")
            family.cadence(sheet, ours, strategies=(), steps=steps)
        else:
            family.cadence(sheet, ours, strategies=strategy, steps=steps)
    sheet.default("save_strategy", "epoch", "checkpoint.every", "1 epoch")
    family.cadence(sheet, "logging.every", strategies=("logging_strategy",), steps="logging_steps")


def _data(sheet: Sheet) -> None:
    key = "pretraining_dataset" if sheet.under("pretraining_dataset") else "datasets"
    _sources(sheet, key, "data.train", several="data.sources")
    if isinstance(sheet.get("pretraining_dataset"), str):
        _path(sheet, "pretraining_dataset", "data.train", None)
    _sources(sheet, "test_datasets", "data.validation", several=None)
    held_out(sheet, "val_set_size")
    _packing(sheet)
    if sheet.get("dataset_exact_deduplication"):
        sheet.put("dataset_exact_deduplication", "data.deduplicate.method", "exact")


def held_out(sheet: Sheet, key: str) -> None:
    """A share is ours too; a number of examples is not; none is said, because ours would hold some back."""
    if sheet.ours("data.validation.path"):
        sheet.leave(key, "meaningless here", "validation has data of its own")
    size = sheet.get(key)
    if size is not None and is_off(size):
        sheet.put(key, "data.validation", None, note="nothing is held back")
    elif isinstance(size, int | float) and size >= 1:
        sheet.leave(key, "no counterpart", "a number of examples; data.validation.split is a share, such as 0.05")
    elif sheet.is_open(key):
        sheet.convert(key, "data.validation.split", lambda v: float(number(v)))
    elif sheet.ours("data.validation.path") is None:
        sheet.default(key, 0, "data.validation", None)


def _packing(sheet: Sheet) -> None:
    if sheet.is_open("sample_packing"):
        if sheet.get("sample_packing"):
            note = "documents are joined and may be cut at a border"
            sheet.put("sample_packing", "data.separate_documents", True, note=note)
        else:
            sheet.put("sample_packing", "data.padding", True)


def _sources(sheet: Sheet, key: str, ours: str, *, several: str | None) -> None:
    """One data set is `train`; several are `sources`, each example once an epoch as there."""
    numbers = [name for name in dict.fromkeys(name.split(".")[1] for name in sheet.under(key)) if name.isdigit()]
    for number_ in numbers:
        if len(numbers) > 1 and several is None and number_ != numbers[0]:
            sheet.leave_block(f"{key}.{number_}", "no counterpart", "one source measures progress here; join the files")
            continue
        to = ours if len(numbers) == 1 or several is None else f"{several}.{number_}"
        _source(sheet, f"{key}.{number_}", to)
    if len(numbers) > 1 and several is not None:
        sheet.default(key, f"{len(numbers)} together", "data.mixture", "concatenate")


def _source(sheet: Sheet, theirs: str, ours: str) -> None:
    files = sheet.get(f"{theirs}.data_files")
    if isinstance(files, list) and len(files) > 1:
        sheet.leave(
            f"{theirs}.data_files", "no counterpart", "one path a source; a pattern such as data/*.jsonl names several"
        )
    elif files:
        sheet.leave(f"{theirs}.path", "meaningless here", "data_files names the file")
        _path(sheet, f"{theirs}.data_files", ours, sheet.get(f"{theirs}.ds_type"))
    _path(sheet, f"{theirs}.path", ours, sheet.get(f"{theirs}.ds_type"))
    sheet.leave(f"{theirs}.ds_type", "meaningless here", "told from the file's name")
    sheet.convert(f"{theirs}.name", f"{ours}.subset", text)
    sheet.convert(f"{theirs}.split", f"{ours}.split", text)
    for key in ("field", "text_column"):
        sheet.convert(f"{theirs}.{key}", f"{ours}.field", text)
    kind = sheet.get(f"{theirs}.type")
    if kind in PLAIN:
        sheet.leave(f"{theirs}.type", "meaningless here", "plain text is what is learned here")
        sheet.default(f"{theirs}.field", "text", f"{ours}.field", "text")
    sheet.leave(f"{theirs}.type", "no counterpart", NOT_PLAIN)
    sheet.leave_block(f"{theirs}.type", "no counterpart", NOT_PLAIN)


def _path(sheet: Sheet, theirs: str, ours: str, kind: Any) -> None:
    """A file here, or a data set of the hub: told by the name, because the file need not be on this machine."""
    if not sheet.is_open(theirs):
        return
    path = sheet.convert(theirs, f"{ours}.path", lambda v: text(v[0] if isinstance(v, list) and v else v))
    if path is None:
        return
    suffix = path.lower().endswith(FILES)
    is_hub = not suffix and path.count("/") <= 1 and "://" not in path and not path.startswith((".", "/", "~", "data/"))
    if is_hub:
        sheet.put(theirs, f"{ours}.kind", "huggingface", note=None if "/" in path else "taken for a name on the hub")
    elif not suffix and str(kind) in BUILDERS:
        sheet.put(theirs, f"{ours}.kind", str(kind))


def _adapter(sheet: Sheet) -> None:
    adapter = sheet.get("adapter")
    if adapter in ("lora", "qlora"):
        note = "the base is not quantised here" if adapter == "qlora" else None
        sheet.put("adapter", "techniques.0.name", "lora", note=note)
        sheet.convert("lora_r", f"{LORA}rank", whole)
        sheet.convert("lora_alpha", f"{LORA}alpha", number)
        sheet.convert("lora_dropout", f"{LORA}dropout", number)
        sheet.convert("lora_target_modules", f"{LORA}targets", texts)
        if sheet.get("lora_target_linear") and sheet.ours(f"{LORA}targets") is None:
            sheet.put("lora_target_linear", f"{LORA}targets", "all-linear")
    elif adapter is not None and not is_off(adapter):
        sheet.leave("adapter", "no counterpart", "lora is the adapter that is understood")
    if sheet.ours("techniques.0.name") is None:
        for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear"):
            if sheet.is_open(key):
                sheet.leave(key, "meaningless here", "no adapter is asked for")


_CHAT = "prompts are not built from chats or instructions"
_KERNEL = "attention and kernels are chosen by the engine"
_QUANTISED = "the base is not quantised here"
_PREFERENCE = "learning from preferences or rewards; task: language predicts the next token"
_PACKED = "documents are joined without gaps"
_TOKENS = "the tokenizer is taken as it is"

LEFT = Left(
    nothing={
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
            (f"{part}.*.shards" for part in ("datasets", "test_datasets")), "limit takes the first so many"
        ),
        "datasets": "not a setting of a source here",
        "test_datasets": "not a setting of a source here",
        "pretraining_dataset": "not a setting of a source here",
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
        **dict.fromkeys(("embedding_lr", "embedding_lr_scale", "lr_groups"), "a row of training.groups, with scale"),
        "unfrozen_parameters": "rows of training.groups; scale none freezes",
        "cosine_constant_lr_ratio": "the cosine falls over the whole run",
        "lr_quadratic_warmup": "the warm-up is a line",
        "min_sample_len": "data.filter.min_characters leaves out short texts",
        **dict.fromkeys(("eval_table_size", "eval_max_new_tokens"), "samples.every draws samples while it learns"),
        **dict.fromkeys(
            ("do_bench_eval", "do_causal_lm_eval", "eval_causal_lm_metrics"), "bottega evaluate measures a run"
        ),
        "curriculum_sampling": "data.curriculum orders by length or a score",
        **dict.fromkeys(
            ("loss_watchdog_threshold", "loss_watchdog_patience"), "training.on_nonfinite watches the loss"
        ),
        **dict.fromkeys(("use_mlflow", "mlflow_tracking_uri", "mlflow_experiment_name", "use_comet"), "not written to"),
        **dict.fromkeys(("comet_api_key", "hf_use_auth_token"), "secrets belong in the environment"),
        **dict.fromkeys(("wandb_run_id", "wandb_watch", "wandb_log_model"), "not sent to Weights & Biases"),
        **dict.fromkeys(("sequence_parallel_degree", "context_parallel_size"), "a sequence stays on one device"),
        **dict.fromkeys(("tensor_parallel_size", "dp_shard_size"), "distributed.strategy is ddp or fsdp"),
        **dict.fromkeys(("adam_beta3", "adam_epsilon2"), "of a rule that is not here"),
        **dict.fromkeys(
            ("plugins", "overrides_of_model_config", "model_config", "revision_of_model"),
            "no code or settings beside the folder",
        ),
        **dict.fromkeys(("relora", "relora_steps", "lisa_n_layers"), "not a technique here"),
        "num_labels": "task: classify has model.num_labels",
        "device_map": "a model lies on one device of each process",
        "save_first_step": "the first checkpoint comes after checkpoint.every",
        "shuffle_merged_datasets": "always shuffled",
    },
    later={
        **dict.fromkeys(("lora_modules_to_save", "lora_fan_in_fan_out", "peft_use_dora", "peft_use_rslora"), "of LoRA"),
        **dict.fromkeys(("peft_layers_to_transform", "peft_layers_pattern", "peft_init_lora_weights"), "of LoRA"),
        **dict.fromkeys(("lora_model_dir", "loraplus_lr_ratio", "loraplus_lr_embedding", "peft"), "of LoRA"),
        "lora_target_parameters": "of LoRA",
        "lora_target_linear": "of LoRA; lora_target_modules is taken",
    },
    idle={
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
            "prepared data are kept by what made them",
        ),
        **dict.fromkeys(("skip_prepare_dataset", "push_dataset_to_hub"), "prepared data are kept by what made them"),
        **dict.fromkeys(("world_size", "ddp", "use_ray", "ray_num_workers"), "processes are counted by the launcher"),
        "strict": "every key is always checked",
        "auto_resume_from_checkpoints": "the same command resumes by itself",
        "gc_steps": "a detail of their loop",
        **dict.fromkeys(
            ("low_cpu_mem_usage", "lora_on_cpu", "gpu_memory_limit", "max_memory"), "a detail of how they load"
        ),
        "datasets.*.trust_remote_code": "no code from a data set is run",
        "save_safetensors": "weights are always safetensors",
    },
    usual={"shuffle_merged_datasets": (True,), "train_on_inputs": (False,), "loraplus_lr_embedding": (1e-6,)},
)
