"""The part of a recipe that is the same for every task: closed, frozen, and described field by field."""

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
from bottega.config.units import Interval, StepCadence, StepOrTimeCadence


class Model(Section):
    """What every task's model has; the tasks add to it."""

    dropout: Dropout | None = Field(
        None, description="share of activations dropped while training; null is the model's own"
    )


class Dependency(Section):
    recipe: str | None = Field(None, description="the recipe that is trained first")
    run: str | None = Field(None, description="a finished run's folder, in place of recipe")
    settings: dict[str, Any] = Field(default_factory=dict, description="dotted keys that differ from that recipe")
    own_data: bool = Field(False, description="learn from its own data and not from this recipe's")

    @model_validator(mode="after")
    def _one_of_two(self) -> Dependency:
        if (self.recipe is None) == (self.run is None):
            raise ValueError("expected either recipe or run")
        return self


class Distributed(Section):
    enabled: bool | None = Field(None, description="null: when a launcher started several processes")
    strategy: Literal["auto", "ddp", "fsdp"] = Field("auto", description="whole copies (ddp) or shards (fsdp)")
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="how processes talk")
    processes: Whole | None = Field(None, gt=0, description="how many processes in all; null: as launched")
    machines: Whole = Field(1, gt=0, description="how many machines")
    machine_rank: Whole = Field(0, ge=0, description="which of them this is")
    main_address: str | None = Field(None, description="where the first machine is reached")
    main_port: Whole | None = Field(None, gt=0, lt=65536, description="and on which port")
    offload: bool = Field(False, description="keep optimizer state in host memory")


class Samples(Section):
    every: StepCadence = Field(Interval(500), description="how often samples are drawn; null or 0 is off")
    count: Whole = Field(4, gt=0, description="how many")


class Evaluation(MonitoredMetric):
    every: StepCadence = Field(Interval(200), description="how often validation runs; null or 0 is at the end only")
    metric: str = Field("loss", description="the metric that decides which checkpoint is best")
    max_batches: Whole | None = Field(None, gt=0, description="at most so many batches; null is all")
    batch_size: Whole | None = Field(None, gt=0, description="examples in a batch; null is as in training")


class CheckpointOptions(Section):
    every: StepOrTimeCadence = Field(
        Interval(500), description='how often; "10 min" is accepted; null or 0 is at the end only'
    )
    keep: Whole = Field(3, gt=0, description="how many of the newest stay; the best stays as well")


class WandB(Section):
    enabled: bool | None = Field(None, description="null: when a project is given")
    project: str | None = Field(None, description="project name")
    entity: str | None = Field(None, description="user or team")
    name: str | None = Field(None, description="name shown there; null is the run's name")
    tags: tuple[str, ...] = Field((), description="labels")
    notes: str | None = Field(None, description="a longer remark")
    offline: bool = Field(False, description="write to disk only, for a later sync")

    @property
    def is_active(self) -> bool:
        return self.project is not None if self.enabled is None else self.enabled


class Logging(Section):
    every: StepCadence = Field(
        Interval(10),
        description="how often metrics are written; null or 0 is with evaluations, checkpoints and the end",
    )
    tensorboard: bool = Field(True, description="write TensorBoard events")
    wandb: WandB = Field(default_factory=WandB, description="Weights & Biases")
    level: Level = Field("INFO", description="how much the console and log.txt say")
    resources: bool = Field(True, description="also log memory, processor and GPU use")


