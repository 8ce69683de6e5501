"""The recipe of personalised images: soft prompts between a frozen language model and a frozen image generator.

PMG (Shen et al., 2024): the language model reads what a user liked and summarises it in keywords and in a few hidden states,
which a trained mapping turns into a condition of the generator, beside the keywords of the wish.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from bottega.config.data import Data
from bottega.config.recipe import Model, Recipe, find_path_problems
from bottega.config.section import Collection, Number, Positive, Probability, Section, Whole
from bottega.config.training import Scheduler, SchedulerName, Training
from bottega.config.units import Duration, Interval
from bottega.models.frozen.config import FrozenPrecision
from bottega.tasks.generation.config import GeneratorSamples


class Keywords(Section):
    """Prompts that ask the language model for keywords, and how its answer is decoded."""

    preference_prompt: str = Field(
        "A person liked these pictures:\n{history}\n\n"
        "Name up to {count} keywords for what they have in common: subjects, colours, style, mood. "
        "Answer with the keywords alone, separated by commas.\nKeywords:",
        description="prompt for what a user likes; {history} is replaced by the captions",
    )
    target_prompt: str = Field(
        "A person wishes for this picture: {wish}\n\n"
        "Name up to {count} keywords for what it must show. "
        "Answer with the keywords alone, separated by commas.\nKeywords:",
        description="prompt for what the image must show; {wish} is replaced by the wish",
    )
    item: str = Field("- {caption}\n", description="template of one liked image in the history")
    count: Positive = Field(6, description="maximum number of keywords")
    max_tokens: Positive = Field(48, description="maximum tokens of an answer")
    allowed: tuple[str, ...] | None = Field(
        None, min_length=1, description="the only words an answer may contain; null parses free answers"
    )

    @field_validator("preference_prompt", "target_prompt", "item")
    @classmethod
    def _check_placeholder(cls, value: str, info: object) -> str:
        name = {"preference_prompt": "{history}", "target_prompt": "{wish}", "item": "{caption}"}[info.field_name]  # type: ignore[attr-defined]
        if name not in value:
            raise ValueError(f"has no {name}; put it where the text is to be inserted")
        return value


class ConditionWeights(Section):
    """Each part of the condition is multiplied by its weight; 0 leaves it out."""

    soft: Number = Field(1.0, ge=0, description="weight of the trained tokens")
    keywords: Number = Field(1.0, ge=0, description="weight of the keywords of what a user likes")
    target: Number = Field(1.0, ge=0, description="weight of the keywords of the wish")

    @model_validator(mode="after")
    def _check_some_weight(self) -> Self:
        if not (self.soft or self.keywords or self.target):
            raise ValueError("all weights are 0, which leaves no condition; raise one")
        return self


class PersonalizeModel(Model):
    """The frozen models and the trained soft prompts between them."""

    diffusion: str | None = Field(
        None, description="frozen image generator of diffusers: a folder or hub name, or needs.<part>"
    )
    language_model: str | None = Field(
        None, description="frozen causal language model of transformers: a folder or hub name, or needs.<part>"
    )
    clip: str | None = Field(
        None, description="CLIP that picks the best candidate and evaluates: a folder or hub name, or needs.<part>"
    )
    num_image_tokens: Positive = Field(
        2, description="trained tokens after the prompt, whose hidden states become the condition"
    )
    start_words: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="words whose tokens initialise the image tokens, in turn, such as [':', ',']; null is random",
    )
    num_prefix_tokens: Whole = Field(
        2, ge=0, description="trained keys and values before those of each layer; 0 is none"
    )
    prefix_projection: Positive | None = Field(
        None,
        description="width of the two layers that produce the prefixes (P-tuning v2); null trains the prefixes directly",
    )
    frozen_precision: FrozenPrecision = Field(
        "auto",
        description="precision of the frozen models; auto is bf16 on a GPU, else fp32; 8bit and 4bit need bitsandbytes",
    )
    keywords: Keywords = Field(default_factory=Keywords, description="how the language model is prompted for keywords")
    weights: ConditionWeights = Field(
        default_factory=ConditionWeights, description="weights of the parts of the condition in training"
    )
    keyword_dropout: Probability = Field(
        0.0,
        description="fraction of examples trained without preference keywords, so that the soft tokens learn them too",
    )
    min_snr: Number | None = Field(None, gt=0, description="min-SNR cap of the loss weight, such as 5; null is none")

    @field_validator("weights")
    @classmethod
    def _check_soft_weight(cls, value: ConditionWeights) -> ConditionWeights:
        if not value.soft:
            raise ValueError("soft is 0, so nothing would be trained; raise it")
        return value


class PersonalizeData(Data):
    """Records of users: what each liked, and a target image."""

    collection: Collection | None = Field(
        None, description="published data set to read: flickr, pog or ser; null is record files"
    )
    sequence_length: Positive = Field(600, description="maximum tokens of a prompt with history and target")
    history_length: Positive | None = Field(None, description="number of most recent liked items to use; null is all")
    image_size: Positive = Field(512, le=8192, description="side in pixels")
    captions: str | None = Field(
        None, description="file of captions by item, or folder of a captioning model; null uses those of the records"
    )
    pictures: str | None = Field(
        None, description="folder that image names are relative to; null is that of the records"
    )
    min_score: Number | None = Field(None, description="flickr: minimum score of a liked image; null is 4")


class PersonalizeSamples(GeneratorSamples):
    """Images that are generated during training, and defaults of `bottega generate`."""

    count: Positive = Field(8, description="number of users on the contact sheet")
    guidance: Number = Field(7.5, ge=0, description="classifier-free guidance scale; 1 is none")
    negative_prompt: str = Field("", description="what images should not show; guidance leads away from it")
    preference_weight: Probability = Field(
        2 / 3, description="weight of preference against target when the best weighting is picked"
    )
    weightings: tuple[ConditionWeights, ...] = Field(
        (
            ConditionWeights(),
            ConditionWeights(soft=1.25, keywords=1.25),
            ConditionWeights(soft=0.75, keywords=0.75),
        ),
        min_length=1,
        description="weights of soft tokens, keywords and target; one candidate is generated for each",
    )


class PersonalizeScheduler(Scheduler):
    """Linear warm-up and linear decay, as published."""

    name: SchedulerName = Field("linear", description="learning rate schedule")
    warmup_steps: Duration = Field(
        Interval(5, "percent"), description='length of the linear warm-up from 0: steps, "1 epoch" or "5%"'
    )


class PersonalizeTraining(Training):
    """Training with the published schedule of the learning rate."""

    scheduler: PersonalizeScheduler = Field(default_factory=PersonalizeScheduler, description="learning rate schedule")


class PersonalizeRecipe(Recipe):
    """A recipe of personalised image generation."""

    task: Literal["personalize"] = Field("personalize", description="generate images adapted to a user's taste")
    model: PersonalizeModel = Field(default_factory=PersonalizeModel, description="the model")
    data: PersonalizeData = Field(default_factory=PersonalizeData, description="the data")
    training: PersonalizeTraining = Field(
        default_factory=PersonalizeTraining, description="training length, batches, optimizer, schedule"
    )
    samples: PersonalizeSamples = Field(
        default_factory=PersonalizeSamples, description="images generated during training"
    )

    def find_missing_keys(self) -> list[tuple[str, str]]:
        missing = [
            (f"model.{key}", "missing; give a folder or a hub name")
            for key in ("diffusion", "language_model")
            if getattr(self.model, key) is None
        ]
        return super().find_missing_keys() + find_path_problems(self.data) + missing
