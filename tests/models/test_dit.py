"""The diffusion transformer: zero initial output, attention patterns, conditioning, and position and time embeddings."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bottega.core.noise import Noise, numpy_generator
from bottega.models.dit.torch import Block, DiT, embed_times, sinusoidal_positions
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.models.generator.torch import ClassCondition, Generator, build_generator

GRIDS: dict[str, dict[str, Any]] = {
    "audio": {"grid": (6,), "patch": (2,), "channels": 3},
    "image": {"grid": (4, 6), "patch": (2, 2), "channels": 1},
    "video": {"grid": (4, 4, 4), "patch": (2, 2, 2), "channels": 1},
}
FRAMES: dict[str, Any] = {"grid": (4, 4, 4), "patch": (1, 2, 2), "channels": 1}


def build_shape(*, layers: int = 2, **options: Any) -> DiTShape:
    return DiTShape(hidden_size=24, num_layers=layers, num_heads=2, **options)


def randomise(model: torch.nn.Module) -> Any:
    """Fill every parameter: zero-initialised ones would hide everything before them."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(0.2 * numpy_generator(7, name).standard_normal(p.shape, dtype=np.float32)))
    return model


def draw_inputs(shape: DiTShape, count: int = 2) -> tuple[Tensor, Tensor]:
    draw = Noise(1, 0, torch.arange(count), torch)
    return draw.normal("x", (*shape.grid, shape.channels)), 1000 * draw.uniform("t")


@pytest.mark.parametrize("kind", ["none", "class", "vector"])
@pytest.mark.parametrize("grid", GRIDS)
def test_initial_prediction_is_zero(grid: str, kind: Any) -> None:
    shape = build_shape(**GRIDS[grid])
    model = build_generator(
        GeneratorShape(backbone=shape, condition=ConditionShape(kind=kind, size=3, hidden_size=24)), 0
    )
    x, time = draw_inputs(shape)
    condition = {"class": {"label": torch.tensor([0, 2])}, "vector": {"vector": torch.ones(2, 3)}}.get(kind, {})
    out = model(x, time, **condition)
    assert out.shape == x.shape
    assert (out == 0).all()


def test_each_block_is_initially_the_identity() -> None:
    model = build_generator(
        GeneratorShape(backbone=build_shape(**GRIDS["image"]), condition=ConditionShape(kind="none")), 0
    )
    h, c = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(0)), torch.ones(2, 24)
    for block in model.backbone.blocks:
        assert torch.equal(block(h, c, None, None), h)


@pytest.mark.parametrize("grid", GRIDS)
def test_rows_are_independent(grid: str) -> None:
    shape = build_shape(**GRIDS[grid])
    model = randomise(DiT(shape))
    x, time = draw_inputs(shape, 3)
    together = model(x, time)
    for i in range(3):
        alone = model(x[i : i + 1], time[i : i + 1])
        torch.testing.assert_close(alone, together[i : i + 1], rtol=1e-5, atol=1e-5)


def find_changed_frames(shape: DiTShape, **options: Any) -> Tensor:
    """Return which output frames change with the first input frame: [frames] bool."""
    model = randomise(DiT(shape))
    x, time = draw_inputs(shape, 1)
    other = x.clone()
    other[:, 0] += 1
    change = (model(x, time, **options) - model(other, time, **options)).abs().amax(dim=(0, 2, 3, 4))
    return change > 1e-6


def test_spatial_attention_does_not_mix_frames() -> None:
    assert find_changed_frames(build_shape(layers=1, attention="factorised", **FRAMES)).tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_factorised_and_full_attention_reach_every_frame() -> None:
    assert find_changed_frames(build_shape(layers=2, attention="factorised", **FRAMES)).all()
    assert find_changed_frames(build_shape(layers=1, attention="full", **FRAMES)).all()


