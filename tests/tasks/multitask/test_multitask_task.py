"""Several tasks over one trunk: what is shared is one tensor, what they cost is the sum, and no sample counts twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bottega.config.training import Training
from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.core.trainer import evaluate
from bottega.data.loading.loader import Loader, iter_eval_batches
from bottega.data.order.orders import Shuffled
from bottega.data.sources.source import ArraySource, Source
from bottega.data.sources.zip_sources import Unshuffled, Zip
from bottega.engines.torch.devices import move_batch
from bottega.engines.torch.engine import TorchEngine
from bottega.models.build import build_models
from bottega.models.decoder.config import TransformerShape
from bottega.models.multitask import MultitaskModel, shared_layers
from bottega.models.text_classifier.config import EncoderShape
from bottega.tasks.classify.task import Classification
from bottega.tasks.language.task import Language
from bottega.tasks.multitask.task import Multitask

VOCABULARY, WIDTH = 11, 8
ENCODER = EncoderShape(
    vocab_size=VOCABULARY, num_labels=3, hidden_size=WIDTH, num_layers=2, num_heads=2, max_positions=16, dropout=0.0
)
DECODER = TransformerShape(
    num_layers=2,
    hidden_size=WIDTH,
    num_heads=2,
    num_kv_heads=2,
    head_size=WIDTH // 2,
    intermediate_size=3 * WIDTH,
    vocab_size=VOCABULARY,
    context=12,
)
WEIGHTS = {"text": 0.25, "topics": 2.0}


def task(balance: Any = "fixed", **changes: Any) -> Multitask:
    parts = {"text": Language(shape=DECODER), "topics": Classification(key="text", shape=ENCODER)}
    return Multitask(parts={**parts, **changes}, weights={**dict.fromkeys(changes, 1.0), **WEIGHTS}, balance=balance)


def texts(count: int, *, seed: int = 0) -> ArraySource:
    return ArraySource({"input_ids": np.random.default_rng(seed).integers(0, VOCABULARY, (count, 9))})


def topics(count: int, *, seed: int = 1) -> ArraySource:
    draw = np.random.default_rng(seed)
    mask = (np.arange(8) < draw.integers(1, 9, count)[:, None]).astype(np.int32)
    ids = draw.integers(0, VOCABULARY, (count, 8))
    return ArraySource({"input_ids": ids, "attention_mask": mask, "label": draw.integers(0, 3, count)})


def beside(short: int = 10, long: int = 23, *, is_training: bool = True) -> Zip:
    sources: dict[str, Source] = {"text": texts(short), "topics": topics(long)}
    orders = {name: Shuffled(len(one), 5) for name, one in sources.items()} if is_training else None
    return Zip(sources, orders=orders)


def batch(count: int = 6) -> dict[str, Any]:
    return move_batch(beside().rows(np.arange(count), np.zeros(count, int)), torch.device("cpu"))


def noise(count: int = 6) -> Noise:
    return Noise(0, 0, torch.arange(count), torch)


def engine(of: Multitask, **options: Any) -> TorchEngine:
    values = {"optimizer": {"name": "sgd", "momentum": 0.0}, "learning_rate": 0.1, "max_grad_norm": None, **options}
    training = Training.model_validate({"max_steps": 4, "weight_decay": 0.1, **values})
    return TorchEngine(of, training, rate=lambda step: 0.1, device="cpu", micro_batch_size=training.micro_batch_size)


def loader(count: int = 6) -> Loader:
    return Loader(beside(), count, seed=0, order=Unshuffled(len(beside())))


# What is shared


def test_shared_layers_are_one_tensor_and_are_named_once() -> None:
    model = build_models(task(), 0)["model"]
    assert model.part("text").model.embed_tokens is model.part("topics").embedding
    for a, b in zip(model.part("text").model.layers, model.part("topics").layers, strict=True):
        assert a is not b, "what a block drops is no weight"
        assert all(x is y for x, y in zip(a.parameters(), b.parameters(), strict=True))
    state = model.state_dict()
    assert list(state) == [name for name, _ in model.named_parameters()]
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    own = {name for name in state if name.startswith("parts.")}
    assert own == {f"parts.{n}" for n in ("text.model.norm.weight", "topics.norm.weight", "topics.head.weight")} | {
        "parts.topics.head.bias"
    }


def test_weights_go_back_to_every_part() -> None:
    a, b = build_models(task(), 0)["model"], build_models(task(), 1)["model"]
    b.load_state_dict(a.state_dict())
    ids = torch.arange(8)[None] % VOCABULARY
    for name, given in (("text", (ids,)), ("topics", (ids, ids >= 0))):
        assert torch.equal(a(name, *given), b(name, *given))
        assert torch.equal(a(name, *given), a.part(name)(*given))


def test_a_missing_weight_is_missed() -> None:
    model = build_models(task(), 0)["model"]
    state = model.state_dict()
    state.pop("shared.layers.0.mlp.up_proj.weight")
    with pytest.raises(RuntimeError, match="up_proj"):
        model.load_state_dict(state)


def test_a_part_begins_as_it_would_alone() -> None:
    """The first has the weights of the trunk, and every part those of its own last layer."""
    whole, alone = build_models(task(), 3)["model"], build_models(Language(shape=DECODER), 3)["model"]
    for name, tensor in alone.state_dict().items():
        assert torch.equal(whole.part("text").state_dict()[name], tensor)


def test_weights_that_were_learnt_before_win_over_drawn_ones() -> None:
    models = {n: build_models(Classification(key="text", shape=ENCODER), s)["model"] for n, s in (("a", 0), ("b", 1))}
    kept = models["b"].embedding.weight.detach().clone()
    assert torch.equal(MultitaskModel(models, first=["b"]).part("a").embedding.weight, kept)


def test_only_layers_of_one_form_are_shared() -> None:
    wider = ENCODER.model_copy(update={"vocab_size": VOCABULARY + 1})
    one = task(topics=Classification(key="text", shape=wider))
    plan = shared_layers({name: build_models(part, 0)["model"] for name, part in one.parts.items()})
    assert "embedding" not in plan
    assert "layers.1.mlp.up_proj" in plan


def test_parts_that_share_nothing_are_refused() -> None:
    narrow = ENCODER.model_copy(update={"hidden_size": 2 * WIDTH})
    with pytest.raises(UsageError, match=r"^data\.parts\.\w+: its model shares no layer with another part"):
        build_models(task(topics=Classification(key="text", shape=narrow)), 0)


def test_a_part_cannot_have_the_name_of_something_else() -> None:
    with pytest.raises(UsageError, match=r"data\.parts\.train: "):
        build_models(task(train=Classification(key="text", shape=ENCODER)), 0)


# What it costs


def test_fixed_weights_are_a_sum_made_by_hand_and_gradients_add() -> None:
    one = task()
    models = build_models(one, 0)
    found = one.loss(models, batch(), noise())
    counts = one.counts({n: {k: v.numpy() for k, v in b.items()} for n, b in batch().items()})
    total = sum(weight * value / counts[name] for name, (value, weight) in found.terms.items())
    total.backward()
    together = {name: p.grad.clone() for name, p in models["model"].named_parameters()}
    by_hand, expected = 0.0, {name: torch.zeros_like(g) for name, g in together.items()}
    for name, part in one.parts.items():
        models["model"].zero_grad()
        alone = part.loss({"model": models["model"].part(name)}, batch()[name], noise())
        mean = alone.terms["loss"][0] / counts[f"{name}/loss"]
        mean.backward()
        by_hand += WEIGHTS[name] * float(mean.detach())
        for key, p in models["model"].named_parameters():
            expected[key] += WEIGHTS[name] * (p.grad if p.grad is not None else 0.0)
    assert float(total.detach()) == pytest.approx(by_hand, rel=1e-6)
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("balance", ["fixed", "uncertainty", "pcgrad"])
def test_the_step_is_free_of_the_split(balance: Any) -> None:
    states = []
    for micro in (None, 1, 4):
        one = engine(task(balance), micro_batch_size=micro)
        for step in range(3):
            one.train_step(step, loader().batch(step))
        states.append(one.state()["model.safetensors"])
    for other in states[1:]:
        for name, tensor in states[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_log_variance_is_the_closed_form() -> None:
    """Of exp(-s) w L + s / 2 it is 1 / 2 - exp(-s) w L, and no weight decay pulls at it."""
    one = engine(task("uncertainty"))
    start = {"text": 0.3, "topics": -0.2}
    with torch.no_grad():
        for name, value in start.items():
            one.model.log_variance.get_parameter(name).fill_(value)
    losses = evaluated_on(one, 0)
    report = one.fetch(one.train_step(0, loader().batch(0)))
    for name, s in start.items():
        slope = 0.5 - np.exp(-s) * WEIGHTS[name] * losses[name]
        found = float(one.model.log_variance.get_parameter(name).detach())
        assert found == pytest.approx(s - 0.1 * slope, rel=1e-5)
        assert report[f"{name}/weight"] == pytest.approx(np.exp(-s) * WEIGHTS[name], rel=1e-6)
    assert report["loss"] == pytest.approx(sum(np.exp(-s) * WEIGHTS[n] * losses[n] for n, s in start.items()), rel=1e-5)
    assert report["penalty"] == pytest.approx(sum(start.values()) / 2, rel=1e-5)


def evaluated_on(one: TorchEngine, step: int) -> dict[str, float]:
    """The mean loss of each part on the batch of a step; there is no dropout in these models."""
    sums = one.eval_step(loader().batch(step)).sums
    return {name: float(sums[f"{name}/loss"][0] / sums[f"{name}/loss"][1]) for name in WEIGHTS}


def test_an_uncertain_part_settles_where_its_weight_is_the_inverse_of_its_loss() -> None:
    """With L held still, exp(-s) w L = 1 / 2 is where nothing moves any more."""
    one = engine(task("uncertainty"), groups=[{"pattern": "log_variance.*"}, {"pattern": ".*", "scale": "none"}])
    losses = evaluated_on(one, 0)
    for _ in range(150):
        report = one.train_step(0, loader().batch(0))
    for name, value in losses.items():
        assert float(report[f"{name}/weight"].value) * value == pytest.approx(0.5, rel=1e-2)


def test_gradients_that_are_kept_apart_do_not_work_against_a_part() -> None:
    """Two heads over one trunk that want the opposite of it."""
    one = engine(task("pcgrad"))
    assert one.task.gradient_surgery
    report = one.fetch(one.train_step(0, loader().batch(0)))
    assert -1.0 <= report["gradient_cosine"] <= 1.0
    assert not task("fixed").gradient_surgery


def test_parts_draw_different_noise() -> None:
    drawn: dict[str, torch.Tensor] = {}

    class Drawing(Language):
        seen: str

        def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
            drawn[self.seen] = rng.uniform("x", (3,))
            return super().loss(models, batch, rng)

    parts = {n: Drawing(shape=DECODER, seen=n) for n in ("a", "b")}
    one = Multitask(parts=parts, weights={"a": 1.0, "b": 1.0})
    rows = move_batch({n: texts(4).rows(np.arange(4), np.zeros(4)) for n in parts}, torch.device("cpu"))
    one.loss(build_models(one, 0), rows, noise(4))
    assert not torch.equal(drawn["a"], drawn["b"])


# What is seen


def test_a_part_sees_what_it_would_see_alone() -> None:
    together = loader(6)
    for name, source in (("text", texts(10)), ("topics", topics(23))):
        alone = Loader(source, 6, seed=5)
        for step in (0, 1, 5, 40):
            for key, values in alone.batch(step).items():
                np.testing.assert_array_equal(together.batch(step)[name][key], values)


@pytest.mark.parametrize(("size", "sizes"), [(1, (10, 23)), (4, (23, 10)), (7, (10, 23)), (64, (23, 10))])
def test_an_evaluation_counts_every_sample_of_every_part_once(size: int, sizes: tuple[int, int]) -> None:
    one, source = engine(task()), beside(*sizes, is_training=False)
    found = evaluate(one, iter_eval_batches(source, size), score=one.task.score)
    for name, part in one.task.parts.items():  # type: ignore[attr-defined]
        own = source.sources[name]
        whole = move_batch(own.rows(np.arange(len(own)), np.zeros(len(own), int)), torch.device("cpu"))
        with torch.no_grad():
            out = part.loss({"model": one.model.part(name)}, whole, noise(len(own)))
        mean = float(out.terms["loss"][0]) / part.counts({k: v.numpy() for k, v in whole.items()})["loss"]
        assert found[f"{name}/loss"] == pytest.approx(mean, rel=1e-6)
        scored = part.score({key: values.numpy() for key, values in out.rows.items()}) if out.rows else {}
        assert bool(scored) == (name == "topics")
        for key, value in scored.items():
            assert found[f"{name}/{key}"] == pytest.approx(value, rel=1e-5), key


def test_ranks_share_an_evaluation_that_does_not_divide() -> None:
    """Rows that fill up a share count for nobody: 23 in batches of 5, over two ranks."""
    one = engine(task())
    usual = evaluate(one, iter_eval_batches(beside(is_training=False), 5))
    shares = [list(iter_eval_batches(beside(is_training=False), 5, data_rank=rank, data_size=2)) for rank in (0, 1)]
    total: dict[str, list[float]] = {}
    for part in (*shares[0], *shares[1]):
        for name, (value, count) in one.eval_step(part).sums.items():
            old = total.setdefault(name, [0.0, 0.0])
            old[0], old[1] = old[0] + float(value), old[1] + float(count)
    assert {name: value / count for name, (value, count) in total.items()} == pytest.approx(usual, rel=1e-6)


def test_a_batch_of_one_part_alone_measures_that_part() -> None:
    one = engine(task("uncertainty"))
    found = evaluate(one, iter_eval_batches(Zip({"topics": topics(9)}), 4), score=one.task.score)
    assert {name.partition("/")[0] for name in found} == {"topics"}


def test_what_lies_side_by_side_can_be_described() -> None:
    shown = beside().describe(3, 0)
    assert "text: sample" in shown
    assert "topics: sample" in shown
    assert "text" not in beside(is_training=False).describe(15, 0), "that part has ended"


def test_a_module_without_what_is_asked_for_offers_nothing() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(3, 2)
            self.layers = nn.ModuleList([nn.Linear(2, 2)])
            self.head = nn.Linear(2, 2)

    model = MultitaskModel({"a": Plain(), "b": Plain()})
    assert not model.checkpoint_blocks
    model.compile_blocks()
    assert list(model.plan) == ["embedding", "layers.0"]
