"""Diffusion and flow matching: one generation task for images, audio, video and their latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bottega.core.model_spec import Initial, ModelSpec, resolve_reference
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models
from bottega.models.generator.config import GeneratorShape, UNetShape
from bottega.tasks.generation.latents import PRECOMPUTED, Latents
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.solvers import Method
from bottega.tasks.generation.text import FrozenText

LOSS = "bottega.tasks.generation.{framework}:compute_loss"
DRAW = "bottega.tasks.generation.{framework}:draw_samples"


class Generation(Task):
    """A diffusion or flow matching loss, and sampling from noise.

    A batch holds `key` (b, *grid, channels) and the condition: `label` (b,), `condition` (b, d), or `input_ids` and
    `attention_mask` (b, length). Optional: `weight` (b,), where 0 marks padding rows.
    """

    key: str
    """Batch field with the data: image, mel or video."""
    shape: GeneratorShape
    path: NoisePath = NoisePath()
    condition_dropout: float = 0.1
    latents: Latents | None = None
    """The autoencoder whose latents are generated; None generates values directly."""
    text: FrozenText | None = None
    """A frozen text encoder; None if there is no text, or if the encoder is trained inside the model."""
    empty_text: tuple[int, ...] = ()
    """Tokens (length,) of the empty caption, which stands for no condition."""
    empty_length: int = 1
    """Number of these tokens that are text; the others are padding."""
    pretrained: str | None = None
    """Folder of a generator whose weights training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        # In JAX there is no UNet, which is diffusers' own model.
        module = f"bottega.models.generator.{'torch' if isinstance(self.shape.backbone, UNetShape) else '{framework}'}"
        model = ModelSpec(
            f"{module}:Generator",
            self.shape,
            initial=Initial(f"{module}:initialise_generator"),
            pretrained=self.pretrained,
            load=f"{module}:load_generator",
            starts_initial=True,  # weights of a backbone alone suffice: the condition is then initialised
        )
        specs = {"model": model}
        if self.latents is not None:
            specs["vae"] = self.latents.spec()
        if self.text is not None:
            specs["text_encoder"] = self.text.spec()
        return specs

    def new_modules(self) -> tuple[str, ...]:
        """Return the names of modules that start untrained: last layers, which start at zero, and a condition that the
        pretrained weights lack."""
        from bottega.models.generator.layout import read_generator

        if self.pretrained is None:
            is_unet = isinstance(self.shape.backbone, UNetShape)
            last_layers = ("backbone.unet.conv_out",) if is_unet else ("backbone.out", "backbone.modulation_out")
            return (*last_layers, "condition")
        has_condition = any(name.startswith("condition.") for name in read_generator(Path(self.pretrained)))
        return () if has_condition else ("condition",)

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if "weight" in batch:
            return {"loss": float((np.asarray(batch["weight"]) > 0).sum())}
        return {"loss": float(len(batch[PRECOMPUTED if PRECOMPUTED in batch else self.key]))}

    @property
    def noise_names(self) -> tuple[str, ...]:
        return ("noise", "time", "drop", *(("latent",) if self.latents is not None else ()))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        loss: Loss = resolve_reference(LOSS, rng.framework)(self, models, batch, rng)
        return loss

    def draw(
        self,
        models: Models,
        batch: Batch,
        rng: Noise,
        *,
        steps: int,
        method: Method = "heun",
        guidance: float = 1.0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Array:
        """Return one sample for each row of conditions; guidance 1 is the conditional model, 0 the unconditional one.

        The initial noise is the draw `start` of `rng`.
        """
        if self.shape.condition.kind == "none":
            guidance = 1.0
        draw_samples = resolve_reference(DRAW, rng.framework)
        return draw_samples(self, models, batch, rng, steps=steps, method=method, guidance=guidance, progress=progress)
