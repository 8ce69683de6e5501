"""Language models with experts and state spaces: losses and metrics that do not depend on micro-batches, router updates, and cached decoding."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from bottega.core.noise import Noise
from bottega.core.types import Loss
from bottega.models.build import build_models
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.kinds import resolve_shape_fields
from bottega.models.decoder.torch import Transformer
from bottega.models.initial import initialise
from bottega.tasks.language.task import Language
from bottega.techniques.call_recorder import CallRecorder
from decoders import generate_rows, generate_without_cache

V, CONTEXT = 40, 16
STATE_SPACE = {"state_size": 8, "ssm_head_size": 8, "chunk_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "moe": {"num_experts": 4},
    "ssm": STATE_SPACE,
    "ssm-experts": {**STATE_SPACE, "num_experts": 3, "experts_every": 2},
    "hybrid": {**STATE_SPACE, "attention_every": 2},
}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]]
ROUTER = "model.layers.0.mlp.router"


def build_shape(name: str, **changes: Any) -> TransformerShape:
    kind: Any = name.partition("-")[0]
    sizes = {"num_layers": 2, "hidden_size": 32, **KINDS[name], **changes}
    return TransformerShape(vocab_size=V, context=CONTEXT, **resolve_shape_fields(kind, None, sizes))


def build_task(name: str = "moe", *, balance_weight: float = 0.01, z_weight: float = 0.001, **changes: Any) -> Language:
    return Language(shape=build_shape(name, **changes), balance_weight=balance_weight, z_weight=z_weight)


def host_batch(rows: int = 4, **more: Any) -> dict[str, Any]:
    return {"input_ids": np.random.default_rng(0).integers(0, V, (rows, 13)), **more}


def compute_loss(task: Language, models: dict[str, Any], batch: dict[str, Any]) -> Loss:
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    return task.loss(models, tensors, Noise(0, 0, np.arange(len(batch["input_ids"]))))


def build_skewed_models(task: Language) -> dict[str, Any]:
    """Build models whose routers prefer some experts, so that the load is not even by accident."""
    models = build_models(task, 0)
    with torch.no_grad():
        for name, parameter in models["model"].named_parameters():
            if name.endswith("router.weight"):
                parameter.mul_(20)
    return models


def split_rows(batch: dict[str, Any], *sizes: int) -> list[dict[str, Any]]:
    cuts = np.cumsum((0, *sizes))
    return [{k: v[a:b] for k, v in batch.items()} for a, b in pairwise(cuts)]


@pytest.mark.parametrize("changes", [{}, {"capacity_factor": 1.0}, {"balance": "bias", "gate": "sigmoid"}])
def test_terms_metrics_and_stats_add_up_over_any_micro_batch_split(changes: dict[str, Any]) -> None:
    task, batch = build_task(**changes), host_batch()
    models = build_skewed_models(task)
    total_output = compute_loss(task, models, batch)
    parts = [compute_loss(task, models, part) for part in split_rows(batch, 1, 3)]
    counts = [task.counts(part) for part in split_rows(batch, 1, 3)]
    for name, (total, _) in total_output.terms.items():
        assert sum(part.terms[name][0].item() for part in parts) == pytest.approx(total.item(), rel=1e-6)
        assert sum(count[name] for count in counts) == task.counts(batch)[name] == 4 * 12
    for name, (value, count) in total_output.metrics.items():
        values, numbers = (sum(float(part.metrics[name][i]) for part in parts) for i in range(2))
        assert values / numbers == pytest.approx(float(value) / float(count), rel=1e-6), name
    for name, stat in total_output.stats.items():
        torch.testing.assert_close(sum(part.stats[name] for part in parts), stat)


def test_padding_does_not_count() -> None:
    task, batch = build_task(capacity_factor=1.0), host_batch(2)
    models = build_skewed_models(task)
    single = {"input_ids": batch["input_ids"][:1, :9]}
    filled = {
        "input_ids": batch["input_ids"],
        "attention_mask": np.stack([np.arange(13) < 9, np.ones(13, bool)]).astype(np.int64),
        "weight": np.array([1.0, 0.0], np.float32),
    }
    a, b = compute_loss(task, models, single), compute_loss(task, models, filled)
    assert task.counts(single) == task.counts(filled) == dict.fromkeys(("loss", "balance", "router_z"), 8.0)
    for name, (total, _) in a.terms.items():
        assert b.terms[name][0].item() == pytest.approx(total.item(), rel=1e-5), name
    for name, stat in a.stats.items():
        torch.testing.assert_close(b.stats[name], stat)
    assert float(b.metrics["drop_rate"][0]) == float(a.metrics["drop_rate"][0]) > 0
    models["model"].eval()
    assert "drop_rate" not in compute_loss(task, models, single).metrics, "capacity is limited in training only"
    assert "drop_rate" not in compute_loss(build_task(), build_skewed_models(build_task()), single).metrics


def test_padding_does_not_change_firing_rates() -> None:
    task, batch = build_task(router="spiking"), host_batch(2)
    models = build_spiking_models(task)
    single = {"input_ids": batch["input_ids"][:1, :9]}
    ids = batch["input_ids"].copy()
    ids[0, 9:] = 0
    filled = {"input_ids": ids, "attention_mask": np.stack([np.arange(13) < 9, np.zeros(13, bool)]).astype(np.int64)}
    models["model"].eval()
    a, b = compute_loss(task, models, single), compute_loss(task, models, filled)
    (rate_sum, count), (padded_sum, padded_count) = a.metrics["firing_rate"], b.metrics["firing_rate"]
    assert float(count) == float(padded_count) == 8
    assert 0 < float(rate_sum) == pytest.approx(float(padded_sum), rel=1e-5)
    assert torch.equal(a.rows["units"][0], b.rows["units"][0])
    rows = [{name: value.numpy() for name, value in output.rows.items()} for output in (a, b)]
    assert task.score(rows[0])["dead"] == task.score(rows[1])["dead"] > 0
    assert {*a.terms, *a.metrics, *task.score(rows[0])} - {"loss"} == set(task.evaluation_metrics)


def build_spiking_models(task: Language) -> dict[str, Any]:
    """Build models in whose routers, of 32 units each, 3 units never fire and 2 always fire."""
    models = build_models(task, 0)
    with torch.no_grad():
        for name, parameter in models["model"].named_parameters():
            if "synapse.weight" in name:
                parameter.mul_(20)
            elif "synapse.bias" in name:
                parameter[:3], parameter[3:5] = -1e6, 1e6
    return models


def test_dead_and_saturated_units_are_counted() -> None:
    task, batch = build_task(router="spiking"), host_batch()
    models = build_spiking_models(task)
    models["model"].eval()
    out = compute_loss(task, models, batch)
    rows = {name: value.numpy() for name, value in out.rows.items()}
    assert rows["units"].shape == (4, 2 * 4 * 8)
    result = task.score(rows)
    assert 3 / 32 <= result["dead"] < 0.9
    assert 2 / 32 <= result["saturated"] < 0.5
    parts = [compute_loss(task, models, part) for part in split_rows(batch, 1, 3)]
    again = np.concatenate([part.rows["units"].numpy() for part in parts])
    assert np.array_equal(again, rows["units"])


def test_gate_entropy_is_normalised_to_one() -> None:
    task, batch = build_task(), host_batch()
    even = build_models(task, 0)
    with torch.no_grad():
        for name, parameter in even["model"].named_parameters():
            if name.endswith("router.weight"):
                parameter.zero_()
    total, count = compute_loss(task, even, batch).metrics["gate_entropy"]
    assert float(total / count) == pytest.approx(1, abs=1e-6)
    total, count = compute_loss(task, build_skewed_models(task), batch).metrics["gate_entropy"]
    assert float(total / count) < 0.95


def test_dropped_experts_depend_on_the_seed() -> None:
    task = build_task(expert_dropout=0.6)
    absent = [build_models(task, seed)["model"].get_buffer(f"{ROUTER}.absent") for seed in range(6)]
    assert len({tuple(mask.tolist()) for mask in absent}) > 1
    models = build_skewed_models(task)
    stats = compute_loss(task, models, host_batch()).stats
    tensors = dict(models["model"].named_buffers())
    new = {
        seed: tuple(
            tuple(task.update(tensors, stats, Noise(seed, step, ()))[f"{ROUTER}.absent"].tolist()) for step in range(9)
        )
        for seed in (0, 1)
    }
    assert new[0] != new[1]


def test_terms_of_each_balancing_method() -> None:
    assert set(build_task().counts(host_batch())) == {"loss", "balance", "router_z"}
    assert set(build_task(balance="bias").counts(host_batch())) == {"loss", "router_z"}
    plain = build_task(balance="none", z_weight=0.0)
    assert (
        set(plain.counts(host_batch()))
        == set(compute_loss(plain, build_models(plain, 0), host_batch()).terms)
        == {"loss"}
    )
    assert set(build_task("ssm").counts(host_batch())) == {"loss"}


def test_the_reported_loss_is_the_cross_entropy_only() -> None:
    task, batch = build_task(), host_batch()
    models = build_skewed_models(task)
    out = compute_loss(task, models, batch)
    total, count = out.metrics["loss"]
    assert total.item() == out.terms["loss"][0].item()
    assert count.item() == task.counts(batch)["loss"]
    assert (out.terms["balance"][1], out.terms["router_z"][1]) == (0.01, 0.001)
    # An even running load costs 1 per token and layer, whatever the routing.
    assert out.terms["balance"][0].item() / count.item() == pytest.approx(2.0, rel=1e-5)


def test_the_balancing_loss_lowers_the_gate_of_an_overloaded_expert() -> None:
    task, batch = build_task(z_weight=0.0), host_batch()
    models = build_skewed_models(task)
    load = torch.tensor([0.7, 0.1, 0.1, 0.1])
    models["model"].get_buffer(f"{ROUTER}.load").copy_(load)
    out = compute_loss(task, models, batch)
    out.terms["balance"][0].backward()
    router = models["model"].get_submodule(ROUTER)
    before = _mean_gates(models["model"], batch)
    with torch.no_grad():
        router.weight -= 0.01 * router.weight.grad
    after = _mean_gates(models["model"], batch)
    assert after[0] < before[0]
    assert torch.equal(router.load, load), "a forward must not change the load"


def _mean_gates(model: Transformer, batch: dict[str, Any]) -> torch.Tensor:
    tokens = torch.from_numpy(batch["input_ids"])
    with torch.no_grad():
        return model(tokens[:, :-1], tokens[:, 1:])[1][0].gates.mean((0, 1))


def test_update_moves_load_and_bias_by_the_batch_statistics() -> None:
    task, batch = build_task(balance="bias"), host_batch()
    models = build_skewed_models(task)
    out = compute_loss(task, models, batch)
    tensors = dict(models["model"].named_buffers())
    loads = [out.stats[f"model.layers.{layer}.mlp.load"].numpy() for layer in (0, 1)]
    entropies = [-sum(p * math.log(p) for p in load / load.sum() if p) / math.log(4) for load in loads]
    assert float(task.batch_metrics(out.stats)["load_entropy"]) == pytest.approx(np.mean(entropies), rel=1e-5)
    new = task.update(tensors, out.stats, Noise(0, 0, ()))
    assert {name.rpartition(".")[2] for name in new} == {"load", "bias"}
    loads = out.stats["model.layers.0.mlp.load"]
    fraction = loads / loads.sum()
    torch.testing.assert_close(new[f"{ROUTER}.load"], 0.9 * 0.25 + 0.1 * fraction)
    torch.testing.assert_close(new[f"{ROUTER}.bias"], 1e-3 * torch.sign(loads.mean() - loads))
    assert torch.equal(tensors[f"{ROUTER}.load"], torch.full((4,), 0.25)), "update must not modify its arguments"
    assert build_task("ssm").update({}, {}, Noise(0, 0, ())) == {}


def test_evaluation_reports_the_load_of_each_expert() -> None:
    task, batch = build_task(), host_batch()
    models = build_skewed_models(task)
    models["model"].eval()
    rows = {name: value.numpy() for name, value in compute_loss(task, models, batch).rows.items()}
    assert rows["load"].shape == (4, 2, 4)
    assert (rows["load"].sum(axis=-1) == 12 * 2).all()
    result = task.score(rows)
    assert set(result) < set(task.evaluation_metrics)
    assert sum(result[f"load/{expert}"] for expert in range(4)) == pytest.approx(1)
    fractions = rows["load"].sum(axis=0) / rows["load"].sum(axis=0).sum(axis=-1, keepdims=True)
    assert result["load_max"] == pytest.approx(fractions.max())
    assert 0 < result["load_entropy"] < 1
    single_expert = np.zeros((1, 1, 4))
    single_expert[..., 2] = 5
    assert task.score({"load": single_expert})["load_entropy"] == 0
    assert task.score({"load": np.ones((3, 2, 4))})["load_entropy"] == pytest.approx(1)
    assert "load" not in compute_loss(task, build_models(task, 0), batch).rows, "only evaluation returns it"


@pytest.mark.parametrize("name", KINDS)
def test_two_rows_are_overfitted(name: str) -> None:
    task, batch = build_task(name), host_batch(2)
    models = build_models(task, 0)
    optimizer = torch.optim.AdamW(models["model"].parameters(), lr=1e-2)
    for _ in range(60):
        out = compute_loss(task, models, batch)
        counts = task.counts(batch)
        cost = sum(weight * total / counts[key] for key, (total, weight) in out.terms.items())
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
    assert out.terms["loss"][0].item() / counts["loss"] < 0.2 < math.log(V)


def test_call_recorder_preserves_expert_losses() -> None:
    """The recorder provides logits for distillation although the model returns only the token loss; the task's losses must stay the same."""
    task, batch = build_task(), host_batch()
    models = build_skewed_models(task)
    recorder = CallRecorder(models["model"], computes_token_loss=True)
    a, b = compute_loss(task, models, batch), compute_loss(task, {"model": recorder}, batch)
    for name, (total, _) in a.terms.items():
        assert b.terms[name][0].item() == pytest.approx(total.item(), rel=1e-5), name
    assert a.stats.keys() == b.stats.keys()
    dense = build_models(Language(shape=build_shape("ssm")), 1)["model"]
    assert recorder.single_call.replay_on(dense).shape == recorder.single_call.output.shape == (4, 12, V)
    assert torch.equal(recorder.single_call.replay_on(models["model"]), recorder.single_call.output)


