"""Language models with experts and state spaces: what they cost and report adds up, what routers learn is exact, and writing
token by token is reading everything again."""

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
from decoders import greedy_by_reading_again, texts

V, CONTEXT = 40, 16
SCANNED = {"state_size": 8, "ssm_head_size": 8, "chunk_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "moe": {"num_experts": 4},
    "ssm": SCANNED,
    "ssm-experts": {**SCANNED, "num_experts": 3, "experts_every": 2},
    "hybrid": {**SCANNED, "attention_every": 2},
}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]]
ROUTER = "model.layers.0.mlp.router"


def shape_of(name: str, **changes: Any) -> TransformerShape:
    kind: Any = name.partition("-")[0]
    said = {"num_layers": 2, "hidden_size": 32, **KINDS[name], **changes}
    return TransformerShape(vocab_size=V, context=CONTEXT, **resolve_shape_fields(kind, None, said))


def task_of(name: str = "moe", *, balance_weight: float = 0.01, z_weight: float = 0.001, **changes: Any) -> Language:
    return Language(shape=shape_of(name, **changes), balance_weight=balance_weight, z_weight=z_weight)


def host_batch(rows: int = 4, **more: Any) -> dict[str, Any]:
    return {"input_ids": np.random.default_rng(0).integers(0, V, (rows, 13)), **more}


def said(task: Language, models: dict[str, Any], batch: dict[str, Any]) -> Loss:
    on_device = {name: torch.from_numpy(array) for name, array in batch.items()}
    return task.loss(models, on_device, Noise(0, 0, np.arange(len(batch["input_ids"]))))


def skewed(task: Language) -> dict[str, Any]:
    """Routers that prefer some experts, so that an even load is nobody's by accident."""
    models = build_models(task, 0)
    with torch.no_grad():
        for name, parameter in models["model"].named_parameters():
            if name.endswith("router.weight"):
                parameter.mul_(20)
    return models


def slices(batch: dict[str, Any], *sizes: int) -> list[dict[str, Any]]:
    cuts = np.cumsum((0, *sizes))
    return [{k: v[a:b] for k, v in batch.items()} for a, b in pairwise(cuts)]


@pytest.mark.parametrize("changes", [{}, {"capacity_factor": 1.0}, {"balance": "bias", "gate": "sigmoid"}])
def test_terms_metrics_and_stats_add_up_over_any_split(changes: dict[str, Any]) -> None:
    task, batch = task_of(**changes), host_batch()
    models = skewed(task)
    whole = said(task, models, batch)
    parts = [said(task, models, part) for part in slices(batch, 1, 3)]
    counts = [task.counts(part) for part in slices(batch, 1, 3)]
    for name, (total, _) in whole.terms.items():
        assert sum(part.terms[name][0].item() for part in parts) == pytest.approx(total.item(), rel=1e-6)
        assert sum(count[name] for count in counts) == task.counts(batch)[name] == 4 * 12
    for name, (value, count) in whole.metrics.items():
        values, numbers = (sum(float(part.metrics[name][i]) for part in parts) for i in range(2))
        assert values / numbers == pytest.approx(float(value) / float(count), rel=1e-6), name
    for name, stat in whole.stats.items():
        torch.testing.assert_close(sum(part.stats[name] for part in parts), stat)


def test_padding_counts_nowhere() -> None:
    task, batch = task_of(capacity_factor=1.0), host_batch(2)
    models = skewed(task)
    alone = {"input_ids": batch["input_ids"][:1, :9]}
    filled = {
        "input_ids": batch["input_ids"],
        "attention_mask": np.stack([np.arange(13) < 9, np.ones(13, bool)]).astype(np.int64),
        "weight": np.array([1.0, 0.0], np.float32),
    }
    a, b = said(task, models, alone), said(task, models, filled)
    assert task.counts(alone) == task.counts(filled) == dict.fromkeys(("loss", "balance", "router_z"), 8.0)
    for name, (total, _) in a.terms.items():
        assert b.terms[name][0].item() == pytest.approx(total.item(), rel=1e-5), name
    for name, stat in a.stats.items():
        torch.testing.assert_close(b.stats[name], stat)
    assert float(b.metrics["drop_rate"][0]) == float(a.metrics["drop_rate"][0]) > 0
    models["model"].eval()
    assert "drop_rate" not in said(task, models, alone).metrics, "room is limited in training alone"
    assert "drop_rate" not in said(task_of(), skewed(task_of()), alone).metrics


