"""The recipe of a model that routes between experts, spikes and remembers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bottega.schema.data import Data, HeldOut, Source
from bottega.schema.recipe import Model, Recipe
from bottega.schema.section import Dropout, Number, Positive, Probability, Section


class RoutingModel(Model):
    hidden_size: Positive = Field(256, description="width of the trunk")
    num_layers: Positive = Field(2, description="layers of the trunk")
    num_experts: Positive = Field(4, description="how many experts")
    expert_size: Positive = Field(128, description="width inside an expert")
    top_k: Positive = Field(1, description="experts asked for each sample")
    capacity_factor: Number = Field(1.25, gt=0, description="room of an expert, in shares of an even split")
    expert_capacity: Positive | None = Field(None, description="room of an expert in samples, in place of the factor")
    load_balancing_weight: Number = Field(0.01, ge=0, description="weight of the loss that evens out the load")
    routing_loss_weight: Number = Field(0.0, ge=0, description="weight of the loss on the known right expert")
    expert_dropout: Dropout = Field(0.0, description="share of experts left out of a step")
    spike_threshold: Number | None = Field(None, gt=0, description="charge at which a unit spikes; null is no spiking")
    time_steps: Positive = Field(8, description="spiking: steps simulated for each sample")
    plasticity: bool = Field(False, description="spiking: weights also follow spike timing")

    @model_validator(mode="after")
    def _enough_experts(self) -> RoutingModel:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
        return self


class VectorAugmentation(Section):
    enabled: bool = Field(True, description="whether it is applied")
    noise_level: Number = Field(0.0, ge=0, description="standard deviation of added noise")
    mask_probability: Probability = Field(0.0, description="share of inputs set to 0")


class RoutingData(Data):
    train: Source = Field(Source(kind="synthetic"), description="what is learned from; synthetic has a known rule")
    validation: HeldOut | None = Field(
        HeldOut(split=0.2), description="what measures progress: {split: 0.2} or a source"
    )
    num_samples: Positive = Field(1000, description="synthetic: how many samples")
    num_inputs: Positive = Field(100, description="synthetic: width of a sample")
    augmentation: VectorAugmentation | None = Field(None, description="changed copies of the training samples")


class RoutingRecipe(Recipe):
    task: Literal["routing"] = Field("routing", description="the right expert and the right answer")
    model: RoutingModel = Field(default_factory=RoutingModel, description="the model")
    data: RoutingData = Field(default_factory=RoutingData, description="the data")
