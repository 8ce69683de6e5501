"""The autoencoder: compatibility with diffusers, causal time, and valid sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.autoencoder.config import AutoencoderShape, stage_widths
from bottega.models.autoencoder.layout import export_autoencoder, read_autoencoder_shape
from bottega.models.autoencoder.torch import Autoencoder, load_autoencoder
from bottega.models.initial_conv import initial_convolution
from bottega.models.pipeline.component import WEIGHTS

GRIDS = {1: (24,), 2: (16, 24), 3: (5, 8, 12)}


def small_shape(**changes: Any) -> AutoencoderShape:
    fields: dict[str, Any] = {
        "channels": 3,
        "latent_channels": 4,
        "widths": (16, 24, 32),
        "layers_per_block": 1,
        "norm_groups": 8,
    }
    return AutoencoderShape(**{**fields, **changes})


def small_model(*, seed: int = 0, **changes: Any) -> Autoencoder:
    model = Autoencoder(small_shape(**changes))
    model.initialise(seed)
    return model.eval()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def channels_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 1)


@pytest.fixture(scope="module")
def diffusers() -> Any:
    return pytest.importorskip("diffusers", reason="diffusers is not installed")


PUBLISHED = [{}, {"layers_per_block": 2, "channels": 1}, {"quant_conv": False, "mid_attention": False}]


@pytest.mark.parametrize("changes", PUBLISHED)
@torch.no_grad()
def test_diffusers_loads_our_weights_and_gives_the_same_outputs(diffusers: Any, changes: dict[str, Any]) -> None:
    ours = small_model(**changes)
    theirs = diffusers.AutoencoderKL(**ours.diffusers_config(sample_size=16)).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = draw(2, 16, 24, ours.shape.channels)
    mean, log_variance = ours.encode(x)
    posterior = theirs.encode(channels_first(x)).latent_dist
    torch.testing.assert_close(channels_first(mean), posterior.mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(channels_first(log_variance), posterior.logvar, atol=1e-5, rtol=1e-5)
    decoded = theirs.decode(posterior.mean).sample
    torch.testing.assert_close(channels_first(ours.decode(mean)), decoded, atol=1e-5, rtol=1e-5)
    assert decoded.std() > 0.1


@torch.no_grad()
def test_folders_load_in_both_directions_with_diffusers(diffusers: Any, tmp_path: Path) -> None:
    config = small_model().diffusers_config() | {"scaling_factor": 0.5, "shift_factor": 0.1}
    theirs = diffusers.AutoencoderKL(**config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_autoencoder(tmp_path / "theirs").eval()
    assert (ours.shape.scaling_factor, ours.shape.shift_factor) == (0.5, 0.1)
    x = draw(1, 16, 16, 3)
    mean, _ = ours.encode(x)
    posterior = theirs.encode(channels_first(x)).latent_dist
    torch.testing.assert_close(channels_first(mean), posterior.mean, atol=1e-5, rtol=1e-5)

    export_autoencoder(ours.state_dict(), ours.shape, tmp_path / "ours", sample_size=16)
    reloaded = diffusers.AutoencoderKL.from_pretrained(tmp_path / "ours")
    assert reloaded.config.scaling_factor == 0.5
    assert all(torch.equal(tensor, ours.state_dict()[name]) for name, tensor in reloaded.state_dict().items())


def test_stable_diffusion_autoencoder_has_its_published_size() -> None:
    shape = AutoencoderShape(channels=3, latent_channels=4, widths=stage_widths(128, 8), layers_per_block=2)
    with torch.device("meta"):
        counted = sum(p.numel() for p in Autoencoder(shape).parameters())
    assert shape.widths == (128, 256, 512, 512)
    assert counted == 83_653_863


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_exported_folder_loads_in_one_two_and_three_dimensions(dims: Any, tmp_path: Path) -> None:
    model = small_model(dims=dims)
    export_autoencoder(model.state_dict(), model.shape, tmp_path)
    reloaded = load_autoencoder(tmp_path)
    assert reloaded.shape.model_dump(exclude={"norm_groups"}) == model.shape.model_dump(exclude={"norm_groups"})
    assert reloaded.shape.groups == model.shape.groups
    assert all(torch.equal(tensor, reloaded.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_weights_with_names_from_before_2023_load(tmp_path: Path) -> None:
    model = small_model()
    old_names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    export_autoencoder(model.state_dict(), model.shape, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    for name in list(tensors):
        for new_name, old_name in old_names.items():
            if f".{new_name}." in name:
                value = tensors.pop(name)
                is_matrix = name.endswith("weight")
                tensors[name.replace(new_name, old_name)] = value[..., None, None].contiguous() if is_matrix else value
    assert any("proj_attn" in name for name in tensors)
    save_file(tensors, tmp_path / WEIGHTS)
    loaded = load_autoencoder(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    model = small_model()
    export_autoencoder(model.state_dict(), model.shape, tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.bin is a pickle"):
        load_autoencoder(tmp_path)
    (tmp_path / "diffusion_pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="give the folder of a saved"):
        load_autoencoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "VQModel"}, "VQModel is not supported"),
        ({"act_fn": "relu"}, "act_fn 'relu' is not supported"),
        ({"down_block_types": ["AttnDownEncoderBlock2D"] * 3}, "AttnDownEncoderBlock2D"),
        ({"use_post_quant_conv": False}, "use_post_quant_conv"),
        ({"latents_mean": [0.0] * 4}, "latents_mean"),
        ({"norm_num_groups": 5}, "norm_num_groups 5 does not divide"),
        ({"latent_channels": -1}, "is not the config of an autoencoder"),
        ({"block_out_channels": None}, "is not the config of an autoencoder"),
    ],
)
def test_unsupported_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = small_model()
    export_autoencoder(model.state_dict(), model.shape, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((UsageError, CheckpointError), match=message) as caught:
        read_autoencoder_shape(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_of_a_different_config_are_refused(tmp_path: Path) -> None:
    model = small_model()
    export_autoencoder(model.state_dict(), model.shape, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (({"layers_per_block": 2}, "lacks decoder"), ({"latent_channels": 8}, "has shape")):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(CheckpointError, match=message):
            load_autoencoder(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_autoencoder(tmp_path)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_latent_and_reconstruction_shapes(dims: Any) -> None:
    model, grid = small_model(dims=dims), GRIDS[dims]
    x = draw(2, *grid, 3)
    shape = model.latent_shape(grid)
    assert shape == (*((5,) if dims == 3 else ()), *(side // 4 for side in grid[dims == 3 :]), 4)
    noise = draw(2, *shape, seed=1)
    reconstruction, mean, log_variance = model(x, noise)
    assert reconstruction.shape == x.shape
    assert mean.shape == log_variance.shape == noise.shape
    torch.testing.assert_close(reconstruction, model.decode(mean + (log_variance / 2).exp() * noise))
    assert not torch.allclose(reconstruction, model(x, 0 * noise)[0], atol=1e-3)


@pytest.mark.parametrize(("factor", "frames"), [(1, 5), (2, 7), (4, 9)])
@torch.no_grad()
def test_in_causal_time_later_frames_do_not_change_earlier_ones(factor: int, frames: int) -> None:
    model = small_model(dims=3, causal_time=True, temporal_downsample=factor, widths=(16, 16, 16))
    x = draw(1, frames, 8, 8, 3)
    mean, log_variance = model.encode(x)
    assert mean.shape[1] == 1 + (frames - 1) // factor
    decoded = model.decode(mean)
    assert decoded.shape == x.shape
    for first_changed in range(1, frames):
        other = x.clone()
        other[:, first_changed:] = draw(1, frames - first_changed, 8, 8, 3, seed=2)
        # Latent 0 encodes frame 0, latent i the frames up to factor * i.
        num_equal = 1 + (first_changed - 1) // factor
        for before, after in zip((mean, log_variance), model.encode(other), strict=True):
            torch.testing.assert_close(after[:, :num_equal], before[:, :num_equal], atol=1e-6, rtol=1e-5)
            assert not torch.allclose(after[:, num_equal:], before[:, num_equal:], atol=1e-3)
    for first_changed in range(1, mean.shape[1]):
        latents = mean.clone()
        latents[:, first_changed:] += 1
        num_equal = 1 + (first_changed - 1) * factor
        changed = model.decode(latents)
        torch.testing.assert_close(changed[:, :num_equal], decoded[:, :num_equal], atol=1e-6, rtol=1e-5)
        assert not torch.allclose(changed[:, num_equal], decoded[:, num_equal], atol=1e-3)


@torch.no_grad()
def test_an_image_is_a_causal_video_of_one_frame() -> None:
    model = small_model(dims=3, causal_time=True, temporal_downsample=4)
    video = draw(1, 9, 8, 8, 3)
    torch.testing.assert_close(model.encode(video[:, :1])[0], model.encode(video)[0][:, :1], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_without_causal_time_later_frames_affect_earlier_ones() -> None:
    model = small_model(dims=3, temporal_downsample=2)
    x = draw(1, 4, 8, 8, 3)
    other = x.clone()
    other[:, 1:] += 1
    assert model.encode(x)[0].shape[1] == 2
    assert not torch.allclose(model.encode(x)[0][:, :1], model.encode(other)[0][:, :1], atol=1e-3)


def test_invalid_sides_are_named_with_a_valid_size() -> None:
    model = small_model()
    with pytest.raises(UsageError, match=r"height 18 \(must be a multiple of 4, such as 20\)") as caught:
        model.encode(draw(1, 18, 16, 3))
    assert "width" not in str(caught.value)
    with pytest.raises(UsageError, match=r"height 0 .* such as 4\), width 3"):
        model.latent_shape((0, 3))
    with pytest.raises(
        UsageError, match=r"takes data with 2 sides \(height, width\), but this data has 1 \(16\); use an"
    ):
        model.encode(draw(1, 16, 3))
    video = small_shape(dims=3, causal_time=True, temporal_downsample=4)
    with pytest.raises(UsageError, match=r"frames 16 \(must be 1 more than a multiple of 4, such as 17\)"):
        video.latent_grid((16, 8, 8))
    assert video.latent_grid((17, 8, 8)) == (5, 2, 2)


@pytest.mark.parametrize(("widths", "requested", "groups"), [((48, 96), 32, 24), ((6, 9), 32, 3), ((7, 11), 4, 1)])
def test_group_counts_divide_every_width(widths: tuple[int, ...], requested: int, groups: int) -> None:
    shape = small_shape(widths=widths, norm_groups=requested)
    assert shape.groups == groups
    assert Autoencoder(shape).diffusers_config()["norm_num_groups"] == groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal_time": True}, "dims 2 has none"),
        ({"dims": 3, "temporal_downsample": 3}, "power of two up to 4"),
        ({"dims": 3, "temporal_downsample": 8}, "power of two up to 4"),
        ({"widths": (16, 0)}, "at least one channel"),
        ({"widths": ()}, "at least 1 item"),
    ],
)
def test_invalid_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small_shape(**changes)


def test_invalid_downsampling_and_export_are_refused() -> None:
    with pytest.raises(UsageError, match="6 is not a power of two"):
        stage_widths(64, 6)
    with pytest.raises(UsageError, match="only image autoencoders can be exported"):
        small_model(dims=1).diffusers_config()


def test_initial_weights_depend_on_seed_and_name_and_preserve_the_scale() -> None:
    with torch.device("meta"):
        model = Autoencoder(small_shape())
    model.to_empty(device="cpu")
    model.initialise(3)
    other = small_model(seed=3, layers_per_block=1).state_dict()
    assert all(torch.equal(tensor, other[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(small_model(seed=4).state_dict()["encoder.conv_in.weight"], other["encoder.conv_in.weight"])
    value = initial_convolution("conv_in.weight", (64, 32, 3, 3), 0, residual_layers=4)
    assert value.std() == pytest.approx(1 / math.sqrt(288), rel=0.03)
    assert initial_convolution("conv2.weight", (64, 32, 3, 3), 0, residual_layers=4).std() == pytest.approx(
        value.std() / 2, rel=0.03
    )
    reconstruction, mean, _ = small_model()(draw(2, 16, 24, 3), draw(2, 4, 6, 4))
    assert 0.2 < mean.std() < 2
    assert 0.2 < reconstruction.std() < 2


def test_gradient_checkpointing_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from bottega.models.autoencoder import resnet

    gradients, calls = [], []
    original = resnet.checkpoint
    monkeypatch.setattr(resnet, "checkpoint", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    for checkpointed in (False, True):
        model = small_model().train()
        model.checkpoint_blocks = checkpointed
        model(draw(2, 8, 8, 3), draw(2, 2, 2, 4, seed=1))[0].square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        assert bool(calls) is checkpointed
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@torch.no_grad()
def test_log_variances_have_the_published_bounds() -> None:
    model = small_model()
    for bias, bound in ((100.0, 20.0), (-100.0, -30.0)):
        model.quant_conv.bias.fill_(bias)  # type: ignore[union-attr, operator]
        assert (model.encode(draw(1, 8, 8, 3))[1] == bound).all()


def test_latents_stay_float32_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reconstruction, mean, log_variance = small_model()(draw(1, 8, 8, 3), draw(1, 2, 2, 4))
    assert mean.dtype == log_variance.dtype == torch.float32
    assert reconstruction.dtype == torch.bfloat16


def test_time_is_downsampled_in_the_last_stages() -> None:
    """Time is merged where a position covers much of the image already, as in the published video models."""
    shape = small_shape(dims=3, temporal_downsample=2)
    assert [shape.strides(stage) for stage in range(3)] == [(1, 2, 2), (2, 2, 2), (1, 1, 1)]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_gradients_have_the_strides_of_their_weights(dims: Any) -> None:
    """DDP uses the strides of the weights, and warns about gradients that differ."""
    model = small_model(dims=dims, channels=1).train()
    reconstruction, mean, log_variance = model(draw(2, *GRIDS[dims], 1), draw(2, *model.latent_shape(GRIDS[dims])))
    (reconstruction.square().sum() + mean.sum() + log_variance.sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride(), name
