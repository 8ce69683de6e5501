"""Pipelines of diffusers, read part by part: what they say here is what they say there, and what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_pipelines
from bottega.core.errors import BottegaError, CheckpointError, EnvironmentProblem, UsageError
from bottega.models.folders.transformers_loader import quiet_logging
from bottega.models.frozen import precision as frozen_precision
from bottega.models.frozen.image import (
    FrozenImageModel,
    TextEmbeddings,
    load_image_model,
    read_pipeline_metadata,
    tokenize,
)
from bottega.models.frozen.precision import build_quantization_config, frozen_dtype
from bottega.models.pipeline import model_index
from bottega.models.pipeline.schedule import MIN_SIGNAL_TO_NOISE, read_schedule
from bottega.tasks.generation import paths, solvers
from bottega.tasks.generation.export import scheduler_config
from bottega.tasks.generation.objectives import noise

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "sd": tiny_pipelines.stable_diffusion,
    "sd2": lambda folder: tiny_pipelines.stable_diffusion(folder, second=True),
    "sdxl": tiny_pipelines.stable_diffusion_xl,
    "flow": tiny_pipelines.flow,
    "flow_without_t5": lambda folder: tiny_pipelines.flow(folder, with_t5=False),
}
TEXTS = ["a bright star", "dark red moon of a square person, and much more than can be read", ""]
# diffusers' EulerDiscreteScheduler hands numpy a tensor where it wants an array.
EULER = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SIDE, STEPS, GUIDANCE = 32, 3, 3.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {name: build(root / name) for name, build in FAMILIES.items()}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, FrozenImageModel]:
    return {name: load_image_model(folder, precision="fp32", device="cpu") for name, folder in folders.items()}


@pytest.fixture(scope="module")
def pipelines(folders: dict[str, Path]) -> dict[str, Any]:
    """Pipelines loaded by diffusers itself."""
    import diffusers

    found = {}
    with quiet_logging("diffusers"):
        for name, folder in folders.items():
            absent = {"text_encoder_3": None, "tokenizer_3": None} if name == "flow_without_t5" else {}
            found[name] = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **absent)
            found[name].set_progress_bar_config(disable=True)
    return found


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(folders[name], tmp_path / name)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoded(model: FrozenImageModel, texts: list[str]) -> TextEmbeddings:
    return model.encode_text([torch.from_numpy(rows) for rows in tokenize(model.metadata, texts)])


def asked_there(pipe: Any, texts: list[str], model: FrozenImageModel) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the pipeline's own encode_prompt makes of texts."""
    with torch.no_grad():
        if model.metadata.kind == "sd":
            return pipe.encode_prompt(texts, "cpu", 1, False)[0], None
        if model.metadata.kind == "sdxl":
            found = pipe.encode_prompt(texts, texts, do_classifier_free_guidance=False)
        else:
            length = model.metadata.num_tokens - model.metadata.lengths[0]
            found = pipe.encode_prompt(
                texts, texts, texts, do_classifier_free_guidance=False, max_sequence_length=length
            )
    return found[0], found[2]