def test_padding_fires_nowhere() -> None:
    task, batch = task_of(router="spiking"), host_batch(2)
    models = louder(task)
    alone = {"input_ids": batch["input_ids"][:1, :9]}
    ids = batch["input_ids"].copy()
    ids[0, 9:] = 0
    filled = {"input_ids": ids, "attention_mask": np.stack([np.arange(13) < 9, np.zeros(13, bool)]).astype(np.int64)}
    models["model"].eval()
    a, b = said(task, models, alone), said(task, models, filled)
    (fired, count), (other, number) = a.metrics["firing_rate"], b.metrics["firing_rate"]
    assert float(count) == float(number) == 8
    assert 0 < float(fired) == pytest.approx(float(other), rel=1e-5)
    assert torch.equal(a.rows["units"][0], b.rows["units"][0])
    rows = [{name: value.numpy() for name, value in one.rows.items()} for one in (a, b)]
    assert task.score(rows[0])["dead"] == task.score(rows[1])["dead"] > 0
    assert {*a.terms, *a.metrics, *task.score(rows[0])} - {"loss"} == set(task.evaluation_metrics)


def louder(task: Language) -> dict[str, Any]:
    models = build_models(task, 0)
    with torch.no_grad():
        for name, parameter in models["model"].named_parameters():
            if "synapse.weight" in name:
                parameter.mul_(20)
            elif "synapse.bias" in name:
                parameter[:3], parameter[3:5] = -1e6, 1e6
    return models


def test_units_that_never_or_always_fire_are_told() -> None:
    task, batch = task_of(router="spiking"), host_batch()
    models = louder(task)
    models["model"].eval()
    out = said(task, models, batch)
    rows = {name: value.numpy() for name, value in out.rows.items()}
    assert rows["units"].shape == (4, 2 * 4 * 8)
    found = task.score(rows)
    assert 3 / 32 <= found["dead"] < 0.9
    assert 2 / 32 <= found["saturated"] < 0.5
    parts = [said(task, models, part) for part in slices(batch, 1, 3)]
    again = np.concatenate([part.rows["units"].numpy() for part in parts])
    assert np.array_equal(again, rows["units"])


def test_gate_entropy_is_a_share_of_the_most_there_can_be() -> None:
    task, batch = task_of(), host_batch()
    even = build_models(task, 0)
    with torch.no_grad():
        for name, parameter in even["model"].named_parameters():
            if name.endswith("router.weight"):
                parameter.zero_()
    total, count = said(task, even, batch).metrics["gate_entropy"]
    assert float(total / count) == pytest.approx(1, abs=1e-6)
    total, count = said(task, skewed(task), batch).metrics["gate_entropy"]
    assert float(total / count) < 0.95


def test_two_seeds_leave_out_other_experts_also_in_the_first_step() -> None:
    task = task_of(expert_dropout=0.6)
    absent = [build_models(task, seed)["model"].get_buffer(f"{ROUTER}.absent") for seed in range(6)]
    assert len({tuple(one.tolist()) for one in absent}) > 1
    models = skewed(task)
    seen = said(task, models, host_batch()).stats
    tensors = dict(models["model"].named_buffers())
    new = {
        seed: tuple(
            tuple(task.update(tensors, seen, Noise(seed, step, ()))[f"{ROUTER}.absent"].tolist()) for step in range(9)
        )
        for seed in (0, 1)
    }
    assert new[0] != new[1]


