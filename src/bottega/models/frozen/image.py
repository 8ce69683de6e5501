"""A frozen text-to-image pipeline of diffusers: encode text, denoise, encode images to latents and decode them.

The components are the libraries' own classes. Gradients flow through the denoiser to its text condition, not to weights.

B batch   h w latent height and width, c latent channels   H W image height and width   K tokens of one text encoder
T tokens of the condition   D width of a token   P width of the pooled text embedding
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.errors import EnvironmentProblem
from bottega.models.folders.transformers_loader import load_pretrained
from bottega.models.frozen.config import FrozenPrecision
from bottega.models.frozen.precision import build_quantization_config, default_device, frozen_dtype, is_worth_compiling
from bottega.models.pipeline.metadata import T5_TOKENS, PipelineMetadata, read_pipeline_metadata
from bottega.models.pipeline.model_index import TRANSFORMER, UNET, VAE, find_weights_variant
from bottega.models.pipeline.tokenization import tokenize

__all__ = [
    "FrozenImageModel",
    "PipelineMetadata",
    "TextEmbeddings",
    "load_image_model",
    "read_pipeline_metadata",
    "tokenize",
]

MAX_PIXELS_PER_CHUNK = 1 << 22
"""Pixels that the autoencoder processes at once: its widest layer over 64 images of 256 x 256 takes 2 GiB."""


class TextEmbeddings(NamedTuple):
    """The text condition of the denoiser."""

    tokens: Tensor
    """(B, T, D)"""
    pooled: Tensor | None
    """(B, P)"""


@final
class FrozenImageModel(nn.Module):
    """Text encoders, denoiser and VAE of a pipeline, each in its own dtype, which does not depend on the precision of training.

    Build it with `load_image_model`.
    """

    def __init__(self, metadata: PipelineMetadata, *, denoiser: Any, encoders: Sequence[Any], vae: Any) -> None:
        super().__init__()
        self.metadata = metadata
        self.denoiser: Any = denoiser
        self.encoders = nn.ModuleList(encoders)
        self.vae: Any = vae
        self.eval().requires_grad_(False)
        self._compiled: dict[str, Callable[..., Any]] = {}

    def compile_parts(self, *, always: bool) -> None:
        """Compile the denoiser and the VAE encoder for training; with `always` even if the model is small.

        Sampling stays uncompiled: it uses many shapes, each of which would be compiled anew.
        """
        if self._compiled or not (always or is_worth_compiling(self)):
            return
        self._compiled["encode"] = torch.compile(self._encode_moments)
        if not self.denoiser.is_gradient_checkpointing and not getattr(self.denoiser, "is_quantized", False):
            self._compiled["predict"] = torch.compile(self.denoiser.forward)

    def uncompile_parts(self) -> None:
        """Undo `compile_parts`."""
        self._compiled.clear()

    @torch.no_grad()
    def encode_text(self, ids: Sequence[Tensor]) -> TextEmbeddings:
        """Encode the token ids (B, K) of each text encoder, padded to its length as `tokenize` returns them."""
        with _disable_autocast(ids[0]):
            if self.metadata.kind == "sd":
                return TextEmbeddings(self.encoders[0](ids[0])[0].float(), None)
            # The penultimate layer, as these pipelines do: the last one is trained for the pooled text, not for tokens.
            outputs = [
                encoder(encoder_ids, output_hidden_states=True)
                for encoder, encoder_ids in zip(self.encoders[:2], ids[:2], strict=True)
            ]
            tokens = torch.cat([output.hidden_states[-2].float() for output in outputs], dim=-1)
            if self.metadata.kind == "sdxl":
                return TextEmbeddings(tokens, outputs[1].text_embeds.float())
            pooled = torch.cat([output.text_embeds.float() for output in outputs], dim=-1)
            tokens = F.pad(tokens, (0, self.metadata.text_size - tokens.shape[-1]))
            t5_tokens = tokens.new_zeros(len(tokens), T5_TOKENS, self.metadata.text_size)
            if len(self.encoders) == 3:
                t5_tokens = self.encoders[2](ids[2])[0].float()
            return TextEmbeddings(torch.cat((tokens, t5_tokens), dim=1), pooled)

    def predict(
        self,
        x: Tensor,
        time: Tensor,
        context: Tensor,
        *,
        pooled: Tensor | None = None,
        image_size: int | tuple[int, int],
    ) -> Tensor:
        """Return the denoiser's prediction, in the shape of the noisy latents `x` (B, h, w, c).

        `time` (B) is in 0..1,000, `context` (B, T, D) may have any length T. `image_size` in pixels, (height, width) if
        they differ, is a condition of SDXL.
        """
        assert (pooled is None) == (self.metadata.pooled_size is None), (
            "give `pooled` if and only if the model takes it"
        )
        dtype = self.denoiser.dtype
        inputs: dict[str, Any] = {"encoder_hidden_states": context.to(dtype)}
        if self.metadata.kind == "flow":
            assert pooled is not None
            inputs["pooled_projections"] = pooled.to(dtype)
        elif self.metadata.kind == "sdxl":
            assert pooled is not None
            height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
            time_ids = torch.tensor([height, width, 0, 0, height, width], dtype=dtype, device=x.device)
            inputs["added_cond_kwargs"] = {"text_embeds": pooled.to(dtype), "time_ids": time_ids.expand(len(x), -1)}
        with _disable_autocast(x):
            denoise = self._choose_compiled("predict", self.denoiser)
            (prediction,) = denoise(x.movedim(-1, 1).contiguous().to(dtype), timestep=time, **inputs, return_dict=False)
        return prediction.movedim(1, -1).to(x.dtype)

    def _choose_compiled(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function `name` in training if there is one, else `function`."""
        return self._compiled.get(name, function) if torch.is_grad_enabled() else function

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode pixels (B, H, W, 3) in -1..1 to scaled latents (B, h, w, c).

        With standard normal `noise` of that shape the latents are sampled; without, they are the posterior mean.
        """
        encode_moments = self._choose_compiled("encode", self._encode_moments)
        with torch.no_grad():
            return self._sample_latents(
                self._apply_in_chunks(encode_moments, pixels, pixels_per_row=pixels[0, ..., 0].numel()), noise
            )

    def _encode_moments(self, pixels: Tensor) -> Tensor:
        return self.vae.encode(pixels.movedim(-1, 1).contiguous()).latent_dist.parameters.movedim(1, -1).float()

    def _sample_latents(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        mean, log_variance = moments.chunk(2, dim=-1)
        latents = mean
        if noise is not None:
            # diffusers' own bounds: outside of them the exponent of an untrained autoencoder overflows.
            latents = mean + (log_variance.clamp(-30, 20) / 2).exp() * noise
        return (latents - self.metadata.latent_shift) * self.metadata.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents (B, h, w, c) to pixels (B, H, W, 3), about -1..1."""

        def decode_chunk(chunk: Tensor) -> Tensor:
            return self.vae.decode(chunk.movedim(-1, 1).contiguous(), return_dict=False)[0].movedim(1, -1).float()

        unscaled = latents.float() / self.metadata.scale + self.metadata.latent_shift
        pixels_per_row = latents[0, ..., 0].numel() * self.metadata.downsample**2
        return self._apply_in_chunks(decode_chunk, unscaled, pixels_per_row=pixels_per_row)

    def _apply_in_chunks(self, compute: Callable[[Tensor], Tensor], x: Tensor, *, pixels_per_row: int) -> Tensor:
        """Apply `compute` to a few rows at a time: a batch of small latents may be a batch of large images."""
        size = max(1, MAX_PIXELS_PER_CHUNK // pixels_per_row)
        with _disable_autocast(x):
            return torch.cat([compute(chunk.to(self.vae.dtype)) for chunk in x.split(size)])


def load_image_model(
    folder: Path | str,
    *,
    precision: FrozenPrecision = "auto",
    checkpointing: bool = False,
    device: torch.device | str | None = None,
) -> FrozenImageModel:
    """Load the components of a local diffusers pipeline.

    `checkpointing` is gradient checkpointing of the denoiser. `device` is where the model will run, which decides the
    precision `auto`; None is a GPU if there is one.
    """
    metadata = read_pipeline_metadata(folder)
    device = default_device() if device is None else torch.device(device)
    dtype = frozen_dtype(precision, device)
    diffusers, transformers = _import_libraries()
    is_flow = metadata.kind == "flow"
    quantization_option = _build_quantization_option(
        build_quantization_config(precision, library="diffusers", device=device)
    )
    denoiser = _load_component(
        getattr(diffusers, TRANSFORMER if is_flow else UNET),
        metadata.denoiser,
        torch_dtype=dtype,
        **quantization_option,
    )
    # Never fp16: activations of SDXL's VAE exceed 65,504.
    vae_dtype = torch.bfloat16 if dtype is torch.bfloat16 and device.type == "cuda" else torch.float32
    vae = _load_component(getattr(diffusers, VAE), metadata.vae, torch_dtype=vae_dtype)
    encoders = [
        _load_text_encoder(transformers, metadata, i, dtype, precision, device) for i in range(len(metadata.encoders))
    ]
    if checkpointing:
        denoiser.enable_gradient_checkpointing()
    return FrozenImageModel(metadata, denoiser=denoiser, encoders=encoders, vae=vae)


def _load_text_encoder(
    transformers: Any,
    metadata: PipelineMetadata,
    index: int,
    dtype: torch.dtype,
    precision: FrozenPrecision,
    device: torch.device,
) -> Any:
    """Load one text encoder. Only a T5 is quantized: it is as large as the denoiser, while CLIPs are small."""
    folder = metadata.encoders[index]
    if index == 2:
        quantization_option = _build_quantization_option(build_quantization_config(precision, device=device))
        return _load_component(transformers.T5EncoderModel, folder, dtype=dtype, **quantization_option)
    has_projection = metadata.kind == "flow" or index == 1
    model_class = transformers.CLIPTextModelWithProjection if has_projection else transformers.CLIPTextModel
    return _load_component(model_class, folder, dtype=dtype, attn_implementation="sdpa")


def _build_quantization_option(config: Any | None) -> dict[str, Any]:
    return {} if config is None else {"quantization_config": config}


def _load_component(model_class: Any, folder: str, **options: Any) -> Any:
    """Load one component of a pipeline with its library's `from_pretrained`.

    Component by component rather than with `DiffusionPipeline.from_pretrained`, which has no loading info: a missing weight
    would be initialised at random.
    """
    return load_pretrained(
        model_class,
        folder,
        description=f"a {model_class.__name__}",
        variant=find_weights_variant(Path(folder)),
        **options,
    )


def _disable_autocast(x: Tensor) -> Any:
    """Disable the autocast of training: a frozen model's output must not depend on the caller's precision."""
    return torch.autocast(x.device.type, enabled=False)


def _import_libraries() -> tuple[Any, Any]:
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise EnvironmentProblem(
            "model.diffusion: image generators need diffusers and transformers; pip install 'bottega[hub]'"
        ) from error
    return diffusers, transformers
