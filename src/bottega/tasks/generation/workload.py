"""What the branches of images, sound and video have in common: data, condition, sampler and files, around one task."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from bottega.core.errors import DataError, UsageError
from bottega.core.noise import Noise
from bottega.core.types import Batch, Models
from bottega.data.output_files import explain_write_errors, is_folder, replace_previous_files, require_suffix
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.external import ExternalData
from bottega.data.sources.latents import LatentRows
from bottega.data.sources.samples import open_media_source
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes
from bottega.data.tables.shards import Table
from bottega.data.text.captions import CaptionRows
from bottega.models.device import choose_device
from bottega.models.generator.config import CodeGeneratorShape, ConditionShape, DiTShape, GeneratorShape, UNetShape
from bottega.models.unet import condition_vector_size, resolve_unet_shape
from bottega.tasks.base_model import find_base_folder
from bottega.tasks.frozen_models import collect_frozen_hashes
from bottega.tasks.generation.code_tokenizer import reopen_code_tokenizer, resolve_code_tokenizer
from bottega.tasks.generation.config import AudioRecipe, ImageRecipe, VideoRecipe
from bottega.tasks.generation.latent_space import LatentMetadata, compute_latents, open_latent_space
from bottega.tasks.generation.latents import reconstruct
from bottega.tasks.generation.paths import NoisePath as NoisePath
from bottega.tasks.generation.requests import RequestEncoder, supported_flags
from bottega.tasks.generation.sampling_options import (
    require_finite,
    resolve_sampling_options,
    sampling_option_names,
    uses_bfloat16,
)
from bottega.tasks.generation.task import Generation
from bottega.tasks.generation.text_condition import open_text_condition, reopen_text_condition
from bottega.tasks.measures.attributes import shared_rows
from bottega.tasks.media_workload import MediaWorkload
from bottega.tasks.metadata import read_metadata

METADATA_FILE = "generator.json"
GeneratorRecipe = ImageRecipe | AudioRecipe | VideoRecipe
Say = Callable[[str, int, int], None]


class GeneratorMetadata(BaseModel):
    """What a run knows of its data once it is prepared: enough to sample again where the data are not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: GeneratorShape | CodeGeneratorShape
    classes: tuple[str, ...] = ()
    fps: int | None = None
    latents: LatentMetadata | None = None
    """None where plain values are generated."""

    @property
    def sample(self) -> tuple[int, ...]:
        """Sides and channels of the data, which are those of what is generated where nothing lies between."""
        return self.shape.sample if self.latents is None else self.latents.sample


