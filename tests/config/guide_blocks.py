"""Configuration blocks of five published training guides, and the tasks each block must fit."""

from __future__ import annotations

ALL = "all"

CLASSIFIER_TRANSFORMER = """
model:
  name: "transformer_model"
  architecture: "transformer"
  pretrained_model: "bert-base-uncased"
  num_labels: 2
  hidden_size: 768
  num_layers: 12
  num_attention_heads: 12
  hidden_dropout_prob: 0.1
  attention_probs_dropout_prob: 0.1
"""
CLASSIFIER_CNN = """
model:
  name: "cnn_model"
  architecture: "cnn"
  vocab_size: 30522
  embed_size: 128
  num_filters: 100
  filter_sizes: [3, 4, 5]
  num_labels: 2
  dropout_prob: 0.5
"""
CLASSIFIER_BASIC = """
training:
  learning_rate: 2e-5
  batch_size: 16
  num_epochs: 10
  warmup_steps: 500
  weight_decay: 0.01
  gradient_accumulation_steps: 1
  max_grad_norm: 1.0
  fp16: true
  logging_steps: 100
  eval_steps: 500
"""
CLASSIFIER_ADVANCED = """
training:
  optimizer: "adamw"
  adam_epsilon: 1e-8
  adam_beta1: 0.9
  adam_beta2: 0.999
  scheduler_type: "linear"
  early_stopping_patience: 3
  early_stopping_threshold: 0.01
  save_steps: 1000
  save_total_limit: 3
"""
ACCELERATE_SINGLE = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
ACCELERATE_MULTI = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: fp16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
WANDB = """
wandb:
  project: "your-project-name"
  entity: "your-wandb-entity"
  name: null
  tags: ["experiment", "baseline"]
  notes: "Baseline model training"
"""
TEXT_AUGMENTATION = """
data:
  augmentation:
    enabled: true
    techniques:
      - "synonym_replacement"
      - "random_insertion"
      - "random_swap"
      - "random_deletion"
    probability: 0.1
"""
PERSONALIZE = """
dataset:
  name: FLICKR
  train_json: ./datasets/FLICKR/processed_dataset/train.json
  val_json: ./datasets/FLICKR/processed_dataset/val.json
model:
  stable_diffusion: runwayml/stable-diffusion-v1-5
  llama: meta-llama/Llama-2-7b-chat-hf
  clip: ./checkpoints/clip-vit-base-patch32
training:
  num_train_epochs: 3
  train_batch_size: 6
  gradient_accumulation_steps: 4
  learning_rate: 5.0e-6
  mixed_precision: bf16
pmg:
  num_image_prompt: 2
  num_prefix_prompt: 2
  max_sequence_length: 600
  image_size: 512
"""
ROUTING_QUICK = """
training:
  max_epochs: 10
  batch_size: 32
  learning_rate: 0.001
  weight_decay: 0.01
  validation_split: 0.2
  validation_frequency: 1
  optimizer: "adamw"
  scheduler: "cosine"
  gradient_clipping: 1.0
  mixed_precision: true
  gradient_checkpointing: false
  routing_loss_weight: 0.5
  expert_capacity: 100
model:
  hidden_dim: 512
  num_layers: 6
  num_experts: 4
  expert_dim: 256
  spike_threshold: 1.0
  time_steps: 8
  plasticity_enabled: true
logging:
  level: "INFO"
  wandb_enabled: false
  save_frequency: 5
"""
ROUTING_ADVANCED = """
training:
  optimizer:
    type: "adamw"
    betas: [0.9, 0.999]
    eps: 1e-8
  scheduler:
    type: "cosine_with_restarts"
    t_max: 10000
    eta_min: 1e-6
  dropout: 0.1
  label_smoothing: 0.1
  weight_decay: 0.01
  augmentation:
    enabled: true
    noise_level: 0.01
    mask_probability: 0.15
  distributed:
    enabled: false
    backend: "nccl"
    world_size: 4
  memory:
    offload_to_cpu: true
    gradient_accumulation_steps: 4
  routing:
    load_balancing_weight: 0.01
    expert_dropout: 0.1
    capacity_factor: 1.25
"""

BLOCKS: dict[str, tuple[str, str]] = {
    "classifier_transformer": (CLASSIFIER_TRANSFORMER, "classify"),
    "classifier_cnn": (CLASSIFIER_CNN, "classify"),
    "classifier_basic": (CLASSIFIER_BASIC, ALL),
    "classifier_advanced": (CLASSIFIER_ADVANCED, ALL),
    "accelerate_single": (ACCELERATE_SINGLE, ALL),
    "accelerate_multi": (ACCELERATE_MULTI, ALL),
    "wandb": (WANDB, ALL),
    "dropout": ("model:\n  hidden_dropout_prob: 0.1\n  attention_probs_dropout_prob: 0.1\n", "classify"),
    "weight_decay": ("training:\n  weight_decay: 0.01\n", ALL),
    "clipping": ("training:\n  max_grad_norm: 1.0\n", ALL),
    "early_stopping": ("training:\n  early_stopping_patience: 3\n  early_stopping_threshold: 0.01\n", ALL),
    "text_augmentation": (TEXT_AUGMENTATION, "classify"),
    "memory": ("training:\n  gradient_accumulation_steps: 4\n  fp16: true\n  dataloader_num_workers: 4\n", ALL),
    "personalize": (PERSONALIZE, "personalize"),
    "output_dir": ("training:\n  output_dir: ./my_custom_output\n", ALL),
    "learning_rate": ("training:\n  learning_rate: 5.0e-6\n", ALL),
    "accumulation": ("training:\n  train_batch_size: 6\n  gradient_accumulation_steps: 4\n", ALL),
    "duration": ("training:\n  num_train_epochs: 3\n  save_steps: 1000\n  validation_steps: 100\n", ALL),
    "accelerate_short": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: bf16\n",
        ALL,
    ),
    "precision": ("training:\n  mixed_precision: bf16\n", ALL),
    "routing_quick": (ROUTING_QUICK, "routing"),
    "routing_advanced": (ROUTING_ADVANCED, "routing"),
}

MEDIA_SETTINGS = {
    "batch_size": 32,
    "learning_rate": 1e-4,
    "warmup_steps": 1000,
    "max_steps": 100000,
    "eval_frequency": 1000,
    "checkpoint_frequency": 5000,
    "gradient_clip_norm": 1.0,
}
"""One guide prints its settings as a flat dictionary."""

MEMORY_SETTINGS = {
    "mixed_precision": True,
    "gradient_checkpointing": True,
    "cpu_offloading": True,
    "activation_checkpointing": True,
    "data_loader_num_workers": 4,
    "pin_memory": True,
}

LANGUAGE_FLAGS = (
    "--model verse --data /path/to/dataset --dataset_type jsonl --lr 3e-5 --batch_size 16 "
    "--gradient_accumulation_steps 2 --max_tokens 2048"
)
