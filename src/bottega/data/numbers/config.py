"""The `data` section of the routing task: rows of numbers from files, or synthetic ones with known rules."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from bottega.config.data import Data, ExactDeduplication, HeldOut, Source
from bottega.config.section import Number, Positive, Probability, Section, Whole

Difficulty = Literal["plain", "hard"]

MAX_RULES = 64
"""Largest number of rules, and of labels."""
GRID_DIMENSIONS = 2
"""Dimensions of the grid of cells with `difficulty: hard`: few enough that labels are not linearly separable. With 5 x 5
cells, one network of 64 units for all four rules has an accuracy of 0.70, and a network for each rule has 0.88 (Bayes 0.94,
50,000 samples). The two accuracies are 0.56 and 0.78 with 4 x 4 x 4 cells, and 0.84 and 0.92 with 3 x 3 x 3 cells."""
_SYNTHETIC_KEYS = ("rule", "rules", "num_samples")


def count_cells(num_labels: int, difficulty: Difficulty) -> int:
    """Return the number of cells that the content is drawn from. Each rule maps cells to labels."""
    return max(8, 2 * num_labels) if difficulty == "plain" else compute_grid_side(num_labels) ** GRID_DIMENSIONS


def compute_grid_side(num_labels: int) -> int:
    """Return the side of the grid, for at least six cells per label."""
    return math.ceil((6 * num_labels) ** (1 / GRID_DIMENSIONS))


def count_content_dimensions(num_labels: int, difficulty: Difficulty) -> int:
    """Return the number of dimensions that the cells span: one for each cell, or those of the grid."""
    return count_cells(num_labels, difficulty) if difficulty == "plain" else GRID_DIMENSIONS


def _infer_synthetic(values: Any) -> Any:
    """Set `kind: synthetic` for a source that sets keys of synthetic data and no file."""
    if type(values) in (Source, HeldOut):
        values = {name: getattr(values, name) for name in values.model_fields_set}
    if isinstance(values, dict) and any(values.get(key) is not None for key in _SYNTHETIC_KEYS):
        is_explicit = any(values.get(key) is not None for key in ("kind", "path", "split"))
        return values if is_explicit else {**values, "kind": "synthetic"}
    return values


def _check_synthetic_keys(source: Source) -> None:
    if source.kind == "synthetic":
        if source.path is not None:
            raise ValueError(
                f"path: synthetic data is generated, not read; remove kind: synthetic or path: {source.path!r}"
            )
        if source.split is not None:
            raise ValueError(f"split: synthetic data has no splits; remove kind: synthetic or split: {source.split!r}")
        return
    for key in _SYNTHETIC_KEYS:
        if getattr(source, key, None) is not None:
            raise ValueError(
                f"{key}: applies to synthetic data only, and this source is a file; remove it, or use limit"
            )


class RoutingSource(Source):
    """A training source: a file, or synthetic samples of one set of rules."""

    rule: Whole | None = Field(None, ge=0, description="synthetic: index of the set of rules; null: 0")
    num_samples: Positive | None = Field(None, description="synthetic: number of samples; null: data.num_samples")

    _set_kind = model_validator(mode="before")(_infer_synthetic)

    @model_validator(mode="after")
    def _check_source(self) -> RoutingSource:
        _check_synthetic_keys(self)
        return self


class RoutingHeldOut(HeldOut):
    """Held-out data: a fraction of the training data, a file, or new synthetic samples."""

    rules: tuple[Whole, ...] | None = Field(
        None, min_length=1, description="synthetic: indices of the sets of rules; null: those of the training data"
    )
    num_samples: Positive | None = Field(
        None, description="synthetic: number of new samples of each set of rules; null: data.num_samples"
    )

    _set_kind = model_validator(mode="before")(_infer_synthetic)

    @model_validator(mode="after")
    def _check_source(self) -> RoutingHeldOut:
        _check_synthetic_keys(self)
        return self


class VectorAugmentation(Section):
    """Options of `data.augmentation` for vectors."""

    enabled: bool = Field(True, description="whether augmentation is on")
    noise_level: Number = Field(0.0, ge=0, description="standard deviation of added noise")
    mask_probability: Probability = Field(0.0, description="fraction of inputs set to 0")


class RoutingData(Data):
    """The `data` section of the routing task."""

    train: RoutingSource = Field(
        RoutingSource(kind="synthetic"), description="training data: a source, or synthetic samples with known rules"
    )
    sources: tuple[RoutingSource, ...] | None = Field(
        None, min_length=1, description="several sources instead of train"
    )
    validation: RoutingHeldOut | None = Field(
        RoutingHeldOut(split=0.2), description="validation data: {split: 0.2} or a source"
    )
    test: RoutingHeldOut | None = Field(None, description="test data, never used in training")
    num_samples: Positive = Field(1000, description="synthetic: number of samples")
    num_inputs: Positive = Field(100, description="synthetic: width of a sample")
    num_rules: Positive = Field(4, le=MAX_RULES, description="synthetic: number of rules; one applies to each sample")
    num_labels: Whole = Field(4, ge=2, le=MAX_RULES, description="synthetic: number of classes")
    label_noise: Probability = Field(0.05, description="synthetic: fraction of labels replaced by another one")
    difficulty: Difficulty = Field(
        "plain", description="synthetic: labels of a rule are linearly separable, or lie on a grid of cells (hard)"
    )
    separation: Number = Field(
        6.0,
        gt=0,
        description="synthetic: distance between rules, and between cells, in standard deviations of the noise",
    )
    rule_seed: Whole = Field(0, ge=0, description="synthetic: seed of the rules and cells")
    augmentation: VectorAugmentation | None = Field(None, description="augmentation of the training samples")
    deduplicate: ExactDeduplication | None = Field(None, description="drop duplicate samples; null keeps all")

    @property
    def is_synthetic(self) -> bool:
        """Whether all sources are synthetic, so that num_rules and num_labels are exact."""
        held_out = [
            source
            for source in (self.validation, self.test)
            if source is not None and not isinstance(source.split, float)
        ]
        return (
            all(source.kind == "synthetic" for source in (*(self.sources or (self.train,)), *held_out))
            and not self.replay
        )

    @model_validator(mode="after")
    def _check_sizes(self) -> RoutingData:
        max_label_noise = (self.num_labels - 1) / self.num_labels
        if self.label_noise >= max_label_noise:
            raise ValueError(
                f"label_noise: {self.label_noise:g} makes the correct label no more frequent than any other of "
                f"{self.num_labels}; "
                f"use less than {max_label_noise:.4g}"
            )
        min_inputs = self.num_rules + count_content_dimensions(self.num_labels, self.difficulty)
        if self.num_inputs < min_inputs:
            raise ValueError(
                f"num_inputs: {self.num_inputs} is too small for {self.num_rules} rules and {self.num_labels} labels "
                f"({self.difficulty}); use {min_inputs} or more"
            )
        for name, held_out in (("validation", self.validation), ("test", self.test)):
            if self.mixture == "sequence" and held_out is not None and held_out.rules is not None:
                raise ValueError(
                    f"{name}.rules: with mixture: sequence, evaluation uses the rules of its sources; remove it"
                )
        if self.replay is not None and self.replay.kind == "synthetic":
            raise ValueError(
                "replay: must not be synthetic; list the earlier rules first in data.sources, with mixture: sequence and the technique replay"
            )
        return self
