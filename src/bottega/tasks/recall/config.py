"""Recipes of the task recall: key-value facts are stated, and queried when they are outside the model's context.

In `streams`, a sample is several segments, each as long as the context, and the first states the facts. In `facts`, a sample
is one segment, and a fact is queried many samples later, so that only a memory that outlives the sequence can answer.
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
_FILE_KEYS = ("sources", "mixture", "temperature", "replay", "curriculum", "online", "split")
"""Keys that apply to data read from files only."""


class LastingMemory(Section):
    """A memory that is carried from step to step and saved in checkpoints."""

    key_size: Positive = Field(64, description="width of the codes of keys and values")
    working_slots: Positive = Field(16, description="slots of the working memory, whose entries decay")
    working_decay: Number = Field(0.9, gt=0, le=1, description="decay factor of their strength per step")
    working_floor: Number = Field(0.05, ge=0, description="strength below which an entry is forgotten")
    episodic_slots: Positive = Field(512, description="slots of the episodic memory, which records time and use")
    episodic_decay: Number = Field(0.999, gt=0, le=1, description="decay factor of their retention per step")
    semantic_slots: Positive = Field(64, description="slots of the semantic memory, whose prototypes do not decay")
    promote_after: Rate = Field(6, description="statements plus uses after which a fact becomes a prototype")
    same: Number = Field(0.95, gt=0, le=1, description="cosine similarity from which two keys are the same")
    temperature: Rate = Field(0.1, description="initial temperature of reads; it is trained")


class RecallModel(Model):
    """A decoder, the trunk, with a memory that is carried from segment to segment."""

    kind: Literal["transformer", "ssm", "hybrid"] = Field(
        "transformer", description="trunk: attention, a state space (ssm), or both alternating (hybrid)"
    )
    hidden_size: Positive = Field(64, description="width of the trunk")
    num_layers: Positive = Field(2, description="blocks of the trunk")
    num_heads: Positive = Field(4, description="attention heads of the trunk")
    attention_every: Positive | None = Field(None, description="hybrid: attention in every n-th layer; null is 4")
    state_size: Positive | None = Field(None, description="state size of each channel of a state space; null is 64")
    memory: WorkingMemory | None = Field(
        default_factory=WorkingMemory, description="memory carried from segment to segment; null is none"
    )

    @model_validator(mode="after")
    def _check_dimensions(self) -> RecallModel:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size: {self.hidden_size} does not give each of {self.num_heads} heads an even number of channels"
            )
        if self.attention_every is not None and self.kind != "hybrid":
            raise ValueError(f"attention_every applies to kind hybrid only, not {self.kind}; remove it, or set hybrid")
        if self.attention_every is not None and (
            problem := describe_attention_every_problem(self.attention_every, self.num_layers)
        ):
            raise ValueError(f"attention_every: {problem}")
        if self.state_size is not None and self.kind == "transformer":
            raise ValueError("state_size: a transformer has no state space; remove it, or set kind: ssm")
        return self

    def build_trunk_shape(self, *, vocab_size: int, context: int) -> TransformerShape:
        """Return the dimensions of the decoder that reads a segment.

        They equal those of a language model of this width in a multitask recipe, so that the two can share layers.
        """
        width, kind = self.hidden_size, self.kind
        sizes: dict[str, Any] = {"hidden_size": width, "num_layers": self.num_layers, "dropout": self.dropout or 0.0}
        if kind != "ssm":
            heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_heads, "head_size": width // self.num_heads}
            sizes |= {**heads, "intermediate_size": MLP_RATIO * width}
        sizes |= {key: value for key in ("attention_every", "state_size") if (value := getattr(self, key)) is not None}
        return TransformerShape(**resolve_shape_fields(kind, None, sizes), vocab_size=vocab_size, context=context)


class LastingModel(RecallModel):
    """A decoder with a memory that is carried from step to step."""

    memory: LastingMemory | None = Field(  # type: ignore[assignment]
        default_factory=LastingMemory, description="memory carried from step to step; null is none"
    )


class RecallData(Data):
    """The common part of both kinds of data. An untrained model answers 1 in num_values queries correctly."""

    train: Source = Field(SYNTHETIC_SOURCE, description="training data, which is generated on the fly")
    segment_length: Positive = Field(32, description="tokens in a segment, the model's context")
    num_pairs: Positive = Field(4, description="facts, each a key and its value, stated in a segment")
    num_questions: Positive = Field(2, description="queries, each for the value of a key, in a segment")
    num_keys: Positive = Field(32, description="number of distinct keys")
    num_values: Positive = Field(16, ge=2, description="number of distinct values; chance accuracy is 1 / num_values")
    num_fillers: Positive = Field(16, description="number of distinct tokens without meaning")

    @model_validator(mode="after")
    def _check_synthetic(self) -> RecallData:
        for key in _FILE_KEYS:
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: the data of recall is generated; remove it")
        for key in ("train", "validation", "test"):
            source = getattr(self, key)
            if source is not None and (source.path is not None or source.kind not in ("auto", "synthetic")):
                raise ValueError(f"{key}: the data of recall is generated; remove path and kind")
        return self


class StreamsData(RecallData):
    """Streams of segments, the first of which states the facts."""

    input: Literal["streams"] = Field("streams", description="streams of segments; or facts, one segment each")
    validation: HeldOut | None = Field(
        HeldOut(split=0.05), description="validation data: a fraction of the streams, {split: 0.05}"
    )
    num_samples: Positive = Field(20_000, description="number of streams")
    distance: Positive = Field(6, description="segments from a fact to its last query; each segment queries")

    @model_validator(mode="after")
    def _check_sizes(self) -> StreamsData:
        _check_segment(self, self.num_pairs)
        if self.num_pairs > self.num_keys:
            raise ValueError(
                f"num_pairs: {self.num_pairs} facts need {self.num_pairs} distinct keys, but num_keys is {self.num_keys}; "
                f"raise num_keys to {self.num_pairs}"
            )
        for key in ("validation", "test"):
            held_out = getattr(self, key)
            if held_out is not None and not isinstance(held_out.split, float):
                raise ValueError(f"{key}: expected a fraction of the streams, such as {{split: 0.05}}")
        return self


class FactsData(RecallData):
    """An endless sequence of segments, which state facts and query earlier ones."""

    input: Literal["facts"] = Field("facts", description="one segment a sample, in order; or streams of segments")
    validation: HeldOut | None = Field(
        HeldOut(split=0.05), description="validation data: queries for facts that training states and never queries"
    )
    num_samples: Positive = Field(4096, description="segments in an epoch; the stream has no end")
    segment_length: Positive = Field(16, description="tokens in a segment, the model's context")
    num_pairs: Positive = Field(1, description="changing facts that a segment states, in addition to one lasting fact")
    num_questions: Positive = Field(1, description="queries, each for the value of a key, in a segment")
    num_keys: Positive = Field(384, description="keys whose values change")
    num_lasting: Positive = Field(32, description="keys whose values never change; only validation queries them")
    restated: Positive = Field(2, description="how often a value is stated before its key gets another")
    distance: Positive = Field(128, description="minimum segments from a fact to its query; the maximum is twice that")

    @model_validator(mode="after")
    def _check_sizes(self) -> FactsData:
        _check_segment(self, self.num_pairs + 1)
        if self.test is not None:
            raise ValueError("test: data.input facts has validation only; remove it")
        needed = 2 * self.distance * self.num_pairs
        if needed > self.num_keys:
            raise ValueError(
                f"num_keys: with {self.num_keys} keys, a fact is restated before its last query {2 * self.distance} "
                f"segments later; raise it to {needed}, or lower distance"
            )
        return self


def _check_segment(data: RecallData, num_pairs: int) -> None:
    """Raise a ValueError if facts and queries, two tokens each, do not fit into a segment."""
    length = data.segment_length
    if 2 * num_pairs > length:
        raise ValueError(
            f"segment_length: {length} tokens cannot hold {num_pairs} facts of two tokens; raise it to {2 * num_pairs}"
        )
    needed = 2 * (data.num_questions + (num_pairs if isinstance(data, FactsData) else 0))
    if needed > length:
        raise ValueError(f"segment_length: {length} tokens cannot hold the queries as well; raise it to {needed}")


class RecallRecipe(Recipe):
    """The recipe of recall within a stream."""

    task: Literal["recall"] = Field("recall", description="recall facts that are outside the context")
    model: RecallModel = Field(default_factory=RecallModel, description="the model")
    data: StreamsData = Field(default_factory=StreamsData, description="the data")

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        conflicts = super().find_conflicts()
        memory, pairs = self.model.memory, self.data.num_pairs
        if memory is not None and memory.working_slots < pairs:
            text = f"{memory.working_slots} slots cannot hold the {pairs} facts of a stream; raise it to {pairs}"
            conflicts.append(("model.memory.working_slots", "data.num_pairs", text))
        return conflicts


class LastingRecipe(Recipe):
    """The recipe of recall across samples."""

    task: Literal["recall"] = Field("recall", description="recall facts that are outside the context")
    model: LastingModel = Field(default_factory=LastingModel, description="the model")
    data: FactsData = Field(default_factory=FactsData, description="the data")

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        conflicts = super().find_conflicts()
        data, memory = self.data, self.model.memory
        if memory is not None:
            needed = min(data.num_keys, 2 * data.distance * data.num_pairs) + data.num_lasting
            slots = memory.episodic_slots + memory.semantic_slots
            if slots < needed:
                text = f"{memory.episodic_slots} episodic and {memory.semantic_slots} semantic slots cannot hold {needed} facts"
                needed_slots = needed - memory.semantic_slots
                conflicts.append(
                    ("model.memory.episodic_slots", "data.distance", f"{text}; raise it to {needed_slots}")
                )
        problem = self.describe_distance_problem(self.distributed.processes or 1)
        if problem is not None:
            conflicts.append(("data.distance", "training.batch_size", problem))
        return conflicts

    def describe_distance_problem(self, num_processes: int) -> str | None:
        """Return what is wrong if a query can fall into the same step as the fact it asks for, else None."""
        training, distance = self.training, self.data.distance
        accumulation = training.gradient_accumulation_steps
        batch = training.batch_size * (accumulation * num_processes if accumulation is not None else 1)
        if distance >= batch:
            return None
        return (
            f"a query {distance} segments after its fact is in the same batch of {batch}, before the fact is stored; "
            f"raise it to {batch}"
        )
