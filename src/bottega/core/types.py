"""The words the parts of Bottega use with each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Array = Any
"""A host array (numpy) or a device array (torch, jax), whichever side of the engine one stands on."""

Batch = Mapping[str, Any]
"""A (nested) dict of arrays whose first axis is the example."""

Sums = dict[str, tuple[Array, Array]]
"""name -> (sum, count): the mean is taken last, so it is exact under any split."""

Rows = dict[str, np.ndarray]
"""name -> [n, ...]: what was found for each example of a data set, in their order."""

Tensors = Mapping[str, np.ndarray]
"""name -> host array; one file of a checkpoint."""

Models = Mapping[str, Any]
"""The models of a task, by name. The trained one is "model"; the others are frozen."""


class Loss(NamedTuple):
    """What one (micro-)batch says.

    Each term is a sum over examples with a weight. Its count comes from `Task.counts`, reduced over the whole global
    batch beforehand, so the engine back-propagates sum(weight * total / count) and any split gives the same mean.
    """

    terms: dict[str, tuple[Array, float]]
    metrics: Sums = {}  # noqa: RUF012  (a default of a NamedTuple, never changed)
    rows: dict[str, Array] = {}  # noqa: RUF012
    """Of each example, first axis the example: what `Task.score` needs in an evaluation, and what `Task.update_inputs`
    names while training."""
    stats: dict[str, Array] = {}  # noqa: RUF012
    """What `Task.update` learns from while training: sums over the examples, of any shape."""
