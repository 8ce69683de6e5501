"""The routing workload: labelled rows of numbers, classified by a mixture of experts."""

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
from bottega.config.error_messages import format_shape_error
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
from bottega.tasks.metadata import read_metadata
from bottega.tasks.metrics.routing import count_rule_experts, expert_load
from bottega.tasks.processor import FileProcessor
from bottega.tasks.routing.config import RoutingModel, RoutingRecipe, describe_rules_problem
from bottega.tasks.routing.metadata import CONFIG_FILE, METADATA_FILE, RoutingMetadata, apply_pretrained_scale
from bottega.tasks.routing.plots import describe_routing, draw_experts, draw_raster
from bottega.tasks.routing.predict import predict_rows
from bottega.tasks.routing.task import RoutingTask
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Predictor, Workload, choose_headline_metrics

MODEL_TYPE = "bottega-routing"
MAX_UNCHECKED_LABELS = 10
"""Up to this number of labels, the label column is not checked for being a measurement or an id."""
MAX_PLOTTED_SAMPLES = 2000
"""Samples that the report and the plots of a run are computed from."""


def open_workload(recipe: Recipe, *, progress: Callable[[str, int, int], None]) -> RoutingWorkload:
    """Prepare the rows, fit their standardization and open the workload."""
    assert isinstance(recipe, RoutingRecipe)
    prepared = prepare_vectors(recipe.data, progress=progress)
    if not len(prepared.classes):
        raise DataError(
            f"{_describe_data(recipe)}: its rows have no labels, but routing is trained on labelled rows; "
            "set data.train.label to the column of the labels"
        )
    _check_labels(recipe, prepared)
    remedy = (
        "raise data.num_samples"
        if recipe.data.is_synthetic
        else "set data.train.label to another column, or add samples"
    )
    classes = find_training_classes(prepared, include_held_out=includes_unseen_classes(recipe), remedy=remedy)
    rows = [_open_rows(recipe, prepared, name, classes, is_training=False) for name in prepared.training_tables]
    mean, scale = fit_standardization(rows)
    num_rules = prepared.metadata.get("num_rules")
    metadata = RoutingMetadata(
        shape=resolve_routing_shape(recipe.model, num_inputs=rows[0].num_inputs, num_labels=len(classes)),
        classes=classes.names,
        num_rules=num_rules,
        mean=mean,
        scale=scale,
        has_bayes="bayes_accuracy" in prepared.metadata,
        columns=_read_input_columns(prepared),
    )
    _check_num_rules(recipe, num_rules)
    return RoutingWorkload(recipe, metadata, prepared=prepared)


def reopen_workload(recipe: Recipe, processor_folder: Path, fingerprint: str) -> RoutingWorkload:
    """Open the workload of a finished run from the folder of its saved processor."""
    assert isinstance(recipe, RoutingRecipe)
    metadata = read_metadata(processor_folder / METADATA_FILE, RoutingMetadata.model_validate_json)
    return RoutingWorkload(recipe, metadata, expected_fingerprint=fingerprint, processor_folder=processor_folder)


