"""Distillation: loss and gradient against the formula, hidden states, invariances of runs, and incompatible teachers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bottega
import small_media
import small_run
import small_texts
from bottega import cli
from bottega.analysis.compare import compare
from bottega.config.load import to_yaml
from bottega.core.errors import CheckpointError, UsageError
from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.trainer import evaluate
from bottega.core.types import Loss
from bottega.data.loading.loader import iter_eval_batches
from bottega.metrics_log import read_metrics
from bottega.models.build import build_models
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.run.compose import build_engine, build_loader, build_training_plan, set_learning_rate_schedule
from bottega.tasks import dependencies, registry
from bottega.tasks.language.task import Language
from bottega.tasks.recipes import load_recipe
from bottega.techniques.call_recorder import CallRecorder, find_blocks, match_blocks
from bottega.techniques.distill.apply import _hash_teacher
from bottega.techniques.distill.task import Distillation
from bottega.techniques.distill.torch import hidden_state_distance, softened_binary_kl, softened_kl
from bottega.techniques.injected_layers import hash_frozen
from small_run import differing_tensors, read_tensors

Settings = Callable[[Path], dict[str, Any]]


def language(folder: Path) -> dict[str, Any]:
    return small_run.settings(folder, small_run.write_text(folder / "text.txt"))


def image_classification(folder: Path) -> dict[str, Any]:
    shared = {
        key: value for key, value in small_media.image(folder).items() if not key.startswith(("model.", "samples."))
    }
    return {**shared, "model.hidden_size": 8}


RECIPES: dict[str, tuple[Settings, dict[str, Any]]] = {
    "language/shakespeare": (language, {"model.num_layers": 2}),
    "classify": (small_texts.settings, {"model.num_layers": 1}),
    "classify/image": (image_classification, {"model.hidden_size": 4}),
    "image": (small_media.image, {"model.num_layers": 1}),
}
"""Recipe -> its settings, and the sizes in which the student differs from the teacher."""


def distill_from(teacher: Path | str, **options: Any) -> dict[str, Any]:
    return {"techniques": [{"name": "distill", "options": {"teacher": str(teacher), **options}}]}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("teachers")
    return {name: train(name, folder / name.replace("/", "-"), name="teacher") for name in RECIPES}


def values(recipe: str, folder: Path, /, **changes: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    return {**RECIPES[recipe][0](folder), **changes}


def train(recipe: str, folder: Path, /, **changes: Any) -> Path:
    path: Path = bottega.train(recipe, values(recipe, folder, **changes)).path
    return path


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Subject:
    """Workload, plan, engine and loader of a run, without the training loop."""

    def __init__(self, recipe: str, folder: Path, /, **changes: Any) -> None:
        resolved = load_recipe([recipe, values(recipe, folder, **changes)]).recipe
        self.workload: Any = registry.open_workload(resolved, progress=lambda stage, done, total: None)
        self.plan = build_training_plan(resolved, self.workload)
        self.engine = build_engine(resolved, self.plan.task)
        self.loader = build_loader(resolved, self.plan.training, self.engine, self.plan.order)
        set_learning_rate_schedule(resolved, self.engine, total=8, steps_per_epoch=round(self.loader.steps_per_epoch))

    def advance(self, steps: int, change: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> list[dict[str, float]]:
        batches = (change(dict(self.loader.batch(step))) for step in range(steps))
        return [self.engine.fetch(self.engine.train_step(step, batch)) for step, batch in enumerate(batches)]

    def weights(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().numpy().copy() for name, tensor in self.engine.model.state_dict().items()}


# Training


def test_alpha_of_zero_is_bitwise_equal_to_plain_training(
    recipe: str, teachers: dict[str, Path], tmp_path: Path
) -> None:
    options = {"training.micro_batch_size": 3, "model.dropout": 0.1}
    plain = Subject(recipe, tmp_path, **options)
    distilled = Subject(recipe, tmp_path, **options, **distill_from(teachers[recipe], alpha=0.0))
    assert [r["loss"] for r in plain.advance(3)] == [r["loss"] for r in distilled.advance(3)]
    assert differing_tensors(plain.weights(), distilled.weights()) == []


def test_validation_loss_is_the_data_loss(recipe: str, teachers: dict[str, Path], tmp_path: Path) -> None:
    """Validation reports the data loss whatever alpha is, and the distance to the teacher."""
    metrics = []
    for changes in ({}, distill_from(teachers[recipe], alpha=0.9, temperature=3.0)):
        subject = Subject(recipe, tmp_path, **changes)
        assert subject.plan.validation is not None
        metrics.append(evaluate(subject.engine, iter_eval_batches(subject.plan.validation, 5)))
    plain, distilled = metrics
    assert distilled.pop("distill") > 0
    assert distilled == pytest.approx(plain, rel=1e-6)
    assert "distill" in subject.plan.metrics


@pytest.mark.parametrize("name", ["classify", "classify/image"])
def test_labels_have_no_effect_at_alpha_one(name: str, teachers: dict[str, Path], tmp_path: Path) -> None:
    """Not even with class weights, by which the task's own loss is counted."""
    options = {**distill_from(teachers[name], alpha=1.0), "loss.class_weights": [5.0, 1.0, 0.2]}
    labelled, mislabelled = Subject(name, tmp_path, **options), Subject(name, tmp_path, **options)
    labelled.advance(4)
    mislabelled.advance(4, lambda batch: {**batch, "label": (batch["label"] + 1) % 3})
    assert differing_tensors(labelled.weights(), mislabelled.weights()) == []
    half = {**distill_from(teachers[name], alpha=0.5), "loss.class_weights": [5.0, 1.0, 0.2]}
    half_labelled, half_mislabelled = Subject(name, tmp_path, **half), Subject(name, tmp_path, **half)
    half_labelled.advance(4)
    half_mislabelled.advance(4, lambda batch: {**batch, "label": (batch["label"] + 1) % 3})
    assert differing_tensors(half_labelled.weights(), half_mislabelled.weights()), "at alpha 0.5 labels have an effect"


