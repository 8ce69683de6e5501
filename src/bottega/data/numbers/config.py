"""Synthetic samples with a known rule: what a recipe says of them, and how many inputs they take."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from bottega.config.data import Data, HeldOut, Source
from bottega.config.section import Number, Positive, Probability, Section, Whole

Difficulty = Literal["plain", "hard"]

MAX_RULES = 64
"""Rules, and labels."""
GRID_DIMENSIONS = 2
"""Directions of the hard content: in so few, no line tells the cells of one label from the others. With 5 x 5 cells and
64 units, a network for all four rules is right for 0.70, and one for each rule for 0.88 (Bayes 0.94, 50,000 samples); with
4 x 4 x 4 cells it was 0.56 and 0.78, with 3 x 3 x 3 0.84 and 0.92."""
_OURS = ("rule", "rules", "num_samples")


def count_cells(num_labels: int, difficulty: Difficulty) -> int:
    """Places that the content is drawn from. A rule says the label of each; two rules seldom the same one."""
    return max(8, 2 * num_labels) if difficulty == "plain" else compute_grid_side(num_labels) ** GRID_DIMENSIONS


def compute_grid_side(num_labels: int) -> int:
    """Six cells for each label, or a few more."""
    return math.ceil((6 * num_labels) ** (1 / GRID_DIMENSIONS))


def count_content_dimensions(num_labels: int, difficulty: Difficulty) -> int:
    """In how many directions the cells lie: each in its own, or all of them on one grid."""
    return count_cells(num_labels, difficulty) if difficulty == "plain" else GRID_DIMENSIONS


def _made(values: Any) -> Any:
    """Who says how many samples of which rule means samples that are made. A plain source is one of ours, too."""
    if type(values) in (Source, HeldOut):
        values = {name: getattr(values, name) for name in values.model_fields_set}
    if isinstance(values, dict) and any(values.get(key) is not None for key in _OURS):
        said = any(values.get(key) is not None for key in ("kind", "path", "split"))
        return values if said else {**values, "kind": "synthetic"}
    return values


def _check_made(source: Source) -> None:
    if source.kind == "synthetic":
        if source.path is not None:
            raise ValueError(f"path: synthetic data is made and not read; leave out kind or {source.path!r}")
        if source.split is not None:
            raise ValueError(f"split: synthetic data is drawn anew; leave out kind or split {source.split!r}")
        return
    for key in _OURS:
        if getattr(source, key, None) is not None:
            raise ValueError(f"{key}: is of synthetic data, and this is read from a file; leave it out, or use limit")


class RoutingSource(Source):
    rule: Whole | None = Field(None, ge=0, description="synthetic: which rules of the family; null is 0")
    num_samples: Positive | None = Field(None, description="synthetic: how many samples; null is data.num_samples")

    _kind = model_validator(mode="before")(_made)

    @model_validator(mode="after")
    def _is_made_or_read(self) -> RoutingSource:
        _check_made(self)
        return self


class RoutingHeldOut(HeldOut):
    rules: tuple[Whole, ...] | None = Field(
        None, min_length=1, description="synthetic: of these rules; null is those that are learned"
    )
    num_samples: Positive | None = Field(
        None, description="synthetic: how many other samples of each; null is data.num_samples"
    )

    _kind = model_validator(mode="before")(_made)

    @model_validator(mode="after")
    def _is_made_or_read(self) -> RoutingHeldOut:
        _check_made(self)
        return self


class VectorAugmentation(Section):
    enabled: bool = Field(True, description="whether it is applied")
    noise_level: Number = Field(0.0, ge=0, description="standard deviation of added noise")
    mask_probability: Probability = Field(0.0, description="share of inputs set to 0")


class RoutingData(Data):
    train: RoutingSource = Field(
        RoutingSource(kind="synthetic"), description="what is learned from; synthetic has a known rule"
    )
    sources: tuple[RoutingSource, ...] | None = Field(
        None, min_length=1, description="several sources in place of train"
    )
    validation: RoutingHeldOut | None = Field(
        RoutingHeldOut(split=0.2), description="what measures progress: {split: 0.2} or a source"
    )
    test: RoutingHeldOut | None = Field(None, description="what measures the result, never looked at while training")
    num_samples: Positive = Field(1000, description="synthetic: how many samples")
    num_inputs: Positive = Field(100, description="synthetic: width of a sample")
    num_rules: Positive = Field(4, le=MAX_RULES, description="synthetic: rules, of which one holds for a sample")
    num_labels: Whole = Field(4, ge=2, le=MAX_RULES, description="synthetic: classes")
    label_noise: Probability = Field(0.05, description="synthetic: share of labels that are another than the rule's")
    difficulty: Difficulty = Field(
        "plain", description="synthetic: within a rule labels are told by a line, or by a grid of cells (hard)"
    )
    separation: Number = Field(
        6.0, gt=0, description="synthetic: distance of rules, and of cells, in deviations of the noise; less overlaps"
    )
    rule_seed: Whole = Field(
        0, ge=0, description="synthetic: another seed is another family of rules, over other content"
    )
    augmentation: VectorAugmentation | None = Field(None, description="changed copies of the training samples")

    @property
    def is_synthetic(self) -> bool:
        """Whether all of it is synthetic, and so what these keys say of its rules and labels is so."""
        held_out = [one for one in (self.validation, self.test) if one is not None and not isinstance(one.split, float)]
        return all(one.kind == "synthetic" for one in (*(self.sources or (self.train,)), *held_out)) and not self.replay

    @model_validator(mode="after")
    def _possible(self) -> RoutingData:
        chance = (self.num_labels - 1) / self.num_labels
        if self.label_noise >= chance:
            raise ValueError(
                f"label_noise: with {self.label_noise:g} the rule's label is no likelier than another of {self.num_labels}; "
                f"give less than {chance:.4g}"
            )
        needed = self.num_rules + count_content_dimensions(self.num_labels, self.difficulty)
        if self.num_inputs < needed:
            raise ValueError(
                f"num_inputs: {self.num_inputs} are too few for {self.num_rules} rules and {self.num_labels} labels "
                f"({self.difficulty}); give {needed} or more"
            )
        for name, part in (("validation", self.validation), ("test", self.test)):
            if self.mixture == "sequence" and part is not None and part.rules is not None:
                raise ValueError(f"{name}.rules: a sequence measures what is left of its own sources; leave it out")
        if self.replay is not None and self.replay.kind == "synthetic":
            raise ValueError(
                "replay: earlier rules are the first of data.sources; say mixture: sequence, with the technique replay"
            )
        return self
