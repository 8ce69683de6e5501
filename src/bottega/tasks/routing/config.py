"""The recipe of a model that routes between experts, spikes and remembers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bottega.config.recipe import Model, Recipe
from bottega.config.section import Activation, Dropout, Number, Positive, Probability, Whole
from bottega.data.numbers.config import RoutingData, RoutingHeldOut, RoutingSource, VectorAugmentation

__all__ = ["RoutingData", "RoutingHeldOut", "RoutingModel", "RoutingRecipe", "RoutingSource", "VectorAugmentation"]


class RoutingModel(Model):
    trunk: Literal["perceptron", "state_space"] = Field(
        "perceptron", description="what reads a sample first: all of it at once, or as a sequence of tokens"
    )
    hidden_size: Positive = Field(256, description="width of the trunk")
    num_layers: Whole = Field(2, ge=0, description="layers of the trunk; 0 leaves all but a linear map to the experts")
    activation: Activation | None = Field(
        None, description="inside the layers of a perceptron trunk: silu (or swish), gelu or relu; null is silu"
    )
    num_experts: Positive = Field(4, description="how many experts; 1 is the same network without routing")
    expert_size: Positive = Field(128, description="width inside an expert")
    top_k: Positive = Field(1, description="experts asked for each sample")
    token_size: Positive = Field(10, description="state_space: inputs of a token")
    state_size: Positive | None = Field(None, description="state_space: numbers kept of each channel; null is 64")
    ssm_head_size: Positive | None = Field(
        None, description="state_space: channels that decay together; null is 64, or all where there are fewer"
    )
    expand: Positive | None = Field(None, description="state_space: channels, in widths of the trunk; null is 2")
    conv_size: Positive | None = Field(None, description="state_space: tokens its short convolution sees; null is 4")
    gate: Literal["softmax", "sigmoid"] = Field("softmax", description="how the scores of experts become weights")
    shared_experts: Whole = Field(0, ge=0, description="experts that see every sample, beside those that are chosen")
    capacity_factor: Number | None = Field(
        None, gt=0, description="room of an expert in a forward of training, in shares of an even split; null is all"
    )
    expert_capacity: Positive | None = Field(None, description="room of an expert in samples, in place of the factor")
    balance: Literal["loss", "bias", "none"] = Field(
        "loss", description="what evens out the load: a loss, a bias on the choice that follows the load, or nothing"
    )
    load_balancing_weight: Number = Field(0.01, ge=0, description="weight of the loss that evens out the load")
    z_weight: Number = Field(0.0, ge=0, description="weight of the loss that keeps the router's scores small")
    routing_loss_weight: Number = Field(0.0, ge=0, description="weight of the loss on the known right expert")
    expert_dropout: Dropout = Field(0.0, description="share of experts left out of a step")
    router: Literal["linear", "spiking"] = Field("linear", description="what scores the experts")
    spike_threshold: Number | None = Field(
        None, gt=0, description="charge at which a unit of the trunk spikes; null is no spiking"
    )
    time_steps: Positive = Field(8, description="spiking: steps simulated for each sample")
    leak: Probability = Field(0.9, description="spiking: share of the charge that stays from one step to the next")
    refractory: Whole = Field(0, ge=0, description="spiking: steps after a spike in which a unit cannot spike")
    adaptation: Number = Field(0.0, ge=0, description="spiking: by how much a spike raises a unit's threshold")
    surrogate: Literal["arctan", "sigmoid", "fast_sigmoid"] = Field(
        "arctan", description="spiking: the slope that stands for a spike's in backward"
    )
    firing_rate: Probability | None = Field(
        None, description="spiking: the share of steps in which a unit is to spike; null is any"
    )
    firing_weight: Number = Field(0.1, ge=0, description="spiking: weight of the loss on other rates than that")
    plasticity: bool = Field(False, description="spiking: weights also follow spike timing")
    from_: str | None = Field(None, alias="from", description="weights to start from: an exported run or its folder")

    @model_validator(mode="after")
    def _possible(self) -> RoutingModel:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k {self.top_k} is more than num_experts {self.num_experts}; lower top_k, or add experts"
            )
        if self.capacity_factor is not None and self.expert_capacity is not None:
            raise ValueError("capacity_factor and expert_capacity both say how much room an expert has; keep one")
        if self.activation is not None and (self.spike_threshold is not None or self.trunk != "perceptron"):
            raise ValueError(f"activation {self.activation} is of the perceptron trunk alone; leave it out")
        if self.plasticity and self.spike_threshold is None:
            raise ValueError(
                "plasticity changes weights by spike timing, and nothing spikes; set spike_threshold: 1.0, or plasticity: false"
            )
        if self.firing_rate is not None and self.spike_threshold is None:
            raise ValueError(f"firing_rate {self.firing_rate} is of spiking units; set spike_threshold: 1.0")
        if self.spike_threshold is not None and self.num_layers == 0:
            raise ValueError(
                "num_layers 0 leaves no spiking units, and spike_threshold asks for some; raise num_layers"
            )
        if self.trunk == "state_space" and self.num_layers == 0:
            raise ValueError("trunk: state_space needs layers, and num_layers is 0; raise it")
        if self.spike_threshold is not None and self.trunk == "state_space":
            raise ValueError(
                "trunk: state_space has no spiking units; leave out spike_threshold, or use router: spiking"
            )
        if self.routing_loss_weight and self.num_experts == 1:
            raise ValueError("routing_loss_weight needs experts to choose from; set num_experts to the number of rules")
        return self


class RoutingRecipe(Recipe):
    task: Literal["routing"] = Field("routing", description="the right expert and the right answer")
    model: RoutingModel = Field(default_factory=RoutingModel, description="the model")
    data: RoutingData = Field(default_factory=RoutingData, description="the data")

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        said = rules_problem(self.model, self.data.num_rules) if self.data.is_synthetic else None
        return [*super().find_conflicts(), *([("model.num_experts", "data.num_rules", said)] if said else ())]


def rules_problem(model: RoutingModel, num_rules: int) -> str | None:
    """What is wrong with the number of experts where they are told the rule."""
    if not model.routing_loss_weight or num_rules == model.num_experts:
        return None
    return (
        f"{model.num_experts}, and model.routing_loss_weight {model.routing_loss_weight:g} needs an expert for each rule: "
        f"there are {num_rules}; set it to {num_rules}, or the weight to 0"
    )