def test_student_approaches_the_teacher(recipe: str, teachers: dict[str, Path], tmp_path: Path) -> None:
    subject = Subject(
        recipe, tmp_path, seed=1, **distill_from(teachers[recipe], alpha=1.0), **{"training.learning_rate": 3e-3}
    )
    batch = dict(subject.loader.batch(0))
    steps = [subject.engine.fetch(subject.engine.train_step(0, dict(batch))) for _ in range(40)]
    assert steps[-1]["distill"] < 0.7 * steps[0]["distill"]


@pytest.mark.parametrize("hidden", [0.0, 0.5])
def test_micro_batches_do_not_change_the_losses_or_the_update(
    recipe: str, hidden: float, teachers: dict[str, Path], tmp_path: Path
) -> None:
    plain = {"training.optimizer.name": "sgd", "training.learning_rate": 0.1, "model.dropout": 0.0}
    plain |= {**RECIPES[recipe][1], **distill_from(teachers[recipe], hidden=hidden)}

    def pad_last_two(batch: dict[str, Any], *, other_samples: bool = False) -> dict[str, Any]:
        """Mark the last two examples as padding; with `other_samples`, replace them by others."""
        size = len(next(value for value in batch.values() if np.ndim(value)))
        rows = np.r_[: size - 2, 0, 1] if other_samples else np.arange(size)
        batch = {name: value[rows] if np.ndim(value) else value for name, value in batch.items()}
        return {**batch, "weight": (np.arange(size) < size - 2).astype(np.float32)}

    full = Subject(recipe, tmp_path, **plain)
    split = Subject(recipe, tmp_path, **plain, **{"training.micro_batch_size": 3})
    a, b = full.advance(3, pad_last_two), split.advance(3, lambda batch: pad_last_two(batch, other_samples=True))
    for name in ("loss", "distill", *(["hidden"] if hidden else [])):
        # A divergence is a difference of rounded logarithms near 1.
        assert [r[name] for r in b] == pytest.approx([r[name] for r in a], rel=1e-5, abs=1e-7), name
    for name, tensor in full.weights().items():
        np.testing.assert_allclose(split.weights()[name], tensor, rtol=1e-4, atol=2e-6, err_msg=name)


