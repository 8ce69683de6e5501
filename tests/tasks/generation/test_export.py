"""Exported generators give the same samples in diffusers' pipelines and when reopened from the folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import bottega
import tiny_clip
from bottega.core.errors import CheckpointError, UsageError
from bottega.core.noise import Noise
from bottega.data.text.captions import CaptionTokenizer
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import export_autoencoder
from bottega.models.autoencoder.torch import Autoencoder
from bottega.models.build import build_models
from bottega.models.dit import layout
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape, UNetShape
from bottega.models.generator.torch import build_generator, load_generator
from bottega.models.unet import condition_vector_size
from bottega.tasks.generation.config import ImageRecipe, TextEncoderOptions
from bottega.tasks.generation.export import (
    build_scheduler_config,
    export_generator,
    find_stock_pipeline,
    open_exported_generator,
)
from bottega.tasks.generation.latents import Latents
from bottega.tasks.generation.paths import NoisePath as NoisePath
from bottega.tasks.generation.schedules import NUM_TRAIN_TIMESTEPS
from bottega.tasks.generation.task import Generation
from bottega.tasks.generation.text_condition import TextCondition, TextMetadata

diffusers = pytest.importorskip("diffusers")
diffusers.utils.logging.disable_progress_bar()

CLASSES = ("cat", "dog", "owl, or another bird")
SCALE = 0.7


# A workload without data: the task, its models, and what the exporter reads


def perturb(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def dit(kind: Any = "class", *, grid: tuple[int, ...] = (4, 4), channels: int = 3) -> GeneratorShape:
    patch = (2,) * len(grid)
    backbone = DiTShape(grid=grid, channels=channels, patch=patch, hidden_size=24, num_layers=2, num_heads=3)
    return GeneratorShape(backbone=backbone, condition=ConditionShape(kind=kind, size=len(CLASSES), hidden_size=24))


def unet(kind: Any = "none", *, grid: tuple[int, int] = (4, 8), channels: int = 3) -> GeneratorShape:
    backbone = UNetShape(
        grid=grid,
        channels=channels,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        stages=2,
        has_vector=kind in ("class", "vector"),
        context_size=16 if kind == "text" else None,
    )
    width = condition_vector_size(backbone)
    return GeneratorShape(backbone=backbone, condition=ConditionShape(kind=kind, size=len(CLASSES), hidden_size=width))


def build_workload(
    shape: GeneratorShape,
    path: NoisePath,
    *,
    vae: Path | None = None,
    text: TextCondition | None = None,
    medium: str = "image",
    normalise: Any = "symmetric",
    shift: float = 0.0,
) -> Any:
    recipe = ImageRecipe.model_validate({"data": {"normalise": normalise}})
    latents = Latents(folder=str(vae), scale=SCALE, shift=shift) if vae is not None else None
    text_fields = text.task_fields if text is not None else {}
    task = Generation(key="image", shape=shape, path=path, latents=latents, **text_fields)

    def write_processor(folder: Path) -> None:
        (folder / "generator.json").write_text("{}")

    return SimpleNamespace(
        task=task,
        recipe=recipe,
        medium=SimpleNamespace(name=medium),
        metadata=SimpleNamespace(classes=CLASSES if shape.condition.kind == "class" else ()),
        text=text,
        processor=SimpleNamespace(write=write_processor),
    )


def build_perturbed_models(workload: Any) -> dict[str, Any]:
    models = build_models(workload.task, 0)
    perturb(models["model"])
    return {name: model.eval() for name, model in models.items()}


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = AutoencoderShape(channels=3, latent_channels=3, widths=(8, 8), layers_per_block=1, norm_groups=4)
    model = Autoencoder(shape)
    model.initialise(0)
    return export_autoencoder(model.state_dict(), shape, tmp_path_factory.mktemp("vae"))


class FixedNoise:
    """A noise source that returns one fixed tensor."""

    framework = "torch"

    def __init__(self, start: Tensor) -> None:
        self.start = start

    def normal(self, name: str, shape: tuple[int, ...] = ()) -> Tensor:
        assert tuple(self.start.shape[1:]) == shape
        return self.start


def sample_pixels(
    workload: Any, models: Any, start: Tensor, *, batch: Any = None, steps: int = 1, guidance: float = 1.0
) -> Tensor:
    """Return our own sample from this noise, as pixels from 0 to 1, channels last."""
    rng: Any = FixedNoise(start.movedim(1, -1))
    with torch.no_grad():
        x = workload.task.draw(models, batch or {}, rng, steps=steps, method="euler", guidance=guidance)
    return (x / 2 + 0.5).clamp(0, 1)


def predict_at_last_step(path: NoisePath, models: Any, start: Tensor) -> Tensor:
    """Return the clean data predicted at the last step of the schedule, where our samplers do not start."""
    x, t = start.movedim(1, -1), torch.tensor((NUM_TRAIN_TIMESTEPS - 1) / NUM_TRAIN_TIMESTEPS)
    with torch.no_grad():
        predicted = models["model"](x, path.model_time(t).expand(len(x)))
    clean, _ = path.split_prediction(predicted, x, *path.levels(t))
    return (clean.float() / 2 + 0.5).clamp(0, 1)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


PATHS = [
    NoisePath(objective="flow"),
    NoisePath(objective="v", schedule="cosine"),
    NoisePath(objective="v", schedule="linear"),
    NoisePath(objective="noise", schedule="linear"),
    NoisePath(objective="noise", schedule="scaled_linear"),
]


# diffusers' pipelines. With one step all samplers agree, so the images must be equal up to rounding.


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.objective}-{path.schedule}")
def test_ddpm_pipeline_matches_our_samples(path: NoisePath, tmp_path: Path) -> None:
    workload = build_workload(unet(), path)
    models = build_perturbed_models(workload)
    assert export_generator(workload, models, tmp_path)["library_name"] == "diffusers"
    pipeline = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        batch_size=2, num_inference_steps=1, generator=torch.Generator().manual_seed(5), output_type="np"
    ).images
    start = noise(2, 3, 4, 8)
    expected = (
        sample_pixels(workload, models, start)
        if path.objective != "noise"
        else predict_at_last_step(path, models, start)
    )
    assert images.shape == (2, 4, 8, 3)
    assert expected.std() > 0.02
    np.testing.assert_allclose(images, expected.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "cosine"])
def test_diffusers_schedulers_have_our_noise_levels(schedule: Any) -> None:
    path = NoisePath(objective="v", schedule=schedule)
    config = build_scheduler_config(path, "DDPMPipeline")
    scheduler = diffusers.DDPMScheduler.from_config(config)
    alphas_cumprod = np.cumprod(1 - path.betas())
    np.testing.assert_allclose(scheduler.alphas_cumprod.double().sqrt(), np.sqrt(alphas_cumprod), rtol=1e-4, atol=1e-6)
    scheduler.set_timesteps(10)
    assert int(scheduler.timesteps[0]) == NUM_TRAIN_TIMESTEPS - 1


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_pipeline_matches_our_samples_after_many_steps(shift: float, tmp_path: Path) -> None:
    workload = build_workload(unet(), NoisePath(objective="flow", shift=shift))
    models = build_perturbed_models(workload)
    export_generator(workload, models, tmp_path)
    pipeline = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        batch_size=2, num_inference_steps=60, generator=torch.Generator().manual_seed(5), output_type="np"
    ).images
    expected, one_step = (sample_pixels(workload, models, noise(2, 3, 4, 8), steps=n).numpy() for n in (60, 1))
    assert np.abs(images - expected).max() < 0.01
    assert np.abs(one_step - expected).max() > 0.03


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("objective", ["noise", "v"])
def test_dit_pipeline_matches_our_samples(vae: Path, objective: Any, guidance: float, tmp_path: Path) -> None:
    workload = build_workload(dit(), NoisePath(objective=objective, schedule="cosine"), vae=vae)
    models = build_perturbed_models(workload)
    assert export_generator(workload, models, tmp_path)["library_name"] == "diffusers"
    pipeline = diffusers.DiTPipeline.from_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.get_label_ids(["dog", "owl  or another bird"]) == [1, 2]
    images = pipeline(
        class_labels=[2, 0],
        guidance_scale=guidance,
        num_inference_steps=1,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
    ).images
    batch = {"label": torch.tensor([2, 0])}
    expected = sample_pixels(workload, models, noise(2, 3, 4, 4), batch=batch, guidance=guidance)
    assert images.shape == (2, 8, 8, 3)
    np.testing.assert_allclose(images, expected.numpy(), rtol=0, atol=1e-4)


def test_stable_diffusion_pipeline_matches_our_samples(vae: Path, tmp_path: Path) -> None:
    encoder = tiny_clip.save_clip(tmp_path / "clip")
    metadata = TextMetadata(max_tokens=9, prompts=("a red square",), encoder=str(encoder), width=16, is_masked=False)
    text = TextCondition(CaptionTokenizer(encoder, 9), metadata, TextEncoderOptions(), metadata.prompts)
    workload = build_workload(
        unet("text", grid=(4, 4)), NoisePath(objective="v", schedule="linear"), vae=vae, text=text
    )
    models = build_perturbed_models(workload)
    folder = tmp_path / "final"
    assert export_generator(workload, models, folder) == {"library_name": "diffusers", "pipeline_tag": "text-to-image"}
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        ["a red square", "bright"],
        guidance_scale=3.0,
        num_inference_steps=1,
        latents=noise(2, 3, 4, 4),
        output_type="np",
    ).images
    batch = {name: torch.from_numpy(rows) for name, rows in text.encode(["a red square", "bright"]).items()}
    expected = sample_pixels(workload, models, noise(2, 3, 4, 4), batch=batch, guidance=3.0)
    other = sample_pixels(
        workload, models, noise(2, 3, 4, 4), batch={n: rows.flip(0) for n, rows in batch.items()}, guidance=3.0
    )
    np.testing.assert_allclose(images, expected.numpy(), rtol=0, atol=1e-4)
    assert (other - expected).abs().max() > 1e-3


def test_dit_matches_the_diffusers_transformer() -> None:
    shape = dit(grid=(8, 8))
    assert isinstance(shape.backbone, DiTShape)
    model = perturb(build_generator(shape, 0))
    config = layout.diffusers_config(shape.backbone)
    theirs = diffusers.DiTTransformer2DModel(**{k: v for k, v in config.items() if not k.startswith("_")}).eval()
    tensors = layout.to_diffusers(model.state_dict(), shape.backbone)
    theirs.load_state_dict(tensors)
    x, time = noise(4, 8, 8, 3), torch.tensor([0.0, 1.0, 500.5, 999.0])
    for label, drop in ((torch.tensor([0, 1, 2, 0]), False), (torch.full((4,), layout.NULL_CLASS), True)):
        with torch.no_grad():
            ours = model(x, time, label=label.clamp(max=2), drop=torch.full((4,), drop))
            expected = theirs(x.movedim(-1, 1), timestep=time, class_labels=label).sample.movedim(1, -1)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    back = layout.from_diffusers(tensors)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def test_stock_pipelines_are_used_only_where_they_match(vae: Path) -> None:
    noise_path, flow = NoisePath(objective="noise"), NoisePath(objective="flow")

    def find_pipeline(shape: GeneratorShape, path: NoisePath, **options: Any) -> str | None:
        workload = build_workload(shape, path, **options)
        models = {"vae": SimpleNamespace(shape=SimpleNamespace(downsample=2))} if "vae" in options else {}
        return find_stock_pipeline(workload, models)

    assert find_pipeline(unet(), noise_path) == "DDPMPipeline"
    assert find_pipeline(dit(), noise_path, vae=vae) == "DiTPipeline"
    assert find_pipeline(unet(), noise_path, normalise="unit") is None
    assert find_pipeline(unet(channels=1), noise_path, medium="audio") is None
    assert find_pipeline(unet("class"), noise_path) is None
    assert find_pipeline(dit(), noise_path) is None
    assert find_pipeline(dit(), flow, vae=vae) is None
    assert find_pipeline(dit(), noise_path, vae=vae, shift=0.5) is None
    assert find_pipeline(dit(grid=(4, 8)), noise_path, vae=vae) is None
    assert find_pipeline(dit(grid=(2, 4, 4)), noise_path) is None


# Our own layout


def with_attributes(grid: tuple[int, ...]) -> GeneratorShape:
    """Two of the three classes share one attribute, two the other."""
    shape = dit(grid=grid)
    return shape.model_copy(
        update={"condition": shape.condition.model_copy(update={"shared": ((0, 2), (0, 3), (1, 3))})}
    )


CASES = {
    "dit-class": lambda: dit(),
    "dit-attributes": lambda: with_attributes((4, 4)),
    "dit-attributes-clips": lambda: with_attributes((2, 4, 4)),
    "dit-none": lambda: dit("none", grid=(4, 6)),
    "dit-clips": lambda: dit("class", grid=(2, 4, 4)),
    "unet-class": lambda: unet("class"),
    "unet-vector": lambda: unet("vector"),
    "unet-none": lambda: unet(),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("in_latents", [False, True])
def test_a_reopened_export_samples_as_the_run(case: str, in_latents: bool, vae: Path, tmp_path: Path) -> None:
    if in_latents and "clips" in case:
        pytest.skip("this autoencoder is for images")
    workload = build_workload(CASES[case](), NoisePath(), vae=vae if in_latents else None)
    models = build_perturbed_models(workload)
    export_generator(workload, models, tmp_path)
    task, loaded = open_exported_generator(tmp_path)
    batch = {"label": torch.tensor([0, 2]), "condition": noise(2, 3)}
    with torch.no_grad():
        expected = workload.task.draw(models, batch, Noise(3, 0, torch.arange(2), torch), steps=3, guidance=2.0)
    samples = task.draw(loaded, batch, Noise(3, 0, torch.arange(2), torch), steps=3, guidance=2.0)
    assert torch.equal(samples, expected)
    assert not json.loads((tmp_path / "config.json").read_text())["task"].get("pretrained")
    names = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert not any(name.startswith("backbone.unet.") for name in names), "weights are written once"


def test_components_open_in_diffusers_without_a_pipeline(tmp_path: Path) -> None:
    workload = build_workload(unet("class"), NoisePath())
    models = build_perturbed_models(workload)
    export_generator(workload, models, tmp_path)
    model = diffusers.UNet2DModel.from_pretrained(tmp_path / "unet").eval()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "scheduler")
    scheduler.set_timesteps(1)
    start, label = noise(2, 3, 4, 8), torch.tensor([1, 2])
    with torch.no_grad():
        vector = load_file(tmp_path / "model.safetensors")["condition.embedding.weight"][label]
        step = scheduler.timesteps[0]
        images = scheduler.step(model(start, step, class_labels=vector).sample, step, start).prev_sample
    expected = sample_pixels(workload, models, start, batch={"label": label})
    torch.testing.assert_close((images / 2 + 0.5).clamp(0, 1).movedim(1, -1), expected, rtol=0, atol=1e-5)


def test_an_export_replaces_an_earlier_export_and_no_other_files(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "mine.txt").write_text("kept")
    workload = build_workload(dit(), NoisePath())
    export_generator(workload, build_perturbed_models(workload), tmp_path)
    assert (tmp_path / "unet" / "mine.txt").is_file()
    workload = build_workload(unet(), NoisePath())
    export_generator(workload, build_perturbed_models(workload), tmp_path)
    assert not (tmp_path / "transformer").exists()
    open_exported_generator(tmp_path)


def test_a_damaged_export_is_refused(tmp_path: Path) -> None:
    workload = build_workload(unet("class"), NoisePath())
    export_generator(workload, build_perturbed_models(workload), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"lacks condition.embedding.weight \[4, 32\]"):
        open_exported_generator(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for damage in ({"format": "other"}, {"task": {"key": "image"}}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **damage}))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            open_exported_generator(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_a_generator_starts_from_an_export(case: str, tmp_path: Path) -> None:
    workload = build_workload(CASES[case](), NoisePath())
    models = build_perturbed_models(workload)
    export_generator(workload, models, tmp_path)
    started, exported = build_generator(workload.task.shape, 9, pretrained=str(tmp_path)), models["model"]
    names = [name for name in exported.state_dict() if case != "dit-attributes" or not name.startswith("condition.")]
    assert all(torch.equal(started.state_dict()[name], exported.state_dict()[name]) for name in names)
    if case == "dit-attributes":  # diffusers' layout has a single embedding table
        assert torch.equal(started.condition.fold_shared(), exported.condition.fold_shared())


def test_another_number_of_classes_is_refused(tmp_path: Path) -> None:
    workload = build_workload(dit(), NoisePath())
    export_generator(workload, build_perturbed_models(workload), tmp_path)
    five = ConditionShape(kind="class", size=5, hidden_size=24)
    other = build_generator(workload.task.shape.model_copy(update={"condition": five}), 0)
    with pytest.raises(UsageError) as error:
        load_generator(other, tmp_path)
    assert "condition.embedding.weight of shape [4, 24], but the recipe's model needs [6, 24]" in str(error.value)


# A complete run

SMALL: dict[str, Any] = {
    "model.backbone": "unet",
    "model.condition": "none",
    "model.objective": "v",
    "model.hidden_size": 8,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.stages": 2,
    "data.workers": 0,
    "training.max_steps": 2,
    "training.batch_size": 8,
    "training.ema": None,
    "evaluation.every": None,
    "checkpoint.every": 2,
    "samples.every": None,
    "logging.tensorboard": False,
    "logging.resources": False,
}


def test_a_run_is_exported_and_fine_tuned(tmp_path: Path) -> None:
    def train(name: str, **changes: Any) -> Path:
        return Path(bottega.train("image", {**SMALL, "output_dir": str(tmp_path), "name": name, **changes}).path)

    first = train("first")
    with pytest.raises(UsageError, match="was not exported; run bottega export"):
        train("second", **{"model.from": str(first)})
    saved = bottega.load(first)
    folder = saved.export()
    assert diffusers.DDPMPipeline.from_pretrained(folder).unet.config.in_channels == 1
    # The sizes of the exported model override the recipe's. A negligible learning rate leaves the weights unchanged.
    changes = {"model.from": str(first), "model.hidden_size": 64, "training.learning_rate": 1e-12}
    second = train("second", **changes, **{"training.weight_decay": 0})
    (folder / "unet" / "config.json").unlink()  # a finished run does not need it any more
    again = bottega.load(second)
    before, after = saved.model.state_dict(), again.model.state_dict()
    assert all(torch.allclose(after[name], tensor, rtol=0, atol=1e-6) for name, tensor in before.items())
    assert any(tensor.std() > 0.1 for tensor in before.values())