@final
class RoutingWorkload(Workload):
    """A router over experts that classifies rows of numbers."""

    recipe: RoutingRecipe

    def __init__(
        self,
        recipe: RoutingRecipe,
        metadata: RoutingMetadata,
        *,
        prepared: PreparedData | None = None,
        expected_fingerprint: str | None = None,
        processor_folder: Path | None = None,
    ) -> None:
        """Open with `prepared` data, or reopen from a finished run's `processor_folder` and its data fingerprint."""
        base_folder = find_base_folder(recipe, processor_folder=processor_folder)
        if base_folder is not None:
            metadata = apply_pretrained_scale(base_folder, metadata)
        self.recipe, self.metadata, self.classes = recipe, metadata, Classes(metadata.classes)
        model = recipe.model
        self.task: RoutingTask = RoutingTask(
            shape=metadata.shape,
            num_rules=metadata.num_rules,
            has_bayes=metadata.has_bayes,
            label_smoothing=recipe.training.label_smoothing,
            load_balancing_weight=model.load_balancing_weight,
            z_weight=model.z_weight,
            routing_loss_weight=model.routing_loss_weight,
            firing_rate=model.firing_rate,
            firing_weight=model.firing_weight,
            mean=metadata.mean,
            scale=metadata.scale,
            pretrained=str(base_folder) if base_folder is not None else None,
        )
        self.metrics = self.task.evaluation_metrics
        self.data = TableData(
            recipe,
            prepare=lambda recipe: prepare_vectors(recipe.data, progress=lambda stage, done, total: None),
            read_table=self._read_table,
            read_external=self._read_external,
            prepared=prepared,
            expected_fingerprint=expected_fingerprint,
            notes=self._collect_notes,
        )
        self.processor = FileProcessor(
            METADATA_FILE,
            metadata.model_dump_json(indent=1) + "\n",
            parse=RoutingMetadata.model_validate_json,
            is_same=metadata.matches,
            mismatch="the inputs, labels or rules of the data differ from those of this run; start over with --fresh",
        )
        self.sampler = RoutingSampler(recipe, self.task, metadata, self.data)
        self.predictor = Predictor("rows", partial(predict_rows, self))

    @property
    def headline(self) -> tuple[str, ...]:
        return choose_headline_metrics(
            self.recipe, *("loss", "accuracy", "bayes_accuracy", "load_entropy", "rule_information", "firing_rate")
        )

    def _collect_notes(self, prepared: PreparedData) -> list[str]:
        left_out = [
            f"column {name!r} is not numeric and is left out" for name in prepared.metadata.get("left_out_columns", ())
        ]
        return [*left_out, *describe_rare_classes(prepared, self.classes)]

    def _read_table(self, prepared: PreparedData, name: str, *, is_training: bool) -> Source:
        return self._check_rows(_open_rows(self.recipe, prepared, name, self.classes, is_training=is_training), name)

    def _read_external(self, external: ExternalData) -> Source:
        """Read external rows with the columns and labels of this run."""
        path = external.path
        recipe = self.recipe.model_copy(update={"data": external.replace_in(self.recipe.data)})
        prepared = prepare_vectors(recipe.data, progress=lambda stage, done, total: None)
        self.metadata.check_columns(_read_input_columns(prepared), path)
        return self._check_rows(_open_rows(recipe, prepared, external.table, self.classes, is_training=False), path)

    def _check_rows(self, rows: VectorRows, where: str) -> VectorRows:
        if rows.num_inputs != self.metadata.shape.num_inputs:
            raise DataError(
                f"{where}: its rows have {rows.num_inputs} numbers, but this run was trained on rows of "
                f"{self.metadata.shape.num_inputs}; give it the same columns"
            )
        self._check_rules(rows)
        return rows

    def _check_rules(self, rows: VectorRows) -> None:
        """Raise DataError if the routing loss is used and a rule has no expert; metrics accept any rules."""
        num_experts = self.metadata.shape.experts.num_experts
        if rows.rules is None or not self.recipe.model.routing_loss_weight or int(rows.rules.max()) < num_experts:
            return
        row = int(np.argmax(rows.rules >= num_experts))
        key = rows.table.row("key", row) if rows.table is not None else f"row {row}"
        raise DataError(
            f"{key}: has rule {rows.rules[row]}, but this run has {num_experts} experts, for the rules 0 to {num_experts - 1}; "
            "remove such rows, or the column 'rule'"
        )

    @torch.no_grad()
    def predict(self, models: Models, rows: np.ndarray, *, device: Any, batch_size: int = 1024) -> np.ndarray:
        """Return the label probabilities of each row of numbers, float32 (n, labels)."""
        return self.predict_with_experts(models, rows, device=device, batch_size=batch_size)[0]

    @torch.no_grad()
    def predict_with_experts(
        self, models: Models, rows: np.ndarray, *, device: Any, batch_size: int = 1024
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the label probabilities, float32 (n, labels), and the chosen experts, best first, (n, top_k)."""
        num_inputs = self.metadata.shape.num_inputs
        if rows.ndim != 2 or rows.shape[1] != num_inputs:
            raise UsageError(
                f"expected an array of shape (n, {num_inputs}), as this run was trained on; got {rows.shape}"
            )
        probabilities = [np.zeros((0, len(self.classes)), np.float32)]
        chosen = [np.zeros((0, self.metadata.shape.experts.top_k), np.int64)]
        for start in range(0, len(rows), batch_size):
            chunk = np.ascontiguousarray(rows[start : start + batch_size], np.float32)
            out = self.task.predict(models, torch.from_numpy(chunk).to(device))
            probabilities.append(out.logits.float().softmax(1).cpu().numpy())
            chosen.append(out.routing.chosen.cpu().numpy())
        return np.concatenate(probabilities), np.concatenate(chosen)

    def read_rows(self, path: str | list[str]) -> tuple[list[str], np.ndarray]:
        """Return the names and the numbers of the rows in a table; they need no label."""
        options = self.recipe.data.train.model_dump(include={"field", "label", "columns", "delimiter"})
        return read_number_rows(SourceOptions(path=path, **options), self.metadata.columns)

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write model.safetensors and a config.json that describes the network in full, since no other library implements it."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": MODEL_TYPE, **self.metadata.model_dump()}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
        state = {name: tensor.detach().contiguous().cpu() for name, tensor in models["model"].state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return {"library_name": "bottega", "pipeline_tag": "tabular-classification"}


@final
class RoutingSampler(Sampler):
    """Writes a report and plots of how held-out samples are routed."""

    def __init__(self, recipe: RoutingRecipe, task: RoutingTask, metadata: RoutingMetadata, data: TableData) -> None:
        self.recipe, self.task, self.metadata, self.data = recipe, task, metadata, data

    @torch.no_grad()
    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Write 00.txt, experts.png if there are several experts, and spikes.png if the trunk has spiking units."""
        held_out = self.data.validation()
        source = held_out or self.data.training()
        index = np.arange(min(MAX_PLOTTED_SAMPLES, len(source)))
        rows = source.rows(index, np.zeros(len(index), np.int64))
        batch_size = self.recipe.evaluation.batch_size or self.recipe.training.batch_size
        outputs = [
            self.task.predict(models, torch.from_numpy(rows["x"][start : start + batch_size]).to(device))
            for start in range(0, len(index), batch_size)
        ]
        chosen = torch.cat([out.routing.chosen for out in outputs]).cpu().numpy()
        predicted = torch.cat([out.logits for out in outputs]).argmax(1).cpu().numpy()
        num_experts, rule = self.metadata.shape.experts.num_experts, rows.get("rule")
        counts = None
        if rule is not None and self.metadata.num_rules is not None and num_experts > 1:
            counts = count_rule_experts(rule, chosen[:, 0], num_rules=self.metadata.num_rules, num_experts=num_experts)
        load = expert_load(chosen, num_experts)
        spikes = outputs[0].spikes
        text = describe_routing(
            accuracy=float((predicted == rows["label"]).mean()),
            bayes_accuracy=float(rows["bayes"].mean()) if "bayes" in rows else None,
            samples=f"{_format_count(len(index), len(source))} {'held-out' if held_out else 'training'} samples{_format_step(folder)}",
            load=load,
            counts=counts,
            top_k=chosen.shape[1],
            firing_rate=_compute_firing_rate([out.spikes for out in outputs if out.spikes is not None]),
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "00.txt").write_text(text + "\n", encoding="utf-8")
        if num_experts > 1:
            try_plot(partial(draw_experts, load, counts, top_k=chosen.shape[1]), folder / "experts.png")
        if spikes is not None:
            num_layers = self.metadata.shape.num_layers
            try_plot(partial(draw_raster, spikes.cpu().numpy(), num_layers), folder / "spikes.png")


def resolve_routing_shape(model: RoutingModel, *, num_inputs: int, num_labels: int) -> RoutingShape:
    """Return the dimensions of the network, from the recipe and the data."""
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
        renamed = {"num_shared": "shared_experts", "capacity": "expert_capacity"}
        raise UsageError(format_shape_error(error, keys_by_field=renamed)) from None
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
        ssm=_resolve_ssm_shape(model) if trunk == "state_space" else None,
        token_size=model.token_size,
    )


