"""Statistics of each module in one training step in JAX: gradient norm, update-to-weight ratio and fraction of dead units.

They are computed in every step, because they are reductions that the compiler fuses with the update; only `fetch` costs time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from bottega.engines.module_groups import Statistics, group_by_module
from bottega.models.jax_layers import Embedding, Module

Array = Any


class ModuleStatistics:
    """Computes norms of each parameter on the device, and adds them up by module on the host."""

    def __init__(self, model: Module) -> None:
        shapes = {name: variable.shape for name, variable in model.variables().items()}
        self._module_of = group_by_module(list(shapes))
        embeddings = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Embedding)}
        # Rows of an embedding have no gradient if their token is absent, so they are no units.
        self._num_units = {
            name: shape[0] for name, shape in shapes.items() if len(shape) >= 2 and name not in embeddings
        }

    def compute(
        self, gradients: Mapping[str, Array], old: Mapping[str, Array], new: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the norms of gradients, changes and weights, and the number of dead units, each (parameters,)."""
        norms: dict[str, list[Array]] = {"gradient": [], "dead": [], "change": [], "weight": []}
        for name, gradient in gradients.items():
            squares = jnp.square(gradient)
            norm = jnp.sqrt(jnp.sum(squares))
            norms["gradient"].append(norm)
            if name in self._num_units:
                is_dead = jnp.sum(squares, axis=tuple(range(1, squares.ndim))) == 0
                # Adding 0 times the norm makes the count of a gradient that is not finite NaN, not 0.
                norms["dead"].append(jnp.sum(is_dead) + 0.0 * norm)
            else:
                norms["dead"].append(jnp.zeros(()))
            norms["change"].append(jnp.sqrt(jnp.sum(jnp.square(new[name] - old[name]))))
            norms["weight"].append(jnp.sqrt(jnp.sum(jnp.square(old[name]))))
        return {name: jnp.stack(values) for name, values in norms.items() if values}

    def fetch(self, names: Sequence[str], norms: Mapping[str, Any]) -> Statistics:
        """Return the statistics by module, from the norms of the parameters `names`; waits for the device.

        A module has no `dead_fraction` if none of its parameters has units, and no `update_ratio` if its weights are 0.
        """
        values = {name: np.asarray(array, np.float64) for name, array in norms.items()}
        statistics: Statistics = {}
        for module in dict.fromkeys(self._module_of[name] for name in names):
            rows = [i for i, name in enumerate(names) if self._module_of[name] == module]
            gradient, change, weight = (
                math.sqrt(np.square(values[name][rows]).sum()) for name in ("gradient", "change", "weight")
            )
            num_units = sum(self._num_units.get(names[i], 0) for i in rows)
            statistics[module] = {"gradient_norm": gradient}
            if weight:
                statistics[module]["update_ratio"] = change / weight
            if num_units:
                statistics[module]["dead_fraction"] = float(values["dead"][rows].sum()) / num_units
        return statistics
