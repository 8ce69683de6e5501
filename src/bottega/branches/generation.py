"""What the branches of images, sound and video have in common: data, condition, sampler and files, around one task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from bottega.branches.media import MediaBranch
from bottega.branches.start import start_folder
from bottega.branches.text_condition import prepare_text, reopen_text
from bottega.core.errors import CheckpointError, DataError, UsageError
from bottega.core.noise import Noise
from bottega.core.types import Batch, Models
from bottega.data.captions import CaptionRows
from bottega.data.classes import Classes
from bottega.data.prepare.prepared import Prepared
from bottega.data.samples import media_samples
from bottega.data.source import Source
from bottega.models.unet import choose_unet, vector_size
from bottega.schema.generator import ConditionShape, DiTShape, GeneratorShape, UNetShape
from bottega.schema.media import AudioRecipe, ImageRecipe, VideoRecipe
from bottega.tasks.generation import Generation
from bottega.tasks.paths import Path as NoisePath

FACTS = "generator.json"
GeneratorRecipe = ImageRecipe | AudioRecipe | VideoRecipe
Say = Callable[[str, int, int], None]


class Facts(BaseModel):
    """What a run knows of its data once it is prepared: enough to sample again where the data are not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: GeneratorShape
    classes: tuple[str, ...] = ()
    fps: int | None = None


