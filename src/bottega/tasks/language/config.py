"""The recipe of a language model: dimensions, text and tokenizer."""

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
    """A named size, explicit dimensions, or both: an explicit dimension overrides that of the size."""

    kind: DecoderKind = Field(
        "transformer",
        description="attention, a state space (ssm), both alternating (hybrid), or mixture of experts (moe)",
    )
    size: Size | None = Field(None, description="about 1 M, 125 M, 1.3 B or 13 B parameters")
    from_: str | None = Field(None, alias="from", description="weights to start from: a run, a folder or a hub name")
    num_layers: Positive | None = Field(None, description="blocks")
    hidden_size: Positive | None = Field(None, description="width of the residual stream")
    num_heads: Positive | None = Field(None, description="query heads")
    num_kv_heads: Positive | None = Field(None, description="key and value heads; fewer than num_heads saves memory")
    head_size: Positive | None = Field(None, description="channels of an attention head")
    intermediate_size: Positive | None = Field(None, description="width inside the feed-forward layers")
    vocab_size: Positive | None = Field(None, description="rows of the embedding; null is the tokenizer's size")
    context: Positive | None = Field(None, description="maximum sequence length in tokens")
    tie_embeddings: bool | None = Field(None, description="share one matrix between the embedding and the head")
    qk_norm: bool | None = Field(None, description="normalise queries and keys")
    rope_theta: Number | None = Field(None, gt=0, description="base of the rotary position embedding")
    norm_epsilon: Number | None = Field(None, gt=0, description="epsilon of the norms")
    activation: Literal["swiglu", "relu2"] | None = Field(
        None, description="feed-forward layers: SwiGLU, or squared ReLU without a gate; null is swiglu"
    )
    logit_softcap: Number | None = Field(
        None, gt=0, description="cap c of the logits: c * tanh(logits / c); null is none"
    )
    value_embeddings: bool | None = Field(
        None, description="every second layer adds an embedding of each token to its value; null is false"
    )
    zero_init_residual: bool | None = Field(
        None, description="start with zeros in the projections that write into the residual stream; null is false"
    )
    num_experts: Positive | None = Field(None, description="experts of a layer; null is 8 for moe, else none")
    experts_per_token: Positive | None = Field(None, description="experts each token is routed to; null is 2")
    expert_size: Positive | None = Field(
        None, description="width inside an expert; null divides intermediate_size by experts_per_token"
    )
    shared_experts: Whole | None = Field(None, ge=0, description="experts that process every token; null is none")
    experts_every: Positive | None = Field(None, description="experts in every n-th layer; null is in each")
    gate: Literal["softmax", "sigmoid"] | None = Field(
        None, description="function from router logits to expert weights; null is softmax"
    )
    router: Literal["linear", "spiking"] | None = Field(None, description="the router; null is linear")
    capacity_factor: Rate | None = Field(
        None, description="capacity of an expert per sequence, relative to an even split; null never drops a token"
    )
    expert_capacity: Positive | None = Field(None, description="capacity of an expert per sequence, in tokens")
    expert_dropout: Dropout | None = Field(None, description="fraction of experts dropped in a step; null is 0")
    balance: Literal["loss", "bias", "none"] | None = Field(
        None, description="load balancing of the experts: by a loss, by a bias on the router, or none; null is loss"
    )
    balance_weight: Number | None = Field(None, ge=0, description="weight of the load-balancing loss; null is 0.01")
    z_weight: Number | None = Field(None, ge=0, description="weight of the router's z-loss; null is 0.001")
    state_size: Positive | None = Field(None, description="state size of each channel of a state space; null is 64")
    ssm_head_size: Positive | None = Field(None, description="channels of a state-space head; null is 64")
    expand: Positive | None = Field(
        None, description="channels of a state space, in multiples of hidden_size; null is 2"
    )
    conv_size: Positive | None = Field(None, description="kernel size of a state space's convolution; null is 4")
    chunk_size: Positive | None = Field(
        None, description="tokens that a state space processes in one matrix product; null is 64"
    )
    attention_every: Positive | None = Field(None, description="hybrid: attention in every n-th layer; null is 4")

    def get_explicit_dimensions(self) -> dict[str, Any]:
        """Return the dimensions that the recipe sets itself, without those of a size or of pretrained weights."""
        values = self.model_dump(exclude={"kind", "size", "from_", "zero_init_residual"})
        return {key: value for key, value in values.items() if value is not None}


class LanguageData(TextData):
    """Texts, their tokenizer, and how they become examples."""

    validation: HeldOut | None = Field(HeldOut(split=0.05), description="validation data: {split: 0.05} or a source")
    tokenizer: Tokenizer = Field(default_factory=Tokenizer, description="tokenizer of the text")
    sequence_length: Positive | None = Field(None, description="tokens in an example; null is the model's context")
    padding: bool | None = Field(
        None, description="one document per example, padded at the end; null packs documents without gaps"
    )
    separate_documents: bool = Field(False, description="attention does not cross document boundaries")


class LanguageSamples(Samples):
    """Texts that are generated during training."""

    prompts: tuple[str, ...] = Field(("\n",), min_length=1, description="prompts of the samples, used in turn")
    max_new_tokens: Positive = Field(200, description="length of a sample")
    temperature: Number = Field(0.8, ge=0, description="sampling temperature; 0 is greedy")
    top_k: Positive | None = Field(None, description="sample from the k likeliest tokens; null is all")
    top_p: Probability | None = Field(
        None, gt=0, description="sample from the likeliest tokens whose probabilities sum to p; null is all"
    )


class LanguageRecipe(Recipe):
    """The recipe of a language model."""

    task: Literal["language"] = Field("language", description="next-token prediction")
    model: LanguageModel = Field(default_factory=LanguageModel, description="the model")
    data: LanguageData = Field(default_factory=LanguageData, description="the data")
    samples: LanguageSamples = Field(default_factory=LanguageSamples, description="texts generated during training")

    def find_missing_keys(self) -> list[tuple[str, str]]:
        problems = super().find_missing_keys() + find_path_problems(self.data)
        model = self.model
        if model.size is None and model.from_ is None and (model.num_layers is None or model.hidden_size is None):
            problems.append(
                ("model.size", "missing; give a size (nano, verse, stanza, epic), from, or num_layers and hidden_size")
            )
        return problems + find_tokenizer_problems(self.data.tokenizer) + find_held_out_problems(self.data)

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        return super().find_conflicts() + _find_dimension_conflicts(self.model)


def _find_dimension_conflicts(model: LanguageModel) -> list[tuple[str, str, str]]:
    """Return conflicts between dimensions, such as one set by the recipe and another that comes with the size."""
    if model.from_ is not None:
        text = "true has no effect on weights that are loaded; remove it, or train from scratch without model.from"
        return [("model.zero_init_residual", "model.from", text)] if model.zero_init_residual else []
    explicit = model.get_explicit_dimensions()
    unused = find_unused_keys(model.kind, model.size, explicit)
    conflicts = [(f"model.{key}", "model.kind", text) for key, text in unused]
    if conflicts or (model.size is None and None in (model.hidden_size, model.num_layers)):
        return conflicts
    try:
        TransformerShape(**{"vocab_size": 2, "context": 1, **resolve_shape_fields(model.kind, model.size, explicit)})
    except ValidationError as error:
        key, text = describe_shape_error(error)
        other = "model.num_kv_heads" if key in ("num_heads", "head_size") else "model.kind"
        return [(f"model.{key}", other, text)]
    return []
