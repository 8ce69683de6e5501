"""Text classifiers over n-grams: training, predictions without the data, the saved processor, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_texts
from bottega import cli
from bottega.core.errors import DataError, UsageError
from bottega.data.text.ngrams import IDF_FILE, count_ngrams
from bottega.models.text_classifier.config import EncoderShape, KimShape, NgramShape
from bottega.tasks import registry
from bottega.tasks.classify.text_shape import resolve_text_classifier_shape
from bottega.tasks.recipes import check_recipe, load_recipe

STEPS = {"training.max_steps": 40, "evaluation.every": 20, "checkpoint.every": 20}


def open_workload(values: dict[str, Any]) -> Any:
    return registry.open_workload(load_recipe(["classify", values]).recipe, progress=lambda stage, done, total: None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run whose data is gone."""
    folder = tmp_path_factory.mktemp("ngrams")
    run = bottega.train(
        "classify", {**small_texts.settings(folder, "ngrams", **STEPS), "model.num_buckets": 4096, "name": "run"}
    )
    assert run.metrics["accuracy"] >= 0.9
    (folder / "texts.jsonl").unlink()
    return run.path


def predict(path: Path, texts: list[str]) -> np.ndarray:
    saved = bottega.load(path, device="cpu")
    with saved.engine.sampling() as models:
        return saved.workload.predict(models, texts, device="cpu", batch_size=2)


def test_a_run_predicts_without_its_data(trained: Path) -> None:
    texts = [row["text"] for row in small_texts.make_rows(30, seed=7)]
    labels = [sorted(small_texts.WORDS).index(row["label"]) for row in small_texts.make_rows(30, seed=7)]
    probabilities = predict(trained, texts)
    assert (probabilities.argmax(1) == labels).mean() >= 0.9
    np.testing.assert_allclose(predict(trained, texts[5:6])[0], probabilities[5], atol=1e-6)


def test_a_text_without_known_ngrams_gets_the_bias_alone(trained: Path) -> None:
    saved = bottega.load(trained, device="cpu")
    has_weight = saved.workload.ngrams.idf > 0
    unknown = next(
        word
        for word in ("qqqq", "zx", "jwv", "uu", "vvk", "yyx")
        if not has_weight[count_ngrams([word], saved.workload.ngrams.spec).buckets].any()
    )
    probabilities = predict(trained, ["", unknown])
    np.testing.assert_allclose(probabilities, np.broadcast_to(probabilities[0], probabilities.shape), atol=1e-6)
    assert np.isfinite(probabilities).all()


def test_other_texts_are_evaluated_as_they_are_predicted(trained: Path, tmp_path: Path) -> None:
    path = small_texts.write_texts(tmp_path, "other.jsonl", count=20, seed=3)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    predicted = predict(trained, [row["text"] for row in rows]).argmax(1)
    labels = [sorted(small_texts.WORDS).index(row["label"]) for row in rows]
    assert bottega.load(trained, device="cpu").evaluate(path)["accuracy"] == pytest.approx((predicted == labels).mean())