def _resolve_ssm_shape(model: RoutingModel) -> SSMShape:
    """Return the dimensions of the state-space layers; defaults are those of a language model."""
    channels = model.hidden_size * (model.expand or 2)
    options = {"state_size": model.state_size, "expand": model.expand, "conv_size": model.conv_size}
    sizes = {name: value for name, value in options.items() if value is not None}
    try:
        return SSMShape(
            hidden_size=model.hidden_size,
            head_size=model.ssm_head_size or min(64, channels),
            norm_epsilon=EPSILON,
            **sizes,
        )
    except ValidationError as error:
        raise UsageError(format_shape_error(error, keys_by_field={"head_size": "ssm_head_size"})) from None


def _check_labels(recipe: RoutingRecipe, prepared: PreparedData) -> None:
    """Raise DataError if most rows have a label of their own, which is then a measurement or an id."""
    num_rows, num_labels = sum(counts["rows"] for counts in prepared.tables.values()), len(prepared.classes)
    if not recipe.data.is_synthetic and num_labels > MAX_UNCHECKED_LABELS and 2 * num_labels > num_rows:
        raise DataError(
            f"{_describe_data(recipe)}: {num_rows:,} rows have {num_labels:,} different labels, so this column is probably not the "
            "label; set data.train.label to the right one"
        )