class Recipe(Section):
    """Everything a run needs to know. `model` and `data` are the task's own."""

    task: str = Field(description="what is learned")
    engine: Literal["torch"] = Field("torch", description="what computes")
    name: RunName | None = Field(
        None, description="of the run; null is the recipe and 6 digits of the keys that change results"
    )
    origin: str | None = Field(None, description="the recipe this came from, for the default name; filled in by itself")
    device: Device = Field("auto", description="where it is computed; gpu means cuda")
    cpu_threads: Whole | None = Field(None, gt=0, description="threads of one process on a CPU; null is torch's choice")
    deterministic: bool = Field(False, description="bit-equal repeats on a GPU, somewhat slower")
    seed: Whole = Field(0, ge=0, lt=2**63, description="of everything random")
    output_dir: str = Field("runs", description="the folder of runs")
    model: Model = Field(default_factory=Model, description="the model")
    data: Data = Field(default_factory=Data, description="the data")
    training: Training = Field(default_factory=Training, description="how it is learned")
    techniques: tuple[Technique, ...] = Field((), description="what is added to plain training, in this order")
    needs: dict[str, Dependency] = Field(default_factory=dict, description="other runs this one is built on, by name")
    distributed: Distributed = Field(default_factory=Distributed, description="several processes or machines")
    samples: Samples = Field(default_factory=Samples, description="what the model makes while it learns")
    evaluation: Evaluation = Field(default_factory=Evaluation, description="validation while training")
    checkpoint: CheckpointOptions = Field(default_factory=CheckpointOptions, description="what is kept on disk")
    logging: Logging = Field(default_factory=Logging, description="what is said, and where")

    def find_missing_keys(self) -> list[tuple[str, str]]:
        """What a run cannot start without: (key, what is wrong with it)."""
        return find_length_problems(self.training, is_stream=self.data.online is not None)

    def to_plain_dict(self) -> dict[str, Any]:
        """As plain values under the names a recipe file uses."""
        return self.model_dump(mode="json", by_alias=True)

    def results_key(self) -> dict[str, Any]:
        """Dotted key -> value of what changes results; keys left at null are absent, so new ones rename no run."""
        plain = self.to_plain_dict()
        # Said or not, it is the same run.
        plain["evaluation"]["mode"] = self.evaluation.resolved_mode
        if self.training.early_stopping is not None:
            plain["training"]["early_stopping"]["mode"] = self.training.early_stopping.resolved_mode
        return {key: value for key, value in _leaves(plain) if value is not None and not _is_neutral(key)}

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        """(key, other key, message) of what cannot both be, as far as that is known without data."""
        epochs = self.training.num_epochs
        if self.data.online is None or epochs is None or epochs <= 1:
            return list(find_technique_conflicts(self))
        said = f"{epochs}, and a stream (data.online) is gone through once; leave it out"
        return [("training.num_epochs", "data.online", said), *find_technique_conflicts(self)]

    def run_name(self) -> str:
        """The given name, or one that the same recipe and settings always have."""
        if self.name is not None:
            return self.name
        text = json.dumps(self.results_key(), sort_keys=True, separators=(",", ":"))
        origin = re.sub(r"[^\w.-]+", "-", self.origin or self.task).strip("-.") or self.task
        return f"{origin}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def find_length_problems(training: Training, *, is_stream: bool = False) -> list[tuple[str, str]]:
    if is_stream and training.max_steps is None and training.num_epochs is None:
        return []
    if training.max_steps is None and training.num_epochs is None:
        return [("training.max_steps", "missing; give max_steps or num_epochs")]
    if training.max_steps is not None and training.num_epochs is not None:
        return [("training.num_epochs", f"given together with max_steps {training.max_steps}; keep one of them")]
    return []


def find_path_problems(data: Data) -> list[tuple[str, str]]:
    """Training needs a source; a kind that comes with the program needs no path."""
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
    "data.latents",
    "data.workers",
    "data.prefetch",
    "data.pin_memory",
    "training.compile",
    "training.micro_batch_size",
    "training.gradient_checkpointing",
)
"""Keys that do not change what is learned, beyond rounding."""


def _is_neutral(key: str) -> bool:
    return any(key == neutral or key.startswith(neutral + ".") for neutral in RESULT_NEUTRAL_KEYS)


def _leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, inner in value.items():
        found += _leaves(inner, f"{prefix}{key}.") if isinstance(inner, dict) else [(prefix + key, _said(inner))]
    return found


def _said(value: Any) -> Any:
    """Rows of a table without what they leave at null."""
    if isinstance(value, list):
        return [_said(item) for item in value]
    return {k: _said(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def diff_recipes(old: Recipe, new: Recipe) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of every key that changes results and differs between two recipes."""
    before, after = old.results_key(), new.results_key()
    return [change for key in {**before, **after} for change in _changes(key, before.get(key), after.get(key))]


def _changes(key: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Inside lists of as many blocks the keys that differ, and not two whole lists to search for the difference."""
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        if before.get("name") != after.get("name"):
            # Another technique: that its options differ as well goes without saying.
            return [(f"{key}.name", before.get("name"), after.get("name"))]
        return [one for k in {**before, **after} for one in _changes(f"{key}.{k}", before.get(k), after.get(k))]
    both = [*before, *after] if isinstance(before, list) and isinstance(after, list) else []
    if both and len(before) == len(after) and all(isinstance(item, dict) for item in both):
        pairs = enumerate(zip(before, after, strict=True))
        return [one for number, (was, now) in pairs for one in _changes(f"{key}.{number}", was, now)]
    return [(key, before, after)]
