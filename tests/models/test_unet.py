"""diffusers' UNet as a backbone: initialisation, conditioning, unsupported sizes and folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape, UNetShape
from bottega.models.generator.torch import Generator, build_generator, load_generator
from bottega.models.unet import UNet, build_unet_config, condition_vector_size, resolve_unet_shape

diffusers = pytest.importorskip("diffusers")

SIZES: dict[str, Any] = {"channels": 2, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "stages": 3}


def build_shape(kind: Any = "none", *, grid: tuple[int, int] = (8, 12), **sizes: Any) -> GeneratorShape:
    fields = {
        **SIZES,
        "has_vector": kind in ("class", "vector"),
        "context_size": 6 if kind == "text" else None,
        **sizes,
    }
    backbone = UNetShape(grid=grid, **fields)
    width = condition_vector_size(backbone) if backbone.has_vector else 0
    return GeneratorShape(backbone=backbone, condition=ConditionShape(kind=kind, size=3, hidden_size=width))


def randomise(model: Generator) -> Generator:
    """Perturb every weight: zero-initialised ones would hide everything before them."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model.eval()


def draw_inputs(batch: int = 3, *, grid: tuple[int, int] = (8, 12), channels: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(batch, *grid, channels, generator=draw), 999 * torch.rand(batch, generator=draw)


# Initialisation


@pytest.mark.parametrize("kind", ["none", "class", "text"])
def test_initial_prediction_is_zero_and_the_signal_scale_is_preserved(kind: str) -> None:
    model = build_generator(build_shape(kind, hidden_size=32, stages=4, grid=(16, 16)), 0).eval()
    x, time = draw_inputs(grid=(16, 16))
    condition: dict[str, Any] = {"none": {}, "class": {"label": torch.tensor([0, 1, 2])}}.get(
        kind, {"context": torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(2))}
    )
    activations: list[Tensor] = []
    model.backbone.unet.conv_norm_out.register_forward_pre_hook(lambda _, args: activations.append(args[0]))
    with torch.no_grad():
        assert model(x, time, **condition).abs().max() == 0
    # The scale is preserved through four stages down and up.
    assert 0.3 < activations[0].std() < 3
    norms = [p for name, p in model.named_parameters() if p.ndim == 1 and name.endswith(".weight")]
    assert norms
    assert all(bool((p == 1).all()) for p in norms)


def test_initial_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = build_generator(build_shape("class"), 7).state_dict()
    torch.manual_seed(2)
    repeated, other = (
        build_generator(build_shape("class"), 7).state_dict(),
        build_generator(build_shape("class"), 8).state_dict(),
    )
    assert all(torch.equal(first[name], repeated[name]) for name in first)
    assert not torch.equal(first["backbone.unet.conv_in.weight"], other["backbone.unet.conv_in.weight"])


# Inputs


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model = randomise(build_generator(build_shape("class"), 0))
    x, time = draw_inputs()
    label = torch.tensor([0, 1, 2])
    with torch.no_grad():
        full = model(x, time, label=label)
        parts = torch.cat([model(x[i : i + 1], time[i : i + 1], label=label[i : i + 1]) for i in range(3)])
    assert full.shape == x.shape
    torch.testing.assert_close(full, parts, rtol=0, atol=1e-5)


def test_classes_and_times_change_the_prediction() -> None:
    model = randomise(build_generator(build_shape("class"), 0))
    x, time = draw_inputs()
    label = torch.tensor([0, 1, 2])
    with torch.no_grad():
        plain = model(x, time, label=label)
        dropped = model(x, time, label=label, drop=torch.ones(3, dtype=torch.bool))
        assert (model(x, time, label=label.roll(1)) - plain).flatten(1).abs().amax(1).min() > 1e-4
        assert (model(x, time.roll(1), label=label) - plain).flatten(1).abs().amax(1).min() > 1e-4
        assert torch.equal(dropped, model(x, time, label=torch.full((3,), 3)))


def test_masked_tokens_have_no_effect() -> None:
    model = randomise(build_generator(build_shape("text"), 0))
    x, time = draw_inputs()
    context = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(2))
    other, mask = context.clone(), torch.arange(5).expand(3, 5) < 3
    other[:, 3:] += 1
    with torch.no_grad():
        torch.testing.assert_close(
            model(x, time, context=context, mask=mask), model(x, time, context=other, mask=mask), rtol=0, atol=1e-5
        )
        assert (model(x, time, context=context) - model(x, time, context=other)).abs().max() > 1e-3


def test_checkpointed_blocks_give_the_same_gradients() -> None:
    gradients = []
    for value in (False, True):
        model = randomise(build_generator(build_shape(), 0)).train()
        model.checkpoint_blocks = value
        assert model.checkpoint_blocks is value
        model(*draw_inputs()).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


def test_compile_applies_in_training_only_and_keeps_weight_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def compile_(function: Any, **options: Any) -> Any:
        return lambda *args, **named: calls.append(1) or function(*args, **named)

    monkeypatch.setattr(torch, "compile", compile_)
    model = randomise(build_generator(build_shape(), 0))
    names, before = list(model.state_dict()), model(*draw_inputs())
    model.compile_whole(use_cuda_graphs=False)
    assert torch.equal(model(*draw_inputs()), before)
    assert not calls
    model.train()(*draw_inputs())
    assert calls
    assert list(model.state_dict()) == names


# Errors