def test_temporal_attention_does_not_mix_positions() -> None:
    """In the second block a patch attends to its own position in other frames only."""
    shape = build_shape(layers=2, attention="factorised", **FRAMES)
    block = randomise(DiT(shape)).blocks[1]
    assert block.extent == "time"
    h = Noise(2, 0, torch.arange(1), torch).normal("h", (16, 24))
    other = h.clone()
    other[:, 0, ::2] += 1  # frame 0, position 0 of 4; the norm would cancel a constant
    c = torch.ones(1, 24)
    change = (block(h, c, None, None) - block(other, c, None, None)).abs().amax(-1).view(4, 4) > 1e-6
    assert change.tolist() == [[True, False, False, False]] * 4


def test_spatial_attention_equals_full_attention_on_each_frame() -> None:
    """Spatial attention over a video is full attention over each frame."""
    video, image = (
        build_shape(layers=1, attention="factorised", **FRAMES),
        build_shape(layers=1, grid=(4, 4), patch=(2, 2), channels=1),
    )
    video_block, image_block = randomise(DiT(video)).blocks[0], randomise(DiT(image)).blocks[0]
    image_block.load_state_dict(video_block.state_dict())
    h, c = Noise(3, 0, torch.arange(2), torch).normal("h", (16, 24)), torch.ones(2, 24)
    frames = torch.stack([image_block(h.view(2, 4, 4, 24)[:, i], c, None, None) for i in range(4)], dim=1)
    torch.testing.assert_close(video_block(h, c, None, None), frames.flatten(1, 2), rtol=1e-5, atol=1e-5)


def test_text_padding_has_no_effect() -> None:
    shape = build_shape(context_size=5, **GRIDS["image"])
    model = randomise(DiT(shape))
    x, time = draw_inputs(shape)
    text = Noise(4, 0, torch.arange(2), torch).normal("text", (4, 5))
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    expected = model(x, time, context=text, mask=mask)
    changed = torch.where(mask[..., None], text, 100.0)
    assert torch.equal(model(x, time, context=changed, mask=mask), expected)
    assert not torch.allclose(model(x, time, context=text + 1, mask=mask), expected)
    torch.testing.assert_close(
        model(x[:1], time[:1], context=text[:1, :2], mask=mask[:1, :2]), expected[:1], rtol=1e-5, atol=1e-5
    )


def test_condition_and_time_affect_the_prediction() -> None:
    shape = build_shape(**GRIDS["image"])
    condition = ConditionShape(kind="class", size=3, hidden_size=24)
    model: Generator = randomise(Generator(GeneratorShape(backbone=shape, condition=condition)))
    x, time = draw_inputs(shape)
    label, no_drop = torch.tensor([0, 1]), torch.tensor([False, False])
    plain = model(x, time, label=label, drop=no_drop)
    assert torch.equal(model(x, time, label=label), plain)
    assert not torch.allclose(model(x, time, label=label + 1, drop=no_drop), plain)
    assert not torch.allclose(model(x, time + 10, label=label, drop=no_drop), plain)
    dropped = model(x, time, label=label, drop=torch.tensor([True, False]))
    assert not torch.allclose(dropped[0], plain[0])
    torch.testing.assert_close(dropped[1], plain[1])
    assert torch.equal(model(x, time, label=label, drop=~no_drop), model(x, time, label=label + 1, drop=~no_drop))


def test_positions_match_the_published_formula() -> None:
    """The patch in row 1, column 2 with 8 channels: column first, then row, sines before cosines."""
    rates = [1.0, 1 / 10000**0.5]
    expected = [f(p * r) for p in (2, 1) for f in (math.sin, math.cos) for r in rates]
    assert sinusoidal_positions((3, 4), 8)[1 * 4 + 2].tolist() == pytest.approx(expected, abs=1e-6)
    for counts in ((7,), (3, 4), (2, 3, 2)):
        for width in (12, 16):
            positions = sinusoidal_positions(counts, width)
            assert positions.shape == (math.prod(counts), width)
            assert len({tuple(row) for row in positions.tolist()}) == len(positions), "positions are unique"
    assert (sinusoidal_positions((2, 3, 2), 16)[:, 12:] == 0).all(), (
        "three axes take four channels each; the rest is zero"
    )


