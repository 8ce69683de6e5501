"""CLIP of transformers: pictures and captions as unit vectors that are near each other where they mean the same.

Ours is built here, and any other is read from its folder: safetensors only, no code of the folder's own.

B batch   H W sides   K captions for each picture   T tokens   P width of where both meet
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

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.core.noise import numpy_generator
from bottega.models.clip.config import ClipShape
from bottega.models.folders.json_object import read_json_object
from bottega.models.folders.resolve import require_config
from bottega.models.folders.transformers_loader import isolated_rng, quiet_logging
from bottega.models.folders.untrusted import (
    attribute_errors_to,
    check_loading_info,
    read_config_without_code,
    require_safetensors,
)
from bottega.models.initial import fill_parameters

CONFIG, PREPROCESSOR, PAIRS = "config.json", "preprocessor_config.json", "pairs.json"
KINDS = ("clip", "siglip")
FIRST_SCALE = 10.0
"""SigLIP's: cosines of untrained vectors are near 0, and a larger scale would only amplify noise."""
USUAL_COSINE = 0.25
"""About what a CLIP gives to pairs it is unsure of; where a folder has no bias, training begins as undecided as that."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""OpenAI's, for folders without a preprocessor_config.json."""


class ClipOutput(NamedTuple):
    """What a model says of pictures and captions. Scores are log odds that both belong together."""

    scores: Tensor
    """[B, K]"""
    images: Tensor
    """[B, P]"""
    texts: Tensor
    """[B, P]: of the first caption of each."""


