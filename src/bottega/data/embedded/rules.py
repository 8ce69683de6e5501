"""Synthetic samples with a known Bayes posterior: a gate identifies the rule, and the rule maps the content to the label.

x (d) consists of gate inputs and content inputs, each a point plus Gaussian noise of standard deviation 1. The rule and
the cell of the content are independent, and the label depends on both: a cell has different labels under different rules.
So the posterior of the label is a sum over rules and cells.

R rules   K cells   C labels   n samples   d inputs
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import final

import numpy as np

from bottega.core.noise import numpy_generator
from bottega.data.numbers.config import (
    GRID_DIMENSIONS,
    Difficulty,
    RoutingData,
    RoutingHeldOut,
    RoutingSource,
    compute_grid_side,
    count_cells,
    count_content_dimensions,
)
from bottega.data.tables.cache import get_or_build
from bottega.storage.cache_folder import default_cache

SAMPLES_PER_BLOCK = 1024
"""Number of samples drawn by one generator; a generator for each sample would take most of the time."""
STEPS_PER_UNIT = 1 << 10
"""Inputs are multiples of 1 / STEPS_PER_UNIT, so that the last bits of a matrix product, which differ between processors,
are not in the data or its fingerprint."""
SAMPLES_PER_SPLIT = 1 << 40
"""Distance between the first sample numbers of two splits, so that held-out samples differ from training samples."""
NUM_BAYES_SAMPLES = 1 << 17
"""Samples over which the Bayes accuracy is averaged."""
# Part of the cache key. Increase it when the same options would give different samples.
FORMAT = 4


@final
@dataclass(frozen=True)
class RuleOptions:
    """Options of one family of rules; validated by the schema of the recipe."""

    num_inputs: int = 100
    num_rules: int = 4
    num_labels: int = 4
    label_noise: float = 0.05
    difficulty: Difficulty = "plain"
    separation: float = 6.0
    rule_seed: int = 0
    """Seed of all families; it determines the positions of the content cells, which they share."""
    rule: int = 0
    """Index of the family, which determines its gates and labels; continual learning and adaptation use several."""

    @property
    def num_cells(self) -> int:
        return count_cells(self.num_labels, self.difficulty)

    @property
    def gate_inputs(self) -> int:
        """Number of gate inputs: a quarter of all, unless the rules or the content need more."""
        max_gate_inputs = self.num_inputs - count_content_dimensions(self.num_labels, self.difficulty)
        return max(self.num_rules, min(self.num_inputs // 4, max_gate_inputs))


@final
@dataclass(frozen=True)
class RuleFamily:
    """One family of rules: positions of gates and cells, and the label that each rule gives each cell."""

    options: RuleOptions

    @cached_property
    def gates(self) -> np.ndarray:
        """Gate points (R, gate inputs), all at equal distance from each other."""
        o = self.options
        return _draw_orthonormal_rows(o.num_rules, o.gate_inputs, o.rule_seed, "gates", o.rule) * (
            o.separation / np.sqrt(2)
        )

    @cached_property
    def cells(self) -> np.ndarray:
        """Cell points (K, content inputs)."""
        o = self.options
        inputs = o.num_inputs - o.gate_inputs
        basis = _draw_orthonormal_rows(
            count_content_dimensions(o.num_labels, o.difficulty), inputs, o.rule_seed, "cells"
        )
        if o.difficulty == "plain":
            return basis * (o.separation / np.sqrt(2))
        side = compute_grid_side(o.num_labels)
        grid_points = np.stack(np.meshgrid(*[np.arange(side)] * GRID_DIMENSIONS, indexing="ij"), axis=-1).reshape(
            -1, GRID_DIMENSIONS
        )
        return (grid_points - (side - 1) / 2) * o.separation @ basis

    @cached_property
    def labels(self) -> np.ndarray:
        """Label of each cell under each rule, (R, K).

        Among C consecutive rules, no two agree on any cell. No two rules are equal, and each rule uses all labels.
        """
        o, C = self.options, self.options.num_labels
        rng = numpy_generator("rules", o.rule_seed, "labels", o.rule)
        latin_cells = rng.permutation(o.num_cells)[:C]
        rows: list[np.ndarray] = []
        while len(rows) < o.num_rules:
            drawn = rng.permuted(np.tile(np.arange(C)[:, None], (1, o.num_cells)), axis=0)
            # Only one in 6,000 random rules of 64 labels and 128 cells uses all labels; with a Latin square every rule does.
            drawn[:, latin_cells] = (rng.permutation(C)[:, None] + rng.permutation(C)) % C
            new_rows = drawn[: o.num_rules - len(rows)]
            if not any((new_row == row).all() for new_row in new_rows for row in rows):
                rows += list(new_rows)
        return np.stack(rows)


@cache
def get_rule_family(options: RuleOptions) -> RuleFamily:
    """Return the family of rules that `options` define; families are cached."""
    return RuleFamily(options)


def _draw_orthonormal_rows(num_rows: int, num_columns: int, *seed: object) -> np.ndarray:
    """Return randomly rotated orthonormal rows (rows, columns)."""
    q, r = np.linalg.qr(numpy_generator("rules", *seed).standard_normal((num_columns, num_rows)))
    # The signs depend on the LAPACK library, so make the diagonal of r positive.
    return (q * np.sign(np.diagonal(r))).T


def draw_samples(options: RuleOptions, first: int, count: int) -> dict[str, np.ndarray]:
    """Return `count` samples from number `first`, each a function of its number: x float32 (n, d), label and rule int32 (n)."""
    blocks: dict[str, list[np.ndarray]] = {"x": [], "label": [], "rule": []}
    for block in range(first // SAMPLES_PER_BLOCK, -(-(first + count) // SAMPLES_PER_BLOCK)):
        start = block * SAMPLES_PER_BLOCK
        selected = slice(max(0, first - start), min(SAMPLES_PER_BLOCK, first + count - start))
        for name, values in _draw_block(options, block).items():
            blocks[name].append(values[selected])
    return {name: np.concatenate(values) for name, values in blocks.items()}


def _draw_block(options: RuleOptions, block: int) -> dict[str, np.ndarray]:
    family, C = get_rule_family(options), options.num_labels
    rng = numpy_generator("rules", options.rule_seed, "block", options.rule, block)
    rule = rng.integers(options.num_rules, size=SAMPLES_PER_BLOCK)
    cell = rng.integers(options.num_cells, size=SAMPLES_PER_BLOCK)
    x = rng.standard_normal((SAMPLES_PER_BLOCK, options.num_inputs))
    is_flipped = rng.random(SAMPLES_PER_BLOCK) < options.label_noise
    label_shift = rng.integers(1, C, size=SAMPLES_PER_BLOCK)
    x[:, : options.gate_inputs] += family.gates[rule]
    x[:, options.gate_inputs :] += family.cells[cell]
    label = (family.labels[rule, cell] + np.where(is_flipped, label_shift, 0)) % C
    return {
        "x": (np.rint(x * STEPS_PER_UNIT) / STEPS_PER_UNIT).astype(np.float32),
        "label": label.astype(np.int32),
        "rule": rule.astype(np.int32),
    }


def compute_label_posterior(options: RuleOptions, x: np.ndarray) -> np.ndarray:
    """Return the posterior of the label, `(samples, labels)`, of x `(samples, d)`, from the true densities."""
    family, C = get_rule_family(options), options.num_labels
    x = np.asarray(x, np.float64)
    rule_probability = _compute_posterior(x[:, : options.gate_inputs], family.gates)
    cell_probability = _compute_posterior(x[:, options.gate_inputs :], family.cells)
    clean_posterior = np.zeros((len(x), C))
    for label in range(C):
        clean_posterior[:, label] = np.einsum(
            "nr,nr->n", rule_probability, cell_probability @ (family.labels == label).T
        )
    return (1 - options.label_noise) * clean_posterior + options.label_noise * (1 - clean_posterior) / (C - 1)


def compute_rule_posterior(options: RuleOptions, x: np.ndarray) -> np.ndarray:
    """Return the posterior of the rule, `(samples, rules)`."""
    return _compute_posterior(np.asarray(x, np.float64)[:, : options.gate_inputs], get_rule_family(options).gates)


def _compute_posterior(x: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the posterior (n, points) of x (n, d) for unit Gaussians around equally likely points."""
    logits = x @ points.T - (points**2).sum(axis=1) / 2
    likelihood = np.exp(logits - logits.max(axis=1, keepdims=True))
    return likelihood / likelihood.sum(axis=1, keepdims=True)


