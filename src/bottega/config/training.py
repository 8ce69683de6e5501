"""How a recipe learns: length, batches, the update rule, the learning rate over the run, and which parameters learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from bottega.config.metrics import MonitoredMetric
from bottega.config.optimizers import OPTIMIZER_SPECS
from bottega.config.section import (
    AutoSwitch,
    Dropout,
    Number,
    Pattern,
    Positive,
    Precision,
    Rate,
    Scale,
    Section,
    Whole,
)
from bottega.config.units import Duration, Interval

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZER_SPECS)]


class Optimizer(Section):
    name: OptimizerName = Field("adamw", description="the update rule")
    betas: tuple[Dropout, Dropout] = Field((0.9, 0.999), description="decay of the two running means; lion: 0.9, 0.99")
    eps: Number = Field(1e-8, gt=0, description="keeps Adam's division finite")
    momentum: Number = Field(0.9, ge=0, lt=1, description="of sgd and muon; muon: 0.95")
    nesterov: bool = Field(False, description="look ahead along the momentum, for sgd and muon; muon: true")

    @model_validator(mode="before")
    @classmethod
    def _customary(cls, values: Any) -> Any:
        """The customary values of the rules that differ from Adam's."""
        if isinstance(values, dict):
            name = values.get("name")
            rule = OPTIMIZER_SPECS.get(name) if isinstance(name, str) else None
            return {**(rule.option_defaults if rule is not None else {}), **values}
        return values


SchedulerName = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "exponential",
    "inverse_sqrt",
    "wsd",
    "one_cycle",
    "plateau",
]


class Scheduler(Section):
    name: SchedulerName = Field("cosine", description="shape of the learning rate over the run")
    warmup_steps: Duration = Field(Interval(0), description='linear rise from 0 to the peak: steps, "1 epoch" or "5%"')
    min_ratio: Number | None = Field(None, ge=0, le=1, description="final rate as a share of the peak; null is 0")
    eta_min: Number | None = Field(None, ge=0, description="final rate itself, in place of min_ratio")
    cycles: Whole | None = Field(None, gt=0, description="cosine_with_restarts: periods in the run; null is 1")
    t_max: Whole | None = Field(None, gt=0, description="cosine_with_restarts: steps of one period, in place of cycles")
    power: Number = Field(1.0, gt=0, description="polynomial: exponent of the decay")
    gamma: Number = Field(0.1, gt=0, le=1, description="exponential: the rate at the end, as a share of the peak")
    decay_fraction: Number = Field(0.2, gt=0, le=1, description="wsd: last part of the run, in which the rate decays")
    factor: Number = Field(0.5, gt=0, lt=1, description="plateau: the rate is multiplied by this")
    patience: Whole = Field(3, ge=0, description="plateau: evaluations without a better value before that")

    @model_validator(mode="after")
    def _one_of_two(self) -> Scheduler:
        if self.min_ratio is not None and self.eta_min is not None:
            raise ValueError("min_ratio and eta_min both set the final rate; keep one")
        if self.cycles is not None and self.t_max is not None:
            raise ValueError("cycles and t_max both set the length of a period; keep one")
        return self


class ParameterGroup(Section):
    pattern: Pattern = Field(
        description="regular expression over whole parameter names; the first row that matches decides"
    )
    scale: Scale = Field(1.0, description="multiplies the learning rate; none freezes")
    weight_decay: Number | None = Field(None, ge=0, description="in place of training.weight_decay")
    starts: Duration | None = Field(None, description='frozen until then: steps, "1 epoch" or "20%"; null is at once')


class Unfreeze(Section):
    """Gradual unfreezing: the last layer learns first, then one more at a time, down to the embeddings."""

    layers_per: Duration = Field(
        Interval(1, "epochs"), description='one more layer after so long: steps, "1 epoch", "5%"'
    )


class EarlyStopping(MonitoredMetric):
    patience: Whole = Field(3, ge=1, description="evaluations without a better value before the run ends")
    threshold: Number = Field(0.0, ge=0, description="how much better counts as better")


class Training(Section):
    max_steps: Whole | None = Field(None, gt=0, description="length of the run in optimizer steps; or num_epochs")
    num_epochs: Whole | None = Field(None, gt=0, description="length of the run in passes over the data; or max_steps")
    batch_size: Whole = Field(
        32, gt=0, description="examples in a step over all processes; per process if gradient_accumulation_steps is set"
    )
    micro_batch_size: Positive | Literal["auto"] | None = Field(
        None, description="examples in one forward pass; auto finds what fits and keeps the batch"
    )
    gradient_accumulation_steps: Whole | None = Field(
        None, gt=0, description="forward passes of batch_size in a step; makes batch_size per process"
    )
    learning_rate: Rate | Literal["auto"] = Field(
        3e-4, description="the peak of the schedule; auto takes what a range test before the first step finds"
    )
    weight_decay: Number = Field(0.1, ge=0, description="of matrices; norms and biases are not decayed")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="the update rule and its constants")
    scheduler: Scheduler = Field(default_factory=Scheduler, description="the learning rate over the run")
    mixed_precision: Precision = Field(
        "auto", description="auto is bf16 where the device has it and fp32 elsewhere; true means auto, no means fp32"
    )
    max_grad_norm: Number | None = Field(1.0, gt=0, description="gradients are scaled down to this norm; null is off")
    groups: tuple[ParameterGroup, ...] = Field(
        (ParameterGroup(pattern=".*"),), min_length=1, description="which parameters learn, and how fast"
    )
    freeze: tuple[str, ...] | None = Field(
        None, description="parts that never learn, such as backbone, or patterns over whole parameter names"
    )
    unfreeze: Unfreeze | None = Field(None, description="begin with the last layer, and let one more learn at a time")
    layer_decay: Number | None = Field(
        None, gt=0, le=1, description="multiplies the learning rate once for each layer below the last; null is 1"
    )
    on_nonfinite: Literal["halt", "skip", "rollback"] = Field(
        "halt", description="what to do when a loss or gradient is not finite"
    )
    ema: Number | None = Field(
        None, gt=0, lt=1, description="decay of averaged weights, such as 0.999, less in the first steps; null is off"
    )
    compile: AutoSwitch = Field("auto", description="compile the training forward; auto does on a GPU")
    gradient_checkpointing: bool = Field(False, description="recompute activations in place of keeping them")
    early_stopping: EarlyStopping | None = Field(None, description="end the run when validation stops improving")
    label_smoothing: Number = Field(0.0, ge=0, lt=1, description="share of the target given to all classes")

    @model_validator(mode="before")
    @classmethod
    def _customary_decay(cls, values: Any) -> Any:
        if isinstance(values, dict) and "weight_decay" not in values:
            optimizer = values.get("optimizer")
            name = optimizer.get("name") if isinstance(optimizer, dict) else getattr(optimizer, "name", None)
            if name in OPTIMIZER_SPECS and OPTIMIZER_SPECS[name].has_coupled_weight_decay:
                return {**values, "weight_decay": 0.0}
        return values
