"""diffusers' UNet as a backbone: it begins as it should, takes what it is handed, and opens from folders and nothing else."""

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
from bottega.models.unet import UNet, condition_vector_size, resolve_unet_shape, unet_config

diffusers = pytest.importorskip("diffusers")

SIZES: dict[str, Any] = {"channels": 2, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "stages": 3}


def shape_of(kind: Any = "none", *, grid: tuple[int, int] = (8, 12), **sizes: Any) -> GeneratorShape:
    given = {**SIZES, "has_vector": kind in ("class", "vector"), "context_size": 6 if kind == "text" else None, **sizes}
    backbone = UNetShape(grid=grid, **given)
    width = condition_vector_size(backbone) if backbone.has_vector else 0
    return GeneratorShape(backbone=backbone, condition=ConditionShape(kind=kind, size=3, hidden_size=width))


def stirred(model: Generator) -> Generator:
    """With no weight at rest: what begins at zero would hide what comes before it."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw))
    return model.eval()


def inputs(batch: int = 3, *, grid: tuple[int, int] = (8, 12), channels: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(batch, *grid, channels, generator=draw), 999 * torch.rand(batch, generator=draw)


# How it begins


@pytest.mark.parametrize("kind", ["none", "class", "text"])
def test_it_begins_by_predicting_nothing_and_keeps_the_signal(kind: str) -> None:
    model = build_generator(shape_of(kind, hidden_size=32, stages=4, grid=(16, 16)), 0).eval()
    x, time = inputs(grid=(16, 16))
    asked: dict[str, Any] = {"none": {}, "class": {"label": torch.tensor([0, 1, 2])}}.get(
        kind, {"context": torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(2))}
    )
    seen: list[Tensor] = []
    model.backbone.unet.conv_norm_out.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        assert model(x, time, **asked).abs().max() == 0
    # Neither faded nor grown on the way down four stages and up again.
    assert 0.3 < seen[0].std() < 3
    norms = [p for name, p in model.named_parameters() if p.ndim == 1 and name.endswith(".weight")]
    assert norms
    assert all(bool((p == 1).all()) for p in norms)


def test_initial_weights_are_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = build_generator(shape_of("class"), 7).state_dict()
    torch.manual_seed(2)
    same, other = build_generator(shape_of("class"), 7).state_dict(), build_generator(shape_of("class"), 8).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["backbone.unet.conv_in.weight"], other["backbone.unet.conv_in.weight"])


# What it is handed


def test_a_sample_does_not_depend_on_its_batch() -> None:
    model = stirred(build_generator(shape_of("class"), 0))
    x, time = inputs()
    label = torch.tensor([0, 1, 2])
    with torch.no_grad():
        whole = model(x, time, label=label)
        parts = torch.cat([model(x[i : i + 1], time[i : i + 1], label=label[i : i + 1]) for i in range(3)])
    assert whole.shape == x.shape
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-5)


def test_classes_and_times_change_the_prediction() -> None:
    model = stirred(build_generator(shape_of("class"), 0))
    x, time = inputs()
    label = torch.tensor([0, 1, 2])
    with torch.no_grad():
        plain = model(x, time, label=label)
        dropped = model(x, time, label=label, drop=torch.ones(3, dtype=torch.bool))
        assert (model(x, time, label=label.roll(1)) - plain).flatten(1).abs().amax(1).min() > 1e-4
        assert (model(x, time.roll(1), label=label) - plain).flatten(1).abs().amax(1).min() > 1e-4
        assert torch.equal(dropped, model(x, time, label=torch.full((3,), 3)))


def test_masked_tokens_are_not_looked_at() -> None:
    model = stirred(build_generator(shape_of("text"), 0))
    x, time = inputs()
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
        model = stirred(build_generator(shape_of(), 0)).train()
        model.checkpoint_blocks = value
        assert model.checkpoint_blocks is value
        model(*inputs()).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


def test_only_training_is_compiled_and_weights_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def compile_(function: Any, **options: Any) -> Any:
        return lambda *args, **named: calls.append(1) or function(*args, **named)

    monkeypatch.setattr(torch, "compile", compile_)
    model = stirred(build_generator(shape_of(), 0))
    names, before = list(model.state_dict()), model(*inputs())
    model.compile_whole(graphs=False)
    assert torch.equal(model(*inputs()), before)
    assert not calls
    model.train()(*inputs())
    assert calls
    assert list(model.state_dict()) == names


# What does not fit


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
    x, time = inputs(1, grid=(4, 4))
    asked = {"context": torch.zeros(1, 2, 6)} if text else {}
    assert UNet(shape)(x, time, **asked).shape == x.shape


def test_without_diffusers_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'bottega\[hub\]'"):
        build_generator(shape_of(), 0)


# Folders


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A UNet as diffusers saves it, in a pipeline's folder."""
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