@cache
def compute_bayes_accuracy(options: RuleOptions) -> float:
    """Return the Bayes accuracy: the mean of the largest posterior, over samples that are not used for training."""
    total = 0.0
    for block in range(NUM_BAYES_SAMPLES // SAMPLES_PER_BLOCK):
        x = draw_samples(options, 3 * SAMPLES_PER_SPLIT + block * SAMPLES_PER_BLOCK, SAMPLES_PER_BLOCK)["x"]
        total += float(compute_label_posterior(options, x).max(axis=1).sum())
    return total / NUM_BAYES_SAMPLES


def build_rule_options(data: RoutingData, *, rule: int | None) -> RuleOptions:
    """Return the options of a recipe's data section; `rule` None is rule 0."""
    return RuleOptions(
        num_inputs=data.num_inputs,
        num_rules=data.num_rules,
        num_labels=data.num_labels,
        label_noise=data.label_noise,
        difficulty=data.difficulty,
        separation=data.separation,
        rule_seed=data.rule_seed,
        rule=rule or 0,
    )


def materialise_training(data: RoutingData, source: RoutingSource, *, number: int) -> Path:
    """Write the training samples of source `number` of the recipe; those of two sources differ, even with the same rule."""
    options = build_rule_options(data, rule=source.rule)
    return materialise_rules(
        options, first=number * (SAMPLES_PER_SPLIT >> 10), count=source.num_samples or data.num_samples
    )


def materialise_held_out(data: RoutingData, held_out: RoutingHeldOut, *, table: str) -> Iterator[Path]:
    """Yield a folder of held-out samples for each of `held_out.rules`, or for each training source."""
    training_rules = [source.rule for source in data.sources or (data.train,) if source.kind == "synthetic"]
    first_of_split = {"validation": 1, "test": 2}[table] * SAMPLES_PER_SPLIT
    for number, rule in enumerate(held_out.rules or training_rules):
        first = first_of_split + number * (SAMPLES_PER_SPLIT >> 10)
        yield materialise_rules(
            build_rule_options(data, rule=rule), first=first, count=held_out.num_samples or data.num_samples
        )


def materialise_rules(options: RuleOptions, *, first: int, count: int) -> Path:
    """Write `count` samples from number `first` to the cache; return their folder of .npy files, one per field."""
    key = hashlib.sha256(repr((FORMAT, options, first, count)).encode()).hexdigest()[:16]
    name = f"rule-{options.rule_seed}-{options.rule}"

    def build(folder: Path) -> None:
        (folder / name).mkdir(exist_ok=True)
        fields = draw_samples(options, first, count)
        best_probability = compute_label_posterior(options, fields["x"]).max(axis=1)
        fields["bayes"] = (
            np.rint(best_probability * STEPS_PER_UNIT * STEPS_PER_UNIT) / (STEPS_PER_UNIT * STEPS_PER_UNIT)
        ).astype(np.float32)
        for field, values in fields.items():
            np.save(folder / name / f"{field}.npy", values.astype(values.dtype.newbyteorder("<")), allow_pickle=False)

    return get_or_build(default_cache() / "embedded", f"rules-{key}", build) / name
