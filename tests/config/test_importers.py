"""Imported configurations of other trainers: recipes that load, and every key translated or reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bottega import cli
from bottega.config.importers import (
    FORMATS,
    axolotl_skipped_keys,
    detect_format,
    lightning,
    llamafactory,
    trainer,
    translate_config,
)
from bottega.config.importers.import_report import format_report
from bottega.config.importers.translation import UNKNOWN_REASON, Translation, iterate_leaves
from bottega.config.load import get_global_batch_size
from bottega.config.yaml_io import parse_yaml
from bottega.core.errors import UsageError
from bottega.tasks.recipes import check_recipe, import_file
from bottega.tasks.registry import TASKS

AXOLOTL = """\
base_model: lab/quill-1b
model_type: AutoModelForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: false
load_in_4bit: true
strict: false
datasets:
  - path: corpus/letters.jsonl
    type: completion
    field: body
  - path: lab/questions
    type: alpaca
    split: train
    name: short
    shards: 4
val_set_size: 0.02
output_dir: ./outputs/letters
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
lora_modules_to_save: [embed_tokens]
wandb_project: letters
wandb_entity:
wandb_log_model:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: "2e-4"
weight_decay: 0.01
adam_beta2: 0.95
max_grad_norm: 0.5
bf16: auto
fp16:
tf32: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
early_stopping_patience: 4
resume_from_checkpoint:
logging_steps: 5
flash_attention: true
warmup_ratio: 0.03
evals_per_epoch: 4
saves_per_epoch: 2
save_total_limit: 2
deepspeed: configs/zero3_offload.json
chat_template: chatml
special_tokens: {pad_token: "<pad>"}
hub_token: very-secret
"""

LLAMAFACTORY = """\
model_name_or_path: lab/quill-1b
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
dataset: letters,answers
template: llama3
cutoff_len: 2048
max_samples: 5000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/quill/lora
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: wandb
run_name: quill
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 250
neftune_noise_alpha: 5
flash_attn: fa2
deepspeed: examples/ds_z2_config.json
"""

TRAINER: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "num_train_epochs": 4.0,
    "max_steps": -1,
    "learning_rate": 3e-5,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0.0,
    "lr_scheduler_type": "polynomial",
    "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-6},
    "warmup_ratio": 0.06,
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "label_smoothing_factor": 0.1,
    "fp16": True,
    "bf16": False,
    "eval_strategy": "epoch",
    "eval_steps": None,
    "save_strategy": "epoch",
    "save_steps": 500,
    "save_total_limit": 2,
    "logging_strategy": "steps",
    "logging_steps": 50,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_accuracy",
    "greater_is_better": True,
    "seed": 7,
    "data_seed": None,
    "dataloader_num_workers": 2,
    "dataloader_prefetch_factor": 4,
    "report_to": ["tensorboard", "mlflow"],
    "hub_token": "<HUB_TOKEN>",
    "fsdp": [],
    "fsdp_config": {"min_num_params": 0, "xla": False},
    "accelerator_config": {"split_batches": False},
    "torch_compile": True,
}

LIGHTNING = """\
seed_everything: 11
trainer:
  accelerator: gpu
  devices: 2
  strategy: ddp
  precision: bf16-mixed
  max_epochs: 20
  accumulate_grad_batches: 4
  gradient_clip_val: 0.5
  gradient_clip_algorithm: norm
  val_check_interval: 0.25
  log_every_n_steps: 25
  limit_val_batches: 40
  num_sanity_val_steps: 2
  logger:
    class_path: lightning.pytorch.loggers.WandbLogger
    init_args: {project: quill, name: first, tags: [a, b], log_model: all}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {monitor: val_acc, mode: max, save_top_k: 2, filename: best}
    - class_path: EarlyStopping
      init_args: {monitor: val/loss, patience: 5, min_delta: 0.001}
    - class_path: LearningRateMonitor
    - class_path: my.Callback
      init_args: {depth: 2}
model:
  class_path: my.Classifier
  init_args: {width: 128, dropout: 0.1}
data:
  class_path: my.Photos
  init_args: {data_dir: photos, batch_size: 32, num_workers: 3}
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.001, betas: [0.9, 0.95]}
lr_scheduler:
  class_path: torch.optim.lr_scheduler.CosineAnnealingLR
  init_args: {T_max: 20, eta_min: 1.0e-5}
