"""Frozen diffusers pipelines: outputs match diffusers, and unsupported pipelines are refused."""

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
from bottega.tasks.generation.export import build_scheduler_config
from bottega.tasks.generation.objectives import noise

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "sd": tiny_pipelines.write_stable_diffusion,
    "sd2": lambda folder: tiny_pipelines.write_stable_diffusion(folder, version_2=True),
    "sdxl": tiny_pipelines.write_stable_diffusion_xl,
    "flow": tiny_pipelines.write_stable_diffusion_3,
    "flow_without_t5": lambda folder: tiny_pipelines.write_stable_diffusion_3(folder, with_t5=False),
}
TEXTS = ["a bright star", "dark red moon of a square person, and much more than can be read", ""]
# diffusers' EulerDiscreteScheduler passes numpy a tensor where it expects an array.
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

    loaded = {}
    with quiet_logging("diffusers"):
        for name, folder in folders.items():
            absent = {"text_encoder_3": None, "tokenizer_3": None} if name == "flow_without_t5" else {}
            loaded[name] = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **absent)
            loaded[name].set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(folders[name], tmp_path / name)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encode_texts(model: FrozenImageModel, texts: list[str]) -> TextEmbeddings:
    return model.encode_text([torch.from_numpy(rows) for rows in tokenize(model.metadata, texts)])


