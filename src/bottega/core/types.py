"""Types shared by tasks, engines and the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A host array (numpy) outside the engine, a device array (torch, jax) inside."""

Batch = Mapping[str, Any]
"""A (nested) dict of arrays whose first axis is the example."""

Sums = dict[str, tuple[Array, Array]]
"""name -> (sum, count). The mean is taken last, so it is exact under any split into micro-batches and ranks."""

Rows = dict[str, np.ndarray]
"""name -> `(examples, ...)`: values for each example of a data set, in order."""

Tensors = Mapping[str, np.ndarray]
"""name -> host array: one file of a checkpoint."""

Models = Mapping[str, Any]
"""The models of a task, by name. The trained one is "model"; the others are frozen."""


class Loss(NamedTuple):
    """Output of `Task.loss` for one (micro-)batch.

    Each term is a sum over examples, `total`, and a weight. Its count comes from `Task.counts` over the whole global batch,
    so the engine back-propagates the sum over terms of weight * total / count, and any split gives the same mean.
    """

    terms: dict[str, tuple[Array, float]]
    metrics: Sums = {}  # noqa: RUF012  (a default of a NamedTuple, never changed)
    rows: dict[str, Array] = {}  # noqa: RUF012
    """Values per example, `(examples, ...)`: inputs of `Task.score` in an evaluation, and those named in
    `Task.update_inputs` while training."""
    stats: dict[str, Array] = {}  # noqa: RUF012
    """Inputs of `Task.update` while training: sums over the examples, of any shape."""