ckpt_path: null
"""

EXAMPLES: dict[str, dict[str, Any]] = {
    "axolotl": parse_yaml(AXOLOTL, "axolotl").value,
    "llamafactory": parse_yaml(LLAMAFACTORY, "llamafactory").value,
    "trainer": TRAINER,
    "lightning": parse_yaml(LIGHTNING, "lightning").value,
}

BASES: dict[str, dict[str, Any]] = {
    "axolotl": {"base_model": "lab/quill", "micro_batch_size": 2},
    "llamafactory": {"model_name_or_path": "lab/quill", "stage": "pt", "finetuning_type": "full"},
    "trainer": {"output_dir": "out"},
    "lightning": {"trainer": {"max_epochs": 3}},
}
TRANSFORMERS_BASED = "axolotl llamafactory trainer"
TRAINING_ARGUMENTS = "llamafactory trainer"
"""Formats whose keys are those of TrainingArguments."""

# Formats, a snippet of the source, the recipe key, the recipe value.
TRANSLATIONS: list[tuple[str, str, str, Any]] = [
    ("axolotl", "base_model: x/y", "model.from", "x/y"),
    (TRAINING_ARGUMENTS, "model_name_or_path: x/y", "model.from", "x/y"),
    (TRANSFORMERS_BASED, "learning_rate: '1e-5'", "training.learning_rate", 1e-5),
    (TRANSFORMERS_BASED, "weight_decay: 0.2", "training.weight_decay", 0.2),
    (TRANSFORMERS_BASED, "max_steps: 70", "training.max_steps", 70),
    (TRAINING_ARGUMENTS, "num_train_epochs: 3.0", "training.num_epochs", 3),
    (TRAINING_ARGUMENTS, "num_train_epochs: 2.5", "training.num_epochs", 3),
    ("axolotl", "num_epochs: 4", "training.num_epochs", 4),
    ("axolotl", "micro_batch_size: 3", "training.batch_size", 3),
    ("axolotl", "{micro_batch_size: 2, batch_size: 16}", "training.gradient_accumulation_steps", 8),
    ("axolotl", "{micro_batch_size: 2, batch_size: 16}", "training.batch_size", 2),
    ("axolotl", "eval_batch_size: 5", "evaluation.batch_size", 5),
    (TRAINING_ARGUMENTS, "per_device_train_batch_size: 3", "training.batch_size", 3),
    (TRAINING_ARGUMENTS, "per_gpu_train_batch_size: 3", "training.batch_size", 3),
    (TRAINING_ARGUMENTS, "per_device_eval_batch_size: 5", "evaluation.batch_size", 5),
    (TRAINING_ARGUMENTS, "auto_find_batch_size: true", "training.micro_batch_size", "auto"),
    (TRANSFORMERS_BASED, "gradient_accumulation_steps: 6", "training.gradient_accumulation_steps", 6),
    (TRAINING_ARGUMENTS, "optim: adamw_torch_fused", "training.optimizer.name", "adamw"),
    (TRAINING_ARGUMENTS, "optim: adamw_bnb_8bit", "training.optimizer.name", "adamw"),
    (TRAINING_ARGUMENTS, "optim: paged_lion_8bit", "training.optimizer.name", "lion"),
    (TRAINING_ARGUMENTS, "optim: lion_32bit", "training.optimizer.betas", [0.9, 0.999]),
    (TRAINING_ARGUMENTS, "optim: sgd", "training.optimizer.momentum", 0.0),
    (TRAINING_ARGUMENTS, "optim: adafactor", "training.optimizer.name", "adafactor"),
    ("axolotl", "optimizer: muon", "training.optimizer.name", "muon"),
    ("axolotl", "optimizer: paged_adamw_32bit", "training.optimizer.name", "adamw"),
    ("llamafactory", "use_muon: true", "training.optimizer.name", "muon"),
    (TRANSFORMERS_BASED, "adam_beta1: 0.8", "training.optimizer.betas", [0.8, 0.999]),
    (TRANSFORMERS_BASED, "{adam_beta1: 0.8, adam_beta2: 0.95}", "training.optimizer.betas", [0.8, 0.95]),
    (TRANSFORMERS_BASED, "adam_epsilon: 1e-6", "training.optimizer.eps", 1e-6),
    (TRANSFORMERS_BASED, "max_grad_norm: 0.3", "training.max_grad_norm", 0.3),
    (TRANSFORMERS_BASED, "max_grad_norm: 0", "training.max_grad_norm", None),
    ("axolotl", "lr_scheduler: linear", "training.scheduler.name", "linear"),
    ("axolotl", "lr_scheduler: one_cycle", "training.scheduler.name", "one_cycle"),
    ("axolotl", "cosine_min_lr_ratio: 0.1", "training.scheduler.min_ratio", 0.1),
    (TRAINING_ARGUMENTS, "lr_scheduler_type: constant_with_warmup", "training.scheduler.name", "constant"),
    (TRAINING_ARGUMENTS, "lr_scheduler_type: inverse_sqrt", "training.scheduler.name", "inverse_sqrt"),
    (TRAINING_ARGUMENTS, "lr_scheduler_type: warmup_stable_decay", "training.scheduler.name", "wsd"),
    (TRAINING_ARGUMENTS, "lr_scheduler_type: polynomial", "training.scheduler.eta_min", 1e-7),
    (TRAINING_ARGUMENTS, "lr_scheduler_type: reduce_lr_on_plateau", "training.scheduler.patience", 10),
    (TRAINING_ARGUMENTS, "lr_scheduler_type: reduce_lr_on_plateau", "training.scheduler.factor", 0.1),
    (
        TRAINING_ARGUMENTS,
        "{lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1e-6}}",
        "training.scheduler.eta_min",
        1e-6,
    ),
    (TRAINING_ARGUMENTS, "lr_scheduler_kwargs: {min_lr_rate: 0.1}", "training.scheduler.min_ratio", 0.1),
    (
        TRAINING_ARGUMENTS,
        "{lr_scheduler_type: cosine_with_restarts, lr_scheduler_kwargs: {num_cycles: 3}}",
        "training.scheduler.cycles",
        3,
    ),
    (
        TRAINING_ARGUMENTS,
        "{max_steps: 200, lr_scheduler_kwargs: {num_decay_steps: 50}}",
        "training.scheduler.decay_fraction",
        0.25,
    ),
    (TRANSFORMERS_BASED, "warmup_steps: 30", "training.scheduler.warmup_steps", 30),
    (TRANSFORMERS_BASED, "warmup_ratio: 0.05", "training.scheduler.warmup_steps", "5%"),
    (TRANSFORMERS_BASED, "{warmup_steps: 10, warmup_ratio: 0.05}", "training.scheduler.warmup_steps", 10),
    (TRAINING_ARGUMENTS, "{warmup_steps: 0, warmup_ratio: 0.05}", "training.scheduler.warmup_steps", "5%"),
    (TRAINING_ARGUMENTS, "warmup_steps: 0.1", "training.scheduler.warmup_steps", "10%"),
    (TRANSFORMERS_BASED, "bf16: true", "training.mixed_precision", "bf16"),
    (TRANSFORMERS_BASED, "bf16: auto", "training.mixed_precision", "auto"),
    (TRANSFORMERS_BASED, "{fp16: true, bf16: false}", "training.mixed_precision", "fp16"),
    (TRANSFORMERS_BASED, "{fp16: false, bf16: false}", "training.mixed_precision", "fp32"),
    ("axolotl", "float32: true", "training.mixed_precision", "fp32"),
    ("axolotl", "bfloat16: true", "training.mixed_precision", "bf16"),
    ("llamafactory", "pure_bf16: true", "training.mixed_precision", "bf16"),
    (TRANSFORMERS_BASED, "gradient_checkpointing: true", "training.gradient_checkpointing", True),
    ("axolotl", "gradient_checkpointing: offload", "training.gradient_checkpointing", True),
    ("llamafactory", "disable_gradient_checkpointing: true", "training.gradient_checkpointing", False),
    (TRANSFORMERS_BASED, "torch_compile: true", "training.compile", True),
    (TRANSFORMERS_BASED, "dataloader_num_workers: 4", "data.workers", 4),
    (TRANSFORMERS_BASED, "dataloader_pin_memory: false", "data.pin_memory", False),
    (TRANSFORMERS_BASED, "{dataloader_prefetch_factor: 3, dataloader_num_workers: 2}", "data.prefetch", 6),
    (TRAINING_ARGUMENTS, "label_smoothing_factor: 0.1", "training.label_smoothing", 0.1),
    (TRAINING_ARGUMENTS, "ema_decay: 0.999", "training.ema", 0.999),
    (TRANSFORMERS_BASED, "eval_steps: 50", "evaluation.every", 50),
    (TRANSFORMERS_BASED, "eval_steps: 0.1", "evaluation.every", "10%"),
    (TRANSFORMERS_BASED, "eval_strategy: epoch", "evaluation.every", "1 epoch"),
    (TRAINING_ARGUMENTS, "evaluation_strategy: 'no'", "evaluation.every", None),
    (TRAINING_ARGUMENTS, "{eval_strategy: steps, logging_steps: 25}", "evaluation.every", 25),
    (TRANSFORMERS_BASED, "save_steps: 60", "checkpoint.every", 60),
    (TRANSFORMERS_BASED, "save_strategy: epoch", "checkpoint.every", "1 epoch"),
    (TRANSFORMERS_BASED, "save_strategy: no", "checkpoint.every", None),
    ("axolotl", "saves_per_epoch: 2", "checkpoint.every", "0.5 epochs"),
    ("axolotl", "evals_per_epoch: 3", "evaluation.every", "0.333333 epochs"),
    (TRANSFORMERS_BASED, "logging_steps: 7", "logging.every", 7),
    (TRAINING_ARGUMENTS, "logging_strategy: epoch", "logging.every", "1 epoch"),
    (TRANSFORMERS_BASED, "save_total_limit: 2", "checkpoint.keep", 2),
    (TRANSFORMERS_BASED, "metric_for_best_model: eval_loss", "evaluation.metric", "loss"),
    (TRANSFORMERS_BASED, "metric_for_best_model: eval_perplexity", "evaluation.metric", "perplexity"),
    ("trainer", "metric_for_best_model: eval_accuracy", "evaluation.metric", "accuracy"),
    ("trainer", "metric_for_best_model: acc", "evaluation.metric", "accuracy"),
    ("trainer", "metric_for_best_model: eval_f1", "evaluation.metric", "macro_f1"),
    ("trainer", "metric_for_best_model: f1", "evaluation.metric", "macro_f1"),
    (
        "lightning",
        "trainer: {callbacks: [{class_path: x.ModelCheckpoint, init_args: {monitor: val_acc, mode: max}}]}",
        "evaluation.metric",
        "accuracy",
    ),
    ("axolotl trainer", "early_stopping_patience: 2", "training.early_stopping.patience", 2),
    ("trainer", "early_stopping_threshold: 0.1", "training.early_stopping.threshold", 0.1),
    ("llamafactory", "early_stopping_steps: 2", "training.early_stopping.patience", 2),
    (
        "axolotl",
        "{early_stopping_patience: 2, metric_for_best_model: ppl}",
        "training.early_stopping.metric",
        "perplexity",
    ),
    (TRANSFORMERS_BASED, "seed: 3", "seed", 3),
    (TRANSFORMERS_BASED, "output_dir: here/there", "output_dir", "here/there"),
    (TRAINING_ARGUMENTS, "full_determinism: true", "deterministic", True),
    (TRAINING_ARGUMENTS, "use_cpu: true", "device", "cpu"),
    ("axolotl", "device: cuda:0", "device", "cuda"),
    (TRAINING_ARGUMENTS, "run_name: mine", "logging.wandb.name", "mine"),
    (TRAINING_ARGUMENTS, "report_to: [wandb]", "logging.wandb.enabled", True),
    (TRAINING_ARGUMENTS, "report_to: none", "logging.tensorboard", False),
    (TRAINING_ARGUMENTS, "report_to: tensorboard", "logging.tensorboard", True),
    ("axolotl", "use_tensorboard: true", "logging.tensorboard", True),
    ("axolotl", "wandb_tags: [a, b]", "logging.wandb.tags", ["a", "b"]),
    (TRANSFORMERS_BASED, "wandb_project: p", "logging.wandb.project", "p"),
    (TRANSFORMERS_BASED, "wandb_entity: e", "logging.wandb.entity", "e"),
    (TRANSFORMERS_BASED, "wandb_name: n", "logging.wandb.name", "n"),
    (TRANSFORMERS_BASED, "wandb_mode: offline", "logging.wandb.offline", True),
    (TRANSFORMERS_BASED, "wandb_mode: disabled", "logging.wandb.enabled", False),
    (TRANSFORMERS_BASED, "deepspeed: ds/zero3.json", "distributed.strategy", "fsdp"),
    (TRANSFORMERS_BASED, "deepspeed: ds/z2_offload.json", "distributed.offload", True),
    (TRANSFORMERS_BASED, "deepspeed: {zero_optimization: {stage: 2}}", "distributed.strategy", "fsdp"),
    (TRANSFORMERS_BASED, "deepspeed: {zero_optimization: {stage: 0}}", "distributed.strategy", "ddp"),
    (TRANSFORMERS_BASED, "fsdp: [full_shard, auto_wrap]", "distributed.strategy", "fsdp"),
    (TRANSFORMERS_BASED, "fsdp: full_shard offload", "distributed.offload", True),
    ("axolotl", "{fsdp_version: 2, fsdp_config: {offload_params: true}}", "distributed.offload", True),
    (
        "axolotl",
        "{fsdp: [full_shard], fsdp_config: {activation_checkpointing: true}}",
        "training.gradient_checkpointing",
        True,
    ),
    ("axolotl", "sequence_len: 512", "data.sequence_length", 512),
    ("llamafactory", "cutoff_len: 512", "data.sequence_length", 512),
    ("trainer", "block_size: 512", "data.sequence_length", 512),
    ("axolotl", "sample_packing: true", "data.separate_documents", True),
    ("axolotl", "sample_packing: false", "data.padding", True),
    ("llamafactory", "neat_packing: true", "data.separate_documents", True),
    ("llamafactory", "packing: false", "data.padding", True),
    ("axolotl", "val_set_size: 0.1", "data.validation.split", 0.1),
    ("axolotl", "val_set_size: 0", "data.validation", None),
    ("llamafactory", "val_size: 0.1", "data.validation.split", 0.1),
    ("llamafactory", "max_samples: 90", "data.limit", 90),
    ("axolotl", "tokenizer_config: x/t", "data.tokenizer.path", "x/t"),
    ("axolotl", "dataset_exact_deduplication: true", "data.deduplicate.method", "exact"),
    ("axolotl", "datasets: [{path: a/b.jsonl, type: completion}]", "data.train.path", "a/b.jsonl"),
    ("axolotl", "datasets: [{path: a/b.jsonl, type: completion}]", "data.train.field", "text"),
    ("axolotl", "datasets: [{path: a/b.jsonl, field: body}]", "data.train.field", "body"),
    ("axolotl", "datasets: [{path: lab/set, name: en, split: dev}]", "data.train.kind", "huggingface"),
    ("axolotl", "datasets: [{path: lab/set, name: en, split: dev}]", "data.train.subset", "en"),
    ("axolotl", "datasets: [{path: lab/set, name: en, split: dev}]", "data.train.split", "dev"),
    ("axolotl", "datasets: [{path: json, data_files: a.jsonl}]", "data.train.path", "a.jsonl"),
    ("axolotl", "datasets: [{path: ./dump, ds_type: parquet}]", "data.train.kind", "parquet"),
    ("axolotl", "datasets: [{path: a.txt}, {path: b.txt}]", "data.sources", [{"path": "a.txt"}, {"path": "b.txt"}]),
    ("axolotl", "datasets: [{path: a.txt}, {path: b.txt}]", "data.mixture", "concatenate"),
    ("axolotl", "test_datasets: [{path: t.jsonl}]", "data.validation.path", "t.jsonl"),
    ("axolotl", "pretraining_dataset: [{path: p.jsonl, text_column: body}]", "data.train.field", "body"),
    ("axolotl", "pretraining_dataset: lab/web", "data.train.path", "lab/web"),
    ("trainer", "train_file: t.csv", "data.train.path", "t.csv"),
    ("trainer", "validation_file: v.csv", "data.validation.path", "v.csv"),
    ("trainer", "test_file: v.csv", "data.test.path", "v.csv"),
    ("trainer", "dataset_name: lab/set", "data.train.kind", "huggingface"),
    ("trainer", "dataset_config_name: en", "data.train.subset", "en"),
    ("trainer", "validation_split_percentage: 5", "data.validation.split", 0.05),
    ("trainer", "max_train_samples: 9", "data.limit", 9),
    ("trainer", "text_column_name: body", "data.train.field", "body"),
    ("trainer", "label_column_name: kind", "data.train.label", "kind"),
    ("trainer", "tokenizer_name: x/t", "data.tokenizer.path", "x/t"),
    ("axolotl", "{adapter: lora, lora_r: 4}", "techniques.0.options.rank", 4),
    ("axolotl", "{adapter: lora, lora_alpha: 4}", "techniques.0.options.alpha", 4),
    ("axolotl", "{adapter: lora, lora_dropout: 0.1}", "techniques.0.options.dropout", 0.1),
    ("axolotl", "{adapter: lora, lora_target_linear: true}", "techniques.0.options.targets", "all-linear"),
    ("axolotl", "{adapter: qlora, lora_target_modules: [q]}", "techniques.0.options.targets", ["q"]),
    ("llamafactory", "finetuning_type: lora", "techniques.0.name", "lora"),
    ("llamafactory", "{finetuning_type: lora, lora_rank: 4}", "techniques.0.options.alpha", 8),
    ("llamafactory", "{finetuning_type: lora, lora_alpha: 4}", "techniques.0.options.alpha", 4),
    ("llamafactory", "{finetuning_type: lora, lora_target: all}", "techniques.0.options.targets", "all-linear"),
    ("llamafactory", "stage: sft", "task", "language"),
    ("lightning", "trainer: {max_steps: 80}", "training.max_steps", 80),
    ("lightning", "trainer: {max_epochs: 8}", "training.num_epochs", 8),
    ("lightning", "trainer: {accelerator: gpu}", "device", "cuda"),
    ("lightning", "trainer: {devices: 2, num_nodes: 3}", "distributed.processes", 6),
    ("lightning", "trainer: {num_nodes: 3}", "distributed.machines", 3),
    ("lightning", "trainer: {strategy: ddp_find_unused_parameters_true}", "distributed.strategy", "ddp"),
    ("lightning", "trainer: {strategy: deepspeed_stage_3_offload}", "distributed.offload", True),
    ("lightning", "trainer: {strategy: {class_path: FSDPStrategy}}", "distributed.strategy", "fsdp"),
    ("lightning", "trainer: {precision: 16-mixed}", "training.mixed_precision", "fp16"),
    ("lightning", "trainer: {precision: 32}", "training.mixed_precision", "fp32"),
    ("lightning", "trainer: {precision: bf16-true}", "training.mixed_precision", "bf16"),
    ("lightning", "trainer: {gradient_clip_val: 0.3}", "training.max_grad_norm", 0.3),
    ("lightning", "trainer: {log_every_n_steps: 9}", "logging.every", 9),
    ("lightning", "trainer: {val_check_interval: 0.5}", "evaluation.every", "0.5 epochs"),
    ("lightning", "trainer: {val_check_interval: 100, accumulate_grad_batches: 4}", "evaluation.every", 25),
    ("lightning", "trainer: {check_val_every_n_epoch: 2}", "evaluation.every", "2 epochs"),
    ("lightning", "trainer: {limit_val_batches: 5}", "evaluation.max_batches", 5),
    ("lightning", "trainer: {limit_val_batches: 0}", "data.validation", None),
    ("lightning", "trainer: {default_root_dir: here}", "output_dir", "here"),
    ("lightning", "trainer: {deterministic: warn}", "deterministic", True),
    ("lightning", "trainer: {logger: false}", "logging.tensorboard", False),
    (
        "lightning",
        "trainer: {logger: [{class_path: x.WandbLogger, init_args: {entity: e}}]}",
        "logging.wandb.entity",
        "e",
    ),
    (
        "lightning",
        "trainer: {logger: {class_path: WandbLogger, init_args: {offline: true}}}",
        "logging.wandb.offline",
        True,
    ),
    (
        "lightning",
        "trainer: {callbacks: {class_path: EarlyStopping, init_args: {patience: 9}}}",
        "training.early_stopping.patience",
        9,
    ),
    (
        "lightning",
        "trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 9}}]}",
        "checkpoint.every",
        9,
    ),
    (
        "lightning",
        "trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {save_top_k: 2}}]}",
        "checkpoint.keep",
        2,
    ),
    (
        "lightning",
        "trainer: {callbacks: [{class_path: EMAWeightAveraging, init_args: {decay: 0.99}}]}",
        "training.ema",
        0.99,
    ),
    ("lightning", "seed_everything: 4", "seed", 4),
    ("lightning", "data: {batch_size: 6}", "training.batch_size", 6),
    ("lightning", "data: {init_args: {num_workers: 6}}", "data.workers", 6),
    ("lightning", "model: {init_args: {learning_rate: 0.1}}", "training.learning_rate", 0.1),
    ("lightning", "model: {init_args: {model_name_or_path: x/y}}", "model.from", "x/y"),
    ("lightning", "optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}", "training.optimizer.momentum", 0.0),
    ("lightning", "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1}}", "training.weight_decay", 0.01),
    (
        "lightning",
        "optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1}}",
        "training.scheduler.name",
        "constant",
    ),
    (
        "lightning",
        "optimizer: {class_path: Adam, init_args: {weight_decay: 0.1, eps: 1e-6}}",
        "training.optimizer.eps",
        1e-6,
    ),
    (
        "lightning",
        "lr_scheduler: {class_path: x.CosineAnnealingLR, init_args: {eta_min: 1e-6}}",
        "training.scheduler.eta_min",
        1e-6,
    ),
    (
        "lightning",
        "lr_scheduler: {class_path: x.OneCycleLR, init_args: {pct_start: 0.2}}",
        "training.scheduler.warmup_steps",
        "20%",
    ),
    (
        "lightning",
        "lr_scheduler: {class_path: x.ExponentialLR, init_args: {gamma: 0.5}}",
        "training.scheduler.gamma",
        0.125,
    ),
    ("lightning", "lr_scheduler: {class_path: x.ReduceLROnPlateau}", "training.scheduler.patience", 10),
]
ROWS = [(kind, snippet, key, value) for kinds, snippet, key, value in TRANSLATIONS for kind in kinds.split()]


def translate_example(kind: str, config: dict[str, Any]) -> Translation:
    return translate_config(TASKS, Path("theirs.yaml"), config, kind)


def get_value(recipe: Any, key: str) -> Any:
    for part in key.split("."):
        recipe = recipe[int(part)] if isinstance(recipe, list) else recipe[part]
    return recipe


def merge_configs(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {**base, **changes}
    if "trainer" in base and "trainer" in changes:
        both["trainer"] = {**({} if "max_steps" in changes["trainer"] else base["trainer"]), **changes["trainer"]}
    return both


def assert_every_key_is_reported(translation: Translation, config: dict[str, Any]) -> None:
    mapped = [row.source_key for row in translation.mapped if not row.is_default]
    unmapped = [row.source_key for row in translation.unmapped]
    assert len(unmapped) == len(set(unmapped))
    assert not set(mapped) & set(unmapped)
    assert {*mapped, *unmapped} == {key for key, _ in iterate_leaves(config)}
    recipe = translation.to_recipe()
    check_recipe([recipe])
    for row in translation.mapped:
        assert get_value(recipe, row.recipe_key) == row.recipe_value, row


@pytest.mark.parametrize(("kind", "snippet", "key", "value"), ROWS)
def test_key_is_translated(kind: str, snippet: str, key: str, value: Any) -> None:
    config = merge_configs(BASES[kind], parse_yaml(snippet, "snippet").value)
    translation = translate_example(kind, config)
    translated = get_value(translation.to_recipe(), key)
    assert translated == pytest.approx(value) if isinstance(value, float) else translated == value
    assert_every_key_is_reported(translation, config)
    assert not [row for row in translation.unmapped if row.category == "invalid value"]


@pytest.mark.parametrize("kind", FORMATS)
def test_full_configuration_is_imported(kind: str, tmp_path: Path) -> None:
    config = EXAMPLES[kind]
    assert detect_format(Path("x"), config) == kind
    path = tmp_path / ("theirs.json" if kind == "trainer" else "theirs.yaml")
    path.write_text(json.dumps(config), encoding="utf-8")
    report = import_file(path)
    written = tmp_path / "theirs.bottega.yaml"
    assert report["recipe"] == str(written)
    text = written.read_text(encoding="utf-8")
    assert text.startswith(f"# {path.name}, a configuration of ")
    assert "very-secret" not in text + json.dumps(report) + format_report(report)
    loaded = check_recipe([str(written)])
    assert (
        loaded.recipe
        == check_recipe([translate_example(kind, config).to_recipe(), {"origin": "theirs.bottega"}]).recipe
    )
    assert_every_key_is_reported(translate_example(kind, config), config)
    for row in report["unmapped"]:
        assert row["their_key"] in text


@pytest.mark.parametrize(
    ("kind", "size", "per_process"),
    [("axolotl", (2, 4), 8), ("llamafactory", (1, 8), 8), ("trainer", (16, 2), 32), ("lightning", (32, 4), 128)],
)
@pytest.mark.parametrize("num_processes", [1, 2, 8])
def test_global_batch_size_matches_the_source_on_any_number_of_processes(
    kind: str, size: tuple[int, int], per_process: int, num_processes: int
) -> None:
    recipe = check_recipe([translate_example(kind, EXAMPLES[kind]).to_recipe()]).recipe
    assert (recipe.training.batch_size, recipe.training.gradient_accumulation_steps) == size
    assert get_global_batch_size(recipe, num_processes) == per_process * num_processes


@pytest.mark.parametrize("kind", ["llamafactory", "trainer"])
def test_defaults_of_the_source_are_written(kind: str) -> None:
    """The recipe's own defaults are 3e-4, cosine, a weight decay of 0.1, a batch of 32 and seed 0."""
    recipe = check_recipe([translate_example(kind, BASES[kind]).to_recipe()]).recipe
    training = recipe.training
    assert (training.learning_rate, training.weight_decay, training.scheduler.name) == (5e-5, 0.0, "linear")
    assert (training.num_epochs, get_global_batch_size(recipe, 1), recipe.seed) == (3, 8, 42)
    assert training.mixed_precision == "fp32"


