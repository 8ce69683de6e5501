"""The recipe of a text classifier: a transformer, pretrained or not, or Kim's convolutional network."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.schema.data import HeldOut, TextData
from bottega.schema.language import Tokenizer
from bottega.schema.recipe import Model, Recipe, path_problems
from bottega.schema.section import Dropout, Positive, Probability, Section


class ClassifyModel(Model):
    kind: Literal["transformer", "cnn"] = Field("transformer", description="the architecture")
    name: str | None = Field(None, description="title of the exported model's card")
    from_: str | None = Field(None, alias="from", description="weights to start from: a run, a folder or a hub name")
    num_labels: Positive | None = Field(None, description="classes; null counts them in the data")
    vocab_size: Positive | None = Field(None, description="rows of the embedding; null is the tokenizer's size")
    hidden_size: Positive | None = Field(None, description="transformer: width")
    num_layers: Positive | None = Field(None, description="transformer: blocks")
    num_heads: Positive | None = Field(None, description="transformer: attention heads")
    attention_dropout: Dropout | None = Field(None, description="transformer: dropout of attention weights")
    embed_size: Positive | None = Field(None, description="cnn: width of the embedding")
    num_filters: Positive | None = Field(None, description="cnn: filters of each width")
    filter_sizes: tuple[Positive, ...] | None = Field(None, min_length=1, description="cnn: widths in tokens")


class TextAugmentation(Section):
    enabled: bool = Field(True, description="whether it is applied")
    techniques: tuple[Literal["synonym_replacement", "random_insertion", "random_swap", "random_deletion"], ...] = (
        Field(("random_swap", "random_deletion"), description="which changes are made")
    )
    probability: Probability = Field(0.1, description="share of words changed")
    augmentation_factor: Positive = Field(1, description="changed copies made of each training text")


class ClassifyData(TextData):
    validation: HeldOut | None = Field(
        HeldOut(split=0.1), description="what measures progress: {split: 0.1} or a source"
    )
    label_field: str = Field("label", description="which field of a row is the class")
    tokenizer: Tokenizer = Field(Tokenizer(), description="how text becomes numbers")
    sequence_length: Positive | None = Field(None, description="texts are cut at so many tokens; null is the model's")
    augmentation: TextAugmentation | None = Field(None, description="changed copies of the training texts")


class ClassifyRecipe(Recipe):
    task: Literal["classify"] = Field("classify", description="a class for each text")
    model: ClassifyModel = Field(ClassifyModel(), description="the model")
    data: ClassifyData = Field(ClassifyData(), description="the data")

    def missing(self) -> list[tuple[str, str]]:
        return super().missing() + path_problems(self.data)
