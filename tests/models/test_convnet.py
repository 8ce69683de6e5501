"""The convolutional classifier: any grid, a function of each sample alone, and it sees place and motion."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from bottega.models.convnet.config import ConvNetShape
from bottega.models.convnet.torch import Block, ConvNet
from bottega.models.initial_conv import initialise_convolutional


def net(grid: tuple[int, ...], *, channels: int = 1, seed: int = 0, **more: object) -> ConvNet:
    shape = ConvNetShape(grid=grid, channels=channels, num_labels=5, **{"hidden_size": 8, **more})  # type: ignore[arg-type]
    model = ConvNet(shape)
    initialise_convolutional(model, seed, residual_layers=len(model.blocks))
    return model.eval()


def samples(grid: tuple[int, ...], *, channels: int = 1, count: int = 3) -> torch.Tensor:
    return torch.randn(count, *grid, channels, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("grid", [(8, 8), (28, 28), (5, 9), (63, 64), (8, 16, 16), (3, 8, 40), (2, 1)])
def test_it_reads_any_grid_and_ends_with_short_sides(grid: tuple[int, ...]) -> None:
    model = net(grid, channels=3)
    x = samples(grid, channels=3)
    assert model(x).shape == (3, 5)
    features = model.features(x)
    assert features.shape == (3, model.shape.num_features)
    torch.testing.assert_close(model.head(features), model(x))
    seen = model.stem(torch.zeros(1, 3 + len(grid), *grid))
    for block in model.blocks:
        seen = block(seen)
    assert max(seen.shape[2:]) < 8


def test_a_small_picture_is_halved_once_and_a_large_one_before_the_first_stage() -> None:
    def shape(*grid: int) -> ConvNetShape:
        return ConvNetShape(grid=grid, channels=1, num_labels=2)

    assert shape(8, 8).stages == ((1, 1), (2, 2))
    assert (shape(28, 28).stem, shape(28, 28).stages) == ((1, 1), ((1, 1), (2, 2), (2, 2)))
    assert (shape(64, 64).stem, shape(64, 64).widths) == ((2, 2), (32, 64, 128, 128))
    # Frames that are few stay all there while the picture shrinks.
    assert shape(4, 16, 16).stages == ((1, 1, 1), (1, 2, 2), (1, 2, 2))


@pytest.mark.parametrize("grid", [(8, 8), (8, 16, 16)])
def test_an_answer_depends_on_its_own_sample_alone(grid: tuple[int, ...]) -> None:
    model, x = net(grid), samples(grid)
    together = model(x)
    for i in range(len(x)):
        torch.testing.assert_close(model(x[i : i + 1])[0], together[i], rtol=1e-5, atol=1e-6)
    assert not list(model.buffers()), "nothing but weights makes up its state"


def test_a_place_is_seen_far_from_the_borders() -> None:
    """On an empty picture, what the first convolution makes of the middle would else be 0 everywhere."""
    model = net((32, 32))
    seen: list[torch.Tensor] = []
    model.stem.register_forward_hook(lambda module, args, out: seen.append(out))
    model.features(torch.zeros(1, 32, 32, 1))
    middle = seen[0][0, :, 4:-4, 4:-4]
    assert (middle[:, 0] - middle[:, -1]).abs().max() > 0.1
    assert (middle[:, :, 0] - middle[:, :, -1]).abs().max() > 0.1


def test_it_tells_a_film_from_the_same_film_backwards() -> None:
    model, x = net((8, 16, 16)), samples((8, 16, 16), count=1)
    assert (model(x) - model(x.flip(1))).norm() > 1e-2 * model(x).norm()


def test_a_block_that_halves_the_time_looks_at_every_frame() -> None:
    """By what it adds to the stream; the norm passes a little of everything on, so it is the size that tells."""
    block = Block(8, 8, (2, 1, 1))
    x = torch.randn(4, 8, 8, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (block(x) - torch.nn.functional.avg_pool3d(x, (2, 1, 1))).square().sum().backward()
    assert x.grad is not None
    share = x.grad.abs().sum(dim=(0, 1, 3, 4))
    assert share.min() > 0.3 * share.max()


def test_initial_weights_are_a_function_of_seed_and_name_and_keep_the_scale() -> None:
    first, again, other = (net((28, 28), seed=seed, num_layers=3).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["stem.weight"], other["stem.weight"])
    deep = net((28, 28), num_layers=8, hidden_size=32)
    sizes: list[float] = []
    for block in deep.blocks:
        block.register_forward_hook(lambda module, args, out: sizes.append(out.std().item()))
    logits = deep(samples((28, 28), count=8))
    # No stage grows the stream beyond what its 24 additions make of it, and no class is preferred to begin with.
    assert min(sizes) > 0.1
    assert max(sizes) < 4
    assert torch.nn.functional.cross_entropy(logits, torch.zeros(8).long()).item() == pytest.approx(math.log(5), abs=1)


def test_checkpointing_changes_no_gradient() -> None:
    x, found = samples((8, 8)), []
    for is_on in (False, True):
        model = net((8, 8), num_layers=2, dropout=0.0).train()
        model.checkpoint_blocks = is_on
        model(x).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)


def test_dropout_is_of_training_alone() -> None:
    model, x = net((8, 8), dropout=0.5), samples((8, 8))
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("grid", [(8, 8), (4, 8, 8)])
def test_norms_behind_frozen_layers_learn(grid: tuple[int, ...]) -> None:
    """torch's own group norm ends the process here; tried apart, so that this one would live to tell."""
    model = net(grid)
    model.stem.requires_grad_(False)
    code = "\n".join(
        (
            "import torch",
            "from bottega.models.group_norm import GroupNorm",
            f"x = torch.randn(2, 8, *{grid}).to(memory_format=torch.channels_last{'_3d' if len(grid) == 3 else ''})",
            "norm = GroupNorm(8, 8)",
            "norm(x).square().sum().backward()",
            "assert norm.weight.grad.abs().sum() > 0",
        )
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    model(samples(grid)).sum().backward()
    assert model.blocks[0].norm1.weight.grad.abs().sum() > 0
