"""Meta-learning: MAML and first-order MAML (Finn et al., 2017), and Reptile (Nichol et al., 2018), for any task and model."""

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
from bottega.models.device import is_simulated
from bottega.models.losses.token_loss import token_cross_entropy
from bottega.techniques.wrapped_task import WrappedTask

Weights = dict[str, Tensor]
Terms = dict[str, tuple[Array, float]]


class Maml(WrappedTask):
    """A task over batches of episodes.

    A batch has `support`, with the fields of the inner task's batch as `(n, S, ...)`, to adapt to, and `query`,
    `(n, Q, ...)`, to evaluate the adapted weights. Optional `weight` `(n,)` is 0 for a padding episode. A batch without
    episodes is passed to the inner task: the trained model is an ordinary one.

    The mean is over the query examples of all episodes. Methods that do not evaluate the query separately (Reptile, none)
    are scaled to the same count, so that it is known before anything is computed.
    """

    divergence_key: ClassVar[str] = "techniques.maml.inner_rate"
    method: Literal["maml", "fomaml", "reptile", "none"]
    inner_steps: int
    inner_rate: float
    select_adapted: Callable[[tuple[str, ...]], Collection[str]] = frozenset
    """Selects the parameters that the inner steps adapt, by name. Not by `requires_grad`: a parameter that is unfrozen
    later would be adapted in an evaluation process but not in training."""

    @property
    def needs_unwrapped_model(self) -> bool:  # type: ignore[override]
        return True

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if "query" not in batch:
            return self.inner.counts(batch)
        query = {name: value if value.ndim == 0 else _flatten_episodes(value) for name, value in batch["query"].items()}
        if "weight" in batch:
            query_weights = np.asarray(batch["weight"]).repeat(np.shape(_get_any_array(batch["query"]))[1])
            query["weight"] = query["weight"] * query_weights if "weight" in query else query_weights
        return self.inner.counts(query)

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        if "query" not in batch:
            return self.inner.loss(models, batch, rng)
        if not models["model"].training:
            return self._evaluate(models, batch, rng)
        losses = {
            "maml": self._compute_maml_loss,
            "fomaml": self._compute_maml_loss,
            "reptile": self._compute_reptile_loss,
            "none": self._compute_plain_loss,
        }
        terms: Terms = {}
        metrics: Sums = {}
        stats: dict[str, Tensor] = {}
        for episode in _split_episodes(self.inner.counts, batch, rng):
            output = losses[self.method](models, episode)
            for name, (total, weight) in output.terms.items():
                terms[name] = (terms[name][0] + total if name in terms else total, weight)
            _add_sums(metrics, output.metrics)
            for name, value in output.stats.items():
                stats[name] = stats[name] + value if name in stats else value
        return Loss(terms=terms, metrics=metrics, stats=stats)

    def score(self, rows: Rows) -> dict[str, float]:
        """Return the inner task's score; rows of episodes are empty, since classes are renumbered in each."""
        return self.inner.score(rows) if rows else {}

    # Losses of an episode

    def _compute_maml_loss(self, models: Models, episode: Episode) -> Loss:
        """Return the query loss after the inner steps. First order treats their gradients as constants."""
        # Parameters that are still frozen are adapted as well, but get no gradient.
        parameters = self._select_adapted_parameters(models["model"])
        weights: Weights = {n: p if p.requires_grad else p.detach().requires_grad_() for n, p in parameters.items()}
        for number in range(self.inner_steps):
            weights = self._take_inner_step(models, weights, episode, number, second_order=self.method == "maml")[0]
        return self.inner.loss(_rebind_weights(models, weights), episode.query, episode.query_noise)

    def _compute_reptile_loss(self, models: Models, episode: Episode) -> Loss:
        """Return a term whose gradient is start - end of the inner steps; its value is the loss before the last step."""
        all_samples = episode.merge_support_and_query()
        parameters = self._select_adapted_parameters(models["model"])
        start = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        weights = start
        for number in range(self.inner_steps):
            weights, output = self._take_inner_step(models, weights, all_samples, number, second_order=False)
        products = [(parameters[name] * (start[name] - weights[name]).detach()).sum() for name in parameters]
        direction = torch.stack(products).sum()
        terms = all_samples.rescale_to_query(output.terms)
        # One term carries all of the gradient, because the engine sums the terms by their weights.
        (first_name, (total, weight)), *others = ((n, (t.detach(), w)) for n, (t, w) in terms.items())
        gradient_carrier = (direction - direction.detach()) * (episode.query_counts[first_name] / weight)
        return output._replace(terms={first_name: (total + gradient_carrier, weight), **dict(others)})

    def _compute_plain_loss(self, models: Models, episode: Episode) -> Loss:
        """Return the loss without inner steps, over support and query together."""
        all_samples = episode.merge_support_and_query()
        output = self.inner.loss(models, all_samples.query, all_samples.query_noise)
        return output._replace(terms=all_samples.rescale_to_query(output.terms))

    # Evaluation

    def _evaluate(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        """Return the query loss before, after each, and after all inner steps, with the same noise."""
        terms: Terms = {}
        metrics: Sums = {}
        for episode in _split_episodes(self.inner.counts, batch, rng):
            weights = {
                name: p.detach().requires_grad_()
                for name, p in self._select_adapted_parameters(models["model"]).items()
            }
            for number in range(self.inner_steps + 1):
                with torch.no_grad():
                    output = self.inner.loss(_rebind_weights(models, weights), episode.query, episode.query_noise)
                counts, suffix = episode.query_counts, f"_{number}" if number else "_before"
                sums = {name: (total, counts[name]) for name, (total, _) in output.terms.items()}
                # A task may report a metric under the name of a term that it minimises in another form.
                sums |= {n: pair for n, pair in output.metrics.items() if number == 0 or n in sums}
                _add_sums(metrics, {f"{name}{suffix}": pair for name, pair in sums.items()})
                if number < self.inner_steps:
                    with torch.enable_grad():
                        weights = self._take_inner_step(models, weights, episode, number, second_order=False)[0]
            _add_sums(metrics, output.metrics)
            for name, (total, weight) in output.terms.items():
                terms[name] = (terms[name][0] + total if name in terms else total, weight)
        return Loss(terms=terms, metrics=metrics)

    def _select_adapted_parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        trainable = {name: parameter for name, parameter in model.named_parameters() if self.is_trainable(name)}
        adapted = self.select_adapted(tuple(trainable))
        return {name: parameter for name, parameter in trainable.items() if name in adapted}

    def _take_inner_step(
        self, models: Models, weights: Weights, episode: Episode, number: int, *, second_order: bool
    ) -> tuple[Weights, Loss]:
        """Take one step of gradient descent on the mean loss of the support examples.

        Returns the new weights, and the loss before the step.
        """
        with sdpa_kernel(SDPBackend.MATH) if second_order else contextlib.nullcontext():
            rebound = _rebind_weights(models, weights, second_order=second_order)
            output = self.inner.loss(rebound, episode.support, episode.support_noise(number))
            weighted_terms = [
                t * (w / max(episode.support_counts[name], 1e-12)) for name, (t, w) in output.terms.items()
            ]
            gradients = torch.autograd.grad(
                torch.stack(weighted_terms).sum(), list(weights.values()), create_graph=second_order, allow_unused=True
            )
        new_weights = {
            name: weight if gradient is None else weight - self.inner_rate * gradient
            for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
        }
        return new_weights, output


@dataclass(frozen=True)
class Episode:
    """Support and query examples of one episode, with their counts and noise."""

    support: Batch
    query: Batch
    support_counts: Mapping[str, float]
    query_counts: Mapping[str, float]
    rng: Noise
    """Its positions are those of all examples, support first."""

    @property
    def query_noise(self) -> Noise:
        """Noise of the query examples, the same after any number of inner steps, so that their losses are comparable."""
        return replace(self.rng, positions=self.rng.positions[-_count_examples(self.query) :])

    def support_noise(self, number: int) -> Noise:
        """Return the noise of the support examples in inner step `number`, different for each."""
        seed = derive_seed(self.rng.seed, "inner step", number)
        return replace(self.rng, seed=seed, positions=self.rng.positions[: _count_examples(self.support)])

    def merge_support_and_query(self) -> Episode:
        """Return an episode with support and query joined, both to adapt to and to evaluate."""
        joined = {
            name: value if value.ndim == 0 else torch.cat([value, self.query[name]])
            for name, value in self.support.items()
        }
        counts = {name: count + self.query_counts[name] for name, count in self.support_counts.items()}
        return replace(self, support=joined, query=joined, support_counts=counts)

    def rescale_to_query(self, terms: Terms) -> Terms:
        """Scale the sums of a joined episode to the count of its query examples."""
        fraction = {name: self.query_counts[name] / max(self.support_counts[name], 1e-12) for name in terms}
        return {name: (total * fraction[name], weight) for name, (total, weight) in terms.items()}


def _split_episodes(count_items: Callable[[Batch], Mapping[str, float]], batch: Batch, rng: Noise) -> Iterator[Episode]:
    """Yield the episodes of a batch one by one, since each has its own weights; `count_items` is `Task.counts`."""
    parts = {name: dict(batch[name]) for name in ("support", "query")}
    sizes = {name: _get_any_array(part).shape[1] for name, part in parts.items()}
    if "weight" in batch:
        episode_weights = batch["weight"][:, None].expand(-1, sizes["query"])
        query_weights = parts["query"].get("weight")
        parts["query"]["weight"] = episode_weights if query_weights is None else query_weights * episode_weights
    host_parts = {name: {key: _copy_to_host(value) for key, value in part.items()} for name, part in parts.items()}
    size = sizes["support"] + sizes["query"]
    offsets = torch.arange(size, device=rng.positions.device)
    for number in range(len(rng.positions)):
        support, query = (_select_episode(parts[name], number) for name in ("support", "query"))
        yield Episode(
            support=support,
            query=query,
            support_counts=count_items(_select_episode(host_parts["support"], number)),
            query_counts=count_items(_select_episode(host_parts["query"], number)),
            rng=replace(rng, positions=rng.positions[number] * size + offsets),
        )


def _copy_to_host(value: Tensor) -> np.ndarray:
    """Return a tensor as an array: items are counted on the host, as tasks do. On a GPU this waits for the device.

    Ones stand for the values of a step that is simulated to predict its memory, which does not depend on them.
    """
    return np.ones(tuple(value.shape)) if is_simulated() else value.cpu().numpy()


class ReboundModel:
    """A model called with other weights. With `second_order`, its output can be differentiated twice."""

    def __init__(self, model: nn.Module, weights: Weights, *, second_order: bool) -> None:
        self._model, self._weights, self._second_order = (
            model,
            {f"model.{n}": w for n, w in weights.items()},
            second_order,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        targets = args[1] if len(args) > 1 else kwargs.get("targets")
        if not self._second_order or not isinstance(self._model, Transformer) or targets is None:
            return self._call("__call__", *args, **kwargs)
        # The fused loss computes its gradients in the forward pass, and a second derivative would silently be 0.
        kwargs = {name: value for name, value in kwargs.items() if name != "targets"}
        output = self._call("__call__", args[0], **kwargs)
        if isinstance(output, tuple):  # with the routing of experts
            return token_cross_entropy(output[0], targets), *output[1:]
        return token_cross_entropy(output, targets)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        assert not isinstance(value, nn.Module | Tensor), f"{name} would have its old weights"
        return functools.partial(self._call, name) if callable(value) else value

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return functional_call(_MethodCaller(self._model), self._weights, (method, *args), kwargs)


class _MethodCaller(nn.Module):
    """Calls any method of a model from `forward`, since `functional_call` only replaces the weights of `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, method)(*args, **kwargs)


def _rebind_weights(models: Models, weights: Weights, *, second_order: bool = False) -> dict[str, Any]:
    """Return the models with "model" called with other weights."""
    return {**models, "model": ReboundModel(models["model"], weights, second_order=second_order)}


def _add_sums(totals: Sums, sums: Mapping[str, tuple[Array, Array]]) -> None:
    """Add `sums` to `totals`, in place."""
    for name, (value, count) in sums.items():
        old = totals.get(name)
        totals[name] = (value, count) if old is None else (old[0] + value, old[1] + count)


def _get_any_array(batch: Mapping[str, Any]) -> Any:
    """Return the first value that is not a scalar; its leading axes are those of every other array of the batch."""
    return next(value for value in batch.values() if value.ndim > 0)


def _count_examples(batch: Batch) -> int:
    return len(_get_any_array(batch))


def _flatten_episodes(value: Any) -> Any:
    """Reshape `(n, size, ...)` to `(n * size, ...)`."""
    return value.reshape(value.shape[0] * value.shape[1], *value.shape[2:])


def _select_episode(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {name: value if value.ndim == 0 else value[number] for name, value in batch.items()}
