"""Distillation in a recipe: opening the teacher, checking that it fits the student, and the form of its output."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bottega.config.recipe import Recipe
from bottega.core.errors import BottegaError, UsageError
from bottega.core.model_spec import resolve_reference
from bottega.core.rundir import is_run
from bottega.data.audio.mel import MelProcessor
from bottega.data.text.tokenizer import Tokenizer
from bottega.models import find_framework
from bottega.models.folders.pretrained import read_decoder_shape
from bottega.models.folders.resolve import detect_folder_kind
from bottega.tasks.classify import media_workload as classify
from bottega.tasks.classify import text_workload as text_classify
from bottega.tasks.classify.media_workload import MediaClassifyWorkload
from bottega.tasks.classify.task import Classification
from bottega.tasks.classify.text_workload import TextClassifyWorkload
from bottega.tasks.generation.task import Generation
from bottega.tasks.generation.workload import GenerationWorkload
from bottega.tasks.language.task import Language
from bottega.tasks.language.workload import LanguageWorkload
from bottega.tasks.workload import Workload
from bottega.techniques.distill.config import DistillOptions
from bottega.techniques.distill.task import Distillation, Form
from bottega.techniques.training_plan import OpenRun, TrainingPlan

KEY = "techniques.distill.teacher"
TOKENIZER, VOCAB_SIZE, CLASSES, MULTI_LABEL, SAMPLE = "tokenizer", "vocab_size", "classes", "multi_label", "a sample of"
NORMALISE, SPECTROGRAMS = "normalise", "spectrograms"
"""Keys of the metadata that must be equal for teacher and student, as messages name them."""


@dataclass(frozen=True)
class Teacher:
    """A teacher model; `metadata` must equal the student's, and `max_tokens` is the longest text it reads."""

    model: Any
    """Of the framework of the engine."""
    metadata: Mapping[str, Any]
    max_tokens: int | None
    processor: Path
    """Folder of its tokenizer, if it has one."""


def apply(plan: TrainingPlan, options: DistillOptions, recipe: Recipe, workload: Workload) -> TrainingPlan:
    """Return the plan with a teacher's outputs as targets in addition to the data."""
    form = _choose_output_form(workload, recipe)
    assert plan.open_run is not None, "set by apply_techniques"
    teacher = _open_teacher(options.teacher, recipe, workload, open_run=plan.open_run)
    _check_compatible(teacher, workload, name=options.teacher)
    task = Distillation(
        inner=plan.task,
        form=form,
        teacher=teacher.model,
        temperature=options.temperature,
        alpha=options.alpha,
        hidden=options.hidden,
        padding="attention_mask" if isinstance(workload, TextClassifyWorkload) else None,
        max_tokens=teacher.max_tokens,
    )
    num_parameters = sum(math.prod(value.shape) for value in dict(teacher.model.named_parameters()).values())
    return replace(
        plan,
        task=task,
        metrics=(*plan.metrics, *task.term_names),
        frozen={**plan.frozen, "teacher": _hash_teacher(teacher.model)},
        notes=(*plan.notes, f"distill: the teacher is {options.teacher}, {num_parameters:,} parameters"),
    )


def _hash_teacher(teacher: Any) -> str:
    """Return a hash of the teacher's weights and shape; the path of its folder does not change it.

    The shape is included because the weights alone do not determine it: the number of heads, for example.
    """
    hash_weights = resolve_reference("bottega.techniques.distill.{framework}:hash_weights", find_framework(teacher))
    return hashlib.sha256(f"{getattr(teacher, 'shape', '')} {hash_weights(teacher)}".encode()).hexdigest()


def _choose_output_form(workload: Workload, recipe: Recipe) -> Form:
    task = workload.task
    if isinstance(task, Classification):
        return "labels" if task.multi_label else "classes"
    if isinstance(task, Generation):
        return "values"
    if isinstance(task, Language) or isinstance(workload, GenerationWorkload):  # text, or the codes of a medium
        return "tokens"
    raise UsageError(
        f"techniques: distill does not support {recipe.task}; it supports classifiers, language models and generators"
    )


# Opening the teacher