def test_only_what_balances_costs() -> None:
    assert set(task_of().counts(host_batch())) == {"loss", "balance", "router_z"}
    assert set(task_of(balance="bias").counts(host_batch())) == {"loss", "router_z"}
    plain = task_of(balance="none", z_weight=0.0)
    assert set(plain.counts(host_batch())) == set(said(plain, build_models(plain, 0), host_batch()).terms) == {"loss"}
    assert set(task_of("ssm").counts(host_batch())) == {"loss"}


def test_the_loss_that_is_told_is_that_of_the_text() -> None:
    task, batch = task_of(), host_batch()
    models = skewed(task)
    out = said(task, models, batch)
    total, count = out.metrics["loss"]
    assert total.item() == out.terms["loss"][0].item()
    assert count.item() == task.counts(batch)["loss"]
    assert (out.terms["balance"][1], out.terms["router_z"][1]) == (0.01, 0.001)
    # An even running load costs 1 a token and layer, wherever the tokens go.
    assert out.terms["balance"][0].item() / count.item() == pytest.approx(2.0, rel=1e-5)


def test_the_balancing_loss_reaches_the_routers_and_pushes_down_who_is_asked_too_much() -> None:
    task, batch = task_of(z_weight=0.0), host_batch()
    models = skewed(task)
    load = torch.tensor([0.7, 0.1, 0.1, 0.1])
    models["model"].get_buffer(f"{ROUTER}.load").copy_(load)
    out = said(task, models, batch)
    out.terms["balance"][0].backward()
    router = models["model"].get_submodule(ROUTER)
    before = _chance(models["model"], batch)
    with torch.no_grad():
        router.weight -= 0.01 * router.weight.grad
    after = _chance(models["model"], batch)
    assert after[0] < before[0]
    assert torch.equal(router.load, load), "a forward changes nothing"


def _chance(model: Transformer, batch: dict[str, Any]) -> torch.Tensor:
    tokens = torch.from_numpy(batch["input_ids"])
    with torch.no_grad():
        return model(tokens[:, :-1], tokens[:, 1:])[1][0].gates.mean((0, 1))


def test_after_a_step_routers_know_what_all_of_it_asked_for() -> None:
    task, batch = task_of(balance="bias"), host_batch()
    models = skewed(task)
    out = said(task, models, batch)
    tensors = dict(models["model"].named_buffers())
    asked = [out.stats[f"model.layers.{layer}.mlp.load"].numpy() for layer in (0, 1)]
    surprise = [-sum(p * math.log(p) for p in load / load.sum() if p) / math.log(4) for load in asked]
    assert float(task.batch_metrics(out.stats)["load_entropy"]) == pytest.approx(np.mean(surprise), rel=1e-5)
    new = task.update(tensors, out.stats, Noise(0, 0, ()))
    assert {name.rpartition(".")[2] for name in new} == {"load", "bias"}
    asked = out.stats["model.layers.0.mlp.load"]
    share = asked / asked.sum()
    torch.testing.assert_close(new[f"{ROUTER}.load"], 0.9 * 0.25 + 0.1 * share)
    torch.testing.assert_close(new[f"{ROUTER}.bias"], 1e-3 * torch.sign(asked.mean() - asked))
    assert torch.equal(tensors[f"{ROUTER}.load"], torch.full((4,), 0.25)), "it is pure"
    assert task_of("ssm").update({}, {}, Noise(0, 0, ())) == {}


def test_an_evaluation_tells_the_load_of_each_layer() -> None:
    task, batch = task_of(), host_batch()
    models = skewed(task)
    models["model"].eval()
    rows = {name: value.numpy() for name, value in said(task, models, batch).rows.items()}
    assert rows["load"].shape == (4, 2, 4)
    assert (rows["load"].sum(axis=-1) == 12 * 2).all()
    found = task.score(rows)
    assert set(found) < set(task.evaluation_metrics)
    assert sum(found[f"load/{expert}"] for expert in range(4)) == pytest.approx(1)
    shares = rows["load"].sum(axis=0) / rows["load"].sum(axis=0).sum(axis=-1, keepdims=True)
    assert found["load_max"] == pytest.approx(shares.max())
    assert 0 < found["load_entropy"] < 1
    one = np.zeros((1, 1, 4))
    one[..., 2] = 5
    assert task.score({"load": one})["load_entropy"] == 0
    assert task.score({"load": np.ones((3, 2, 4))})["load_entropy"] == pytest.approx(1)
    assert "load" not in said(task, build_models(task, 0), batch).rows, "training has no use for it"


