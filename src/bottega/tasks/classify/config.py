"""Recipes of classifiers: text with n-grams, a transformer or Kim's CNN, images, audio and video with a convolutional network, and
images also with a spiking network.

`data.input` selects one of the four media; the default is text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from bottega.config.data import HeldOut, TextData, find_held_out_problems
from bottega.config.media import MediaRecipe
from bottega.config.recipe import Evaluation, Model, Recipe, Samples, find_path_problems
from bottega.config.section import Dropout, Number, Positive, Probability, Section, Whole
from bottega.data.audio.config import AudioData
from bottega.data.image.config import ImageData
from bottega.data.text.config import TextAugmentation, Tokenizer, find_tokenizer_problems
from bottega.data.text.ngram_spec import NgramSpec
from bottega.data.video.config import VideoData
from bottega.models.spiking.config import Coding, Reset, Surrogate
from bottega.models.text_classifier.config import EncoderShape
from bottega.tasks.classify.losses import LossName

DEEP_KINDS = ("cnn", "transformer")
"""Kinds of text classifiers that can have a wide part."""
MAX_NGRAM_LENGTH, MIN_BUCKETS, MAX_BUCKETS = 8, 256, 1 << 26


class ClassifyModel(Model):
    """The model of a text classifier: its architecture, dimensions and pretrained weights."""

    kind: Literal["ngrams", "transformer", "cnn", "pretrained"] = Field(
        "transformer",
        description="a linear model over hashed n-grams, an encoder trained from scratch, Kim's CNN, or the encoder of a transformers "
        "folder (from)",
    )
    name: str | None = Field(None, description="title of the exported model's card")
    from_: str | None = Field(
        None,
        alias="from",
        description="weights to start from: a folder or a hub name (pretrained), an exported run (cnn)",
    )
    num_labels: Positive | None = Field(None, description="classes; null counts them in the data")
    vocab_size: Positive | None = Field(None, description="rows of the embedding; null is the tokenizer's size")
    hidden_size: Positive | None = Field(None, description="transformer: width")
    num_layers: Positive | None = Field(None, description="transformer: blocks")
    num_heads: Positive | None = Field(None, description="transformer: attention heads")
    attention_dropout: Dropout | None = Field(None, description="transformer: dropout of attention weights")
    embed_size: Positive | None = Field(None, description="cnn: width of the embedding")
    num_filters: Positive | None = Field(None, description="cnn: filters of each width")
    filter_sizes: tuple[Positive, ...] | None = Field(None, min_length=1, description="cnn: widths in tokens")
    wide: bool = Field(
        False,
        description="cnn, transformer: add the logits of a linear model over n-grams, trained jointly (wide and deep)",
    )
    word_ngrams: Whole | None = Field(
        None, ge=0, le=MAX_NGRAM_LENGTH, description="ngrams, wide: longest n-gram of words; 0 is none; null is 2"
    )
    character_ngrams: tuple[Positive, ...] | None = Field(
        None, description="ngrams, wide: shortest and longest n-gram of characters; [] is none; null is [3, 5]"
    )
    num_buckets: Positive | None = Field(
        None,
        ge=MIN_BUCKETS,
        le=MAX_BUCKETS,
        description="ngrams, wide: rows of the table that n-grams are hashed to; null is 262144, fewer with more than 16 classes",
    )
    word_dropout: Dropout = Field(
        0.0, description="transformer, cnn: fraction of the tokens replaced by the unknown token during training"
    )

    @property
    def ngrams(self) -> NgramSpec | None:
        """The n-grams that the model reads, or None."""
        if self.kind != "ngrams" and not (self.wide and self.kind in DEEP_KINDS):
            return None
        values = {"words": self.word_ngrams, "characters": self.character_ngrams, "buckets": self.num_buckets}
        options = {key: value for key, value in values.items() if value is not None}
        return NgramSpec(**options | ({"characters": None} if self.character_ngrams == () else {}))

    @field_validator("character_ngrams", mode="before")
    @classmethod
    def _check_character_ngrams(cls, lengths: Any) -> Any:
        is_pair = isinstance(lengths, list | tuple) and len(lengths) == 2 and all(type(x) is int for x in lengths)
        if lengths not in (None, [], ()) and not (is_pair and lengths[0] <= lengths[1] <= MAX_NGRAM_LENGTH):
            raise ValueError(
                f"expected the shortest and the longest length, such as [3, 5], up to {MAX_NGRAM_LENGTH}; [] is none"
            )
        return lengths

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        """Return (key, other key, message) for each conflict between keys of n-grams and other keys."""
        conflicts = []
        if self.word_ngrams == 0 and self.character_ngrams == ():
            text = "0 leaves no n-grams, because model.character_ngrams is []; set one of them"
            conflicts.append(("model.word_ngrams", "model.character_ngrams", text))
        elif self.ngrams is None:
            for key in ("word_ngrams", "character_ngrams", "num_buckets"):
                if (value := getattr(self, key)) is not None:
                    text = f"{value}, but kind {self.kind} has no n-grams; set model.wide: true, or remove the key"
                    conflicts.append((f"model.{key}", "model.kind", text))
        if self.kind == "ngrams" and self.from_ is not None:
            text = "a model of n-grams does not start from other weights; remove it, or set model.kind: pretrained"
            conflicts.append(("model.from", "model.kind", text))
        if self.wide and self.kind == "cnn" and self.from_ is not None:
            text = "true cannot be combined with weights to start from; remove one of them"
            conflicts.append(("model.wide", "model.from", text))
        if self.wide and self.kind not in DEEP_KINDS:
            text = f"true applies to cnn and transformer, but model.kind is {self.kind}; remove it"
            conflicts.append(("model.wide", "model.kind", text))
        return conflicts

    @model_validator(mode="before")
    @classmethod
    def _set_pretrained_kind(cls, values: Any) -> Any:
        """Replace kind: transformer by kind: pretrained if `from` is set, since other guides combine the two."""
        if isinstance(values, dict) and (values.get("from") or values.get("from_")) is not None:
            return {**values, "kind": "pretrained"} if values.get("kind", "transformer") == "transformer" else values
        return values


class ClassifyTokenizer(Tokenizer):
    """The tokenizer of a text classifier, which can also be one of whole words."""

    kind: Literal["words", "bpe", "bytes", "characters", "pretrained"] = Field(  # type: ignore[assignment]
        "words", description="tokenizer of the text"
    )
    vocab_size: Positive | None = Field(
        None, description="bpe, words: maximum vocabulary size; null is 4096 (bpe) or all words (words)"
    )
    min_frequency: Positive | None = Field(
        None, description="words: words that occur less often become the unknown token; null is 2"
    )


Weight = Annotated[Number, Field(gt=0)]


class LossOptions(Section):
    """The loss of a classifier and the weights of its classes."""

    name: LossName = Field("cross_entropy", description="the loss to minimise")
    gamma: Number = Field(
        2.0, ge=0, description="focal: how strongly well-classified examples are down-weighted; 0 is cross-entropy"
    )
    class_weights: Literal["balanced"] | dict[str, Weight] | tuple[Weight, ...] | None = Field(
        None,
        description="balanced: inversely proportional to class frequency; or {class: weight}, or a list in class order",
    )

    @model_validator(mode="after")
    def _check_gamma(self) -> LossOptions:
        # 2, the default, is written into the saved recipe of every run, whatever its loss.
        if self.name == "cross_entropy" and self.gamma != 2.0:
            raise ValueError(f"gamma {self.gamma:g} applies to the focal loss only; set name: focal, or remove gamma")
        return self


_LOSS = "the loss to minimise; null is cross-entropy"
_INPUT = "what is classified: text, image, audio or video"
_VALIDATION = "validation data: {split: 0.1} or a source"


class ClassifyData(TextData):
    """Labelled texts."""

    # All four inputs are listed, though only text is valid here, so that the error for a typo names them all.
    input: Literal["text", "image", "audio", "video"] = Field(
        "text", description=_INPUT, json_schema_extra={"enum": ["text"]}
    )
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)
    label_field: str = Field("label", description="field of a row with the class")
    class_names: tuple[str, ...] | dict[str, str] | None = Field(
        None, description="names of numbered classes: a list for 0, 1, 2, ..., or {1: world, 2: sports}"
    )
    multi_label: bool = Field(
        False, description="a text can have any number of classes: a list, or names in one string"
    )
    label_separator: str = Field(",", min_length=1, description="multi_label: separator of names in one string")
    tokenizer: ClassifyTokenizer = Field(default_factory=ClassifyTokenizer, description="tokenizer of the text")
    sequence_length: Positive | None = Field(
        None, description="maximum tokens of a text, which is truncated beyond; null is the model's maximum"
    )
    augmentation: TextAugmentation | None = Field(None, description="augmented copies of the training texts")

    @property
    def class_name_by_number(self) -> dict[str, str]:
        """Class number, as text -> class name."""
        if isinstance(self.class_names, dict):
            return dict(self.class_names)
        return {str(number): name for number, name in enumerate(self.class_names or ())}

    @model_validator(mode="after")
    def _check_text(self) -> ClassifyData:
        if self.input != "text":
            raise ValueError(f"input: {self.input} is validated by another schema")
        if self.multi_label and self.split is not None and self.split.by == "stratified":
            raise ValueError(
                "split.by: stratified needs one class for each text, but multi_label allows several; use fraction"
            )
        return self


def _has_value(section: Any, key: str, value: Any = True) -> bool:
    return isinstance(section, dict) and section.get(key) == value


class ClassifyEvaluation(Evaluation):
    """Validation of a text classifier."""

    baseline: bool = Field(
        True,
        description="at the end, also fit TF-IDF with logistic regression to the training texts, and print its result on the validation "
        "texts beside that of the run",
    )


class ClassifyRecipe(Recipe):
    """The recipe of a text classifier."""

    task: Literal["classify"] = Field("classify", description="assign a class to each text")
    model: ClassifyModel = Field(default_factory=ClassifyModel, description="the model")
    data: ClassifyData = Field(default_factory=ClassifyData, description="the data")
    loss: LossOptions | None = Field(None, description=_LOSS)
    evaluation: ClassifyEvaluation = Field(default_factory=ClassifyEvaluation, description="validation during training")
    samples: Samples = Field(
        default_factory=lambda: Samples(every=None), description="not used: a classifier generates no samples"
    )

    @model_validator(mode="before")
    @classmethod
    def _use_exact_match(cls, values: Any) -> Any:
        """Replace the metric accuracy by exact_match (all labels of a text right), its counterpart for several labels."""
        if not isinstance(values, dict) or not _has_value(values.get("data"), "multi_label"):
            return values
        changed = dict(values)
        if _has_value(values.get("evaluation"), "metric", "accuracy"):
            changed["evaluation"] = {**values["evaluation"], "metric": "exact_match"}
        training = values.get("training")
        if isinstance(training, dict) and _has_value(training.get("early_stopping"), "metric", "accuracy"):
            stopping = {**training["early_stopping"], "metric": "exact_match"}
            changed["training"] = {**training, "early_stopping": stopping}
        return changed

    def find_missing_keys(self) -> list[tuple[str, str]]:
        problems = super().find_missing_keys() + find_path_problems(self.data) + find_held_out_problems(self.data)
        if self.model.kind == "pretrained" and self.model.from_ is None:
            problems.append(("model.from", "missing; kind pretrained needs a folder or a hub name"))
        return problems + find_tokenizer_problems(self.data.tokenizer)

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        conflicts, model = super().find_conflicts() + self.model.find_conflicts(), self.model
        sizes = {key: value for key in ("hidden_size", "num_heads") if (value := getattr(model, key)) is not None}
        try:
            if model.kind == "transformer":
                EncoderShape(vocab_size=2, num_labels=2, **sizes)
        except ValidationError as error:
            text = error.errors()[0]["msg"].removeprefix("Value error, ")
            conflicts.append(("model.hidden_size", "model.num_heads", text))
        return conflicts


class MediaClassifier(Model):
    """The convolutional network of a classifier of images, audio or video."""

    kind: Literal["convnet"] = Field("convnet", description="the architecture")
    from_: str | None = Field(None, alias="from", description="weights to start from: an exported run or its folder")
    num_labels: Positive | None = Field(None, description="classes; null counts them in the data")
    hidden_size: Positive = Field(32, description="channels of the first stage; the last has up to 4 times as many")
    num_layers: Positive = Field(1, description="residual blocks of each stage")

    @property
    def condition(self) -> Literal["class"]:
        """The condition of a class-conditional generator, so that both use the same prepared data."""
        return "class"

    @property
    def num_classes(self) -> int | None:
        """`num_labels` under the name that generators give it."""
        return self.num_labels


class ImageClassifier(MediaClassifier):
    """The network of an image classifier: convolutional or spiking."""

    kind: Literal["convnet", "spiking"] = Field("convnet", description="the architecture")  # type: ignore[assignment]
    hidden_size: Positive = Field(
        32,
        description="convnet: channels of the first stage, the last has up to 4 times as many; spiking: units per layer",
    )
    num_layers: Positive = Field(1, description="convnet: residual blocks of each stage; spiking: layers of units")
    time_steps: Positive | None = Field(None, description="spiking: simulated time steps for each image; null is 8")
    spike_threshold: Number | None = Field(
        None, gt=0, description="spiking: membrane potential at which a unit fires; null is 1"
    )
    leak: Probability | None = Field(
        None, description="spiking: factor by which the membrane potential decays each step; null is 0.9"
    )
    refractory: Whole | None = Field(
        None, ge=0, description="spiking: steps after a spike in which a unit cannot fire; null is 0"
    )
    reset: Reset | None = Field(
        None, description="spiking: after a spike, subtract the threshold or reset to zero; null is subtract"
    )
    adaptation: Number | None = Field(
        None, ge=0, description="spiking: increase of a unit's threshold after a spike; null is 0"
    )
    adaptation_leak: Probability | None = Field(
        None, description="spiking: factor by which that increase decays each step; null is 0.9"
    )
    surrogate: Surrogate | None = Field(None, description="spiking: surrogate gradient of the spike; null is arctan")
    sharpness: Number | None = Field(None, gt=0, description="spiking: slope of the surrogate gradient; null is 2")
    coding: Coding | None = Field(
        None,
        description="spiking: a pixel becomes a constant current, a spike rate or a spike time; null is constant",
    )
    firing_rate: Probability | None = Field(
        None, description="spiking: target fraction of time steps in which a unit fires; null: no target"
    )
    firing_rate_weight: Number | None = Field(
        None, ge=0, description="spiking: weight of the squared distance from firing_rate; null is 1"
    )

    def find_conflicts(self, normalise: str) -> list[tuple[str, str, str]]:
        """Return (key, other key, message) for each conflict; `normalise` is data.normalise."""
        if self.kind != "spiking":
            text = f"applies to spiking networks, but model.kind is {self.kind}; set model.kind: spiking, or remove it"
            keys = [key for key in SPIKING_KEYS if getattr(self, key) is not None]
            return [(f"model.{key}", "model.kind", text) for key in keys]
        conflicts = []
        if self.firing_rate_weight is not None and self.firing_rate is None:
            text = f"{self.firing_rate_weight:g} has no effect without model.firing_rate; set that too, such as 0.1"
            conflicts.append(("model.firing_rate_weight", "model.firing_rate", text))
        if self.coding in ("rate", "latency") and normalise == "standard":
            text = f"standard has no fixed range, which model.coding {self.coding} needs; use unit or symmetric"
            conflicts.append(("data.normalise", "model.coding", text))
        return conflicts


SPIKING_KEYS = tuple(name for name in ImageClassifier.model_fields if name not in MediaClassifier.model_fields)
"""Keys that apply to a spiking network only."""


class ImageClassifyData(ImageData):
    """Labelled images."""

    input: Literal["image"] = Field("image", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class AudioClassifyData(AudioData):
    """Labelled audio."""

    input: Literal["audio"] = Field("audio", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class VideoClassifyData(VideoData):
    """Labelled videos."""

    input: Literal["video"] = Field("video", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class MediaClassifyRecipe(MediaRecipe):
    """The common part of the recipes of image, audio and video classifiers.

    `samples` is off by default; a spiking network writes a plot of its spikes.
    """

    task: Literal["classify"] = Field("classify", description="assign a class to each image, audio clip or video")
    model: MediaClassifier = Field(default_factory=MediaClassifier, description="the model")
    loss: LossOptions | None = Field(None, description=_LOSS)
    samples: Samples = Field(
        default_factory=lambda: Samples(every=None), description="spiking: plots of the spikes; not used by other kinds"
    )


class ImageClassifyRecipe(MediaClassifyRecipe):
    """The recipe of an image classifier."""

    model: ImageClassifier = Field(default_factory=ImageClassifier, description="the model")
    data: ImageClassifyData = Field(default_factory=ImageClassifyData, description="the data")

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        return super().find_conflicts() + self.model.find_conflicts(self.data.normalise)


class AudioClassifyRecipe(MediaClassifyRecipe):
    """The recipe of an audio classifier."""

    data: AudioClassifyData = Field(default_factory=AudioClassifyData, description="the data")


class VideoClassifyRecipe(MediaClassifyRecipe):
    """The recipe of a video classifier."""

    data: VideoClassifyData = Field(default_factory=VideoClassifyData, description="the data")
