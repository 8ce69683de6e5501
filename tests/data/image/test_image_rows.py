"""From records to image batches: fields of a record, storage, and the contents of a batch."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bottega.core.errors import DataError
from bottega.data.image.augment import denormalise_pixels
from bottega.data.image.buckets import compute_bucket_shapes
from bottega.data.image.config import ImageAugmentation
from bottega.data.image.contact_sheet import write_contact_sheet
from bottega.data.image.encoder import ImageEncoder
from bottega.data.image.source import ImageRows
from bottega.data.records.record import Record, Unreadable
from bottega.data.tables.classes import Classes, Conditions, find_classes, find_classes_if_labelled
from bottega.data.tables.shards import ShardWriter, Table


def draw_noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encode_image(pixels: np.ndarray, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(out, format=form, **options)
    return out.getvalue()


def build_record(key: str = "a", **fields: Any) -> Record:
    return Record(key, f"/data/{key}", fields)


def encode_row(encoder: ImageEncoder, **fields: Any) -> dict[str, Any]:
    (row,) = encoder.rows(build_record(**fields))
    assert row.keys() >= encoder.columns.keys()
    return row


def write_table(folder: Path, encoder: ImageEncoder, records: Iterable[Record]) -> Table:
    with ShardWriter(folder, encoder.columns) as writer:
        for record in records:
            for row in encoder.rows(record):
                writer.add(row)
    return Table(folder)


PLAIN = ImageEncoder((8, 8), 3)


class TestFields:
    def test_image_is_read_from_every_common_field_layout(self, tmp_path: Path) -> None:
        pixels = draw_noise(8, 8, 3)
        file = tmp_path / "a.png"
        file.write_bytes(encode_image(pixels))
        for fields in (
            {"image": file},
            {"jpg": encode_image(pixels), "json": {"a": 1}},
            {"png": encode_image(pixels), "npy": draw_noise(4, 4)},
            {"image": {"bytes": encode_image(pixels), "path": "x.png"}, "label": 3},
            {"left.view": encode_image(pixels), "caption": "c"},
            {"array": pixels, "label": 1},
            {"image": pixels.tolist()},
        ):
            np.testing.assert_array_equal(encode_row(PLAIN, **fields)["image"], pixels)
        named = ImageEncoder((8, 8), 3, field="right")
        np.testing.assert_array_equal(
            encode_row(named, image=draw_noise(8, 8, 3, seed=1), right=pixels)["image"], pixels
        )

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"text": "words"}, "no field contains the image"),
            ({"a": b"1", "b": b"2"}, "several fields"),
            ({"image": "cat.png"}, "is not an image but str"),
            ({"image": {"bytes": None, "path": "/etc/passwd"}}, "is not an image but dict"),
            ({"image": b"no image"}, "not an image of a known format"),
        ],
    )
    def test_record_without_an_image_is_unreadable(self, fields: dict[str, Any], reason: str) -> None:
        with pytest.raises(Unreadable, match=reason):
            encode_row(PLAIN, **fields)

    @pytest.mark.parametrize(
        ("value", "text"),
        [("cat", "cat"), (3, "3"), (np.int64(3), "3"), (3.0, "3"), (b"7\n", "7"), (np.array(2), "2")],
    )
    def test_labels_become_text(self, value: Any, text: str) -> None:
        for name in ("label", "cls", "class"):
            assert encode_row(PLAIN, image=draw_noise(8, 8, 3), **{name: value})["label"] == text
        assert (
            encode_row(ImageEncoder((8, 8), 3, label_field="kind"), image=draw_noise(8, 8, 3), kind=value)["label"]
            == text
        )

    def test_missing_label_is_empty_unless_its_field_is_set(self) -> None:
        assert encode_row(PLAIN, image=draw_noise(8, 8, 3), label=None)["label"] == ""
        with pytest.raises(Unreadable, match="'kind' has no value"):
            encode_row(ImageEncoder((8, 8), 3, label_field="kind"), image=draw_noise(8, 8, 3), kind=None)

    def test_captions_are_optional(self) -> None:
        for name in ("caption", "text", "txt"):
            row = encode_row(PLAIN, image=draw_noise(8, 8, 3), **{name: "a grey cat"})
            assert (row["caption"], row["label"], row["key"]) == ("a grey cat", "", "a")
        assert encode_row(PLAIN, image=draw_noise(8, 8, 3))["caption"] == ""

    @pytest.mark.parametrize(
        "value", [[1, 2.5], (1, 2.5), np.array([1, 2.5]), "1 2.5", "1, 2.5", "[1, 2.5]", b"1\t2.5"]
    )
    def test_condition_vector_is_read_from_every_common_form(self, value: Any) -> None:
        encoder = ImageEncoder((8, 8), 3, condition_field="v", has_condition=True)
        np.testing.assert_array_equal(
            encode_row(encoder, image=draw_noise(8, 8, 3), v=value)["condition"], np.float32([1, 2.5])
        )

    @pytest.mark.parametrize("value", ["a b", {"a": 1}, [float("nan")], None])
    def test_invalid_condition_vector_is_unreadable(self, value: Any) -> None:
        with pytest.raises(Unreadable, match="'condition'"):
            encode_row(ImageEncoder((8, 8), 3, has_condition=True), image=draw_noise(8, 8, 3), condition=value)


class TestStorage:
    def test_encoded_store_keeps_the_file_unless_it_can_be_smaller(self) -> None:
        encoder = ImageEncoder((16, 16), 3, store="encoded")
        for form in ("PNG", "JPEG", "WEBP"):
            small = encode_image(draw_noise(12, 16, 3), form)
            assert encode_row(encoder, image=small)["image"] == small
        large = draw_noise(40, 40, 3)
        shrunk = encode_row(encoder, image=encode_image(large))["image"]
        assert Image.open(io.BytesIO(shrunk)).format == "PNG"
        decoded = encode_row(ImageEncoder((16, 16), 3), image=encode_image(large))["image"]
        np.testing.assert_array_equal(encoder.decode_row(shrunk, 0), decoded)
        lossy = encode_row(encoder, image=encode_image(large, "JPEG"))["image"]
        image = Image.open(io.BytesIO(lossy))
        assert (image.format, image.size) == ("JPEG", (16, 16))
        assert len(encode_row(encoder, image=draw_noise(4, 4, 3))["image"]) < 400  # an array becomes a PNG

    def test_encoded_store_refuses_truncated_files(self) -> None:
        cut = encode_image(draw_noise(15, 15, 3), "JPEG")
        with pytest.raises(Unreadable, match=r"(?i)truncated"):
            encode_row(ImageEncoder((16, 16), 3, store="encoded"), image=cut[: len(cut) // 2])

    def test_decoded_and_encoded_stores_give_the_same_pixels(self, tmp_path: Path) -> None:
        records = [build_record(str(n), image=encode_image(draw_noise(6 + n, 20 - n, 3, seed=n))) for n in range(8)]
        index, epoch = np.array([5, 0, 5, 7]), np.zeros(4, int)
        batches = []
        for store in ("decoded", "encoded"):
            encoder = ImageEncoder((8, 8), 3, store=store)  # type: ignore[arg-type]
            rows = ImageRows(write_table(tmp_path / store, encoder, records), encoder, content=store)
            batches.append(rows.rows(index, epoch)["image"])
        np.testing.assert_array_equal(batches[0], batches[1])

    @pytest.mark.parametrize("store", ["decoded", "encoded"])
    def test_images_are_resized_to_their_bucket(self, tmp_path: Path, store: Any) -> None:
        shapes = compute_bucket_shapes(3, 16)
        encoder = ImageEncoder(None, 3, buckets=shapes, store=store)
        sizes = [(10, 20), (20, 10), (16, 16), (30, 66), (64, 64)]
        records = [build_record(str(n), image=draw_noise(*size, 3, seed=n)) for n, size in enumerate(sizes)]
        rows = ImageRows(write_table(tmp_path, encoder, records), encoder, content="x")
        assert rows.buckets.tolist() == [2, 0, 1, 2, 1]
        for bucket, shape in enumerate(shapes):
            index = np.flatnonzero(rows.buckets == bucket)
            assert rows.rows(index, index * 0)["image"].shape == (len(index), *shape, 3)
        with pytest.raises(AssertionError, match="several buckets"):
            rows.rows(np.arange(3), np.zeros(3, int))


@pytest.fixture
def labelled(tmp_path: Path) -> Table:
    encoder = ImageEncoder((8, 8), 3, has_condition=True)
    return write_table(
        tmp_path / "labelled",
        encoder,
        (build_record(f"r{n}", image=draw_noise(8, 8, 3, seed=n), label=n % 3, condition=[n, -n]) for n in range(12)),
    )


class TestBatches:
    def test_batch_holds_exactly_the_documented_fields(self, labelled: Table) -> None:
        index, epoch = np.array([3, 1, 10]), np.zeros(3, int)
        classes = find_classes(["0", "1", "2"])
        for condition, expected in (
            ("none", np.zeros((3, 0))),
            ("class", [[1, 0, 0], [0, 1, 0], [0, 1, 0]]),
            ("vector", [[3, -3], [1, -1], [10, -10]]),
        ):
            rows = ImageRows(labelled, PLAIN, content="x", classes=classes, condition=condition).rows(index, epoch)
            assert list(rows) == ["image", "condition", "label"]
            assert (rows["image"].dtype, rows["condition"].dtype, rows["label"].dtype) == (
                np.float32,
                np.float32,
                np.int32,
            )
            np.testing.assert_array_equal(rows["condition"], expected)
            assert rows["label"].tolist() == [0, 1, 1]
            for position, number in enumerate(index):
                np.testing.assert_array_equal(
                    denormalise_pixels(rows["image"][position], mode="symmetric"), draw_noise(8, 8, 3, seed=int(number))
                )
        assert list(ImageRows(labelled, PLAIN, content="x").rows(index, epoch)) == ["image", "condition"]

    def test_augmentation_depends_on_sample_and_epoch_and_leaves_the_shards(self, labelled: Table) -> None:
        options = ImageAugmentation(crop=0.2, flip=True, colour_jitter=0.2)
        rows = ImageRows(labelled, PLAIN, content="x", augmentation=options, seed=3)
        plain = ImageRows(labelled, PLAIN, content="x")
        index = np.arange(12)
        before = plain.rows(index, index * 0)["image"]
        first, second = (rows.rows(index, np.full(12, epoch))["image"] for epoch in (0, 1))
        assert (first != second).any(axis=(1, 2, 3)).all()
        np.testing.assert_array_equal(rows.rows(index[7:8], np.zeros(1, int))["image"], first[7:8])
        np.testing.assert_array_equal(plain.rows(index, index * 0)["image"], before)

    def test_pickled_source_is_small_and_gives_the_same_rows(self, labelled: Table) -> None:
        rows = ImageRows(labelled, PLAIN, content="x", classes=find_classes("012"), condition="class")
        rows.rows(np.arange(3), np.zeros(3, int))
        sent = pickle.dumps(rows)
        assert len(sent) < 3000
        again, before = (source.rows(np.arange(5), np.zeros(5, int)) for source in (pickle.loads(sent), rows))
        for name in before:
            np.testing.assert_array_equal(again[name], before[name])

    def test_fingerprint_changes_with_the_samples(self, labelled: Table) -> None:
        def fingerprint(**options: Any) -> str:
            return ImageRows(labelled, PLAIN, **{"content": "x", **options}).fingerprint

        fingerprints = [
            fingerprint(),
            fingerprint(content="y"),
            fingerprint(normalise="unit"),
            fingerprint(condition="vector"),
            fingerprint(classes=find_classes("012")),
            fingerprint(augmentation=ImageAugmentation(flip=True)),
            fingerprint(augmentation=ImageAugmentation(flip=True), seed=1),
        ]
        assert len(set(fingerprints)) == len(fingerprints)
        assert fingerprint() == fingerprint(seed=1)  # without augmentation the seed has no effect

    def test_sample_description(self, labelled: Table) -> None:
        rows = ImageRows(labelled, PLAIN, content="x", classes=Classes(("0", "1", "2")), condition="vector")
        assert rows.describe(4, 0) == "image 4 of 12: r4, 8 x 8 x 3\nclass 1: 1\ncondition: [ 4. -4.]"

    def test_missing_data_of_a_condition_is_refused(self, tmp_path: Path) -> None:
        encoder = ImageEncoder((8, 8), 3, has_condition=True)
        records = [build_record(f"r{n}", image=draw_noise(8, 8, 3), condition=[0] * (1 + n // 2)) for n in range(3)]
        ragged = write_table(tmp_path / "ragged", encoder, records)
        with pytest.raises(DataError, match="r2: its condition has 2 numbers, but that of r0 has 1"):
            ImageRows(ragged, encoder, content="x", condition="vector")
        bare = write_table(tmp_path / "bare", PLAIN, records)
        with pytest.raises(DataError, match="needs vectors"):
            ImageRows(bare, PLAIN, content="x", condition="vector")
        with pytest.raises(DataError, match="needs labels"):
            ImageRows(bare, PLAIN, content="x", condition="class")


class TestClasses:
    @given(st.lists(st.text(min_size=1, max_size=4), min_size=1))
    def test_ids_map_back_to_their_labels(self, texts: list[str]) -> None:
        classes = find_classes(texts)
        assert [classes.names[number] for number in classes.ids(texts)] == texts
        assert set(classes.names) == set(texts)
        assert find_classes(reversed(texts)) == classes

    @given(st.lists(st.integers(-50, 50), min_size=1))
    def test_integer_labels_are_sorted_by_value(self, numbers: list[int]) -> None:
        assert [int(name) for name in find_classes(map(str, numbers)).names] == sorted(set(numbers))

    def test_declared_number_of_classes_keeps_integer_labels_as_ids(self) -> None:
        assert find_classes(["7", "3"], num_classes=10).ids(["3", "7"]).tolist() == [3, 7]

    @pytest.mark.parametrize("value", ["10", "-1", "99"])
    def test_label_out_of_range_is_refused_with_its_record(self, labelled: Table, value: str) -> None:
        classes = find_classes(["1", value], num_classes=10)
        with pytest.raises(DataError, match=rf"cats/2\.png: label {value} is out of range: .* 0 to 9") as caught:
            classes.ids(["1", "3", value], keys=["a", "b", "cats/2.png"])
        assert caught.value.code == 3
        with pytest.raises(DataError, match="r2: label 2 is out of range"):
            ImageRows(labelled, PLAIN, content="x", classes=find_classes("012", num_classes=2))

    def test_more_classes_than_declared_are_refused(self) -> None:
        with pytest.raises(DataError, match="3 classes, more than num_classes=2"):
            find_classes(["cat", "dog", "cow"], num_classes=2)

    def test_partial_labels_are_ignored_unless_classes_are_required(self, tmp_path: Path) -> None:
        assert find_classes_if_labelled(["a", "", "b"], required=False).names == ()
        assert find_classes_if_labelled(["a", "b"], required=False).names == ("a", "b")
        assert find_classes_if_labelled(["a", "", "b"], required=True).names == ("a", "b")
        half = write_table(
            tmp_path,
            PLAIN,
            (build_record(f"r{n}", image=draw_noise(8, 8, 3), label="ab"[n] if n < 2 else None) for n in range(3)),
        )
        conditions = Conditions(half, "none", classes=find_classes("ab"))
        assert list(conditions.rows(np.arange(3))) == ["condition"]
        assert conditions.describe(0) == []
        with pytest.raises(DataError, match="r2: has no label"):
            Conditions(half, "class", classes=find_classes("ab"))

    def test_missing_label_among_labelled_records_is_refused_by_name(self) -> None:
        with pytest.raises(DataError, match=r"b\.png: has no label"):
            find_classes(["cat", ""]).ids(["cat", ""], keys=["a.png", "b.png"])


def test_contact_sheet_shows_every_image_once(tmp_path: Path) -> None:
    images = [np.full((30, 40, 3), 20 * n, np.uint8) for n in range(7)]
    write_contact_sheet(images, tmp_path / "plain.png", columns=4)
    with Image.open(tmp_path / "plain.png") as image:
        page = np.asarray(image)
    assert page.shape == (8 + 2 * (90 + 8), 8 + 4 * (120 + 8), 3)  # each enlarged three times
    for n in range(7):
        row, column = divmod(n, 4)
        cell = page[8 + row * 98 : 8 + row * 98 + 90, 8 + column * 128 : 8 + column * 128 + 120]
        assert (cell == 20 * n).all()
    captions = [f"sample {n} with a rather long caption that does not fit" for n in range(7)]
    write_contact_sheet([*images[:6], draw_noise(200, 50, 1)], tmp_path / "captions.png", captions=captions)
    with Image.open(tmp_path / "captions.png") as image:
        assert image.size[1] > 3 * 200