def test_resume_is_bitwise_equal(recipe: str, teachers: dict[str, Path], tmp_path: Path) -> None:
    options = {
        **RECIPES[recipe][1],
        **distill_from(teachers[recipe], hidden=0.3),
        "training.scheduler.name": "constant",
    }
    straight = train(recipe, tmp_path, name="straight", **options)
    cut = train(recipe, tmp_path, name="cut", **{**options, "training.max_steps": 5})
    train(recipe, tmp_path, name="cut", **options)
    assert differing_tensors(read_tensors(straight), read_tensors(cut)) == []
    rows = [row for row in read_metrics(cut / "metrics.jsonl") if row["kind"] == "eval"]
    assert {"loss", "distill", "hidden"} <= rows[-1].keys()
    assert not any("teacher" in name for name in read_tensors(cut)), "the teacher is not saved in the checkpoint"
    assert bottega.load(cut, checkpoint="last").evaluate()["loss"] == pytest.approx(rows[-1]["loss"], rel=1e-5)


# The formula


class LinearTask(Task):
    """Classification with a linear model."""

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec(build_linear, [[0.3, -0.2], [0.1, 0.4], [-0.5, 0.2]])}

    def counts(self, batch: Any) -> dict[str, float]:
        return {"loss": float(len(batch["x"]))}

    def loss(self, models: Any, batch: Any, rng: Any) -> Loss:
        logits = models["model"](batch["x"])
        return Loss(terms={"loss": (nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), 1.0)})


def build_linear(weight: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(2, 3, bias=False).double()
    layer.weight.data = torch.tensor(weight, dtype=torch.float64)
    return layer


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_gradient_matches_the_formula(temperature: float) -> None:
    """alpha T (softmax(s / T) - softmax(t / T)) + (1 - alpha) (softmax(s) - onehot), for each example."""
    teacher = build_linear([[2.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    task = Distillation(inner=LinearTask(), form="classes", teacher=teacher, temperature=temperature, alpha=0.3)
    models = build_models(task, 0)
    x = torch.tensor([[1.0, -2.0], [0.5, 0.7], [3.0, 1.0]], dtype=torch.float64)
    batch = {"x": x, "label": torch.tensor([0, 2, 1]), "weight": torch.tensor([1.0, 1.0, 0.0])}
    out = task.loss(models, batch, Noise(0, 0, torch.arange(3), torch))
    assert {name: weight for name, (_, weight) in out.terms.items()} == pytest.approx({"loss": 0.7, "distill": 0.3})
    sum(total * weight for total, weight in out.terms.values()).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        s, t = x @ models["model"].weight.T, x @ teacher.weight.T
        soft = temperature * ((s / temperature).softmax(1) - (t / temperature).softmax(1))
        soft[2] = 0.0  # a padding row; the task handles it in its own loss
        hard = s.softmax(1) - nn.functional.one_hot(batch["label"], 3)
        expected = (0.3 * soft + 0.7 * hard).T @ x
    torch.testing.assert_close(models["model"].weight.grad, expected, rtol=1e-5, atol=1e-7)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_loss_scale_is_independent_of_temperature() -> None:
    """At high temperature the divergence is half the mean squared difference of centred logits (Hinton, 2015);
    the remainder is of the order of a logit over the temperature, here 3 / 50."""
    rng = torch.Generator().manual_seed(0)
    s, t = torch.randn(5, 7, generator=rng), torch.randn(5, 7, generator=rng)
    limit = ((s - t) - (s - t).mean(1, keepdim=True)).square().sum(1) / 14
    torch.testing.assert_close(softened_kl(s, t, 50.0), limit, rtol=6e-2, atol=1e-3)
    assert (softened_kl(s, s, 2.0).abs() < 1e-6).all()


def test_binary_kl_equals_softmax_over_the_logit_and_zero() -> None:

    rng = torch.Generator().manual_seed(0)
    s, t = torch.randn(4, 3, generator=rng), torch.randn(4, 3, generator=rng)
    pairs = [torch.stack((z, torch.zeros_like(z)), dim=-1) for z in (s, t)]
    torch.testing.assert_close(softened_binary_kl(s, t, 2.0), softened_kl(*pairs, 2.0).mean(1))


def test_recorded_language_model_computes_the_same_loss() -> None:
    """The loss from recorded logits equals the transformer's own, without ignored targets."""
    shape = TransformerShape(
        num_layers=1,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=2,
        head_size=8,
        intermediate_size=32,
        vocab_size=11,
        context=8,
    )
    model = build_models(Language(shape=shape), 0)["model"]
    tokens = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1).masked_fill(torch.arange(8) > 5, -100)
    recorder = CallRecorder(model, computes_token_loss=True)
    torch.testing.assert_close(recorder(tokens, targets), model(tokens, targets))
    assert recorder.single_call.output.shape == (3, 8, 11)
    assert recorder.single_call.target_mask is not None
    assert int(recorder.single_call.target_mask.sum()) == 18
    assert recorder.training == model.training


# Hidden states


def test_hidden_states_are_compared_by_direction() -> None:
    rng = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 6, 5, generator=rng), torch.randn(2, 6, 5, generator=rng)
    mask = torch.arange(6)[None] < torch.tensor([[6], [4]])
    distance = hidden_state_distance(student, teacher, mask)
    cosine = nn.functional.cosine_similarity(student, teacher, dim=-1)
    torch.testing.assert_close(distance, torch.stack([(2 - 2 * cosine[0]).mean(), (2 - 2 * cosine[1, :4]).mean()]))
    torch.testing.assert_close(hidden_state_distance(3 * student, teacher, mask), distance)
    padded = student.clone()
    padded[1, 4:] = float("nan")
    torch.testing.assert_close(hidden_state_distance(padded, teacher, mask), distance)  # padding has no effect


def test_states_of_different_widths_are_compared_by_similarity_matrices() -> None:
    """A rotation of all states into another space changes no similarity, so the distance is 0."""
    rng = torch.Generator().manual_seed(0)
    student = torch.randn(2, 6, 5, generator=rng)
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=rng))[0][:5]
    mask = torch.ones(2, 6, dtype=torch.bool)
    assert (hidden_state_distance(student, student @ rotation, mask) < 1e-10).all()
    assert (hidden_state_distance(student, torch.randn(2, 6, 8, generator=rng), mask) > 1e-2).all()
    with pytest.raises(UsageError, match=r"hidden: a block of the teacher has 4 positions, but the student's has 6"):
        hidden_state_distance(student, student[:, :4], mask)
    assert hidden_state_distance(torch.randn(1, 5000, 2), torch.randn(1, 5000, 3), None).isfinite().all()