def test_time_embedding_matches_the_published_formula() -> None:
    embedding = embed_times(torch.tensor([0.0, 500.0]))
    assert embedding.shape == (2, 256)
    assert embedding[0].tolist() == [1.0] * 128 + [0.0] * 128
    assert embedding[1, 0].item() == pytest.approx(math.cos(500), abs=1e-4), "the highest frequency is 1 per step"
    assert embedding[1, 255].item() == pytest.approx(math.sin(500 / 10000), abs=1e-6), (
        "the lowest is 10,000 times lower"
    )


@pytest.mark.parametrize("patch", [2, 4])
def test_positions_and_times_match_diffusers(patch: int) -> None:

    embeddings = pytest.importorskip("diffusers.models.embeddings")
    side = 8 // patch
    theirs = embeddings.get_2d_sincos_pos_embed(24, side, base_size=side, output_type="pt")
    torch.testing.assert_close(sinusoidal_positions((side, side), 24), theirs.float(), rtol=0, atol=1e-6)
    times = torch.tensor([0.0, 1.0, 37.5, 999.0])
    their_times = embeddings.Timesteps(num_channels=256, flip_sin_to_cos=True, downscale_freq_shift=1)(times)
    torch.testing.assert_close(embed_times(times), their_times, rtol=0, atol=1e-6)


def test_bf16_is_close_to_float32() -> None:
    shape = build_shape(**GRIDS["image"])
    model = randomise(DiT(shape))
    x, time = draw_inputs(shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low_precision = model(x, time)
    exact = model(x, time)
    assert not torch.equal(low_precision.float(), exact)
    assert (low_precision.float() - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": (8, 6), "patch": (2, 4)}, "patches of 4 do not divide a side of 6 (of 8 x 6); use one of 1, 2, 3, 6"),
        ({"grid": (8, 8), "patch": (2,)}, "patch: has length 1, but grid has length 2"),
        ({"num_heads": 5}, "24 is not a multiple of num_heads 5"),
    ],
)
def test_invalid_shape_is_refused(changes: dict[str, Any], message: str) -> None:
    valid = {"grid": (8, 8), "patch": (2, 2), "channels": 1, "hidden_size": 24, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match=re.escape(message)):
        DiTShape(**{**valid, **changes})


def test_shared_class_embeddings_are_read_by_their_classes_only() -> None:
    """A row of the shared table is read only by the classes that have its attribute."""
    shape = ConditionShape(kind="class", size=3, hidden_size=4, shared=((0, 2), (0, 3), (1, 3)))
    condition = randomise(ClassCondition(shape))
    label, dropped = torch.arange(3), torch.tensor([False, False, True])
    condition(label, None).sum().backward()
    assert condition.shared.weight.grad[:, 0].tolist() == [2, 1, 1, 2, 0], "number of classes that read each row"
    own, rows = condition.embedding.weight, condition.shared.weight
    torch.testing.assert_close(condition(label, None)[1], own[1] + rows[0] + rows[3])
    torch.testing.assert_close(condition(label, dropped)[2], own[3] + 2 * rows[4])
    torch.testing.assert_close(condition.fold_shared()[:3], condition(label, None))


def test_checkpointed_blocks_are_compiled_one_by_one_and_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_functions = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled_functions.append(function) or function)
    shape, gradients = build_shape(**GRIDS["image"]), []
    for has_checkpoints in (False, True):
        model = randomise(DiT(shape))
        model.checkpoint_blocks = has_checkpoints
        model.compile_whole(use_cuda_graphs=False)
        model.train()(*draw_inputs(shape)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert compiled_functions == [DiT.compute, Block.forward]
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)
