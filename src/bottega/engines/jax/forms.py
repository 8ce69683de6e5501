"""What has a form in JAX: the models, tasks and settings that `engine: jax` trains, and the errors for those that it does not."""

from __future__ import annotations

from importlib.util import find_spec

from bottega.config.training import Training
from bottega.core.errors import UsageError
from bottega.core.model_spec import ModelSpec, Reference
from bottega.core.task import Task

AVAILABLE = (
    "language (dense transformers), image, audio and video (diffusion transformers), classify (cnn, transformer, and the "
    "residual network of images, audio and video)"
)


def require_jax_form(task: Task, training: Training) -> None:
    """Raise UsageError unless the task, its models and the settings of training have a form in JAX."""
    problem = describe_missing_form(task) or describe_missing_setting(task, training)
    if problem is not None:
        raise UsageError(problem)


def describe_missing_form(task: Task) -> str | None:
    """Return which model of a task has no form in JAX; None if all have one."""
    for name, spec in task.specs().items():
        if not has_jax_form(spec):
            what = "the model" if name == "model" else f"the frozen model {name}"
            return (
                f"engine: jax: {what} of this recipe ({_name_architecture(spec)}) has no JAX form; available are {AVAILABLE}; "
                "use engine=torch"
            )
    return None


def has_jax_form(spec: ModelSpec) -> bool:
    """Return whether a model can be built in JAX, from its parameters alone."""
    return not spec.parts and not spec.changes and _is_available(spec.architecture)


def _is_available(reference: Reference) -> bool:
    if not isinstance(reference, str) or "{framework}" not in reference:
        return False
    return find_spec(reference.format(framework="jax").partition(":")[0]) is not None


def _name_architecture(spec: ModelSpec) -> str:
    reference = spec.architecture
    return reference.partition(":")[2] if isinstance(reference, str) else getattr(reference, "__name__", "a model")


def describe_missing_setting(task: Task, training: Training) -> str | None:
    """Return which setting has no form in JAX; None if all have one."""
    if task.gradient_surgery:
        return "engine: jax has no gradient surgery (PCGrad); use engine=torch"
    if task.needs_unwrapped_model:
        return "engine: jax cannot train a task that calls the model with other weights; use engine=torch"
    if training.mixed_precision == "fp16":
        return "training.mixed_precision: fp16 is not available with engine=jax; use bf16, which needs no loss scale, or fp32"
    return None
