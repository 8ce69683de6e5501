"""LPIPS and the CLIP perceptual distance: published network and names, properties of a distance, and weight files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tiny_pipelines
from bottega.analysis.personalize_metrics import compute_perceptual_distances
from bottega.core.errors import CheckpointError, UsageError
from bottega.core.noise import numpy_generator
from bottega.models.clip.torch import Clip, load_clip
from bottega.models.metric_networks.perceptual import CHANNELS, ClipPerceptual, Lpips, load_lpips


def build_alexnet() -> nn.Sequential:
    """The convolutions of torchvision's AlexNet, written as it writes them."""
    return nn.Sequential(
        nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(64, 192, kernel_size=5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(192, 384, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(384, 256, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(256, 256, kernel_size=3, padding=1),
        nn.ReLU(),
    )


def draw_state() -> dict[str, Tensor]:
    """Draw weights with the names of the two published files."""
    shapes = {f"features.{name}": tuple(p.shape) for name, p in build_alexnet().named_parameters()}
    state = {}
    for name, shape in shapes.items():
        values = torch.from_numpy(numpy_generator(0, name).standard_normal(shape, dtype="float32"))
        state[name] = values * (2 / values[0].numel()) ** 0.5 if values.ndim > 1 else 0.1 * values
    for number, channels in enumerate(CHANNELS):
        name = f"lin{number}.model.1.weight"
        state[name] = torch.from_numpy(numpy_generator(0, name).random((1, channels, 1, 1), dtype="float32"))
    return state


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lpips") / "lpips.safetensors"
    save_file({**draw_state(), "classifier.1.weight": torch.zeros(2, 2)}, path)
    return path


def draw_images(seed: int, size: tuple[int, ...] = (2, 40, 33, 3)) -> Tensor:
    return torch.from_numpy(numpy_generator(seed, "pictures").uniform(-1, 1, size).astype("float32"))


def reference_distance(a: Tensor, b: Tensor) -> Tensor:
    """Compute the distance by the formula of the paper."""
    state, net = draw_state(), build_alexnet()
    net.load_state_dict(
        {name.removeprefix("features."): t for name, t in state.items() if name.startswith("features.")}
    )
    total = torch.zeros(len(a))
    for row in range(len(a)):
        pair_features = []
        for x in (a[row], b[row]):
            x = (x - torch.tensor([-0.030, -0.088, -0.188])) / torch.tensor([0.458, 0.448, 0.450])
            x, features = x.permute(2, 0, 1)[None], []
            for index, layer in enumerate(net):
                x = layer(x)
                if index in (1, 4, 7, 9, 11):
                    features.append(x[0] / (x[0].square().sum(0, keepdim=True).sqrt() + 1e-10))
            pair_features.append(features)
        for number in range(5):
            weight = state[f"lin{number}.model.1.weight"][0, :, 0, 0]
            squared_difference = (pair_features[0][number] - pair_features[1][number]) ** 2
            total[row] += (weight[:, None, None] * squared_difference).sum(0).mean()
    return total


def test_lpips_matches_the_published_formula(weights: Path) -> None:
    a, b = draw_images(1), draw_images(2)
    with torch.no_grad():
        ours, theirs = load_lpips(weights)(a, b), reference_distance(a, b)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert ours.min() > 0.01


def test_lpips_has_the_published_number_of_parameters() -> None:
    """2,469,696 of AlexNet's convolutions and 1,152 of the heads."""
    assert sum(p.numel() for p in Lpips().parameters()) == 2_469_696 + sum(CHANNELS)


def test_lpips_is_zero_on_itself_symmetric_and_monotone(weights: Path) -> None:
    model = load_lpips(weights)
    a, b = draw_images(3), draw_images(4)
    assert torch.equal(model(a, a), torch.zeros(2))
    assert torch.allclose(model(a, b), model(b, a))
    near, far = model(a, a + 0.05 * (b - a)), model(a, b)
    assert (near < far).all()
    assert not any(p.requires_grad for p in model.parameters())


def test_chunked_distances_equal_a_single_batch(weights: Path) -> None:
    model = load_lpips(weights)
    a, b = (numpy_generator(seed, "bytes").integers(0, 256, (5, 32, 32, 3), dtype=np.uint8) for seed in (0, 1))
    distances = compute_perceptual_distances(model, a, b, device="cpu", chunk_size=2)
    expected = model(*(torch.from_numpy(x.astype(np.float32)) / 127.5 - 1 for x in (a, b)))
    assert distances == pytest.approx(expected.numpy(), abs=1e-6)
    assert compute_perceptual_distances(model, a[:0], b[:0], device="cpu").shape == (0,)


def test_invalid_weights_are_refused(weights: Path, tmp_path: Path) -> None:
    def assert_refused(path: Path, message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            load_lpips(path)
        assert "\n" not in str(caught.value)

    assert_refused(tmp_path / "alex.pth", "only safetensors")
    assert_refused(tmp_path / "nowhere.safetensors", "nowhere")
    (tmp_path / "damaged.safetensors").write_bytes(b"no tensors")
    assert_refused(tmp_path / "damaged.safetensors", "damaged")
    state = draw_state()
    for name, changed, message in (
        ("heads", {k: v for k, v in state.items() if not k.startswith("lin")}, "lacks lin0.model.1.weight"),
        ("more", {**state, "net.slice1.0.weight": torch.zeros(1)}, "contains net.slice1"),
        ("wide", {**state, "lin2.model.1.weight": torch.zeros(1, 7, 1, 1)}, "lin2.model.1.weight has shape"),
    ):
        save_file(changed, tmp_path / f"{name}.safetensors")
        assert_refused(tmp_path / f"{name}.safetensors", message)
    with pytest.raises(UsageError, match="31 pixels"):
        load_lpips(weights)(draw_images(5, (1, 30, 64, 3)), draw_images(6, (1, 30, 64, 3)))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    return load_clip(tiny_pipelines.write_clip(tmp_path_factory.mktemp("clip")))


def test_clip_distance_is_the_mean_over_positions_and_layers(clip: Clip) -> None:
    model = ClipPerceptual(clip)
    assert model.name == "perceptual"
    side = clip.shape.image_size
    a, b = draw_images(7, (2, side, side, 3)), draw_images(8, (2, side, side, 3))
    features = []
    for x in (a, b):
        # As the folder's preprocessor normalises images of the right size.
        scaled = ((x.movedim(-1, 1) + 1) / 2 - clip.mean[:, None, None]) / clip.std[:, None, None]
        states = clip.network.vision_model(pixel_values=scaled, output_hidden_states=True).hidden_states[1:]
        features.append([[state[row, 1:] for state in states] for row in range(2)])
    expected = []
    for features_a, features_b in zip(*features, strict=True):
        layers = []
        for x, y in zip(features_a, features_b, strict=True):
            units = zip(x, y, strict=True)
            layers.append(torch.stack([((p / p.norm() - q / q.norm()) ** 2).sum() for p, q in units]).mean())
        expected.append(float(torch.stack(layers).mean()))
    assert len(features[0][0]) == clip.network.config.vision_config.num_hidden_layers
    assert model(a, b).tolist() == pytest.approx(expected, abs=1e-5)
    assert min(expected) > 0.001


def test_clip_distance_is_zero_on_itself_symmetric_and_monotone(clip: Clip) -> None:
    model = ClipPerceptual(clip)
    a, b = draw_images(9), draw_images(10)  # not square, and a different size than CLIP's
    hooks = [len(layer._forward_hooks) for layer in clip.network.vision_model.encoder.layers]
    assert torch.equal(model(a, a), torch.zeros(2))
    assert torch.allclose(model(a, b), model(b, a))
    assert (model(a, a + 0.02 * (b - a)) < model(a, b)).all()
    assert [
        len(layer._forward_hooks) for layer in clip.network.vision_model.encoder.layers
    ] == hooks  # hooks are removed