class GenerationBranch(MediaBranch):
    """`key` is the field of a batch that is generated."""

    key: str
    medium: Literal["image", "audio", "video"]
    requests = ("prompt", "class", "vector", "count", "seed", "steps", "sampler", "guidance")

    def __init__(
        self,
        recipe: GeneratorRecipe,
        prepared: Prepared | None,
        *,
        codec: Path | None = None,
        expected: str | None = None,
    ) -> None:
        """Either with prepared data, or again from the codec of a finished run."""
        super().__init__(recipe, prepared, expected=expected)
        self._codec = codec
        self.text = None
        if recipe.model.condition == "text":
            self.text = prepare_text(recipe, self.prepared) if codec is None else reopen_text(recipe, codec)
        # A finished run has its own weights, and where it started from may be gone.
        start = recipe.model.from_ if codec is None else None
        self._start = start_folder(start) if start is not None else None
        self.facts = self._measure() if codec is None else _read_facts(codec)
        self.task: Generation = Generation(
            key=self.key,
            shape=self.facts.shape,
            path=NoisePath(
                objective=recipe.model.objective,
                times=recipe.model.times,
                schedule=recipe.model.noise_schedule,
                min_snr=recipe.model.min_snr,
            ),
            condition_dropout=recipe.model.condition_dropout if recipe.model.condition != "none" else 0.0,
            pretrained=str(self._start) if self._start is not None else None,
            **(self.text.of_task if self.text is not None else {}),
        )
        if codec is None:  # hours before the first sample is drawn
            options = recipe.samples
            self._check(options.steps, options.sampler, options.guidance, prefix="samples.")

    # What a medium says

    @abstractmethod
    def sides(self) -> tuple[tuple[int, ...], int]:
        """(grid, channels) of what is generated, read off the prepared data."""

    def patch(self) -> tuple[int, ...]:
        return (self.recipe.model.patch_size,) * 2

    @abstractmethod
    def medium_of(self, x: np.ndarray) -> np.ndarray:
        """What a model made as people know it: pixels uint8, or sound float32."""

    @abstractmethod
    def values_of(self, samples: np.ndarray) -> np.ndarray:
        """The other way: what a model, or the autoencoder before it, reads."""

    @abstractmethod
    def write(self, made: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]: ...

    # Data

    def form(self) -> dict[str, Any]:
        height, width = self.facts.shape.sample[-3:-1]
        return {"channels": self.facts.shape.sample[-1], **({"image_size": height} if height == width else {})}

    def known_classes(self) -> Classes:
        return Classes(self.facts.classes) if hasattr(self, "facts") else self.prepared.classes

    def served(self, rows: Any) -> Source:
        """As this task's batches, with the tokens of captions where they are asked for."""
        return self._captioned(super().served(rows), rows)

    def raw(self, name: str) -> Source:
        rows = super().raw(name)
        return self._captioned(rows, rows)

    def raw_other(self, path: str) -> Source:
        rows = super().raw_other(path)
        return self._captioned(rows, rows)

    def _captioned(self, seen: Source, rows: Any) -> Source:
        return seen if self.text is None else CaptionRows(seen, rows.table, self.text.tokens)

    def round_trip(self, models: Models, samples: np.ndarray, device: Any) -> np.ndarray:
        """Real samples as a perfect model would give them back: through all that loses something on the way."""
        assert self.task.latents is not None, "nothing is lost"
        x = torch.from_numpy(self.values_of(samples)).to(device)
        return self.medium_of(self.task.latents.round_trip(models["vae"], x).cpu().numpy())

    # The model

    def _measure(self) -> Facts:
        classes = tuple(self.prepared.classes.names)
        return Facts(shape=self._shape(classes), classes=classes)

    def _shape(self, classes: tuple[str, ...]) -> GeneratorShape:
        model, (grid, channels) = self.recipe.model, self.sides()
        common: dict[str, Any] = {
            "grid": grid,
            "channels": channels,
            "hidden_size": model.hidden_size,
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
        }
        size = {"class": len(classes), "vector": self._vector_size()}.get(model.condition, 0)
        condition = ConditionShape(kind=model.condition, size=size, hidden_size=model.hidden_size)
        if self.text is not None:
            condition = self.text.shape(model.hidden_size)
            common["context_size"] = condition.text_size
        try:
            if model.backbone == "unet":
                if model.dropout:
                    raise UsageError(f"model.dropout: {model.dropout:g}, and a unet has none; leave it out")
                asked = model.condition in ("class", "vector")
                unet = choose_unet(self._start, **common, stages=model.stages, has_vector=asked)
                backbone: DiTShape | UNetShape = unet
                condition = condition.model_copy(update={"hidden_size": vector_size(unet)}) if asked else condition
            else:
                attention: Any = getattr(model, "attention", "full")
                dropout = model.dropout or 0.0
                backbone = DiTShape(**common, patch=self.patch(), attention=attention, dropout=dropout)
        except ValidationError as error:
            raise UsageError(f"model.{error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        return GeneratorShape(backbone=backbone, condition=condition)

    def _vector_size(self) -> int:
        return len(self._vectors_of_data(1)[0]) if self.recipe.model.condition == "vector" else 0

    def _vectors_of_data(self, count: int) -> list[list[float]]:
        """Of the first training samples."""
        rows = media_samples(self.recipe, self.prepared, self.prepared.training_tables[0], is_training=False)
        index = np.arange(count) % len(rows)
        vectors: list[list[float]] = rows.rows(index, np.zeros_like(index))["condition"].tolist()
        return vectors

    def has_codec(self, folder: Path) -> bool:
        if not (folder / FACTS).is_file():
            return False
        if self.text is not None:
            self.text.check(folder)
        if _read_facts(folder) != self.facts:
            raise DataError("the data gives other sizes or classes than this run has; start over with --fresh")
        return True

    def write_codec(self, folder: Path) -> None:
        (folder / FACTS).write_text(self.facts.model_dump_json(indent=1) + "\n")
        if self.text is not None:
            self.text.save(folder)

    # Samples

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """A sheet with every class or prompt in turn."""
        options = self.recipe.samples
        asked: dict[str, Any] = {}
        if self.recipe.model.condition in ("class", "text"):
            flag, names = ("class", self.facts.classes) if self.text is None else ("prompt", self.text.prompts)
            asked = {flag: [names[i % len(names)] for i in range(options.count)]}
        elif self.recipe.model.condition == "vector":
            asked = {"vector": self._vectors_of_data(options.count)}
        made = self.generate(models, device=device, **asked, count=1 if asked else options.count, seed=self.recipe.seed)
        self.write(made, folder, self._captions(count=1 if asked else options.count, **asked))

    def generate(
        self,
        models: Models,
        *,
        device: Any,
        count: int = 16,
        seed: int = 0,
        steps: int | None = None,
        sampler: Any = None,
        guidance: float | None = None,
        stream: Any = None,
        batch_size: int = 256,
        say: Say = lambda stage, done, total: None,
        **asked: Any,
    ) -> np.ndarray:
        """As people know the medium: pixels uint8 [n, h, w, c], sounds float32 [n, samples], clips [n, f, h, w, c]."""
        rows = self.rows_asked(asked, count)
        x = self.draw(
            models,
            rows,
            device=device,
            seed=seed,
            steps=steps,
            sampler=sampler,
            guidance=guidance,
            batch_size=batch_size,
            say=say,
        )
        return self.medium_of(x)

    def draw(
        self,
        models: Models,
        rows: Batch,
        *,
        device: Any,
        seed: int,
        steps: int | None = None,
        sampler: Any = None,
        guidance: float | None = None,
        batch_size: int = 256,
        say: Say = lambda stage, done, total: None,
    ) -> np.ndarray:
        """One sample for each row, as the model holds it. A sample is a function of its number and the seed alone."""
        options = self.recipe.samples
        steps, method = options.steps if steps is None else steps, options.sampler if sampler is None else sampler
        guidance = options.guidance if guidance is None else guidance
        self._check(steps, method, guidance)
        total, made = int(rows["number"].shape[0]), []
        for start in range(0, total, batch_size):
            part = {
                name: torch.from_numpy(np.ascontiguousarray(v[start : start + batch_size])).to(device)
                for name, v in rows.items()
            }
            rng = Noise(seed, 0, part.pop("number"), torch)

            def tell(done: int, of: int, before: int = start, size: int = batch_size) -> None:
                say("samples", before * of + done * min(size, total - before), total * of)

            x = self.task.draw(models, part, rng, steps=steps, method=method, guidance=guidance, progress=tell)
            made.append(x.float().cpu().numpy())
        return np.concatenate(made)

    def _check(self, steps: int, method: str, guidance: float, *, prefix: str = "--") -> None:
        most = self.task.path.most_steps
        if steps < 1:
            raise UsageError(f"{prefix}steps {steps}: at least one step is needed")
        if most is not None and steps > most:
            raise UsageError(
                f"{prefix}steps {steps}: noise and v have {most} steps that can be taken; only flow has more"
            )
        if method not in ("euler", "heun", "dpm"):
            raise UsageError(f"{prefix}sampler {method}: expected euler, heun or dpm")
        if not 0 <= guidance < 1e4:
            raise UsageError(f"{prefix}guidance {guidance:g}: expected a number from 0; 1 is plain")
        if guidance != 1 and self.recipe.model.condition == "none":
            raise UsageError(f"{prefix}guidance {guidance:g}: this run has no condition to be guided by; leave it out")
        if guidance != 1 and self.recipe.model.condition_dropout == 0:
            raise UsageError(
                f"{prefix}guidance {guidance:g}: this run never learnt to go without a condition "
                "(model.condition_dropout is 0); use 1, or train with 0.1"
            )

    def rows_asked(self, asked: dict[str, Any], count: int) -> dict[str, np.ndarray]:
        """What was asked for as rows of a batch, each `count` times; "number" is the place that noise is drawn for."""
        self.check_asked({name: value for name, value in asked.items() if value is not None})
        if count < 1:
            raise UsageError(f"--count {count}: at least one sample is asked for")
        kind = self.recipe.model.condition
        wrong = {"prompt": "text", "class": "class", "vector": "vector"}
        for flag, needed in wrong.items():
            if asked.get(flag) is not None and kind != needed:
                takes = {"none": "nothing", "class": "--class", "vector": "--vector", "text": "--prompt"}[kind]
                raise UsageError(f"--{flag}: this run was trained with condition {kind}; it takes {takes}")
        rows: dict[str, np.ndarray] = {}
        if kind == "class":
            rows["label"] = np.repeat(self._labels(asked.get("class")), count)
        elif kind == "vector":
            rows["condition"] = np.repeat(self._vectors(asked.get("vector")), count, axis=0)
        elif kind == "text":
            rows |= {name: np.repeat(value, count, axis=0) for name, value in self._texts(asked.get("prompt")).items()}
        total = len(next(iter(rows.values()))) if rows else count
        return {**rows, "number": np.arange(total)}

    def _labels(self, wanted: Any) -> np.ndarray:
        names = self.facts.classes
        if wanted is None:
            return np.arange(len(names), dtype=np.int32)
        found = []
        for text in [wanted] if isinstance(wanted, str | int) else wanted:
            text = str(text)
            number = names.index(text) if text in names else int(text) if text.isdecimal() else -1
            if not 0 <= number < len(names):
                shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                raise UsageError(f"--class {text}: the run has {len(names)} classes: {shown}")
            found.append(number)
        return np.array(found, np.int32)

    def _vectors(self, wanted: Any) -> np.ndarray:
        size = self.facts.shape.condition.size
        if wanted is None:
            raise UsageError(f"--vector: this run was trained with vectors; give one of {size} numbers, such as 0.5,1")
        rows = []
        for one in [wanted] if isinstance(wanted, str) else wanted:
            try:
                values = [float(x) for x in (one.split(",") if isinstance(one, str) else one)]
            except ValueError:
                raise UsageError(f"--vector {one}: expected {size} numbers between commas") from None
            if len(values) != size or not np.isfinite(values).all():
                raise UsageError(f"--vector {one}: expected {size} finite numbers, got {len(values)}")
            rows.append(values)
        return np.array(rows, np.float32)

    def _texts(self, wanted: Any) -> dict[str, np.ndarray]:
        assert self.text is not None
        return self.text.rows(self.text.asked(wanted))

    def _captions(self, *, count: int, **asked: Any) -> list[str] | None:
        kind = self.recipe.model.condition
        if kind == "class":
            return [self.facts.classes[i] for i in self._labels(asked.get("class")) for _ in range(count)]
        given = self.text.asked(asked.get("prompt")) if self.text is not None else []
        return [text for text in given for _ in range(count)] or None

    def present(
        self, made: np.ndarray, out: Path | None, *, run: Path, count: int = 16, **asked: Any
    ) -> dict[str, Any]:
        target = out or run / "generated"
        captions = self._captions(count=count, **{k: v for k, v in asked.items() if k in ("class", "prompt")})
        return {"files": [str(path) for path in self.write(made, target, captions)], "count": len(made)}

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        from bottega.branches.publish import publish

        return publish(self, models, folder)


def _read_facts(codec: Path) -> Facts:
    try:
        return Facts.model_validate_json((codec / FACTS).read_bytes())
    except (OSError, ValidationError):
        raise CheckpointError(
            f"{codec / FACTS} cannot be read; start the same training again to have it written"
        ) from None
