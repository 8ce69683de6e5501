"""The branch of recall: made-up facts and questions, and a model with a memory that is asked for them."""

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

DATA, CONFIG = "data.json", "config.json"
MODEL_TYPE = "bottega-recall"


def prepare(recipe: Recipe, *, progress: Callable[[str, int, int], None]) -> RecallWorkload:
    """There is nothing to prepare: a sample is made when it is asked for."""
    assert isinstance(recipe, RecallRecipe | LastingRecipe)
    if isinstance(recipe, LastingRecipe):
        # A recipe need not say how many processes there are, and each may bring a batch of its own.
        too_near = recipe.distance_problem(World.from_environment().data_size)
        if too_near is not None:
            raise UsageError(f"data.distance: {too_near}")
    return RecallWorkload(recipe)


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> RecallWorkload:
    assert isinstance(recipe, RecallRecipe | LastingRecipe)
    workload = RecallWorkload(recipe)
    if workload.data.fingerprint != fingerprint:
        raise DataError("the made-up data of this run is made in another way by now; train it again")
    return workload


@final
class RecallWorkload(Workload):
    """A model with memory that answers questions about synthetic facts."""

    unit = "segments"

    def __init__(self, recipe: RecallRecipe | LastingRecipe) -> None:
        self.recipe = recipe
        data = recipe.data
        keys = data.num_keys + (recipe.data.num_lasting if isinstance(recipe, LastingRecipe) else 0)
        self.tokens = Tokens(keys, data.num_values, data.num_fillers)
        self.task: Recall = self._task()
        distances: tuple[str, ...] = ()
        if isinstance(recipe, RecallRecipe):
            distances = tuple(f"distance_{d}/{ACCURACY}" for d in range(1, recipe.data.distance + 1))
        self.data = RecallData(recipe, self.tokens)
        self.processor = FileProcessor(
            DATA,
            json.dumps(self._known(), indent=1) + "\n",
            parse=json.loads,
            is_same=lambda previous: bool(previous == self._known()),
            mismatch="the tokens are other ones than this run has; start over with --fresh",
        )
        self.sampler = RecallSampler(recipe, self.task, self.tokens, self.data)
        self.metrics = ("loss", ACCURACY, *((ACCURACY_WITHOUT_MEMORY,) if self.task.has_memory else ()), *distances)

    def _task(self) -> Recall:
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

    def _known(self) -> dict[str, Any]:
        return {
            "ask": 0,
            "num_keys": self.tokens.num_keys,
            "num_values": self.tokens.num_values,
            "num_fillers": self.tokens.num_fillers,
        }

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """config.json and model.safetensors; no library knows this network, so the first says all that decides it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": MODEL_TYPE, "tokens": self._known(), **self.task.model_dump(), "seed": self.recipe.seed}
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        model = models["model"]
        state = {name: tensor.detach().contiguous().cpu() for name, tensor in model.state_dict().items()}
        if hasattr(model, "codes"):
            state["codes"] = model.codes.detach().contiguous().cpu()
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return {"library_name": "bottega", "pipeline_tag": "question-answering"}


@final
class RecallData(TaskData):
    """Synthetic facts and questions, generated when they are read."""

    def __init__(self, recipe: RecallRecipe | LastingRecipe, tokens: Tokens) -> None:
        self.recipe, self.tokens = recipe, tokens

    @property
    def fingerprint(self) -> str:
        return self.training().fingerprint

    @property
    def notes(self) -> list[str]:
        return [f"a guess is right once in {self.recipe.data.num_values}: {1 / self.recipe.data.num_values:.4f}"]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """How many streams are learnt from, and how many are held out, in the order of their numbers."""
        data = self.recipe.data
        total = data.num_samples if data.limit is None else min(data.num_samples, data.limit)
        sizes = {}
        for name in ("validation", "test"):
            part = getattr(data, name)
            if part is not None:
                share = part.split if isinstance(part.split, float) else 0.05
                sizes[name] = min(max(1, round(share * total)), part.limit or total)
        return {"train": max(0, total - sum(sizes.values())), **sizes}

    def _streams(self, name: str) -> Streams:
        data = self.recipe.data
        assert isinstance(self.recipe, RecallRecipe)
        names = list(self._sizes)
        first = sum(self._sizes[other] for other in names[: names.index(name)])
        return Streams(
            self.tokens,
            data.segment_length,
            data.distance,
            data.num_pairs,
            data.num_questions,
            self.recipe.seed,
            first,
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
        return self._streams("train") if isinstance(self.recipe, RecallRecipe) else self._facts

    @property
    def order(self) -> Order | None:
        """Facts come in the order in which they happen; streams have none."""
        return Unshuffled(len(self._facts), is_endless=True) if isinstance(self.recipe, LastingRecipe) else None

    def validation(self) -> Source | None:
        return self._held_out("validation")

    def test(self) -> Source | None:
        return self._held_out("test")

    def _held_out(self, name: str) -> Source | None:
        if getattr(self.recipe.data, name) is None:
            return None
        if isinstance(self.recipe, RecallRecipe):
            return self._streams(name)
        data = self.recipe.data
        every_key = -(-data.num_lasting // data.num_questions)
        return Lasting(self._facts, min(every_key, getattr(data, name).limit or every_key))

    def read_external(self, external: ExternalData) -> NoReturn:
        raise UsageError(
            f"--data {external.path}: the data of recall is generated; leave --data out, and change data.* in the recipe"
        )


@final
class RecallSampler(Sampler):
    """Questions from held-out data with the model's answers."""

    def __init__(self, recipe: RecallRecipe | LastingRecipe, task: Recall, tokens: Tokens, data: RecallData) -> None:
        self.recipe, self.task, self.tokens, self.data = recipe, task, tokens, data

    @torch.no_grad()
    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Questions from held-out data, with what was told and what is right."""
        source = self.data.validation() or self.data.training()
        rows = source.rows(np.arange(min(self.recipe.samples.count, len(source))), np.zeros(1, np.int64))
        tokens = torch.from_numpy(rows["tokens"]).to(device)
        ways = [True, False] if self.task.has_memory else [True]
        told = [self.task.predict_scores(models, tokens, with_memory=way).argmax(-1).cpu().numpy() for way in ways]
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(len(tokens)):
            lines = []
            for place in zip(*np.nonzero(rows["answers"][number] != IGNORE_INDEX), strict=True):
                key = self.tokens.format_token(int(rows["tokens"][number][place]))
                said = [f"v{one[number][place]}" for one in told]
                without = f" (without memory {said[1]})" if len(said) > 1 else ""
                lines.append(f"? {key}  told {said[0]}{without}, right is v{rows['answers'][number][place]}")
            text = f"{source.describe(number, 0)}\n\n" + "\n".join(lines) + "\n"
            (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