def encode_with_pipeline(
    pipe: Any, texts: list[str], model: FrozenImageModel
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode texts with the pipeline's own encode_prompt."""
    with torch.no_grad():
        if model.metadata.kind == "sd":
            return pipe.encode_prompt(texts, "cpu", 1, False)[0], None
        if model.metadata.kind == "sdxl":
            embeddings = pipe.encode_prompt(texts, texts, do_classifier_free_guidance=False)
        else:
            length = model.metadata.num_tokens - model.metadata.lengths[0]
            embeddings = pipe.encode_prompt(
                texts, texts, texts, do_classifier_free_guidance=False, max_sequence_length=length
            )
    return embeddings[0], embeddings[2]


def build_guided_predict(
    model: FrozenImageModel, text: TextEmbeddings, empty_text: TextEmbeddings
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a prediction function with classifier-free guidance as in the pipelines."""
    if model.metadata.zero_unconditional:
        empty_text = TextEmbeddings(
            *(None if embeddings is None else torch.zeros_like(embeddings) for embeddings in text)
        )  # type: ignore[arg-type]

    @torch.no_grad()
    def predict(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        with_text, without = (
            model.predict(x, time, embeddings.tokens, pooled=embeddings.pooled, image_size=SIDE)
            for embeddings in (text, empty_text)
        )
        return without + GUIDANCE * (with_text - without)

    return predict


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_embeddings_match_the_pipeline(
    name: str, models: dict[str, FrozenImageModel], pipelines: dict[str, Any]
) -> None:
    model, pipe = models[name], pipelines[name]
    rows = tokenize(model.metadata, TEXTS)
    tokenizers = [pipe.tokenizer, getattr(pipe, "tokenizer_2", None), getattr(pipe, "tokenizer_3", None)]
    for ids, tokenizer, length in zip(rows, tokenizers, model.metadata.lengths, strict=False):
        expected = tokenizer(TEXTS, padding="max_length", max_length=length, truncation=True)["input_ids"]
        np.testing.assert_array_equal(ids, expected)
        assert ids.dtype == np.int64
    tokens, pooled = encode_with_pipeline(pipe, TEXTS, model)
    embeddings = encode_texts(model, TEXTS)
    assert embeddings.tokens.shape == (3, model.metadata.num_tokens, model.metadata.text_size)
    torch.testing.assert_close(embeddings.tokens, tokens, atol=1e-5, rtol=0)
    if model.metadata.pooled_size is None:
        assert embeddings.pooled is None
    else:
        assert embeddings.pooled is not None
        assert embeddings.pooled.shape == (3, model.metadata.pooled_size)
        torch.testing.assert_close(embeddings.pooled, pooled, atol=1e-5, rtol=0)


@EULER
@pytest.mark.parametrize("name", FAMILIES)
def test_samples_match_the_pipeline_with_its_scheduler(
    name: str, models: dict[str, FrozenImageModel], pipelines: dict[str, Any]
) -> None:
    model, pipe, texts = models[name], pipelines[name], TEXTS[:2]
    noise = draw(2, 4, 4, 4)
    options: dict[str, Any] = {"max_sequence_length": 24} if name == "flow" else {}
    run = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "height": SIDE, "width": SIDE, "latents": noise}
    expected = pipe(texts, output_type="latent", **run, **options).images
    predict, scheduler = (
        build_guided_predict(model, encode_texts(model, texts), encode_texts(model, ["", ""])),
        pipe.scheduler,
    )
    scheduler.set_timesteps(STEPS)
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for time in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, time) if hasattr(scheduler, "scale_model_input") else x
        prediction = predict(scaled.movedim(1, -1), time.expand(2)).movedim(-1, 1)
        x = scheduler.step(prediction, time, x, return_dict=False)[0]
    assert x.isfinite().all()
    assert x.std() > 0.1
    torch.testing.assert_close(x, expected, atol=1e-4, rtol=1e-4)
    pixels = pipe(texts, output_type="pt", **run, **options).images
    ours = (model.decode(x.movedim(1, -1)) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(ours.movedim(-1, 1), pixels, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # internal warnings of the compiler
@pytest.mark.parametrize("name", ["sd", "flow"])
def test_compiled_training_forward_matches_eager(
    name: str, models: dict[str, FrozenImageModel], copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model, plain = load_image_model(copy(name), device="cpu"), models[name]
    model.compile_parts(always=True)
    text, x, pixels = encode_texts(model, TEXTS[:2]), draw(2, 4, 4, 4), draw(2, SIDE, SIDE, 3)
    options: dict[str, Any] = {"pooled": text.pooled, "image_size": SIDE}
    time = torch.tensor([10.0, 700.0])
    with torch.no_grad():
        expected = plain.predict(x, time, text.tokens, **options), plain.encode(pixels)
        outputs = model.predict(x, time, text.tokens, **options), model.encode(pixels)
        assert all(torch.equal(output, reference) for output, reference in zip(outputs, expected, strict=True))
    assert not graphs, "inference is not compiled: its shapes vary"
    outputs = model.predict(x, time, text.tokens, **options), model.encode(pixels)
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, atol=1e-5, rtol=1e-4)
    assert graphs


@EULER
def test_sdxl_size_condition_is_height_then_width(
    models: dict[str, FrozenImageModel], pipelines: dict[str, Any]
) -> None:
    model, pipe = models["sdxl"], pipelines["sdxl"]
    text, noise = encode_texts(model, TEXTS[:1]), draw(1, 4, 4, 8)
    run = {"num_inference_steps": 1, "guidance_scale": 1.0, "height": SIDE, "width": 2 * SIDE, "latents": noise}
    expected = pipe(TEXTS[:1], output_type="latent", **run).images
    pipe.scheduler.set_timesteps(1)
    (time,), x = pipe.scheduler.timesteps, noise * pipe.scheduler.init_noise_sigma
    scaled = pipe.scheduler.scale_model_input(x, time).movedim(1, -1)
    size = (SIDE, 2 * SIDE)
    prediction = model.predict(scaled, time.expand(1), text.tokens, pooled=text.pooled, image_size=size).movedim(-1, 1)
    torch.testing.assert_close(
        pipe.scheduler.step(prediction, time, x, return_dict=False)[0], expected, atol=1e-4, rtol=1e-4
    )


def test_euler_sampling_of_a_flow_matches_the_diffusers_scheduler(
    models: dict[str, FrozenImageModel], pipelines: dict[str, Any]
) -> None:
    model, scheduler = models["flow"], pipelines["flow"].scheduler
    metadata = model.metadata
    path = paths.NoisePath(objective=metadata.objective, schedule=metadata.schedule, shift=metadata.shift)
    assert path.shift == 3
    predict, noise = (
        build_guided_predict(model, encode_texts(model, TEXTS[:1]), encode_texts(model, [""])),
        draw(1, 4, 4, 4),
    )
    ours = solvers.sample(predict, noise, path, steps=4, method="euler")
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    x = noise
    for time in scheduler.timesteps:
        x = scheduler.step(predict(x, time.expand(1)), time, x, return_dict=False)[0]
    torch.testing.assert_close(ours, x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["sd", "sdxl", "flow"])
def test_autoencoder_encodes_to_scaled_latents_and_decodes(
    name: str, models: dict[str, FrozenImageModel], pipelines: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, vae = models[name], pipelines[name].vae
    pixels, noise = draw(5, SIDE, SIDE, 3).clamp(-1, 1), draw(5, 4, 4, 4, seed=1)
    with torch.no_grad():
        posterior = vae.encode(pixels.movedim(-1, 1)).latent_dist
    shift, scale = vae.config.shift_factor or 0.0, vae.config.scaling_factor
    expected = (posterior.mean + posterior.std * noise.movedim(-1, 1) - shift) * scale
    latents = model.encode(pixels, noise)
    torch.testing.assert_close(latents.movedim(-1, 1), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.encode(pixels), model.encode(pixels, torch.zeros_like(noise)))
    monkeypatch.setattr("bottega.models.frozen.image.MAX_PIXELS_PER_CHUNK", 2 * SIDE * SIDE)
    torch.testing.assert_close(model.encode(pixels, noise), latents)
    assert model.decode(latents).shape == pixels.shape


@pytest.mark.parametrize("name", ["sd", "sdxl", "flow"])
def test_gradients_reach_the_condition_and_no_weight(name: str, models: dict[str, FrozenImageModel]) -> None:
    model = models[name]
    text = encode_texts(model, TEXTS[:2])
    soft = draw(2, 3, model.metadata.text_size, seed=2).requires_grad_()
    context = torch.cat((soft, text.tokens), dim=1)
    pooled = None if text.pooled is None else text.pooled.clone().requires_grad_()
    assert not text.tokens.requires_grad
    x, time = draw(2, 4, 4, 4), torch.tensor([10.0, 900.0])
    prediction = model.predict(x, time, context, pooled=pooled, image_size=SIDE)
    prediction.square().mean().backward()
    assert soft.grad is not None
    assert (soft.grad.abs().amax((1, 2)) > 0).all()
    assert pooled is None or (pooled.grad is not None and pooled.grad.abs().max() > 0)
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        autocast_prediction = model.predict(x, time, context, pooled=pooled, image_size=SIDE)
        assert torch.equal(encode_texts(model, TEXTS[:2]).tokens, text.tokens)
    torch.testing.assert_close(autocast_prediction, prediction.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["sd", "sdxl", "flow"])
def test_checkpointing_stores_less_for_backward_with_the_same_gradients(
    name: str, folders: dict[str, Path], models: dict[str, FrozenImageModel]
) -> None:
    """With frozen weights and dropout off, as an engine prepares frozen models."""
    checkpointed = load_image_model(folders[name], precision="fp32", checkpointing=True, device="cpu")
    checkpointed = checkpointed.to("cpu").eval().requires_grad_(False)
    text = encode_texts(checkpointed, TEXTS[:1])

    def measure_backward(model: FrozenImageModel) -> tuple[int, torch.Tensor]:
        storages: dict[int, int] = {}

        def save_tensor(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        context = text.tokens.clone().requires_grad_()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(save_tensor, lambda tensor: tensor):
            prediction = model.predict(
                draw(1, 4, 4, 4), torch.tensor([500.0]), context, pooled=text.pooled, image_size=SIDE
            )
        prediction.square().mean().backward()
        assert context.grad is not None
        return sum(size for pointer, size in storages.items() if pointer not in weights), context.grad

    (plain_bytes, plain), (checkpointed_bytes, checkpointed_gradient) = (
        measure_backward(models[name]),
        measure_backward(checkpointed),
    )
    assert checkpointed_bytes < 0.6 * plain_bytes
    torch.testing.assert_close(checkpointed_gradient, plain, atol=1e-6, rtol=1e-5)


def test_metadata_matches_the_configurations(models: dict[str, FrozenImageModel], folders: dict[str, Path]) -> None:
    metadata = {name: model.metadata for name, model in models.items()}
    assert [metadata[name].kind for name in FAMILIES] == ["sd", "sd", "sdxl", "flow", "flow"]
    assert [metadata[name].objective for name in FAMILIES] == ["noise", "v", "noise", "flow", "flow"]
    assert [metadata[name].text_size for name in FAMILIES] == [16, 16, 40, 48, 48]
    assert [metadata[name].pooled_size for name in FAMILIES] == [None, None, 20, 32, 32]
    assert [metadata[name].lengths for name in FAMILIES] == [(16,), (16,), (16, 16), (16, 16, 24), (16, 16)]
    assert [metadata[name].num_tokens for name in FAMILIES] == [16, 16, 16, 40, 16 + 256]
    assert [metadata[name].zero_unconditional for name in FAMILIES] == [False, False, True, False, False]
    assert {item.image_size for item in metadata.values()} == {SIDE}
    flow = metadata["flow"]
    assert (flow.scale, flow.latent_shift, flow.downsample, flow.latent_channels) == (1.5, 0.06, 8, 4)
    flow.check_side(64)
    with pytest.raises(UsageError, match="is more than 64, the largest"):
        flow.check_side(72)
    with pytest.raises(UsageError, match="is not a multiple of 8"):
        metadata["sd"].check_side(20)
    assert type(flow).model_validate_json(flow.model_dump_json()) == flow


@pytest.mark.parametrize("objective", ["noise", "v", "flow"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "scaled_linear"])
def test_exported_scheduler_config_reads_back_as_the_same_noise_path(
    objective: Any, schedule: Any, tmp_path: Path
) -> None:
    path = paths.NoisePath(objective=objective, schedule=schedule, shift=2.0 if objective == "flow" else 1.0)
    file = tmp_path / "scheduler_config.json"
    file.write_text(json.dumps(build_scheduler_config(path, "StableDiffusionPipeline")))
    schedule_fields = read_schedule(file)
    expected = path if objective != "flow" else path.model_copy(update={"schedule": "cosine"})
    assert paths.NoisePath(**schedule_fields._asdict()) == expected
    assert MIN_SIGNAL_TO_NOISE == noise.MIN_RATIO


def update_config(folder: Path, config: str, **values: Any) -> Path:
    """Update one configuration file of a pipeline, such as unet/config.json."""
    file = folder / config
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return folder


# Case -> (family, configuration file, changed values, message)
REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "width": ("sd", "unet/config.json", {"cross_attention_dim": 768}, "width 768 .*text_encoder. have width 16;"),
    "widths": ("sdxl", "unet/config.json", {"cross_attention_dim": 16}, "width 16 .*text_encoder_2. have width 40;"),
    "sizes": ("sdxl", "unet/config.json", {"addition_time_embed_dim": 9}, r"input_dim 68, but .* encoder \(20\) and the embedded image size \(6 x 9\)"),
    "joint width": ("flow", "transformer/config.json", {"joint_attention_dim": 64}, "width 64 .* have width 48;"),
    "pooled": ("flow", "transformer/config.json", {"pooled_projection_dim": 20}, "width 20 .* have width 32;"),
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
    "custom component": ("sd", "model_index.json", {"unet": ["mine", "Mine"]}, "takes unet from 'mine'"),
    "remote code": ("sd", "text_encoder/config.json", {"auto_map": {"AutoModel": "mine.Mine"}}, "has auto_map"),
    "other unet": ("sd", "model_index.json", {"unet": ["diffusers", "UNetKandi3"]}, "has a UNetKandi3 as unet"),
    "other text": ("sd", "model_index.json", {"text_encoder": ["transformers", "BertModel"]}, "has a BertModel"),
    "refiner": ("sdxl", "model_index.json", {"text_encoder": [None, None]}, "has text_encoder_2 for unet"),
    "no text": ("sd", "model_index.json", {"text_encoder": [None, None]}, "has no text encoder for unet"),
    "no class": ("sd", "model_index.json", {"unet": "UNet2DConditionModel"}, "has no library and class for unet"),
    "three entries": ("sd", "model_index.json", {"vae": ["diffusers", "AutoencoderKL", "x"]}, "no library and class for vae"),
    "non-numeric betas": ("sd", "scheduler/scheduler_config.json", {"trained_betas": ["a"]}, "has an invalid value"),
    "no shift": ("flow", "scheduler/scheduler_config.json", {"shift": None}, "has an invalid value"),
    "no scale": ("sd", "vae/config.json", {"scaling_factor": None}, "has an invalid value"),
    "blocks": ("sd", "vae/config.json", {"block_out_channels": 4}, "has an invalid value"),
    "text": ("sd", "text_encoder/config.json", {"hidden_size": "wide"}, "hidden_size must be a number"),
    "unpooled": ("sdxl", "model_index.json", {"text_encoder_2": ["transformers", "CLIPTextModel"]}, "needs a CLIPText"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_pipeline_is_refused_in_one_line(case: str, copy: Callable[[str], Path]) -> None:
    name, config, values, message = REFUSED[case]
    folder = update_config(copy(name), config, **values)
    with pytest.raises(UsageError, match=message) as caught:
        read_pipeline_metadata(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_incomplete_pipeline_folder_is_refused(copy: Callable[[str], Path], tmp_path: Path) -> None:
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


@pytest.mark.parametrize("component", ["unet", "text_encoder", "vae"])
def test_missing_and_damaged_weights_are_errors(component: str, copy: Callable[[str], Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy("sd")
    (file,) = (folder / component).glob("*.safetensors")
    tensors = load_file(file)
    removed = sorted(tensors)[3]
    save_file({name: tensor for name, tensor in tensors.items() if name != removed}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lacks {removed}") as caught:
        load_image_model(folder, device="cpu")
    assert "\n" not in str(caught.value)
    save_file({**tensors, removed: torch.zeros(99)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"has the wrong shape of {removed}"):
        load_image_model(folder, device="cpu")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_image_model(folder, device="cpu")


def test_fp16_files_are_loaded_when_no_others_exist(
    copy: Callable[[str], Path], models: dict[str, FrozenImageModel]
) -> None:
    folder = copy("sd")
    for component, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (folder / component / f"{stem}.safetensors").rename(folder / component / f"{stem}.fp16.safetensors")
    model = load_image_model(folder, precision="fp32", device="cpu")
    assert torch.equal(encode_texts(model, TEXTS).tokens, encode_texts(models["sd"], TEXTS).tokens)


def test_older_tokenizer_files_give_the_same_tokens(
    copy: Callable[[str], Path], models: dict[str, FrozenImageModel]
) -> None:
    folder = copy("sd")
    tokenizer = json.loads((folder / "tokenizer/tokenizer.json").read_text())
    (folder / "tokenizer/vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    lines = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    (folder / "tokenizer/merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    (folder / "tokenizer/tokenizer.json").unlink()
    ids, expected = tokenize(read_pipeline_metadata(folder), TEXTS), tokenize(models["sd"].metadata, TEXTS)
    np.testing.assert_array_equal(ids[0], expected[0])


def test_special_token_in_a_text_is_tokenized_as_text(models: dict[str, FrozenImageModel]) -> None:
    metadata = models["sd"].metadata
    (rows,) = tokenize(metadata, ["<|endoftext|>", ""])
    assert (rows[0] != rows[1]).any()


def test_tokenizer_larger_than_the_encoder_vocabulary_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("sd")
    metadata = read_pipeline_metadata(folder).model_copy(update={"vocab_sizes": (300,)})
    with pytest.raises(UsageError, match="has only 300 embeddings; use a complete copy"):
        tokenize(metadata, TEXTS)


def test_frozen_dtype_follows_the_precision_and_device() -> None:
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
def test_quantization_requires_bitsandbytes(
    precision: Any, monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    monkeypatch.setattr(frozen_precision, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="pip install bitsandbytes"):
        load_image_model(folders["sd"], precision=precision, device="cpu")


@pytest.mark.parametrize("name", ["sd", "sdxl", "flow"])
def test_bf16_model_predicts_in_float32_close_to_fp32(
    name: str, folders: dict[str, Path], models: dict[str, FrozenImageModel]
) -> None:
    low, high = load_image_model(folders[name], precision="bf16", device="cpu"), models[name]
    assert low.denoiser.dtype is low.encoders[0].dtype is torch.bfloat16
    assert low.vae.dtype is torch.float32
    x, time = draw(2, 4, 4, 4), torch.tensor([10.0, 900.0])
    predictions = []
    for model in (low, high):
        text = encode_texts(model, TEXTS[:2])
        context = text.tokens.requires_grad_()
        prediction = model.predict(x, time, context, pooled=text.pooled, image_size=SIDE)
        prediction.sum().backward()
        assert prediction.dtype is text.tokens.dtype is torch.float32
        assert context.grad is not None
        predictions.append(prediction.detach())
    assert (predictions[0] - predictions[1]).norm() < 0.1 * predictions[1].norm()
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


def test_only_required_files_of_a_hub_repository_are_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: dict[str, Path]
) -> None:
    requests: list[list[str]] = []
    snapshot = shutil.copytree(folders["sd"], tmp_path / "snapshot")
    (snapshot / "unet/diffusion_pytorch_model.safetensors").unlink()

    def download(name: str, *, allow_patterns: list[str]) -> str:
        requests.append([file for file in FILES if any(fnmatch(file, pattern) for pattern in allow_patterns)])
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert model_index.resolve_pipeline("someone/something").path == snapshot
    assert requests[0] == [
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "text_encoder/model.safetensors",
        "tokenizer/merges.txt",
        "tokenizer_3/spiece.model",
    ]
    assert "unet/diffusion_pytorch_model.fp16.safetensors" in requests[1]
    assert not any("diffusion_pytorch_model-" in file for file in requests[1])


def test_gated_or_missing_model_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    for error_class, message in (
        (GatedRepoError, "accept its terms"),
        (RepositoryNotFoundError, "the hub has no such model"),
    ):

        def refuse(name: str, error_class: Any = error_class, **options: Any) -> str:
            error = error_class.__new__(error_class)
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
        with pytest.raises(BottegaError, match=f"model.diffusion: someone/something .*{message}"):
            model_index.resolve_pipeline("someone/something")
    with pytest.raises(UsageError, match="is not a local folder"):
        model_index.resolve_pipeline(str(tmp_path / "absent"))
    assert model_index.resolve_pipeline(str(tmp_path)).path == tmp_path
