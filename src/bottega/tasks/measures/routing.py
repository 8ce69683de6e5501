"""How experts are used, in numpy: how even their load is, and how much a choice says of the rule that holds.

n samples   k experts chosen for each   E experts   R rules
"""

from __future__ import annotations

import math

import numpy as np


def expert_load(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """[E] shares that add up to 1: how often each expert was chosen, of `chosen` [n, k]."""
    counts = np.bincount(np.asarray(chosen, np.int64).ravel(), minlength=num_experts)
    return counts / max(1, counts.sum())


def entropy(shares: np.ndarray) -> float:
    """In nats."""
    shares = shares[shares > 0]
    return float(-(shares * np.log(shares)).sum()) + 0.0  # no -0.0 of a single share


def load_entropy(shares: np.ndarray) -> float:
    """1 where all experts are used alike, 0 where one has everything; NaN where there is one alone."""
    return entropy(shares) / math.log(len(shares)) if len(shares) > 1 else math.nan


def count_rule_experts(rule: np.ndarray, chosen: np.ndarray, *, num_rules: int, num_experts: int) -> np.ndarray:
    """[R, E] counts: the row is the rule of a sample, the column the expert it was sent to first."""
    flat = np.asarray(rule, np.int64) * num_experts + np.asarray(chosen, np.int64)
    return np.bincount(flat, minlength=num_rules * num_experts).reshape(num_rules, num_experts)


def normalised_mutual_information(counts: np.ndarray) -> float:
    """The mutual information of rule and expert [R, E], as a share of the most there can be: 1 where the expert tells
    the rule, 0 where it says nothing of it. NaN where there is nothing to tell.

    Of n samples it is too large by about (R - 1)(E - 1) / 2n nats (Miller, 1955): 0.02 of 200 samples, 4 rules and experts.
    """
    shares = counts / max(1, counts.sum())
    of_rules, of_experts = entropy(shares.sum(1)), entropy(shares.sum(0))
    most = min(of_rules, math.log(counts.shape[1]))
    if most <= 0:
        return math.nan
    return max(0.0, of_rules + of_experts - entropy(shares.ravel())) / most


def routing_metrics(chosen: np.ndarray, num_experts: int, *, rule: np.ndarray | None = None) -> dict[str, float]:
    """`chosen` [n, k], the first of each the one it was sent to first; `rule` [n] where it is known."""
    if not len(chosen) or num_experts == 1:
        return {}
    shares = expert_load(chosen, num_experts)
    found = {"load_entropy": load_entropy(shares)}
    if rule is not None:
        counts = count_rule_experts(rule, chosen[:, 0], num_rules=int(rule.max()) + 1, num_experts=num_experts)
        found["rule_information"] = normalised_mutual_information(counts)
    found |= {f"load/{expert}": float(share) for expert, share in enumerate(shares)}
    return {name: value for name, value in found.items() if not math.isnan(value)}
