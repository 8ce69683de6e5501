"""The convolutional classifier: any grid, independent samples, sensitivity to position and motion, and initialisation."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from bottega.models.convnet.config import ConvNetShape
from bottega.models.convnet.torch import Block, ConvNet
from bottega.models.initial_conv import initialise_convolutional


def build_net(grid: tuple[int, ...], *, channels: int = 1, seed: int = 0, **changes: object) -> ConvNet:
    shape = ConvNetShape(grid=grid, channels=channels, num_labels=5, **{"hidden_size": 8, **changes})  # type: ignore[arg-type]
    model = ConvNet(shape)
    initialise_convolutional(model, seed, residual_layers=len(model.blocks))
    return model.eval()


def draw_samples(grid: tuple[int, ...], *, channels: int = 1, count: int = 3) -> torch.Tensor:
    return torch.randn(count, *grid, channels, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("grid", [(8, 8), (28, 28), (5, 9), (63, 64), (8, 16, 16), (3, 8, 40), (2, 1)])
def test_any_grid_is_reduced_to_short_sides(grid: tuple[int, ...]) -> None:
    model = build_net(grid, channels=3)
    x = draw_samples(grid, channels=3)
    assert model(x).shape == (3, 5)
    features = model.features(x)
    assert features.shape == (3, model.shape.num_features)
    torch.testing.assert_close(model.head(features), model(x))
    activations = model.stem(torch.zeros(1, 3 + len(grid), *grid))
    for block in model.blocks:
        activations = block(activations)
    assert max(activations.shape[2:]) < 8


def test_downsampling_follows_the_grid_size() -> None:
    def shape(*grid: int) -> ConvNetShape:
        return ConvNetShape(grid=grid, channels=1, num_labels=2)

    assert shape(8, 8).stage_strides == ((1, 1), (2, 2))
    assert (shape(28, 28).stem_strides, shape(28, 28).stage_strides) == ((1, 1), ((1, 1), (2, 2), (2, 2)))
    assert (shape(64, 64).stem_strides, shape(64, 64).widths) == ((2, 2), (32, 64, 128, 128))
    # A short time axis is not downsampled while the image shrinks.
    assert shape(4, 16, 16).stage_strides == ((1, 1, 1), (1, 2, 2), (1, 2, 2))


@pytest.mark.parametrize("grid", [(8, 8), (8, 16, 16)])
def test_samples_are_independent(grid: tuple[int, ...]) -> None:
    model, x = build_net(grid), draw_samples(grid)
    together = model(x)
    for i in range(len(x)):
        torch.testing.assert_close(model(x[i : i + 1])[0], together[i], rtol=1e-5, atol=1e-6)
    assert not list(model.buffers()), "the model has no buffers"


def test_positions_are_encoded_far_from_the_borders() -> None:
    """On an empty image the output of the first convolution would otherwise be 0 away from the borders."""
    model = build_net((32, 32))
    outputs: list[torch.Tensor] = []
    model.stem.register_forward_hook(lambda module, args, out: outputs.append(out))
    model.features(torch.zeros(1, 32, 32, 1))
    middle = outputs[0][0, :, 4:-4, 4:-4]
    assert (middle[:, 0] - middle[:, -1]).abs().max() > 0.1
    assert (middle[:, :, 0] - middle[:, :, -1]).abs().max() > 0.1


def test_reversed_video_gives_a_different_output() -> None:
    model, x = build_net((8, 16, 16)), draw_samples((8, 16, 16), count=1)
    assert (model(x) - model(x.flip(1))).norm() > 1e-2 * model(x).norm()


def test_temporal_downsampling_block_uses_every_frame() -> None:
    """Measured on the residual branch by gradient size: the norm passes a little of every frame."""
    block = Block(8, 8, (2, 1, 1))
    x = torch.randn(4, 8, 8, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (block(x) - torch.nn.functional.avg_pool3d(x, (2, 1, 1))).square().sum().backward()
    assert x.grad is not None
    gradient_per_frame = x.grad.abs().sum(dim=(0, 1, 3, 4))
    assert gradient_per_frame.min() > 0.3 * gradient_per_frame.max()


def test_initial_weights_depend_on_seed_and_name_and_preserve_the_scale() -> None:
    first, repeated, other = (build_net((28, 28), seed=seed, num_layers=3).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert not torch.equal(first["stem.weight"], other["stem.weight"])
    deep = build_net((28, 28), num_layers=8, hidden_size=32)
    deviations: list[float] = []
    for block in deep.blocks:
        block.register_forward_hook(lambda module, args, out: deviations.append(out.std().item()))
    logits = deep(draw_samples((28, 28), count=8))
    # No stage grows the residual stream beyond its 24 additions, and initially no class is preferred.
    assert min(deviations) > 0.1
    assert max(deviations) < 4
    assert torch.nn.functional.cross_entropy(logits, torch.zeros(8).long()).item() == pytest.approx(math.log(5), abs=1)


def test_checkpointing_changes_no_gradient() -> None:
    x, gradients = draw_samples((8, 8)), []
    for checkpoint_blocks in (False, True):
        model = build_net((8, 8), num_layers=2, dropout=0.0).train()
        model.checkpoint_blocks = checkpoint_blocks
        model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


def test_dropout_acts_in_training_only() -> None:
    model, x = build_net((8, 8), dropout=0.5), draw_samples((8, 8))
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize("grid", [(8, 8), (4, 8, 8)])
def test_norms_after_frozen_layers_get_gradients(grid: tuple[int, ...]) -> None:
    """torch's own group norm crashes the process here, so ours is tried in a subprocess first."""
    model = build_net(grid)
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
    model(draw_samples(grid)).sum().backward()
    assert model.blocks[0].norm1.weight.grad.abs().sum() > 0
