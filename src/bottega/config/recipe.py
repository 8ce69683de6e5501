"""The recipe schema that all tasks share: closed, frozen sections with a description for each field."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Literal

from pydantic import Field, model_validator

from bottega.config.conflicts import find_technique_conflicts
from bottega.config.data import Data
from bottega.config.layers import BUILTIN_KINDS
from bottega.config.metrics import MonitoredMetric
from bottega.config.section import Device, Dropout, Level, RunName, Section, Whole
from bottega.config.techniques import Technique
from bottega.config.training import Training
from bottega.config.tune import Tune
from bottega.config.units import Interval, StepCadence, StepOrTimeCadence, StepRange
from bottega.redaction import REPLACEMENT, redact_values


class Model(Section):
    """Model settings that every task has; each task adds its own."""

    dropout: Dropout | None = Field(None, description="dropout probability while training; null uses the model's own")


class Dependency(Section):
    """A run that this recipe depends on: one to train first, or a finished one."""

    recipe: str | None = Field(None, description="recipe to train first")
    run: str | None = Field(None, description="folder of a finished run, instead of recipe")
    settings: dict[str, Any] = Field(default_factory=dict, description="changes to that recipe, as dotted keys")
    own_data: bool = Field(False, description="train it on its own data instead of this recipe's")

    @model_validator(mode="after")
    def _check_recipe_or_run(self) -> Dependency:
        if (self.recipe is None) == (self.run is None):
            raise ValueError("expected either recipe or run")
        return self


class Distributed(Section):
    """Training with several processes or machines."""

    enabled: bool | None = Field(
        None, description="use several processes; null turns it on when a launcher such as torchrun started several"
    )
    strategy: Literal["auto", "ddp", "fsdp"] = Field(
        "auto", description="full copies of the model (ddp) or shards (fsdp)"
    )
    replicate: Whole | None = Field(
        None, gt=0, description="devices with copies of the model, which train on different samples"
    )
    shard: Whole | None = Field(
        None,
        gt=0,
        description="devices that each hold a part of the model and the optimizer state, and train on different samples",
    )
    tensor: Whole | None = Field(
        None, gt=0, description="devices that share the matrix products of each layer, on the same samples"
    )
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="communication backend")
    processes: Whole | None = Field(None, gt=0, description="total number of processes; null takes the launcher's")
    machines: Whole = Field(1, gt=0, description="number of machines")
    machine_rank: Whole = Field(0, ge=0, description="index of this machine")
    main_address: str | None = Field(None, description="address of the first machine")
    main_port: Whole | None = Field(None, gt=0, lt=65536, description="port on the first machine")
    offload: bool = Field(False, description="keep the optimizer state in host memory")

    @property
    def mesh(self) -> dict[str, int]:
        """Number of devices along each axis of the mesh; `processes` and `strategy` are a shorthand for one axis."""
        if self.processes is not None and (self.replicate, self.shard, self.tensor) == (None, None, None):
            axis = "shard" if self.strategy == "fsdp" else "replicate"
            return {"replicate": 1, "shard": 1, "tensor": 1, axis: self.processes}
        return {"replicate": self.replicate or 1, "shard": self.shard or 1, "tensor": self.tensor or 1}

    @property
    def num_data_devices(self) -> int:
        """Number of devices that train on different samples."""
        return self.mesh["replicate"] * self.mesh["shard"]


class Samples(Section):
    """Samples drawn during training."""

    every: StepCadence = Field(Interval(500), description="how often to draw samples; 0 or null turns it off")
    count: Whole = Field(4, gt=0, description="number of samples")


class Evaluation(MonitoredMetric):
    """Validation during training."""

    every: StepCadence = Field(
        Interval(200), description="how often to run validation; 0 or null runs it at the end only"
    )
    metric: str = Field("loss", description="metric that decides which checkpoint is best")
    max_batches: Whole | None = Field(None, gt=0, description="maximum number of batches; null uses all")
    batch_size: Whole | None = Field(None, gt=0, description="examples in a batch; null takes training.batch_size")


class CheckpointOptions(Section):
    """When checkpoints are saved, and how many are kept."""

    every: StepOrTimeCadence = Field(
        Interval(500),
        description='how often to save a checkpoint, also by time ("10 min"); 0 or null saves at the end only',
    )
    keep: Whole = Field(3, gt=0, description="how many of the newest to keep, besides the best")


class WandB(Section):
    """Logging to Weights & Biases."""

    enabled: bool | None = Field(None, description="log to Weights & Biases; null turns it on if project is set")
    project: str | None = Field(None, description="project name")
    entity: str | None = Field(None, description="user or team")
    name: str | None = Field(None, description="display name; null takes the run's name")
    tags: tuple[str, ...] = Field((), description="tags")
    notes: str | None = Field(None, description="notes")
    offline: bool = Field(False, description="write to disk only, for a later `wandb sync`")

    @property
    def is_active(self) -> bool:
        """Whether the run is logged to Weights & Biases: `enabled`, or by default if a project is set."""
        return self.project is not None if self.enabled is None else self.enabled


class Logging(Section):
    """Where and how often metrics are logged."""

    every: StepCadence = Field(
        Interval(10),
        description="how often to log metrics; 0 or null logs at evaluations, checkpoints and the end only",
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    wandb: WandB = Field(default_factory=WandB, description="Weights & Biases")
    level: Level = Field("INFO", description="log level of the console and log.txt")
    resources: bool = Field(
        True, description="also log CPU, memory, disk, network and GPU use, and the share of the device's matmul rate"
    )
    modules: bool = Field(
        True,
        description="also log gradient norm, update-to-weight ratio and dead units of each module, to modules.jsonl",
    )
    histograms: StepCadence = Field(
        None, description="how often to log histograms of weights and gradients; 0 or null turns it off"
    )
    report: bool = Field(True, description="write report.html at the end of training")


class Profile(Section):
    """Profile of some training steps."""

    steps: StepRange | None = Field(
        None, description='first and last step to profile, counted from 1, such as [10, 20] or "10-20"; null is off'
    )


class Recipe(Section):
    """A complete recipe. Each task has a subclass with its own `model` and `data`."""

    task: str = Field(description="the task")
    engine: Literal["torch", "jax"] = Field("torch", description="training framework")
    name: RunName | None = Field(
        None,
        description="name of the run; null is the recipe's name and a 6-digit hash of the keys that change results",
    )
    origin: str | None = Field(
        None, description="recipe that this one was loaded from, for the default name; set automatically"
    )
    device: Device = Field("auto", description="device to train on; gpu means cuda")
    cpu_threads: Whole | None = Field(None, gt=0, description="CPU threads of each process; null takes torch's default")
    deterministic: bool = Field(False, description="bit-for-bit reproducible on a GPU, somewhat slower")
    seed: Whole = Field(0, ge=0, lt=2**63, description="seed of all random numbers")
    output_dir: str = Field("runs", description="folder that runs are saved in")
    model: Model = Field(default_factory=Model, description="the model")
    data: Data = Field(default_factory=Data, description="the data")
    training: Training = Field(default_factory=Training, description="training length, batches, optimizer, schedule")
    techniques: tuple[Technique, ...] = Field(
        (), description="techniques such as LoRA or distillation, applied in this order"
    )
    needs: dict[str, Dependency] = Field(default_factory=dict, description="runs that this one depends on, by name")
    distributed: Distributed = Field(default_factory=Distributed, description="several processes or machines")
    samples: Samples = Field(default_factory=Samples, description="samples drawn during training")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="validation during training")
    checkpoint: CheckpointOptions = Field(
        default_factory=CheckpointOptions, description="when checkpoints are saved and how many are kept"
    )
    logging: Logging = Field(default_factory=Logging, description="where and how often metrics are logged")
    profile: Profile = Field(
        default_factory=Profile, description="a trace of some steps, and the operations that take most time"
    )
    tune: Tune | None = Field(None, description="search for better values of some keys; see `bottega tune`")

    def find_missing_keys(self) -> list[tuple[str, str]]:
        """Return (key, message) of every required setting that is missing or not usable."""
        return find_length_problems(self.training, is_stream=self.data.online is not None)

    def to_plain_dict(self) -> dict[str, Any]:
        """Return the recipe as plain values, with the key names of a recipe file; redact them before they are written."""
        return self.model_dump(mode="json", by_alias=True)

    def results_key(self) -> dict[str, Any]:
        """Return dotted key -> value of every key that changes results, which the default name of a run is hashed from.

        Keys that are null are absent, so that a new key does not rename existing runs; so are secrets, which are not stored.
        The environment does not change them.
        """
        values = self.to_plain_dict()
        # The run is the same whether the mode is set or inferred from the metric.
        values["evaluation"]["mode"] = self.evaluation.resolved_mode
        values["engine"] = "torch"  # engines differ by rounding; left out, it would rename runs of earlier versions
        if self.training.early_stopping is not None:
            values["training"]["early_stopping"]["mode"] = self.training.early_stopping.resolved_mode
        absent = (None, REPLACEMENT)
        return {
            key: value for key, value in _list_leaves(values) if value not in absent and not _is_result_neutral(key)
        }

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        """Return (key, other key, message) of settings that exclude each other, as far as known without data."""
        epochs = self.training.num_epochs
        if self.data.online is None or epochs is None or epochs <= 1:
            return list(find_technique_conflicts(self))
        message = f"a stream (data.online) is one pass over the data, got {epochs}; remove it"
        return [("training.num_epochs", "data.online", message), *find_technique_conflicts(self)]

    def run_name(self) -> str:
        """Return `name`, or the default name: the recipe's name and a hash of `results_key`."""
        if self.name is not None:
            return self.name
        text = json.dumps(self.results_key(), sort_keys=True, separators=(",", ":"))
        origin = re.sub(r"[^\w.-]+", "-", self.origin or self.task).strip("-.") or self.task
        return f"{origin}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def find_length_problems(training: Training, *, is_stream: bool = False) -> list[tuple[str, str]]:
    """Return the problem if not exactly one of max_steps and num_epochs is set; a stream needs neither."""
    if is_stream and training.max_steps is None and training.num_epochs is None:
        return []
    if training.max_steps is None and training.num_epochs is None:
        return [("training.max_steps", "missing; set max_steps or num_epochs")]
    if training.max_steps is not None and training.num_epochs is not None:
        return [("training.num_epochs", f"cannot be combined with max_steps {training.max_steps}; keep one")]
    return []