def _check_num_rules(recipe: RoutingRecipe, num_rules: int | None) -> None:
    model = recipe.model
    if not model.routing_loss_weight:
        return
    if num_rules is None:
        raise UsageError(
            f"model.routing_loss_weight: {model.routing_loss_weight} needs the correct expert of each row, but "
            f"{_describe_data(recipe)} has no column 'rule'; add it, or set model.routing_loss_weight=0"
        )
    problem = describe_rules_problem(model, num_rules)
    if problem is not None:
        raise UsageError(f"model.num_experts: {problem}")


def _compute_firing_rate(spikes: Sequence[torch.Tensor]) -> float | None:
    """Return the mean over all samples of all batches of spikes, (steps, batch, units) each; None without spikes."""
    return float(sum(batch.sum() for batch in spikes)) / sum(batch.numel() for batch in spikes) if spikes else None


def _format_count(number: int, total: int) -> str:
    return f"{number:,}" if number == total else f"the first {number:,} of {total:,}"


def _format_step(folder: Path) -> str:
    """Return " at step N" from the name of the samples folder, or of its parent in a multitask run."""
    step = next((part.removeprefix("step-") for part in reversed(folder.parts) if part.startswith("step-")), "")
    return f" at step {int(step):,}" if step.isdecimal() else ""


def _read_input_columns(prepared: PreparedData) -> tuple[str, ...] | None:
    names = prepared.metadata.get("input_columns")
    return None if names is None else tuple(names)


def _describe_data(recipe: RoutingRecipe) -> str:
    sources = recipe.data.sources or (recipe.data.train,)
    return ", ".join(source.path for source in sources if source.path is not None) or "data.train"


def _open_rows(
    recipe: RoutingRecipe, prepared: PreparedData, name: str, classes: Classes, *, is_training: bool
) -> VectorRows:
    rows = open_media_source(recipe, prepared, name, is_training=is_training, classes=classes)
    assert isinstance(rows, VectorRows)
    return rows