@pytest.mark.parametrize("changes", [{}, {"val_size": 0}])
def test_named_validation_data_does_not_switch_validation_off(changes: dict[str, Any]) -> None:
    config = {**BASES["llamafactory"], "eval_dataset": "letters", **changes}
    translation = translate_example("llamafactory", config)
    assert "validation" not in translation.to_recipe().get("data", {})
    assert_every_key_is_reported(translation, config)
    reasons = {row.source_key: row.reason for row in translation.unmapped}
    assert "data.validation.path" in reasons["eval_dataset"]
    assert translate_example("llamafactory", BASES["llamafactory"]).to_recipe()["data"]["validation"] is None


def test_lightning_without_clipping_stays_unclipped() -> None:
    training = check_recipe([translate_example("lightning", BASES["lightning"]).to_recipe()]).recipe.training
    assert training.max_grad_norm is None
    assert training.mixed_precision == "fp32"


REASONS = [
    ("axolotl", "datasets: [{path: lab/x, type: alpaca}]", "datasets.0.type", "no counterpart"),
    ("axolotl", "datasets: [{path: lab/x, type: {field_output: y}}]", "datasets.0.type.field_output", "no counterpart"),
    ("axolotl", "rl: dpo", "rl", "no counterpart"),
    ("axolotl", "{adapter: lora, peft_use_dora: true}", "peft_use_dora", "not implemented yet"),
    ("axolotl", "lora_r: 8", "lora_r", "not applicable"),
    ("axolotl", "load_in_4bit: true", "load_in_4bit", "no counterpart"),
    ("axolotl", "load_in_4bit: false", "load_in_4bit", "not applicable"),
    ("axolotl", "val_set_size: 500", "val_set_size", "no counterpart"),
    ("axolotl", "optimizer: came_pytorch", "optimizer", "no counterpart"),
    ("axolotl", "resume_from_checkpoint: a/b", "resume_from_checkpoint", "not applicable"),
    ("axolotl", "lora_model_dir: ${HOME}/x", "lora_model_dir", "not implemented yet"),
    ("axolotl", "output_dir: ${HOME}/x", "output_dir", "invalid value"),
    ("axolotl", "learning_rate: fast", "learning_rate", "invalid value"),
    ("axolotl", "learning_rate: -1", "learning_rate", "invalid value"),
    ("llamafactory", "template: llama3", "template", "no counterpart"),
    ("llamafactory", "dataset: a,b", "dataset", "no counterpart"),
    ("llamafactory", "{eval_dataset: a, val_size: 0}", "val_size", "not applicable"),
    ("llamafactory", "stage: dpo", "stage", "no counterpart"),
    ("llamafactory", "use_dora: true", "use_dora", "not implemented yet"),
    ("trainer", "{max_steps: 5, num_train_epochs: 3}", "num_train_epochs", "not applicable"),
    ("trainer", "{lr_scheduler_type: constant, warmup_steps: 9}", "warmup_steps", "not applicable"),
    ("trainer", "lr_scheduler_type: greedy", "lr_scheduler_type", "no counterpart"),
    ("trainer", "neftune_noise_alpha: 5", "neftune_noise_alpha", "no counterpart"),
    ("trainer", "tf32: true", "tf32", "not applicable"),
    ("trainer", "something_else: 5", "something_else", "no counterpart"),
    (
        "lightning",
        "trainer: {gradient_clip_val: 1.0, gradient_clip_algorithm: value}",
        "trainer.gradient_clip_val",
        "no counterpart",
    ),
    ("lightning", "trainer: {precision: 64-true}", "trainer.precision", "no counterpart"),
    ("lightning", "trainer: {callbacks: [{class_path: my.Own}]}", "trainer.callbacks.0.class_path", "no counterpart"),
    ("lightning", "model: {class_path: my.Own}", "model.class_path", "no counterpart"),
]


