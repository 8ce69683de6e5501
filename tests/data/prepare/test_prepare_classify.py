"""Labelled texts from file to tables: label types, invalid labels, and pretrained tokenizers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from bottega.config.data import HeldOut, Source, Splitting
from bottega.core.errors import DataError, UsageError
from bottega.data.prepare.inputs import collect_inputs
from bottega.data.prepare.prepared import PreparedData, open_prepared
from bottega.data.tables.classes import read_text_column
from bottega.data.text.config import TextAugmentation
from bottega.data.text.labelled import TextCollator, open_labelled_texts
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.classify.config import ClassifyData
from bottega.tasks.classify.prepare import prepare_classify

BYTES, WORDS = TokenizerSpec(kind="bytes"), TokenizerSpec(kind="words")
SST2 = Path(os.environ.get("BOTTEGA_DATA", "")) / "text-cls-sst2"


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


def prepare_labels(folder: Path, labels: list[Any], spec: TokenizerSpec = BYTES, **options: Any) -> PreparedData:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n}", "label": label}) + "\n" for n, label in enumerate(labels)))
    return prepare_file(path, folder, spec, **options)


def prepare_file(
    path: Path, folder: Path, spec: TokenizerSpec = BYTES, num_classes: Any = None, **options: Any
) -> PreparedData:
    data = ClassifyData(train=Source(path=str(path)), **{"validation": None, **options})
    cache = folder / "cache"
    return prepare_classify(data, spec, seed=0, progress=ignore_progress, cache=cache, num_classes=num_classes)


def read_labels(prepared: PreparedData) -> list[str]:
    return read_text_column(prepared.table("train"), "label")


def test_spellings_of_a_number_are_one_class_and_booleans_have_names(tmp_path: Path) -> None:
    prepared = prepare_labels(tmp_path, [1, "1", 1.0, 10, 2])
    assert read_labels(prepared) == ["1", "1", "1", "10", "2"]
    assert prepared.classes.names == ("1", "2", "10")
    prepared = prepare_labels(tmp_path, [True, False, "true"])
    assert (read_labels(prepared), prepared.classes.names) == (["true", "false", "true"], ("false", "true"))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", None, "b"], r"rows\.jsonl, line 2: the label field 'label' has no value"),
        (["a", "", "b"], r"rows\.jsonl, line 2: the label field 'label' has no value"),
        (["a", ["b"], "b"], r"line 2: the label field 'label' is a list"),
        (
            [1, 0, "one", 1],
            r"some labels are numbers and others words: 1 at rows\.jsonl:1, one at rows\.jsonl:3; use one",
        ),
        (["one", "1", 2], r"some labels are numbers and others words: 2 at rows\.jsonl:3, one at rows\.jsonl:1"),
        ([True, 0], r"some labels are numbers and others words: 0 at rows\.jsonl:2, true at rows\.jsonl:1"),
    ],
)
def test_invalid_label_is_reported_with_its_line(tmp_path: Path, labels: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare_labels(tmp_path, labels)


def test_numbers_and_words_in_a_csv_are_class_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\nfirst text,1\nsecond text,3+\nthird text,none\n")
    assert prepare_file(path, tmp_path).classes.names == ("1", "3+", "none")


def test_nan_label_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a", "b", "c"], "label": [0.0, float("nan"), 1.0]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet.*the label field 'label' is nan"):
        prepare_file(tmp_path / "rows.parquet", tmp_path)


def test_mixed_label_types_are_detected_across_files(tmp_path: Path) -> None:
    held_out = tmp_path / "test.jsonl"
    held_out.write_text('{"text": "x", "label": 1}\n')
    with pytest.raises(DataError, match=r"1 at test\.jsonl:1, good at rows\.jsonl:1"):
        prepare_labels(tmp_path, ["good", "bad"], test=HeldOut(path=str(held_out)))
    assert prepare_labels(tmp_path, ["0", "1"], test=HeldOut(path=str(held_out))).classes.names == ("0", "1")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([], []),
        ("b, a", ["a", "b"]),
        ("", []),
        ('["a", "b, c"]', ["a", "b, c"]),
        ("a", ["a"]),
    ],
)
def test_multi_label_values_are_parsed(tmp_path: Path, value: Any, expected: list[str]) -> None:
    prepared = prepare_labels(tmp_path, [value, ["z"]], multi_label=True)
    assert [json.loads(text) for text in read_labels(prepared)] == [expected, ["z"]]
    assert prepared.classes.names == (*expected, "z")
    assert prepared.metadata["multi_label"] is True


def test_numeric_multi_labels_are_checked(tmp_path: Path) -> None:
    prepared = prepare_labels(tmp_path, [[10, 2], "2", 1], multi_label=True)
    assert prepared.classes.names == ("1", "2", "10")
    assert prepare_labels(tmp_path, [[1], []], multi_label=True, num_classes=4).classes.names == ("0", "1", "2", "3")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: label 7 is out of range"):
        prepare_labels(tmp_path, [[7], []], multi_label=True, num_classes=4)
    with pytest.raises(
        DataError,
        match=r"some labels are numbers and others words: \[\"1\"\] at rows\.jsonl:1, \[\"one\"\] at rows\.jsonl:2",
    ):
        prepare_labels(tmp_path, [[1], ["one"]], multi_label=True)
    with pytest.raises(DataError, match=r"line 1: the label field 'label' mixes numbers and words"):
        prepare_labels(tmp_path, [[1, "one"]], multi_label=True)
    with pytest.raises(DataError, match=r"line 2: the label field 'label' has no value.* write \[\]"):
        prepare_labels(tmp_path, [["a"], None], multi_label=True)
    with pytest.raises(
        DataError, match=r"line 1: the label field 'label' begins like a JSON list but is not valid JSON"
    ):
        prepare_labels(tmp_path, ["[a"], multi_label=True)


def test_labels_field_with_a_custom_separator(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,labels\nfirst text,a|b c\nsecond text,\n")
    prepared = prepare_file(path, tmp_path, multi_label=True, label_separator="|")
    assert read_labels(prepared) == ['["a", "b c"]', "[]"]


def test_prepared_data_records_multi_label(tmp_path: Path) -> None:
    prepared = prepare_labels(tmp_path, [["a"], ["b"]], multi_label=True)
    assert prepare_file(prepared.folder, tmp_path, multi_label=True).fingerprint == prepared.fingerprint
    with pytest.raises(DataError, match=r"several classes per text, but data\.multi_label is false"):
        prepare_file(prepared.folder, tmp_path)


def test_more_folds_than_samples_of_a_class_is_refused(tmp_path: Path) -> None:
    labels = ["usual"] * 30 + ["rare"] * 3
    split = Splitting(by="stratified", folds=5)
    # Augmented copies do not count.
    for augmentation in (None, TextAugmentation(augmentation_factor=4)):
        with pytest.raises(DataError, match=r"class 'rare' has 3 texts, fewer than data\.split\.folds=5"):
            prepare_labels(tmp_path, labels, split=split, augmentation=augmentation)
    for fold in range(3):
        prepared = prepare_labels(tmp_path, labels, split=Splitting(by="stratified", folds=3, fold=fold))
        assert read_text_column(prepared.table("validation"), "label").count("rare") == 1


def test_word_vocabulary_comes_from_training_texts_only(tmp_path: Path) -> None:
    path, held_out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    path.write_text('{"text": "Known words, known words", "label": 0}\n{"text": "words", "label": 1}\n')
    held_out.write_text('{"text": "secret secret words", "label": 0}\n')
    prepared = prepare_file(path, tmp_path, WORDS, validation=HeldOut(path=str(held_out)))
    tokenizer = prepared.tokenizer
    assert tokenizer.backend.get_vocab().keys() == {"<unk>", "<|endoftext|>", "known", "words"}
    assert (prepared.metadata["unknown"], prepared.metadata["padding"], prepared.metadata["frame"]) == (0, 1, [[], []])
    assert prepared.table("validation").row("input_ids", 0).tolist() == [0, 0, tokenizer.backend.token_to_id("words")]
    with_min_frequency = prepare_file(path, tmp_path, TokenizerSpec(kind="words", min_frequency=3))
    assert with_min_frequency.fingerprint != prepare_file(path, tmp_path, WORDS).fingerprint
    assert with_min_frequency.metadata["vocab_size"] == 3


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tokenizer folder in the layout of transformers, for a model of twelve positions."""
    folder = tmp_path_factory.mktemp("bert")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "text", *"0123456789", *(f"##{n}" for n in range(10))]
    backend = tokenizers.Tokenizer(models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))
    special = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 12}))
    return folder