def _open_teacher(name: str, recipe: Recipe, workload: Workload, *, open_run: OpenRun) -> Teacher:
    """Open a teacher: a run, or the folder of a model."""
    folder = Path(name).expanduser()
    if not name.strip():
        raise UsageError(f"{KEY}: must not be empty; give a run, needs.NAME or the folder of a model")
    own_directory = Path(recipe.output_dir) / recipe.run_name()
    if folder.resolve() == own_directory.resolve():
        raise UsageError(f"{KEY}: {name} is this run itself; give another run")
    if not folder.is_dir():
        raise UsageError(f"{KEY}: {name} does not exist; give a run, needs.NAME or the folder of a model")
    try:
        if not is_run(folder):
            return _read_model_folder(folder, workload, framework=recipe.engine)
        # On the student's device: with several processes, the first engine decides the communication backend.
        run = open_run(folder, device=recipe.device, engine=recipe.engine)
    except BottegaError as error:
        named_error = type(error)(f"{KEY}: {str(error).removeprefix('model.from: ')}")
        named_error.code = error.code
        raise named_error from None
    if type(run.workload) is not type(workload):
        raise UsageError(
            f"{KEY}: {name} was trained for {_describe_task(run.recipe)}, not for {_describe_task(recipe)}; give another run"
        )
    return Teacher(run.model, _collect_metadata(run.workload), _get_max_tokens(run.workload), run.directory.processor)


def _describe_task(recipe: Recipe) -> str:
    return f"{recipe.task} of {recipe.data.input}" if recipe.task == "classify" else recipe.task  # type: ignore[attr-defined]


def _read_model_folder(folder: Path, workload: Workload, *, framework: str) -> Teacher:
    """Open a model folder of transformers, or an exported run."""
    if detect_folder_kind(folder) == "adapter":
        raise UsageError(f"{folder} is an adapter, not a complete model; give the run that it was exported from")
    if not isinstance(workload, LanguageWorkload | TextClassifyWorkload | MediaClassifyWorkload):
        raise UsageError(f"{folder} is not a run; for {workload.unit} the teacher must be the directory of a run")
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is neither a run nor the folder of a model: it has neither recipe.yaml nor config.json"
        )
    build_teacher = resolve_reference("bottega.techniques.distill.{framework}:build_teacher", framework)
    if isinstance(workload, LanguageWorkload):
        shape = read_decoder_shape(folder)
        model = build_teacher(Language(shape=shape, pretrained=str(folder)))
        metadata = {TOKENIZER: Tokenizer.load(folder).fingerprint, VOCAB_SIZE: shape.vocab_size}
        return Teacher(model, metadata, shape.context, folder)
    config = _read_config(folder)
    try:
        task, metadata = (
            _read_text_classifier(folder, config, workload)
            if isinstance(workload, TextClassifyWorkload)
            else _read_media_classifier(config)
        )
    except (KeyError, TypeError, ValueError, ValidationError):
        raise UsageError(f"{folder}: config.json does not describe a classifier like the student's") from None
    model = build_teacher(task.model_copy(update={"pretrained": str(folder)}))
    return Teacher(model, metadata, getattr(task.shape, "max_positions", None), folder)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UsageError(f"{folder} has no readable config.json; give a run or the folder of a saved model")
    return config


def _read_text_classifier(
    folder: Path, config: dict[str, Any], workload: TextClassifyWorkload
) -> tuple[Classification, dict[str, Any]]:
    tokenizer = Tokenizer.load(folder).fingerprint
    if config["model_type"] == text_classify.MODEL_TYPE:
        task = Classification(key="text", shape=config["shape"], multi_label=config["multi_label"])
        return task, {TOKENIZER: tokenizer, MULTI_LABEL: task.multi_label, CLASSES: tuple(config["classes"])}
    if not str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification"):
        raise UsageError(f"{folder} is an encoder without a classifier; fine-tune it first, and give that run")
    from bottega.models.text_classifier.pretrained import read_pretrained_shape  # imports torch

    is_multi_label = config.get("problem_type") == "multi_label_classification"
    names = tuple(str(name) for _, name in sorted(config["id2label"].items(), key=lambda item: int(item[0])))
    shape = read_pretrained_shape(folder, names, multi_label=is_multi_label)
    return Classification(key="text", shape=shape), {TOKENIZER: tokenizer, MULTI_LABEL: is_multi_label, CLASSES: names}


def _read_media_classifier(config: dict[str, Any]) -> tuple[Classification, dict[str, Any]]:
    if config["model_type"] not in (classify.MODEL_TYPE, classify.SPIKING_TYPE):
        raise ValueError
    task = Classification(key="mel" if config["input"] == "audio" else config["input"], shape=config["shape"])
    mel = MelProcessor.model_validate(config["mel"]) if config["mel"] is not None else None
    shape: Any = task.shape
    sample = (task.key, *shape.grid, shape.channels)
    return task, {
        SAMPLE: sample,
        CLASSES: tuple(config["classes"]),
        NORMALISE: config["normalise"] if mel is None else None,
        SPECTROGRAMS: mel,
    }


