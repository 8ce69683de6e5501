"""Reports of a routing run: a summary in text, a plot of the expert load by rule, and a raster plot of spikes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bottega.plots.heatmap import plot_experts
from bottega.plots.spikes import plot_spikes
from bottega.tasks.metrics.routing import load_entropy, normalised_mutual_information

MAX_SAMPLES = 4
"""Samples in a raster plot, side by side."""


def describe_routing(
    *,
    accuracy: float,
    bayes_accuracy: float | None,
    samples: str,
    load: np.ndarray,
    counts: np.ndarray | None,
    top_k: int,
    firing_rate: float | None,
) -> str:
    """Return a report of the accuracy, the expert load and the rules that each expert receives.

    `samples` describes the samples in words, such as "300 held-out samples"; `load` is (experts,); `counts` (rules, experts) counts each sample for the first of its `top_k` experts.
    """
    optimum = f" (Bayes-optimal {bayes_accuracy:.4f})" if bayes_accuracy is not None else ""
    lines = [f"accuracy      {accuracy:.4f} on {samples}{optimum}"]
    if len(load) > 1:
        lines.append(f"load          {'  '.join(f'{fraction:.3f}' for fraction in load)}")
        lines.append(f"load entropy  {load_entropy(load):.4f} (1 is an even load)")
    if counts is not None and len(load) > 1:
        information = normalised_mutual_information(counts)
        lines.append(
            f"information   {information:.4f} (normalised mutual information of rule and {_name_expert(top_k)})"
        )
    if firing_rate is not None:
        lines.append(f"firing rate   {firing_rate:.4f} spikes per unit and time step")
    if counts is not None and len(load) > 1:
        width = max(7, len(f"{counts.max():,}") + 2)
        lines += [
            "",
            "rule" + "".join(f"{f'e{e}':>{width}}" for e in range(counts.shape[1])) + f"   ({_name_expert(top_k)})",
        ]
        lines += [f"{rule:<4}" + "".join(f"{cell:>{width},}" for cell in row) for rule, row in enumerate(counts)]
    return "\n".join(lines)


def _name_expert(top_k: int) -> str:
    return "expert" if top_k == 1 else f"the first of {top_k} experts"


def format_fractions(counts: np.ndarray) -> list[str]:
    """Return fractions with two digits that sum to 1, by rounding up those with the largest remainders."""
    percentages = 100 * counts / max(float(counts.sum()), 1e-12)
    floors = np.floor(percentages + 1e-9).astype(int)
    if counts.sum() > 0:
        floors[np.argsort(floors - percentages, kind="stable")[: 100 - floors.sum()]] += 1
    return [f"{value / 100:.2f}" for value in floors]


def draw_experts(load: np.ndarray, counts: np.ndarray | None, path: Path, *, top_k: int = 1) -> None:
    """Plot how often each expert is chosen, `load` (experts,), and for which rule, `counts` (rules, experts) or None."""
    if counts is None:
        subtitle = "the rules of these samples are unknown"
    else:
        subtitle = "fraction of each rule's samples" + (f", by the first of {top_k} experts" if top_k > 1 else "")
    cells = [format_fractions(row) for row in counts] if counts is not None else []
    plot_experts(load, counts, path, load_labels=format_fractions(load), cell_labels=cells, subtitle=subtitle)


def draw_raster(spikes: np.ndarray, num_layers: int, path: Path) -> None:
    """Plot spikes (steps, batch, layers * units) of the first samples."""
    plot_spikes([layer[:, :MAX_SAMPLES] for layer in np.split(spikes, num_layers, axis=2)], path)
