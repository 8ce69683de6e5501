"""Size of a model and of its training: parameters in all, trainable and active, and the compute of a sample."""

from __future__ import annotations

from bottega.config.recipe import Recipe
from bottega.core.callback import Progress
from bottega.core.engine import Engine
from bottega.data.loading.loader import Loader


def count_parameters(engine: Engine) -> dict[str, int]:
    """Return the numbers of parameters, with their names in environment.json."""
    parameters = engine.parameters().values()
    return {
        "parameters": sum(parameter.size for parameter in parameters),
        "trainable_parameters": sum(parameter.size for parameter in parameters if parameter.is_trainable),
        "active_parameters": engine.num_active_parameters(),
    }


def describe_parameters(engine: Engine) -> str:
    """Return the number of parameters, as "1,000 parameters" or "8 of 1,000 parameters trainable"."""
    counts = count_parameters(engine)
    num_trainable, total = counts["trainable_parameters"], counts["parameters"]
    return f"{total:,} parameters" if num_trainable == total else f"{num_trainable:,} of {total:,} parameters trainable"


def measure_compute(recipe: Recipe, engine: Engine, loader: Loader, progress: Progress) -> dict[str, float]:
    """Return the compute of a sample and the rate of the devices, if `logging.resources` is on and there is a step to train.

    Every rank measures, because a loss may communicate; the rate is that of all ranks together.
    """
    if not recipe.logging.resources or progress.step >= progress.total:
        return {}
    compute = engine.measure_compute(loader.batch(progress.step))
    if "matmul_rate" in compute:
        compute["matmul_rate"] *= engine.world_size
    return compute
