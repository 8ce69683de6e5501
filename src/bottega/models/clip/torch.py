"""CLIP and SigLIP of transformers, trained from scratch or loaded from a folder: embeddings of images and captions.

B batch   H W image height and width   C channels   K captions of each image   T tokens   P embedding width
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError
from bottega.core.noise import numpy_generator
from bottega.models.clip.config import ClipShape
from bottega.models.device import is_simulated
from bottega.models.folders.json_object import read_json_object
from bottega.models.folders.resolve import require_config
from bottega.models.folders.transformers_loader import isolated_rng, load_pretrained, quiet_logging
from bottega.models.folders.untrusted import (
    attribute_errors_to,
    read_config_without_code,
    require_safetensors,
)
from bottega.models.initial import fill_parameters

CONFIG, PREPROCESSOR_FILE, PAIRS_FILE = "config.json", "preprocessor_config.json", "pairs.json"
MODEL_TYPES = ("clip", "siglip")
INITIAL_SCALE = 10.0
"""Initial logit scale, as in SigLIP: cosines of untrained embeddings are near 0, and a larger scale amplifies noise."""
TYPICAL_COSINE = 0.25
"""Typical cosine of an uncertain pair in a trained CLIP; sets the initial bias if a folder has none."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""OpenAI's image mean and standard deviation, for folders without a preprocessor_config.json."""


class ClipOutput(NamedTuple):
    """Scores and embeddings of one forward."""

    scores: Tensor
    """(B, K): log odds that image and caption match."""
    images: Tensor
    """(B, P): image embeddings."""
    texts: Tensor
    """(B, P): embeddings of the first caption of each image."""


class Clip(nn.Module):
    """A CLIP or SigLIP whose `network` is transformers' own model, with a bias for the sigmoid loss if the network has none."""

    mean: Tensor
    std: Tensor

    def __init__(self, shape: ClipShape, network: Any, *, bias: float) -> None:
        super().__init__()
        self.shape, self.network = shape, network
        # SigLIP's network has a bias itself; CLIP's softmax needs none.
        if not hasattr(network, "logit_bias"):
            self.bias = nn.Parameter(torch.tensor(bias))
        self.is_causal = network.config.model_type == "clip"
        self.register_buffer("mean", torch.tensor(shape.mean), persistent=False)
        self.register_buffer("std", torch.tensor(shape.std), persistent=False)
        self._is_checkpointed = False

    def forward(self, pixels: Tensor, ids: Tensor, caption_numbers: Tensor | None = None) -> ClipOutput:
        """Score images `pixels` (B, H, W, C) against the captions with token ids `ids` (B, K, T).

        Captions with equal `caption_numbers` (B, K) must be equal; they are then encoded once.
        """
        captions, inverse = ids.flatten(0, 1).long(), None
        if caption_numbers is not None and ids.device.type == "cpu" and not is_simulated():
            # Only on a CPU: on a GPU the host would wait for the number of distinct captions, which costs more than it saves.
            # A simulated step does not know that number; its memory is that of a batch without equal captions.
            distinct_numbers, inverse = caption_numbers.flatten().unique(return_inverse=True)
            indices = torch.arange(len(inverse))
            captions = captions[torch.zeros_like(distinct_numbers).scatter_(0, inverse, indices)]
            captions = self._trim_padding(captions)
        texts = self.encode_texts(captions)
        if inverse is not None:
            # Not by indexing, which is not reproducible: two threads sum its gradient in varying order, and 200 runs had 148
            # different results.
            texts = texts.index_select(0, inverse)
        texts = texts.unflatten(0, ids.shape[:2])
        images = self.encode_images(pixels)
        return ClipOutput(self.logits(images, texts), images, texts[:, 0])

    def logits(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return log odds (B, K) that pairs match, of image (B, P) and text embeddings (B, K, P) or (K, P)."""
        cosine = torch.einsum("bp,bkp->bk", images, texts) if texts.dim() == 3 else images @ texts.T
        return self.scale * cosine + self.offset

    @property
    def scale(self) -> Tensor:
        """Factor of the cosine in the logits."""
        return self.network.logit_scale.float().exp()

    @property
    def offset(self) -> Tensor:
        """Bias of the logits."""
        bias: Tensor = self.bias if "bias" in self._parameters else self.network.logit_bias
        return bias.float()

    def encode_images(self, pixels: Tensor) -> Tensor:
        """Return normalized embeddings (B, P) of pixels (B, H, W, C) in -1..1, of any size, with 1 or 3 channels."""
        x = pixels.float().movedim(-1, 1)
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        x = (_resize(x, self.shape.image_size, keeps_aspect=self.shape.keeps_aspect) + 1.0) / 2.0
        x = (x - self.mean[:, None, None]) / self.std[:, None, None]
        return _normalize(self.network.get_image_features(pixel_values=x))

    def encode_texts(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return normalized embeddings (B, P) of tokens (B, T).

        `mask` is ignored: CLIP pools at the first end token and is causal, and SigLIP is trained to attend to padding.
        """
        return _normalize(self.network.get_text_features(input_ids=ids.long()))

    def _trim_padding(self, ids: Tensor) -> Tensor:
        """Remove columns after the end of all captions, which a causal text encoder does not attend to."""
        end_token = self.network.config.text_config.eos_token_id
        # 2 marks old configurations, for which transformers pools at the highest id instead.
        if not self.is_causal or not isinstance(end_token, int) or end_token == 2:
            return ids
        is_end = (ids == end_token).int()
        max_length = int(is_end.argmax(dim=1).max()) + 1
        return ids[:, :max_length] if bool(is_end.any(dim=1).all()) else ids

    @property
    def checkpoint_blocks(self) -> bool:
        return self._is_checkpointed

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, value: bool) -> None:
        if value:
            self.network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.network.gradient_checkpointing_disable()
        self._is_checkpointed = value


