"""The sampler of a multitask run: samples of all parts, and generation with the part that a request names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from bottega.core.errors import UsageError
from bottega.core.types import Models
from bottega.tasks.multitask.config import MultitaskRecipe
from bottega.tasks.multitask.task import get_part_modules
from bottega.tasks.sampler import Sampler
from bottega.tasks.workload import Workload


@final
class MultitaskSampler(Sampler):
    """Samples of all parts; generates with the part that a request names."""

    def __init__(self, recipe: MultitaskRecipe, parts: Mapping[str, Workload]) -> None:
        self.recipe, self.parts = recipe, parts
        flags = dict.fromkeys(name for part in parts.values() if _can_generate(part) for name in part.sampler.requests)
        self.requests = ("part", *flags)

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        for name, part in self.parts.items():
            part.sampler.sample(get_part_modules(models, name), folder / name, device=device)

    def check_request(self, request: Mapping[str, Any]) -> None:
        sampler = self.parts[self._select_part(request.get("part"))].sampler
        sampler.check_request({key: value for key, value in request.items() if key != "part"})

    def generate(self, models: Models, *, device: Any, part: str | None = None, **request: Any) -> Any:
        name = self._select_part(part)
        return self.parts[name].sampler.generate(get_part_modules(models, name), device=device, **request)

    def example_flags(self) -> str | None:
        for name, part in self.parts.items():
            flags = part.sampler.example_flags()
            if flags is not None:
                return f" --part {name}{flags}"
        return None

    def present(self, generated: Any, out: Path | None, *, run: Path, **request: Any) -> dict[str, Any]:
        sampler = self.parts[self._select_part(request.pop("part", None))].sampler
        if out is not None:
            sampler.check_output(out)
        return sampler.present(generated, out, run=run, **request)

    def _select_part(self, name: str | None) -> str:
        return select_part(self.parts, name, is_able=_can_generate, verb="generate")


def select_part(
    parts: Mapping[str, Workload], name: str | None, *, is_able: Callable[[Workload], bool], verb: str
) -> str:
    """Return the name of the part to use: the one that is named, or the only one that `is_able`."""
    candidates = [part_name for part_name, part in parts.items() if is_able(part)]
    if name is None and len(candidates) == 1:
        return candidates[0]
    if name in candidates:
        return name
    if not candidates:
        raise UsageError(f"no part of this run can {verb}")
    choices = f"choose --part {' or '.join(candidates)}"
    if name is None:
        raise UsageError(f"--part is needed to {verb}; {choices}")
    if name not in parts:
        raise UsageError(f"--part {name}: this run has no such part; its parts are {', '.join(parts)}")
    raise UsageError(f"--part {name}: this part does not {verb}; {choices}")


def _can_generate(part: Workload) -> bool:
    return part.sampler.example_flags() is not None  # None means that it cannot generate
