"""Nearest-neighbour search over keys, by one matrix product or by FAISS for many keys.

Both are exact and give the same results: FAISS uses a flat inner-product index.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.models.memory.slots import gather_field, normalize_keys, similarity

NO_SCORE = float("-inf")


class SearchResult(NamedTuple):
    """Results of a search, best first. A missing result has score -inf, a value of zeros and slot index -1."""

    scores: Tensor
    """(..., Q, top_k): cosines."""
    values: Tensor
    """(..., Q, top_k, v)"""
    slot_indices: Tensor
    """(..., Q, top_k): index of the slot, counted over all levels."""

    @property
    def valid(self) -> Tensor:
        """(..., Q, top_k): whether there was a slot to return."""
        return self.slot_indices >= 0


def search_exact(keys: Tensor, values: Tensor, valid: Tensor, queries: Tensor, top_k: int) -> SearchResult:
    """Return the slots of (..., S) whose keys have the largest cosine with each query; ties keep their order."""
    _check_top_k(top_k)
    scores = similarity(normalize_keys(queries), keys).masked_fill(~valid[..., None, :], NO_SCORE)
    ranked = torch.sort(scores, dim=-1, descending=True, stable=True)
    num_results = min(top_k, scores.shape[-1])
    return _pad_results(ranked.values[..., :num_results], ranked.indices[..., :num_results], values, top_k)


def search_faiss(keys: Tensor, values: Tensor, valid: Tensor, queries: Tensor, top_k: int) -> SearchResult:
    """Return the same as `search_exact` with FAISS, for one memory on the CPU: keys (S, k), queries (Q, k)."""
    _check_top_k(top_k)
    faiss = _import_faiss()
    valid_indices = valid.nonzero().squeeze(-1)
    if not len(valid_indices):
        return search_exact(keys, values, valid, queries, top_k)
    index = faiss.IndexFlatIP(keys.shape[-1])
    index.add(np.ascontiguousarray(keys[valid_indices].detach().numpy(), np.float32))
    num_results = min(top_k, len(valid_indices))
    normalized = np.ascontiguousarray(normalize_keys(queries).detach().numpy(), np.float32)
    scores, rows = index.search(normalized, num_results)
    return _pad_results(torch.from_numpy(scores), valid_indices[torch.from_numpy(rows)], values, top_k)


def _pad_results(scores: Tensor, slot_indices: Tensor, values: Tensor, top_k: int) -> SearchResult:
    """Pad the results to `top_k`, and gather their values (..., S, v)."""
    missing = top_k - scores.shape[-1]
    scores = torch.nn.functional.pad(scores, (0, missing), value=NO_SCORE)
    slot_indices = torch.nn.functional.pad(slot_indices, (0, missing))
    is_valid = scores > NO_SCORE
    gathered = gather_field(values, slot_indices.flatten(-2)).unflatten(-2, slot_indices.shape[-2:])
    return SearchResult(scores, gathered * is_valid[..., None], slot_indices.masked_fill(~is_valid, -1))


def _check_top_k(top_k: int) -> None:
    if top_k < 1:
        raise UsageError(f"memory: top_k must be 1 or more, got {top_k}")


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise EnvironmentProblem("memory: by=faiss needs faiss; pip install 'bottega[faiss]'") from None
    return faiss