def guided(
    model: FrozenImageModel, text: TextEmbeddings, none: TextEmbeddings
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Classifier-free guidance, as the pipelines have it."""
    if model.metadata.zero_unconditional:
        none = TextEmbeddings(*(None if one is None else torch.zeros_like(one) for one in text))  # type: ignore[arg-type]

    @torch.no_grad()
    def predict(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        with_text, without = (
            model.predict(x, time, one.tokens, pooled=one.pooled, image_size=SIDE) for one in (text, none)
        )
        return without + GUIDANCE * (with_text - without)

    return predict


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_have_the_tokens_and_encodings_of_the_pipeline(
    name: str, models: dict[str, FrozenImageModel], pipelines: dict[str, Any]
) -> None:
    model, pipe = models[name], pipelines[name]
    rows = tokenize(model.metadata, TEXTS)
    words = [pipe.tokenizer, getattr(pipe, "tokenizer_2", None), getattr(pipe, "tokenizer_3", None)]
    for found, one, length in zip(rows, words, model.metadata.lengths, strict=False):
        there = one(TEXTS, padding="max_length", max_length=length, truncation=True)["input_ids"]
        np.testing.assert_array_equal(found, there)
        assert found.dtype == np.int64
    tokens, pooled = asked_there(pipe, TEXTS, model)
    here = encoded(model, TEXTS)
    assert here.tokens.shape == (3, model.metadata.num_tokens, model.metadata.text_size)
    torch.testing.assert_close(here.tokens, tokens, atol=1e-5, rtol=0)
    if model.metadata.pooled_size is None:
        assert here.pooled is None
    else:
        assert here.pooled is not None
        assert here.pooled.shape == (3, model.metadata.pooled_size)
        torch.testing.assert_close(here.pooled, pooled, atol=1e-5, rtol=0)


@EULER
@pytest.mark.parametrize("name", FAMILIES)
def test_with_diffusers_steps_our_predictions_draw_what_its_pipeline_draws(
    name: str, models: dict[str, FrozenImageModel], pipelines: dict[str, Any]
) -> None:
    model, pipe, texts = models[name], pipelines[name], TEXTS[:2]
    noise = drawn(2, 4, 4, 4)
    options: dict[str, Any] = {"max_sequence_length": 24} if name == "flow" else {}
    run = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "height": SIDE, "width": SIDE, "latents": noise}
    there = pipe(texts, output_type="latent", **run, **options).images
    predict, scheduler = guided(model, encoded(model, texts), encoded(model, ["", ""])), pipe.scheduler
    scheduler.set_timesteps(STEPS)
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for time in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, time) if hasattr(scheduler, "scale_model_input") else x
        found = predict(scaled.movedim(1, -1), time.expand(2)).movedim(-1, 1)
        x = scheduler.step(found, time, x, return_dict=False)[0]
    assert x.isfinite().all()
    assert x.std() > 0.1
    torch.testing.assert_close(x, there, atol=1e-4, rtol=1e-4)
    pixels = pipe(texts, output_type="pt", **run, **options).images
    ours = (model.decode(x.movedim(1, -1)) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(ours.movedim(-1, 1), pixels, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # what the compiler says to itself
@pytest.mark.parametrize("name", ["sd", "flow"])
def test_compiled_in_training_it_says_the_same(
    name: str, models: dict[str, FrozenImageModel], copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model, plain = load_image_model(copy(name), device="cpu"), models[name]
    model.compile_parts(always=True)
    text, x, pixels = encoded(model, TEXTS[:2]), drawn(2, 4, 4, 4), drawn(2, SIDE, SIDE, 3)
    asked: dict[str, Any] = {"pooled": text.pooled, "image_size": SIDE}
    time = torch.tensor([10.0, 700.0])
    with torch.no_grad():
        expected = plain.predict(x, time, text.tokens, **asked), plain.encode(pixels)
        found = model.predict(x, time, text.tokens, **asked), model.encode(pixels)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not graphs, "what is drawn comes in many shapes"
    found = model.predict(x, time, text.tokens, **asked), model.encode(pixels)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert graphs


@EULER
def test_sdxl_is_told_the_height_before_the_width(
    models: dict[str, FrozenImageModel], pipelines: dict[str, Any]
) -> None:
    model, pipe = models["sdxl"], pipelines["sdxl"]
    text, noise = encoded(model, TEXTS[:1]), drawn(1, 4, 4, 8)
    run = {"num_inference_steps": 1, "guidance_scale": 1.0, "height": SIDE, "width": 2 * SIDE, "latents": noise}
    there = pipe(TEXTS[:1], output_type="latent", **run).images
    pipe.scheduler.set_timesteps(1)
    (time,), x = pipe.scheduler.timesteps, noise * pipe.scheduler.init_noise_sigma
    scaled = pipe.scheduler.scale_model_input(x, time).movedim(1, -1)
    size = (SIDE, 2 * SIDE)
    found = model.predict(scaled, time.expand(1), text.tokens, pooled=text.pooled, image_size=size).movedim(-1, 1)
    torch.testing.assert_close(pipe.scheduler.step(found, time, x, return_dict=False)[0], there, atol=1e-4, rtol=1e-4)


def test_our_euler_walks_a_flow_as_its_own_scheduler_does(
    models: dict[str, FrozenImageModel], pipelines: dict[str, Any]
) -> None:
    model, scheduler = models["flow"], pipelines["flow"].scheduler
    facts = model.metadata
    path = paths.NoisePath(objective=facts.objective, schedule=facts.schedule, shift=facts.shift)
    assert path.shift == 3
    predict, noise = guided(model, encoded(model, TEXTS[:1]), encoded(model, [""])), drawn(1, 4, 4, 4)
    ours = solvers.sample(predict, noise, path, steps=4, method="euler")
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    x = noise
    for time in scheduler.timesteps:
        x = scheduler.step(predict(x, time.expand(1)), time, x, return_dict=False)[0]
    torch.testing.assert_close(ours, x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["sd", "sdxl", "flow"])
def test_the_autoencoder_goes_to_scaled_latents_and_back(
    name: str, models: dict[str, FrozenImageModel], pipelines: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, vae = models[name], pipelines[name].vae
    pixels, noise = drawn(5, SIDE, SIDE, 3).clamp(-1, 1), drawn(5, 4, 4, 4, seed=1)
    with torch.no_grad():
        said = vae.encode(pixels.movedim(-1, 1)).latent_dist
    shift, scale = vae.config.shift_factor or 0.0, vae.config.scaling_factor
    wanted = (said.mean + said.std * noise.movedim(-1, 1) - shift) * scale
    latents = model.encode(pixels, noise)
    torch.testing.assert_close(latents.movedim(-1, 1), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.encode(pixels), model.encode(pixels, torch.zeros_like(noise)))
    monkeypatch.setattr("bottega.models.frozen.image.MAX_PIXELS_PER_CHUNK", 2 * SIDE * SIDE)
    torch.testing.assert_close(model.encode(pixels, noise), latents)
    assert model.decode(latents).shape == pixels.shape


@pytest.mark.parametrize("name", ["sd", "sdxl", "flow"])
def test_gradients_reach_the_condition_and_no_weight(name: str, models: dict[str, FrozenImageModel]) -> None:
    model = models[name]
    text = encoded(model, TEXTS[:2])
    soft = drawn(2, 3, model.metadata.text_size, seed=2).requires_grad_()
    context = torch.cat((soft, text.tokens), dim=1)
    pooled = None if text.pooled is None else text.pooled.clone().requires_grad_()
    assert not text.tokens.requires_grad
    x, time = drawn(2, 4, 4, 4), torch.tensor([10.0, 900.0])
    found = model.predict(x, time, context, pooled=pooled, image_size=SIDE)
    found.square().mean().backward()
    assert soft.grad is not None
    assert (soft.grad.abs().amax((1, 2)) > 0).all()
    assert pooled is None or (pooled.grad is not None and pooled.grad.abs().max() > 0)
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        again = model.predict(x, time, context, pooled=pooled, image_size=SIDE)
        assert torch.equal(encoded(model, TEXTS[:2]).tokens, text.tokens)
    torch.testing.assert_close(again, found.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["sd", "sdxl", "flow"])
def test_checkpointing_keeps_less_and_computes_the_same(
    name: str, folders: dict[str, Path], models: dict[str, FrozenImageModel]
) -> None:
    """While nothing in it learns and dropout is off, which is how an engine hands frozen models over."""
    saver = load_image_model(folders[name], precision="fp32", checkpointing=True, device="cpu")
    saver = saver.to("cpu").eval().requires_grad_(False)
    text = encoded(saver, TEXTS[:1])

    def measured(model: FrozenImageModel) -> tuple[int, torch.Tensor]:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        context = text.tokens.clone().requires_grad_()
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = model.predict(
                drawn(1, 4, 4, 4), torch.tensor([500.0]), context, pooled=text.pooled, image_size=SIDE
            )
        found.square().mean().backward()
        assert context.grad is not None
        return sum(size for place, size in kept.items() if place not in own), context.grad

    (much, plain), (little, again) = measured(models[name]), measured(saver)
    assert little < 0.6 * much
    torch.testing.assert_close(again, plain, atol=1e-6, rtol=1e-5)


def test_facts_are_those_of_the_configurations(models: dict[str, FrozenImageModel], folders: dict[str, Path]) -> None:
    found = {name: model.metadata for name, model in models.items()}
    assert [found[name].kind for name in FAMILIES] == ["sd", "sd", "sdxl", "flow", "flow"]
    assert [found[name].objective for name in FAMILIES] == ["noise", "v", "noise", "flow", "flow"]
    assert [found[name].text_size for name in FAMILIES] == [16, 16, 40, 48, 48]
    assert [found[name].pooled_size for name in FAMILIES] == [None, None, 20, 32, 32]
    assert [found[name].lengths for name in FAMILIES] == [(16,), (16,), (16, 16), (16, 16, 24), (16, 16)]
    assert [found[name].num_tokens for name in FAMILIES] == [16, 16, 16, 40, 16 + 256]
    assert [found[name].zero_unconditional for name in FAMILIES] == [False, False, True, False, False]
    assert {facts.image_size for facts in found.values()} == {SIDE}
    flow = found["flow"]
    assert (flow.scale, flow.latent_shift, flow.downsample, flow.latent_channels) == (1.5, 0.06, 8, 4)
    flow.check_side(64)
    with pytest.raises(UsageError, match="is more than 64, the largest"):
        flow.check_side(72)
    with pytest.raises(UsageError, match="is not a multiple of 8"):
        found["sd"].check_side(20)
    assert type(flow).model_validate_json(flow.model_dump_json()) == flow


@pytest.mark.parametrize("objective", ["noise", "v", "flow"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "scaled_linear"])
def test_a_path_is_read_back_from_the_scheduler_it_is_exported_as(
    objective: Any, schedule: Any, tmp_path: Path
) -> None:
    path = paths.NoisePath(objective=objective, schedule=schedule, shift=2.0 if objective == "flow" else 1.0)
    file = tmp_path / "scheduler_config.json"
    file.write_text(json.dumps(scheduler_config(path, "StableDiffusionPipeline")))
    found = read_schedule(file)
    wanted = path if objective != "flow" else path.model_copy(update={"schedule": "cosine"})
    assert paths.NoisePath(**found._asdict()) == wanted
    assert MIN_SIGNAL_TO_NOISE == noise.LEAST_RATIO


def changed(folder: Path, part: str, **values: Any) -> Path:
    """One configuration of a pipeline with other values."""
    file = folder / part
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return folder


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "width": ("sd", "unet/config.json", {"cross_attention_dim": 768}, "width 768 .*text_encoder of the same pipeline gives 16;"),
    "widths": ("sdxl", "unet/config.json", {"cross_attention_dim": 16}, "width 16 .*text_encoder_2 of the same pipeline gives 40;"),
    "sizes": ("sdxl", "unet/config.json", {"addition_time_embed_dim": 9}, "takes 68 numbers .* gives 20 and the image size 6 x"),
    "joint width": ("flow", "transformer/config.json", {"joint_attention_dim": 64}, "width 64 .* gives 48;"),
    "pooled": ("flow", "transformer/config.json", {"pooled_projection_dim": 20}, "width 20 .* gives 32;"),
    "lengths": ("sdxl", "tokenizer_2/tokenizer_config.json", {"model_max_length": 8}, "read 16 and 8 tokens"),
    "inpainting": ("sd", "unet/config.json", {"in_channels": 9}, "takes 9 channels and gives 4, .* has 4"),
    "class": ("sd", "unet/config.json", {"class_embed_type": "timestep"}, "class_embed_type 'timestep'"),
    "consistency": ("sd", "unet/config.json", {"time_cond_proj_dim": 256}, "time_cond_proj_dim 256"),
    "mean": ("sdxl", "vae/config.json", {"latents_mean": [0, 0, 0, 0]}, "latents_mean"),
    "shift": ("sd", "vae/config.json", {"shift_factor": 0.1}, "shift_factor 0.1"),
    "sample": ("sd", "scheduler/scheduler_config.json", {"prediction_type": "sample"}, "prediction_type 'sample'"),
    "betas": ("sd", "scheduler/scheduler_config.json", {"beta_end": 0.02}, "to beta_end 0.02 in 1000 steps"),
    "steps": ("sd", "scheduler/scheduler_config.json", {"num_train_timesteps": 100}, "in 100 steps"),
    "schedule": ("sd", "scheduler/scheduler_config.json", {"beta_schedule": "sigmoid"}, "beta_schedule 'sigmoid'"),
    "own betas": ("sd", "scheduler/scheduler_config.json", {"trained_betas": [0.1] * 9}, "trained_betas of 9 steps"),
    "zero snr": ("sd", "scheduler/scheduler_config.json", {"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr"),
    "dynamic": ("flow", "scheduler/scheduler_config.json", {"use_dynamic_shifting": True}, "use_dynamic_shifting"),
    "no flow": ("flow", "scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler", "beta_schedule": "linear",
                "beta_start": 1e-4, "beta_end": 0.02}, "needs a flow-matching scheduler"),
    "custom pipeline": ("sd", "model_index.json", {"_class_name": ["mine", "Mine"]}, "custom code"),
    "custom part": ("sd", "model_index.json", {"unet": ["mine", "Mine"]}, "takes unet from 'mine'"),
    "remote code": ("sd", "text_encoder/config.json", {"auto_map": {"AutoModel": "mine.Mine"}}, "has auto_map"),
    "other unet": ("sd", "model_index.json", {"unet": ["diffusers", "UNetKandi3"]}, "has a UNetKandi3 as unet"),
    "other text": ("sd", "model_index.json", {"text_encoder": ["transformers", "BertModel"]}, "has a BertModel"),
    "refiner": ("sdxl", "model_index.json", {"text_encoder": [None, None]}, "has text_encoder_2 for unet"),
    "no text": ("sd", "model_index.json", {"text_encoder": [None, None]}, "has no text encoder for unet"),
    "no class": ("sd", "model_index.json", {"unet": "UNet2DConditionModel"}, "has no library and class for unet"),
    "three words": ("sd", "model_index.json", {"vae": ["diffusers", "AutoencoderKL", "x"]}, "no library and class for vae"),
    "words of betas": ("sd", "scheduler/scheduler_config.json", {"trained_betas": ["a"]}, "has an invalid value"),
    "no shift": ("flow", "scheduler/scheduler_config.json", {"shift": None}, "has an invalid value"),
    "no scale": ("sd", "vae/config.json", {"scaling_factor": None}, "has an invalid value"),
    "blocks": ("sd", "vae/config.json", {"block_out_channels": 4}, "has an invalid value"),
    "text": ("sd", "text_encoder/config.json", {"hidden_size": "wide"}, "hidden_size must be a number"),
    "unpooled": ("sdxl", "model_index.json", {"text_encoder_2": ["transformers", "CLIPTextModel"]}, "needs a CLIPText"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_a_line(case: str, copy: Callable[[str], Path]) -> None:
    name, part, values, line = REFUSED[case]
    folder = changed(copy(name), part, **values)
    with pytest.raises(UsageError, match=line) as caught:
        read_pipeline_metadata(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_folder_without_what_a_pipeline_needs_is_refused(copy: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no model_index\.json"):
        read_pipeline_metadata(tmp_path)
    folder = copy("sd")
    (folder / "vae/diffusion_pytorch_model.safetensors").rename(folder / "vae/diffusion_pytorch_model.bin")
    with pytest.raises(UsageError, match="is a pickle, which can run code and is never opened"):
        read_pipeline_metadata(folder)
    (folder / "vae/diffusion_pytorch_model.bin").unlink()
    with pytest.raises(UsageError, match=r"vae has no \*.safetensors"):
        read_pipeline_metadata(folder)
    shutil.rmtree(folder / "vae")
    with pytest.raises(UsageError, match="has no folder vae"):
        read_pipeline_metadata(folder)


@pytest.mark.parametrize("part", ["unet", "text_encoder", "vae"])
def test_missing_and_damaged_weights_are_errors(part: str, copy: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy("sd")
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    gone = sorted(tensors)[3]
    save_file({name: one for name, one in tensors.items() if name != gone}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks {gone}") as caught:
        load_image_model(folder, device="cpu")
    assert "\n" not in str(caught.value)
    save_file({**tensors, gone: torch.zeros(99)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"has another shape of {gone}"):
        load_image_model(folder, device="cpu")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_image_model(folder, device="cpu")


def test_files_of_half_precision_are_read_where_there_are_no_others(
    copy: Callable[[str], Path], models: dict[str, FrozenImageModel]
) -> None:
    folder = copy("sd")
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (folder / part / f"{stem}.safetensors").rename(folder / part / f"{stem}.fp16.safetensors")
    found = load_image_model(folder, precision="fp32", device="cpu")
    assert torch.equal(encoded(found, TEXTS).tokens, encoded(models["sd"], TEXTS).tokens)


def test_older_tokenizer_files_give_the_same_tokens(
    copy: Callable[[str], Path], models: dict[str, FrozenImageModel]
) -> None:
    folder = copy("sd")
    core = json.loads((folder / "tokenizer/tokenizer.json").read_text())
    (folder / "tokenizer/vocab.json").write_text(json.dumps(core["model"]["vocab"]))
    lines = [" ".join(pair) for pair in core["model"]["merges"]]
    (folder / "tokenizer/merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    (folder / "tokenizer/tokenizer.json").unlink()
    found, wanted = tokenize(read_pipeline_metadata(folder), TEXTS), tokenize(models["sd"].metadata, TEXTS)
    np.testing.assert_array_equal(found[0], wanted[0])


def test_a_text_that_spells_a_mark_is_text(models: dict[str, FrozenImageModel]) -> None:
    facts = models["sd"].metadata
    (rows,) = tokenize(facts, ["<|endoftext|>", ""])
    assert (rows[0] != rows[1]).any()


def test_tokens_that_an_encoder_does_not_know_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("sd")
    facts = read_pipeline_metadata(folder).model_copy(update={"vocab_sizes": (300,)})
    with pytest.raises(UsageError, match="has 300 embeddings; they do not match"):
        tokenize(facts, TEXTS)


def test_precision_is_by_name_or_by_device() -> None:
    assert frozen_dtype("auto", "cpu") is torch.float32
    assert frozen_dtype("auto", "cuda") is torch.bfloat16
    assert frozen_dtype("4bit", torch.device("cuda", 0)) is torch.bfloat16
    assert [frozen_dtype(name, "cpu") for name in ("fp32", "bf16", "fp16")] == [
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]  # fmt: skip
    assert build_quantization_config("bf16") is None


@pytest.mark.parametrize("precision", ["8bit", "4bit"])
def test_fewer_bits_need_a_package(precision: Any, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]) -> None:
    monkeypatch.setattr(frozen_precision, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="pip install bitsandbytes"):
        load_image_model(folders["sd"], precision=precision, device="cpu")


@pytest.mark.parametrize("name", ["sd", "sdxl", "flow"])
def test_in_bf16_it_says_nearly_the_same_and_answers_in_float32(
    name: str, folders: dict[str, Path], models: dict[str, FrozenImageModel]
) -> None:
    low, high = load_image_model(folders[name], precision="bf16", device="cpu"), models[name]
    assert low.denoiser.dtype is low.encoders[0].dtype is torch.bfloat16
    assert low.vae.dtype is torch.float32
    x, time = drawn(2, 4, 4, 4), torch.tensor([10.0, 900.0])
    said = []
    for model in (low, high):
        text = encoded(model, TEXTS[:2])
        context = text.tokens.requires_grad_()
        found = model.predict(x, time, context, pooled=text.pooled, image_size=SIDE)
        found.sum().backward()
        assert found.dtype is text.tokens.dtype is torch.float32
        assert context.grad is not None
        said.append(found.detach())
    assert (said[0] - said[1]).norm() < 0.1 * said[1].norm()
    assert low.decode(x).dtype is torch.float32


FILES = [
    "model_index.json",
    "v1-5-pruned.safetensors",
    "README.md",
    "unet/config.json",
    "unet/diffusion_pytorch_model.safetensors",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "unet/diffusion_pytorch_model.non_ema.safetensors",
    "unet/diffusion_pytorch_model.bin",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00001-of-00002.fp16.safetensors",
    "text_encoder/model.safetensors",
    "text_encoder_3/model.fp16-00001-of-00002.safetensors",
    "tokenizer/merges.txt",
    "tokenizer_3/spiece.model",
    "safety_checker/model.safetensors",
    "unet/modeling_mine.py",
]


def test_of_a_hub_repository_only_what_is_needed_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: dict[str, Path]
) -> None:
    asked: list[list[str]] = []
    kept = shutil.copytree(folders["sd"], tmp_path / "kept")
    (kept / "unet/diffusion_pytorch_model.safetensors").unlink()

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append([file for file in FILES if any(fnmatch(file, pattern) for pattern in allow_patterns)])
        return str(kept)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert model_index.resolve_pipeline("someone/something").path == kept
    assert asked[0] == [
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "text_encoder/model.safetensors",
        "tokenizer/merges.txt",
        "tokenizer_3/spiece.model",
    ]
    assert "unet/diffusion_pytorch_model.fp16.safetensors" in asked[1]
    assert not any("diffusion_pytorch_model-" in file for file in asked[1])


def test_a_gated_or_absent_model_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    for kind, line in (
        (GatedRepoError, "accept its terms"),
        (RepositoryNotFoundError, "the hub has no such model"),
    ):

        def refuse(name: str, kind: Any = kind, **options: Any) -> str:
            error = kind.__new__(kind)
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
        with pytest.raises(BottegaError, match=f"model.diffusion: someone/something .*{line}"):
            model_index.resolve_pipeline("someone/something")
    with pytest.raises(UsageError, match="is not a local folder"):
        model_index.resolve_pipeline(str(tmp_path / "absent"))
    assert model_index.resolve_pipeline(str(tmp_path)).path == tmp_path
