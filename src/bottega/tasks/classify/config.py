"""The recipes of classifiers: of text by a transformer or Kim's network, of images, sound and video by a convolutional one,
of images also by spiking units.

Which of the four a recipe is, `data.input` says; text where it does not.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from bottega.config.data import HeldOut, TextData, find_held_out_problems
from bottega.config.media import MediaRecipe
from bottega.config.recipe import Model, Recipe, Samples, find_path_problems
from bottega.config.section import Dropout, Number, Positive, Probability, Section, Whole
from bottega.data.audio.config import AudioData
from bottega.data.image.config import ImageData
from bottega.data.text.config import TextAugmentation, Tokenizer, find_tokenizer_problems
from bottega.data.video.config import VideoData
from bottega.models.spiking.config import Coding, Reset, Surrogate
from bottega.models.text_classifier.config import EncoderShape
from bottega.tasks.classify.losses import LossName


class ClassifyModel(Model):
    kind: Literal["transformer", "cnn", "pretrained"] = Field(
        "transformer", description="our own encoder, Kim's network, or the encoder of a transformers folder (from)"
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
    word_dropout: Dropout = Field(0.0, description="share of the tokens that are unknown to the model while it trains")

    @model_validator(mode="before")
    @classmethod
    def _weights_decide(cls, values: Any) -> Any:
        """A transformer that starts from weights is the one they are of: guides print both keys."""
        if isinstance(values, dict) and (values.get("from") or values.get("from_")) is not None:
            return {**values, "kind": "pretrained"} if values.get("kind", "transformer") == "transformer" else values
        return values


class ClassifyTokenizer(Tokenizer):
    kind: Literal["words", "bpe", "bytes", "characters", "pretrained"] = Field(  # type: ignore[assignment]
        "words", description="how text becomes numbers"
    )
    vocab_size: Positive | None = Field(
        None, description="bpe, words: how many at most; null is 4096 (bpe) or all (words)"
    )
    min_frequency: Positive | None = Field(None, description="words: rarer ones are unknown; null is 2")


Weight = Annotated[Number, Field(gt=0)]


class LossOptions(Section):
    name: LossName = Field("cross_entropy", description="what is minimised")
    gamma: Number = Field(
        2.0, ge=0, description="focal: how much less a text counts that is told well; 0 is cross-entropy"
    )
    class_weights: Literal["balanced"] | dict[str, Weight] | tuple[Weight, ...] | None = Field(
        None,
        description="balanced: rare classes count as much; or {class: weight}, or a list in order of the classes",
    )

    @model_validator(mode="after")
    def _gamma_has_a_use(self) -> LossOptions:
        # 2 is what the recipe of every run says, whatever its loss.
        if self.name == "cross_entropy" and self.gamma != 2.0:
            raise ValueError(f"gamma {self.gamma:g} is of the focal loss, and name is {self.name}; set name: focal")
        return self


_LOSS = "what is minimised; null is plain cross-entropy"


_INPUT = "what is classified: text, image, audio or video"
_VALIDATION = "what measures progress: {split: 0.1} or a source"


class ClassifyData(TextData):
    # All four, though only text fits here, so that a mistyped one is told what there is.
    input: Literal["text", "image", "audio", "video"] = Field(
        "text", description=_INPUT, json_schema_extra={"enum": ["text"]}
    )
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)
    label_field: str = Field("label", description="which field of a row is the class")
    class_names: tuple[str, ...] | dict[str, str] | None = Field(
        None, description="names of numbered classes: a list for 0, 1, 2 and so on, or {1: world, 2: sports}"
    )
    multi_label: bool = Field(False, description="a text has any number of classes: a list, or names in one text")
    label_separator: str = Field(",", min_length=1, description="multi_label: what divides names in one text")
    tokenizer: ClassifyTokenizer = Field(default_factory=ClassifyTokenizer, description="how text becomes numbers")
    sequence_length: Positive | None = Field(None, description="texts are cut at so many tokens; null is the model's")
    augmentation: TextAugmentation | None = Field(None, description="changed copies of the training texts")

    @property
    def class_name_by_number(self) -> dict[str, str]:
        """Number of a class -> its name."""
        if isinstance(self.class_names, dict):
            return dict(self.class_names)
        return {str(number): name for number, name in enumerate(self.class_names or ())}

    @model_validator(mode="after")
    def _is_text(self) -> ClassifyData:
        if self.input != "text":
            raise ValueError(f"input: {self.input} has a schema of its own")
        if self.multi_label and self.split is not None and self.split.by == "stratified":
            raise ValueError(
                "split.by: stratified goes by one class a text, and multi_label gives several; use fraction"
            )
        return self


def _asks(block: Any, key: str, value: Any = True) -> bool:
    return isinstance(block, dict) and block.get(key) == value


class ClassifyRecipe(Recipe):
    task: Literal["classify"] = Field("classify", description="a class for each text")
    model: ClassifyModel = Field(default_factory=ClassifyModel, description="the model")
    data: ClassifyData = Field(default_factory=ClassifyData, description="the data")
    loss: LossOptions | None = Field(None, description=_LOSS)
    samples: Samples = Field(default_factory=lambda: Samples(every=None), description="a classifier draws none")

    @model_validator(mode="before")
    @classmethod
    def _accuracy_of_several(cls, values: Any) -> Any:
        """All labels of a text right: what accuracy is of one class, with several is exact_match."""
        if not isinstance(values, dict) or not _asks(values.get("data"), "multi_label"):
            return values
        changed = dict(values)
        if _asks(values.get("evaluation"), "metric", "accuracy"):
            changed["evaluation"] = {**values["evaluation"], "metric": "exact_match"}
        training = values.get("training")
        if isinstance(training, dict) and _asks(training.get("early_stopping"), "metric", "accuracy"):
            stopping = {**training["early_stopping"], "metric": "exact_match"}
            changed["training"] = {**training, "early_stopping": stopping}
        return changed

    def find_missing_keys(self) -> list[tuple[str, str]]:
        found = super().find_missing_keys() + find_path_problems(self.data) + find_held_out_problems(self.data)
        if self.model.kind == "pretrained" and self.model.from_ is None:
            found.append(("model.from", "missing; kind pretrained needs a folder or a hub name"))
        return found + find_tokenizer_problems(self.data.tokenizer)

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        found, model = super().find_conflicts(), self.model
        given = {key: value for key in ("hidden_size", "num_heads") if (value := getattr(model, key)) is not None}
        try:
            if model.kind == "transformer":
                EncoderShape(vocab_size=2, num_labels=2, **given)
        except ValidationError as error:
            text = error.errors()[0]["msg"].removeprefix("Value error, ")
            found.append(("model.hidden_size", "model.num_heads", text))
        return found


class MediaClassifier(Model):
    kind: Literal["convnet"] = Field("convnet", description="the architecture")
    from_: str | None = Field(None, alias="from", description="weights to start from: an exported run or its folder")
    num_labels: Positive | None = Field(None, description="classes; null counts them in the data")
    hidden_size: Positive = Field(32, description="channels of the first stage; the last has up to 4 times as many")
    num_layers: Positive = Field(1, description="residual blocks of each stage")

    @property
    def condition(self) -> Literal["class"]:
        """As of a generator that is asked for classes: each sample has one, and the same data serves both."""
        return "class"

    @property
    def num_classes(self) -> int | None:
        return self.num_labels


class ImageClassifier(MediaClassifier):
    kind: Literal["convnet", "spiking"] = Field("convnet", description="the architecture")  # type: ignore[assignment]
    hidden_size: Positive = Field(
        32,
        description="convnet: channels of the first stage, the last has up to 4 times as many; spiking: units of a layer",
    )
    num_layers: Positive = Field(1, description="convnet: residual blocks of each stage; spiking: layers of units")
    time_steps: Positive | None = Field(None, description="spiking: steps simulated for each image; null is 8")
    spike_threshold: Number | None = Field(None, gt=0, description="spiking: charge at which a unit fires; null is 1")
    leak: Probability | None = Field(None, description="spiking: share of the charge that a step leaves; null is 0.9")
    refractory: Whole | None = Field(
        None, ge=0, description="spiking: steps after a spike in which a unit is deaf; null is 0"
    )
    reset: Reset | None = Field(
        None, description="spiking: a spike takes the threshold off the charge, or all of it; null is subtract"
    )
    adaptation: Number | None = Field(
        None, ge=0, description="spiking: by how much a spike raises the unit's threshold; null is 0"
    )
    adaptation_leak: Probability | None = Field(
        None, description="spiking: share of that raise that a step leaves; null is 0.9"
    )
    surrogate: Surrogate | None = Field(
        None, description="spiking: the smooth step whose slope gradients go by; null is arctan"
    )
    sharpness: Number | None = Field(None, gt=0, description="spiking: how steep that step is; null is 2")
    coding: Coding | None = Field(
        None,
        description="spiking: a pixel is a constant current, a rate of spikes or the time of one; null is constant",
    )
    firing_rate: Probability | None = Field(
        None, description="spiking: share of the steps in which units are to fire; null is as they like"
    )
    firing_rate_weight: Number | None = Field(
        None, ge=0, description="spiking: weight of the squared distance from firing_rate; null is 1"
    )

    def contradictions(self, normalise: str) -> list[tuple[str, str, str]]:
        """(key, other key, message), where `normalise` is that of the data."""
        said = [key for key in SPIKING_KEYS if getattr(self, key) is not None]
        if self.kind != "spiking":
            of = "is of spiking units, and kind is {}; say model.kind: spiking, or leave it out"
            return [(f"model.{key}", "model.kind", of.format(self.kind)) for key in said]
        found = []
        if self.firing_rate_weight is not None and self.firing_rate is None:
            text = f"{self.firing_rate_weight:g}, and there is no model.firing_rate to keep to; say it, such as 0.1"
            found.append(("model.firing_rate_weight", "model.firing_rate", text))
        if self.coding in ("rate", "latency") and normalise == "standard":
            text = f"standard has no lowest and highest value, and {self.coding} needs them; use unit or symmetric"
            found.append(("data.normalise", "model.coding", text))
        return found


SPIKING_KEYS = tuple(name for name in ImageClassifier.model_fields if name not in MediaClassifier.model_fields)
"""The keys that a convolutional network has no use for."""


class ImageClassifyData(ImageData):
    input: Literal["image"] = Field("image", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class AudioClassifyData(AudioData):
    input: Literal["audio"] = Field("audio", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class VideoClassifyData(VideoData):
    input: Literal["video"] = Field("video", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class MediaClassifyRecipe(MediaRecipe):
    """What the three have in common. Nothing is drawn from a classifier, so it has no samples to look at, but spikes."""

    task: Literal["classify"] = Field("classify", description="a class for each image, sound or video")
    model: MediaClassifier = Field(default_factory=MediaClassifier, description="the model")
    loss: LossOptions | None = Field(None, description=_LOSS)
    samples: Samples = Field(default_factory=lambda: Samples(every=None), description="a classifier draws none")


class ImageClassifyRecipe(MediaClassifyRecipe):
    model: ImageClassifier = Field(default_factory=ImageClassifier, description="the model")
    data: ImageClassifyData = Field(default_factory=ImageClassifyData, description="the data")

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        return super().find_conflicts() + self.model.contradictions(self.data.normalise)


class AudioClassifyRecipe(MediaClassifyRecipe):
    data: AudioClassifyData = Field(default_factory=AudioClassifyData, description="the data")


class VideoClassifyRecipe(MediaClassifyRecipe):
    data: VideoClassifyData = Field(default_factory=VideoClassifyData, description="the data")