@pytest.mark.parametrize(("kind", "snippet", "key", "category"), REASONS)
def test_unmapped_key_has_its_category(kind: str, snippet: str, key: str, category: str) -> None:
    config = merge_configs(BASES[kind], parse_yaml(snippet, "snippet").value)
    translation = translate_example(kind, config)
    assert [row.category for row in translation.unmapped if row.source_key == key] == [category]
    assert_every_key_is_reported(translation, config)


@pytest.mark.parametrize(
    ("adapter", "reason"), [("llama-adapter", "adapter is llama-adapter, not lora"), (None, "the file sets no adapter")]
)
def test_lora_options_without_lora_have_their_reason(adapter: str | None, reason: str) -> None:
    translation = translate_example("axolotl", {**BASES["axolotl"], "adapter": adapter, "lora_r": 8})
    assert [row.reason for row in translation.unmapped if row.source_key == "lora_r"] == [reason]


def collect_handled_keys(kind: str) -> set[str]:
    """Return the source's keys that are translated or have a specific reason."""
    tables = {
        "axolotl": (axolotl_skipped_keys.SKIPPED_KEYS, trainer.SKIPPED_KEYS),
        "llamafactory": (llamafactory.SKIPPED_KEYS, trainer.SKIPPED_KEYS),
        "trainer": (trainer.SKIPPED_KEYS,),
        "lightning": (lightning.SKIPPED_KEYS,),
    }[kind]
    skipped = {
        key
        for table in tables
        for reasons in (table.no_counterpart, table.not_implemented_yet, table.not_applicable)
        for key in reasons
    }
    configs = [parse_yaml(snippet, "s").value for name, snippet, _, _ in ROWS if name == kind]
    return (
        skipped
        | {key for config in configs for key, _ in iterate_leaves(config)}
        | {key for key, _ in iterate_leaves(EXAMPLES[kind])}
    )


