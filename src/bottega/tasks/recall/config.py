"""The recipe of recall: facts are stated, and asked for when they are out of sight.

Of `streams`, a sample is several segments, each as long as the model's context, and the facts stand in the first. Of `facts`,
a sample is one segment, and what one states is asked for many samples later: only what outlives a sequence can help.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from bottega.config.data import Data, HeldOut, Source
from bottega.config.recipe import Model, Recipe
from bottega.config.section import Number, Positive, Rate, Section
from bottega.models.decoder.config import MLP_RATIO, TransformerShape
from bottega.models.decoder.kinds import describe_attention_every_problem, resolve_shape_fields
from bottega.models.memory.config import WorkingMemory

SYNTHETIC_SOURCE = Source(kind="synthetic")
_NOT_MADE = ("sources", "mixture", "temperature", "replay", "curriculum", "online", "split")
"""Keys about data that is read from somewhere."""


class LastingMemory(Section):
    """What a run carries from step to step, and its checkpoints keep."""

    key_size: Positive = Field(64, description="width of the codes of keys and values")
    working_slots: Positive = Field(16, description="how many things are at hand, fading")
    working_decay: Number = Field(0.9, gt=0, le=1, description="a step leaves so much of their strength")
    working_floor: Number = Field(0.05, ge=0, description="what is weaker is forgotten")
    episodic_slots: Positive = Field(512, description="how many facts are kept with when and how often")
    episodic_decay: Number = Field(0.999, gt=0, le=1, description="a step leaves so much of their retention")
    semantic_slots: Positive = Field(64, description="how many facts are kept for good, as prototypes")
    promote_after: Rate = Field(6, description="a fact becomes a prototype when said and used so often, together")
    same: Number = Field(0.95, gt=0, le=1, description="keys of this cosine or more are the same one")
    temperature: Rate = Field(0.1, description="how soft a read is at the start; it is learnt")


class RecallModel(Model):
    kind: Literal["transformer", "ssm", "hybrid"] = Field(
        "transformer", description="how the trunk reads a segment: attention, a state space (ssm), or both in turn"
    )
    hidden_size: Positive = Field(64, description="width of the trunk")
    num_layers: Positive = Field(2, description="its blocks")
    num_heads: Positive = Field(4, description="its attention heads")
    attention_every: Positive | None = Field(
        None, description="hybrid: attention in the last of so many layers; null is 4"
    )
    state_size: Positive | None = Field(None, description="numbers a state space keeps of each channel; null is 64")
    memory: WorkingMemory | None = Field(
        default_factory=WorkingMemory, description="what is carried from segment to segment; null is nothing"
    )

    @model_validator(mode="after")
    def _heads_agree(self) -> RecallModel:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size: {self.hidden_size} does not give each of {self.num_heads} heads an even number of channels"
            )
        if self.attention_every is not None and self.kind != "hybrid":
            raise ValueError(f"attention_every: kind {self.kind} does not alternate; leave it out, or say hybrid")
        if self.attention_every is not None and (
            wrong := describe_attention_every_problem(self.attention_every, self.num_layers)
        ):
            raise ValueError(f"attention_every: {wrong}")
        if self.state_size is not None and self.kind == "transformer":
            raise ValueError("state_size: a transformer has no state space; leave it out, or say kind: ssm")
        return self

    def build_trunk_shape(self, *, vocab_size: int, context: int) -> TransformerShape:
        """The dimensions of what reads a segment, as a language model of this width in a recipe of several tasks has them."""
        width, kind = self.hidden_size, self.kind
        said: dict[str, Any] = {"hidden_size": width, "num_layers": self.num_layers, "dropout": self.dropout or 0.0}
        if kind != "ssm":
            heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_heads, "head_size": width // self.num_heads}
            said |= {**heads, "intermediate_size": MLP_RATIO * width}
        said |= {key: value for key in ("attention_every", "state_size") if (value := getattr(self, key)) is not None}
        return TransformerShape(**resolve_shape_fields(kind, None, said), vocab_size=vocab_size, context=context)


class LastingModel(RecallModel):
    memory: LastingMemory | None = Field(  # type: ignore[assignment]
        default_factory=LastingMemory, description="what is carried from step to step; null is nothing"
    )


class RecallData(Data):
    """What both kinds of data have. The rule is known, so that chance is 1 / num_values."""

    train: Source = Field(SYNTHETIC_SOURCE, description="what is learned from, which is made up as it is needed")
    segment_length: Positive = Field(32, description="tokens that the model sees at once")
    num_pairs: Positive = Field(4, description="facts that a segment states: a key and its value")
    num_questions: Positive = Field(2, description="questions that a segment asks: one for a value")
    num_keys: Positive = Field(32, description="keys there are")
    num_values: Positive = Field(16, ge=2, description="values there are; a guess is right once in so many")
    num_fillers: Positive = Field(16, description="tokens there are that mean nothing")

    @model_validator(mode="after")
    def _made_up(self) -> RecallData:
        for key in _NOT_MADE:
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: the data of recall is made up as it is needed; leave it out")
        for key in ("train", "validation", "test"):
            part = getattr(self, key)
            if part is not None and (part.path is not None or part.kind not in ("auto", "synthetic")):
                raise ValueError(f"{key}: the data of recall is made up as it is needed; leave out path and kind")
        return self


class StreamsData(RecallData):
    input: Literal["streams"] = Field("streams", description="streams of segments; or facts, one segment each")
    validation: HeldOut | None = Field(
        HeldOut(split=0.05), description="what measures progress: streams that are not learnt from, {split: 0.05}"
    )
    num_samples: Positive = Field(20_000, description="streams there are")
    distance: Positive = Field(6, description="segments from a fact to the last question for it; each one asks")

    @model_validator(mode="after")
    def _fits(self) -> StreamsData:
        _fits_segment(self, self.num_pairs)
        if self.num_pairs > self.num_keys:
            raise ValueError(
                f"num_pairs: {self.num_pairs} facts of {self.num_keys} keys; raise num_keys to {self.num_pairs}"
            )
        for key in ("validation", "test"):
            part = getattr(self, key)
            if part is not None and not isinstance(part.split, float):
                raise ValueError(f"{key}: expected a share of the streams, such as {{split: 0.05}}")
        return self


class FactsData(RecallData):
    input: Literal["facts"] = Field("facts", description="one segment a sample, in order; or streams of segments")
    validation: HeldOut | None = Field(
        HeldOut(split=0.05), description="what measures progress: facts that training states and never asks for"
    )
    num_samples: Positive = Field(4096, description="segments that are called an epoch; the stream has no end")
    segment_length: Positive = Field(16, description="tokens that the model sees at once")
    num_pairs: Positive = Field(1, description="facts that a segment states, beside one that lasts")
    num_questions: Positive = Field(1, description="questions that a segment asks: one for a value")
    num_keys: Positive = Field(384, description="keys whose values change")
    num_lasting: Positive = Field(32, description="keys whose values stay; nothing but validation asks for them")
    restated: Positive = Field(2, description="how often a value is stated before the key gets another")
    distance: Positive = Field(128, description="segments from a fact to a question for it: so many, to twice as many")

    @model_validator(mode="after")
    def _fits(self) -> FactsData:
        _fits_segment(self, self.num_pairs + 1)
        if self.test is not None:
            raise ValueError("test: of facts there is one measure, validation; leave it out")
        asked, stated = 2 * self.distance * self.num_pairs, self.num_keys
        if asked > stated:
            raise ValueError(
                f"num_keys: {stated} are stated anew before the last question for them, {2 * self.distance} segments "
                f"later; raise it to {asked}, or lower distance"
            )
        return self


def _fits_segment(data: RecallData, num_pairs: int) -> None:
    """A fact is two tokens, and a question too."""
    length = data.segment_length
    if 2 * num_pairs > length:
        raise ValueError(
            f"segment_length: {length} tokens cannot hold {num_pairs} facts of two; raise it to {2 * num_pairs}"
        )
    needed = 2 * (data.num_questions + (num_pairs if isinstance(data, FactsData) else 0))
    if needed > length:
        raise ValueError(f"segment_length: {length} tokens cannot hold the questions too; raise it to {needed}")


class RecallRecipe(Recipe):
    task: Literal["recall"] = Field("recall", description="what was said when it is out of sight")
    model: RecallModel = Field(default_factory=RecallModel, description="the model")
    data: StreamsData = Field(default_factory=StreamsData, description="the data")

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        found = super().find_conflicts()
        memory, pairs = self.model.memory, self.data.num_pairs
        if memory is not None and memory.working_slots < pairs:
            text = f"{memory.working_slots} slots cannot hold the {pairs} facts of a stream; raise it to {pairs}"
            found.append(("model.memory.working_slots", "data.num_pairs", text))
        return found


class LastingRecipe(Recipe):
    task: Literal["recall"] = Field("recall", description="what was said when it is out of sight")
    model: LastingModel = Field(default_factory=LastingModel, description="the model")
    data: FactsData = Field(default_factory=FactsData, description="the data")

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        found = super().find_conflicts()
        data, memory = self.data, self.model.memory
        if memory is not None:
            needed = min(data.num_keys, 2 * data.distance * data.num_pairs) + data.num_lasting
            slots = memory.episodic_slots + memory.semantic_slots
            if slots < needed:
                text = f"{memory.episodic_slots} and {memory.semantic_slots} semantic slots cannot hold {needed} facts"
                raised = needed - memory.semantic_slots
                found.append(("model.memory.episodic_slots", "data.distance", f"{text}; raise it to {raised}"))
        too_near = self.distance_problem(self.distributed.processes or 1)
        if too_near is not None:
            found.append(("data.distance", "training.batch_size", too_near))
        return found

    def distance_problem(self, world: int) -> str | None:
        """What is wrong where questions lie in the same step of `world` processes as the facts they ask for."""
        training, distance = self.training, self.data.distance
        passes = training.gradient_accumulation_steps
        batch = training.batch_size * (passes * world if passes is not None else 1)
        if distance >= batch:
            return None
        return f"{distance} segments lie in one batch of {batch}, before its facts are stored; raise it to {batch}"
