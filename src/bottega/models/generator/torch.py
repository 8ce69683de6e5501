"""Generator: a diffusion backbone with its condition on classes, vectors or text.

B batch   L text tokens   W width of a text token   D width of the condition
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bottega.models.dit.initial import initial_value
from bottega.models.dit.torch import DiT
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape, UNetShape
from bottega.models.generator.layout import match_weights, read_generator
from bottega.models.initial import fill_parameters


class Generator(nn.Module):
    """The model of a generative task.

    `drop` (B) marks samples whose condition is removed, for classifier-free guidance; text conditions are dropped by the
    task, which replaces them by the empty text.
    """

    def __init__(self, shape: GeneratorShape) -> None:
        super().__init__()
        self.shape = shape
        self.backbone: Any = (
            DiT(shape.backbone) if isinstance(shape.backbone, DiTShape) else _build_unet(shape.backbone)
        )
        self.condition: Any = _build_condition(shape.condition)

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
        """Return the backbone's prediction, of the shape of x (B, *grid, C), at time (B) in 0..1,000.

        `label` (B) are class indices, `vector` (B, size) numbers. Text is given as `input_ids` (B, L) for our own encoder,
        or as `context` (B, L, W), the output of another encoder; `mask` (B, L) belongs to either.
        """
        kind = self.shape.condition.kind
        if kind == "text":
            if input_ids is not None:
                context = self.condition(input_ids, mask)
            assert context is not None, "a text-conditional model needs input_ids or context"
            return self.backbone(x, time, context=context, mask=mask)
        if kind == "none":
            return self.backbone(x, time)
        condition = self.condition(label if kind == "class" else vector, drop)
        return self.backbone(x, time, vector=condition)

    @property
    def checkpoint_blocks(self) -> bool:
        return bool(self.backbone.checkpoint_blocks)

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, value: bool) -> None:
        self.backbone.checkpoint_blocks = value

    def compile_whole(self, *, use_cuda_graphs: bool) -> None:
        """Compile the backbone as one graph; with `use_cuda_graphs`, as CUDA graphs if the backbone supports them."""
        self.backbone.compile_whole(use_cuda_graphs=use_cuda_graphs)


class ClassCondition(nn.Module):
    """Embedding of classes, with a last row for no class.

    Classes with attributes also add an embedding shared by all classes with the same attribute: the look of a digit is
    learned from all its videos, whatever its direction of motion.
    """

    rows: Tensor

    def __init__(self, shape: ConditionShape) -> None:
        super().__init__()
        self.null_class = shape.size
        self.embedding = nn.Embedding(shape.size + 1, shape.hidden_size)
        self.shared: nn.Embedding | None = None
        if shape.shared:
            # Computed from numbers, not from a tensor, which has no values on the meta device.
            self.shared = nn.Embedding(shape.null_row + 1, shape.hidden_size)
            self.register_buffer("rows", torch.tensor(shape.shared_rows), persistent=False)

    def forward(self, label: Tensor, drop: Tensor | None) -> Tensor:
        """Return the embedding of each label, (B, D); rows with `drop` have the embedding of no class."""
        label = label.long() if drop is None else torch.where(drop, self.null_class, label.long())
        embedding = self.embedding(label)
        return embedding if self.shared is None else embedding + self.shared(self.rows[label]).sum(dim=-2)

    def fold_shared(self) -> Tensor:
        """Return one equivalent table (classes + 1, width), with the shared embeddings added."""
        classes = torch.arange(self.null_class + 1, device=self.embedding.weight.device)
        return self(classes, None).detach()


class VectorCondition(nn.Module):
    """MLP over a vector of numbers; a learned vector stands for no condition."""

    def __init__(self, shape: ConditionShape) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(shape.size, shape.hidden_size)
        self.linear_2 = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.none = nn.Parameter(torch.zeros(shape.hidden_size))

    def forward(self, vector: Tensor, drop: Tensor | None) -> Tensor:
        """Return the embedding of each vector, (B, D); rows with `drop` have the learned vector of no condition."""
        embedded = self.linear_2(nn.functional.silu(self.linear_1(vector)))
        return embedded if drop is None else torch.where(drop[:, None], self.none.to(embedded.dtype), embedded)


def build_generator(shape: GeneratorShape, seed: int, *, pretrained: str | None = None) -> Generator:
    """Return a generator with initial weights from the seed and the parameter names, or with the weights of a folder."""
    model = Generator(shape)
    initialise_generator(model, seed)
    if pretrained is not None:
        load_generator(model, pretrained)
    return model


def initialise_generator(model: Generator, seed: int) -> None:
    """Initialise every parameter from the seed, its name and its shape."""
    backbone_value = initial_value if isinstance(model.shape.backbone, DiTShape) else _initial_unet_value

    def compute_value(name: str, size: tuple[int, ...]) -> np.ndarray:
        return (backbone_value if name.startswith("backbone.") else initial_value)(name, size, seed)

    fill_parameters(model, compute_value)


def load_generator(model: Generator, folder: Path | str, *, require_all: bool = False) -> None:
    """Load the weights of a run's export or of a diffusers folder; `match_weights` checks that they fit."""
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    model.load_state_dict(
        {**state, **match_weights(read_generator(Path(folder)), shapes, folder, require_all=require_all)}
    )


def _build_condition(shape: ConditionShape) -> nn.Module | None:
    if shape.kind == "class":
        return ClassCondition(shape)
    if shape.kind == "vector":
        return VectorCondition(shape)
    if shape.kind == "text" and shape.vocab_size is not None:
        from bottega.models.text_encoder import TextEncoder

        return TextEncoder(shape)
    return None


def _build_unet(shape: UNetShape) -> nn.Module:
    from bottega.models.unet import UNet

    return UNet(shape)


def _initial_unet_value(name: str, size: tuple[int, ...], seed: int) -> np.ndarray:
    from bottega.models import unet

    return unet.initial_value(name, size, seed)