@pytest.mark.parametrize(
    ("kind", "snippet", "unmapped"),
    [
        ("trainer", "metric_for_best_model: eval_rouge", ["metric_for_best_model"]),
        ("axolotl", "metric_for_best_model: accuracy", ["metric_for_best_model"]),
        ("trainer", "{metric_for_best_model: acc, greater_is_better: false}", ["greater_is_better"]),
        ("trainer", "{metric_for_best_model: f1, greater_is_better: true}", []),
        ("trainer", "greater_is_better: true", ["greater_is_better"]),
    ],
)
def test_unavailable_metric_is_not_translated(kind: str, snippet: str, unmapped: list[str]) -> None:
    translation = translate_example(kind, merge_configs(BASES[kind], parse_yaml(snippet, "snippet").value))
    assert [row.source_key for row in translation.unmapped if row.category == "invalid value"] == unmapped
    assert "mode" not in translation.to_recipe().get("evaluation", {})


@pytest.mark.parametrize("kind", FORMATS)
def test_many_keys_are_handled(kind: str) -> None:
    assert len(collect_handled_keys(kind)) >= (60 if kind != "lightning" else 50)
    assert not [
        row.source_key for row in translate_example(kind, EXAMPLES[kind]).unmapped if row.reason == UNKNOWN_REASON
    ]