class Clip(nn.Module):
    """`network` is transformers' own model, so what is trained here is what others open."""

    mean: Tensor
    std: Tensor

    def __init__(self, shape: ClipShape, network: Any, *, bias: float) -> None:
        super().__init__()
        self.shape, self.network = shape, network
        # SigLIP's network has one itself; CLIP's softmax needs none.
        if not hasattr(network, "logit_bias"):
            self.bias = nn.Parameter(torch.tensor(bias))
        self.is_causal = network.config.model_type == "clip"
        self.register_buffer("mean", torch.tensor(shape.mean), persistent=False)
        self.register_buffer("std", torch.tensor(shape.std), persistent=False)
        self._is_checkpointed = False

    def forward(self, pixels: Tensor, ids: Tensor, numbers: Tensor | None = None) -> ClipOutput:
        """`ids` [B, K, T] are the captions of each picture; equal `numbers` [B, K] promise equal captions."""
        flat, inverse = ids.flatten(0, 1).long(), None
        if numbers is not None and ids.device.type == "cpu":
            # On a GPU the processor would have to wait to learn how many there are, which costs more than it saves.
            found, inverse = numbers.flatten().unique(return_inverse=True)
            places = torch.arange(len(inverse))
            flat = flat[torch.zeros_like(found).scatter_(0, inverse, places)]
            flat = self._shortened(flat)
        texts = self.texts(flat)
        if inverse is not None:
            # Not by [...], whose gradient two threads add up in whatever order they come: 148 results in 200 tries.
            texts = texts.index_select(0, inverse)
        texts = texts.unflatten(0, ids.shape[:2])
        images = self.images(pixels)
        return ClipOutput(self.logits(images, texts), images, texts[:, 0])

    def logits(self, images: Tensor, texts: Tensor) -> Tensor:
        """[B, K] of [B, P] and [B, K, P], or [B, K] of [B, P] and [K, P]: log odds that each pair belongs together."""
        cosine = torch.einsum("bp,bkp->bk", images, texts) if texts.dim() == 3 else images @ texts.T
        return self.scale * cosine + self.offset

    @property
    def scale(self) -> Tensor:
        return self.network.logit_scale.float().exp()

    @property
    def offset(self) -> Tensor:
        found: Tensor = self.bias if "bias" in self._parameters else self.network.logit_bias
        return found.float()

    def images(self, pixels: Tensor) -> Tensor:
        """Unit vectors [B, P] of pixels [B, H, W, C] from -1 to 1, of any size, grey or in colour."""
        x = pixels.float().movedim(-1, 1)
        x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
        x = (_sized(x, self.shape.image_size, keeps_aspect=self.shape.keeps_aspect) + 1.0) / 2.0
        x = (x - self.mean[:, None, None]) / self.std[:, None, None]
        return _unit(self.network.get_image_features(pixel_values=x))

    def texts(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Unit vectors [B, P] of tokens [B, T]. The mask is not looked at: CLIP answers at the first end of a text and sees
        nothing after it, and SigLIP was trained with all places in view."""
        return _unit(self.network.get_text_features(input_ids=ids.long()))

    def _shortened(self, ids: Tensor) -> Tensor:
        """Without the columns that lie after the end of all captions, which a causal tower does not see."""
        end = self.network.config.text_config.eos_token_id
        if not self.is_causal or not isinstance(end, int) or end == 2:
            return ids
        ends = (ids == end).int()
        longest = int(ends.argmax(dim=1).max()) + 1
        return ids[:, :longest] if bool(ends.any(dim=1).all()) else ids

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
    """To be trained: with the weights of a folder, or with initial ones as a function of the seed and their names.

    Of 1 + `negatives` pairs one belongs together, and the bias begins by saying so: the first steps learn no such thing.
    """
    if folder is not None:
        folder = Path(folder)
        clip = _opened(folder)
        if "bias" in clip._parameters and _kept_bias(folder) is None:
            with torch.no_grad():
                clip.bias.copy_(-math.log(negatives) - USUAL_COSINE * clip.scale)
        return clip.train()
    clip = Clip(shape, _network(shape), bias=0.0)
    fill_parameters(clip, functools.partial(_initial, shape=shape.config_dict, negatives=negatives, seed=seed))
    return clip.train()


def load_clip(folder: Path | str) -> Clip:
    """A CLIP or SigLIP of transformers, or what `bottega train align` exported: in float32, to be called and never
    trained. A weight that is not there is an error, because transformers would draw it at random."""
    return _opened(Path(folder)).eval().requires_grad_(False)


def read_clip_shape(folder: Path | str, *, key: str = "model.clip") -> ClipShape:
    """What must be known of a folder's model before it is loaded. `key` is who asks."""
    with attribute_errors_to(folder, key=key):
        return _read_clip_shape(Path(folder), key)


def _read_clip_shape(folder: Path, key: str) -> ClipShape:
    require_config(folder, key=key, what="CLIP")
    config = read_config_without_code(folder / CONFIG, key=key)
    if config.get("model_type") not in KINDS or not {"text_config", "vision_config"} <= config.keys():
        held = config.get("model_type") or "model of no known type"
        raise UsageError(f"{key}: {folder} holds a {held}; a CLIP or SigLIP of both towers is needed")
    shown = read_json_object(folder / PREPROCESSOR) if (folder / PREPROCESSOR).is_file() else {}
    size = shown.get("size", 0)
    if not isinstance(size, dict | int):
        raise CheckpointError(f"{folder / PREPROCESSOR}: size is {size!r}, and no number or object; export it again")
    keeps = "shortest_edge" in size if isinstance(size, dict) else True
    known = {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
    try:
        return ClipShape(
            config=json.dumps(known, sort_keys=True),
            mean=tuple(shown.get("image_mean", CLIP_MEAN)),
            std=tuple(shown.get("image_std", CLIP_STD)),
            keeps_aspect=keeps,
        )
    except (ValueError, TypeError):
        raise CheckpointError(f"{folder / PREPROCESSOR}: image_mean and image_std are no three numbers each") from None


def export_clip(clip: Clip, folder: Path) -> None:
    """config.json and model.safetensors as CLIPModel opens them, how pixels are scaled, and the bias that CLIP has no place
    for. CLIPTextModel opens the same folder and takes its half."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_logging(_transformers()):
        clip.network.save_pretrained(folder)
    side, shape = clip.shape.image_size, clip.shape
    size = {"shortest_edge": side} if shape.keeps_aspect else {"height": side, "width": side}
    _write(
        folder / PREPROCESSOR,
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
    _write(folder / PAIRS, {"scale": clip.scale.item(), "bias": clip.offset.item()})


def _opened(folder: Path) -> Clip:
    shape = read_clip_shape(folder)
    transformers = _transformers()
    require_safetensors(folder)
    kind = transformers.CLIPModel if shape.config_dict["model_type"] == "clip" else transformers.SiglipModel
    try:
        with quiet_logging(transformers), isolated_rng():
            network, seen = kind.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # of transformers and of safetensors, which have classes of their own
        raise CheckpointError(f"{folder}: cannot be loaded as a {kind.__name__}: {first_line(error)}") from error
    check_loading_info(folder, seen)
    return Clip(shape, network, bias=_kept_bias(folder) or 0.0)


def _kept_bias(folder: Path) -> float | None:
    if not (folder / PAIRS).is_file():
        return None
    found = read_json_object(folder / PAIRS).get("bias")
    if not isinstance(found, int | float):
        raise CheckpointError(f"{folder / PAIRS}: has no number for bias; export the run again")
    return float(found)


def _network(shape: ClipShape) -> Any:
    transformers = _transformers()
    values = shape.config_dict
    kind = transformers.CLIPModel if values["model_type"] == "clip" else transformers.SiglipModel
    with quiet_logging(transformers), isolated_rng():
        config = transformers.AutoConfig.for_model(**values)
        return kind._from_config(config, dtype=torch.float32)


def _initial(name: str, size: tuple[int, ...], *, shape: dict[str, Any], negatives: int, seed: int) -> np.ndarray:
    """By width and depth as in CLIP (Radford et al., 2021), but for the embeddings: a token's, a place's and a patch's are of
    one size here. With CLIP's own 0.02 for all, places were a fifth of what a small patch is, and shapes learnt last."""
    owner, _, kind = name.rpartition(".")
    if kind == "logit_scale":
        return np.full(size, math.log(FIRST_SCALE), np.float32)
    if kind == "logit_bias" or name == "bias":
        return np.full(size, -math.log(negatives), np.float32)
    if kind == "bias":
        return np.zeros(size, np.float32)
    if kind == "weight" and len(size) == 1:
        return np.ones(size, np.float32)
    tower = shape["text_config" if ".text_model." in name else "vision_config"]
    width, depth = tower.get("hidden_size", 768), tower.get("num_hidden_layers", 12)
    std, layer = width**-0.5, owner.rpartition(".")[2]
    if layer == "patch_embedding":
        std *= math.prod(size[1:]) ** -0.5
    elif layer == "fc1":
        std *= 0.5**0.5
    elif layer in ("q_proj", "k_proj", "v_proj", "fc2"):
        std *= (2 * depth) ** -0.5
    elif layer.endswith("_projection"):
        std = size[1] ** -0.5
    return std * numpy_generator(seed, name).standard_normal(size, dtype=np.float32)


def _sized(x: Tensor, side: int, *, keeps_aspect: bool) -> Tensor:
    """[B, C, H, W] as [B, C, side, side], as an image processor of CLIP or SigLIP does it."""
    height, width = x.shape[-2:]
    if (height, width) == (side, side):
        return x
    if keeps_aspect and height != width:
        factor = side / min(height, width)
        height, width = (max(side, int(old * factor)) for old in (height, width))
    else:
        height = width = side
    # Cubic weights overshoot at edges; pixels end at -1 and 1.
    x = F.interpolate(x, size=(height, width), mode="bicubic", antialias=True).clamp(-1.0, 1.0)
    top, left = (height - side) // 2, (width - side) // 2
    return x[..., top : top + side, left : left + side]


def _unit(found: Any) -> Tensor:
    return F.normalize(found.pooler_output.float(), dim=-1)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentProblem("a CLIP needs transformers; pip install 'bottega[hub]'") from error
    return transformers