def test_pretrained_tokenizer_matches_transformers(bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(bert)
    texts = ["text 1", "text 12 text, unseen", "1 2 3 4 5 6 7 8 9 10 11 12", "[SEP] text"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": n}) + "\n" for n, text in enumerate(texts)))
    spec = TokenizerSpec(kind="pretrained", path=str(bert))
    prepared = prepare_file(path, tmp_path, spec)
    assert (prepared.metadata["longest"], prepared.metadata["padding"], prepared.metadata["unknown"]) == (12, 0, 1)
    for length in (None, 6):
        source = open_labelled_texts(prepared, "train", sequence_length=length)
        rows = source.rows(np.arange(3), np.zeros(3, int))
        width = rows["input_ids"].shape[1]
        assert width == (length or 12)
        expected = reference(texts[:3], padding="max_length", truncation=True, max_length=width, return_tensors="np")
        for name in ("input_ids", "attention_mask"):
            np.testing.assert_array_equal(rows[name], expected[name])
    # A text that spells a special token is encoded as text.
    assert (source.rows(np.array([3]), np.zeros(1, int))["input_ids"] == 3).sum() == 1
    encoded = list(prepared.tokenizer.encode_documents(texts[:3]))
    collated = TextCollator.from_tokenizer(prepared.tokenizer, sequence_length=6).collate(encoded)
    np.testing.assert_array_equal(collated["input_ids"], rows["input_ids"])


def test_sequence_length_beyond_the_pretrained_limit_is_refused(bert: Path, tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="pretrained", path=str(bert))
    with pytest.raises(UsageError, match=r"data\.sequence_length: 64 exceeds the 12 tokens"):
        prepare_labels(tmp_path, ["a", "b"], spec, sequence_length=64)
    prepared = prepare_labels(tmp_path, ["a", "b"], spec)
    with pytest.raises(DataError, match=r"data\.sequence_length=2 leaves no room for text with 2 special tokens"):
        open_labelled_texts(prepared, "train", sequence_length=2)
    with pytest.raises(DataError, match="another tokenizer"):
        prepare_file(prepare_labels(tmp_path, ["a", "b"]).folder, tmp_path, spec)


@pytest.mark.skipif("BOTTEGA_DATA" not in os.environ, reason="BOTTEGA_DATA is not set to a folder of real data")
def test_sst2_is_prepared_as_published(tmp_path: Path) -> None:
    data = ClassifyData(
        train=Source(path=str(SST2 / "train.tsv"), columns=("text", "label")),
        validation=HeldOut(path=str(SST2 / "dev.tsv")),
        test=HeldOut(path=str(SST2 / "test.tsv")),
    )
    prepared = prepare_classify(data, WORDS, seed=0, progress=ignore_progress, cache=tmp_path)
    assert {name: counts["rows"] for name, counts in prepared.tables.items()} == {
        "validation": 872,
        "test": 1821,
        "train": 6920,
    }
    assert prepared.classes.names == ("0", "1")
    train = open_labelled_texts(prepared, "train")
    # The files are tokenised into words; 3,610 of the published sentences are positive.
    assert train.labels.sum() == 3610
    first = (SST2 / "train.tsv").read_text().split("\n")[0].split("\t")[0]
    assert len(train.table.row("input_ids", 0)) == len(first.split())
    # The longest of 32 texts has about 40 words, the longest of all 53.
    widths = [train.rows(np.arange(n, n + 32), np.zeros(32, int))["input_ids"].shape[1] for n in range(0, 6400, 32)]
    assert (np.mean(widths) < 46, train.sequence_length) == (True, 53)


def test_plain_text_without_labels_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_text("no class in it, no class at all\n")
    with pytest.raises(DataError, match=r"no delimiter splits all lines .* write label, tab, text on each line"):
        prepare_file(path, tmp_path, WORDS)


@pytest.mark.parametrize(
    ("splits", "validation", "test"),
    [(("train", "dev", "test"), "dev", "test"), (("train", "test"), "test", "test"), (("train", "dev"), "dev", "dev")],
)
def test_held_out_data_of_a_folder_is_never_its_train_split(
    tmp_path: Path, splits: tuple[str, ...], validation: str, test: str
) -> None:
    for split in splits:
        (tmp_path / f"{split}.csv").write_text(f"text,label\nwords of {split},a\n")
    held_out = HeldOut(path=str(tmp_path))
    inputs, _ = collect_inputs(ClassifyData(train=Source(path=str(tmp_path)), validation=held_out, test=held_out))
    files = {input.table: [file.stem for file in input.source_files.paths] for input in inputs}
    assert files == {"validation": [validation], "test": [test], "train": ["train"]}


def test_held_out_hash_depends_on_the_files_only(tmp_path: Path) -> None:
    def hash_held_out(folder: str, text: str, **options: Any) -> dict[str, str]:
        rows = [{"text": f"{text} {i}", "title": f"title {i}", "label": "ab"[i % 2]} for i in range(40)]
        file = tmp_path / folder / "rows.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        train = {"path": str(file), **options}
        data = ClassifyData(train=train, validation={"split": 0.2}, test={"split": 0.2}, label_field="label")
        prepared = prepare_classify(data, BYTES, seed=0, progress=ignore_progress, cache=tmp_path / "cache")
        assert open_prepared(prepared.folder, task="classify").held_out_hashes == prepared.held_out_hashes
        return {**prepared.held_out_hashes, "samples": prepared.hash_samples("validation")}

    first = hash_held_out("a", "good")
    assert first.keys() == {"validation", "test", "samples"}
    assert hash_held_out("a", "good", field="title") == hash_held_out("b", "good") == first
    other = hash_held_out("c", "bad")
    assert other["samples"] == first["samples"]
    assert other["validation"] != first["validation"]
