"""Metrics of expert routing in NumPy: evenness of the load, and mutual information of experts and rules.

n samples, k experts chosen for each, E experts, R rules.
"""

from __future__ import annotations

import math

import numpy as np


def expert_load(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """Return the fraction of choices of each expert (E,), from `chosen` (n, k)."""
    counts = np.bincount(np.asarray(chosen, np.int64).ravel(), minlength=num_experts)
    return counts / max(1, counts.sum())


def entropy(fractions: np.ndarray) -> float:
    """Return the entropy of fractions that sum to 1, in nats."""
    fractions = fractions[fractions > 0]
    return float(-(fractions * np.log(fractions)).sum()) + 0.0  # avoids -0.0 for a single fraction


def load_entropy(fractions: np.ndarray) -> float:
    """Return the normalised entropy: 1 for an even load, 0 if one expert has all of it; NaN for a single expert."""
    return entropy(fractions) / math.log(len(fractions)) if len(fractions) > 1 else math.nan


def count_rule_experts(rule: np.ndarray, chosen: np.ndarray, *, num_rules: int, num_experts: int) -> np.ndarray:
    """Return counts (R, E): rows are the rules of samples, columns their first experts."""
    flat = np.asarray(rule, np.int64) * num_experts + np.asarray(chosen, np.int64)
    return np.bincount(flat, minlength=num_rules * num_experts).reshape(num_rules, num_experts)


def normalised_mutual_information(counts: np.ndarray) -> float:
    """Return the mutual information of rules and experts from counts (R, E), over its maximum; NaN if that is 0.

    1 if the expert determines the rule, 0 if they are independent. With n samples the estimate is too large by
    about (R - 1)(E - 1) / 2n nats (Miller, 1955): 0.02 nats with 200 samples, 4 rules and 4 experts.
    """
    joint = counts / max(1, counts.sum())
    rule_entropy, expert_entropy = entropy(joint.sum(1)), entropy(joint.sum(0))
    maximum = min(rule_entropy, math.log(counts.shape[1]))
    if maximum <= 0:
        return math.nan
    return max(0.0, rule_entropy + expert_entropy - entropy(joint.ravel())) / maximum


def routing_metrics(chosen: np.ndarray, num_experts: int, *, rule: np.ndarray | None = None) -> dict[str, float]:
    """Return metrics of `chosen` (n, k), the first expert of each sample first; `rule` (n,) if the rules are known."""
    if not len(chosen) or num_experts == 1:
        return {}
    load = expert_load(chosen, num_experts)
    metrics = {"load_entropy": load_entropy(load)}
    if rule is not None:
        counts = count_rule_experts(rule, chosen[:, 0], num_rules=int(rule.max()) + 1, num_experts=num_experts)
        metrics["rule_information"] = normalised_mutual_information(counts)
    metrics |= {f"load/{expert}": float(fraction) for expert, fraction in enumerate(load)}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}