@pytest.mark.parametrize(
    ("grid", "changes", "message"),
    [
        (
            (8, 10),
            {},
            "model.stages: 3 stages halve the sides 2 times, but 10 (of 8 x 10) is not divisible by 4; use at most 2 stages",
        ),
        ((8, 8), {"num_heads": 3}, "model.num_heads: 3 does not divide 16"),
        ((4, 8, 8), {}, "model.backbone: unet supports images and mel spectrograms only"),
        ((16,), {}, "model.backbone: unet supports images and mel spectrograms only"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(
    grid: tuple[int, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        resolve_unet_shape(None, grid=grid, **{**SIZES, **changes})
    assert message in str(error.value)


@pytest.mark.parametrize("width", [6, 20, 37, 48])
@pytest.mark.parametrize("text", [False, True])
def test_any_width_gives_a_model(width: int, text: bool) -> None:
    shape = UNetShape(grid=(4, 4), **{**SIZES, "hidden_size": width, "context_size": 6 if text else None})
    x, time = draw_inputs(1, grid=(4, 4))
    condition = {"context": torch.zeros(1, 2, 6)} if text else {}
    assert UNet(shape)(x, time, **condition).shape == x.shape


def test_missing_diffusers_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'bottega\[hub\]'"):
        build_generator(build_shape(), 0)


# Folders


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A UNet saved by diffusers in a pipeline folder."""
    torch.manual_seed(3)
    model = diffusers.UNet2DModel(
        sample_size=32,
        in_channels=2,
        out_channels=2,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
        freq_shift=1,
    )
    folder = tmp_path_factory.mktemp("pipeline")
    model.save_pretrained(folder / "unet")
    return folder


def shape_from_folder(folder: Path, kind: Any = "none", **sizes: Any) -> GeneratorShape:
    backbone = resolve_unet_shape(
        folder,
        grid=(8, 12),
        **{**SIZES, "has_vector": kind == "class", "context_size": 6 if kind == "text" else None, **sizes},
    )
    width = condition_vector_size(backbone) if kind == "class" else 0
    return GeneratorShape(backbone=backbone, condition=ConditionShape(kind=kind, size=3, hidden_size=width))


def test_loaded_folder_matches_diffusers(published: Path) -> None:
    shape = shape_from_folder(published)
    ours = build_generator(shape, 0, pretrained=str(published)).eval()
    theirs = diffusers.UNet2DModel.from_pretrained(published / "unet").eval()
    x, time = draw_inputs()
    with torch.no_grad():
        expected = theirs(x.movedim(-1, 1), time).sample.movedim(1, -1)
        torch.testing.assert_close(ours(x, time), expected, rtol=0, atol=1e-6)


def test_saved_run_loads_without_the_folder(published: Path) -> None:
    shape = GeneratorShape.model_validate_json(shape_from_folder(published).model_dump_json())
    saved = build_generator(shape, 0, pretrained=str(published)).state_dict()
    assert isinstance(shape.backbone, UNetShape)
    assert build_unet_config(shape.backbone)["freq_shift"] == 1
    reopened = Generator(shape)
    reopened.load_state_dict(saved)


def test_condition_of_an_unconditional_folder_is_newly_initialised(published: Path) -> None:
    model = build_generator(shape_from_folder(published, "class"), 0, pretrained=str(published)).eval()
    plain = build_generator(shape_from_folder(published), 0, pretrained=str(published)).eval()
    x, time = draw_inputs()
    with torch.no_grad():
        model.condition.embedding.weight.zero_()
        torch.testing.assert_close(model(x, time, label=torch.zeros(3)), plain(x, time))


def test_pickled_weights_are_never_opened(published: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((published / "unet" / "config.json").read_text())
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.bin is a pickle"):
        build_generator(shape_from_folder(tmp_path), 0, pretrained=str(tmp_path))


def write_config(published: Path, target: Path, **changes: Any) -> Path:
    config = json.loads((published / "unet" / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"in_channels": 4}, "none", "takes 4 channels and gives 2, but the samples have 2"),
        ({"num_class_embeds": 5}, "class", "num_class_embeds 5"),
        ({"time_embedding_type": "fourier"}, "none", "time_embedding_type fourier"),
        ({}, "text", "model.condition: the UNet of model.from is a UNet2DModel; it takes none, class or vector"),
        ({"_class_name": "UNet2DConditionModel"}, "none", "it takes text"),
        ({"_class_name": "UNet2DConditionModel", "cross_attention_dim": 768}, "text", "takes 768"),
        ({"block_out_channels": [8] * 5}, "none", "model.from: 5 stages"),
        ({"_class_name": "AutoencoderKL"}, "none", "has no diffusers UNet"),
    ],
)
def test_incompatible_folders_are_refused(
    published: Path, tmp_path: Path, changes: dict[str, Any], kind: str, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        shape_from_folder(write_config(published, tmp_path, **changes), kind)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_diffusers_settings_are_refused(published: Path, tmp_path: Path) -> None:
    shape = shape_from_folder(write_config(published, tmp_path, gated_skips=True))
    with pytest.raises(UsageError, match=r"has gated_skips, which diffusers .* does not support"):
        build_generator(shape, 0)


def test_first_mismatched_tensor_is_named_with_both_shapes(published: Path) -> None:
    other = build_generator(build_shape(stages=2, hidden_size=16), 0)
    with pytest.raises(UsageError) as error:
        load_generator(other, published)
    assert "backbone.unet.conv_in.weight of shape [8, 2, 3, 3], but the recipe's model needs [16, 2, 3, 3]" in str(
        error.value
    )
    dit = DiTShape(grid=(8, 12), channels=2, patch=(2, 2), hidden_size=8, num_layers=1, num_heads=1)
    transformer = Generator(GeneratorShape(backbone=dit, condition=ConditionShape(kind="none")))
    with pytest.raises(UsageError, match=r"lacks backbone.embed.weight \[8, 8\].* contains backbone.unet.conv_in"):
        load_generator(transformer, published)
