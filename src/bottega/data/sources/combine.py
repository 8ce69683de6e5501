"""Combine the sources of a recipe: concatenation, and the order that follows from mixture weights, replay or sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.config.data import Data
from bottega.config.data import Source as SourceOptions
from bottega.core.errors import DataError, UsageError
from bottega.data.order.orders import Mixture, Order
from bottega.data.order.sequential import Sequential
from bottega.data.sources.source import Source
from bottega.data.sources.take import Take


@final
class Concat(Source):
    """Sources end to end. A source with repeat k occurs k times, each time as another epoch, so that augmentation differs."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        repeats: Sequence[int] | None = None,
        limits: Sequence[int | None] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """`limits` keep only the first samples of a source; `names` are the keys of the sources for messages."""
        all_limits = limits or [None] * len(sources)
        self.sources = [
            source if limit is None else Take(source, limit) for source, limit in zip(sources, all_limits, strict=True)
        ]
        self.repeats = list(repeats or [1] * len(sources))
        self.names = list(names or (f"data.sources[{i}]" for i in range(len(sources))))
        assert len(self.sources) == len(self.repeats) == len(self.names) > 0
        for name, source in zip(self.names, self.sources, strict=True):
            if len(source) == 0:
                raise DataError(f"{name} has no samples; add data or remove it")

    @property
    def sizes(self) -> list[int]:
        """Number of samples of each source, repeats included."""
        return [len(source) * repeat for source, repeat in zip(self.sources, self.repeats, strict=True)]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        source_index = np.searchsorted(self._ends, index, side="right")
        first_source = int(source_index[0]) if len(source_index) else 0
        if (source_index == first_source).all():
            return self._read_rows(first_source, index, epoch)
        positions = {int(i): np.flatnonzero(source_index == i) for i in np.unique(source_index)}
        return self._merge(
            {i: (at, self._read_rows(i, index[at], epoch[at])) for i, at in positions.items()}, len(index)
        )

    def _read_rows(self, source_index: int, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        return self.sources[source_index].rows(*self._to_local(source_index, index, epoch))

    def _to_local(self, source_index: int, index: Any, epoch: Any) -> tuple[Any, Any]:
        """Return the index within the source, and the epoch of the source: each repeat counts as an epoch."""
        repeat, local = np.divmod(
            index - (int(self._ends[source_index - 1]) if source_index else 0), len(self.sources[source_index])
        )
        return local, epoch * self.repeats[source_index] + repeat

    def check(self) -> None:
        """Join one sample of each source, so that incompatible sources are reported before the first step."""
        zero = np.zeros(1, dtype=np.int64)
        self._merge({i: (zero + i, s.rows(zero, zero)) for i, s in enumerate(self.sources)}, len(self.sources))

    def _merge(self, parts: dict[int, tuple[np.ndarray, dict[str, Any]]], count: int) -> dict[str, Any]:
        """Join `parts`, source index -> (positions in the batch, rows), into one batch of `count` rows."""
        rows_by_source = {source_index: rows for source_index, (_, rows) in parts.items()}
        self._check_fields(rows_by_source)
        self._pad_fields(rows_by_source)
        self._check_forms(rows_by_source)
        _, reference = next(iter(parts.values()))
        merged: dict[str, Any] = {}
        for name, value in reference.items():
            if np.ndim(value) == 0:
                merged[name] = value
                continue
            merged[name] = np.empty((count, *np.shape(value)[1:]), np.asarray(value).dtype)
            for at, rows in parts.values():
                merged[name][at] = rows[name]
        return merged

    def _check_fields(self, rows_by_source: dict[int, dict[str, Any]]) -> None:
        (reference_index, reference), *others = rows_by_source.items()
        for source_index, rows in others:
            for name in sorted(reference.keys() ^ rows.keys()):
                owner, lacking = (
                    (reference_index, source_index) if name in reference else (source_index, reference_index)
                )
                raise DataError(
                    f"{self.names[owner]} has the field {name!r}, but {self.names[lacking]} does not; give all sources "
                    "the same fields"
                )

    def _pad_fields(self, rows_by_source: dict[int, dict[str, Any]]) -> None:
        """Pad, in place, the fields that vary in length to the longest of the batch."""
        for name in self.padding_values.keys() & next(iter(rows_by_source.values())).keys():
            lengths = [np.shape(rows[name])[1] for rows in rows_by_source.values() if np.ndim(rows[name]) > 1]
            width = max(lengths, default=0)
            for source_index, rows in rows_by_source.items():
                padding_values = self.sources[source_index].padding_values
                if name in padding_values:
                    rows[name] = _pad(rows[name], width, padding_values[name])

    def _check_forms(self, rows_by_source: dict[int, dict[str, Any]]) -> None:
        (reference_index, reference), *others = rows_by_source.items()
        for source_index, rows in others:
            for name, value in rows.items():
                reference_form, form = _describe_form(reference[name]), _describe_form(value)
                if reference_form != form:
                    raise DataError(
                        f"{name!r} is {reference_form} in {self.names[reference_index]} and {form} in {self.names[source_index]}; give the "
                        "sources the same shapes and types"
                    )

    @cached_property
    def padding_values(self) -> Mapping[str, int]:
        return {name: value for source in self.sources for name, value in source.padding_values.items()}

    @cached_property
    def fingerprint(self) -> str:
        parts = [f"{s.fingerprint} times {n}" for s, n in zip(self.sources, self.repeats, strict=True)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        source_index = int(np.searchsorted(self._ends, index, side="right"))
        local, local_epoch = self._to_local(source_index, index, epoch)
        return f"{self.names[source_index]}: {self.sources[source_index].describe(int(local), int(local_epoch))}"


def _pad(array: np.ndarray, width: int, value: int) -> np.ndarray:
    """Pad the second axis to `width`."""
    padding = [(0, 0), (0, width - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
    return np.pad(array, padding, constant_values=value)


def _describe_form(value: Any) -> str:
    """Return what must agree within a batch: type and shape of a row, or the value itself if it is one for all rows."""
    if np.ndim(value) == 0:
        return str(value)
    array = np.asarray(value)
    return f"{array.dtype} {list(array.shape[1:])}"


def compute_mixture_weights(
    sizes: Sequence[int],
    mixture: str | None,
    weights: Sequence[float | None],
    temperature: float | None = None,
) -> list[float] | None:
    """Return the weight of each source in a mixture, with sum 1, or None if each sample occurs once per epoch."""
    if mixture is None or mixture == "concatenate":
        return None
    if mixture == "weighted":
        amounts = np.array([1.0 if weight is None else weight for weight in weights])
    else:
        # The largest is 1 before the power, so that no temperature overflows.
        amounts = (np.array(sizes) / max(sizes)) ** (1 / (temperature or 1.0))
    # No source is left out, even if its weight would round to zero.
    positive_weights = np.maximum(amounts / amounts.sum(), 1e-9)
    return (positive_weights / positive_weights.sum()).tolist()


def combine_sources(
    sources_with_options: Sequence[tuple[Source, SourceOptions]],
    data: Data,
    *,
    seed: int,
    replay: Source | None = None,
) -> tuple[Source, Order | None]:
    """Return the training data of a recipe as one source, and its order; None is the default shuffle.

    `replay` is the earlier data of data.replay. data.limit is applied here.
    """
    sources = [source for source, _ in sources_with_options]
    options = [option for _, option in sources_with_options]
    # Weights or a temperature imply their mixture.
    has_weights = any(option.weight is not None for option in options)
    mixture = data.mixture or ("weighted" if has_weights else "temperature" if data.temperature is not None else None)
    if mixture != "weighted":
        for i, option in enumerate(options):
            if option.weight is not None:
                raise UsageError(
                    f"data.sources[{i}].weight={option.weight:g} requires data.mixture=weighted; set it, or remove "
                    "weight"
                )
    limits = [option.limit for option in options]
    repeats = [option.repeat or 1 for option in options]
    concatenated = Concat(sources, repeats=repeats, limits=limits, names=_list_names(data, options))
    if mixture == "sequence":
        return _order_in_sequence(concatenated, data, seed)
    source_weights = compute_mixture_weights(
        concatenated.sizes, mixture, [option.weight for option in options], data.temperature
    )
    if replay is None and (source_weights is None or len(sources) == 1):
        combined = concatenated.sources[0] if len(sources) == 1 and repeats == [1] else concatenated
        _check_compatible(concatenated)
        return (combined if data.limit is None else Take(combined, data.limit)), None
    return _mix_sources(concatenated, source_weights, data, replay, seed)


def _mix_sources(
    concatenated: Concat, source_weights: list[float] | None, data: Data, replay: Source | None, seed: int
) -> tuple[Source, Order]:
    weights = list(source_weights or [1.0])
    sources, repeats, names = list(concatenated.sources), list(concatenated.repeats), list(concatenated.names)
    if source_weights is None and data.limit is not None:
        # All sources together are one component of the mixture, so the limit applies to all of them.
        sources, repeats, names = [Take(concatenated, data.limit)], [1], ["data"]
    if replay is not None:
        assert data.replay is not None, "replay data comes from data.replay"
        weights = [weight * (1 - data.replay.share) for weight in weights] + [data.replay.share]
        sources, repeats, names = [*sources, replay], [*repeats, data.replay.repeat or 1], [*names, "data.replay"]
    limits: list[int | None] = [None] * len(sources)
    if replay is not None and data.replay is not None:
        limits[-1] = data.replay.limit
    if source_weights is not None and data.limit is not None:
        # A trial run with data.limit samples takes them from each source by weight.
        limits[: len(concatenated.sources)] = [max(1, round(data.limit * weight)) for weight in source_weights]
    combined = Concat(sources, repeats=repeats, limits=limits, names=names)
    _check_compatible(combined)
    sizes = combined.sizes
    if source_weights is None:
        sizes = [sum(sizes[:-1]), sizes[-1]]
    return combined, Mixture(tuple(sizes), tuple(weights), seed=seed)


def _order_in_sequence(concatenated: Concat, data: Data, seed: int) -> tuple[Source, Order]:
    if data.limit is not None:
        # A trial run with data.limit samples goes through all sources rather than the first one only.
        limits = [max(1, round(data.limit * size / len(concatenated))) for size in concatenated.sizes]
        concatenated = Concat(
            concatenated.sources, repeats=concatenated.repeats, limits=limits, names=concatenated.names
        )
    _check_compatible(concatenated)
    return concatenated, Sequential(tuple(concatenated.sizes), seed=seed)


def _check_compatible(source: Concat) -> None:
    if len(source.sources) > 1:
        source.check()


def _list_names(data: Data, options: Sequence[SourceOptions]) -> list[str]:
    if data.sources is None and len(options) == 1:
        return ["data.train"]
    return [option.name or f"data.sources[{i}]" for i, option in enumerate(options)]