def find_path_problems(data: Data) -> list[tuple[str, str]]:
    """Return the problem if there is no training data; a builtin kind needs no path."""
    if data.sources is None and data.train.path is None and data.train.kind not in BUILTIN_KINDS:
        return [("data.train.path", "missing; give a file or folder with --data PATH")]
    return []


RESULT_NEUTRAL_KEYS = (
    "name",
    "origin",
    "needs.judge",
    "output_dir",
    "device",
    "cpu_threads",
    "deterministic",
    "distributed",
    "samples",
    "checkpoint",
    "logging",
    "profile",
    "tune",
    "data.latents",
    "data.workers",
    "data.prefetch",
    "data.pin_memory",
    "training.compile",
    "training.micro_batch_size",
    "training.gradient_checkpointing",
)
"""Keys that change results by rounding at most."""


def _is_result_neutral(key: str) -> bool:
    return any(key == neutral or key.startswith(neutral + ".") for neutral in RESULT_NEUTRAL_KEYS)


def _list_leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, inner in value.items():
        leaves += (
            _list_leaves(inner, f"{prefix}{key}.") if isinstance(inner, dict) else [(prefix + key, _drop_nulls(inner))]
        )
    return leaves


def _drop_nulls(value: Any) -> Any:
    """Remove keys that are null from the blocks of a list."""
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return {k: _drop_nulls(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def diff_recipes(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """Return (key, old value, new value) of every key that changes results and differs between two recipes."""
    before, after = old.results_key(), new.results_key()
    return [change for key in {**before, **after} for change in _list_changes(key, before.get(key), after.get(key))]


def _list_changes(key: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Compare blocks and lists of equal length key by key, so that a message names the key that differs."""
    # A saved recipe has *** in place of a secret, and a new secret in that place is not a change.
    if before == after or redact_values(before) == redact_values(after):
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        if before.get("name") != after.get("name"):
            # The options of two different techniques cannot be compared.
            return [(f"{key}.name", before.get("name"), after.get("name"))]
        return [
            change for k in {**before, **after} for change in _list_changes(f"{key}.{k}", before.get(k), after.get(k))
        ]
    items = [*before, *after] if isinstance(before, list) and isinstance(after, list) else []
    if items and len(before) == len(after) and all(isinstance(item, dict) for item in items):
        pairs = enumerate(zip(before, after, strict=True))
        return [change for index, (old, new) in pairs for change in _list_changes(f"{key}.{index}", old, new)]
    return [(key, before, after)]
