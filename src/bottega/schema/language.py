"""The recipe of a language model: its dimensions, its text and its tokenizer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError

from bottega.schema.data import HeldOut, TextData, held_out_problems
from bottega.schema.recipe import Model, Recipe, Samples, path_problems
from bottega.schema.section import Number, Positive, Probability, Section
from bottega.schema.transformer import SIZES, TransformerShape

Size = Literal["nano", "verse", "stanza", "epic"]


class LanguageModel(Model):
    """A named size, or dimensions of its own, or both: a dimension given beside a size replaces the size's."""

    kind: Literal["transformer"] = Field("transformer", description="the architecture")
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


class Tokenizer(Section):
    kind: Literal["bpe", "bytes", "characters", "pretrained"] = Field("bpe", description="how text becomes numbers")
    vocab_size: Positive | None = Field(None, description="bpe: how many tokens are learned; null is 4096")
    path: str | None = Field(None, description="pretrained: a tokenizer file, a folder or a hub name")


def tokenizer_problems(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    if tokenizer.kind == "pretrained" and tokenizer.path is None:
        return [("data.tokenizer.path", "missing; kind pretrained needs a file, a folder or a hub name")]
    if tokenizer.kind != "pretrained" and tokenizer.path is not None:
        return [("data.tokenizer.path", "only kind pretrained has one; set data.tokenizer.kind")]
    return []


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

    def missing(self) -> list[tuple[str, str]]:
        found = super().missing() + path_problems(self.data)
        model = self.model
        if model.size is None and model.from_ is None and (model.num_layers is None or model.hidden_size is None):
            found.append(
                ("model.size", "missing; give a size (nano, verse, stanza, epic), from, or num_layers and hidden_size")
            )
        return found + tokenizer_problems(self.data.tokenizer) + held_out_problems(self.data)

    def contradictions(self) -> list[tuple[str, str, str]]:
        return super().contradictions() + _dimension_problems(self.model)


def own_dimensions(model: LanguageModel) -> dict[str, Any]:
    """Those of the size, or what follows from the width where there is none."""
    if model.size is not None:
        return dict(SIZES[model.size])
    assert model.hidden_size is not None, "the schema asks for it"
    width = model.hidden_size
    head = model.head_size or (width // model.num_heads if model.num_heads else min(64, width))
    heads = model.num_heads or max(1, width // head)
    # Two thirds of the usual four times the width: the gate is a third matrix.
    inner = -(-width * 8 // 3 // 32) * 32
    return {"head_size": head, "num_heads": heads, "num_kv_heads": heads, "intermediate_size": inner}


def _dimension_problems(model: LanguageModel) -> list[tuple[str, str, str]]:
    """What the heads cannot be, whatever the text: a size has some, and who changes one may forget the other."""
    if model.from_ is not None or (model.size is None and None in (model.hidden_size, model.num_layers)):
        return []
    said = {k: v for k, v in model.model_dump(exclude={"kind", "size", "from_"}).items() if v is not None}
    try:
        TransformerShape(**{"vocab_size": 2, "context": 1, **own_dimensions(model), **said})
    except ValidationError as error:
        wrong = error.errors()[0]
        text = wrong["msg"].removeprefix("Value error, ")
        key = ".".join(map(str, wrong["loc"])) or text.partition(" ")[0]
        return [(f"model.{key}", "model.num_kv_heads", text)]
    return []
