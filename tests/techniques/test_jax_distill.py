"""Distillation with `engine: jax`: the numbers of torch, and teachers trained by either engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional

import bottega
import small_media
import small_run
import small_texts
from both_engines import Subject, assert_same_metrics, build_both, find_largest_difference
from bottega.core.errors import UsageError
from bottega.core.model_spec import ModelSpec
from bottega.core.types import Loss
from bottega.models.decoder.config import TransformerShape
from bottega.models.jax_build import build_abstract_model, build_model, draw_weights, has_jax_form
from bottega.models.jax_layers import forward_context
from bottega.models.jax_noise import JaxNoise
from bottega.tasks.language.task import Language
from bottega.techniques.distill import jax as jax_distill
from bottega.techniques.distill import torch as torch_distill
from bottega.techniques.distill.task import TEACHER, Distillation
from jax_twins import QUICK_TO_COMPILE


def language(folder: Path) -> dict[str, Any]:
    return small_run.settings(folder, small_run.write_text(folder / "text.txt"))


def image(folder: Path) -> dict[str, Any]:
    shared = {
        key: value for key, value in small_media.image(folder).items() if not key.startswith(("model.", "samples."))
    }
    return {**shared, "model.hidden_size": 8}


RECIPES: dict[str, tuple[Callable[[Path], dict[str, Any]], dict[str, Any]]] = {
    "language/shakespeare": (language, {"model.num_layers": 2}),
    "classify": (small_texts.settings, {"model.num_layers": 1}),
    "classify/image": (image, {"model.hidden_size": 4}),
    "image": (small_media.image, {"model.num_layers": 1}),
}
"""Recipe -> its settings, and the sizes in which the student differs from the teacher."""


def settings(recipe: str, folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {**RECIPES[recipe][0](folder), "model.dropout": 0.0, **changes}


def train_teacher(recipe: str, folder: Path, **changes: Any) -> Path:
    # Other weights and large updates, so that its outputs differ from the student's.
    apart = {"name": "teacher", "seed": 1, "training.learning_rate": 0.03}
    path: Path = bottega.train(recipe, settings(recipe, folder, **apart, **changes)).path
    return path


def distill_from(teacher: Path, **options: Any) -> dict[str, Any]:
    return {"techniques": [{"name": "distill", "options": {"teacher": str(teacher), **options}}]}


def pad_last(batch: dict[str, Any]) -> dict[str, Any]:
    """Mark the last example as padding."""
    size = len(next(value for value in batch.values() if np.ndim(value)))
    return {**batch, "weight": (np.arange(size) < size - 1).astype(np.float32)}


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.slow] if name == "classify/image" else []) for name in RECIPES]
)
def test_a_student_of_a_teacher_trained_by_torch_equals_torch(recipe: str, tmp_path: Path) -> None:
    teacher = train_teacher(recipe, tmp_path)
    options = distill_from(teacher, alpha=0.7, temperature=3.0)
    student = settings(recipe, tmp_path, **RECIPES[recipe][1], **options)
    torch_side, jax_side = build_both(recipe, student)
    assert jax_side.plan.frozen == torch_side.plan.frozen, "a resumed run compares the hash of its teacher"
    assert jax_side.plan.notes == torch_side.plan.notes
    actual, expected = jax_side.advance(0, 5, pad_last), torch_side.advance(0, 5, pad_last)
    assert_same_metrics(actual, expected)
    assert min(report["distill"] for report in actual) > 1e-3
    assert find_largest_difference(torch_side.state(), jax_side.state()) < 1e-5
    assert jax_side.evaluate() == pytest.approx(torch_side.evaluate(), rel=1e-4, abs=1e-6)


# Teachers


def test_a_teacher_trained_by_jax_and_its_export_teach_in_both_engines(tmp_path: Path) -> None:
    recipe = "language/shakespeare"
    teacher = train_teacher(recipe, tmp_path, engine="jax", **{"training.max_steps": 2, "evaluation.every": None})
    torch_side, jax_side = build_both(recipe, settings(recipe, tmp_path, **distill_from(teacher)))
    assert jax_side.plan.frozen == torch_side.plan.frozen
    expected = torch_side.evaluate()
    assert expected["distill"] > 1e-3
    assert jax_side.evaluate() == pytest.approx(expected, rel=1e-4)
    folder = bottega.load(teacher).export(tmp_path / "exported")
    from_folder = Subject(recipe, settings(recipe, tmp_path, **distill_from(folder)), engine="jax")
    assert from_folder.evaluate() == pytest.approx(expected, rel=1e-4)


def test_teachers_without_a_jax_form_are_refused(tmp_path: Path) -> None:
    recipe = "language/shakespeare"
    short = {"training.max_steps": 1, "evaluation.every": None}
    experts = train_teacher(recipe, tmp_path, **short, **{"model.kind": "moe", "model.num_experts": 2})
    base = bottega.load(train_teacher(recipe, tmp_path / "plain", **short)).export(tmp_path / "base")
    lora = {**short, "model": {"from": str(base)}, "techniques": ["lora"], "name": "lora"}
    for teacher, message in (
        (experts, r"has no JAX form; .*use engine=torch"),
        (bottega.load(experts).export(tmp_path / "experts"), r"is a model without a JAX form; .*use engine=torch"),
        (
            bottega.train(recipe, fine_tuning_settings(tmp_path, **lora)).path,
            r"engine: jax has no lora; export the run",
        ),
    ):
        with pytest.raises(UsageError, match=rf"^techniques\.distill\.teacher: .*{message}") as caught:
            Subject(recipe, settings(recipe, tmp_path, **distill_from(teacher)), engine="jax")
        assert caught.value.code == 2
        assert "\n" not in str(caught.value)


def fine_tuning_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the settings of a model that starts from a folder, which has the shape."""
    plain = {key: value for key, value in settings("language/shakespeare", folder).items() if "model." not in key}
    return {**plain, **changes}