def build_clip(shape: ClipShape, seed: int, *, negatives: int, folder: Path | str | None = None) -> Clip:
    """Return a CLIP to be trained, with the weights of a folder or with weights drawn from the seed and parameter names.

    One of 1 + `negatives` pairs matches; the bias starts at the log odds of a match, so that it need not be learned.
    """
    if folder is not None:
        folder = Path(folder)
        clip = _load_clip(folder)
        if "bias" in clip._parameters and _read_bias(folder) is None:
            with torch.no_grad():
                clip.bias.copy_(-math.log(negatives) - TYPICAL_COSINE * clip.scale)
        return clip.train()
    clip = Clip(shape, _build_network(shape), bias=0.0)
    fill_parameters(
        clip, functools.partial(_compute_initial_value, config=shape.config_dict, negatives=negatives, seed=seed)
    )
    return clip.train()


def load_clip(folder: Path | str) -> Clip:
    """Return a frozen CLIP or SigLIP in float32, of transformers or exported by `bottega train align`.

    Missing weights are an error.
    """
    return _load_clip(Path(folder)).eval().requires_grad_(False)


def read_clip_shape(folder: Path | str, *, key: str = "model.clip") -> ClipShape:
    """Return the shape of a folder's CLIP without loading weights. `key` is the recipe key, for errors."""
    with attribute_errors_to(folder, key=key):
        return _read_clip_shape(Path(folder), key)


def _read_clip_shape(folder: Path, key: str) -> ClipShape:
    require_config(folder, key=key, description="CLIP")
    config = read_config_without_code(folder / CONFIG, key=key)
    if config.get("model_type") not in MODEL_TYPES or not {"text_config", "vision_config"} <= config.keys():
        model_type = config.get("model_type") or "model without a model_type"
        raise UsageError(f"{key}: {folder} contains a {model_type}; a CLIP or SigLIP with both towers is needed")
    preprocessor = read_json_object(folder / PREPROCESSOR_FILE) if (folder / PREPROCESSOR_FILE).is_file() else {}
    size = preprocessor.get("size", 0)
    if not isinstance(size, dict | int):
        raise CheckpointError(
            f"{folder / PREPROCESSOR_FILE}: size must be a number or an object, got {size!r}; export it again"
        )
    keeps_aspect = "shortest_edge" in size if isinstance(size, dict) else True
    config = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    try:
        return ClipShape(
            config=json.dumps(config, sort_keys=True),
            mean=tuple(preprocessor.get("image_mean", CLIP_MEAN)),
            std=tuple(preprocessor.get("image_std", CLIP_STD)),
            keeps_aspect=keeps_aspect,
        )
    except (ValueError, TypeError):
        raise CheckpointError(
            f"{folder / PREPROCESSOR_FILE}: image_mean and image_std must be three numbers each; export it again"
        ) from None


