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
    """Sources end to end. One with repeat k occurs k times, each as an epoch of its own, so that augmentation differs."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        repeats: Sequence[int] | None = None,
        limits: Sequence[int | None] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """`limits` keep only the first samples of a source; `names` are the keys of the sources for messages."""
        bounds = limits or [None] * len(sources)
        self.sources = [s if n is None else Take(s, n) for s, n in zip(sources, bounds, strict=True)]
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
        part = np.searchsorted(self._ends, index, side="right")
        first = int(part[0]) if len(part) else 0
        if (part == first).all():
            return self._rows(first, index, epoch)
        positions = {int(i): np.flatnonzero(part == i) for i in np.unique(part)}
        return self._merge({i: (at, self._rows(i, index[at], epoch[at])) for i, at in positions.items()}, len(index))

    def _rows(self, part: int, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        return self.sources[part].rows(*self._local(part, index, epoch))

    def _local(self, part: int, index: Any, epoch: Any) -> tuple[Any, Any]:
        """Return the index within the source, and its epoch, counting repeats."""
        copy, local = np.divmod(index - (int(self._ends[part - 1]) if part else 0), len(self.sources[part]))
        return local, epoch * self.repeats[part] + copy

    def check(self) -> None:
        """Join one sample of each source, so that incompatible sources are reported before the first step."""
        zero = np.zeros(1, dtype=np.int64)
        self._merge({i: (zero + i, s.rows(zero, zero)) for i, s in enumerate(self.sources)}, len(self.sources))

    def _merge(self, parts: dict[int, tuple[np.ndarray, dict[str, Any]]], count: int) -> dict[str, Any]:
        for name in self.padding_values:
            width = max(rows[name].shape[1] for _, rows in parts.values())
            for part, (_, rows) in parts.items():
                filling = self.sources[part].padding_values
                if name in filling:
                    rows[name] = _pad(rows[name], width, filling[name])
        (leader, (_, model)), *others = parts.items()
        for other, (_, rows) in others:
            for name in sorted(model.keys() ^ rows.keys()):
                with_it, without = (leader, other) if name in model else (other, leader)
                raise DataError(
                    f"{self.names[with_it]} has the field {name!r}, but {self.names[without]} does not; give all sources "
                    "the same fields"
                )
            for name, value in rows.items():
                ours, theirs = _describe_form(model[name]), _describe_form(value)
                if ours != theirs:
                    raise DataError(
                        f"{name!r} is {ours} in {self.names[leader]} and {theirs} in {self.names[other]}; give the "
                        "sources the same shapes and types"
                    )
        merged: dict[str, Any] = {}
        for name, value in model.items():
            if np.ndim(value) == 0:
                merged[name] = value
                continue
            merged[name] = np.empty((count, *np.shape(value)[1:]), np.asarray(value).dtype)
            for at, rows in parts.values():
                merged[name][at] = rows[name]
        return merged

    @cached_property
    def padding_values(self) -> Mapping[str, int]:
        return {name: value for source in self.sources for name, value in source.padding_values.items()}

    @cached_property
    def fingerprint(self) -> str:
        parts = [f"{s.fingerprint} times {n}" for s, n in zip(self.sources, self.repeats, strict=True)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        part = int(np.searchsorted(self._ends, index, side="right"))
        local, own = self._local(part, index, epoch)
        return f"{self.names[part]}: {self.sources[part].describe(int(local), int(own))}"


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


def mixture_weights(
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
    parts = np.maximum(amounts / amounts.sum(), 1e-9)
    return (parts / parts.sum()).tolist()


def combine_sources(
    parts: Sequence[tuple[Source, SourceOptions]],
    data: Data,
    *,
    seed: int,
    replay: Source | None = None,
) -> tuple[Source, Order | None]:
    """Return the training data of a recipe as one source, and its order; None is the default shuffle.

    `parts` are the sources with their options, `replay` is the earlier data of data.replay. data.limit is applied here.
    """
    options = [option for _, option in parts]
    # Weights or a temperature imply their mixture.
    weighted = any(option.weight is not None for option in options)
    mixture = data.mixture or ("weighted" if weighted else "temperature" if data.temperature is not None else None)
    if mixture != "weighted":
        for i, option in enumerate(options):
            if option.weight is not None:
                raise UsageError(
                    f"data.sources[{i}].weight={option.weight:g} requires data.mixture=weighted; set it, or remove "
                    "weight"
                )
    limits = [option.limit for option in options]
    repeats = [option.repeat or 1 for option in options]
    plain = Concat([source for source, _ in parts], repeats=repeats, limits=limits, names=_list_names(data, options))
    if mixture == "sequence":
        return _sequence(plain, data, seed)
    by_source = mixture_weights(plain.sizes, mixture, [option.weight for option in options], data.temperature)
    if replay is None and (by_source is None or len(parts) == 1):
        combined = plain.sources[0] if len(parts) == 1 and repeats == [1] else plain
        _check(plain)
        return (combined if data.limit is None else Take(combined, data.limit)), None
    return _mix(plain, by_source, data, replay, seed)


def _mix(
    plain: Concat, by_source: list[float] | None, data: Data, replay: Source | None, seed: int
) -> tuple[Source, Order]:
    weights = list(by_source or [1.0])
    sources, repeats, names = list(plain.sources), list(plain.repeats), list(plain.names)
    if by_source is None and data.limit is not None:
        # Together they are one component of the mixture, so the limit is on all of them.
        sources, repeats, names = [Take(plain, data.limit)], [1], ["data"]
    if replay is not None:
        assert data.replay is not None, "replay data comes from data.replay"
        weights = [weight * (1 - data.replay.share) for weight in weights] + [data.replay.share]
        sources, repeats, names = [*sources, replay], [*repeats, data.replay.repeat or 1], [*names, "data.replay"]
    limits: list[int | None] = [None] * len(sources)
    if replay is not None and data.replay is not None:
        limits[-1] = data.replay.limit
    if by_source is not None and data.limit is not None:
        # A trial run with data.limit samples takes them from each source by weight.
        limits[: len(plain.sources)] = [max(1, round(data.limit * weight)) for weight in by_source]
    combined = Concat(sources, repeats=repeats, limits=limits, names=names)
    _check(combined)
    sizes = combined.sizes
    if by_source is None:
        sizes = [sum(sizes[:-1]), sizes[-1]]
    return combined, Mixture(tuple(sizes), tuple(weights), seed=seed)


def _sequence(plain: Concat, data: Data, seed: int) -> tuple[Source, Order]:
    if data.limit is not None:
        # A trial run with data.limit samples goes through all sources rather than the first one only.
        limits = [max(1, round(data.limit * size / len(plain))) for size in plain.sizes]
        plain = Concat(plain.sources, repeats=plain.repeats, limits=limits, names=plain.names)
    _check(plain)
    return plain, Sequential(tuple(plain.sizes), seed=seed)


def _check(source: Concat) -> None:
    if len(source.sources) > 1:
        source.check()


def _list_names(data: Data, options: Sequence[SourceOptions]) -> list[str]:
    if data.sources is None and len(options) == 1:
        return ["data.train"]
    return [option.name or f"data.sources[{i}]" for i, option in enumerate(options)]
