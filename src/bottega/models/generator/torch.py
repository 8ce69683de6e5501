"""A backbone with what it is asked for: classes, vectors or text become the condition that every block sees.

B batch   L text tokens   W width of a text token   D width of the condition
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.models.dit import layout
from bottega.models.dit.torch import DiT, initial_value
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape, UNetShape
from bottega.models.initial import fill_parameters
from bottega.models.pipeline.component import read_class_name, read_component, read_safetensors

WEIGHTS = "model.safetensors"
"""In our own folder: what is not in the form of a diffusers part."""


CLASS_EMBEDDING, SHARED_EMBEDDING = "condition.embedding.weight", "condition.shared.weight"


class Generator(nn.Module):
    """What a generative task trains. `drop` [B] marks samples whose condition is taken away, so that guidance can
    compare with and without; for text that is the task's affair, because the empty text stands for none."""

    def __init__(self, shape: GeneratorShape) -> None:
        super().__init__()
        self.shape = shape
        self.backbone: Any = DiT(shape.backbone) if isinstance(shape.backbone, DiTShape) else _unet(shape.backbone)
        self.condition: Any = _conditioner(shape.condition)

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        *,
        label: Tensor | None = None,
        vector: Tensor | None = None,
        input_ids: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        drop: Tensor | None = None,
    ) -> Tensor:
        """Text comes as `input_ids` [B, L] for our own encoder, or as another's `context` [B, L, W]; with `mask`."""
        kind = self.shape.condition.kind
        if kind == "text":
            if input_ids is not None:
                context = self.condition(input_ids, mask)
            assert context is not None, "a model of text is asked without any"
            return self.backbone(x, time, context=context, mask=mask)
        if kind == "none":
            return self.backbone(x, time)
        asked = self.condition(label if kind == "class" else vector, drop)
        return self.backbone(x, time, vector=asked)

    @property
    def checkpoint_blocks(self) -> bool:
        return bool(self.backbone.checkpoint_blocks)

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, value: bool) -> None:
        self.backbone.checkpoint_blocks = value

    def compile_whole(self, *, graphs: bool) -> None:
        self.backbone.compile_whole(graphs=graphs)


class ClassCondition(nn.Module):
    """One row for each class, and a last one for none.

    Classes that are named by attributes share a row for each of them besides: what a 3 looks like is learnt from all
    films of a 3, whichever way it goes.
    """

    rows: Tensor

    def __init__(self, shape: ConditionShape) -> None:
        super().__init__()
        self.none = shape.size
        self.embedding = nn.Embedding(shape.size + 1, shape.hidden_size)
        self.shared: nn.Embedding | None = None
        if shape.shared:
            rows = torch.tensor(shape.shared)
            nothing = int(rows.max()) + 1
            rows = torch.cat((rows, torch.full((1, rows.shape[1]), nothing)))
            self.shared = nn.Embedding(nothing + 1, shape.hidden_size)
            self.register_buffer("rows", rows, persistent=False)

    def forward(self, label: Tensor, drop: Tensor | None) -> Tensor:
        label = label.long() if drop is None else torch.where(drop, self.none, label.long())
        own = self.embedding(label)
        return own if self.shared is None else own + self.shared(self.rows[label]).sum(dim=-2)

    def folded(self) -> Tensor:
        """One table that says the same, [classes + 1, width], for those who know of no other."""
        everything = torch.arange(self.none + 1, device=self.embedding.weight.device)
        return self(everything, None).detach()


class VectorCondition(nn.Module):
    """Continuous numbers through two layers; a learnt vector stands for none."""

    def __init__(self, shape: ConditionShape) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(shape.size, shape.hidden_size)
        self.linear_2 = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.none = nn.Parameter(torch.zeros(shape.hidden_size))

    def forward(self, vector: Tensor, drop: Tensor | None) -> Tensor:
        asked = self.linear_2(nn.functional.silu(self.linear_1(vector)))
        return asked if drop is None else torch.where(drop[:, None], self.none.to(asked.dtype), asked)


def build_generator(shape: GeneratorShape, seed: int, *, pretrained: str | None = None) -> Generator:
    """With its initial weights, a function of the seed and of each parameter's name; or with those of a folder."""
    model = Generator(shape)
    initialise_generator(model, seed)
    if pretrained is not None:
        load_generator(model, pretrained)
    return model


def initialise_generator(model: Generator, seed: int) -> None:
    """Set every parameter. Only its own name and shape decide a value."""
    backbone_value = initial_value if isinstance(model.shape.backbone, DiTShape) else _unet_value

    def value(name: str, size: tuple[int, ...]) -> np.ndarray:
        return (backbone_value if name.startswith("backbone.") else initial_value)(name, size, seed)

    fill_parameters(model, value)


def load_generator(model: Generator, folder: Path | str, *, whole: bool = False) -> None:
    """Weights of a run's export or of a diffusers folder. Unless `whole`, a backbone alone will do: its condition then
    begins anew."""
    found, own = read_generator(Path(folder)), model.state_dict()
    if SHARED_EMBEDDING in own and SHARED_EMBEDDING not in found and CLASS_EMBEDDING in found:
        found[SHARED_EMBEDDING] = torch.zeros_like(
            own[SHARED_EMBEDDING]
        )  # in a layout that has one table, it is folded into that
    if not found:
        raise UsageError(f"model.from: {folder} holds no weights; expected a run's export or a diffusers UNet folder")
    is_new = not whole and not any(name.startswith("condition.") for name in found)
    wanted = {name: t for name, t in own.items() if not (is_new and name.startswith("condition."))}
    for name, tensor in wanted.items():
        if name not in found:
            other = next((theirs for theirs in found if theirs not in own), None)
            holds = f", and holds {other} {list(found[other].shape)}" if other is not None else ""
            raise UsageError(f"model.from: {folder} lacks {name} {list(tensor.shape)} of the recipe's model{holds}")
        if found[name].shape != tensor.shape:
            raise UsageError(
                f"model.from: {folder} has {name} of shape {list(found[name].shape)}, "
                f"the recipe's model needs {list(tensor.shape)}"
            )
    extra = next((name for name in found if name not in own), None)
    if extra is not None:
        raise UsageError(
            f"model.from: {folder} holds {extra} {list(found[extra].shape)}, which the recipe's model has not"
        )
    model.load_state_dict({**own, **found})


def read_generator(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder under our names, whichever of its parts holds them."""
    from bottega.models.unet import find_unet_folder

    found: dict[str, Tensor] = {}
    unet = find_unet_folder(folder)
    if unet is not None:
        found |= {f"backbone.unet.{name}": tensor for name, tensor in read_component(unet).items()}
    for place in (folder, folder / "transformer"):
        if read_class_name(place) == layout.CLASS:
            found |= layout.from_diffusers(read_component(place))
    file = folder / WEIGHTS
    return found | read_safetensors(file) if file.is_file() else found


def _conditioner(shape: ConditionShape) -> nn.Module | None:
    if shape.kind == "class":
        return ClassCondition(shape)
    if shape.kind == "vector":
        return VectorCondition(shape)
    if shape.kind == "text" and shape.vocab_size is not None:
        from bottega.models.text_encoder import TextEncoder

        return TextEncoder(shape)
    return None


def _unet(shape: UNetShape) -> nn.Module:
    from bottega.models.unet import UNet

    return UNet(shape)


def _unet_value(name: str, size: tuple[int, ...], seed: int) -> np.ndarray:
    from bottega.models import unet

    return unet.initial_value(name, size, seed)
