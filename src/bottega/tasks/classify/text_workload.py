"""The workload of text classifiers: labelled texts, their tokenizer, and n-grams, an encoder, Kim's CNN or a pretrained model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
from pydantic import TypeAdapter

from bottega.core.errors import DataError
from bottega.core.types import Models, Rows
from bottega.data.prepare.labels import COPY
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes, read_text_column
from bottega.data.tables.shards import Table
from bottega.data.text.labelled import (
    LabelledTexts,
    TextCollator,
    describe_rare_classes,
    encode_labels,
    find_training_classes,
    open_labelled_texts,
)
from bottega.data.text.ngram_spec import NgramSpec
from bottega.data.text.ngrams import IDF_FILE, NgramWeighting
from bottega.data.text.tokenizer import Tokenizer
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.models.folders.weights_file import save_weights
from bottega.models.text_classifier.config import PretrainedShape, TextClassifierShape
from bottega.tasks.base_model import find_base_folder, resolve_tokenizer_spec
from bottega.tasks.classify.baseline import fit_linear_baseline
from bottega.tasks.classify.config import ClassifyRecipe
from bottega.tasks.classify.objective import Objective, includes_unseen_classes
from bottega.tasks.classify.predict import predict_texts
from bottega.tasks.classify.prediction_tables import build_prediction_tables
from bottega.tasks.classify.prepare import prepare_classify
from bottega.tasks.classify.task import Classification
from bottega.tasks.classify.text_shape import resolve_text_classifier_shape
from bottega.tasks.metadata import MetadataUnreadable, read_metadata
from bottega.tasks.processor import FolderProcessor
from bottega.tasks.sampler import NoSampler
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Baseline, Predictor, Workload

CLASSES_FILE, SHAPE_FILE, CONFIG_FILE = "classes.json", "shape.json", "config.json"
MODEL_TYPE = "bottega-text-classifier"
_SHAPE_ADAPTER: TypeAdapter[TextClassifierShape] = TypeAdapter(TextClassifierShape)
SINGLE_LABEL_METRICS = ("loss", "accuracy", "macro_f1", "weighted_f1", "ece", "auroc")
MULTI_LABEL_METRICS = ("loss", "exact_match", "label_accuracy", "macro_f1", "weighted_f1", "ece", "auroc")


def open_workload(recipe: ClassifyRecipe, *, progress: Callable[[str, int, int], None]) -> TextClassifyWorkload:
    """Prepare the labelled texts and open the workload."""
    prepared = _prepare_texts(recipe, progress)
    classes = find_training_classes(prepared, include_held_out=includes_unseen_classes(recipe))
    shape = resolve_text_classifier_shape(recipe, prepared.tokenizer.vocab_size, classes.names)

    def read_labels() -> np.ndarray:
        labels = [open_labelled_texts(prepared, name, classes=classes).labels for name in prepared.training_tables]
        return np.concatenate(labels)

    objective = Objective.from_options(recipe.loss, read_labels, classes.names)
    ngrams = _fit_ngrams(prepared, recipe.model.ngrams)
    return TextClassifyWorkload(recipe, prepared.tokenizer, classes, shape, objective, ngrams=ngrams, prepared=prepared)


def _fit_ngrams(prepared: PreparedData, spec: NgramSpec | None) -> NgramWeighting | None:
    """Return the weights of n-grams by their frequency in the training texts, if the model reads n-grams."""
    if spec is None:
        return None
    tables = [prepared.table(name) for name in prepared.training_tables]
    return NgramWeighting.fit(spec, (table.values("ngrams") for table in tables), sum(map(len, tables)))


def reopen_workload(recipe: ClassifyRecipe, processor_folder: Path, fingerprint: str) -> TextClassifyWorkload:
    """Open the workload of a finished run from the folder of its saved processor."""
    # Shape and classes are read from that folder: the data, or the model that the run started from, may be gone.
    classes, shape = _read_classes(processor_folder), _read_shape(processor_folder)
    objective = Objective.load(recipe.loss, processor_folder)
    spec = recipe.model.ngrams
    ngrams = None if spec is None else _read_ngrams(spec, processor_folder)
    return TextClassifyWorkload(
        recipe,
        Tokenizer.load(processor_folder),
        classes,
        shape,
        objective,
        ngrams=ngrams,
        expected_fingerprint=fingerprint,
        processor_folder=processor_folder,
    )


def _prepare_texts(
    recipe: ClassifyRecipe, progress: Callable[[str, int, int], None], *, processor_folder: Path | None = None
) -> PreparedData:
    spec = resolve_tokenizer_spec(recipe, processor_folder=processor_folder)
    return prepare_classify(
        recipe.data,
        spec,
        seed=recipe.seed,
        num_classes=recipe.model.num_labels,
        ngrams=recipe.model.ngrams,
        progress=progress,
    )


@final
class TextClassifyWorkload(Workload):
    """A classifier of texts."""

    unit = "texts"
    data: TableData

    def __init__(
        self,
        recipe: ClassifyRecipe,
        tokenizer: Tokenizer,
        classes: Classes,
        shape: TextClassifierShape,
        objective: Objective,
        *,
        ngrams: NgramWeighting | None = None,
        prepared: PreparedData | None = None,
        expected_fingerprint: str | None = None,
        processor_folder: Path | None = None,
    ) -> None:
        """Open with `prepared` data, or reopen from a finished run's `processor_folder` and its data fingerprint."""
        self.recipe, self.tokenizer, self.classes, self.shape = recipe, tokenizer, classes, shape
        self.objective, self.ngrams = objective, ngrams
        self._processor_folder = processor_folder
        base_folder = find_base_folder(recipe, processor_folder=processor_folder)
        word_dropout = recipe.model.word_dropout if recipe.model.kind != "ngrams" else 0.0
        unknown = tokenizer.unk_token_id if word_dropout else None
        self.task: Classification = Classification(
            key="text",
            shape=shape,
            label_smoothing=recipe.training.label_smoothing,
            **objective.task_fields,
            multi_label=recipe.data.multi_label,
            word_dropout=word_dropout,
            unknown=unknown,
            pretrained=str(base_folder) if base_folder is not None else None,
        )
        self.metrics = MULTI_LABEL_METRICS if recipe.data.multi_label else SINGLE_LABEL_METRICS
        self.metrics += ("objective",) if self.task.has_modified_loss else ()
        self.data = TableData(
            recipe,
            prepare=self._prepare,
            read_table=self._read_table,
            read_external=self._read_external,
            prepared=prepared,
            expected_fingerprint=expected_fingerprint,
            notes=self._collect_notes,
        )
        self.processor = TextClassifyProcessor(tokenizer, classes, shape, objective, ngrams)
        self.sampler = NoSampler(recipe)
        self.predictor = Predictor("texts", partial(predict_texts, self))

    def _collect_notes(self, prepared: PreparedData) -> list[str]:
        return [
            *describe_rare_classes(prepared, self.classes),
            *self._note_truncation(prepared),
            *self._note_overrides(),
        ]

    def _note_overrides(self) -> list[str]:
        """Return a note for each recipe value that is replaced by another."""
        model, tokenizer = self.recipe.model, self.recipe.data.tokenizer
        notes = []
        if model.kind == "pretrained" and "kind" in tokenizer.model_fields_set and tokenizer.kind != "pretrained":
            notes.append(f"data.tokenizer.kind: {tokenizer.kind} is not used; {model.from_} has its own tokenizer")
        if self.recipe.data.multi_label and self.recipe.evaluation.metric == "exact_match":
            notes.append(
                "evaluation.metric: with multi_label, exact_match (all labels of a text right) selects the best checkpoint"
            )
        return notes

    def _note_truncation(self, prepared: PreparedData) -> list[str]:
        """Return a note that counts the training texts that are longer than the model's maximum, if there are any."""
        collator = TextCollator.from_metadata(prepared.metadata, sequence_length=self.sequence_length)
        lengths = [prepared.table(name).lengths("input_ids") for name in prepared.training_tables]
        num_truncated, num_texts = sum(map(collator.count_truncated, lengths)), sum(map(len, lengths))
        note = f"{num_truncated:,} of {num_texts:,} texts are truncated to {collator.max_length} tokens: data.sequence_length"
        return [note] if num_truncated else []

    @property
    def sequence_length(self) -> int | None:
        """Maximum number of tokens of a text; None is unlimited."""
        if self.recipe.model.kind == "ngrams":
            return None  # the n-grams of a text are those of all of it
        limits = [n for n in (self.recipe.data.sequence_length, self.shape.max_positions) if n is not None]
        return min(limits, default=None)

    def _prepare(self, recipe: ClassifyRecipe) -> PreparedData:
        return _prepare_texts(recipe, lambda stage, done, total: None, processor_folder=self._processor_folder)

    def _read_table(self, prepared: PreparedData, name: str, *, is_training: bool) -> LabelledTexts:
        return self._open_texts(prepared, name)

    def _read_external(self, external: ExternalData) -> Source:
        """Encode external texts with the tokenizer and the classes of this run."""
        data = external.replace_in(self.recipe.data)
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(Path(folder))
            prepared = prepare_classify(
                data.model_copy(update={"augmentation": None, "deduplicate": None}),
                TokenizerSpec(kind="pretrained", path=folder),
                seed=self.recipe.seed,
                ngrams=self.recipe.model.ngrams,
                progress=lambda stage, done, total: None,
            )
        return self._open_texts(prepared, external.table)

    def _open_texts(self, prepared: PreparedData, table: str) -> LabelledTexts:
        return open_labelled_texts(
            prepared, table, classes=self.classes, sequence_length=self.sequence_length, ngrams=self.ngrams
        )

    def predict(self, models: Models, texts: Sequence[str], *, device: Any, batch_size: int = 128) -> np.ndarray:
        """Return the class probabilities of each text, float32 (n, classes).

        Each row sums to 1, except with `data.multi_label`, where the classes are independent.
        """
        collator = TextCollator.from_tokenizer(self.tokenizer, sequence_length=self.sequence_length)
        ids = self._tokenise(texts)
        probabilities = np.zeros((len(ids), len(self.classes)), np.float32)
        # Texts of similar length share a batch, which is padded to the longest.
        order = np.argsort([len(text) for text in ids], kind="stable")
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = collator.collate([ids[i] for i in indices])
            if self.ngrams is not None:
                batch |= self.ngrams.collate_texts([texts[i] for i in indices])
            probabilities[indices] = self.task.predict_probabilities(models, batch, device=device)
        return probabilities

    def count_truncated(self, texts: Sequence[str]) -> tuple[int, int | None]:
        """Return how many of the texts are longer than the maximum length, and that length in tokens."""
        collator = TextCollator.from_tokenizer(self.tokenizer, sequence_length=self.sequence_length)
        return collator.count_truncated(np.array([len(ids) for ids in self._tokenise(texts)])), collator.max_length

    def _tokenise(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(ids) for ids in self.tokenizer.encode_documents(list(texts))]

    def build_evaluation_tables(self, rows: Rows) -> dict[str, Any]:
        return build_prediction_tables(rows, tuple(self.classes.names))

    def fit_baseline(self) -> Baseline | None:
        """Fit the linear baseline, unless the recipe turns it off.

        There is none for several labels per text, without validation texts, if only a part of them is evaluated, or for a fold
        of a cross-validation.
        """
        data, evaluation = self.recipe.data, self.recipe.evaluation
        is_fold = data.split is not None and data.split.folds is not None
        validation = self.data.validation()
        if not evaluation.baseline or data.multi_label or is_fold or evaluation.max_batches or not validation:
            return None
        prepared = self.data.prepared
        parts = [self._read_texts(prepared.table(name)) for name in prepared.training_tables]
        texts, labels = [text for part in parts for text in part[0]], np.concatenate([part[1] for part in parts])
        new_texts, new_labels = self._read_texts(prepared.table("validation"), limit=len(validation))
        return fit_linear_baseline((texts, labels), (new_texts, new_labels), len(self.classes))

    def _read_texts(self, table: Table, *, limit: int | None = None) -> tuple[list[str], np.ndarray]:
        """Return texts and class numbers of the first `limit` rows, without augmented copies."""
        is_original = table.values("form") != COPY
        texts, labels = read_text_column(table, "text"), encode_labels(table, self.classes)
        rows = np.flatnonzero(is_original)[:limit]
        return [texts[row] for row in rows], labels[rows]

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write the model and its tokenizer.

        The layout is that of transformers if transformers has the model, else model.safetensors and a config.json that
        describes the network in full.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(folder)
        if isinstance(self.shape, PretrainedShape):
            from bottega.models.text_classifier.pretrained import export_pretrained

            export_pretrained(models["model"].state_dict(), self.shape, folder)
            return {"library_name": "transformers", "pipeline_tag": "text-classification"}
        config = {
            "model_type": MODEL_TYPE,
            "shape": self.shape.model_dump(),
            "classes": self.classes.names,
            "multi_label": self.recipe.data.multi_label,
            "sequence_length": self.sequence_length,
        }
        if self.ngrams is not None:
            config["ngrams"] = self.ngrams.spec.model_dump()
            self.ngrams.save(folder)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n")
        save_weights(models["model"], folder / "model.safetensors")
        return {"library_name": "bottega", "pipeline_tag": "text-classification"}


