"""Classes and losses of classifiers: unknown held-out labels, the loss in nats, class weights by name, and notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bottega
import small_texts
from bottega import cli
from bottega.core.errors import DataError, UsageError
from bottega.core.noise import Noise
from bottega.models.build import build_models
from bottega.tasks import registry
from bottega.tasks.classify.task import Classification
from bottega.tasks.recipes import load_recipe


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def open_workload(folder: Path, changes: dict[str, Any], recipe: str = "classify") -> Any:
    values = {k: v for k, v in small_texts.settings(folder).items() if k != "data.test"} | changes
    return registry.open_workload(load_recipe([recipe, values]).recipe, progress=lambda stage, done, total: None)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_unknown_held_out_label_suggests_the_nearest_class(split: str, tmp_path: Path) -> None:
    rows = [*small_texts.make_rows(12, seed=1), {"text": "salt", "label": "coook"}]
    held_out = {f"data.{split}.path": write_rows(tmp_path / "held.jsonl", rows)}
    held_out |= {"data.validation.split": None} if split == "validation" else {}
    with pytest.raises(DataError, match=r"held.jsonl:13.* 'coook' is not one of the 3 classes .* did you mean 'cook'"):
        open_workload(tmp_path, held_out)
    assert len(open_workload(tmp_path, {**held_out, "model.num_labels": 4}).classes) == 4


def test_folds_share_their_classes_and_rare_ones_are_noted(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rare.jsonl", [*small_texts.make_rows(48), {"text": "salt and rope", "label": "coook"}]
    )
    folds = {"data.train.path": path, "data.validation.split": None, "data.split.folds": 3}
    workloads = [open_workload(tmp_path, {**folds, "data.split.fold": fold}) for fold in range(3)]
    assert {workload.classes.names for workload in workloads} == {("cook", "coook", "sail", "sing")}
    assert all(
        any("1 of 4 classes have at most 2 training samples: 'coook'" in note for note in workload.data.notes)
        for workload in workloads
    )


def test_held_out_only_classes_are_refused_except_for_meta_learning(tmp_path: Path) -> None:
    def open_recipe(recipe: str, **changes: Any) -> Any:
        loaded = load_recipe([recipe, {"output_dir": str(tmp_path), **changes}]).recipe
        return registry.open_workload(loaded, progress=lambda stage, done, total: None)

    assert len(open_recipe("classify/few-shot").classes) == 10
    with pytest.raises(DataError, match="is not one of the 6 classes"):
        open_recipe("classify/few-shot", techniques=[])


OBJECTIVES = [
    {"objective": "focal"},
    {"label_smoothing": 0.2},
    {"class_weights": (1.0, 5.0, 0.5)},
    {"class_weights": (1.0, 5.0, 0.5), "objective": "focal", "label_smoothing": 0.1},
]


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("changes", OBJECTIVES)
def test_evaluation_reports_cross_entropy_for_any_objective(changes: dict[str, Any], multi_label: bool) -> None:
    shape = {"kind": "cnn", "vocab_size": 20, "num_labels": 3, "embed_size": 4, "num_filters": 4, "dropout": 0.0}
    plain = Classification(key="text", shape=shape, multi_label=multi_label)  # type: ignore[arg-type]
    other = Classification(key="text", shape=shape, multi_label=multi_label, **changes)  # type: ignore[arg-type]
    assert (plain.has_modified_loss, other.has_modified_loss) == (False, True)
    model = build_models(plain, 0)["model"]
    rng = np.random.default_rng(0)
    batch: dict[str, Any] = {"input_ids": rng.integers(0, 20, (6, 8)), "attention_mask": np.ones((6, 8), np.int64)}
    batch |= {"labels": rng.integers(0, 2, (6, 3))} if multi_label else {"label": rng.integers(0, 3, 6)}
    batch["weight"] = np.array([1, 1, 1, 1, 1, 0])
    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    noise = Noise(0, 0, torch.arange(6), torch)

    @torch.no_grad()
    def evaluate_task(task: Classification) -> dict[str, float]:
        model.eval()
        out, counts = task.loss({"model": model}, tensors, noise), task.counts(batch)
        metrics = {name: float(total) / counts[name] for name, (total, _) in out.terms.items()}
        return metrics | {name: float(total) / float(count) for name, (total, count) in out.metrics.items()}

    expected, metrics = evaluate_task(plain), evaluate_task(other)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert "objective" not in expected
    with torch.no_grad():
        out = other.loss({"model": model}, tensors, noise)
    assert metrics["objective"] == pytest.approx(float(out.terms["loss"][0]) / other.counts(batch)["loss"], rel=1e-6)
    model.train()
    with torch.no_grad():
        training = other.loss({"model": model}, tensors, noise)
    assert not {"loss", "objective"} & training.metrics.keys(), "training reports its own objective"
    assert float(training.terms["loss"][0]) == pytest.approx(float(out.terms["loss"][0]), rel=1e-6)


def test_class_weights_by_name(tmp_path: Path) -> None:
    workload = open_workload(tmp_path, {"loss.class_weights": {"sing": 3, "cook": 2}})
    assert workload.classes.names == ("cook", "sail", "sing")
    assert workload.task.class_weights == (2.0, 1.0, 3.0)
    workload.processor.save(tmp_path / "processor")
    again = registry.reopen_workload(workload.recipe, tmp_path / "processor", workload.data.fingerprint)
    assert again.task.class_weights == (2.0, 1.0, 3.0)  # type: ignore[attr-defined]
    with pytest.raises(
        UsageError, match=r"loss.class_weights: 'sings' is not one of the 3 classes; did you mean 'sing'"
    ):
        open_workload(tmp_path, {"loss.class_weights": {"sings": 3}})


def test_settings_without_effect_are_refused_or_noted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gamma 1 applies to the focal loss"):
        load_recipe(["classify", {"loss.gamma": 1.0}])
    values: dict[str, Any] = dict.fromkeys(("model.hidden_size", "model.num_layers", "model.num_heads"))
    values |= {"model.kind": "pretrained", "model.from": str(small_texts.write_encoder(tmp_path / "encoder"))}
    workload = open_workload(tmp_path, {**values, "data.tokenizer.kind": "bpe"})
    assert any("data.tokenizer.kind: bpe is not used" in note for note in workload.data.notes)
    assert not any("is not used" in note for note in open_workload(tmp_path, values).data.notes)


def test_truncated_texts_are_noted(tmp_path: Path) -> None:
    workload = open_workload(tmp_path, {"data.sequence_length": 8})
    lengths = [len(ids) for ids in workload._tokenise([row["text"] for row in small_texts.make_rows()])]
    assert any(
        f"of {len(workload.data.training())} texts are truncated to 8 tokens: data.sequence_length" in note
        for note in workload.data.notes
    )
    assert workload.count_truncated([row["text"] for row in small_texts.make_rows()]) == (
        sum(n > 8 for n in lengths),
        8,
    )
    assert not any(
        "are truncated" in note for note in open_workload(tmp_path, {"data.sequence_length": 128}).data.notes
    )


def test_multi_label_defaults_to_exact_match(tmp_path: Path) -> None:
    rows = [{**row, "label": [row["label"]]} for row in small_texts.make_rows(48)]
    values = small_texts.settings(tmp_path) | {"data.train.path": write_rows(tmp_path / "several.jsonl", rows)}
    with pytest.raises(DataError, match=r"is a list; set data.multi_label=true"):
        bottega.train("classify", values)
    result = bottega.train("classify", {**values, "data.multi_label": True, "training.max_steps": 4})
    assert "exact_match" in result.metrics
    assert bottega.load(result.path).recipe.evaluation.metric == "exact_match"


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", b""), ("a.csv", b"text,label\n"), ("b.csv", b"")])
def test_a_file_without_rows_is_refused(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert cli.main(["prepare", "classify", "--data", str(tmp_path / name), "data.split=null"]) == 3
    assert f"{name} is empty" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_utf16_is_refused_by_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = {"csv": "text,label\na,b\nc,d\n", "jsonl": '{"text": "a", "label": "b"}\n', "txt": "a b\n"}[name[2:]]
    (tmp_path / name).write_bytes(text.encode("utf-16"))
    task = "language" if name == "a.txt" else "classify"
    assert cli.main(["prepare", task, "--data", str(tmp_path / name), "data.split=null"]) == 3
    assert (
        "UTF-16, not UTF-8; set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv"
        in capsys.readouterr().err
    )


def test_a_row_without_label_suggests_skipping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*small_texts.make_rows(24), {"text": "salt", "label": None}, {"text": "rope"}]
    path = write_rows(tmp_path / "missing.jsonl", rows[:-1])
    assert cli.main(["prepare", "classify", "--data", path, "data.split=null"]) == 3
    assert "set data.bad_records=skip" in capsys.readouterr().err
    path = write_rows(tmp_path / "missing.jsonl", [*rows[:-2], rows[-1]])
    assert cli.main(["prepare", "classify", "--data", path, "data.split=null"]) == 3
    assert "set data.bad_records=skip" in capsys.readouterr().err