def export_clip(clip: Clip, folder: Path) -> None:
    """Write config.json and model.safetensors for CLIPModel (or CLIPTextModel), the image preprocessing, and the bias.

    The bias has a file of its own, because CLIPModel has no parameter for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_logging():
        clip.network.save_pretrained(folder)
    side, shape = clip.shape.image_size, clip.shape
    size = {"shortest_edge": side} if shape.keeps_aspect else {"height": side, "width": side}
    _write_json(
        folder / PREPROCESSOR_FILE,
        {
            "image_processor_type": "CLIPImageProcessor",
            "do_resize": True,
            "size": size,
            "resample": 3,
            "do_center_crop": shape.keeps_aspect,
            "crop_size": {"height": side, "width": side},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(shape.mean),
            "image_std": list(shape.std),
            "do_convert_rgb": True,
        },
    )
    _write_json(folder / PAIRS_FILE, {"scale": clip.scale.item(), "bias": clip.offset.item()})


def _load_clip(folder: Path) -> Clip:
    shape = read_clip_shape(folder)
    transformers = _import_transformers()
    require_safetensors(folder)
    model_class = transformers.CLIPModel if shape.config_dict["model_type"] == "clip" else transformers.SiglipModel
    with isolated_rng():
        network = load_pretrained(model_class, folder, description=f"a {model_class.__name__}", dtype=torch.float32)
    return Clip(shape, network, bias=_read_bias(folder) or 0.0)


def _read_bias(folder: Path) -> float | None:
    if not (folder / PAIRS_FILE).is_file():
        return None
    bias = read_json_object(folder / PAIRS_FILE).get("bias")
    if not isinstance(bias, int | float):
        raise CheckpointError(f"{folder / PAIRS_FILE}: bias must be a number; export the run again")
    return float(bias)


def _build_network(shape: ClipShape) -> Any:
    transformers = _import_transformers()
    values = shape.config_dict
    model_class = transformers.CLIPModel if values["model_type"] == "clip" else transformers.SiglipModel
    with quiet_logging(), isolated_rng():
        config = transformers.AutoConfig.for_model(**values)
        return model_class._from_config(config, dtype=torch.float32)


def _compute_initial_value(
    name: str, shape: tuple[int, ...], *, config: dict[str, Any], negatives: int, seed: int
) -> np.ndarray:
    """Return the initial value of one parameter.

    Standard deviations follow width and depth as in CLIP (Radford et al., 2021), except that token, position and patch
    embeddings have equal ones. With CLIP's own 0.02, position embeddings were a fifth as large as those of small patches,
    and shapes were learned last.
    """
    owner, _, kind = name.rpartition(".")
    if kind == "logit_scale":
        return np.full(shape, math.log(INITIAL_SCALE), np.float32)
    if kind == "logit_bias" or name == "bias":
        return np.full(shape, -math.log(negatives), np.float32)
    if kind == "bias":
        return np.zeros(shape, np.float32)
    if kind == "weight" and len(shape) == 1:
        return np.ones(shape, np.float32)
    tower = config["text_config" if ".text_model." in name else "vision_config"]
    width, depth = tower.get("hidden_size", 768), tower.get("num_hidden_layers", 12)
    std, layer = width**-0.5, owner.rpartition(".")[2]
    if layer == "patch_embedding":
        std *= math.prod(shape[1:]) ** -0.5
    elif layer == "fc1":
        std *= 0.5**0.5
    elif layer in ("q_proj", "k_proj", "v_proj", "fc2"):
        std *= (2 * depth) ** -0.5
    elif layer.endswith("_projection"):
        std = shape[1] ** -0.5
    return std * numpy_generator(seed, name).standard_normal(shape, dtype=np.float32)


def _resize(x: Tensor, side: int, *, keeps_aspect: bool) -> Tensor:
    """Resize (B, C, H, W) to (B, C, side, side) as the image processors of CLIP and SigLIP do."""
    height, width = x.shape[-2:]
    if (height, width) == (side, side):
        return x
    if keeps_aspect and height != width:
        factor = side / min(height, width)
        height, width = (max(side, int(length * factor)) for length in (height, width))
    else:
        height = width = side
    # Bicubic interpolation overshoots at edges; pixels stay in -1..1.
    x = F.interpolate(x, size=(height, width), mode="bicubic", antialias=True).clamp(-1.0, 1.0)
    top, left = (height - side) // 2, (width - side) // 2
    return x[..., top : top + side, left : left + side]


def _normalize(output: Any) -> Tensor:
    return F.normalize(output.pooler_output.float(), dim=-1)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentProblem("a CLIP needs transformers; pip install 'bottega[hub]'") from error
    return transformers
