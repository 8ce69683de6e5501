"""The Inception network of FID: parameter names and counts of the published weights, and loading from safetensors only."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bottega.core.errors import CheckpointError
from bottega.core.noise import numpy_generator
from bottega.models.metric_networks.inception import Inception, Mixed, compute_inception_features, load_inception


def random_state() -> dict[str, Tensor]:
    """Return weights with which the features are finite and depend on the image."""
    with torch.device("meta"):
        state = Inception().state_dict()
    result = {}
    for name, tensor in state.items():
        if name.endswith("num_batches_tracked"):
            continue
        values = torch.from_numpy(numpy_generator(0, name).standard_normal(tuple(tensor.shape), dtype="float32"))
        if name.endswith("conv.weight"):
            result[name] = values * math.sqrt(2 / values[0].numel())
        else:
            result[name] = (
                1 + 0.1 * values.clamp(-3, 3) if name.endswith(("running_var", "bn.weight")) else 0.1 * values
            )
    return result


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as converted from pytorch-fid, with its classifier of 1,008 classes."""
    path = tmp_path_factory.mktemp("inception") / "inception.safetensors"
    save_file({**random_state(), "fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}, path)
    return path


@pytest.fixture(scope="module")
def model(weights: Path) -> Inception:
    return load_inception(weights)


def draw_images(size: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(numpy_generator(1, "pictures", size).uniform(-1, 1, size).astype("float32"))


def test_number_of_parameters_is_the_published_one() -> None:
    """torchvision's 27,161,264 minus 3,326,696 of the auxiliary and 2,049,000 of the main classifier."""
    with torch.device("meta"):
        model = Inception()
    assert sum(parameter.numel() for parameter in model.parameters()) == 21_785_568
    names = model.state_dict().keys()
    for name in (
        "Conv2d_1a_3x3.conv.weight",
        "Conv2d_4a_3x3.bn.running_var",
        "Mixed_5b.branch1x1.conv.weight",
        "Mixed_5d.branch_pool.bn.bias",
        "Mixed_6a.branch3x3.conv.weight",
        "Mixed_6e.branch7x7dbl_5.conv.weight",
        "Mixed_7a.branch7x7x3_4.bn.weight",
        "Mixed_7c.branch3x3_2b.conv.weight",
        "Mixed_7b.branch3x3dbl_3a.conv.weight",
    ):
        assert name in names
    # 94 convolutions, each with a weight and the five tensors of its BatchNorm.
    assert len(names) == 94 * 6


def test_features_are_finite_and_depend_on_the_image(model: Inception) -> None:
    images = draw_images((2, 3, 40, 56))
    images[1] *= 0.1
    features = model(images)
    assert features.shape == (2, 2048)
    assert torch.isfinite(features).all()
    assert features.std(0).mean() > 0.05
    assert not features.requires_grad
    assert torch.equal(model(images), features)


def test_bytes_are_scaled_to_minus_one_to_one(model: Inception) -> None:
    images = torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8).expand(1, 9, 9, 3)
    assert torch.equal(
        compute_inception_features(model, images),
        model(torch.tensor([-1, -0.6, 1]).view(1, 3, 1, 1).expand(1, 3, 9, 9)),
    )


def test_images_are_resized_to_299_without_antialiasing(model: Inception) -> None:
    grey = draw_images((1, 1, 28, 28))
    resized = F.interpolate(grey, size=(299, 299), mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    torch.testing.assert_close(model(grey), model(resized), rtol=1e-4, atol=1e-4)


def test_pooling_matches_the_original_graph() -> None:
    """Average pooling keeps a constant image constant up to the border; the last block uses max pooling."""
    with torch.device("meta"):
        model = Inception()
    ones, rising = torch.ones(1, 1, 8, 8), torch.arange(64.0).reshape(1, 1, 8, 8)
    blocks = {name: module for name, module in model.named_children() if isinstance(module, Mixed)}
    for name, block in blocks.items():
        if name in ("Mixed_6a", "Mixed_7a"):
            assert block.pool(rising)[0, 0, 0].tolist() == [18, 20, 22]
        elif name == "Mixed_7c":
            assert block.pool(rising)[0, 0, 0].tolist() == [9, 10, 11, 12, 13, 14, 15, 15]
        else:
            assert torch.equal(block.pool(ones), ones)
            assert block.pool(rising)[0, 0, 0, 0] == 4.5


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".pkl", ""])
def test_pickles_are_refused_unopened(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(CheckpointError, match=r"only safetensors is read.*save_file") as caught:
        load_inception(tmp_path / f"absent{suffix}")
    assert "\n" not in str(caught.value)


def test_other_names_shapes_and_damage_are_refused(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in random_state().items() if tensor.numel() < 5000}
    path = tmp_path / "weights.safetensors"
    save_file(state, path)
    with pytest.raises(CheckpointError, match=r"weights.safetensors lacks Conv2d_2a_3x3.conv.weight \(\d+ missing, 0"):
        load_inception(path)
    path.write_bytes(b"\x80\x04 no tensors")
    with pytest.raises(CheckpointError, match="is damaged or not a safetensors file"):
        load_inception(path)
    with pytest.raises(CheckpointError, match="cannot read"):
        load_inception(tmp_path / "absent.safetensors")


def test_unexpected_tensors_and_shapes_are_refused(tmp_path: Path) -> None:
    state, path = random_state(), tmp_path / "weights.safetensors"
    save_file({**state, "AuxLogits.fc.bias": torch.zeros(1000)}, path)
    with pytest.raises(
        CheckpointError, match=r"contains AuxLogits.fc.bias \(0 missing, 1 unexpected.*torchvision's own"
    ):
        load_inception(path)
    save_file({**state, "Mixed_7c.branch1x1.bn.bias": torch.zeros(319)}, path)
    with pytest.raises(CheckpointError, match=r"Mixed_7c.branch1x1.bn.bias has shape \[319\], expected \[320\]"):
        load_inception(path)