# Generation


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Transformer:
    model = Transformer(build_shape(request.param, num_layers=4, dropout=0.1))
    initialise(model, 0, std=0.3, residual_layers=4)
    return model


def test_cached_greedy_decoding_matches_full_forwards_beyond_the_context(model: Transformer) -> None:
    """Rows of 3, 8 and 1 tokens fill the context at different steps; 40 new tokens fill it several times."""
    result = generate_rows(model, PROMPTS, max_new_tokens=40, temperature=0)
    assert result == [generate_without_cache(model, prompt, 40) for prompt in PROMPTS]
    assert len({tuple(row) for row in result}) == 3, "the rows must differ for the comparison to mean anything"
    assert generate_rows(model, PROMPTS[:1], max_new_tokens=40, temperature=0) == result[:1], (
        "a single row gives the same tokens"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_batch(model: Transformer, temperature: float) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature, "top_p": 0.9}
    batched = generate_rows(model, PROMPTS, **settings)
    assert generate_rows(model, PROMPTS[:1], **settings)[0] == batched[0]
    assert generate_rows(model, [PROMPTS[0], [7] * 12, [1, 2]], **settings)[0] == batched[0]


def test_only_models_with_attention_truncate_a_prompt_longer_than_the_context(model: Transformer) -> None:
    prompt = list(np.random.default_rng(0).integers(0, V, 3 * CONTEXT))
    prompt = list(map(int, prompt))
    truncated = prompt[-CONTEXT:] if model.shape.has_attention else prompt
    result = generate_rows(model, [prompt], max_new_tokens=3, temperature=0)
    assert (
        result
        == generate_rows(model, [truncated], max_new_tokens=3, temperature=0)
        == [generate_without_cache(model, truncated, 3)]
    )


def test_a_stopped_row_does_not_change_the_others(model: Transformer) -> None:
    free = generate_rows(model, PROMPTS, max_new_tokens=20, temperature=1.0, seed=3)
    stop = free[0][4]
    stopped = generate_rows(model, PROMPTS, max_new_tokens=20, temperature=1.0, seed=3, stop_token=stop)
    for before, after in zip(free, stopped, strict=True):
        end = before.index(stop) + 1 if stop in before else len(before)
        assert after[:end] == before[:end]