# Every field of TrainingArguments in transformers 5.
ARGUMENT_NAMES = """
output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs
warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor bf16 fp16 bf16_full_eval
fp16_full_eval tf32 gradient_checkpointing gradient_checkpointing_kwargs torch_compile torch_compile_backend
torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps
auto_find_batch_size logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size
prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps
include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu accelerator_config parallelism_config
dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval
do_predict resume_from_checkpoint local_rank
"""


@pytest.mark.parametrize("kind", ["trainer", "llamafactory"])
def test_every_transformers_argument_is_handled(kind: str) -> None:
    translation = translate_example(kind, {**dict.fromkeys(ARGUMENT_NAMES.split(), "odd"), "seed": 1})
    assert not [row.source_key for row in translation.unmapped if row.reason == UNKNOWN_REASON]


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10**6),
    st.floats(),
    st.sampled_from(
        ["", "no", "auto", "steps", "epoch", "lora", "1e-4", "x/y", "a.json", "${HOME}", "cosine", "fp8", "\n# x"]
    ),
    st.just([]),
    st.just({}),
    st.lists(st.one_of(st.integers(0, 3), st.text(max_size=3)), max_size=3),
    st.just([{"path": 3, "type": ["x"]}, {"class_path": "EarlyStopping", "init_args": {"patience": "x"}}, 5]),
    st.just({"path": "a", "class_path": ["WandbLogger"], "stage": "x"}),
)