class GenerationWorkload(MediaWorkload):
    """`key` is the field of a batch that is generated."""

    key: str
    medium: Literal["image", "audio", "video"]
    endings: tuple[str, ...]
    """Of single files that samples can be written to."""
    task: Any
    """Generation, or CodeLanguage over codes."""

    def __init__(
        self,
        recipe: GeneratorRecipe,
        prepared: PreparedData | None,
        *,
        processor: Path | None = None,
        expected: str | None = None,
    ) -> None:
        """Either with prepared data, or again from the codec of a finished run."""
        super().__init__(recipe, prepared, expected=expected)
        self._processor, self._kept = processor, dict[str, Table]()
        self.requests = ("prompt", "class", "vector", "count", "seed", *sampling_option_names(recipe.model))
        self.codes = None
        if recipe.model.backbone == "tokens":
            self.codes = (
                resolve_code_tokenizer(recipe) if processor is None else reopen_code_tokenizer(recipe, processor)
            )
            self.metrics, self.unit = self.codes.metrics, "codes"
        self.space = open_latent_space(recipe, self.medium) if processor is None else None
        self.text = None
        if recipe.model.condition == "text":
            self.text = (
                open_text_condition(recipe, self.prepared)
                if processor is None
                else reopen_text_condition(recipe, processor)
            )
        self._start = find_base_folder(recipe, processor=processor)
        self.facts = self._measure() if processor is None else self._known(processor)
        self.task = self._task()
        if processor is None:  # hours before the first sample is drawn
            resolve_sampling_options(recipe, self.task, {}, prefix="samples.")

    # What a medium says

    @abstractmethod
    def sides(self) -> tuple[tuple[int, ...], int]:
        """(grid, channels) of the data as a model of them sees it, read off what is prepared."""

    def patch(self) -> tuple[int, ...]:
        return (self.recipe.model.patch_size,) * 2

    @abstractmethod
    def to_medium(self, x: np.ndarray) -> np.ndarray:
        """What a model made as people know it: pixels uint8, or sound float32."""

    @abstractmethod
    def to_values(self, samples: np.ndarray) -> np.ndarray:
        """The other way: what a model, or the autoencoder before it, reads."""

    @abstractmethod
    def write(self, made: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]: ...

    # Data

    @property
    def frozen_hashes(self) -> dict[str, str]:
        return collect_frozen_hashes(latents=self.facts.latents, codes=self.codes, text=self.text)

    def frame(self) -> tuple[int, ...]:
        return self.facts.sample[-3:]

    def class_names(self) -> Classes:
        return Classes(self.facts.classes) if hasattr(self, "facts") else self.prepared.classes

    def served(self, rows: Any) -> Source:
        """As this task's batches, with the tokens of captions where they are asked for."""
        return self._captioned(super().served(rows), rows)

    def table(self, name: str, *, is_training: bool) -> Source:
        if name not in self._kept:
            return super().table(name, is_training=is_training)
        rows: Any = self._rows(self.recipe, self.prepared, name, is_training=is_training)
        return self._captioned(LatentRows(rows, self._kept[name]), rows)

    def keep_latents(self, say: Say) -> Self:
        """Computes the latents of what is learned from and of what measures it, where the recipe asks for that."""
        latents = self.facts.latents
        if self.recipe.data.latents and latents is not None:
            names = [name for name in self.prepared.tables if name != "test"]
            is_training = {name: name not in ("validation", "test") for name in names}
            rows = {n: self._rows(self.recipe, self.prepared, n, is_training=is_training[n]) for n in names}
            seen = {name: (one, super(GenerationWorkload, self).served(one)) for name, one in rows.items()}
            device = choose_device(self.recipe.device)
            self._kept = compute_latents(
                latents, self.facts.shape.sample, seen, key=self.key, device=device, progress=say
            )
        return self

    def read_raw(self, name: str) -> Source:
        rows = self._rows(self.recipe, self.prepared, name, is_training=False)
        return self._limited(name, self._captioned(rows, rows))

    def read_given_raw(self, given: ExternalData) -> Source:
        rows = super().read_given_raw(given)
        return self._captioned(rows, rows)

    def _rows(
        self, recipe: Any, prepared: PreparedData, name: str, *, is_training: bool, classes: Classes | None = None
    ) -> Source:
        rows: Any = super()._rows(recipe, prepared, name, is_training=is_training, classes=classes)
        condition = self.facts.shape.condition
        if condition.kind == "vector" and rows.conditions.size != condition.size:
            raise DataError(
                f"{recipe.data.train.path or name}: has vectors of {rows.conditions.size} numbers, and this run has "
                f"learnt from {condition.size}"
            )
        return rows

    def _captioned(self, seen: Source, rows: Any) -> Source:
        return seen if self.text is None else CaptionRows(seen, rows.table, self.text.tokens)

    def round_trip(self, models: Models, samples: np.ndarray, device: Any) -> np.ndarray:
        """Real samples as a perfect model would give them back: through all that loses something on the way."""
        assert self.task.latents is not None, "nothing is lost"
        x = torch.from_numpy(self.to_values(samples)).to(device)
        found = (
            reconstruct(models["vae"], x)
            if self.codes is None
            else self.task.latents.round_trip(models["tokenizer"], x)
        )
        return self.to_medium(found.cpu().numpy())

    # The model

    def _measure(self) -> GeneratorMetadata:
        classes, asked = tuple(self.prepared.classes.names), self.recipe.model.num_classes
        if self.recipe.model.condition == "class" and asked is not None and len(classes) != asked:
            raise DataError(f"model.num_classes: {asked} were asked for, and the data has {len(classes)}; leave it out")
        latents = self.space.metadata(*self.sides()) if self.space is not None else None
        return GeneratorMetadata(shape=self._shape(classes), classes=classes, latents=latents)

    def _known(self, processor: Path) -> GeneratorMetadata:
        facts = _read_facts(processor)
        if facts.latents is None:
            return facts
        return facts.model_copy(update={"latents": facts.latents.relocate(self.recipe, processor)})

    def _shape(self, classes: tuple[str, ...]) -> GeneratorShape | CodeGeneratorShape:
        model, (grid, channels) = self.recipe.model, self.sides()
        if self.space is not None:
            grid, channels = self.space.latent_sides(grid, channels)
        common: dict[str, Any] = {
            "grid": grid,
            "channels": channels,
            "hidden_size": model.hidden_size,
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
        }
        size = {"class": len(classes), "vector": self._vector_size()}.get(model.condition, 0)
        shared = shared_rows(classes) if model.condition == "class" else ()
        condition = ConditionShape(kind=model.condition, size=size, hidden_size=model.hidden_size, shared=shared)
        if self.codes is not None:
            return self.codes.build_shape(model, grid=grid, channels=channels, condition=condition)
        if self.text is not None:
            condition = self.text.shape(model.hidden_size)
            common["context_size"] = condition.text_size
        try:
            if model.backbone == "unet":
                if model.dropout:
                    raise UsageError(f"model.dropout: {model.dropout:g}, and a unet has none; leave it out")
                asked = model.condition in ("class", "vector")
                unet = resolve_unet_shape(self._start, **common, stages=model.stages, has_vector=asked)
                backbone: DiTShape | UNetShape = unet
                condition = (
                    condition.model_copy(update={"hidden_size": condition_vector_size(unet)}) if asked else condition
                )
            else:
                attention: Any = getattr(model, "attention", "full")
                dropout = model.dropout or 0.0
                backbone = DiTShape(**common, patch=self.patch(), attention=attention, dropout=dropout)
        except ValidationError as error:
            raise UsageError(f"model.{error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        return GeneratorShape(backbone=backbone, condition=condition)

    def _task(self) -> Any:
        model, shape = self.recipe.model, self.facts.shape
        dropout = model.condition_dropout if model.condition != "none" else 0.0
        if isinstance(shape, CodeGeneratorShape):
            assert self.codes is not None
            return self.codes.build_task(self.key, shape, condition_dropout=dropout, start=self._start)
        return Generation(
            key=self.key,
            shape=shape,
            path=NoisePath(
                objective=model.objective,
                times=model.times,
                schedule=model.noise_schedule,
                min_snr=model.min_snr,
                shift=model.time_shift or 1.0,
            ),
            condition_dropout=dropout,
            pretrained=str(self._start) if self._start is not None else None,
            latents=self.facts.latents.build_latents() if self.facts.latents is not None else None,
            **(self.text.task_fields if self.text is not None else {}),
        )

    def _vector_size(self) -> int:
        if self.recipe.model.condition != "vector":
            return 0
        found, asked = len(self._vectors_of_data(1)[0]), self.recipe.model.condition_size
        if asked is not None and asked != found:
            raise DataError(
                f"model.condition_size: {asked} was asked for, and the vectors of the data have {found} numbers; "
                "leave it out"
            )
        return found

    def _vectors_of_data(self, count: int) -> list[list[float]]:
        """Of the first training samples."""
        rows = open_media_source(self.recipe, self.prepared, self.prepared.training_tables[0], is_training=False)
        index = np.arange(count) % len(rows)
        vectors: list[list[float]] = rows.rows(index, np.zeros_like(index))["condition"].tolist()
        return vectors

    @property
    def metadata(self) -> GeneratorMetadata:
        return self.facts

    def read_metadata(self, folder: Path) -> GeneratorMetadata:
        before = _read_facts(folder)
        if self.text is not None:
            self.text.check(folder)
        if self.codes is not None:
            self.codes.check(folder)
        latents = self.facts.latents
        if latents is not None:
            latents.check(before.latents)
            before = before.model_copy(update={"latents": latents})  # the same one, which may have been moved
        return before

    def write_processor(self, folder: Path) -> None:
        (folder / METADATA_FILE).write_text(self.facts.model_dump_json(indent=1) + "\n")
        if self.text is not None:
            self.text.save(folder)
        if self.codes is not None:
            self.codes.save(folder)

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
        self.write(made, folder, self.asks.captions(asked, 1 if asked else options.count))

    def generate(
        self,
        models: Models,
        *,
        device: Any,
        count: int | None = None,
        seed: int = 0,
        stream: Any = None,
        batch_size: int = 256,
        say: Say = lambda stage, done, total: None,
        **asked: Any,
    ) -> np.ndarray:
        """As people know the medium: pixels uint8 [n, h, w, c], sounds float32 [n, samples], clips [n, f, h, w, c]."""
        how = {name: asked.pop(name) for name in sampling_option_names(self.recipe.model) if name in asked}
        rows = self.encode_request(asked, count)
        return self.to_medium(self.draw(models, rows, device=device, seed=seed, batch_size=batch_size, say=say, **how))

    def draw(
        self,
        models: Models,
        rows: Batch,
        *,
        device: Any,
        seed: int,
        batch_size: int = 256,
        say: Say = lambda stage, done, total: None,
        **how: Any,
    ) -> np.ndarray:
        """One sample for each row, as the model holds it. A sample is a function of its number and the seed alone."""
        options = resolve_sampling_options(self.recipe, self.task, how)
        total, made = int(rows["number"].shape[0]), []
        for start in range(0, total, batch_size):
            part = {
                name: torch.from_numpy(np.ascontiguousarray(v[start : start + batch_size])).to(device)
                for name, v in rows.items()
            }
            rng = Noise(seed, 0, part.pop("number"), torch)

            def tell(done: int, of: int, before: int = start, size: int = batch_size) -> None:
                say("samples", before * of + done * min(size, total - before), total * of)

            # In bfloat16 where it was trained so: half the time on a GPU. float16 could overflow, and stays out.
            with torch.autocast(
                "cuda", torch.bfloat16, enabled=uses_bfloat16(device, self.recipe.training.mixed_precision)
            ):
                x = self.task.draw(models, part, rng, **options, progress=tell)
            made.append(x.float().cpu().numpy())
        return require_finite(np.concatenate(made))

    @property
    def supported_requests(self) -> tuple[str, ...]:
        return supported_flags(self.requests, self.recipe.model)

    @property
    def asks(self) -> RequestEncoder:
        condition, size = self.facts.shape.condition, math.prod(self.facts.sample)
        return RequestEncoder(condition.kind, self.facts.classes, condition.size, self.text, size)

    def encode_request(self, asked: dict[str, Any], count: int | None) -> dict[str, np.ndarray]:
        self.check_request({name: value for name, value in asked.items() if value is not None})
        return self.asks.encode(asked, count)

    def example_flags(self) -> str:
        return self.asks.example_flags()

    def check_output(self, path: Path) -> None:
        if not is_folder(path):
            require_suffix(path, self.endings)

    def present(
        self, made: np.ndarray, out: Path | None, *, run: Path, count: int | None = None, **asked: Any
    ) -> dict[str, Any]:
        target = out or run / "generated"
        captions = self.asks.captions(asked, count)
        with explain_write_errors(target):
            files = replace_previous_files(target, lambda: self.write(made, target, captions))
        return {"files": [str(path) for path in files], "count": len(made)}

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        from bottega.tasks.generation.export import export_generator
        from bottega.tasks.generation.export_codes import export_code_generator

        return (export_generator if self.codes is None else export_code_generator)(self, models, folder)


def _read_facts(processor: Path) -> GeneratorMetadata:
    return read_metadata(processor / METADATA_FILE, GeneratorMetadata.model_validate_json)
