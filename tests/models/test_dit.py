"""The diffusion transformer: it begins at nothing, sees what it should and no more, and knows places and times."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bottega.core.noise import Noise, numpy_generator
from bottega.models.dit.torch import DiT, sinusoidal_positions, time_frequencies
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.models.generator.torch import ClassCondition, Generator, build_generator

GRIDS: dict[str, dict[str, Any]] = {
    "sound": {"grid": (6,), "patch": (2,), "channels": 3},
    "picture": {"grid": (4, 6), "patch": (2, 2), "channels": 1},
    "clip": {"grid": (4, 4, 4), "patch": (2, 2, 2), "channels": 1},
}
FRAMES: dict[str, Any] = {"grid": (4, 4, 4), "patch": (1, 2, 2), "channels": 1}


def dit(*, layers: int = 2, **options: Any) -> DiTShape:
    return DiTShape(hidden_size=24, num_layers=layers, num_heads=2, **options)


def awake(model: torch.nn.Module) -> Any:
    """What begins at nothing would hide everything, so every parameter gets a value."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(0.2 * numpy_generator(7, name).standard_normal(p.shape, dtype=np.float32)))
    return model


def noisy(shape: DiTShape, count: int = 2) -> tuple[Tensor, Tensor]:
    draw = Noise(1, 0, torch.arange(count), torch)
    return draw.normal("x", (*shape.grid, shape.channels)), 1000 * draw.uniform("t")


@pytest.mark.parametrize("kind", ["none", "class", "vector"])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_first_prediction_is_exactly_nothing(grid: str, kind: Any) -> None:
    shape = dit(**GRIDS[grid])
    model = build_generator(
        GeneratorShape(backbone=shape, condition=ConditionShape(kind=kind, size=3, hidden_size=24)), 0
    )
    x, time = noisy(shape)
    asked = {"class": {"label": torch.tensor([0, 2])}, "vector": {"vector": torch.ones(2, 3)}}.get(kind, {})
    out = model(x, time, **asked)
    assert out.shape == x.shape
    assert (out == 0).all()


def test_each_block_begins_as_the_identity() -> None:
    model = build_generator(GeneratorShape(backbone=dit(**GRIDS["picture"]), condition=ConditionShape(kind="none")), 0)
    h, c = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(0)), torch.ones(2, 24)
    for block in model.backbone.blocks:
        assert torch.equal(block(h, c, None, None), h)


@pytest.mark.parametrize("grid", GRIDS)
def test_every_row_goes_its_own_way(grid: str) -> None:
    shape = dit(**GRIDS[grid])
    model = awake(DiT(shape))
    x, time = noisy(shape, 3)
    together = model(x, time)
    for i in range(3):
        alone = model(x[i : i + 1], time[i : i + 1])
        torch.testing.assert_close(alone, together[i : i + 1], rtol=1e-5, atol=1e-5)


def reach(shape: DiTShape, **asked: Any) -> Tensor:
    """Which frames of the answer change when the first frame of the sample does: [frames] bool."""
    model = awake(DiT(shape))
    x, time = noisy(shape, 1)
    other = x.clone()
    other[:, 0] += 1
    change = (model(x, time, **asked) - model(other, time, **asked)).abs().amax(dim=(0, 2, 3, 4))
    return change > 1e-6


def test_attention_over_space_alone_keeps_frames_apart() -> None:
    assert reach(dit(layers=1, attention="factorised", **FRAMES)).tolist() == [True, False, False, False]


def test_attention_in_turns_and_attention_over_all_reach_every_frame() -> None:
    assert reach(dit(layers=2, attention="factorised", **FRAMES)).all()
    assert reach(dit(layers=1, attention="full", **FRAMES)).all()


def test_attention_over_time_alone_keeps_places_apart() -> None:
    """The second block of two: a patch sees itself in other frames, and nobody beside it."""
    shape = dit(layers=2, attention="factorised", **FRAMES)
    block = awake(DiT(shape)).blocks[1]
    assert block.along == "time"
    h = Noise(2, 0, torch.arange(1), torch).normal("h", (16, 24))
    other = h.clone()
    other[:, 0, ::2] += 1  # frame 0, place 0 of 4; added to all, the norm would take it away
    c = torch.ones(1, 24)
    change = (block(h, c, None, None) - block(other, c, None, None)).abs().amax(-1).view(4, 4) > 1e-6
    assert change.tolist() == [[True, False, False, False]] * 4


def test_in_turns_is_the_same_mathematics_as_each_part_alone() -> None:
    """Attention over space of a clip is attention over all of each of its frames."""
    clip, picture = (
        dit(layers=1, attention="factorised", **FRAMES),
        dit(layers=1, grid=(4, 4), patch=(2, 2), channels=1),
    )
    whole, alone = awake(DiT(clip)).blocks[0], awake(DiT(picture)).blocks[0]
    alone.load_state_dict(whole.state_dict())
    h, c = Noise(3, 0, torch.arange(2), torch).normal("h", (16, 24)), torch.ones(2, 24)
    frames = torch.stack([alone(h.view(2, 4, 4, 24)[:, i], c, None, None) for i in range(4)], dim=1)
    torch.testing.assert_close(whole(h, c, None, None), frames.flatten(1, 2), rtol=1e-5, atol=1e-5)


