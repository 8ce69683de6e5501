"""Notes on settings of a recipe that have no effect, or that the data or the model override."""

from __future__ import annotations

import math

from bottega.config.load import get_global_batch_size
from bottega.config.recipe import Recipe
from bottega.config.unused_options import list_unused_options
from bottega.core.errors import BottegaError
from bottega.engines.backend import open_backend
from bottega.run.compose import build_plain_loader, count_total_steps, describe_shortened_warmup
from bottega.tasks.personalize.config import PersonalizeRecipe
from bottega.techniques.training_plan import TrainingPlan
from bottega.world import World


def list_adjusted_settings(recipe: Recipe, plan: TrainingPlan) -> list[str]:
    """Return a note for each setting that the data or the model overrides."""
    data_size = World.from_environment().data_size
    loader = build_plain_loader(recipe, plan.training, data_size=data_size, order=plan.order)
    lines = describe_shortened_warmup(recipe, count_total_steps(recipe, loader), round(loader.steps_per_epoch))
    backend = open_backend(recipe.engine)
    return [*lines, *backend.describe_optimizer(plan.task, recipe.training, seed=recipe.seed)]


def list_unused_settings(recipe: Recipe) -> list[str]:
    """Return a note for each setting of the recipe that has no effect, and for each idle GPU of this machine."""
    distributed = recipe.distributed
    lines = [*list_unused_options(recipe), *_describe_idle_gpus(recipe), *_describe_pmg_folders(recipe)]
    unused = distributed.model_dump(exclude_defaults=True, exclude={"enabled"})
    if distributed.enabled is False and unused:
        lines.append(f"distributed.enabled: false, so not used: {', '.join(f'distributed.{key}' for key in unused)}")
    elif distributed.offload and get_device_type(recipe) == "cpu":
        lines.append("distributed.offload has no effect on a CPU, where the optimizer state is in host memory anyway")
    micro_batch_size, num_processes = recipe.training.micro_batch_size, World.from_environment().data_size
    batch_size = get_global_batch_size(recipe, num_processes) // num_processes
    if isinstance(micro_batch_size, int) and micro_batch_size > batch_size:
        text = (
            f"training.micro_batch_size: {micro_batch_size} has no effect, because a process has {batch_size} samples"
        )
        lines.append(f"{text} in a step")
    return lines


def _describe_pmg_folders(recipe: Recipe) -> list[str]:
    """Return a note with the names of the folders that PMG's guide mentions."""
    if not isinstance(recipe, PersonalizeRecipe) or recipe.data.collection is None:
        return []
    return ["checkpoint-1000/ and final_model/ of PMG are checkpoints/step-00001000/ and, once exported, final/ here"]


def _describe_idle_gpus(recipe: Recipe) -> list[str]:
    """Return a note on how to use the other GPUs of this machine if only one process was started."""
    is_single_process = World.from_environment().size == 1 and recipe.distributed.enabled is not False
    if (
        not is_single_process
        or get_device_type(recipe) != "cuda"
        or (count := open_backend(recipe.engine).count_gpus()) < 2
    ):
        return []
    if recipe.engine == "jax":
        used = math.prod(recipe.distributed.mesh.values())
        return [f"{count} GPUs, {used} used: set distributed.replicate={count} to use all"] if used < count else []
    return [f"{count} GPUs, 1 used: start with torchrun --nproc_per_node {count} -m bottega train … to use all"]


def get_device_type(recipe: Recipe) -> str:
    """Return the type of the device that a recipe trains on, or the name it has if there is no such device."""
    try:
        return open_backend(recipe.engine).device_type(recipe.device)
    except BottegaError:
        return recipe.device
