"""What has a form in JAX: the models, tasks and settings that `engine: jax` trains, and the errors for those that it does not."""

from __future__ import annotations

from bottega.config.training import Training
from bottega.core.errors import UsageError
from bottega.core.model_spec import ModelSpec
from bottega.core.task import Task
from bottega.models.jax_build import has_jax_form

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