def test_padding_of_a_text_is_not_seen() -> None:
    shape = dit(context_size=5, **GRIDS["picture"])
    model = awake(DiT(shape))
    x, time = noisy(shape)
    text = Noise(4, 0, torch.arange(2), torch).normal("text", (4, 5))
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]).bool()
    seen = model(x, time, context=text, mask=mask)
    changed = torch.where(mask[..., None], text, 100.0)
    assert torch.equal(model(x, time, context=changed, mask=mask), seen)
    assert not torch.allclose(model(x, time, context=text + 1, mask=mask), seen)
    torch.testing.assert_close(
        model(x[:1], time[:1], context=text[:1, :2], mask=mask[:1, :2]), seen[:1], rtol=1e-5, atol=1e-5
    )


def test_the_condition_and_the_time_are_heard() -> None:
    shape = dit(**GRIDS["picture"])
    condition = ConditionShape(kind="class", size=3, hidden_size=24)
    model: Generator = awake(Generator(GeneratorShape(backbone=shape, condition=condition)))
    x, time = noisy(shape)
    label, kept = torch.tensor([0, 1]), torch.tensor([False, False])
    plain = model(x, time, label=label, drop=kept)
    assert torch.equal(model(x, time, label=label), plain)
    assert not torch.allclose(model(x, time, label=label + 1, drop=kept), plain)
    assert not torch.allclose(model(x, time + 10, label=label, drop=kept), plain)
    dropped = model(x, time, label=label, drop=torch.tensor([True, False]))
    assert not torch.allclose(dropped[0], plain[0])
    torch.testing.assert_close(dropped[1], plain[1])
    assert torch.equal(model(x, time, label=label, drop=~kept), model(x, time, label=label + 1, drop=~kept))


def test_places_are_the_published_sines() -> None:
    """For the patch in row 1, column 2 of a width of 8: column first, then row, sines before cosines."""
    rates = [1.0, 1 / 10000**0.5]
    by_hand = [f(p * r) for p in (2, 1) for f in (math.sin, math.cos) for r in rates]
    assert sinusoidal_positions((3, 4), 8)[1 * 4 + 2].tolist() == pytest.approx(by_hand, abs=1e-6)
    for counts in ((7,), (3, 4), (2, 3, 2)):
        for width in (12, 16):
            found = sinusoidal_positions(counts, width)
            assert found.shape == (math.prod(counts), width)
            assert len({tuple(row) for row in found.tolist()}) == len(found), "no two patches are alike"
    assert (sinusoidal_positions((2, 3, 2), 16)[:, 12:] == 0).all(), "three directions take four numbers each"


def test_times_are_the_published_frequencies() -> None:
    embedding = time_frequencies(torch.tensor([0.0, 500.0]))
    assert embedding.shape == (2, 256)
    assert embedding[0].tolist() == [1.0] * 128 + [0.0] * 128
    assert embedding[1, 0].item() == pytest.approx(math.cos(500), abs=1e-4), "the fastest goes round with the step"
    assert embedding[1, 255].item() == pytest.approx(math.sin(500 / 10000), abs=1e-6), "the slowest 10,000 times slower"


@pytest.mark.parametrize("patch", [2, 4])
def test_tensors_and_numbers_are_those_of_diffusers(patch: int) -> None:
    """Their positions and times, on the same weights, through the parts of both that have the same names."""
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    side = 8 // patch
    theirs = embeddings.get_2d_sincos_pos_embed(24, side, base_size=side, output_type="pt")
    torch.testing.assert_close(sinusoidal_positions((side, side), 24), theirs.float(), rtol=0, atol=1e-6)
    times = torch.tensor([0.0, 1.0, 37.5, 999.0])
    their_times = embeddings.Timesteps(num_channels=256, flip_sin_to_cos=True, downscale_freq_shift=1)(times)
    torch.testing.assert_close(time_frequencies(times), their_times, rtol=0, atol=1e-6)


def test_a_value_in_bfloat16_is_near_the_exact_one() -> None:
    shape = dit(**GRIDS["picture"])
    model = awake(DiT(shape))
    x, time = noisy(shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(x, time)
    exact = model(x, time)
    assert not torch.equal(rough.float(), exact)
    assert (rough.float() - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"grid": (8, 6), "patch": (2, 4)}, "patches of 4 do not divide a side of 6 (of 8 x 6); 1, 2, 3, 6 do"),
        ({"grid": (8, 8), "patch": (2,)}, "a patch of 1 sides for a sample of 2"),
        ({"num_heads": 5}, "24 is not a multiple of num_heads 5"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    usual = {"grid": (8, 8), "patch": (2, 2), "channels": 1, "hidden_size": 24, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match=re.escape(said)):
        DiTShape(**{**usual, **wrong})


def test_classes_learn_together_what_they_share_and_no_class_learns_of_none() -> None:
    """A row of the second table is read by the classes that have its attribute, and by no other."""
    shape = ConditionShape(kind="class", size=3, hidden_size=4, shared=((0, 2), (0, 3), (1, 3)))
    condition = awake(ClassCondition(shape))
    label, none = torch.arange(3), torch.tensor([False, False, True])
    condition(label, None).sum().backward()
    assert condition.shared.weight.grad[:, 0].tolist() == [2, 1, 1, 2, 0], "by how many classes each row was read"
    own, rows = condition.embedding.weight, condition.shared.weight
    torch.testing.assert_close(condition(label, None)[1], own[1] + rows[0] + rows[3])
    torch.testing.assert_close(condition(label, none)[2], own[3] + 2 * rows[4])
    torch.testing.assert_close(condition.folded()[:3], condition(label, None))
