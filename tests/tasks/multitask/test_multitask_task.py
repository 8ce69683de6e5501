"""Several tasks over one trunk: shared tensors, the weighted loss and its balancing, and evaluation of each task."""

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
from bottega.models.multitask import MultitaskModel, find_shared_layers
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
    rng = np.random.default_rng(seed)
    mask = (np.arange(8) < rng.integers(1, 9, count)[:, None]).astype(np.int32)
    ids = rng.integers(0, VOCABULARY, (count, 8))
    return ArraySource({"input_ids": ids, "attention_mask": mask, "label": rng.integers(0, 3, count)})


def zip_sources(short: int = 10, long: int = 23, *, is_training: bool = True) -> Zip:
    sources: dict[str, Source] = {"text": texts(short), "topics": topics(long)}
    orders = {name: Shuffled(len(source), 5) for name, source in sources.items()} if is_training else None
    return Zip(sources, orders=orders)


def batch(count: int = 6) -> dict[str, Any]:
    return move_batch(zip_sources().rows(np.arange(count), np.zeros(count, int)), torch.device("cpu"))


def noise(count: int = 6) -> Noise:
    return Noise(0, 0, torch.arange(count), torch)


def engine(multitask: Multitask, **options: Any) -> TorchEngine:
    values = {"optimizer": {"name": "sgd", "momentum": 0.0}, "learning_rate": 0.1, "max_grad_norm": None, **options}
    training = Training.model_validate({"max_steps": 4, "weight_decay": 0.1, **values})
    return TorchEngine(
        multitask, training, rate=lambda step: 0.1, device="cpu", micro_batch_size=training.micro_batch_size
    )


def loader(count: int = 6) -> Loader:
    return Loader(zip_sources(), count, seed=0, order=Unshuffled(len(zip_sources())))


# Shared layers


def test_shared_layers_are_one_tensor_and_are_named_once() -> None:
    model = build_models(task(), 0)["model"]
    assert model.part("text").model.embed_tokens is model.part("topics").embedding
    for a, b in zip(model.part("text").model.layers, model.part("topics").layers, strict=True):
        assert a is not b, "dropout is not shared"
        assert all(x is y for x, y in zip(a.parameters(), b.parameters(), strict=True))
    state = model.state_dict()
    assert list(state) == [name for name, _ in model.named_parameters()]
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    own = {name for name in state if name.startswith("parts.")}
    assert own == {f"parts.{n}" for n in ("text.model.norm.weight", "topics.norm.weight", "topics.head.weight")} | {
        "parts.topics.head.bias"
    }


def test_load_state_dict_restores_every_part() -> None:
    a, b = build_models(task(), 0)["model"], build_models(task(), 1)["model"]
    b.load_state_dict(a.state_dict())
    ids = torch.arange(8)[None] % VOCABULARY
    for name, inputs in (("text", (ids,)), ("topics", (ids, ids >= 0))):
        assert torch.equal(a(name, *inputs), b(name, *inputs))
        assert torch.equal(a(name, *inputs), a.part(name)(*inputs))


def test_a_missing_weight_is_refused() -> None:
    model = build_models(task(), 0)["model"]
    state = model.state_dict()
    state.pop("shared.layers.0.mlp.up_proj.weight")
    with pytest.raises(RuntimeError, match="up_proj"):
        model.load_state_dict(state)


def test_a_part_is_initialised_as_it_would_be_alone() -> None:
    """The first part initialises the trunk, and every part its own last layer."""
    combined, single = build_models(task(), 3)["model"], build_models(Language(shape=DECODER), 3)["model"]
    for name, tensor in single.state_dict().items():
        assert torch.equal(combined.part("text").state_dict()[name], tensor)


def test_pretrained_weights_take_precedence_over_initialised_ones() -> None:
    models = {n: build_models(Classification(key="text", shape=ENCODER), s)["model"] for n, s in (("a", 0), ("b", 1))}
    expected = models["b"].embedding.weight.detach().clone()
    assert torch.equal(MultitaskModel(models, priority=["b"]).part("a").embedding.weight, expected)


def test_only_layers_of_equal_shape_are_shared() -> None:
    wider = ENCODER.model_copy(update={"vocab_size": VOCABULARY + 1})
    multitask = task(topics=Classification(key="text", shape=wider))
    plan = find_shared_layers({name: build_models(part, 0)["model"] for name, part in multitask.parts.items()})
    assert "embedding" not in plan
    assert "layers.1.mlp.up_proj" in plan


