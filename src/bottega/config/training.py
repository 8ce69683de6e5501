"""The `training` section: length, batches, optimizer, learning rate schedule, and which parameters are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from bottega.config.metrics import MonitoredMetric
from bottega.config.optimizers import OPTIMIZER_SPECS
from bottega.config.section import (
    AutoSwitch,
    DecayRate,
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
    """The optimizer and its constants."""

    name: OptimizerName = Field("adamw", description="optimizer")
    betas: tuple[DecayRate, DecayRate] = Field(
        (0.9, 0.999), description="decay rates of the two moving averages; default of lion: 0.9, 0.99"
    )
    eps: Number = Field(1e-8, gt=0, description="epsilon in Adam's denominator")
    momentum: Number = Field(0.9, ge=0, lt=1, description="momentum of sgd and muon; default of muon: 0.95")
    nesterov: bool = Field(False, description="Nesterov momentum, for sgd and muon; default of muon: true")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """Fill in the optimizer's own defaults, which may differ from Adam's."""
        if isinstance(values, dict):
            name = values.get("name")
            spec = OPTIMIZER_SPECS.get(name) if isinstance(name, str) else None
            return {**(spec.option_defaults if spec is not None else {}), **values}
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
    """The learning rate schedule."""

    name: SchedulerName = Field("cosine", description="learning rate schedule")
    warmup_steps: Duration = Field(
        Interval(0), description='length of the linear warm-up from 0: steps, "1 epoch" or "5%"'
    )
    min_ratio: Number | None = Field(
        None, ge=0, le=1, description="final learning rate as a fraction of the peak; null is 0"
    )
    eta_min: Number | None = Field(None, ge=0, description="final learning rate, instead of min_ratio")
    cycles: Whole | None = Field(
        None, gt=0, description="cosine_with_restarts: number of periods in the run; null is 1"
    )
    t_max: Whole | None = Field(None, gt=0, description="cosine_with_restarts: steps in a period, instead of cycles")
    power: Number = Field(1.0, gt=0, description="polynomial: exponent of the decay")
    gamma: Number = Field(0.1, gt=0, le=1, description="exponential: final learning rate as a fraction of the peak")
    decay_fraction: Number = Field(
        0.2, gt=0, le=1, description="wsd: final fraction of the run in which the learning rate decays"
    )
    factor: Number = Field(0.5, gt=0, lt=1, description="plateau: factor by which the learning rate is reduced")
    patience: Whole = Field(3, ge=0, description="plateau: evaluations without improvement before a reduction")

    @model_validator(mode="after")
    def _check_exclusive_options(self) -> Scheduler:
        if self.min_ratio is not None and self.eta_min is not None:
            raise ValueError("min_ratio and eta_min both set the final learning rate; keep one")
        if self.cycles is not None and self.t_max is not None:
            raise ValueError("cycles and t_max both set the length of a period; keep one")
        return self


class ParameterGroup(Section):
    """Learning rate and weight decay of the parameters whose names match a pattern."""

    pattern: Pattern = Field(
        description="regular expression over full parameter names; the first matching group applies"
    )
    scale: Scale = Field(1.0, description="factor on the learning rate; none freezes the parameters")
    weight_decay: Number | None = Field(
        None, ge=0, description="weight decay of this group; null takes training.weight_decay"
    )
    starts: Duration | None = Field(
        None, description='keep frozen until then: steps, "1 epoch" or "20%"; null trains from the start'
    )


class Unfreeze(Section):
    """Gradual unfreezing: train the last layer first, then one more at a time, down to the embeddings."""

    layers_per: Duration = Field(
        Interval(1, "epochs"), description='unfreeze one more layer every: steps, "1 epoch" or "5%"'
    )


class EarlyStopping(MonitoredMetric):
    """End the run when a validation metric stops improving."""

    patience: Whole = Field(3, ge=1, description="evaluations without improvement before the run ends")
    threshold: Number = Field(0.0, ge=0, description="minimum change that counts as improvement")


class Training(Section):
    """Length, batches, optimizer and schedule of a run, and which parameters are trained."""

    max_steps: Whole | None = Field(None, gt=0, description="length of the run in optimizer steps; or num_epochs")
    num_epochs: Whole | None = Field(None, gt=0, description="length of the run in passes over the data; or max_steps")
    batch_size: Whole = Field(
        32,
        gt=0,
        description="examples in an optimizer step over all processes; per process and forward pass if gradient_accumulation_steps is set",
    )
    micro_batch_size: Positive | Literal["auto"] | None = Field(
        None,
        description="examples in one forward pass; auto finds the largest that fits in memory; results stay the same",
    )
    gradient_accumulation_steps: Whole | None = Field(
        None, gt=0, description="forward passes in an optimizer step; batch_size is then per process and forward pass"
    )
    learning_rate: Rate | Literal["auto"] = Field(
        3e-4, description="peak learning rate; auto runs a learning rate range test before the first step"
    )
    weight_decay: Number = Field(0.1, ge=0, description="weight decay of matrices; not applied to norms and biases")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="optimizer and its constants")
    scheduler: Scheduler = Field(default_factory=Scheduler, description="learning rate schedule")
    mixed_precision: Precision = Field(
        "auto", description="auto is bf16 where the device supports it, else fp32; true means auto, no means fp32"
    )
    max_grad_norm: Number | None = Field(1.0, gt=0, description="clip gradients to this norm; null turns clipping off")
    groups: tuple[ParameterGroup, ...] = Field(
        (ParameterGroup(pattern=".*"),),
        min_length=1,
        description="learning rate factor and weight decay by parameter name",
    )
    freeze: tuple[str, ...] | None = Field(
        None, description="modules to freeze, such as backbone, or patterns over full parameter names"
    )
    unfreeze: Unfreeze | None = Field(None, description="gradual unfreezing, from the last layer down")
    layer_decay: Number | None = Field(
        None, gt=0, le=1, description="factor on the learning rate for each layer below the last; null is 1"
    )
    on_nonfinite: Literal["halt", "skip", "rollback"] = Field(
        "halt", description="what to do when a loss or gradient is not finite"
    )
    ema: Number | None = Field(
        None,
        gt=0,
        lt=1,
        description="decay of the exponential moving average of the weights, such as 0.999, lower in the first steps; null turns it off",
    )
    compile: AutoSwitch = Field(
        "auto",
        description="compile the training forward pass with torch.compile; auto does on a GPU if that saves more time in the steps "
        "that are left than it takes",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    early_stopping: EarlyStopping | None = Field(
        None, description="end the run when a validation metric stops improving"
    )
    label_smoothing: Number = Field(0.0, ge=0, lt=1, description="label smoothing: probability spread over all classes")

    @model_validator(mode="before")
    @classmethod
    def _default_weight_decay(cls, values: Any) -> Any:
        """Default to no weight decay for optimizers that add it to the gradient, because 0.1 would dominate the gradient."""
        if isinstance(values, dict) and "weight_decay" not in values:
            optimizer = values.get("optimizer")
            name = optimizer.get("name") if isinstance(optimizer, dict) else getattr(optimizer, "name", None)
            if name in OPTIMIZER_SPECS and OPTIMIZER_SPECS[name].has_coupled_weight_decay:
                return {**values, "weight_decay": 0.0}
        return values
