"""The recipe of a language model: its dimensions, its text and its tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from bottega.config.data import HeldOut, TextData, find_held_out_problems
from bottega.config.recipe import Model, Recipe, Samples, find_path_problems
from bottega.config.section import Dropout, Number, Positive, Probability, Rate, Whole
from bottega.data.text.config import Tokenizer, find_tokenizer_problems
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.kinds import DecoderKind, describe_shape_error, find_unused_keys, resolve_shape_fields

Size = Literal["nano", "verse", "stanza", "epic"]


class LanguageModel(Model):
    """A named size, or dimensions of its own, or both: a dimension given beside a size replaces the size's."""

    kind: DecoderKind = Field(
        "transformer",
        description="attention, a state space (ssm), both in turn (hybrid), or attention and experts (moe)",
    )
    size: Size | None = Field(None, description="about 1 M, 125 M, 1.3 B or 13 B parameters")
    from_: str | None = Field(None, alias="from", description="weights to start from: a run, a folder or a hub name")
    num_layers: Positive | None = Field(None, description="blocks")
    hidden_size: Positive | None = Field(None, description="width of the residual stream")
    num_heads: Positive | None = Field(None, description="query heads")
    num_kv_heads: Positive | None = Field(None, description="key and value heads; fewer than num_heads saves memory")
    head_size: Positive | None = Field(None, description="channels of a head")
    intermediate_size: Positive | None = Field(None, description="width inside the feed-forward")
    vocab_size: Positive | None = Field(None, description="rows of the embedding; null is the tokenizer's size")
    context: Positive | None = Field(None, description="the longest sequence, in tokens")
    tie_embeddings: bool | None = Field(None, description="one matrix for the embedding and the head")
    qk_norm: bool | None = Field(None, description="normalise queries and keys")
    rope_theta: Number | None = Field(None, gt=0, description="base of the rotary positions")
    norm_epsilon: Number | None = Field(None, gt=0, description="keeps the norm's division finite")
    num_experts: Positive | None = Field(None, description="feed-forwards to choose from; null is 8 for moe, else none")
    experts_per_token: Positive | None = Field(None, description="how many of them a token asks; null is 2")
    expert_size: Positive | None = Field(
        None, description="width inside an expert; null shares intermediate_size between those that a token asks"
    )
    shared_experts: Whole | None = Field(None, ge=0, description="experts that every token asks besides; null is none")
    experts_every: Positive | None = Field(None, description="experts in the last of so many layers; null is in each")
    gate: Literal["softmax", "sigmoid"] | None = Field(None, description="how experts are weighed; null is softmax")
    router: Literal["linear", "spiking"] | None = Field(None, description="what chooses the experts; null is linear")
    capacity_factor: Rate | None = Field(
        None, description="room of an expert in a sequence, in shares of an even split; null never drops a token"
    )
    expert_capacity: Positive | None = Field(None, description="the same in tokens")
    expert_dropout: Dropout | None = Field(None, description="share of experts left out of a step; null is 0")
    balance: Literal["loss", "bias", "none"] | None = Field(
        None, description="how experts are kept equally busy: by a loss, by a bias on the choice, or not; null is loss"
    )
    balance_weight: Number | None = Field(None, ge=0, description="weight of the balancing loss; null is 0.01")
    z_weight: Number | None = Field(None, ge=0, description="weight of the router's z-loss; null is 0.001")
    state_size: Positive | None = Field(None, description="numbers a state space keeps of each channel; null is 64")
    ssm_head_size: Positive | None = Field(
        None, description="channels of a state space that decay together; null is 64"
    )
    expand: Positive | None = Field(None, description="channels of a state space, in widths of the stream; null is 2")
    conv_size: Positive | None = Field(None, description="tokens its short convolution sees; null is 4")
    chunk_size: Positive | None = Field(None, description="tokens it reads by one matrix product; null is 64")
    attention_every: Positive | None = Field(
        None, description="hybrid: attention in the last of so many layers; null is 4"
    )

    def explicit_dimensions(self) -> dict[str, Any]:
        """The dimensions that are not left to a size, a folder or the width."""
        found = self.model_dump(exclude={"kind", "size", "from_"})
        return {key: value for key, value in found.items() if value is not None}


class LanguageData(TextData):
    validation: HeldOut | None = Field(
        HeldOut(split=0.05), description="what measures progress: {split: 0.05} or a source"
    )
    tokenizer: Tokenizer = Field(default_factory=Tokenizer, description="how text becomes numbers")
    sequence_length: Positive | None = Field(None, description="tokens in an example; null is the model's context")
    padding: bool | None = Field(
        None, description="one document an example, filled up at its end; null joins documents without gaps"
    )
    separate_documents: bool = Field(False, description="attention does not cross the border between documents")


class LanguageSamples(Samples):
    prompts: tuple[str, ...] = Field(("\n",), min_length=1, description="what the samples continue, in turn")
    max_new_tokens: Positive = Field(200, description="length of a sample")
    temperature: Number = Field(0.8, ge=0, description="0 always takes the likeliest token")
    top_k: Positive | None = Field(None, description="only the likeliest k tokens; null is all")
    top_p: Probability | None = Field(None, gt=0, description="only the likeliest tokens that sum to p; null is all")


class LanguageRecipe(Recipe):
    task: Literal["language"] = Field("language", description="next-token prediction")
    model: LanguageModel = Field(default_factory=LanguageModel, description="the model")
    data: LanguageData = Field(default_factory=LanguageData, description="the data")
    samples: LanguageSamples = Field(
        default_factory=LanguageSamples, description="what the model writes while it learns"
    )

    def find_missing_keys(self) -> list[tuple[str, str]]:
        found = super().find_missing_keys() + find_path_problems(self.data)
        model = self.model
        if model.size is None and model.from_ is None and (model.num_layers is None or model.hidden_size is None):
            found.append(
                ("model.size", "missing; give a size (nano, verse, stanza, epic), from, or num_layers and hidden_size")
            )
        return found + find_tokenizer_problems(self.data.tokenizer) + find_held_out_problems(self.data)

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        return super().find_conflicts() + _dimension_problems(self.model)


def _dimension_problems(model: LanguageModel) -> list[tuple[str, str, str]]:
    """What a model cannot be, whatever the text: a size has some dimensions, and who changes one may forget the other."""
    if model.from_ is not None:
        return []
    said = model.explicit_dimensions()
    found = [(f"model.{key}", "model.kind", text) for key, text in find_unused_keys(model.kind, model.size, said)]
    if found or (model.size is None and None in (model.hidden_size, model.num_layers)):
        return found
    try:
        TransformerShape(**{"vocab_size": 2, "context": 1, **resolve_shape_fields(model.kind, model.size, said)})
    except ValidationError as error:
        key, text = describe_shape_error(error)
        other = "model.num_kv_heads" if key in ("num_heads", "head_size") else "model.kind"
        return [(f"model.{key}", other, text)]
    return []