def test_parts_that_share_nothing_are_refused() -> None:
    narrow = ENCODER.model_copy(update={"hidden_size": 2 * WIDTH})
    with pytest.raises(UsageError, match=r"^data\.parts\.\w+: its model shares no layer with another part"):
        build_models(task(topics=Classification(key="text", shape=narrow)), 0)


def test_reserved_part_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.parts\.train: "):
        build_models(task(train=Classification(key="text", shape=ENCODER)), 0)


# Loss and balancing


def test_fixed_weights_give_the_weighted_sum_of_losses_and_gradients() -> None:
    multitask = task()
    models = build_models(multitask, 0)
    output = multitask.loss(models, batch(), noise())
    counts = multitask.counts({n: {k: v.numpy() for k, v in b.items()} for n, b in batch().items()})
    total = sum(weight * value / counts[name] for name, (value, weight) in output.terms.items())
    total.backward()
    gradients = {name: p.grad.clone() for name, p in models["model"].named_parameters()}
    expected_total, expected = 0.0, {name: torch.zeros_like(g) for name, g in gradients.items()}
    for name, part in multitask.parts.items():
        models["model"].zero_grad()
        output_of_part = part.loss({"model": models["model"].part(name)}, batch()[name], noise())
        mean = output_of_part.terms["loss"][0] / counts[f"{name}/loss"]
        mean.backward()
        expected_total += WEIGHTS[name] * float(mean.detach())
        for key, p in models["model"].named_parameters():
            expected[key] += WEIGHTS[name] * (p.grad if p.grad is not None else 0.0)
    assert float(total.detach()) == pytest.approx(expected_total, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("balance", ["fixed", "uncertainty", "pcgrad"])
def test_a_step_does_not_depend_on_the_micro_batch_size(balance: Any) -> None:
    states = []
    for micro in (None, 1, 4):
        trained = engine(task(balance), micro_batch_size=micro)
        for step in range(3):
            trained.train_step(step, loader().batch(step))
        states.append(trained.state()["model.safetensors"])
    for other in states[1:]:
        for name, tensor in states[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_log_variance_is_the_closed_form() -> None:
    """The gradient of exp(-s) w L + s / 2 is 1 / 2 - exp(-s) w L, without weight decay."""
    trained = engine(task("uncertainty"))
    start = {"text": 0.3, "topics": -0.2}
    with torch.no_grad():
        for name, value in start.items():
            trained.model.log_variance.get_parameter(name).fill_(value)
    losses = evaluate_parts(trained, 0)
    report = trained.fetch(trained.train_step(0, loader().batch(0)))
    for name, s in start.items():
        slope = 0.5 - np.exp(-s) * WEIGHTS[name] * losses[name]
        log_variance = float(trained.model.log_variance.get_parameter(name).detach())
        assert log_variance == pytest.approx(s - 0.1 * slope, rel=1e-5)
        assert report[f"{name}/weight"] == pytest.approx(np.exp(-s) * WEIGHTS[name], rel=1e-6)
    assert report["loss"] == pytest.approx(sum(np.exp(-s) * WEIGHTS[n] * losses[n] for n, s in start.items()), rel=1e-5)
    assert report["penalty"] == pytest.approx(sum(start.values()) / 2, rel=1e-5)


def evaluate_parts(trained: TorchEngine, step: int) -> dict[str, float]:
    """Return the mean loss of each part on the batch of a step; these models have no dropout."""
    sums = trained.eval_step(loader().batch(step)).sums
    return {name: float(sums[f"{name}/loss"][0] / sums[f"{name}/loss"][1]) for name in WEIGHTS}


def test_an_uncertainty_weight_converges_to_the_inverse_of_its_loss() -> None:
    """With L constant, the fixed point is exp(-s) w L = 1 / 2."""
    trained = engine(task("uncertainty"), groups=[{"pattern": "log_variance.*"}, {"pattern": ".*", "scale": "none"}])
    losses = evaluate_parts(trained, 0)
    for _ in range(150):
        report = trained.train_step(0, loader().batch(0))
    for name, value in losses.items():
        assert float(report[f"{name}/weight"].value) * value == pytest.approx(0.5, rel=1e-2)


def test_pcgrad_reports_the_gradient_cosine() -> None:
    trained = engine(task("pcgrad"))
    assert trained.task.gradient_surgery
    report = trained.fetch(trained.train_step(0, loader().batch(0)))
    assert -1.0 <= report["gradient_cosine"] <= 1.0
    assert not task("fixed").gradient_surgery


def test_parts_draw_different_noise() -> None:
    drawn: dict[str, torch.Tensor] = {}

    class Drawing(Language):
        part_name: str

        def loss(self, models: Any, batch: Any, rng: Noise) -> Any:
            drawn[self.part_name] = rng.uniform("x", (3,))
            return super().loss(models, batch, rng)

    parts = {n: Drawing(shape=DECODER, part_name=n) for n in ("a", "b")}
    multitask = Multitask(parts=parts, weights={"a": 1.0, "b": 1.0})
    rows = move_batch({n: texts(4).rows(np.arange(4), np.zeros(4)) for n in parts}, torch.device("cpu"))
    multitask.loss(build_models(multitask, 0), rows, noise(4))
    assert not torch.equal(drawn["a"], drawn["b"])


# Batches and evaluation


def test_a_part_gets_the_batches_it_would_get_alone() -> None:
    combined = loader(6)
    for name, source in (("text", texts(10)), ("topics", topics(23))):
        single = Loader(source, 6, seed=5)
        for step in (0, 1, 5, 40):
            for key, values in single.batch(step).items():
                np.testing.assert_array_equal(combined.batch(step)[name][key], values)


@pytest.mark.parametrize(("size", "sizes"), [(1, (10, 23)), (4, (23, 10)), (7, (10, 23)), (64, (23, 10))])
def test_an_evaluation_counts_every_sample_of_every_part_once(size: int, sizes: tuple[int, int]) -> None:
    trained, source = engine(task()), zip_sources(*sizes, is_training=False)
    metrics = evaluate(trained, iter_eval_batches(source, size), score=trained.task.score)
    for name, part in trained.task.parts.items():  # type: ignore[attr-defined]
        own = source.sources[name]
        rows = move_batch(own.rows(np.arange(len(own)), np.zeros(len(own), int)), torch.device("cpu"))
        with torch.no_grad():
            out = part.loss({"model": trained.model.part(name)}, rows, noise(len(own)))
        mean = float(out.terms["loss"][0]) / part.counts({k: v.numpy() for k, v in rows.items()})["loss"]
        assert metrics[f"{name}/loss"] == pytest.approx(mean, rel=1e-6)
        scored = part.score({key: values.numpy() for key, values in out.rows.items()}) if out.rows else {}
        assert bool(scored) == (name == "topics")
        for key, value in scored.items():
            assert metrics[f"{name}/{key}"] == pytest.approx(value, rel=1e-5), key


def test_an_uneven_evaluation_over_ranks_is_exact() -> None:
    """Padding rows do not count: 23 samples in batches of 5, over two ranks."""
    trained = engine(task())
    expected = evaluate(trained, iter_eval_batches(zip_sources(is_training=False), 5))
    batches_of_ranks = [
        list(iter_eval_batches(zip_sources(is_training=False), 5, data_rank=rank, data_size=2)) for rank in (0, 1)
    ]
    total: dict[str, list[float]] = {}
    for rank_batch in (*batches_of_ranks[0], *batches_of_ranks[1]):
        for name, (value, count) in trained.eval_step(rank_batch).sums.items():
            old = total.setdefault(name, [0.0, 0.0])
            old[0], old[1] = old[0] + float(value), old[1] + float(count)
    assert {name: value / count for name, (value, count) in total.items()} == pytest.approx(expected, rel=1e-6)


def test_a_batch_of_one_part_evaluates_that_part_only() -> None:
    trained = engine(task("uncertainty"))
    metrics = evaluate(trained, iter_eval_batches(Zip({"topics": topics(9)}), 4), score=trained.task.score)
    assert {name.partition("/")[0] for name in metrics} == {"topics"}


def test_zipped_sources_can_be_described() -> None:
    description = zip_sources().describe(3, 0)
    assert "text: sample" in description
    assert "topics: sample" in description
    assert "text" not in zip_sources(is_training=False).describe(15, 0), "that part has no more samples"


def test_modules_without_optional_methods_can_be_combined() -> None:
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