# Checks that teacher and student fit together


def _collect_metadata(workload: Workload) -> dict[str, Any]:
    """Return the metadata that must be equal for teacher and student."""
    if isinstance(workload, LanguageWorkload):
        return {TOKENIZER: workload.tokenizer.fingerprint, VOCAB_SIZE: workload.shape.vocab_size}
    if isinstance(workload, TextClassifyWorkload):
        is_multi_label = workload.recipe.data.multi_label
        # Classes are compared first: if they differ, the tokenizer often does too.
        return {CLASSES: workload.classes.names, MULTI_LABEL: is_multi_label, TOKENIZER: workload.tokenizer.fingerprint}
    assert isinstance(workload, MediaClassifyWorkload | GenerationWorkload)
    mel = workload.mel
    scaling = {NORMALISE: workload.recipe.data.normalise if mel is None else None, SPECTROGRAMS: mel}
    if isinstance(workload, MediaClassifyWorkload):
        sample = (workload.batch_key, *workload.shape.grid, workload.shape.channels)
        return {SAMPLE: sample, CLASSES: workload.classes.names, **scaling}
    shape, path = workload.metadata.shape, getattr(workload.task, "path", None)
    metadata: dict[str, Any] = {SAMPLE: (workload.key, *shape.sample), **scaling, **workload.frozen_hashes}
    metadata |= {"condition": shape.condition.kind, "condition size": shape.condition.size}
    if shape.condition.kind == "class":
        metadata[CLASSES] = workload.metadata.classes
    if path is not None:
        metadata |= {"objective": path.objective, "noise_schedule": path.schedule if path.uses_schedule else None}
    return metadata


def _get_max_tokens(workload: Workload) -> int | None:
    """Return the maximum number of tokens that a text model reads; None without a limit."""
    if isinstance(workload, LanguageWorkload):
        return workload.shape.context
    return workload.shape.max_positions if isinstance(workload, TextClassifyWorkload) else None


def _check_compatible(teacher: Teacher, workload: Workload, *, name: str) -> None:
    ours, theirs = _collect_metadata(workload), teacher.metadata
    for key in {**ours, **theirs}:
        if ours.get(key) != theirs.get(key):
            raise UsageError(
                f"{KEY}: {name} has {_describe_value(key, theirs.get(key))}, but the student has {_describe_value(key, ours.get(key))}; "
                f"{_suggest_remedy(key, teacher)}"
            )
    length = workload.sequence_length if isinstance(workload, LanguageWorkload | TextClassifyWorkload) else None
    if teacher.max_tokens is not None and (length is None or length > teacher.max_tokens):
        limit = f"{length}" if length is not None else "any number"
        raise UsageError(
            f"{KEY}: {name} reads {teacher.max_tokens} tokens at most, but a text may have {limit} here; set "
            f"data.sequence_length={teacher.max_tokens}"
        )


def _describe_value(key: str, value: Any) -> str:
    if key == CLASSES:
        return f"the {len(value or ())} classes {', '.join((value or ())[:4])}{', …' if len(value or ()) > 4 else ''}"
    if key == SAMPLE:
        return f"{key} {value[0]} {' x '.join(map(str, value[1:]))}"
    if key == SPECTROGRAMS:
        return f"spectrograms with {value}" if value is not None else "no spectrograms"
    text = str(value)
    return f"{key} {text[:12] if len(text) == 64 else text}"  # a hash is shortened


def _suggest_remedy(key: str, teacher: Teacher) -> str:
    if key == TOKENIZER and (teacher.processor / "tokenizer.json").is_file():
        return f"set data.tokenizer.kind=pretrained data.tokenizer.path={teacher.processor}, or train another teacher"
    settings = {VOCAB_SIZE: "model.vocab_size", NORMALISE: "data.normalise", MULTI_LABEL: "data.multi_label"}
    settings |= {name: f"model.{name}" for name in ("condition", "objective", "noise_schedule")}
    if key in settings:
        return f"set {settings[key]}={teacher.metadata.get(key)}, or train another teacher"
    return "train a teacher on the same data, for example as one of `needs`"