def test_blocks_are_matched_by_relative_depth() -> None:
    shallow, deep = [nn.Linear(1, 1) for _ in range(2)], [nn.Linear(1, 1) for _ in range(5)]
    assert match_blocks(shallow, deep) == [(shallow[0], deep[1]), (shallow[1], deep[4])]
    assert match_blocks(deep, shallow) == [(deep[1], shallow[0]), (deep[4], shallow[1])]


def test_recomputed_activations_are_recorded_once(teachers: dict[str, Path], tmp_path: Path) -> None:
    options = {**distill_from(teachers["language/shakespeare"], hidden=1.0), "model.num_layers": 2}
    plain = Subject("language/shakespeare", tmp_path, **options)
    checkpointed = Subject("language/shakespeare", tmp_path, **options, **{"training.gradient_checkpointing": True})
    assert plain.advance(3) == checkpointed.advance(3)
    assert differing_tensors(plain.weights(), checkpointed.weights()) == []
    assert isinstance(plain.engine.model, Transformer)
    assert not any(block._forward_hooks for block in find_blocks(plain.engine.model)), "hooks are removed"


def test_hidden_refuses_compile_and_models_without_blocks(teachers: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"training\.compile: .*techniques\.distill\.hidden"):
        Subject("classify", tmp_path, **distill_from(teachers["classify"], hidden=1.0), **{"training.compile": True})
    cnn = small_texts.settings(tmp_path / "cnn", "cnn", **{"data.sequence_length": 64})
    with pytest.raises(UsageError, match=r"hidden: the student is a Kim, which has no sequence of blocks"):
        bottega.train("classify/cnn", {**cnn, **distill_from(teachers["classify"], hidden=1.0)})


