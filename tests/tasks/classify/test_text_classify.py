"""Text classification from data to prediction: each model, its processor, other data and export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_texts
from bottega.core.errors import DataError, UsageError
from bottega.data.loading.loader import iter_eval_batches
from bottega.tasks import registry
from bottega.tasks.classify.text_workload import TextClassifyWorkload
from bottega.tasks.evaluation_data import DataRequest
from bottega.tasks.recipes import load_recipe

ENOUGH_TRAINING = {
    "training.max_steps": 40,
    "training.learning_rate": 1e-2,
    "evaluation.every": 40,
    "checkpoint.every": 40,
}


def open_workload(values: dict[str, Any]) -> TextClassifyWorkload:
    workload = registry.open_workload(
        load_recipe(["classify/transformer", values]).recipe, progress=lambda stage, done, total: None
    )
    assert isinstance(workload, TextClassifyWorkload)
    return workload


@pytest.fixture(scope="module", params=["transformer", "cnn", "pretrained"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    values = small_texts.settings(folder, "cnn" if request.param == "cnn" else "transformer", **ENOUGH_TRAINING)
    if request.param == "pretrained":
        values = {k: v for k, v in values.items() if not k.startswith("model.")}
        values |= {"model.from": str(small_texts.write_encoder(folder / "encoder")), "training.learning_rate": 5e-3}
        values |= {"training.max_steps": 100, "evaluation.every": 100}
    return bottega.train("classify/transformer", {**values, "name": "run"}).path


def test_each_model_learns_and_predicts_new_texts(run: Path) -> None:
    saved = bottega.load(run)
    metrics = saved.evaluate()
    assert metrics["accuracy"] > 0.9
    assert {"macro_f1", "weighted_f1", "ece", "auroc"} <= metrics.keys()
    rows = small_texts.make_rows(30, seed=5)
    with saved.engine.sampling() as models:
        probabilities = saved.workload.predict(models, [row["text"] for row in rows], device="cpu", batch_size=7)
        single = saved.workload.predict(models, [rows[4]["text"]], device="cpu")
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(single[0], probabilities[4], atol=1e-5)
    predictions = [saved.workload.classes.names[i] for i in probabilities.argmax(1)]
    assert np.mean([name == row["label"] for name, row in zip(predictions, rows, strict=True)]) > 0.9


def test_other_data_is_read_with_the_classes_of_the_run(run: Path, tmp_path: Path) -> None:
    saved = bottega.load(run)
    two = [row for row in small_texts.make_rows(30, seed=9) if row["label"] != "cook"]
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in two))
    assert saved.evaluate(path)["accuracy"] > 0.9, "classes keep their indices if one is missing"
    path.write_text(json.dumps({"text": "salt", "label": "cooks"}) + "\n")
    with pytest.raises(
        DataError, match="'cooks' is not one of the 3 classes of the training data; did you mean 'cook'"
    ):
        saved.evaluate(path)


def test_a_run_opens_without_its_data_and_base_model(run: Path, tmp_path: Path) -> None:
    import shutil

    moved = tmp_path / "moved"
    shutil.copytree(run, moved, symlinks=True)
    before = bottega.load(run)
    for file in run.parent.glob("*.jsonl"):
        file.rename(file.with_suffix(".gone"))
    try:
        after = bottega.load(moved)
        texts = [row["text"] for row in small_texts.make_rows(6)]
        with before.engine.sampling() as a, after.engine.sampling() as b:
            np.testing.assert_array_equal(
                before.workload.predict(a, texts, device="cpu"), after.workload.predict(b, texts, device="cpu")
            )
    finally:
        for file in run.parent.glob("*.gone"):
            file.rename(file.with_suffix(".jsonl"))


def test_the_export_of_a_pretrained_encoder_opens_in_transformers(run: Path, tmp_path: Path) -> None:
    saved = bottega.load(run)
    folder = saved.export(tmp_path / "export")
    texts = [row["text"] for row in small_texts.make_rows(5, seed=3)]
    with saved.engine.sampling() as models:
        ours = saved.workload.predict(models, texts, device="cpu")
    if saved.recipe.model.kind != "pretrained":
        config = json.loads((folder / "config.json").read_text())
        assert config["classes"] == list(saved.workload.classes.names)
        assert (folder / "model.safetensors").is_file()
        return
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        theirs = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.softmax(1)
    np.testing.assert_allclose(theirs.numpy(), ours, atol=1e-6)
    assert model.config.id2label == dict(enumerate(saved.workload.classes.names))


def test_gradual_unfreezing_trains_layer_by_layer_and_exports(tmp_path: Path) -> None:
    """The head only, then one more layer every four steps, never the embeddings; transformers gives equal logits."""
    import transformers
    from safetensors.numpy import load_file

    start = small_texts.write_encoder(tmp_path / "encoder")
    values = {k: v for k, v in small_texts.settings(tmp_path).items() if not k.startswith("model.")}
    values |= {"model.from": str(start), "training.freeze": ["backbone.embeddings"], "training.unfreeze.layers_per": 4}
    values |= {"training.max_steps": 16, "checkpoint.every": 4, "checkpoint.keep": 9, "name": "thawed"}
    run_path = bottega.train("classify/transformer", values).path
    before = load_file(start / "model.safetensors")
    checkpoints = {
        step: load_file(run_path / f"checkpoints/step-{step:08d}/model.safetensors") for step in (4, 8, 12, 16)
    }

    def is_changed(name: str, step: int) -> bool:
        (tensor_at_step,) = (tensor for full_name, tensor in checkpoints[step].items() if full_name.endswith(name))
        return not np.array_equal(tensor_at_step, before[name])

    layers = [f"encoder.layer.{n}.attention.self.query.weight" for n in range(2)]
    assert [[is_changed(name, step) for name in layers] for step in (4, 8, 12, 16)] == [
        [False, False],
        [False, True],
        [True, True],
        [True, True],
    ]
    assert not is_changed("embeddings.word_embeddings.weight", 16)

    saved = bottega.load(run_path, checkpoint="last")
    folder = saved.export(tmp_path / "export")
    texts = [row["text"] for row in small_texts.make_rows(7, seed=3)]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad(), saved.engine.sampling() as models:
        theirs = model(**tokens).logits
        ours = saved.task.predict(models, {k: tokens[k] for k in ("input_ids", "attention_mask")})
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_evaluation_batches_by_length_and_returns_rows_in_order(run: Path) -> None:
    saved = bottega.load(run)
    source = saved.workload.data.validation()
    order = source.length_order(len(source))
    assert sorted(order) == list(range(len(source)))
    assert (np.diff(source.lengths()[order]) >= 0).all()
    assert list(order) != sorted(order), "the texts must not be sorted by length already"
    sizes = [len(batch["input_ids"]) for batch in iter_eval_batches(source, 8)]
    assert sum(sizes) == len(source)
    _, rows, _ = saved.evaluate_data(saved.select_data(DataRequest()))
    assert "index" not in rows
    np.testing.assert_array_equal(rows["label"], source.labels)
    texts = [source.table.row("text", row) for row in range(len(source))]
    with saved.engine.sampling() as models:
        single = saved.workload.predict(models, texts, device="cpu", batch_size=1)
    np.testing.assert_allclose(rows["probability"], single, atol=1e-5)


def test_multi_label_texts_are_learned(tmp_path: Path) -> None:
    rows = [
        {**row, "label": [row["label"], "long"] if len(row["text"]) > 40 else [row["label"]]}
        for row in small_texts.make_rows(96)
    ]
    path = tmp_path / "several.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = small_texts.settings(tmp_path, **ENOUGH_TRAINING)
    values |= {"data.train.path": str(path), "data.multi_label": True, "evaluation.metric": "macro_f1"}
    result = bottega.train("classify/transformer", values)
    assert result.metrics["macro_f1"] > 0.8
    assert {"exact_match", "label_accuracy"} <= result.metrics.keys()


def test_balanced_weights_are_those_of_the_training_texts(tmp_path: Path) -> None:
    rows = [row for row in small_texts.make_rows(200) if row["label"] != "sing" or len(row["text"]) > 40]
    path = tmp_path / "rare.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {**small_texts.settings(tmp_path), "data.train.path": str(path), "loss.class_weights": "balanced"}
    workload = open_workload(values)
    labels = workload.data.training().rows(
        np.arange(len(workload.data.training())), np.zeros(len(workload.data.training()), int)
    )["label"]
    counts = np.bincount(labels)
    np.testing.assert_allclose(workload.task.class_weights, counts.sum() / (3 * counts))
    workload.processor.save(tmp_path / "processor")
    again = registry.reopen_workload(workload.recipe, tmp_path / "processor", workload.data.fingerprint)
    assert again.task == workload.task, "a reopened run computes the same loss"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.hidden_size": 30, "model.num_heads": 4}, "hidden_size 30 does not give each of 4 heads"),
        ({"loss.class_weights": [1.0, 2.0]}, "class_weights: 2 weights for 3 classes"),
        (
            {"model.word_dropout": 0.1, "data.tokenizer.kind": "bytes"},
            "word_dropout: 0.1 needs text and a tokenizer with an unknown token",
        ),
        ({"model.vocab_size": 5, "data.tokenizer.kind": "bytes"}, "model.vocab_size: 5 is less than the tokenizer's"),
    ],
)
def test_conflicting_settings_are_refused_in_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        open_workload({**small_texts.settings(tmp_path), **changes})
    assert "\n" not in str(caught.value)


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text("".join(json.dumps({**row, "label": "cook"}) + "\n" for row in small_texts.make_rows(40)))
    with pytest.raises(DataError, match="are of the class 'cook'"):
        open_workload({**small_texts.settings(tmp_path), "data.train.path": str(path)})
