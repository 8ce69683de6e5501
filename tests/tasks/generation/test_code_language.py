"""An autoregressive model of codes: targets, loss, counts, guidance and sampling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bottega.core.noise import Noise
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.models.generator.config import CodeGeneratorShape, CodesBackbone, ConditionShape
from bottega.models.initial import initialise
from bottega.tasks.generation.code_language import CodeLanguage, FrozenCodes

CODES, CLASSES = 50, 2


class Pixels(nn.Module):
    """A lossless tokenizer: the code is the pixel value."""

    def encode(self, x: Tensor) -> Tensor:
        return x[..., 0].long()

    def decode(self, codes: Tensor) -> Tensor:
        return codes[..., None].float()


class TableModel(nn.Module):
    """A model whose logits are a table indexed by the first token of a row."""

    def __init__(self, table: Tensor, shape: TransformerShape) -> None:
        super().__init__()
        self.table, self.shape = table, shape
        self.head_weight = torch.zeros(1, 1)
        self.first: Tensor = torch.zeros(0)

    def hidden(self, tokens: Tensor, *, cache: Any, position: int) -> Tensor:
        if position == 0:
            self.first = tokens
        return self.first[:, :, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0].long()]


def task(kind: Any = "class", *, codes: int = CODES, **options: Any) -> CodeLanguage:
    size = CLASSES if kind == "class" else 0
    transformer = TransformerShape(
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=2,
        head_size=16,
        intermediate_size=64,
        vocab_size=codes + size + 1,
        context=6,
    )
    backbone = CodesBackbone(grid=(2, 3), channels=1, codes=(2, 3), num_codes=codes, transformer=transformer)
    shape = CodeGeneratorShape(backbone=backbone, condition=ConditionShape(kind=kind, size=size))
    return CodeLanguage(key="image", shape=shape, latents=FrozenCodes(folder="none"), **options)


def build(language: CodeLanguage, seed: int = 0) -> dict[str, Any]:
    model = Transformer(language.backbone.transformer)
    initialise(model, seed, residual_layers=2)
    return {"model": model, "tokenizer": Pixels()}


def batch(count: int, *, codes: int = CODES, seed: int = 0) -> dict[str, Tensor]:
    """Return samples whose codes are in the lower half for class 0 and in the upper half for class 1."""
    data_rng = np.random.default_rng(seed)
    label = np.arange(count) % CLASSES
    image = data_rng.integers(0, codes // 2, (count, 2, 3, 1)) + label.reshape(-1, 1, 1, 1) * (codes // 2)
    return {"image": torch.from_numpy(image.astype(np.float32)), "label": torch.from_numpy(label.astype(np.int32))}


def rng(count: int, *, seed: int = 0, step: int = 0, first: int = 0) -> Noise:
    return Noise(seed, step, torch.arange(first, first + count), torch)


@pytest.fixture(scope="module")
def trained() -> tuple[CodeLanguage, dict[str, Any]]:
    """A model after eighty steps on ten codes, five for each class."""
    language = task(codes=10, condition_dropout=0.2)
    models = build(language)
    optimizer = torch.optim.AdamW(models["model"].parameters(), lr=1e-2)
    for step in range(80):
        total, _ = language.loss(models, batch(32, codes=10, seed=step), rng(32, step=step)).terms["loss"]
        optimizer.zero_grad()
        (total / (32 * 6)).backward()
        optimizer.step()
    return language, models


class Recorder(nn.Module):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.tokens, self.targets = tokens, targets
        return torch.zeros(())


def test_inputs_are_the_targets_shifted_by_one() -> None:
    recorder, data = Recorder(), batch(5)
    task(condition_dropout=0.0).loss({"model": recorder, "tokenizer": Pixels()}, data, rng(5))
    codes = data["image"].flatten(1).long()
    assert torch.equal(recorder.targets, codes)
    assert torch.equal(recorder.tokens[:, 1:], codes[:, :-1])
    assert recorder.tokens[:, 0].tolist() == [CODES + label for label in data["label"].tolist()]


def test_later_codes_do_not_change_earlier_logits() -> None:
    model = build(task())["model"]
    tokens = torch.randint(0, CODES, (3, 6), generator=torch.Generator().manual_seed(0))
    for changed in range(1, 6):
        other = tokens.clone()
        other[:, changed:] = (other[:, changed:] + 1) % CODES
        a, b = model(tokens), model(other)
        assert torch.allclose(a[:, :changed], b[:, :changed], atol=1e-6)
        assert not torch.allclose(a[:, changed:], b[:, changed:], atol=1e-3)


@pytest.mark.parametrize("kind", ["none", "class"])
def test_an_untrained_model_has_the_uniform_loss(kind: str) -> None:
    language, data = task(kind), batch(64)
    out = language.loss(build(language), data, rng(64))
    count = language.counts({name: value.numpy() for name, value in data.items()})["loss"]
    assert count == 64 * 6
    loss = float(out.terms["loss"][0].detach()) / count
    assert loss == pytest.approx(math.log(CODES), rel=0.05)
    bits, number = out.metrics["bits_per_code"]
    assert float(bits) / float(number) == pytest.approx(loss / math.log(2), rel=1e-6)


def test_condition_dropout_has_its_rate_and_depends_on_the_index() -> None:
    recorder, data, language = Recorder(), batch(4000), task(condition_dropout=0.25)
    language.loss({"model": recorder, "tokenizer": Pixels()}, data, rng(4000))
    dropped = recorder.tokens[:, 0] == CODES + CLASSES
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 4000))
    part = {name: value[1000:1100] for name, value in data.items()}
    language.loss({"model": recorder, "tokenizer": Pixels()}, part, rng(100, first=1000))
    assert torch.equal(recorder.tokens[:, 0] == CODES + CLASSES, dropped[1000:1100])


def test_padding_rows_do_not_count_and_any_split_has_the_same_sum() -> None:
    language, data = task(), batch(6)
    models = build(language)
    expected = language.loss(models, data, rng(6))
    padded = {name: torch.cat([value, value[:2]]) for name, value in data.items()}
    padded["weight"] = torch.tensor([1.0] * 6 + [0.0] * 2)
    out = language.loss(models, padded, rng(8))
    torch.testing.assert_close(out.terms["loss"][0], expected.terms["loss"][0])
    assert float(out.metrics["bits_per_code"][1]) == 36
    assert language.counts({"image": padded["image"].numpy(), "weight": padded["weight"].numpy()}) == {"loss": 36.0}
    parts = [language.loss(models, {n: v[i : i + 2] for n, v in data.items()}, rng(2, first=i)) for i in (0, 2, 4)]
    torch.testing.assert_close(sum(part.terms["loss"][0] for part in parts), expected.terms["loss"][0])


def test_cached_decoding_matches_a_full_forward() -> None:
    language = task()
    models, data = build(language, seed=4), batch(3)
    samples = language.draw_codes(models["model"], data, rng(3), temperature=0.0)
    first = language.build_first_tokens(data, drop=torch.zeros(3, dtype=torch.bool))
    logits = models["model"](torch.cat([first[:, None], samples[:, :-1]], dim=1))[..., :CODES]
    assert torch.equal(logits.argmax(-1), samples)


def test_codes_are_sampled_with_their_probabilities() -> None:
    language, count = task("none", codes=4), 3000
    table = torch.zeros(5, 5)
    table[4] = torch.tensor([0.0, math.log(2), math.log(3), math.log(4), 9.0])  # the last token is not a code
    model = TableModel(table, language.backbone.transformer)
    samples = language.draw_codes(model, {}, rng(count))  # type: ignore[arg-type]
    assert samples.shape == (count, 6)
    frequencies = torch.bincount(samples.flatten(), minlength=5) / samples.numel()
    expected = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0])
    assert (frequencies - expected).abs().max() < 4 * 0.5 / math.sqrt(samples.numel())
    differing = float((samples[:, 0] != samples[:, 1]).float().mean())
    assert differing == pytest.approx(1 - float(expected.square().sum()), abs=4 * 0.5 / math.sqrt(count)), (
        "codes are independent"
    )
    few = language.draw_codes(model, {}, rng(50), top_k=2)  # type: ignore[arg-type]
    assert set(few.unique().tolist()) == {2, 3}


@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 2.5, 6.0])
def test_guidance_extrapolates_the_logits(guidance: float) -> None:
    language = task(codes=8)
    table = torch.randn(8 + CLASSES + 1, 11, generator=torch.Generator().manual_seed(1))
    model, data = TableModel(table, language.backbone.transformer), batch(6, codes=8)
    samples = language.draw_codes(model, data, rng(6), temperature=0.0, guidance=guidance)  # type: ignore[arg-type]
    conditional, unconditional = table[8 + data["label"].long(), :8], table[8 + CLASSES, :8]
    expected = (unconditional + guidance * (conditional - unconditional)).argmax(-1)
    assert torch.equal(samples, expected[:, None].expand(-1, 6))


def test_guidance_of_one_is_the_conditional_model(trained: tuple[CodeLanguage, dict[str, Any]]) -> None:
    language, models = trained
    data = batch(20, codes=10)
    plain = language.draw(models, data, rng(20))
    assert torch.equal(language.draw(models, data, rng(20), guidance=1.0), plain)
    assert not torch.equal(language.draw(models, data, rng(20), guidance=3.0), plain)
    swapped = {"label": 1 - data["label"]}
    assert torch.equal(
        language.draw(models, data, rng(20), guidance=0), language.draw(models, swapped, rng(20), guidance=0)
    )


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_sample_is_a_function_of_seed_and_index(
    trained: tuple[CodeLanguage, dict[str, Any]], guidance: float
) -> None:
    language, models = trained
    data = batch(12, codes=10)
    expected = language.draw(models, data, rng(12, seed=5), guidance=guidance)
    assert torch.equal(language.draw(models, data, rng(12, seed=5), guidance=guidance), expected)
    assert not torch.equal(language.draw(models, data, rng(12, seed=6), guidance=guidance), expected)
    for start, count in ((0, 1), (3, 5), (11, 1)):
        part = {name: value[start : start + count] for name, value in data.items()}
        samples = language.draw(models, part, rng(count, seed=5, first=start), guidance=guidance)
        assert torch.equal(samples, expected[start : start + count])


def test_a_trained_model_samples_the_requested_class(trained: tuple[CodeLanguage, dict[str, Any]]) -> None:
    language, models = trained
    data = batch(200, codes=10)
    samples = language.draw(models, data, rng(200))
    correct = (samples >= 5).flatten(1) == data["label"].bool()[:, None]
    assert float(correct.float().mean()) > 0.97
    unconditional = language.draw_codes(models["model"], data, rng(200), guidance=0)
    assert 0.3 < float((unconditional[:, 0] >= 5).float().mean()) < 0.7, "guidance 0 samples both classes"