@pytest.mark.parametrize("kind", FORMATS)
def test_random_values_are_translated_or_reported(kind: str) -> None:
    def block(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({}, optional=dict.fromkeys(keys, values)).filter(bool)

    names = sorted({key.split(".")[0] for key in collect_handled_keys(kind)} - {"*"})
    inner = sorted({key.split(".")[1] for key in collect_handled_keys("lightning") if key.startswith("trainer.")})
    outer = st.lists(st.sampled_from(names), min_size=1, max_size=12, unique=True).flatmap(block)
    trainers = st.lists(st.sampled_from(inner), min_size=1, max_size=8, unique=True).flatmap(block)

    @settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
    @given(outer, trainers)
    def check(config: dict[str, Any], trainer_config: dict[str, Any]) -> None:
        if kind == "lightning":
            config = {**config, "trainer": trainer_config}
        config = {**config, **({"seed_everything": 1} if kind == "lightning" else {"seed": 1})}
        assert_every_key_is_reported(translate_example(kind, config), config)

    check()


@pytest.mark.parametrize(
    "config",
    [
        # A default replaces an empty key, next to a key that the recipe refuses.
        {"trainer": {"accumulate_grad_batches": None, "log_every_n_steps": 0}},
        # One key disables validation, the other sets its fraction.
        {"trainer": {"limit_val_batches": 0}, "data": {"val_split": 0.1}},
        # Two callbacks of the same class.
        {"trainer": {"callbacks": [{"class_path": "EarlyStopping", "init_args": {"patience": n}} for n in (2, 3)]}},
    ],
)
def test_conflicting_keys_are_both_reported(config: dict[str, Any]) -> None:
    assert_every_key_is_reported(
        translate_example("lightning", {**config, "seed_everything": 1}), {**config, "seed_everything": 1}
    )


def test_hostile_key_cannot_escape_the_comment(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        'base_model: x/y\nmicro_batch_size: 1\n"odd\\ntask: image\\u001b[31m": 5\nplugins: "a\\u2028seed: 5"\n'
    )
    report = import_file(path)
    text = (tmp_path / "a.bottega.yaml").read_text()
    assert "\x1b" not in text + format_report(report)
    recipe = check_recipe([str(tmp_path / "a.bottega.yaml")]).recipe
    assert (recipe.task, recipe.seed) == ("language", 42)


BAD = [
    ("a.yaml", "", [], "is empty"),
    ("a.json", "", [], "is empty"),
    ("a.json", "{}", [], "is empty"),
    ("a.yaml", "- 1\n- 2\n", [], "a configuration is a mapping of keys"),
    ("a.json", "[1]", [], "a configuration is a mapping of keys"),
    ("a.yaml", "a: [1\n", [], "not YAML"),
    ("a.json", "{'a': 1}", [], "not JSON"),
    ("a.json", '{"a": 1, "a": 2}', [], "given twice"),
    ("a.json", "[" * 100_000, [], "nested deeper"),
    ("a.json", '{"a":' * 40 + "1" + "}" * 40, [], "nested deeper"),
    ("a.yaml", "base_model: !!python/name:os.system x\n", [], "tags such as"),
    ("a.yaml", "base_model: x\nbase_model: y\n", [], "given twice"),
    ("a.yaml", "task: language\nmodel: {size: nano}\n", [], "this is already a recipe"),
    ("a.yaml", "extends: language\nlearning_rate: 1\n", [], "this is already a recipe"),
    ("a.yaml", "model: {size: nano}\ndata: {limit: 5}\n", [], "this is already a recipe"),
    ("a.yaml", "task: image\n", ["--from", "axolotl"], "this is already a recipe"),
    ("a.yaml", "compute_environment: LOCAL_MACHINE\n", [], "Accelerate"),
    ("a.yaml", "colour: blue\n", [], "set it with --from"),
    ("a.yaml", "colour: blue\n", ["--from", "trainer"], "; check --from"),
    (
        "a.yaml",
        "base_model: x\nadapter: lora\nmodel_name_or_path: y\nstage: sft\n",
        [],
        "choose the format with --from",
    ),
    ("a.yaml", "base_model: x\nadapter: lora\n", ["--from", "nemo"], "invalid choice"),
    ("a.yaml", "base_model: x\nadapter: lora\n", ["--out", "x.txt"], "must end in .yaml"),
    ("a.yaml", "base_model: x\nadapter: lora\n", ["--out", "no/where.yaml"], "no does not exist"),
    ("a.yaml", "base_model: x\nadapter: lora\n", ["--out", "a.yaml"], "exists and is not overwritten"),
]


@pytest.mark.parametrize(("name", "text", "options", "message"), BAD)
def test_bad_input_is_refused_in_one_line(
    name: str, text: str, options: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    assert cli.main(["import", name, *options]) == 2
    message_line = capsys.readouterr().err
    assert message in message_line
    assert message_line.count("\n") == 1
    assert Path(name).read_text(encoding="utf-8") == text
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_missing_file_is_refused(tmp_path: Path) -> None:
    for name in ("none.yaml", "none.json"):
        with pytest.raises(UsageError, match="does not exist"):
            import_file(tmp_path / name)


def test_documentation_shows_the_printed_output(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "verbs" / "import.md").read_text(encoding="utf-8")
    config = page.partition('write_text("""\\\n')[2].partition('"""')[0]
    Path("letters.yml").write_text(config, encoding="utf-8")
    assert cli.main(["import", "letters.yml"]) == 0
    assert f"```text\n{capsys.readouterr().out}```" in page


def test_import_command(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("axolotl.yml").write_text(AXOLOTL, encoding="utf-8")
    assert cli.main(["import", "axolotl.yml"]) == 0
    table = capsys.readouterr().out
    assert "axolotl.yml, a configuration of Axolotl, is now axolotl.bottega.yaml" in table
    assert "training.gradient_accumulation_steps" in table
    assert cli.main(["import", "axolotl.yml"]) == 2
    assert cli.main(["import", "axolotl.yml", "--out", "b.yaml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["from"] == "axolotl"
    rows = {row["our_key"]: row["our_value"] for row in report["mapped"]}
    assert rows["training.learning_rate"] == 2e-4
    assert {"their_key", "their_value", "why", "reason"} == set(report["unmapped"][0])
    assert check_recipe(["b.yaml"]).task_candidates == ("language",)
    assert cli.main(["plan", "b.yaml", "--json"]) == 2  # like train: reports the folder and the sharding at once
    message = capsys.readouterr().err
    assert "corpus does not exist" in message
    assert "distributed.strategy: fsdp" in message


def test_credentials_in_addresses_are_not_imported(tmp_path: Path) -> None:
    text = (
        "base_model: gpt2\ndatasets: [{path: 'https://user:canary@far.example/a.jsonl?sig=canary', type: completion}]\n"
    )
    (tmp_path / "theirs.yaml").write_text(text)
    result = import_file(tmp_path / "theirs.yaml", kind="axolotl")
    recipe = (tmp_path / "theirs.bottega.yaml").read_text()
    assert "https://far.example/a.jsonl" in recipe
    assert "credentials of addresses are left out" in recipe
    assert "canary" not in recipe + json.dumps(result)