@pytest.mark.parametrize("name", KINDS)
def test_it_can_learn_by_heart(name: str) -> None:
    task, batch = task_of(name), host_batch(2)
    models = build_models(task, 0)
    optimizer = torch.optim.AdamW(models["model"].parameters(), lr=1e-2)
    for _ in range(60):
        out = said(task, models, batch)
        counts = task.counts(batch)
        cost = sum(weight * total / counts[key] for key, (total, weight) in out.terms.items())
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
    assert out.terms["loss"][0].item() / counts["loss"] < 0.2 < math.log(V)


def test_who_listens_hears_the_experts_too() -> None:
    """Distillation asks for logits where the task asks for their loss."""
    task, batch = task_of(), host_batch()
    models = skewed(task)
    heard = CallRecorder(models["model"], tokens=True)
    a, b = said(task, models, batch), said(task, {"model": heard}, batch)
    for name, (total, _) in a.terms.items():
        assert b.terms[name][0].item() == pytest.approx(total.item(), rel=1e-5), name
    assert a.stats.keys() == b.stats.keys()
    dense = build_models(Language(shape=shape_of("ssm")), 1)["model"]
    assert heard.single_call.replay_on(dense).shape == heard.single_call.output.shape == (4, 12, V)
    assert torch.equal(heard.single_call.replay_on(models["model"]), heard.single_call.output)


# Writing


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Transformer:
    model = Transformer(shape_of(request.param, num_layers=4, dropout=0.1))
    initialise(model, 0, std=0.3, residual_layers=4)
    return model


def test_greedy_equals_reading_everything_again_beyond_the_context(model: Transformer) -> None:
    """Rows of 3, 8 and 1 tokens fill the context at different moments; 40 new tokens fill it several times."""
    found = texts(model, PROMPTS, max_new_tokens=40, temperature=0)
    assert found == [greedy_by_reading_again(model, prompt, 40) for prompt in PROMPTS]
    assert len({tuple(row) for row in found}) == 3, "the rows differ, or the comparison says nothing"
    assert texts(model, PROMPTS[:1], max_new_tokens=40, temperature=0) == found[:1], (
        "alone, all of the cache is read anew"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_its_company(model: Transformer, temperature: float) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 30, "temperature": temperature, "top_p": 0.9}
    together = texts(model, PROMPTS, **settings)
    assert texts(model, PROMPTS[:1], **settings)[0] == together[0]
    assert texts(model, [PROMPTS[0], [7] * 12, [1, 2]], **settings)[0] == together[0]


def test_a_prompt_longer_than_the_context(model: Transformer) -> None:
    prompt = list(np.random.default_rng(0).integers(0, V, 3 * CONTEXT))
    prompt = list(map(int, prompt))
    shown = prompt[-CONTEXT:] if model.shape.has_attention else prompt
    found = texts(model, [prompt], max_new_tokens=3, temperature=0)
    assert found == texts(model, [shown], max_new_tokens=3, temperature=0) == [greedy_by_reading_again(model, shown, 3)]


def test_a_row_that_has_stopped_disturbs_nobody(model: Transformer) -> None:
    free = texts(model, PROMPTS, max_new_tokens=20, temperature=1.0, seed=3)
    stop = free[0][4]
    stopped = texts(model, PROMPTS, max_new_tokens=20, temperature=1.0, seed=3, stop_token=stop)
    for before, after in zip(free, stopped, strict=True):
        end = before.index(stop) + 1 if stop in before else len(before)
        assert after[:end] == before[: min(end, len(after))]
