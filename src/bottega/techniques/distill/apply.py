"""Distillation in a recipe: which teacher, whether it fits, and what of its answers is followed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from bottega.config.recipe import Recipe
from bottega.core.errors import BottegaError, UsageError
from bottega.core.rundir import is_run
from bottega.core.task import Task
from bottega.data.audio.mel import MelProcessor
from bottega.data.text.tokenizer import Tokenizer
from bottega.models.build import build_models
from bottega.models.folders.pretrained import read_decoder_shape
from bottega.models.folders.resolve import folder_kind
from bottega.models.text_classifier.pretrained import read_pretrained_shape
from bottega.tasks.classify import media_workload as classify
from bottega.tasks.classify import text_workload as text_classify
from bottega.tasks.classify.media_workload import MediaClassifyWorkload
from bottega.tasks.classify.task import Classification
from bottega.tasks.classify.text_workload import TextClassifyWorkload
from bottega.tasks.generation.code_language import CodeLanguage
from bottega.tasks.generation.task import Generation
from bottega.tasks.generation.workload import GenerationWorkload
from bottega.tasks.language.task import Language
from bottega.tasks.language.workload import LanguageWorkload
from bottega.tasks.workload import Workload
from bottega.techniques.distill.config import DistillOptions
from bottega.techniques.distill.torch import Distillation, Form
from bottega.techniques.injected_layers import hash_frozen
from bottega.techniques.training_plan import OpenRun, TrainingPlan

KEY = "techniques.distill.teacher"
TOKENIZER, ROWS, CLASSES, SEVERAL, SAMPLE = "tokenizer", "vocab_size", "classes", "multi_label", "a sample of"
SCALE, SPECTROGRAMS = "normalise", "spectrograms"


@dataclass(frozen=True)
class Teacher:
    """`facts` are what it must have in common with the student, by their names; `longest` is how much it reads."""

    model: torch.nn.Module
    metadata: Mapping[str, Any]
    max_tokens: int | None
    processor: Path
    """Where its tokenizer lies, if it has one."""


def apply(plan: TrainingPlan, options: DistillOptions, recipe: Recipe, workload: Workload) -> TrainingPlan:
    """The same lesson with a teacher beside the data."""
    form = _form(workload.task, recipe)
    if options.hidden and recipe.training.compile is True:
        raise UsageError(
            "training.compile: true, and techniques.distill.hidden listens inside the model, which is then not compiled; "
            "leave one of them out"
        )
    assert plan.open_run is not None, "a lesson that is applied knows how to open a run"
    teacher = _open(options.teacher, recipe, workload, open_run=plan.open_run)
    _check_fits(teacher, workload, name=options.teacher)
    task = Distillation(
        inner=plan.task,
        form=form,
        teacher=teacher.model,
        temperature=options.temperature,
        alpha=options.alpha,
        hidden=options.hidden,
        padding="attention_mask" if isinstance(workload, TextClassifyWorkload) else None,
    )
    parameters = sum(parameter.numel() for parameter in teacher.model.parameters())
    return replace(
        plan,
        task=task,
        metrics=(*plan.metrics, *task.term_names),
        frozen={**plan.frozen, "teacher": _hash_of(teacher.model)},
        notes=(*plan.notes, f"distill: the teacher is {options.teacher}, {parameters:,} parameters"),
    )


def _hash_of(teacher: torch.nn.Module) -> str:
    """Of all that decides what it answers, wherever it lies and in whatever layout: the number of heads is in no weight."""
    weights = hash_frozen(teacher, lambda name: False)
    return hashlib.sha256(f"{getattr(teacher, 'shape', '')} {weights}".encode()).hexdigest()


def _form(task: Task, recipe: Recipe) -> Form:
    if any(technique.name == "maml" for technique in recipe.techniques):
        raise UsageError(
            "techniques: distill and maml do not go together, since the teacher knows no episode; keep one"
        )
    if isinstance(task, Classification):
        return "labels" if task.multi_label else "classes"
    if isinstance(task, Language | CodeLanguage):
        return "tokens"
    if isinstance(task, Generation):
        return "values"
    raise UsageError(
        f"techniques: distill has no answer of {recipe.task} to follow; it takes classes, tokens and flows"
    )


# Who teaches


def _open(name: str, recipe: Recipe, workload: Workload, *, open_run: OpenRun) -> Teacher:
    """A run with the weights that count, or a folder."""
    folder = Path(name).expanduser()
    if not name.strip():
        raise UsageError(f"{KEY}: is empty; name a run, needs.NAME or the folder of a model")
    own = Path(recipe.output_dir) / recipe.run_name()
    if folder.resolve() == own.resolve():
        raise UsageError(f"{KEY}: {name} is this run itself, and a run cannot teach itself; name another run")
    if not folder.is_dir():
        raise UsageError(f"{KEY}: there is no run and no folder at {name}")
    try:
        if not is_run(folder):
            return _read_folder(folder, workload)
        # On the student's own device: where there are several processes, the first engine decides how they talk.
        saved = open_run(folder, device=recipe.device)
    except BottegaError as error:
        said = type(error)(f"{KEY}: {str(error).removeprefix('pretrained: ')}")
        said.code = error.code
        raise said from None
    if type(saved.workload) is not type(workload):
        raise UsageError(f"{KEY}: {name} has learnt {_learnt(saved.recipe)}, and here it is {_learnt(recipe)}")
    return Teacher(saved.model, _facts(saved.workload), _longest(saved.workload), saved.directory.processor)


def _learnt(recipe: Recipe) -> str:
    return f"{recipe.task} of {recipe.data.input}" if recipe.task == "classify" else recipe.task  # type: ignore[attr-defined]


def _read_folder(folder: Path, workload: Workload) -> Teacher:
    """A model of transformers, or an export of ours."""
    if folder_kind(folder) == "adapter":
        raise UsageError(f"{folder} holds an adapter and no whole model; name the run that it was exported from")
    if not isinstance(workload, LanguageWorkload | TextClassifyWorkload | MediaClassifyWorkload):
        raise UsageError(f"{folder} is no run; of {workload.unit} the teacher is the directory of a run")
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is no run and no folder of a model: it has neither recipe.yaml nor config.json; name one that is"
        )
    if isinstance(workload, LanguageWorkload):
        shape = read_decoder_shape(folder)
        model = build_models(Language(shape=shape, pretrained=str(folder)), 0)["model"]
        facts = {TOKENIZER: Tokenizer.load(folder).fingerprint, ROWS: shape.vocab_size}
        return Teacher(model, facts, shape.context, folder)
    config = _config(folder)
    try:
        task, facts = (
            _of_texts(folder, config, workload) if isinstance(workload, TextClassifyWorkload) else _seen(config)
        )
    except (KeyError, TypeError, ValueError, ValidationError):
        raise UsageError(f"{folder}: config.json is that of no such classifier as is taught here") from None
    model = build_models(task.model_copy(update={"pretrained": str(folder)}), 0)["model"]
    return Teacher(model, facts, getattr(task.shape, "max_positions", None), folder)


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{folder} is no folder of a model: its config.json cannot be read")
    return found


def _of_texts(
    folder: Path, config: dict[str, Any], workload: TextClassifyWorkload
) -> tuple[Classification, dict[str, Any]]:
    tokenizer = Tokenizer.load(folder).fingerprint
    if config["model_type"] == text_classify.MODEL_TYPE:
        task = Classification(key="text", shape=config["shape"], multi_label=config["multi_label"])
        return task, {TOKENIZER: tokenizer, SEVERAL: task.multi_label, CLASSES: tuple(config["classes"])}
    if not str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification"):
        raise UsageError(f"{folder} holds an encoder that has learnt no classes; fine-tune it first, and name that run")
    several = config.get("problem_type") == "multi_label_classification"
    names = tuple(str(name) for _, name in sorted(config["id2label"].items(), key=lambda item: int(item[0])))
    shape = read_pretrained_shape(folder, names, multi_label=several)
    return Classification(key="text", shape=shape), {TOKENIZER: tokenizer, SEVERAL: several, CLASSES: names}


def _seen(config: dict[str, Any]) -> tuple[Classification, dict[str, Any]]:
    if config["model_type"] not in (classify.MODEL_TYPE, classify.SPIKING_TYPE):
        raise ValueError
    task = Classification(key="mel" if config["input"] == "audio" else config["input"], shape=config["shape"])
    mel = MelProcessor.model_validate(config["mel"]) if config["mel"] is not None else None
    shape: Any = task.shape
    sample = (task.key, *shape.grid, shape.channels)
    return task, {
        SAMPLE: sample,
        CLASSES: tuple(config["classes"]),
        SCALE: config["normalise"] if mel is None else None,
        SPECTROGRAMS: mel,
    }


# Whether it fits


def _facts(workload: Workload) -> dict[str, Any]:
    """What two models must have in common for one to follow the other."""
    if isinstance(workload, LanguageWorkload):
        return {TOKENIZER: workload.tokenizer.fingerprint, ROWS: workload.shape.vocab_size}
    if isinstance(workload, TextClassifyWorkload):
        several = workload.recipe.data.multi_label
        # Classes first: where they differ, the words that were seen with them often do as well.
        return {CLASSES: workload.classes.names, SEVERAL: several, TOKENIZER: workload.tokenizer.fingerprint}
    assert isinstance(workload, MediaClassifyWorkload | GenerationWorkload)
    mel = workload.mel
    seen = {SCALE: workload.recipe.data.normalise if mel is None else None, SPECTROGRAMS: mel}
    if isinstance(workload, MediaClassifyWorkload):
        sample = (workload.batch_key, *workload.shape.grid, workload.shape.channels)
        return {SAMPLE: sample, CLASSES: workload.classes.names, **seen}
    shape, path = workload.facts.shape, getattr(workload.task, "path", None)
    facts: dict[str, Any] = {SAMPLE: (workload.key, *shape.sample), **seen, **workload.frozen_hashes}
    facts |= {"condition": shape.condition.kind, "condition size": shape.condition.size}
    if shape.condition.kind == "class":
        facts[CLASSES] = workload.facts.classes
    if path is not None:
        facts |= {"objective": path.objective, "noise_schedule": path.schedule if path.uses_schedule else None}
    return facts


def _longest(workload: Workload) -> int | None:
    """Tokens that a model of texts reads at most."""
    if isinstance(workload, LanguageWorkload):
        return workload.shape.context
    return workload.shape.max_positions if isinstance(workload, TextClassifyWorkload) else None


def _check_fits(teacher: Teacher, workload: Workload, *, name: str) -> None:
    ours, theirs = _facts(workload), teacher.metadata
    for what in {**ours, **theirs}:
        if ours.get(what) != theirs.get(what):
            raise UsageError(
                f"{KEY}: {name} has {_said(what, theirs.get(what))}, and here it is {_said(what, ours.get(what))}; "
                f"{_remedy(what, teacher)}"
            )
    length = workload.sequence_length if isinstance(workload, LanguageWorkload | TextClassifyWorkload) else None
    if teacher.max_tokens is not None and (length is None or length > teacher.max_tokens):
        here = f"{length}" if length is not None else "any number"
        raise UsageError(
            f"{KEY}: {name} reads {teacher.max_tokens} tokens at most, and here a text may have {here}; set "
            f"data.sequence_length={teacher.max_tokens}"
        )


def _said(what: str, value: Any) -> str:
    if what == CLASSES:
        return f"the {len(value or ())} classes {', '.join((value or ())[:4])}{', …' if len(value or ()) > 4 else ''}"
    if what == SAMPLE:
        return f"{what} {value[0]} {' x '.join(map(str, value[1:]))}"
    if what == SPECTROGRAMS:
        return "other spectrograms" if value is not None else "no spectrograms"
    text = str(value)
    return f"{what} {text[:12] if len(text) == 64 else text}"  # of a hash the beginning tells enough


def _remedy(what: str, teacher: Teacher) -> str:
    if what == TOKENIZER and (teacher.processor / "tokenizer.json").is_file():
        return f"set data.tokenizer.kind=pretrained data.tokenizer.path={teacher.processor}, or train another teacher"
    own = {ROWS: "model.vocab_size", SCALE: "data.normalise", SEVERAL: "data.multi_label"}
    own |= {key: f"model.{key}" for key in ("condition", "objective", "noise_schedule")}
    if what in own:
        return f"set {own[what]}={teacher.metadata.get(what)}, or train another teacher"
    return "train a teacher on the same data, such as one under needs"
