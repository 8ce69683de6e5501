"""A frozen image generator of diffusers as four functions: read texts, predict, and go to latents and back.

Its parts are the libraries' own classes. A gradient passes through the denoiser to its condition, and into no weight.

B batch   h w sides of latents, c channels   H W sides of pictures   K tokens of an encoder   T tokens of a condition
W width of a token   P width of a pooled text
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.errors import CheckpointError, EnvironmentProblem, first_line
from bottega.models.folders.transformers_loader import quiet_logging
from bottega.models.folders.untrusted import check_loading_info
from bottega.models.frozen.config import FrozenPrecision
from bottega.models.frozen.precision import build_quantization_config, default_device, frozen_dtype, is_worth_compiling
from bottega.models.pipeline.metadata import T5_TOKENS, PipelineMetadata, read_pipeline_metadata
from bottega.models.pipeline.model_index import TRANSFORMER, UNET, VAE, weights_variant
from bottega.models.pipeline.tokenization import tokenize

__all__ = [
    "FrozenImageModel",
    "PipelineMetadata",
    "TextEmbeddings",
    "load_image_model",
    "read_pipeline_metadata",
    "tokenize",
]

AT_ONCE = 1 << 22
"""Pixels that the autoencoder sees in one piece: the widest layer over 64 pictures of 256 x 256 holds 2 GiB."""


class TextEmbeddings(NamedTuple):
    tokens: Tensor
    """[B, T, W]"""
    pooled: Tensor | None
    """[B, P]"""


@final
class FrozenImageModel(nn.Module):
    """Made by `load_image_model`. Whatever precision training runs in, the frozen parts compute in their own."""

    def __init__(self, facts: PipelineMetadata, *, denoiser: Any, encoders: Sequence[Any], vae: Any) -> None:
        super().__init__()
        self.metadata = facts
        self.denoiser: Any = denoiser
        self.encoders = nn.ModuleList(encoders)
        self.vae: Any = vae
        self.eval().requires_grad_(False)
        self._fused: dict[str, Callable[..., Any]] = {}

    def compile_parts(self, *, always: bool) -> None:
        """The denoiser and the way to latents, each as one compiled function, in training alone: what is drawn comes in many
        shapes, each of which would be compiled anew. `always`, or where it is large enough to be worth the wait."""
        if self._fused or not (always or is_worth_compiling(self)):
            return
        self._fused["encode"] = torch.compile(self._moments)
        if not self.denoiser.is_gradient_checkpointing and not getattr(self.denoiser, "is_quantized", False):
            self._fused["predict"] = torch.compile(self.denoiser.forward)

    @torch.no_grad()
    def encode_text(self, ids: Sequence[Tensor]) -> TextEmbeddings:
        """Tokens [B, K] for each encoder, filled up to its length, as `tokenize` gives them."""
        with _plain(ids[0]):
            if self.metadata.kind == "sd":
                return TextEmbeddings(self.encoders[0](ids[0])[0].float(), None)
            # The one before last: what the last layer says is meant for the whole text rather than for a word.
            clips = [one(row, output_hidden_states=True) for one, row in zip(self.encoders[:2], ids[:2], strict=True)]
            tokens = torch.cat([found.hidden_states[-2].float() for found in clips], dim=-1)
            if self.metadata.kind == "sdxl":
                return TextEmbeddings(tokens, clips[1].text_embeds.float())
            pooled = torch.cat([found.text_embeds.float() for found in clips], dim=-1)
            tokens = F.pad(tokens, (0, self.metadata.text_size - tokens.shape[-1]))
            after = tokens.new_zeros(len(tokens), T5_TOKENS, self.metadata.text_size)
            if len(self.encoders) == 3:
                after = self.encoders[2](ids[2])[0].float()
            return TextEmbeddings(torch.cat((tokens, after), dim=1), pooled)

    def predict(
        self,
        x: Tensor,
        time: Tensor,
        context: Tensor,
        *,
        pooled: Tensor | None = None,
        image_size: int | tuple[int, int],
    ) -> Tensor:
        """What the objective predicts at x [B, h, w, c] and time [B] from 0 to 1,000, given context [B, T, W] of any
        length T. `image_size` is of the picture in pixels, (height, width) where they differ; SDXL is told it."""
        assert (pooled is None) == (self.metadata.pooled_size is None), "a pooled text, where the model takes one"
        dtype = self.denoiser.dtype
        asked: dict[str, Any] = {"encoder_hidden_states": context.to(dtype)}
        if self.metadata.kind == "flow":
            assert pooled is not None
            asked["pooled_projections"] = pooled.to(dtype)
        elif self.metadata.kind == "sdxl":
            assert pooled is not None
            height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
            sizes = torch.tensor([height, width, 0, 0, height, width], dtype=dtype, device=x.device)
            asked["added_cond_kwargs"] = {"text_embeds": pooled.to(dtype), "time_ids": sizes.expand(len(x), -1)}
        with _plain(x):
            denoise = self._called("predict", self.denoiser)
            (found,) = denoise(x.movedim(-1, 1).contiguous().to(dtype), timestep=time, **asked, return_dict=False)
        return found.movedim(1, -1).to(x.dtype)

    def _called(self, what: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        return self._fused.get(what, otherwise) if torch.is_grad_enabled() else otherwise

    def encode(self, pixels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Pixels [B, H, W, 3] from -1 to 1 to one draw of their latents [B, h, w, c] by standard normal `noise` of that
        shape; the middle of the draws without it."""
        moments = self._called("encode", self._moments)
        with torch.no_grad():
            return self._drawn(self._in_pieces(moments, pixels, places=pixels[0, ..., 0].numel()), noise)

    def _moments(self, pixels: Tensor) -> Tensor:
        return self.vae.encode(pixels.movedim(-1, 1).contiguous()).latent_dist.parameters.movedim(1, -1).float()

    def _drawn(self, moments: Tensor, noise: Tensor | None) -> Tensor:
        mean, log_variance = moments.chunk(2, dim=-1)
        drawn = mean
        if noise is not None:
            # diffusers' own bounds: outside of them the exponent of an untrained autoencoder overflows.
            drawn = mean + (log_variance.clamp(-30, 20) / 2).exp() * noise
        return (drawn - self.metadata.latent_shift) * self.metadata.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pixels around -1 to 1, [B, H, W, 3]."""

        def pictures(part: Tensor) -> Tensor:
            return self.vae.decode(part.movedim(-1, 1).contiguous(), return_dict=False)[0].movedim(1, -1).float()

        scaled = latents.float() / self.metadata.scale + self.metadata.latent_shift
        return self._in_pieces(pictures, scaled, places=latents[0, ..., 0].numel() * self.metadata.downsample**2)

    def _in_pieces(self, compute: Callable[[Tensor], Tensor], x: Tensor, *, places: int) -> Tensor:
        """As many rows at once as memory is likely to hold: a batch of small latents may be one of large pictures."""
        size = max(1, AT_ONCE // places)
        with _plain(x):
            return torch.cat([compute(part.to(self.vae.dtype)) for part in x.split(size)])


def load_image_model(
    folder: Path | str,
    *,
    precision: FrozenPrecision = "auto",
    checkpointing: bool = False,
    device: torch.device | str | None = None,
) -> FrozenImageModel:
    """From a local pipeline's safetensors. With `checkpointing` the denoiser's activations are computed again on the way
    back. `device` is where it will go, which decides what `auto` is; where nobody says, a GPU if there is one."""
    facts = read_pipeline_metadata(folder)
    device = default_device() if device is None else torch.device(device)
    dtype = frozen_dtype(precision, device)
    diffusers, transformers = _libraries()
    is_flow = facts.kind == "flow"
    quantised = {"quantization_config": build_quantization_config(precision, library="diffusers", device=device)}
    denoiser = _read(
        getattr(diffusers, TRANSFORMER if is_flow else UNET), facts.denoiser, torch_dtype=dtype, **_given(quantised)
    )
    # SDXL's overflows in fp16: its activations pass 65,504.
    vae_dtype = torch.bfloat16 if dtype is torch.bfloat16 and device.type == "cuda" else torch.float32
    vae = _read(getattr(diffusers, VAE), facts.vae, torch_dtype=vae_dtype)
    encoders = [_encoder(transformers, facts, i, dtype, precision, device) for i in range(len(facts.encoders))]
    if checkpointing:
        denoiser.enable_gradient_checkpointing()
    return FrozenImageModel(facts, denoiser=denoiser, encoders=encoders, vae=vae)


def _encoder(
    transformers: Any,
    facts: PipelineMetadata,
    number: int,
    dtype: torch.dtype,
    precision: FrozenPrecision,
    device: torch.device,
) -> Any:
    """CLIP's are small and stay as they are; a T5 is as large as the denoiser, and quantised with it."""
    place = facts.encoders[number]
    if number == 2:
        quantised = {"quantization_config": build_quantization_config(precision, device=device)}
        return _read(transformers.T5EncoderModel, place, dtype=dtype, **_given(quantised))
    projects = facts.kind == "flow" or number == 1
    kind = transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel
    return _read(kind, place, dtype=dtype, attn_implementation="sdpa")


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _read(kind: Any, folder: str, **options: Any) -> Any:
    """By the library's own from_pretrained; a weight that is not there is an error, because it would be drawn at random."""
    diffusers, transformers = _libraries()
    try:
        with quiet_logging(transformers), quiet_logging(diffusers):
            model, seen = kind.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                variant=weights_variant(Path(folder)),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except ImportError as error:
        raise EnvironmentProblem(f"{folder}: cannot be loaded: {first_line(error)}") from error
    except Exception as error:  # libraries raise what happens where a file is wrong
        raise CheckpointError(f"{folder}: cannot be loaded as a {kind.__name__}: {first_line(error)}") from error
    check_loading_info(folder, seen)
    return model


def _plain(x: Tensor) -> Any:
    """Without the autocast of training: what a frozen part says must not depend on who asks."""
    return torch.autocast(x.device.type, enabled=False)


def _libraries() -> tuple[Any, Any]:
    try:
        import diffusers
        import transformers
    except ImportError as error:
        raise EnvironmentProblem(
            "model.diffusion: an image generator needs diffusers and transformers; pip install 'bottega[hub]'"
        ) from error
    return diffusers, transformers
