"""The language task: counts and sums over micro-batches, padding, metrics, and learning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from bottega.core.noise import Noise
from bottega.models.build import build_models
from bottega.models.decoder.config import TransformerShape
from bottega.models.folders.pretrained import export_transformers
from bottega.tasks.language.task import Language

SHAPE = TransformerShape(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    intermediate_size=48,
    vocab_size=50,
    context=16,
)
TASK = Language(shape=SHAPE)
RNG = Noise(0, 0, np.arange(4))


def host_batch(rows: int = 4, **more: Any) -> dict[str, np.ndarray]:
    return {"input_ids": np.random.default_rng(0).integers(0, 50, (rows, 13)), **more}


def to_tensors(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def total(models: dict[str, Any], batch: dict[str, np.ndarray]) -> float:
    return TASK.loss(models, to_tensors(batch), RNG).terms["loss"][0].item()


def test_sums_do_not_depend_on_the_micro_batches() -> None:
    models, batch = build_models(TASK, 0), host_batch()
    parts = [{name: array[i : i + 1] for name, array in batch.items()} for i in range(4)]
    assert sum(TASK.counts(part)["loss"] for part in parts) == TASK.counts(batch)["loss"] == 4 * 12
    assert sum(total(models, part) for part in parts) == pytest.approx(total(models, batch), rel=1e-6)


def test_padding_rows_and_ignored_tokens_do_not_count() -> None:
    models, batch = build_models(TASK, 0), host_batch(2)
    single = {name: array[:1] for name, array in batch.items()}
    padded = {**batch, "weight": np.array([1.0, 0.0], np.float32)}
    assert TASK.counts(padded) == TASK.counts(single)
    assert total(models, padded) == pytest.approx(total(models, single), rel=1e-6)
    short = {**single, "attention_mask": (np.arange(13) < 9).astype(np.int32)[None]}
    assert TASK.counts(short) == {"loss": 8.0}
    assert total(models, short) == pytest.approx(total(models, {"input_ids": single["input_ids"][:, :9]}), rel=1e-6)


def test_tokens_may_be_int32() -> None:
    models, batch = build_models(TASK, 0), host_batch()
    assert total(models, {"input_ids": batch["input_ids"].astype(np.int32)}) == total(models, batch)


def test_document_boundaries_change_the_loss() -> None:
    models, batch = build_models(TASK, 0), host_batch()
    documents = np.repeat(np.arange(2)[None, :], 4, axis=0).repeat([6, 7], axis=1)
    assert total(models, {**batch, "documents": documents}) != pytest.approx(total(models, batch), rel=1e-6)


def test_bits_per_byte_is_a_sum_and_its_count() -> None:
    models = build_models(TASK, 0)
    batch = host_batch(3, bytes=np.array([30, 40, 50]), weight=np.array([1, 1, 0], np.float32))
    loss = TASK.loss(models, to_tensors(batch), RNG)
    bits, size = loss.metrics["bits_per_byte"]
    assert size.item() == 70
    assert bits.item() == pytest.approx(loss.terms["loss"][0].item() / math.log(2))
    assert not bits.requires_grad


def test_summary_adds_the_perplexity() -> None:
    assert TASK.add_perplexity({"loss": math.log(50), "other": 1.0}) == {
        "loss": math.log(50),
        "other": 1.0,
        "perplexity": pytest.approx(50),
    }
    assert TASK.add_perplexity({"other": 1.0}) == {"other": 1.0}
    assert TASK.add_perplexity({"loss": 1e4})["perplexity"] == math.inf


def test_prediction_gives_the_logits_of_the_inputs() -> None:
    models, batch = build_models(TASK, 0), to_tensors(host_batch())
    models["model"].eval()
    logits = TASK.predict(models, batch)
    assert logits.shape == (4, 12, 50)
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(TASK.loss(models, batch, RNG).terms["loss"][0], nll)


def test_build_is_a_function_of_the_seed() -> None:
    first, again, other = (build_models(TASK, seed)["model"].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_build_can_start_from_a_folder(tmp_path: Any) -> None:
    source = build_models(TASK, 5)["model"]
    export_transformers(source.state_dict(), SHAPE, tmp_path)
    model = build_models(Language(shape=SHAPE, pretrained=str(tmp_path)), 0)["model"]
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_deterministic_sequence_is_learned() -> None:
    """Each token is the previous one plus one, so only the first is unpredictable."""
    models = build_models(TASK, 0)
    optimizer = torch.optim.AdamW(models["model"].parameters(), lr=1e-2)
    generator = np.random.default_rng(0)
    for _ in range(80):
        batch = {"input_ids": (generator.integers(0, 50, (16, 1)) + np.arange(13)) % 50}
        loss = TASK.loss(models, to_tensors(batch), RNG).terms["loss"][0] / TASK.counts(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
