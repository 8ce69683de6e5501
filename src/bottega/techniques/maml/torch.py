"""Meta-learning: weights from which a few steps of descent on a new task's examples go a long way.

MAML and its first-order form (Finn et al., 2017), and Reptile (Nichol et al., 2018), over any task and model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from bottega.core.noise import Noise, derive_seed
from bottega.core.types import Array, Batch, Loss, Models, Rows, Sums
from bottega.models.decoder.torch import Transformer
from bottega.models.losses.token_loss import token_cross_entropy
from bottega.techniques.wrapped_task import WrappedTask

Weights = dict[str, Tensor]
Terms = dict[str, tuple[Array, float]]


class Maml(WrappedTask):
    """A batch holds episodes: `support` with the fields of the inner task's batch, [n, S, ...] each, to adapt to, and
    `query` [n, Q, ...] to measure the adapted weights with. Optional: `weight` [n], where 0 marks an episode that counts
    nowhere. A batch without episodes is the inner task's own: the finished model is a usual one.

    The mean is over the query examples of all episodes. Those that do not look at the query part by itself count each
    episode by it all the same, so that a term's count is known before anything is computed.
    """

    overflows_by: ClassVar[str] = "techniques.maml.inner_rate"
    method: Literal["maml", "fomaml", "reptile", "none"]
    inner_steps: int
    inner_rate: float
    adapts: Callable[[tuple[str, ...]], Collection[str]] = frozenset
    """Which of the parameters that are this task's to train the steps move. Not those that have a gradient now: what is
    thawed later has none until then, but has one in a process that was only started to measure."""

    @property
    def needs_unwrapped_model(self) -> bool:  # type: ignore[override]
        return True

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if "query" not in batch:
            return self.inner.counts(batch)
        query = {name: value if value.ndim == 0 else _flat(value) for name, value in batch["query"].items()}
        if "weight" in batch:
            each = np.asarray(batch["weight"]).repeat(np.shape(_some(batch["query"]))[1])
            query["weight"] = query["weight"] * each if "weight" in query else each
        return self.inner.counts(query)

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        if "query" not in batch:
            return self.inner.loss(models, batch, rng)
        if not models["model"].training:
            return self._measured(models, batch, rng)
        learn = {"maml": self._through, "fomaml": self._through, "reptile": self._towards, "none": self._plainly}
        terms: Terms = {}
        metrics: Sums = {}
        stats: dict[str, Tensor] = {}
        for episode in _episodes(self.inner.counts, batch, rng):
            found = learn[self.method](models, episode)
            for name, (total, weight) in found.terms.items():
                terms[name] = (terms[name][0] + total if name in terms else total, weight)
            _add(metrics, found.metrics)
            for name, value in found.stats.items():
                stats[name] = stats[name] + value if name in stats else value
        return Loss(terms=terms, metrics=metrics, stats=stats)

    def score(self, rows: Rows) -> dict[str, float]:
        """Classes have another number in each episode, so nothing can be said over all of them but means."""
        return self.inner.score(rows) if rows else {}

    # What an episode teaches

    def _through(self, models: Models, episode: Episode) -> Loss:
        """The query loss after the steps. First order takes their gradients for constants."""
        # What is not thawed yet is moved as well, and learns nothing from it.
        own = self._adapted(models["model"])
        weights: Weights = {n: p if p.requires_grad else p.detach().requires_grad_() for n, p in own.items()}
        for number in range(self.inner_steps):
            weights = self._step(models, weights, episode, number, second_order=self.method == "maml")[0]
        return self.inner.loss(_with(models, weights), episode.query, episode.query_noise)

    def _towards(self, models: Models, episode: Episode) -> Loss:
        """A term whose gradient is the way back from where the steps end, and whose value the loss before the last."""
        whole = episode.merge_support_and_query()
        own = self._adapted(models["model"])
        start = {name: p.detach().requires_grad_() for name, p in own.items()}
        weights = start
        for number in range(self.inner_steps):
            weights, out = self._step(models, weights, whole, number, second_order=False)
        back = [(own[name] * (start[name] - weights[name]).detach()).sum() for name in own]
        way = torch.stack(back).sum()
        terms = whole.rescale_to_query(out.terms)
        # One term carries all of the gradient, because the engine adds the terms up by their weights.
        (first, (total, weight)), *others = ((n, (t.detach(), w)) for n, (t, w) in terms.items())
        lead = (way - way.detach()) * (episode.query_counts[first] / weight)
        return out._replace(terms={first: (total + lead, weight), **dict(others)})

    def _plainly(self, models: Models, episode: Episode) -> Loss:
        whole = episode.merge_support_and_query()
        out = self.inner.loss(models, whole.query, whole.query_noise)
        return out._replace(terms=whole.rescale_to_query(out.terms))

    # What weights are worth

    def _measured(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        """The query loss before the steps, after each, and after all of them, on the same noise."""
        terms: Terms = {}
        metrics: Sums = {}
        for episode in _episodes(self.inner.counts, batch, rng):
            weights = {name: p.detach().requires_grad_() for name, p in self._adapted(models["model"]).items()}
            for number in range(self.inner_steps + 1):
                with torch.no_grad():
                    out = self.inner.loss(_with(models, weights), episode.query, episode.query_noise)
                counts, mark = episode.query_counts, f"_{number}" if number else "_before"
                plain = {name: (total, counts[name]) for name, (total, _) in out.terms.items()}
                # A task may measure under the name of a term what it minimises in another form.
                said = plain | {n: pair for n, pair in out.metrics.items() if number == 0 or n in plain}
                _add(metrics, {f"{name}{mark}": pair for name, pair in said.items()})
                if number < self.inner_steps:
                    with torch.enable_grad():
                        weights = self._step(models, weights, episode, number, second_order=False)[0]
            _add(metrics, out.metrics)
            for name, (total, weight) in out.terms.items():
                terms[name] = (terms[name][0] + total if name in terms else total, weight)
        return Loss(terms=terms, metrics=metrics)

    def _adapted(self, model: nn.Module) -> dict[str, nn.Parameter]:
        own = {name: parameter for name, parameter in model.named_parameters() if self.is_trainable(name)}
        moved = self.adapts(tuple(own))
        return {name: parameter for name, parameter in own.items() if name in moved}

    def _step(
        self, models: Models, weights: Weights, episode: Episode, number: int, *, second_order: bool
    ) -> tuple[Weights, Loss]:
        """One step of plain descent on the mean loss of the support part."""
        with sdpa_kernel(SDPBackend.MATH) if second_order else contextlib.nullcontext():
            asked = _with(models, weights, twice=second_order)
            out = self.inner.loss(asked, episode.support, episode.support_noise(number))
            parts = [t * (w / max(episode.support_counts[name], 1e-12)) for name, (t, w) in out.terms.items()]
            slopes = torch.autograd.grad(
                torch.stack(parts).sum(), list(weights.values()), create_graph=second_order, allow_unused=True
            )
        moved = {
            name: weight if slope is None else weight - self.inner_rate * slope
            for (name, weight), slope in zip(weights.items(), slopes, strict=True)
        }
        return moved, out


@dataclass(frozen=True)
class Episode:
    support: Batch
    query: Batch
    support_counts: Mapping[str, float]
    query_counts: Mapping[str, float]
    rng: Noise
    """Its positions are those of all examples, the support ones first."""

    @property
    def query_noise(self) -> Noise:
        """The same after any number of steps, so that these are compared on equal terms."""
        return replace(self.rng, positions=self.rng.positions[-_length(self.query) :])

    def support_noise(self, number: int) -> Noise:
        """Another for each inner step, as if it were a step of training."""
        seed = derive_seed(self.rng.seed, "inner step", number)
        return replace(self.rng, seed=seed, positions=self.rng.positions[: _length(self.support)])

    def merge_support_and_query(self) -> Episode:
        """Both parts as one, to adapt to and to measure; it still counts as much as its query part does."""
        both = {
            name: value if value.ndim == 0 else torch.cat([value, self.query[name]])
            for name, value in self.support.items()
        }
        counts = {name: count + self.query_counts[name] for name, count in self.support_counts.items()}
        return replace(self, support=both, query=both, support_counts=counts)

    def rescale_to_query(self, terms: Terms) -> Terms:
        """The sums of a joined episode as those of as many examples as the query part has."""
        share = {name: self.query_counts[name] / max(self.support_counts[name], 1e-12) for name in terms}
        return {name: (total * share[name], weight) for name, (total, weight) in terms.items()}


def _episodes(counts: Callable[[Batch], Mapping[str, float]], batch: Batch, rng: Noise) -> Iterator[Episode]:
    """One by one: each has weights of its own."""
    parts = {name: dict(batch[name]) for name in ("support", "query")}
    sizes = {name: _some(part).shape[1] for name, part in parts.items()}
    if "weight" in batch:
        each = batch["weight"][:, None].expand(-1, sizes["query"])
        own = parts["query"].get("weight")
        parts["query"]["weight"] = each if own is None else own * each
    # Counted on the host, as tasks do. On a GPU that waits for the device, once for the many small steps that follow.
    host = {name: {key: value.cpu().numpy() for key, value in part.items()} for name, part in parts.items()}
    size = sizes["support"] + sizes["query"]
    places = torch.arange(size, device=rng.positions.device)
    for number in range(len(rng.positions)):
        support, query = (_at(parts[name], number) for name in ("support", "query"))
        yield Episode(
            support=support,
            query=query,
            support_counts=counts(_at(host["support"], number)),
            query_counts=counts(_at(host["query"], number)),
            rng=replace(rng, positions=rng.positions[number] * size + places),
        )


class ReboundModel:
    """A model as it would be with other weights. `twice`: what it computes can be differentiated a second time."""

    def __init__(self, model: nn.Module, weights: Weights, *, twice: bool) -> None:
        self._model, self._weights, self._twice = model, {f"model.{n}": w for n, w in weights.items()}, twice

    def __call__(self, *args: Any, **named: Any) -> Any:
        targets = args[1] if len(args) > 1 else named.get("targets")
        if not self._twice or not isinstance(self._model, Transformer) or targets is None:
            return self._ask("__call__", *args, **named)
        # Its own loss makes the gradients in the forward pass, and a second derivative would silently be 0.
        named = {name: value for name, value in named.items() if name != "targets"}
        found = self._ask("__call__", args[0], **named)
        if isinstance(found, tuple):  # and how it went through its experts
            return token_cross_entropy(found[0], targets), *found[1:]
        return token_cross_entropy(found, targets)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        assert not isinstance(found, nn.Module | Tensor), f"{name} would have its old weights"
        return functools.partial(self._ask, name) if callable(found) else found

    def _ask(self, method: str, *args: Any, **named: Any) -> Any:
        return functional_call(_Door(self._model), self._weights, (method, *args), named)


class _Door(nn.Module):
    """Lets any method be called with other weights; torch's own way does that for `forward` alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, method: str, *args: Any, **named: Any) -> Any:
        return getattr(self.model, method)(*args, **named)


def _with(models: Models, weights: Weights, *, twice: bool = False) -> dict[str, Any]:
    return {**models, "model": ReboundModel(models["model"], weights, twice=twice)}


def _add(total: Sums, more: Mapping[str, tuple[Array, Array]]) -> None:
    for name, (value, count) in more.items():
        old = total.get(name)
        total[name] = (value, count) if old is None else (old[0] + value, old[1] + count)


def _some(part: Mapping[str, Any]) -> Any:
    """Any of its arrays [n, size, ...]."""
    return next(value for value in part.values() if value.ndim > 0)


def _length(part: Batch) -> int:
    return len(_some(part))


def _flat(value: Any) -> Any:
    """[n, size, ...] as [n * size, ...]"""
    return value.reshape(value.shape[0] * value.shape[1], *value.shape[2:])


def _at(part: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {name: value if value.ndim == 0 else value[number] for name, value in part.items()}
