"""The routing branch: rows of numbers with a label each, and a model that sends each row to the experts it needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from bottega.config.data import Source as SourceOptions
from bottega.config.recipe import Recipe
from bottega.core.errors import DataError, UsageError
from bottega.core.types import Models
from bottega.data.numbers.numeric_fields import read_number_rows
from bottega.data.numbers.vectors import VectorRows, fit_standardization
from bottega.data.prepare.media import prepare_vectors
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.external import ExternalData
from bottega.data.sources.samples import open_media_source
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes
from bottega.data.text.labelled import describe_rare_classes, find_training_classes
from bottega.models.experts.config import ExpertsShape
from bottega.models.routing.config import RoutingShape
from bottega.models.routing.torch import EPSILON
from bottega.models.spiking.config import SpikingShape
from bottega.models.ssm.config import SSMShape
from bottega.plots.figure import try_plot
from bottega.tasks.base_model import find_base_folder
from bottega.tasks.classify.objective import includes_unseen_classes
from bottega.tasks.measures import routing as measures
from bottega.tasks.metadata import read_metadata
from bottega.tasks.processor import FileProcessor
from bottega.tasks.routing.config import RoutingModel, RoutingRecipe, rules_problem
from bottega.tasks.routing.metadata import CONFIG, METADATA_FILE, RoutingMetadata, apply_start_scale
from bottega.tasks.routing.plots import describe_routing, draw_experts, draw_raster
from bottega.tasks.routing.predict import predict_rows
from bottega.tasks.routing.task import RoutingTask
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Predictor, Workload, headline_metrics

MODEL_TYPE = "bottega-routing"
MANY_LABELS = 10
"""Up to which it is not asked whether they are labels."""
LOOKED_AT = 2000
"""Samples that the picture of a run is drawn from."""


def prepare(recipe: Recipe, *, progress: Callable[[str, int, int], None]) -> RoutingWorkload:
    assert isinstance(recipe, RoutingRecipe)
    prepared = prepare_vectors(recipe.data, progress=progress)
    if not len(prepared.classes):
        raise DataError(
            f"{_named(recipe)}: has rows without a label, and routing learns to tell labels; "
            "name their column with data.train.label"
        )
    _check_labels(recipe, prepared)
    remedy = (
        "raise data.num_samples"
        if recipe.data.is_synthetic
        else "name another column with data.train.label, or add samples"
    )
    classes = find_training_classes(prepared, include_held_out=includes_unseen_classes(recipe), remedy=remedy)
    rows = [_rows(recipe, prepared, name, classes, is_training=False) for name in prepared.training_tables]
    mean, scale = fit_standardization(rows)
    num_rules = prepared.metadata.get("num_rules")
    known = RoutingMetadata(
        shape=resolve_routing_shape(recipe.model, num_inputs=rows[0].num_inputs, num_labels=len(classes)),
        classes=classes.names,
        num_rules=num_rules,
        mean=mean,
        scale=scale,
        has_bayes="bayes_accuracy" in prepared.metadata,
        columns=_columns_of(prepared),
    )
    _check_rules(recipe, num_rules)
    return RoutingWorkload(recipe, known, prepared=prepared)


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> RoutingWorkload:
    assert isinstance(recipe, RoutingRecipe)
    known = read_metadata(processor / METADATA_FILE, RoutingMetadata.model_validate_json)
    return RoutingWorkload(recipe, known, expected=fingerprint, processor=processor)


@final
class RoutingWorkload(Workload):
    """A router over experts that classifies rows of numbers."""

    recipe: RoutingRecipe

    def __init__(
        self,
        recipe: RoutingRecipe,
        known: RoutingMetadata,
        *,
        prepared: PreparedData | None = None,
        expected: str | None = None,
        processor: Path | None = None,
    ) -> None:
        """Either with prepared data, or again from the codec of a finished run and the fingerprint it had."""
        start = find_base_folder(recipe, processor=processor)
        if start is not None:
            known = apply_start_scale(start, known)
        self.recipe, self.metadata, self.classes = recipe, known, Classes(known.classes)
        model = recipe.model
        self.task: RoutingTask = RoutingTask(
            shape=known.shape,
            num_rules=known.num_rules,
            has_bayes=known.has_bayes,
            label_smoothing=recipe.training.label_smoothing,
            load_balancing_weight=model.load_balancing_weight,
            z_weight=model.z_weight,
            routing_loss_weight=model.routing_loss_weight,
            firing_rate=model.firing_rate,
            firing_weight=model.firing_weight,
            mean=known.mean,
            scale=known.scale,
            pretrained=str(start) if start is not None else None,
        )
        self.metrics = self.task.evaluation_metrics
        self.data = TableData(
            recipe,
            prepare=lambda recipe: prepare_vectors(recipe.data, progress=lambda stage, done, total: None),
            read_table=self._read_table,
            read_external=self._read_external,
            prepared=prepared,
            expected=expected,
            notes=self._notes,
        )
        self.processor = FileProcessor(
            METADATA_FILE,
            known.model_dump_json(indent=1) + "\n",
            parse=RoutingMetadata.model_validate_json,
            is_same=known.matches,
            mismatch="the data gives other inputs, labels or rules than this run has; use --fresh",
        )
        self.sampler = RoutingSampler(recipe, self.task, known, self.data)
        self.predictor = Predictor("rows", partial(predict_rows, self))

    @property
    def headline(self) -> tuple[str, ...]:
        return headline_metrics(
            self.recipe, *("loss", "accuracy", "bayes_accuracy", "load_entropy", "rule_information", "firing_rate")
        )

    def _notes(self, prepared: PreparedData) -> list[str]:
        left_out = [
            f"column {name!r} holds no numbers and is left out"
            for name in prepared.metadata.get("left_out_columns", ())
        ]
        return [*left_out, *describe_rare_classes(prepared, self.classes)]

    def _read_table(self, prepared: PreparedData, name: str, *, is_training: bool) -> Source:
        return self._checked(_rows(self.recipe, prepared, name, self.classes, is_training=is_training), name)

    def _read_external(self, external: ExternalData) -> Source:
        """Other rows with the labels of this run's own."""
        path = external.path
        recipe = self.recipe.model_copy(update={"data": external.replace_in(self.recipe.data)})
        prepared = prepare_vectors(recipe.data, progress=lambda stage, done, total: None)
        self.metadata.check_columns(_columns_of(prepared), path)
        return self._checked(_rows(recipe, prepared, external.table, self.classes, is_training=False), path)

    def _checked(self, rows: VectorRows, where: str) -> VectorRows:
        if rows.num_inputs != self.metadata.shape.num_inputs:
            raise DataError(
                f"{where}: its rows have {rows.num_inputs} numbers, and this run has learnt from "
                f"{self.metadata.shape.num_inputs}; give it the same columns"
            )
        self._check_rules(rows)
        return rows

    def _check_rules(self, rows: VectorRows) -> None:
        """Only the loss on the right expert needs one for each rule; measures count whatever rules there are."""
        experts = self.metadata.shape.experts.num_experts
        if rows.rules is None or not self.recipe.model.routing_loss_weight or int(rows.rules.max()) < experts:
            return
        first = int(np.argmax(rows.rules >= experts))
        key = rows.table.row("key", first) if rows.table is not None else f"row {first}"
        raise DataError(
            f"{key}: has rule {rows.rules[first]}, and this run has {experts} experts, one for each of the rules 0 to "
            f"{experts - 1}; leave such rows out, or the column"
        )

    @torch.no_grad()
    def predict(self, models: Models, rows: np.ndarray, *, device: Any, batch_size: int = 1024) -> np.ndarray:
        """How likely each label is of each row of numbers: float32 [n, K]."""
        return self.predict_with_experts(models, rows, device=device, batch_size=batch_size)[0]

    @torch.no_grad()
    def predict_with_experts(
        self, models: Models, rows: np.ndarray, *, device: Any, batch_size: int = 1024
    ) -> tuple[np.ndarray, np.ndarray]:
        """How likely each label is, float32 [n, K], and the experts that were asked, the first one first [n, k]."""
        wanted = self.metadata.shape.num_inputs
        if rows.ndim != 2 or rows.shape[1] != wanted:
            raise UsageError(f"this run reads rows of {wanted} numbers [n, {wanted}], not {list(rows.shape)}")
        found = [np.zeros((0, len(self.classes)), np.float32)]
        chosen = [np.zeros((0, self.metadata.shape.experts.top_k), np.int64)]
        for first in range(0, len(rows), batch_size):
            part = np.ascontiguousarray(rows[first : first + batch_size], np.float32)
            out = self.task.predict(models, torch.from_numpy(part).to(device))
            found.append(out.logits.float().softmax(1).cpu().numpy())
            chosen.append(out.routing.chosen.cpu().numpy())
        return np.concatenate(found), np.concatenate(chosen)

    def read_rows(self, path: str | list[str]) -> tuple[list[str], np.ndarray]:
        """Rows of numbers to be told, with their names; they need no label."""
        said = self.recipe.data.train.model_dump(include={"field", "label", "columns", "delimiter"})
        return read_number_rows(SourceOptions(path=path, **said), self.metadata.columns)

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """config.json and model.safetensors; no library knows this network, so the first says all that decides it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": MODEL_TYPE, **self.metadata.model_dump()}
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        state = {name: tensor.detach().contiguous().cpu() for name, tensor in models["model"].state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return {"library_name": "bottega", "pipeline_tag": "tabular-classification"}


@final
class RoutingSampler(Sampler):
    """A description and plots of how held-out samples are routed."""

    def __init__(self, recipe: RoutingRecipe, task: RoutingTask, metadata: RoutingMetadata, data: TableData) -> None:
        self.recipe, self.task, self.metadata, self.data = recipe, task, metadata, data

    @torch.no_grad()
    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """What the router does with held-out samples: in words, and as pictures where they can be drawn."""
        held_out = self.data.validation()
        source = held_out or self.data.training()
        index = np.arange(min(LOOKED_AT, len(source)))
        rows = source.rows(index, np.zeros(len(index), np.int64))
        size = self.recipe.evaluation.batch_size or self.recipe.training.batch_size
        parts = [
            self.task.predict(models, torch.from_numpy(rows["x"][at : at + size]).to(device))
            for at in range(0, len(index), size)
        ]
        chosen = torch.cat([part.routing.chosen for part in parts]).cpu().numpy()
        found = torch.cat([part.logits for part in parts]).argmax(1).cpu().numpy()
        experts, rule = self.metadata.shape.experts.num_experts, rows.get("rule")
        counts = None
        if rule is not None and self.metadata.num_rules is not None and experts > 1:
            counts = measures.count_rule_experts(
                rule, chosen[:, 0], num_rules=self.metadata.num_rules, num_experts=experts
            )
        load = measures.expert_load(chosen, experts)
        spikes = parts[0].spikes
        text = describe_routing(
            accuracy=float((found == rows["label"]).mean()),
            bayes=float(rows["bayes"].mean()) if "bayes" in rows else None,
            samples=f"{_some(len(index), len(source))} {'held-out' if held_out else 'training'} samples{_step_of(folder)}",
            load=load,
            counts=counts,
            top_k=chosen.shape[1],
            firing=_fired([part.spikes for part in parts if part.spikes is not None]),
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "00.txt").write_text(text + "\n", encoding="utf-8")
        if experts > 1:
            try_plot(partial(draw_experts, load, counts, top_k=chosen.shape[1]), folder / "experts.png")
        if spikes is not None:
            num_layers = self.metadata.shape.num_layers
            try_plot(partial(draw_raster, spikes.cpu().numpy(), num_layers), folder / "spikes.png")


def resolve_routing_shape(model: RoutingModel, *, num_inputs: int, num_labels: int) -> RoutingShape:
    """What the recipe says of the model, with what its data says."""
    spiking = SpikingShape(
        time_steps=model.time_steps,
        threshold=model.spike_threshold if model.spike_threshold is not None else 1.0,
        leak=model.leak,
        refractory=model.refractory,
        adaptation=model.adaptation,
        surrogate=model.surrogate,
    )
    try:
        experts = ExpertsShape(
            hidden_size=model.hidden_size,
            expert_size=model.expert_size,
            num_experts=model.num_experts,
            top_k=model.top_k,
            gate=model.gate,
            num_shared=model.shared_experts,
            capacity_factor=model.capacity_factor,
            capacity=model.expert_capacity,
            expert_dropout=model.expert_dropout,
            balance=model.balance,
            router=model.router,
            spiking=spiking if model.router == "spiking" else None,
        )
    except ValidationError as error:
        raise UsageError(f"model: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    is_spiking = model.spike_threshold is not None
    trunk: Any = "spiking" if is_spiking else model.trunk
    return RoutingShape(
        num_inputs=num_inputs,
        num_labels=num_labels,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        dropout=model.dropout or 0.0,
        trunk=trunk,
        activation=model.activation or "silu",
        experts=experts,
        spiking=spiking if is_spiking else None,
        ssm=_ssm_of(model) if trunk == "state_space" else None,
        token_size=model.token_size,
    )


def _ssm_of(model: RoutingModel) -> SSMShape:
    """With the names and values that the language model gives the same layers."""
    channels = model.hidden_size * (model.expand or 2)
    named = {"state_size": model.state_size, "expand": model.expand, "conv_size": model.conv_size}
    given = {name: value for name, value in named.items() if value is not None}
    try:
        return SSMShape(
            hidden_size=model.hidden_size,
            head_size=model.ssm_head_size or min(64, channels),
            norm_epsilon=EPSILON,
            **given,
        )
    except ValidationError as error:
        raise UsageError(f"model: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _check_labels(recipe: RoutingRecipe, prepared: PreparedData) -> None:
    """A number that nearly every row has of its own is a measurement, or a name."""
    rows, labels = sum(counts["rows"] for counts in prepared.tables.values()), len(prepared.classes)
    if not recipe.data.is_synthetic and labels > MANY_LABELS and 2 * labels > rows:
        raise DataError(
            f"{_named(recipe)}: its {rows:,} rows have {labels:,} labels; is that column the label? name the right one with "
            "data.train.label"
        )


def _check_rules(recipe: RoutingRecipe, num_rules: int | None) -> None:
    model = recipe.model
    if not model.routing_loss_weight:
        return
    asked = f"model.routing_loss_weight: {model.routing_loss_weight}"
    if num_rules is None:
        raise UsageError(
            f"{asked} needs to know the right expert, and {_named(recipe)} has no column rule; set it to 0"
        )
    problem = rules_problem(model, num_rules)
    if problem is not None:
        raise UsageError(f"model.num_experts: {problem}")


def _fired(spikes: Sequence[torch.Tensor]) -> float | None:
    """The mean over all samples, whatever batches they came in."""
    return float(sum(one.sum() for one in spikes)) / sum(one.numel() for one in spikes) if spikes else None


def _some(number: int, total: int) -> str:
    return f"{number:,}" if number == total else f"the first {number:,} of {total:,}"


def _step_of(folder: Path) -> str:
    """A sample lies in the folder of its step, and below it where there are several tasks."""
    step = next((part.removeprefix("step-") for part in reversed(folder.parts) if part.startswith("step-")), "")
    return f" at step {int(step):,}" if step.isdecimal() else ""


def _columns_of(prepared: PreparedData) -> tuple[str, ...] | None:
    names = prepared.metadata.get("input_columns")
    return None if names is None else tuple(names)


def _named(recipe: RoutingRecipe) -> str:
    sources = recipe.data.sources or (recipe.data.train,)
    return ", ".join(one.path for one in sources if one.path is not None) or "data.train"


def _rows(
    recipe: RoutingRecipe, prepared: PreparedData, name: str, classes: Classes, *, is_training: bool
) -> VectorRows:
    rows = open_media_source(recipe, prepared, name, is_training=is_training, classes=classes)
    assert isinstance(rows, VectorRows)
    return rows