@final
class TextClassifyProcessor(FolderProcessor):
    """The tokenizer, the classes, the shape of the model, its loss and the weights of its n-grams."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        classes: Classes,
        shape: TextClassifierShape,
        objective: Objective,
        ngrams: NgramWeighting | None,
    ) -> None:
        self.tokenizer, self.classes, self.shape, self.objective = tokenizer, classes, shape, objective
        self.ngrams = ngrams

    def is_saved(self, folder: Path) -> bool:
        try:
            previous = (_read_shape(folder), _read_classes(folder), Tokenizer.load(folder).fingerprint)
            ngrams = None if self.ngrams is None else _read_ngrams(self.ngrams.spec, folder)
        except (MetadataUnreadable, OSError, DataError):
            return False
        are_ngrams_equal = self.ngrams is None or self.ngrams.equals(ngrams)
        if previous != (self.shape, self.classes, self.tokenizer.fingerprint) or not are_ngrams_equal:
            raise DataError(
                "the tokenizer, the n-grams or the classes of the data differ from those of this run; start over with --fresh"
            )
        return True

    def write(self, folder: Path) -> None:
        self.tokenizer.save(folder)
        (folder / CLASSES_FILE).write_text(json.dumps(self.classes.names, indent=1) + "\n")
        (folder / SHAPE_FILE).write_text(self.shape.model_dump_json(indent=1) + "\n")
        self.objective.save(folder)
        if self.ngrams is not None:
            self.ngrams.save(folder)


def _read_shape(processor_folder: Path) -> TextClassifierShape:
    return read_metadata(processor_folder / SHAPE_FILE, _SHAPE_ADAPTER.validate_json)


def _read_classes(processor_folder: Path) -> Classes:
    return read_metadata(processor_folder / CLASSES_FILE, lambda raw: Classes(tuple(map(str, json.loads(raw)))))


def _read_ngrams(spec: NgramSpec, processor_folder: Path) -> NgramWeighting:
    return read_metadata(processor_folder / IDF_FILE, lambda raw: NgramWeighting.parse(spec, raw))
