"""The recipe of personalised images: soft prompts between a frozen language model and a frozen image generator.

PMG (Shen et al., 2024): the language model reads what a person liked and says it in keywords and in a few hidden states;
a trained mapping makes those a condition for the generator, beside the words of the wish.
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
    """What the language model is asked, and how its answer is read. {history} and {wish} are filled in."""

    preference_prompt: str = Field(
        "A person liked these pictures:\n{history}\n\n"
        "Name up to {count} keywords for what they have in common: subjects, colours, style, mood. "
        "Answer with the keywords alone, separated by commas.\nKeywords:",
        description="asks for what a person likes; {history} is the captions",
    )
    target_prompt: str = Field(
        "A person wishes for this picture: {wish}\n\n"
        "Name up to {count} keywords for what it must show. "
        "Answer with the keywords alone, separated by commas.\nKeywords:",
        description="asks for what the picture must show; {wish} is the wish",
    )
    item: str = Field("- {caption}\n", description="one liked picture, in a history")
    count: Positive = Field(6, description="at most so many keywords")
    max_tokens: Positive = Field(48, description="the answer is cut at so many tokens")
    allowed: tuple[str, ...] | None = Field(
        None, min_length=1, description="the only words that may be answered; null reads whatever is said"
    )

    @field_validator("preference_prompt", "target_prompt", "item")
    @classmethod
    def _has_its_field(cls, value: str, info: object) -> str:
        name = {"preference_prompt": "{history}", "target_prompt": "{wish}", "item": "{caption}"}[info.field_name]  # type: ignore[attr-defined]
        if name not in value:
            raise ValueError(f"has no {name}, which is where it is filled in")
        return value


class ConditionWeights(Section):
    """Each part of the condition is multiplied by its weight; 0 leaves it out."""

    soft: Number = Field(1.0, ge=0, description="the trained tokens")
    keywords: Number = Field(1.0, ge=0, description="the keywords of what a person likes")
    target: Number = Field(1.0, ge=0, description="the keywords of the wish")

    @model_validator(mode="after")
    def _is_something(self) -> Self:
        if not (self.soft or self.keywords or self.target):
            raise ValueError("all weights are 0, which leaves no condition; raise one")
        return self


class PersonalizeModel(Model):
    diffusion: str | None = Field(
        None, description="frozen image generator of diffusers: a folder or hub name, or needs.<part>"
    )
    language_model: str | None = Field(
        None, description="frozen causal language model of transformers: a folder or hub name, or needs.<part>"
    )
    clip: str | None = Field(
        None, description="CLIP that picks among candidates and judges: a folder or hub name, or needs.<part>"
    )
    num_image_tokens: Positive = Field(2, description="learned tokens that ask for an image")
    start_words: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="image tokens begin as the tokens of these, in turn, such as [':', ',']; null draws them at random",
    )
    num_prefix_tokens: Whole = Field(2, ge=0, description="learned keys and values before each layer's own; 0 is none")
    prefix_projection: Positive | None = Field(
        None, description="prefixes come out of two layers of this width (P-tuning v2); null trains them themselves"
    )
    frozen_precision: FrozenPrecision = Field(
        "auto", description="of the frozen parts; auto is bf16 on a GPU and fp32 elsewhere; 8bit and 4bit: bitsandbytes"
    )
    keywords: Keywords = Field(default_factory=Keywords, description="what the language model is asked in words")
    weights: ConditionWeights = Field(
        default_factory=ConditionWeights, description="parts of the condition in training"
    )
    keyword_dropout: Probability = Field(
        0.0, description="share trained without the keywords of preference, so that the soft tokens must know it too"
    )
    min_snr: Number | None = Field(None, gt=0, description="cap on the weight of clean times, such as 5; null is none")

    @field_validator("weights")
    @classmethod
    def _learns(cls, value: ConditionWeights) -> ConditionWeights:
        if not value.soft:
            raise ValueError("soft is 0, so that nothing would learn; raise it")
        return value


class PersonalizeData(Data):
    collection: Collection | None = Field(
        None, description="whose layout is read: flickr, pog or ser as published; null is our own records"
    )
    sequence_length: Positive = Field(600, description="history and target are cut at so many tokens")
    history_length: Positive | None = Field(None, description="only the last so many liked items; null is all")
    image_size: Positive = Field(512, le=8192, description="side in pixels")
    captions: str | None = Field(
        None, description="file of captions by item, or the folder of a captioning model; null is as in the records"
    )
    pictures: str | None = Field(
        None, description="folder that the names of pictures are relative to; null is that of the records"
    )
    min_score: Number | None = Field(None, description="flickr: what has so many points or more is liked; null is 4")


class PersonalizeSamples(GeneratorSamples):
    count: Positive = Field(8, description="how many people the sheet shows")
    guidance: Number = Field(7.5, ge=0, description="how strongly the condition is followed; 1 is plain")
    negative_prompt: str = Field("", description="what pictures should not show; guidance leads away from it")
    preference_weight: Probability = Field(
        2 / 3, description="preference against target when the best of the weightings is picked"
    )
    weightings: tuple[ConditionWeights, ...] = Field(
        (
            ConditionWeights(),
            ConditionWeights(soft=1.25, keywords=1.25),
            ConditionWeights(soft=0.75, keywords=0.75),
        ),
        min_length=1,
        description="of soft tokens, keywords and target; one candidate is drawn for each",
    )


class PersonalizeScheduler(Scheduler):
    """As published: a linear warm-up and a linear decay."""

    name: SchedulerName = Field("linear", description="shape of the learning rate over the run")
    warmup_steps: Duration = Field(
        Interval(5, "percent"), description='linear rise from 0 to the peak: steps, "1 epoch" or "5%"'
    )


class PersonalizeTraining(Training):
    scheduler: PersonalizeScheduler = Field(
        default_factory=PersonalizeScheduler, description="the learning rate over the run"
    )


class PersonalizeRecipe(Recipe):
    task: Literal["personalize"] = Field("personalize", description="images of a target as one user would like it")
    model: PersonalizeModel = Field(default_factory=PersonalizeModel, description="the model")
    data: PersonalizeData = Field(default_factory=PersonalizeData, description="the data")
    training: PersonalizeTraining = Field(default_factory=PersonalizeTraining, description="how it is learned")
    samples: PersonalizeSamples = Field(
        default_factory=PersonalizeSamples, description="what the model draws while it learns"
    )

    def find_missing_keys(self) -> list[tuple[str, str]]:
        parts = [
            (f"model.{part}", "missing; give a folder or a hub name")
            for part in ("diffusion", "language_model")
            if getattr(self.model, part) is None
        ]
        return super().find_missing_keys() + find_path_problems(self.data) + parts
