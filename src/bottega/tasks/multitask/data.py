"""The data of several tasks that are trained together: one sample of each part at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, final

from bottega.core.errors import UsageError
from bottega.data.order.online import build_online_stream
from bottega.data.order.orders import Order, Shuffled
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.data.sources.zip_sources import Unshuffled, Zip
from bottega.tasks.multitask.config import MultitaskRecipe
from bottega.tasks.task_data import TaskData
from bottega.tasks.workload import Workload


@final
class MultitaskData(TaskData):
    """The data of all parts, one sample of each at a time."""

    def __init__(
        self, recipe: MultitaskRecipe, parts: Mapping[str, Workload], describe_sharing: Callable[[], str]
    ) -> None:
        self.recipe, self.parts, self._describe_sharing = recipe, parts, describe_sharing

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.part_fingerprints()).encode()).hexdigest()

    def part_fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of each part's data."""
        return {name: part.data.fingerprint for name, part in self.parts.items()}

    @property
    def notes(self) -> list[str]:
        notes = [f"{name}: {note}" for name, part in self.parts.items() for note in part.data.notes]
        return [*notes, self._describe_sharing()]

    def compare_splits(self) -> dict[str, Any]:
        """Return the comparison of the part that shares most of its held-out data, then of the one with most duplicates."""
        comparisons = [
            {**comparison, "key": f"data.parts.{name}.settings.{comparison['key']}"}
            for name, part in self.parts.items()
            if (comparison := part.data.compare_splits())
        ]
        return max(comparisons, key=_measure_overlap, default={})

    def training(self) -> Source:
        sources = {name: part.data.training() for name, part in self.parts.items()}
        if self.recipe.data.online is not None:
            return self._read_streams(sources)
        seed = self.recipe.seed
        orders = {name: self.parts[name].data.order or Shuffled(len(source), seed) for name, source in sources.items()}
        return Zip(sources, orders=orders)

    def _read_streams(self, sources: Mapping[str, Source]) -> Source:
        """Return the parts as streams, each in its own order.

        A part that ends before the others repeats earlier samples. A part whose samples depend on their order, such as a
        sequence of events, continues as it would without a stream, and none of its samples is repeated.
        """
        own_orders = {name: order for name in sources if (order := self.parts[name].data.order) is not None}
        for name, order in own_orders.items():
            if not isinstance(order, Unshuffled):
                raise UsageError(
                    f"data.parts.{name}: data.mixture cannot be combined with a stream (data.online), which has its "
                    "own order; keep one"
                )
        streams = {
            name: build_online_stream(self.recipe, len(source))
            for name, source in sources.items()
            if name not in own_orders
        }
        orders = {name: own_orders[name] if name in own_orders else streams[name] for name in sources}
        lengths = [order.epoch_length for order in (streams or own_orders).values()]
        return Zip(sources, orders=orders, length=max(lengths))

    @property
    def order(self) -> Order:
        return Unshuffled(len(self.training()))

    def validation(self) -> Source | None:
        return _zip_existing({name: part.data.validation() for name, part in self.parts.items()})

    def test(self) -> Source | None:
        return _zip_existing({name: part.data.test() for name, part in self.parts.items()})

    def read_external(self, external: ExternalData) -> Source:
        """Return other data of one part, named as PART=PATH."""
        name, path = self.parse_part_path(external.path)
        source = external.source.model_copy(update={"path": path})
        return Zip({name: self.parts[name].data.read_external(replace(external, source=source))})

    def parse_part_path(self, text: str) -> tuple[str, str]:
        """Return the part and the path of PART=PATH."""
        name, separator, path = text.partition("=")
        if not separator or name not in self.parts:
            choices = " or ".join(f"{name}=PATH" for name in self.parts)
            raise UsageError(f"--data {text} does not name a part of the recipe; write {choices}")
        return name, path


def _measure_overlap(comparison: Mapping[str, Any]) -> tuple[float, float]:
    held_out = max((comparison[name]["share"] for name in ("validation", "test") if name in comparison), default=0.0)
    return held_out, comparison["train"]["share"]


def _zip_existing(sources: Mapping[str, Source | None]) -> Source | None:
    """Zip the sources that exist; None if no part has this split."""
    existing = {name: source for name, source in sources.items() if source is not None}
    return Zip(existing) if existing else None