def test_a_damaged_weighting_is_reported_in_one_line(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(trained, tmp_path / "run", symlinks=True)
    (copy / "processor" / IDF_FILE).write_bytes(b"")
    assert cli.main(["predict", str(copy), "salt"]) == 4
    assert f"cannot read {copy / 'processor' / IDF_FILE}" in capsys.readouterr().err


def test_an_export_describes_the_network_in_full(trained: Path) -> None:
    final = bottega.load(trained, device="cpu").export()
    config = json.loads((final / "config.json").read_text())
    assert config["shape"] == {"kind": "ngrams", "num_buckets": 4096, "num_labels": 3, "buckets_per_row": 1}
    assert config["ngrams"] == {"words": 2, "characters": [3, 5], "buckets": 4096}
    assert np.load(final / IDF_FILE, allow_pickle=False).shape == (4096,)


def test_frequencies_are_those_of_the_training_texts_alone(tmp_path: Path) -> None:
    values = small_texts.settings(tmp_path, "ngrams")
    workload = open_workload(values)
    table = workload.data.prepared.table("train")
    frequencies = np.bincount(table.values("ngrams"), minlength=512)
    expected = np.where(frequencies > 0, 1 + np.log((1 + len(table)) / (1 + frequencies)), 0)
    np.testing.assert_allclose(workload.ngrams.idf, expected, rtol=1e-6)
    workload.processor.save(tmp_path / "processor")
    again = registry.reopen_workload(workload.recipe, tmp_path / "processor", workload.data.fingerprint)
    assert again.task == workload.task
    assert again.ngrams.equals(workload.ngrams)
    other = open_workload({**values, "data.validation.split": 0.5})
    with pytest.raises(DataError, match="the n-grams or the classes of the data differ"):
        other.processor.save(tmp_path / "processor")


def test_several_labels_are_learned(tmp_path: Path) -> None:
    rows = [
        {**row, "label": [row["label"], "long"] if len(row["text"]) > 40 else [row["label"]]}
        for row in small_texts.make_rows(96)
    ]
    path = tmp_path / "several.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = small_texts.settings(tmp_path, "ngrams", **STEPS)
    values |= {"data.train.path": str(path), "data.multi_label": True, "evaluation.metric": "macro_f1"}
    assert bottega.train("classify", values).metrics["macro_f1"] > 0.7


@pytest.mark.parametrize(
    ("num_classes", "num_buckets", "buckets_per_row"),
    [(3, None, 1), (16, None, 1), (17, None, 2), (52, None, 4), (10_000, None, 8), (52, 4096, 1)],
)
def test_many_classes_share_rows_unless_the_recipe_sets_the_buckets(
    num_classes: int, num_buckets: int | None, buckets_per_row: int
) -> None:
    recipe: Any = check_recipe(["classify", {"model.num_buckets": num_buckets}]).recipe
    shape = resolve_text_classifier_shape(recipe, 100, [str(i) for i in range(num_classes)])
    assert shape == NgramShape(
        num_buckets=num_buckets or 1 << 18, num_labels=num_classes, buckets_per_row=buckets_per_row
    )


@pytest.mark.parametrize(("kind", "shape"), [("ngrams", NgramShape), ("cnn", KimShape), ("transformer", EncoderShape)])
def test_model_keys_select_the_ngrams(kind: str, shape: type, tmp_path: Path) -> None:
    keys = {"model.num_buckets": 300, "model.word_ngrams": 0, "model.character_ngrams": [2, 3]}
    if kind != "ngrams":
        keys["model.wide"] = True
    workload = open_workload({**small_texts.settings(tmp_path, kind), **keys})
    assert isinstance(workload.shape, shape)
    assert workload.shape.num_buckets == 300
    assert (workload.ngrams.spec.words, workload.ngrams.spec.characters) == (0, (2, 3))
    words_only = open_workload(
        {**small_texts.settings(tmp_path, kind), **keys, "model.word_ngrams": 3, "model.character_ngrams": []}
    )
    assert words_only.ngrams.spec.characters is None
    assert len(np.unique(words_only.data.prepared.table("train").values("ngrams"))) <= 300
    if kind != "ngrams":
        assert open_workload({**small_texts.settings(tmp_path, kind), "model.wide": False}).ngrams is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.num_buckets": 0}, "num_buckets"),
        ({"model.num_buckets": 1 << 40}, "num_buckets"),
        ({"model.word_ngrams": 99}, "word_ngrams"),
        ({"model.character_ngrams": [5, 3]}, r"such as \[3, 5\]"),
        ({"model.character_ngrams": [3]}, r"such as \[3, 5\]"),
        ({"model.character_ngrams": 3}, r"such as \[3, 5\]"),
        ({"model.word_ngrams": 0, "model.character_ngrams": []}, "leaves no n-grams"),
        ({"model.kind": "ngrams", "model.from": "somewhere"}, "does not start from other weights"),
        ({"model.kind": "cnn", "model.wide": True, "model.from": "somewhere"}, "cannot be combined with weights"),
        ({"model.kind": "ngram"}, "did you mean"),
        ({"model.kind": "cnn", "model.word_ngrams": 3}, "kind cnn has no n-grams; set model.wide: true"),
        ({"model.kind": "transformer", "model.num_buckets": 512}, "kind transformer has no n-grams"),
        ({"model.wide": True}, "true applies to cnn and transformer, but model.kind is ngrams; remove it"),
        ({"data.input": "image", "model.kind": "ngrams"}, "kind"),
    ],
)
def test_wrong_keys_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_recipe(["classify", changes])


def test_words_that_occur_once_are_no_error(tmp_path: Path) -> None:
    """The vocabulary of words is for networks."""
    rows = [{"text": f"{word}{i}x", "label": word} for i in range(40) for word in ("good", "bad")]
    path = tmp_path / "once.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data.train.path": str(path)}
    open_workload({**small_texts.settings(tmp_path, "ngrams"), **changes})
    with pytest.raises(DataError, match="no word occurs 2 times"):
        open_workload({**small_texts.settings(tmp_path, "transformer"), **changes})


def test_second_derivatives_are_refused_with_the_remedy(tmp_path: Path) -> None:
    values = small_texts.settings(tmp_path, "ngrams", **STEPS)
    options = {"ways": 2, "shots": 2, "queries": 2}
    with pytest.raises(UsageError, match=r"no second derivative; set techniques\.maml\.method to fomaml or reptile"):
        bottega.train("classify", {**values, "techniques": [{"name": "maml", "options": options}]})


def test_pretrained_weights_replace_the_ngrams_of_the_recipe() -> None:
    model: Any = load_recipe(["classify", {"model.from": "bert-base-uncased"}]).recipe.model
    assert (model.kind, model.ngrams) == ("pretrained", None)


def test_data_that_was_prepared_without_ngrams_is_refused(tmp_path: Path) -> None:
    values = {**small_texts.settings(tmp_path, "transformer"), "data.split": None}
    prepared = open_workload(values).data.prepared
    ngrams = {**small_texts.settings(tmp_path, "ngrams"), "data.train.path": str(prepared.folder)}
    with pytest.raises(DataError, match="was prepared without the n-grams that this model needs"):
        open_workload({**ngrams, "data.train.kind": "shards", "data.split": None, "data.validation": None})