# Teachers


def assert_refused(match: str, recipe: str, folder: Path, /, **changes: Any) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        train(recipe, folder, **changes)
    assert caught.value.code == 2
    assert str(caught.value).startswith("techniques.distill.teacher: ")
    assert "\n" not in str(caught.value)


def test_teacher_hash_covers_weights_and_configuration() -> None:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_size": 8}
    shape = TransformerShape(**sizes, intermediate_size=32, vocab_size=20, context=16)
    other_rope = shape.model_copy(update={"rope_theta": 500.0})
    model, same, other_seed, other_config = (
        build_models(Language(shape=item), seed)["model"]
        for item, seed in ((shape, 0), (shape, 0), (shape, 1), (other_rope, 0))
    )
    assert hash_frozen(other_config, lambda name: False) == hash_frozen(model, lambda name: False)
    assert _hash_teacher(same) == _hash_teacher(model)
    assert len({_hash_teacher(item) for item in (model, other_seed, other_config)}) == 3


def test_different_vocabulary_is_refused_and_the_suggested_remedy_works(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("".join(f"Quick foxes jump over {n} lazy dogs!\n" for n in range(300)))
    teacher = train("language/shakespeare", tmp_path, name="teacher", **{"data.train.path": str(other)})
    assert_refused(
        r"has tokenizer \w{12}, but the student has tokenizer \w{12}; set data\.tokenizer",
        "language/shakespeare",
        tmp_path,
        **distill_from(teacher),
    )
    wider = train("language/shakespeare", tmp_path, name="wider", **{"model.vocab_size": 64})
    assert_refused(
        r"vocab_size 64, but the student has vocab_size 14; set model\.vocab_size=64",
        "language/shakespeare",
        tmp_path,
        **distill_from(wider),
    )
    longer = {"data.sequence_length": 32, "model.context": 32}
    assert_refused(
        r"reads 16 tokens at most, but a text may have 32 here; set data\.sequence_length=16",
        "language/shakespeare",
        tmp_path,
        **longer,
        **distill_from(train("language/shakespeare", tmp_path, name="short")),
    )
    less = tmp_path / "less.txt"
    less.write_text("lazy dogs jump over foxes\n" * 300)
    remedy = {"data.tokenizer.kind": "pretrained", "data.tokenizer.path": str(teacher / "processor")}
    assert train(
        "language/shakespeare", tmp_path, name="x", **{"data.train.path": str(less)}, **remedy, **distill_from(teacher)
    )


def test_different_classes_sizes_and_objectives_are_refused(teachers: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "classes"
    folder.mkdir()
    rows = [{**row, "label": row["label"].upper()} for row in small_texts.make_rows()]
    (folder / "upper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    upper = {"data.train.path": str(folder / "upper.jsonl")}
    assert_refused(
        r"has the 3 classes cook, sail, sing, but the student has the 3 classes COOK, SAIL, SING",
        "classify",
        folder,
        **upper,
        **distill_from(teachers["classify"]),
    )
    assert_refused(
        r"has a sample of image 8 x 8 x 1, but the student has a sample of image 4 x 4 x 1",
        "classify/image",
        tmp_path,
        **{"data.image_size": 4},
        **distill_from(teachers["classify/image"]),
    )
    assert_refused(
        r"has objective flow, but the student has objective v; set model\.objective=flow",
        "image",
        tmp_path,
        **{"model.objective": "v"},
        **distill_from(teachers["image"]),
    )
    assert_refused(
        r"has condition class, but the student has condition none; set model\.condition=class",
        "image",
        tmp_path,
        **{"model.condition": "none"},
        **distill_from(teachers["image"]),
    )
    assert_refused(
        r"has normalise \w+, but the student has normalise unit; set data\.normalise",
        "image",
        tmp_path,
        **{"data.normalise": "unit"},
        **distill_from(teachers["image"]),
    )
    assert_refused(
        r"was trained for image, not for classify of text", "classify", tmp_path, **distill_from(teachers["image"])
    )
    assert_refused(r"nowhere does not exist", "classify", tmp_path, **distill_from(tmp_path / "nowhere"))
    for name in ("classify", "classify/image", "language/shakespeare"):
        folder = tmp_path / name
        nothing = (
            rf"{tmp_path} is neither a run nor the folder of a model: it has neither recipe\.yaml nor config\.json"
        )
        assert_refused(nothing, name, folder, **distill_from(tmp_path))
        assert_refused(
            r"must not be empty; give a run, needs\.NAME or the folder of a model", name, folder, **distill_from("")
        )
        this_run = {"output_dir": str(tmp_path), "name": "x"}
        assert_refused(
            r"x is this run itself; give another run", name, folder, **this_run, **distill_from(tmp_path / "x")
        )
    assert_refused(
        r"is not a run; for images the teacher must be the directory of a run",
        "image",
        tmp_path,
        **distill_from(tmp_path),
    )


def test_adapter_is_refused_as_teacher(teachers: dict[str, Path], tmp_path: Path) -> None:
    from small_fine_tuning import NULL_SIZES

    name = "language/shakespeare"
    bottega.load(teachers[name]).export()
    lora = {**NULL_SIZES, "model.from": str(teachers[name]), "techniques": [{"name": "lora", "options": {"rank": 2}}]}
    folder = bottega.load(train(name, tmp_path, name="lora", **lora)).export(tmp_path / "out") / "adapter"
    assert (folder / "adapter_config.json").is_file()
    assert_refused(
        r"adapter is an adapter, not a complete model; give the run that", name, tmp_path, **distill_from(folder)
    )


def test_unsupported_task_is_refused(teachers: dict[str, Path], tmp_path: Path) -> None:
    shared = {k: v for k, v in small_media.image(tmp_path).items() if not k.startswith(("model.", "samples."))}
    with pytest.raises(UsageError, match=r"^techniques: distill does not support image_vae"):
        bottega.train("image_vae/digits", {**shared, "model.hidden_size": 8, **distill_from(teachers["image"])})


def test_exported_teacher_matches_its_run(teachers: dict[str, Path], tmp_path: Path) -> None:
    for name in ("language/shakespeare", "classify", "classify/image"):
        bottega.load(teachers[name]).export(tmp_path / name / "out")
        by_run = Subject(name, tmp_path / name, **distill_from(teachers[name]))
        by_folder = Subject(name, tmp_path / name, **distill_from(tmp_path / name / "out"))
        assert by_run.plan.frozen == by_folder.plan.frozen
        assert by_run.advance(2) == by_folder.advance(2)


def test_transformers_classifier_is_accepted_and_a_bare_encoder_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    encoder = small_texts.write_encoder(tmp_path / "encoder")
    small = {key: value for key, value in small_texts.settings(tmp_path).items() if not key.startswith("model.")}
    tuned = bottega.train(
        "classify/pretrained", {**small, "model.from": str(encoder), "name": "tuned", "training.num_epochs": None}
    )
    folder = bottega.load(tuned.path).export(tmp_path / "out")
    student = {"data.tokenizer.kind": "pretrained", "data.tokenizer.path": str(encoder), "data.sequence_length": 32}
    by_run, by_folder = (
        Subject("classify", tmp_path, **student, **distill_from(teacher, hidden=0.5))
        for teacher in (tuned.path, folder)
    )
    assert by_run.advance(2) == by_folder.advance(2)
    assert_refused(r"is an encoder without a classifier", "classify", tmp_path, **student, **distill_from(encoder))


def test_resume_with_a_different_teacher_is_refused(teachers: dict[str, Path], tmp_path: Path) -> None:
    teacher = Path(shutil.copytree(teachers["classify"], tmp_path / "teacher", symlinks=True))
    options = {**distill_from(teacher), "training.scheduler.name": "constant", "name": "x"}
    train("classify", tmp_path, **{**options, "training.max_steps": 4})
    shutil.rmtree(teacher)
    train("classify", tmp_path, seed=5, name="teacher")
    with pytest.raises(CheckpointError, match=r"is not the teacher that this run started with"):
        train("classify", tmp_path, **options)
    shutil.rmtree(teacher)
    shutil.copytree(teachers["classify"], teacher, symlinks=True)
    train("classify", tmp_path, **options)


# A teacher as a dependency of the recipe


def test_teacher_dependency_is_trained_first_and_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher_settings = {
        "training.max_steps": 4,
        "training.batch_size": 8,
        "model.hidden_size": 8,
        "logging.tensorboard": False,
        "logging.report": False,
    }
    options = {
        **distill_from("needs.teacher"),
        "needs.teacher": {"recipe": "classify/image", "settings": teacher_settings},
    }
    resolved = load_recipe(["classify/image", {**values("classify/image", tmp_path), **options}]).recipe
    assert dependencies.find_referenced_dependencies(resolved) == ["teacher"]
    path = dependencies.find_dependency_run(resolved, "teacher")
    chosen: Any = dependencies.resolve_references(resolved).techniques[0].options
    assert chosen.teacher == str(path)
    file = tmp_path / "both.yaml"
    file.write_text(to_yaml(resolved))
    assert cli.main(["train", str(file), "name=one"]) == 0
    output = capsys.readouterr().err
    assert output.index("training needs.teacher first") < output.index("distill: the teacher is")
    modified = (path / "checkpoints" / "last").stat().st_mtime_ns
    assert cli.main(["train", str(file), "name=two", "seed=1"]) == 0
    assert "training needs" not in capsys.readouterr().err
    assert (path / "checkpoints" / "last").stat().st_mtime_ns == modified
    assert (
        cli.main(["train", str(file), "name=three", "techniques=[{name: distill, options: {teacher: needs.other}}]"])
        == 2
    )
    assert "needs.other is not defined; the recipe's needs are: teacher" in capsys.readouterr().err


# Claims

TINY = {
    "model.num_layers": 1,
    "model.hidden_size": 32,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_size": 16,
}
TINY |= {"model.intermediate_size": 64, "model.context": 32, "data.sequence_length": 32}
LARGER = {
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_size": 32,
}
LARGER |= {"model.intermediate_size": 128, "model.context": 32, "data.sequence_length": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "student", "teacher", "options"),
    [
        (
            "image",
            {"model.hidden_size": 32, "model.num_layers": 2, "training.max_steps": 100, "training.batch_size": 16},
            {"model.hidden_size": 64, "model.num_layers": 3, "training.max_steps": 400, "training.batch_size": 64},
            {"alpha": 0.9},
        ),
        (
            "language",
            {**TINY, "training.max_steps": 100, "training.batch_size": 8},
            {**LARGER, "training.max_steps": 400, "training.batch_size": 16},
            {"alpha": 0.9, "temperature": 1.0},
        ),
    ],
    ids=["digits", "source-text"],
)
def test_a_distilled_student_beats_the_same_student_alone(
    tmp_path: Path, recipe: str, student: dict[str, Any], teacher: dict[str, Any], options: dict[str, Any]
) -> None:
    """Five seeds, equal steps, by the data loss on held-out samples; the teacher was trained on the same data."""
    quiet = {
        "output_dir": str(tmp_path),
        "logging.tensorboard": False,
        "logging.report": False,
        "logging.resources": False,
        "training.ema": None,
    }
    quiet |= {"samples.every": None, "evaluation.every": None, "checkpoint.every": None, "evaluation.max_batches": 8}
    quiet |= {"training.scheduler.warmup_steps": 10, "evaluation.batch_size": 32}
    path = bottega.train(recipe, {**quiet, **teacher, "name": "teacher"}).path
    for seed in range(5):
        both = {**quiet, **student, "seed": seed}
        bottega.train(recipe, {**both, "name": f"alone-s{seed}"})
        bottega.train(recipe, {**both, "name": f"distilled-s{seed}", **distill_from(path, **options)})
    report = compare([str(tmp_path / "alone-s*"), str(tmp_path / "distilled-s*")])
    alone, distilled = report["groups"]
    assert (alone["n"], distilled["n"], report["metric"]) == (5, 5, "loss")
    assert distilled["mean"] < alone["mean"]
    assert report["pairs"][0]["p_adjusted"] < 0.05
