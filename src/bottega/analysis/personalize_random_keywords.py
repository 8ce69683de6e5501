"""Control for keyword prediction: the same prompts answered by the same network with random weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bottega.core.errors import UsageError
from bottega.core.noise import numpy_generator
from bottega.tasks.personalize.data.records import Record

if TYPE_CHECKING:
    from bottega.tasks.personalize.workload import PersonalizeWorkload


CONFIG_SUFFIXES = (".json", ".txt", ".model", ".jinja")
MAX_RANDOM_MODEL_BYTES = 2**28
"""Largest model, in bytes of weights, for which the control is run."""


def generate_random_keywords(
    workload: PersonalizeWorkload, records: Sequence[Record], *, seed: int = 0
) -> list[tuple[str, ...]]:
    """Return the keywords that the run's language model generates for `records` with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        random_model = write_random_model(
            Path(workload.metadata.language_model.folder), Path(folder) / "random", seed=seed
        )
        return generate_keywords(workload, random_model, records, cache=Path(folder))


def is_small_model(folder: Path) -> bool:
    """Return whether the weights in `folder` are small enough for the control."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= MAX_RANDOM_MODEL_BYTES


def generate_keywords(
    workload: PersonalizeWorkload, folder: Path, records: Sequence[Record], *, cache: Path
) -> list[tuple[str, ...]]:
    """Return the keywords that the language model in `folder` generates for each record from the run's prompts.

    They are cached in `cache`; the keywords saved with the run are not used.
    """
    from bottega.models.device import choose_device
    from bottega.models.frozen.language import load_language_model
    from bottega.tasks.personalize.keywords import KeywordGenerator
    from bottega.tasks.personalize.prompts import PromptBuilder

    run_prompts, precision = workload.prompts, workload.task.precision
    device = choose_device(workload.recipe.device)
    prompts = PromptBuilder(folder, run_prompts.options, length=run_prompts.length, reserved=run_prompts.reserved)
    generator = KeywordGenerator(prompts, precision=precision, cache=cache)

    def load_model() -> Any:
        return load_language_model(folder, precision=precision, checkpointing=False, device=device).to(device)

    return generator.generate_preferences(records, load_model, device, lambda stage, done, total: None)


def write_random_model(folder: Path, out: Path, *, seed: int) -> Path:
    """Write the model of `folder` to `out` with random matrices of the same standard deviation, norms 1 and biases 0."""
    import torch
    from safetensors.torch import load_file, save_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} has no *.safetensors; give the folder of a language model")
    out.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file() and file.suffix in CONFIG_SUFFIXES:
            shutil.copy(file, out)
    for file in files:
        tensors = {}
        for name, tensor in load_file(file).items():
            if tensor.ndim < 2:
                tensors[name] = torch.zeros_like(tensor) if name.endswith("bias") else torch.ones_like(tensor)
                continue
            values = numpy_generator(seed, name).standard_normal(tuple(tensor.shape), dtype=np.float32)
            tensors[name] = (torch.from_numpy(values) * tensor.float().std()).to(tensor.dtype)
        save_file(tensors, out / file.name, metadata={"format": "pt"})
    return out
