"""Code autoencoders: codes round-trip through vectors, and the encoder gets gradients through both quantizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from bottega.core.errors import UsageError
from bottega.models.autoencoder.codes import CodeAutoencoder, Codebook, FiniteScalarQuantizer
from bottega.models.autoencoder.config import AutoencoderShape, CodesShape

KINDS: dict[str, dict[str, Any]] = {"levels": {"levels": (8, 5, 5, 5)}, "codebook": {"codebook_size": 64}}
GRIDS = {1: (24,), 2: (16, 24), 3: (5, 8, 12)}


def small_shape(kind: str = "levels", **changes: Any) -> CodesShape:
    autoencoder = AutoencoderShape(
        **{"channels": 3, "latent_channels": 4, "widths": (16, 32), "layers_per_block": 1, "norm_groups": 8, **changes}
    )
    return CodesShape(autoencoder=autoencoder, **KINDS[kind])


def small_model(kind: str = "levels", **changes: Any) -> CodeAutoencoder:
    model = CodeAutoencoder(small_shape(kind, **changes))
    model.initialise(0)
    return model.eval()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("levels", [(8, 5, 5, 5), (2, 3), (4,), (7, 2, 6), (255, 254)])
def test_codes_round_trip_through_vectors(levels: tuple[int, ...]) -> None:
    quantizer = FiniteScalarQuantizer(levels)
    codes = torch.arange(math.prod(levels))
    vectors = quantizer.embed_codes(codes)
    assert len(vectors.unique(dim=0)) == len(codes)
    assert vectors.min() >= -1
    assert vectors.max() <= 1
    assert torch.equal(quantizer.nearest_codes(vectors), codes)


@pytest.mark.parametrize("levels", [(8, 5, 5, 5), (2, 3), (255, 254)])
def test_every_level_is_reachable_and_bounded(levels: tuple[int, ...]) -> None:
    quantizer = FiniteScalarQuantizer(levels)
    line = torch.linspace(-12, 12, 20_001)
    for channel, num_levels in enumerate(levels):
        z = torch.zeros(len(line), len(levels))
        z[:, channel] = line
        vectors, codes, _, _ = quantizer(z)
        assert len(vectors[:, channel].unique()) == num_levels
        assert (vectors[:, channel].diff() >= 0).all()
        assert torch.equal(quantizer.nearest_codes(vectors), codes)
    vectors, codes, _, _ = quantizer(torch.tensor([math.inf, -math.inf, 1e4, -1e4])[:, None].expand(4, len(levels)))
    assert codes.tolist() == [math.prod(levels) - 1, 0] * 2
    assert (quantizer(torch.zeros(1, len(levels)))[0] == 0).all()


def test_level_boundaries_match_the_paper() -> None:
    """With 8 levels, bound(z) = 3.5035 tanh(z + s) - 0.5 with tanh(s) = 0.5 / 3.5035, and it is rounded."""
    half_range, offset, quantizer = 3.5035, 0.5, FiniteScalarQuantizer((8,))
    for level in range(-3, 4):
        rounding_boundary = level - 0.5  # bound(z) there rounds to level - 1 below, and to level above
        z = math.atanh((rounding_boundary + offset) / half_range) - math.atanh(offset / half_range)
        both_sides = torch.tensor([[z - 1e-3], [z + 1e-3]])
        assert (4 * quantizer(both_sides)[0]).flatten().tolist() == [level - 1, level]


def test_a_code_is_read_in_mixed_radix() -> None:
    """In (8, 5, 5, 5) the first channel is the lowest digit."""
    assert FiniteScalarQuantizer((8, 5, 5, 5)).embed_codes(torch.tensor(7 + 8 * (4 + 5 * (0 + 5 * 2)))).tolist() == [
        0.75,
        1,
        -1,
        0,
    ]


def test_codebook_round_trips_and_compares_directions() -> None:
    book = Codebook(64, 8)
    codes = torch.arange(64)
    assert torch.equal(book.nearest_codes(book.embed_codes(codes)), codes)
    # Vectors are compared by direction, not by length.
    assert torch.equal(book(3 * book.embed_codes(codes)[None])[1][0], codes)
    torch.testing.assert_close(book.embed_codes(codes).square().mean(-1), torch.ones(64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@torch.no_grad()
def test_decoding_codes_equals_the_reconstruction(kind: str, dims: Any) -> None:
    model, grid = small_model(kind, dims=dims), GRIDS[dims]
    x = draw(2, *grid, 3)
    codes = model.encode(x)
    assert codes.shape == (2, *model.latent_shape(grid))
    assert codes.dtype == torch.int64
    assert codes.min() >= 0
    assert codes.max() < model.num_codes == (1000 if kind == "levels" else 64)
    assert len(codes.unique()) > 8
    reconstruction, forward_codes, _, _ = model(x)
    assert torch.equal(forward_codes, codes)
    torch.testing.assert_close(model.decode(codes), reconstruction, atol=1e-6, rtol=1e-5)
    assert reconstruction.shape == x.shape


@pytest.mark.parametrize("kind", KINDS)
def test_reconstruction_gradient_reaches_the_encoder_and_changes_no_state(kind: str) -> None:
    model = small_model(kind).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(draw(2, 16, 16, 3))[0].square().sum().backward()
    for name, parameter in model.encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_codebook_and_commitment_losses_train_separate_parameters() -> None:
    book, z = Codebook(16, 4), draw(2, 5, 4).requires_grad_()
    weight = book.embedding.weight
    _, codes, codebook_loss, commitment_loss = book(z)
    torch.testing.assert_close(codebook_loss, commitment_loss)
    assert codebook_loss.shape == (2,)
    (weight_grad,) = torch.autograd.grad(codebook_loss.sum(), weight, retain_graph=True)
    assert (weight_grad.abs().sum(1) > 0).nonzero()[:, 0].tolist() == codes.unique().tolist()
    assert torch.autograd.grad(codebook_loss.sum(), z, retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(commitment_loss.sum(), weight, retain_graph=True, allow_unused=True) == (None,)
    (z_grad,) = torch.autograd.grad(commitment_loss.sum(), z)
    new_commitment_loss = book((z - 0.1 * z_grad).detach())[3]
    assert (new_commitment_loss < commitment_loss).all()


@torch.no_grad()
def test_diffusers_gives_the_same_codes_and_outputs() -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    ours = small_model("codebook")
    theirs = diffusers.VQModel(**ours.diffusers_config(sample_size=16)).eval()
    theirs.load_state_dict(ours.diffusers_state(), strict=True)
    x = draw(2, 16, 16, 3)
    latents = theirs.encode(x.movedim(-1, 1)).latents
    codes = theirs.quantize(latents)[2][2]
    assert torch.equal(codes, ours.encode(x).flatten())
    torch.testing.assert_close(ours(x)[0].movedim(-1, 1), theirs.decode(latents).sample, atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="train with a codebook"):
        small_model("levels").diffusers_config()


@torch.no_grad()
def test_codes_are_exact_under_autocast() -> None:
    book, z = Codebook(512, 8), draw(2, 100, 8)
    expected = book(z)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        vectors, codes, _, _ = book(z)
    assert torch.equal(codes, expected)
    assert vectors.dtype == torch.float32


@torch.no_grad()
def test_causal_codes_do_not_depend_on_later_frames() -> None:
    model = small_model(dims=3, causal_time=True, temporal_downsample=2)
    x = draw(1, 5, 8, 8, 3)
    other = x.clone()
    other[:, 3:] = draw(1, 2, 8, 8, 3, seed=1)
    before, after = model.encode(x), model.encode(other)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


def test_invalid_sides_are_named() -> None:
    with pytest.raises(UsageError, match="width 15"):
        small_model().encode(draw(1, 16, 15, 3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either levels"),
        ({"levels": (8, 5, 5, 5), "codebook_size": 64}, "give either levels"),
        ({"levels": (8, 1, 5, 5)}, "between 2 and 255"),
        ({"levels": ()}, "between 2 and 255"),
        ({"levels": (8, 8)}, "set latent_channels to 2"),
    ],
)
def test_invalid_quantizer_is_refused(fields: dict[str, Any], message: str) -> None:
    autoencoder = AutoencoderShape(channels=3, latent_channels=4, widths=(16, 32))
    with pytest.raises(ValidationError, match=message):
        CodesShape(autoencoder=autoencoder, **fields)