def started(folder: Path, kind: Any = "none", **sizes: Any) -> GeneratorShape:
    backbone = resolve_unet_shape(
        folder,
        grid=(8, 12),
        **{**SIZES, "has_vector": kind == "class", "context_size": 6 if kind == "text" else None, **sizes},
    )
    width = condition_vector_size(backbone) if kind == "class" else 0
    return GeneratorShape(backbone=backbone, condition=ConditionShape(kind=kind, size=3, hidden_size=width))


def test_a_folder_computes_here_what_it_computes_in_diffusers(published: Path) -> None:
    shape = started(published)
    ours = build_generator(shape, 0, pretrained=str(published)).eval()
    theirs = diffusers.UNet2DModel.from_pretrained(published / "unet").eval()
    x, time = inputs()
    with torch.no_grad():
        expected = theirs(x.movedim(-1, 1), time).sample.movedim(1, -1)
        torch.testing.assert_close(ours(x, time), expected, rtol=0, atol=1e-6)


def test_a_run_reopens_without_the_folder(published: Path) -> None:
    shape = GeneratorShape.model_validate_json(started(published).model_dump_json())
    saved = build_generator(shape, 0, pretrained=str(published)).state_dict()
    assert isinstance(shape.backbone, UNetShape)
    assert unet_config(shape.backbone)["freq_shift"] == 1
    again = Generator(shape)
    again.load_state_dict(saved)


def test_a_condition_begins_anew_on_an_unconditional_folder(published: Path) -> None:
    model = build_generator(started(published, "class"), 0, pretrained=str(published)).eval()
    plain = build_generator(started(published), 0, pretrained=str(published)).eval()
    x, time = inputs()
    with torch.no_grad():
        model.condition.embedding.weight.zero_()
        torch.testing.assert_close(model(x, time, label=torch.zeros(3)), plain(x, time))


def test_pickled_weights_are_never_opened(published: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((published / "unet" / "config.json").read_text())
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=r"diffusion_pytorch_model\.bin is a pickle"):
        build_generator(started(tmp_path), 0, pretrained=str(tmp_path))


def changed(published: Path, target: Path, **changes: Any) -> Path:
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
def test_folders_that_do_not_fit_are_refused(
    published: Path, tmp_path: Path, changes: dict[str, Any], kind: str, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        started(changed(published, tmp_path, **changes), kind)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_configuration_of_a_newer_diffusers_is_not_guessed_at(published: Path, tmp_path: Path) -> None:
    shape = started(changed(published, tmp_path, gated_skips=True))
    with pytest.raises(UsageError, match=r"has gated_skips, which diffusers .* does not support"):
        build_generator(shape, 0)


def test_the_first_tensor_that_differs_is_named_with_both_shapes(published: Path) -> None:
    other = build_generator(shape_of(stages=2, hidden_size=16), 0)
    with pytest.raises(UsageError) as error:
        load_generator(other, published)
    assert "backbone.unet.conv_in.weight of shape [8, 2, 3, 3], the recipe's model needs [16, 2, 3, 3]" in str(
        error.value
    )
    dit = DiTShape(grid=(8, 12), channels=2, patch=(2, 2), hidden_size=8, num_layers=1, num_heads=1)
    transformer = Generator(GeneratorShape(backbone=dit, condition=ConditionShape(kind="none")))
    with pytest.raises(UsageError, match=r"lacks backbone.embed.weight \[8, 8\].* contains backbone.unet.conv_in"):
        load_generator(transformer, published)