# The formula

SHAPE = TransformerShape(
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=2,
    head_size=8,
    intermediate_size=32,
    vocab_size=11,
    context=8,
)


def test_losses_of_logits_equal_torch() -> None:
    rng = np.random.default_rng(0)
    student, teacher = rng.standard_normal((2, 4, 3, 5), dtype=np.float32) * 4
    targets = rng.integers(0, 5, (4, 3))
    targets[1, 2] = -100
    pair = torch.from_numpy(student), torch.from_numpy(teacher)
    for name in ("softened_kl", "softened_binary_kl"):
        expected = getattr(torch_distill, name)(*pair, 1.5).numpy()
        np.testing.assert_allclose(getattr(jax_distill, name)(student, teacher, 1.5), expected, rtol=1e-5, atol=1e-6)
    expected = functional.cross_entropy(pair[0].flatten(0, 1), torch.from_numpy(targets).flatten(), reduction="sum")
    assert float(jax_distill.token_cross_entropy(student, targets)) == pytest.approx(float(expected), rel=1e-6)


def compute_training_loss(task: Distillation, teacher: Any) -> Loss:
    """Return the loss of a step of training, with dropout, of a student with the initial weights of seed 0."""
    student = build_model(task.specs()["model"], 0)
    batch = {"input_ids": np.random.default_rng(0).integers(0, 11, (3, 9))}

    def compute(key: Any) -> Loss:
        with forward_context(dropout_key=key):
            return task.loss({"model": student, TEACHER: teacher}, batch, JaxNoise(0, 0, np.arange(3)))

    return jax.jit(compute, compiler_options=QUICK_TO_COMPILE)(jax.random.key(0))


def test_the_teacher_has_no_dropout_in_training() -> None:
    """A teacher with the student's weights agrees with it, although its configuration has dropout."""
    with_dropout = Language(shape=SHAPE.model_copy(update={"dropout": 0.5}))
    teacher = build_model(with_dropout.specs()["model"], 0)
    out = compute_training_loss(Distillation(inner=Language(shape=SHAPE), form="tokens", teacher=teacher), teacher)
    assert abs(float(out.terms["distill"][0])) < 1e-5
    dropped = compute_training_loss(Distillation(inner=with_dropout, form="tokens", teacher=teacher), teacher)
    assert float(dropped.terms["distill"][0]) > 1e-2
    assert {name: weight for name, (_, weight) in out.terms.items()} == {"loss": 0.5, "distill": 0.5}


def test_the_teacher_is_not_called_in_training_with_alpha_zero() -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the teacher was called")

    out = compute_training_loss(
        Distillation(inner=Language(shape=SHAPE), form="tokens", teacher=None, alpha=0.0), refuse
    )
    assert list(out.terms) == ["loss"]


def test_texts_are_not_padded_to_more_tokens_than_the_teacher_reads() -> None:
    class Padding(Language):
        def bucket(self, batch: Any) -> Any:
            return {name: np.pad(value, ((0, 0), (0, 12))) for name, value in batch.items()}

    batch = {"input_ids": np.ones((2, 20), int), "attention_mask": np.ones((2, 20), int)}
    inner = Padding(shape=SHAPE)
    for max_tokens, length in ((None, 32), (24, 24), (64, 32)):
        task = Distillation(inner=inner, form="classes", teacher=None, padding="attention_mask", max_tokens=max_tokens)
        assert {name: value.shape for name, value in task.bucket(batch).items()} == {
            "input_ids": (2, length),
            "attention_mask": (2, length),
        }


def test_a_built_model_is_described_without_copying_its_weights() -> None:
    model = build_model(Language(shape=SHAPE).specs()["model"], 0)
    spec = ModelSpec.of(model)
    assert has_jax_form(spec)
    assert not has_jax_form(ModelSpec.of(torch.nn.Linear(2, 2)))
    abstract, weights = build_abstract_model(spec), draw_weights(spec, model, 0)
    assert list(abstract.variables()) == list(weights) == list(model.named_parameters())
    assert all(isinstance(variable.get_value(), jax.ShapeDtypeStruct) for variable in abstract.variables().values())
    assert all(weights[name] is value for name, value in model.named_parameters().items())
