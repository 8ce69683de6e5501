"""The branch that classifies text: labelled texts, their tokenizer, and a network that tells their classes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save_file

from bottega.core.errors import DataError, UsageError
from bottega.core.types import Models
from bottega.data.prepare.prepared import Prepared
from bottega.data.sources.given import GivenData
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes
from bottega.data.text.labelled import LabelledTexts, TextForm, labelled_texts, learnt_classes, rare_classes
from bottega.data.text.tokenizer import Tokenizer
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.models.text_classifier.config import EncoderShape, KimShape, PretrainedShape, TextClassifierShape
from bottega.models.text_classifier.pretrained import export_pretrained, pretrained_shape
from bottega.storage.durable import writing_folder
from bottega.tasks.classify.config import ClassifyRecipe
from bottega.tasks.classify.objective import Objective, counts_all_classes
from bottega.tasks.classify.predict import predict_texts
from bottega.tasks.classify.prepare import prepare_classify
from bottega.tasks.classify.task import Classification
from bottega.tasks.classify.teller import Teller
from bottega.tasks.from_tables import TableBranch
from bottega.tasks.kept import NotKept, read_kept
from bottega.tasks.prediction import NewSamples
from bottega.tasks.start import folder_of, tokenizer_of

CLASSES, SHAPE, CONFIG = "classes.json", "shape.json", "config.json"
MODEL_TYPE = "bottega-text-classifier"
_SHAPES: TypeAdapter[TextClassifierShape] = TypeAdapter(TextClassifierShape)
SINGLE = ("loss", "accuracy", "macro_f1", "weighted_f1", "ece", "auroc")
SEVERAL = ("loss", "exact_match", "label_accuracy", "macro_f1", "weighted_f1", "ece", "auroc")


def prepare(recipe: ClassifyRecipe, *, say: Callable[[str, int, int], None]) -> TextClassifyBranch:
    prepared = _prepared(recipe, say)
    classes = learnt_classes(prepared, counts_all=counts_all_classes(recipe))
    shape = shape_of(recipe, prepared.tokenizer.vocab_size, classes.names)

    def labels() -> np.ndarray:
        tables = [labelled_texts(prepared, name, classes=classes).labels for name in prepared.training_tables]
        return np.concatenate(tables)

    objective = Objective.of(recipe.loss, labels, classes.names)
    return TextClassifyBranch(recipe, prepared.tokenizer, classes, shape, objective, prepared=prepared)


def reopen(recipe: ClassifyRecipe, codec: Path, fingerprint: str) -> TextClassifyBranch:
    # Shape and classes are read back: the data, or the folder that a run started from, may be gone by now.
    classes, shape, objective = _read_classes(codec), _read_shape(codec), Objective.again(recipe.loss, codec)
    return TextClassifyBranch(
        recipe, Tokenizer.load(codec), classes, shape, objective, expected=fingerprint, codec=codec
    )


def _prepared(recipe: ClassifyRecipe, say: Callable[[str, int, int], None], *, codec: Path | None = None) -> Prepared:
    spec = tokenizer_of(recipe, codec=codec)
    return prepare_classify(recipe.data, spec, seed=recipe.seed, num_classes=recipe.model.num_labels, progress=say)


@final
class TextClassifyBranch(Teller, TableBranch):
    predicts = "texts"
    unit = "texts"

    def __init__(
        self,
        recipe: ClassifyRecipe,
        tokenizer: Tokenizer,
        classes: Classes,
        shape: TextClassifierShape,
        objective: Objective,
        *,
        prepared: Prepared | None = None,
        expected: str | None = None,
        codec: Path | None = None,
    ) -> None:
        """Either with prepared data, or again from the codec of a finished run and the fingerprint it had."""
        self.recipe, self.tokenizer, self.classes, self.shape = recipe, tokenizer, classes, shape
        self.objective = objective
        self._prepared, self._expected, self._codec = prepared, expected, codec
        start = folder_of(recipe, codec=codec)
        unknown = tokenizer.unknown if recipe.model.word_dropout else None
        self.task: Classification = Classification(
            key="text",
            shape=shape,
            label_smoothing=recipe.training.label_smoothing,
            **objective.fields,
            multi_label=recipe.data.multi_label,
            word_dropout=recipe.model.word_dropout,
            unknown=unknown,
            pretrained=str(start) if start is not None else None,
        )
        self.metrics = SEVERAL if recipe.data.multi_label else SINGLE
        self.metrics += ("objective",) if self.task.is_modified else ()

    @property
    def notes(self) -> list[str]:
        return [*super().notes, *rare_classes(self.prepared, self.classes), *self._cut(), *self._unasked()]

    def _unasked(self) -> list[str]:
        """What the recipe says and what happens in its place."""
        model, tokenizer = self.recipe.model, self.recipe.data.tokenizer
        found = []
        if model.kind == "pretrained" and "kind" in tokenizer.model_fields_set and tokenizer.kind != "pretrained":
            found.append(f"data.tokenizer.kind: {tokenizer.kind} is not used: {model.from_} brings its own tokenizer")
        if self.recipe.data.multi_label and self.recipe.evaluation.metric == "exact_match":
            found.append(
                "evaluation.metric: of several labels, exact_match (all labels of a text right) keeps the best"
            )
        return found

    def _cut(self) -> list[str]:
        """How many training texts are longer than what the model reads."""
        form = TextForm.of_meta(self.prepared.meta, sequence_length=self.length)
        lengths = [self.prepared.table(name).lengths("input_ids") for name in self.prepared.training_tables]
        cut, count = sum(map(form.num_cut, lengths)), sum(map(len, lengths))
        return [f"{cut:,} of {count:,} texts are cut at {form.longest} tokens: data.sequence_length"] if cut else []

    @property
    def length(self) -> int | None:
        """Ids of the longest text that the model reads."""
        limits = [n for n in (self.recipe.data.sequence_length, self.shape.max_positions) if n is not None]
        return min(limits, default=None)

    def prepare_again(self, recipe: ClassifyRecipe) -> Prepared:
        return _prepared(recipe, lambda stage, done, total: None, codec=self._codec)

    def table(self, name: str, *, is_training: bool) -> LabelledTexts:
        return self._texts(self.prepared, name)

    def other(self, given: GivenData) -> Source:
        """Other texts through this run's own tokenizer, with the classes that it has learnt."""
        data = given.section(self.recipe.data)
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(Path(folder))
            prepared = prepare_classify(
                data.model_copy(update={"augmentation": None, "deduplicate": None}),
                TokenizerSpec(kind="pretrained", path=folder),
                seed=self.recipe.seed,
                progress=lambda stage, done, total: None,
            )
        return self._texts(prepared, given.table)

    def _texts(self, prepared: Prepared, table: str) -> LabelledTexts:
        return labelled_texts(prepared, table, classes=self.classes, sequence_length=self.length)

    def save_codec(self, folder: Path) -> None:
        """Once, whole or not at all."""
        try:
            before = (_read_shape(folder), _read_classes(folder), Tokenizer.load(folder).fingerprint)
        except (NotKept, OSError, DataError):
            before = None  # it is written again
        if before is not None:
            if before != (self.shape, self.classes, self.tokenizer.fingerprint):
                raise DataError("the data gives another tokenizer or other classes than this run has; use --fresh")
            return
        with writing_folder(folder) as temporary:
            self.tokenizer.save(temporary)
            (temporary / CLASSES).write_text(json.dumps(self.classes.names, indent=1) + "\n")
            (temporary / SHAPE).write_text(self.shape.model_dump_json(indent=1) + "\n")
            self.objective.save(temporary)

    def predict_new(self, models: Models, new: NewSamples, *, device: Any) -> list[dict[str, Any]]:
        return predict_texts(self, models, new, device=device)

    @torch.no_grad()
    def predict(self, models: Models, texts: Sequence[str], *, device: Any, batch_size: int = 128) -> np.ndarray:
        """How likely each class is of each text: float32 [n, K], in the order of the texts.

        Each row adds up to 1, or each number stands for itself where a text may have several classes.
        """
        form = TextForm.of(self.tokenizer, sequence_length=self.length)
        ids = self._ids(texts)
        found = np.zeros((len(ids), len(self.classes)), np.float32)
        # Texts of like lengths together: a batch is as long as its longest.
        order = np.argsort([len(one) for one in ids], kind="stable")
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            batch = {k: torch.from_numpy(v).to(device) for k, v in form.batch([ids[i] for i in chosen]).items()}
            logits = self.task.predict(models, batch).float()
            found[chosen] = (logits.sigmoid() if self.task.multi_label else logits.softmax(dim=1)).cpu().numpy()
        return found

    def num_cut(self, texts: Sequence[str]) -> tuple[int, int | None]:
        """How many of these texts are longer than what the model reads, and how much that is."""
        form = TextForm.of(self.tokenizer, sequence_length=self.length)
        return form.num_cut(np.array([len(one) for one in self._ids(texts)])), form.longest

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(one) for one in self.tokenizer.encode_documents(list(texts))]

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """The layout of transformers where the model is one of its own; else config.json, which says all that decides the
        network, and model.safetensors. The tokenizer lies beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(folder)
        state = {name: tensor.detach().contiguous().cpu() for name, tensor in models["model"].state_dict().items()}
        if isinstance(self.shape, PretrainedShape):
            export_pretrained(state, self.shape, folder)
            return {"library_name": "transformers", "pipeline_tag": "text-classification"}
        config = {
            "model_type": MODEL_TYPE,
            "shape": self.shape.model_dump(),
            "classes": self.classes.names,
            "multi_label": self.recipe.data.multi_label,
            "sequence_length": self.length,
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return {"library_name": "bottega", "pipeline_tag": "text-classification"}


def shape_of(recipe: ClassifyRecipe, vocab_size: int, names: Sequence[str]) -> TextClassifierShape:
    """What the recipe says of the model, and the customary sizes for the rest."""
    model = recipe.model
    if model.kind == "pretrained":
        start = folder_of(recipe)
        assert start is not None, "the schema asks for it"
        shape = pretrained_shape(
            start,
            names,
            multi_label=recipe.data.multi_label,
            dropout=model.dropout,
            attention_dropout=model.attention_dropout,
        )
        for key in ("hidden_size", "num_layers", "num_heads"):
            value, actual = getattr(model, key), shape.dimension(key)
            if value is not None and actual is not None and value != actual:
                raise UsageError(f"model.{key}: {value} was asked for, and model.from has {actual}; leave it out")
        return shape
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise UsageError(
            f"model.vocab_size: {model.vocab_size} is less than the tokenizer's {vocab_size}; leave it out"
        )
    keys: tuple[str, ...] = ("embed_size", "num_filters", "filter_sizes", "dropout")
    if model.kind == "transformer":
        keys = ("hidden_size", "num_layers", "num_heads", "dropout", "attention_dropout")
    given = {key: value for key in keys if (value := getattr(model, key)) is not None}
    common = {"vocab_size": model.vocab_size or vocab_size, "num_labels": len(names)}
    if model.kind == "transformer" and recipe.data.sequence_length is not None:
        given["max_positions"] = recipe.data.sequence_length
    try:
        return EncoderShape(**common, **given) if model.kind == "transformer" else KimShape(**common, **given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"model{'.' + where if where else ''}: {first['msg'].removeprefix('Value error, ')}") from None


def _read_shape(codec: Path) -> TextClassifierShape:
    return read_kept(codec / SHAPE, _SHAPES.validate_json)


def _read_classes(codec: Path) -> Classes:
    return read_kept(codec / CLASSES, lambda raw: Classes(tuple(map(str, json.loads(raw)))))
