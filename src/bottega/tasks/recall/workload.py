"""The recall workload: synthetic facts and queries, answered by a model with a memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np
import torch
from safetensors.torch import save_file

from bottega.config.recipe import Recipe
from bottega.core.errors import DataError, UsageError
from bottega.core.types import Models
from bottega.data.order.orders import Order
from bottega.data.recall import IGNORE_INDEX, Facts, Lasting, Streams, Tokens
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.data.sources.zip_sources import Unshuffled
from bottega.models.memory.config import MemoryShape
from bottega.tasks.processor import FileProcessor
from bottega.tasks.recall.config import LastingRecipe, RecallRecipe
from bottega.tasks.recall.task import ACCURACY, ACCURACY_WITHOUT_MEMORY, Recall, RecallFacts, RecallStreams
from bottega.tasks.sampler import Sampler
from bottega.tasks.task_data import TaskData
from bottega.tasks.workload import Workload
from bottega.world import World

METADATA_FILE, CONFIG_FILE = "data.json", "config.json"
MODEL_TYPE = "bottega-recall"


def open_workload(recipe: Recipe, *, progress: Callable[[str, int, int], None]) -> RecallWorkload:
    """Open the workload; there is nothing to prepare, since samples are generated when they are read."""
    assert isinstance(recipe, RecallRecipe | LastingRecipe)
    if isinstance(recipe, LastingRecipe):
        # The recipe may leave the number of processes open, and the batch of a step grows with it.
        problem = recipe.describe_distance_problem(World.from_environment().data_size)
        if problem is not None:
            raise UsageError(f"data.distance: {problem}")
    return RecallWorkload(recipe)


def reopen_workload(recipe: Recipe, processor_folder: Path, fingerprint: str) -> RecallWorkload:
    """Open the workload of a finished run; raise DataError if its data would be generated differently now."""
    assert isinstance(recipe, RecallRecipe | LastingRecipe)
    workload = RecallWorkload(recipe)
    if workload.data.fingerprint != fingerprint:
        raise DataError("the synthetic data of this run would be generated differently by this version; train it again")
    return workload


@final
class RecallWorkload(Workload):
    """A model with memory that answers queries for synthetic facts."""

    unit = "segments"

    def __init__(self, recipe: RecallRecipe | LastingRecipe) -> None:
        self.recipe = recipe
        data = recipe.data
        num_keys = data.num_keys + (recipe.data.num_lasting if isinstance(recipe, LastingRecipe) else 0)
        self.tokens = Tokens(num_keys, data.num_values, data.num_fillers)
        self.task: Recall = self._build_task()
        distances: tuple[str, ...] = ()
        if isinstance(recipe, RecallRecipe):
            distances = tuple(f"distance_{d}/{ACCURACY}" for d in range(1, recipe.data.distance + 1))
        self.data = RecallData(recipe, self.tokens)
        self.processor = FileProcessor(
            METADATA_FILE,
            json.dumps(self._build_token_metadata(), indent=1) + "\n",
            parse=json.loads,
            is_same=lambda previous: bool(previous == self._build_token_metadata()),
            mismatch="the tokens of the recipe differ from those of this run; start over with --fresh",
        )
        self.sampler = RecallSampler(recipe, self.task, self.tokens, self.data)
        self.metrics = ("loss", ACCURACY, *((ACCURACY_WITHOUT_MEMORY,) if self.task.has_memory else ()), *distances)

    def _build_task(self) -> Recall:
        recipe = self.recipe
        shape = recipe.model.build_trunk_shape(vocab_size=self.tokens.vocab_size, context=recipe.data.segment_length)
        if isinstance(recipe, RecallRecipe):
            return RecallStreams(shape=shape, num_values=recipe.data.num_values, memory=recipe.model.memory)
        options = recipe.model.memory
        memory = None
        if options is not None:
            memory = MemoryShape(**options.model_dump(exclude={"temperature"}), value_size=options.key_size)
        return RecallFacts(
            shape=shape,
            num_values=recipe.data.num_values,
            memory=memory,
            temperature=options.temperature if options is not None else 1.0,
        )

    def _build_token_metadata(self) -> dict[str, Any]:
        return {
            "ask": 0,
            "num_keys": self.tokens.num_keys,
            "num_values": self.tokens.num_values,
            "num_fillers": self.tokens.num_fillers,
        }

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write model.safetensors and a config.json that describes the network in full, since no other library has it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": MODEL_TYPE,
            "tokens": self._build_token_metadata(),
            **self.task.model_dump(),
            "seed": self.recipe.seed,
        }
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
        model = models["model"]
        state = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
        if hasattr(model, "codes"):
            state["codes"] = model.codes.detach().contiguous().cpu()
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return {"library_name": "bottega", "pipeline_tag": "question-answering"}


@final
class RecallData(TaskData):
    """Synthetic facts and queries, generated when they are read."""

    def __init__(self, recipe: RecallRecipe | LastingRecipe, tokens: Tokens) -> None:
        self.recipe, self.tokens = recipe, tokens

    @property
    def fingerprint(self) -> str:
        return self.training().fingerprint

    @property
    def notes(self) -> list[str]:
        return [f"chance accuracy is 1 / {self.recipe.data.num_values} = {1 / self.recipe.data.num_values:.4f}"]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Table -> number of samples: train, then the held-out ones, in the order of sample numbers."""
        data = self.recipe.data
        total = data.num_samples if data.limit is None else min(data.num_samples, data.limit)
        sizes = {}
        for name in ("validation", "test"):
            held_out = getattr(data, name)
            if held_out is not None:
                fraction = held_out.split if isinstance(held_out.split, float) else 0.05
                sizes[name] = min(max(1, round(fraction * total)), held_out.limit or total)
        return {"train": max(0, total - sum(sizes.values())), **sizes}

    def _build_streams(self, name: str) -> Streams:
        data = self.recipe.data
        assert isinstance(self.recipe, RecallRecipe)
        names = list(self._sizes)
        first_sample = sum(self._sizes[other] for other in names[: names.index(name)])
        return Streams(
            self.tokens,
            data.segment_length,
            data.distance,
            data.num_pairs,
            data.num_questions,
            self.recipe.seed,
            first_sample,
            self._sizes[name],
            is_measured=name != "train",
        )

    @cached_property
    def _facts(self) -> Facts:
        assert isinstance(self.recipe, LastingRecipe)
        data = self.recipe.data
        return Facts(
            self.tokens,
            data.num_lasting,
            data.segment_length,
            data.distance,
            data.num_pairs,
            data.num_questions,
            data.restated,
            self.recipe.seed,
            data.num_samples if data.limit is None else min(data.num_samples, data.limit),
        )

    def training(self) -> Source:
        return self._build_streams("train") if isinstance(self.recipe, RecallRecipe) else self._facts

    @property
    def order(self) -> Order | None:
        """Facts are read in order and without end; None for streams, which are shuffled."""
        return Unshuffled(len(self._facts), is_endless=True) if isinstance(self.recipe, LastingRecipe) else None

    def validation(self) -> Source | None:
        return self._build_held_out("validation")

    def test(self) -> Source | None:
        return self._build_held_out("test")

    def _build_held_out(self, name: str) -> Source | None:
        if getattr(self.recipe.data, name) is None:
            return None
        if isinstance(self.recipe, RecallRecipe):
            return self._build_streams(name)
        data = self.recipe.data
        count = -(-data.num_lasting // data.num_questions)  # queries every lasting key
        return Lasting(self._facts, min(count, getattr(data, name).limit or count))

    def read_external(self, external: ExternalData) -> NoReturn:
        raise UsageError(
            f"--data {external.path}: the data of recall is generated; remove --data, and change data.* in the recipe"
        )


@final
class RecallSampler(Sampler):
    """Writes queries from held-out data with the model's answers."""

    def __init__(self, recipe: RecallRecipe | LastingRecipe, task: Recall, tokens: Tokens, data: RecallData) -> None:
        self.recipe, self.task, self.tokens, self.data = recipe, task, tokens, data

    @torch.no_grad()
    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Write a text file for each sample: its queries, the predicted values with and without memory, and the correct ones."""
        source = self.data.validation() or self.data.training()
        rows = source.rows(np.arange(min(self.recipe.samples.count, len(source))), np.zeros(1, np.int64))
        tokens = torch.from_numpy(rows["tokens"]).to(device)
        predictions = [
            self.task.predict_scores(models, tokens, with_memory=with_memory).argmax(-1).cpu().numpy()
            for with_memory in ([True, False] if self.task.has_memory else [True])
        ]
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(len(tokens)):
            lines = []
            for position in zip(*np.nonzero(rows["answers"][number] != IGNORE_INDEX), strict=True):
                key = self.tokens.format_token(int(rows["tokens"][number][position]))
                values = [f"v{predicted[number][position]}" for predicted in predictions]
                baseline = f" (without memory {values[1]})" if len(values) > 1 else ""
                lines.append(f"? {key}  predicted {values[0]}{baseline}, correct v{rows['answers'][number][position]}")
            text = f"{source.describe(number, 0)}\n\n" + "\n".join(lines) + "\n"
            (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
