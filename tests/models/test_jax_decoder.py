"""The decoder in JAX computes what its torch twin does, under the same parameter names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from bottega.core.model_spec import Initial, ModelSpec
from bottega.models import build, jax_build
from bottega.models.decoder.config import TransformerShape
from bottega.models.jax_layers import bind, forward_context
from bottega.models.losses.jax import linear_cross_entropy
from bottega.models.losses.linear_cross_entropy import linear_cross_entropy as torch_cross_entropy

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_size": 8,
    "intermediate_size": 48,
    "vocab_size": 61,
    "context": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own head": {"tie_embeddings": False},
    "grouped queries, no QK-norm": {"num_kv_heads": 2, "qk_norm": False},
    "speedrun": {"activation": "relu2", "value_embeddings": True, "logit_softcap": 5.0},
}


@pytest.fixture(params=VARIANTS)
def twins(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    shape = TransformerShape(**{**SIZES, **VARIANTS[request.param]})
    initial = Initial("bottega.models.decoder.{framework}:initialise_decoder", {"residual_layers": 2})
    spec = ModelSpec("bottega.models.decoder.{framework}:Transformer", shape, initial=initial, is_filled=True)
    return build.build_model(spec, 3), jax_build.build_model(spec, 3)


def make_batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, targets of which some are not predicted, and document ids."""
    ids = np.random.default_rng(0).integers(0, 61, (3, 25))
    targets = ids[:, 1:].copy()
    targets[0, :5] = -100
    return ids[:, :-1], targets, np.broadcast_to(np.arange(24) // 7, (3, 24))


def test_parameters_have_the_same_names_order_and_initial_values(twins: tuple[Any, Any]) -> None:
    ours, theirs = twins[1].state_dict(), {name: p.detach().numpy() for name, p in twins[0].named_parameters()}
    assert list(ours) == list(theirs)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_logits_loss_and_gradients_are_equal(twins: tuple[Any, Any]) -> None:
    torch_model, jax_model = twins
    inputs, targets, documents = make_batch()
    arguments = [torch.tensor(array) for array in (inputs, targets, documents.copy())]
    expected = torch_model(arguments[0], documents=arguments[2]).detach().numpy()
    loss = torch_model(arguments[0], arguments[1], documents=arguments[2])
    loss.backward()

    def compute_loss(parameters: dict[str, Any]) -> Any:
        return bind(jax_model, parameters)(inputs, targets, documents=documents)

    value, gradients = jax.jit(jax.value_and_grad(compute_loss))(jax_model.named_parameters())
    logits = np.asarray(jax_model(inputs, documents=documents))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert float(value) == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in torch_model.named_parameters():
        scale = parameter.grad.abs().max().item()
        np.testing.assert_allclose(gradients[name], parameter.grad.numpy(), rtol=1e-4, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("num_chunks", [1, 3, 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_cross_entropy_in_chunks_equals_torch(num_chunks: int, softcap: float | None) -> None:
    rng = np.random.default_rng(0)
    hidden, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((20, 8), (13, 8)))
    targets = rng.integers(0, 13, 20)
    targets[:3] = -100
    tensors = [torch.tensor(x, requires_grad=True) for x in (hidden, weight)]
    expected = torch_cross_entropy(*tensors, torch.tensor(targets), softcap=softcap)
    expected.backward()

    def compute(hidden: Any, weight: Any) -> Any:
        return linear_cross_entropy(hidden, weight, targets, dtype=jnp.float32, softcap=softcap, num_chunks=num_chunks)

    value, gradients = jax.value_and_grad(compute, argnums=(0, 1))(hidden, weight)
    assert float(value) == pytest.approx(expected.item(), rel=1e-6)
    assert float(compute(hidden, weight)) == pytest.approx(expected.item(), rel=1e-6)  # as in an evaluation
    for ours, tensor in zip(gradients, tensors, strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(ours, tensor.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_cache_gives_the_hidden_states_of_the_whole_sequence(twins: tuple[Any, Any]) -> None:
    model, (inputs, _, _) = twins[1], make_batch()
    shape = model.shape
    size = (3, 32, shape.num_kv_heads, shape.head_size)
    cache = tuple((jnp.zeros(size), jnp.zeros(size)) for _ in range(shape.num_layers))
    whole = np.asarray(model(inputs))
    positions = jnp.broadcast_to(jnp.arange(10), (3, 10))
    hidden, cache = model.decode(inputs[:, :10], cache, positions)
    np.testing.assert_allclose(model.compute_logits(hidden), whole[:, :10], atol=1e-4)
    for position in (10, 11):
        hidden, cache = model.decode(inputs[:, position : position + 1], cache, jnp.full((3, 1), position))
        np.testing.assert_allclose(model.compute_logits(hidden)[:, 0], whole[:, position], atol=1e-4)


def test_bfloat16_is_close_to_float32_and_keeps_float32_weights(twins: tuple[Any, Any]) -> None:
    model, (inputs, targets, _) = twins[1], make_batch()
    expected = float(model(inputs, targets))
    with forward_context(dtype=jnp.bfloat16):
        assert float(model(inputs, targets)) == pytest.approx(expected, rel=0.01)
    assert {str(value.dtype) for value in model.named_parameters().values()} == {"float32"}
