"""The recipe of a mixture of experts over rows of numbers, optionally with spiking units."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bottega.config.recipe import Model, Recipe
from bottega.config.section import Activation, Dropout, Number, Positive, Probability, Whole
from bottega.data.numbers.config import RoutingData, RoutingHeldOut, RoutingSource, VectorAugmentation

__all__ = ["RoutingData", "RoutingHeldOut", "RoutingModel", "RoutingRecipe", "RoutingSource", "VectorAugmentation"]


class RoutingModel(Model):
    """A trunk, a router and experts, with dense or spiking units."""

    trunk: Literal["perceptron", "state_space"] = Field(
        "perceptron", description="layers before the experts: a perceptron, or a state space over tokens of inputs"
    )
    hidden_size: Positive = Field(256, description="width of the trunk")
    num_layers: Whole = Field(2, ge=0, description="layers of the trunk; 0 is a linear map before the experts")
    activation: Activation | None = Field(
        None, description="inside the layers of a perceptron trunk: silu (or swish), gelu or relu; null is silu"
    )
    num_experts: Positive = Field(4, description="number of experts; 1 is the same network without routing")
    expert_size: Positive = Field(128, description="width inside an expert")
    top_k: Positive = Field(1, description="experts each sample is routed to")
    token_size: Positive = Field(10, description="state_space: inputs per token")
    state_size: Positive | None = Field(None, description="state_space: state size of each channel; null is 64")
    ssm_head_size: Positive | None = Field(
        None, description="state_space: channels of a head; null is 64, or all channels if there are fewer"
    )
    expand: Positive | None = Field(None, description="state_space: channels, in multiples of hidden_size; null is 2")
    conv_size: Positive | None = Field(None, description="state_space: kernel size of its convolution; null is 4")
    gate: Literal["softmax", "sigmoid"] = Field("softmax", description="function from router logits to expert weights")
    shared_experts: Whole = Field(
        0, ge=0, description="experts that process every sample, in addition to the routed ones"
    )
    capacity_factor: Number | None = Field(
        None, gt=0, description="training capacity of an expert, relative to an even split; null is unlimited"
    )
    expert_capacity: Positive | None = Field(
        None, description="capacity of an expert in samples, instead of capacity_factor"
    )
    balance: Literal["loss", "bias", "none"] = Field(
        "loss", description="load balancing of the experts: by a loss, by a bias on the router, or none"
    )
    load_balancing_weight: Number = Field(0.01, ge=0, description="weight of the load-balancing loss")
    z_weight: Number = Field(0.0, ge=0, description="weight of the router's z-loss")
    routing_loss_weight: Number = Field(
        0.0, ge=0, description="weight of the cross-entropy between the router and the known rule of a sample"
    )
    expert_dropout: Dropout = Field(0.0, description="fraction of experts dropped in a step")
    router: Literal["linear", "spiking"] = Field("linear", description="the router")
    spike_threshold: Number | None = Field(
        None, gt=0, description="membrane potential at which a unit of the trunk fires; null: no spiking units"
    )
    time_steps: Positive = Field(8, description="spiking: simulated time steps for each sample")
    leak: Probability = Field(0.9, description="spiking: factor by which the membrane potential decays each step")
    refractory: Whole = Field(0, ge=0, description="spiking: steps after a spike in which a unit cannot fire")
    adaptation: Number = Field(0.0, ge=0, description="spiking: increase of a unit's threshold after a spike")
    surrogate: Literal["arctan", "sigmoid", "fast_sigmoid"] = Field(
        "arctan", description="spiking: surrogate gradient of the spike"
    )
    firing_rate: Probability | None = Field(
        None, description="spiking: target fraction of time steps in which a unit fires; null: no target"
    )
    firing_weight: Number = Field(0.1, ge=0, description="spiking: weight of the squared distance from firing_rate")
    plasticity: bool = Field(False, description="spiking: update weights also by spike-timing-dependent plasticity")
    from_: str | None = Field(None, alias="from", description="weights to start from: an exported run or its folder")

    @model_validator(mode="after")
    def _check_options(self) -> RoutingModel:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k {self.top_k} is more than num_experts {self.num_experts}; lower top_k, or add experts"
            )
        if self.capacity_factor is not None and self.expert_capacity is not None:
            raise ValueError("capacity_factor and expert_capacity both set the capacity of an expert; keep one")
        if self.activation is not None and (self.spike_threshold is not None or self.trunk != "perceptron"):
            raise ValueError(
                f"activation {self.activation} applies to a perceptron trunk without spiking units only; remove it"
            )
        if self.plasticity and self.spike_threshold is None:
            raise ValueError("plasticity needs spiking units; set spike_threshold: 1.0, or plasticity: false")
        if self.firing_rate is not None and self.spike_threshold is None:
            raise ValueError(f"firing_rate {self.firing_rate} needs spiking units; set spike_threshold: 1.0")
        if self.spike_threshold is not None and self.num_layers == 0:
            raise ValueError("num_layers 0 leaves no spiking units for spike_threshold; raise num_layers")
        if self.trunk == "state_space" and self.num_layers == 0:
            raise ValueError("trunk: state_space needs at least one layer, but num_layers is 0; raise it")
        if self.spike_threshold is not None and self.trunk == "state_space":
            raise ValueError("trunk: state_space has no spiking units; remove spike_threshold, or use router: spiking")
        if self.routing_loss_weight and self.num_experts == 1:
            raise ValueError("routing_loss_weight needs several experts; set num_experts to the number of rules")
        return self


class RoutingRecipe(Recipe):
    """The recipe of a mixture of experts over rows of numbers."""

    task: Literal["routing"] = Field("routing", description="classify rows of numbers with a mixture of experts")
    model: RoutingModel = Field(default_factory=RoutingModel, description="the model")
    data: RoutingData = Field(default_factory=RoutingData, description="the data")

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        problem = describe_rules_problem(self.model, self.data.num_rules) if self.data.is_synthetic else None
        return [*super().find_conflicts(), *([("model.num_experts", "data.num_rules", problem)] if problem else ())]


def describe_rules_problem(model: RoutingModel, num_rules: int) -> str | None:
    """Return what is wrong if the routing loss is used and the number of experts differs from that of rules, else None."""
    if not model.routing_loss_weight or num_rules == model.num_experts:
        return None
    return (
        f"{model.num_experts} experts, but model.routing_loss_weight {model.routing_loss_weight:g} needs one for each of the "
        f"{num_rules} rules; set it to {num_rules}, or the weight to 0"
    )
