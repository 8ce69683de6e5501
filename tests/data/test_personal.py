"""Personal records: they round-trip, are split by user, and every image is decoded once."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.core.errors import DataError, UsageError
from bottega.data.image.decode import decode_image
from bottega.data.image.resize import resize_image
from bottega.data.prepare.prepared import PreparedData
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data import image_files as image_files_module
from bottega.tasks.personalize.data.records import Item, PersonalRows, Record
from bottega.tasks.personalize.data.tables import prepare_personal
from small_collections import item, record, records, write_image, write_records

SIZE = 8


def prepare_records(path: Path, **options: Any) -> PreparedData:
    data = {"train": {"path": str(path)}, "image_size": SIZE, **options}
    return prepare_personal(PersonalizeData.model_validate(data))


def dump_records(rows: PersonalRows) -> list[dict[str, Any]]:
    return [rows.record(number).model_dump(exclude_defaults=True) for number in range(len(rows))]


@pytest.mark.parametrize("name", ["people.jsonl", "people.json"])
def test_records_round_trip(tmp_path: Path, name: str) -> None:
    expected = records()
    prepared = prepare_records(write_records(tmp_path, expected, name))
    rows = PersonalRows(prepared, "train")
    assert prepared.tables == {"train": {"rows": 20, "users": 10}}
    assert dump_records(rows) == [Record.model_validate(row).model_dump(exclude_defaults=True) for row in expected]
    assert rows.users == [row["user"] for row in expected]
    again = pickle.loads(pickle.dumps(rows))
    assert dump_records(again) == dump_records(rows)
    assert again.fingerprint == rows.fingerprint


def test_samples_show_the_target(tmp_path: Path) -> None:
    rows = PersonalRows(prepare_records(write_records(tmp_path)), "train")
    index = np.array([3, 0, 19])
    batch = rows.rows(index, np.zeros(3, np.int64))
    assert batch["image"].shape == (3, SIZE, SIZE, 3)
    assert batch["image"].dtype == np.float32
    assert batch["person"].tolist() == [3, 0, 19]
    assert batch["person"].dtype == np.int64
    for pixels, number in zip(batch["image"], index.tolist(), strict=True):
        target = rows.record(number).target
        decoded = decode_image(tmp_path / str(target.image), channels=3)
        expected = resize_image(decoded, (SIZE, SIZE), mode="crop")
        assert (rows.image(target) == expected).all()
        assert np.abs(pixels - (expected / 127.5 - 1)).max() < 1e-6
    assert "thing" in rows.describe(0, 0)


def test_large_collections_stay_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path)
    decoded = PersonalRows(prepare_records(path), "train")
    monkeypatch.setattr("bottega.tasks.personalize.data.tables.MAX_DECODED_BYTES", 1)
    monkeypatch.setattr("bottega.tasks.personalize.data.tables.VERSION", "encoded")
    encoded = PersonalRows(prepare_records(path), "train")
    assert (decoded.encoder.store, encoded.encoder.store) == ("decoded", "encoded")
    index, epoch = np.arange(20), np.zeros(20, np.int64)
    assert (decoded.rows(index, epoch)["image"] == encoded.rows(index, epoch)["image"]).all()
    assert (decoded.image(decoded.record(4).history[1]) == encoded.image(encoded.record(4).history[1])).all()


def test_every_image_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path)
    (tmp_path / "pictures/5.png").write_bytes((tmp_path / "pictures/4.png").read_bytes())
    decoded_keys: list[str] = []
    encode_rows = image_files_module.ImageEncoder.rows

    def record_key(self: Any, row: Any) -> Any:
        decoded_keys.append(row.key)
        return encode_rows(self, row)

    monkeypatch.setattr(image_files_module.ImageEncoder, "rows", record_key)
    rows = PersonalRows(prepare_records(path), "train")
    image_names = {image_item.image for number in range(len(rows)) for image_item in rows.record(number).items}
    assert len(decoded_keys) == len(set(decoded_keys)) == len(image_names) - 1, "4.png and 5.png are the same image"
    prepare_records(path)
    assert len(decoded_keys) == len(image_names) - 1, "the second time nothing is decoded"


def test_several_processes_write_the_same_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path)
    single = PersonalRows(prepare_records(path), "train")
    monkeypatch.setattr("bottega.tasks.personalize.data.tables.VERSION", "several")
    monkeypatch.setattr("bottega.tasks.personalize.data.image_files.JOB_BYTES", 2000)
    monkeypatch.setattr("bottega.data.prepare.jobs.MIN_BYTES_FOR_WORKERS", 1)
    stages: dict[str, tuple[int, int]] = {}
    data = PersonalizeData.model_validate({"train": {"path": str(path)}, "image_size": SIZE})
    several = PersonalRows(
        prepare_personal(data, progress=lambda stage, done, total: stages.update({stage: (done, total)})), "train"
    )
    assert (single.images.values("image") == several.images.values("image")).all()
    assert {stage: done == total for stage, (done, total) in stages.items()} == {"hash": True, "decode": True}


def test_fingerprint_depends_on_content_only(tmp_path: Path) -> None:
    a, b = write_records(tmp_path / "a"), write_records(tmp_path / "b")
    first = prepare_records(a)
    assert prepare_records(b).fingerprint == first.fingerprint, "the folder does not matter"
    assert prepare_records(a, image_size=SIZE * 2).fingerprint != first.fingerprint
    assert prepare_records(a, history_length=2).fingerprint != first.fingerprint
    bad = [*records(), record(99, [], 3)]
    skipped = [write_records(tmp_path / name, bad, "bad.jsonl") for name in ("a", "b")]
    left, right = (prepare_records(path, bad_records="skip", max_bad=0.1) for path in skipped)
    assert left.metadata["bad"] == 1
    assert left.fingerprint == right.fingerprint, "nor does the folder of skipped records"
    write_image(tmp_path / "b/pictures/3.png", 99)
    assert prepare_records(b).fingerprint != first.fingerprint, "a changed image under the same name is other data"


def test_history_length_keeps_the_last_items(tmp_path: Path) -> None:
    path = write_records(tmp_path)
    long, short = (PersonalRows(prepare_records(path, **options), "train") for options in ({}, {"history_length": 2}))
    for number in range(len(long)):
        assert short.record(number).history == long.record(number).history[-2:]


def test_split_by_user(tmp_path: Path) -> None:
    path = write_records(tmp_path, records(users=40))
    options: dict[str, Any] = {"validation": {"split": 0.2}, "test": {"split": 0.1}}
    prepared = prepare_records(path, **options)
    users = {name: set(PersonalRows(prepared, name).users) for name in prepared.tables}
    assert {name: len(names) for name, names in users.items()} == {"train": 28, "validation": 8, "test": 4}
    assert not users["train"] & users["validation"]
    assert not users["test"] & (users["train"] | users["validation"])
    assert sum(counts["rows"] for counts in prepared.tables.values()) == 80
    # The split does not depend on the order of the records.
    reversed_path = write_records(tmp_path, records(users=40)[::-1], "turned.jsonl")
    again = prepare_records(reversed_path, **options)
    assert {name: set(PersonalRows(again, name).users) for name in again.tables} == users
    other = prepare_records(path, **options, split={"seed": 1})
    assert set(PersonalRows(other, "test").users) != users["test"]


def test_folds_hold_every_user_out_once(tmp_path: Path) -> None:
    path = write_records(tmp_path)
    held_out = [
        PersonalRows(prepare_records(path, split={"folds": 4, "fold": fold}), "validation").users for fold in range(4)
    ]
    assert sorted(user for users in held_out for user in set(users)) == sorted({row["user"] for row in records()})


def test_split_files_of_a_folder_are_used(tmp_path: Path) -> None:
    rows = records()
    write_records(tmp_path, rows[:12], "train.jsonl")
    write_records(tmp_path, rows[12:16], "val.json")
    write_records(tmp_path, rows[16:], "test-000000.jsonl")
    expected = {"train": 12, "validation": 4, "test": 4}
    for options in (
        {},
        {"validation": {"split": 0.1}, "test": {"split": 0.1}},
        {"validation": {"split": "validation"}},
    ):
        prepared = prepare_records(tmp_path, **options)
        assert {name: counts["rows"] for name, counts in prepared.tables.items()} == expected
    assert any("validation is" in note for note in prepare_records(tmp_path, validation={"split": 0.1}).notes())


def test_held_out_file_may_reuse_image_names(tmp_path: Path) -> None:
    """Two folders may hold different images of the same name."""
    train, held_out = write_records(tmp_path / "a", records()[:12]), write_records(tmp_path / "b", records()[12:])
    write_image(tmp_path / "b/pictures/7.png", 70)
    prepared = prepare_records(train, validation={"path": str(held_out)})
    rows = PersonalRows(prepared, "validation")
    for number in range(len(rows)):
        for record_item in rows.record(number).items:
            name = str(record_item.image).partition("#")[0]
            assert (
                rows.image(record_item)
                == resize_image(decode_image(tmp_path / "b" / name, channels=3), (SIZE, SIZE), mode="crop")
            ).all()


def test_gzipped_records_are_read(tmp_path: Path) -> None:
    path = write_records(tmp_path)
    (tmp_path / "people.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert prepare_records(tmp_path / "people.jsonl.gz").tables["train"]["rows"] == 20


def test_limit_takes_the_first(tmp_path: Path) -> None:
    path = write_records(tmp_path)
    rows = PersonalRows(prepare_records(path, train={"path": str(path), "limit": 5}), "train")
    assert dump_records(rows) == [Record.model_validate(row).model_dump(exclude_defaults=True) for row in records()[:5]]


def test_published_record_layout_is_read(tmp_path: Path) -> None:
    published = [
        {
            "worker_id": "W1",
            "history_item_ids": ["i1"],
            "history_items_info": [{"item_id": "i1", "caption": "one", "image_path": "pictures/1.png", "score": 4}],
            "target_item_id": "i2",
            "target_item_info": {"item_id": "i2", "caption": "two", "image_path": str(tmp_path / "pictures/2.png")},
            "worker_style": "calm",
            "num_interactions": 1,
        }
    ]
    personal_record = PersonalRows(prepare_records(write_records(tmp_path, published, "train.json")), "train").record(0)
    assert (
        personal_record.user,
        personal_record.history[0].id,
        personal_record.target.caption,
        personal_record.style,
    ) == ("W1", "i1", "two", "calm")


def test_a_history_item_may_have_no_image(tmp_path: Path) -> None:
    row = record(1, [1, 2], 3)
    row["history"][0]["image"] = None
    rows = PersonalRows(prepare_records(write_records(tmp_path, [row])), "train")
    assert rows.table.row("history", 0).tolist()[0] == -1
    with pytest.raises(DataError, match="has no image in the prepared data; add an image to its record"):
        rows.image(rows.record(0).history[0])


def test_images_in_another_folder_need_the_setting(tmp_path: Path) -> None:
    path = write_records(tmp_path / "data")
    (tmp_path / "records").mkdir()
    moved_path = path.rename(tmp_path / "records/people.jsonl")
    with pytest.raises(DataError, match=r"data\.pictures"):
        prepare_records(moved_path)
    assert prepare_records(moved_path, pictures=str(tmp_path / "data")).tables["train"]["rows"] == 20


def test_prepared_shards_are_reused(tmp_path: Path) -> None:
    prepared = prepare_records(write_records(tmp_path))
    data = PersonalizeData.model_validate({"train": {"path": str(prepared.folder)}, "image_size": SIZE})
    assert prepare_personal(data).fingerprint == prepared.fingerprint
    with pytest.raises(UsageError, match="was prepared at 8"):
        prepare_personal(data.model_copy(update={"image_size": 16}))


def test_captions_from_a_file(tmp_path: Path) -> None:
    blank = records()
    for row in blank:
        for record_item in [*row["history"], row["target"]]:
            record_item["caption"] = ""
    path = write_records(tmp_path, blank)
    numbers = range(24)
    (tmp_path / "by-id.csv").write_text("id,caption\n" + "".join(f"i{n},a thing no. {n}\n" for n in numbers))
    lines = [json.dumps({"file_name": f"{n}.png", "text": f"a thing no. {n}"}) for n in numbers]
    (tmp_path / "by-name.jsonl").write_text("\n".join(lines))
    (tmp_path / "plain.json").write_text(json.dumps({f"i{n}": f"a thing no. {n}" for n in numbers}))
    for name in ("by-id.csv", "by-name.jsonl", "plain.json"):
        rows = PersonalRows(prepare_records(path, captions=str(tmp_path / name)), "train")
        for number in range(len(rows)):
            assert all(
                record_item.caption == f"a thing no. {record_item.id[1:]}" for record_item in rows.record(number).items
            ), name


def test_wish_defaults_to_the_target_caption() -> None:
    personal_record = Record(user="1", history=(Item(id="a", caption="x"),), target=Item(id="b", caption="y"))
    assert personal_record.wish_or_caption == "y"
    assert personal_record.model_copy(update={"wish": "a star"}).wish_or_caption == "a star"
    assert Record.model_validate({**record(1, [1], 2), "user": 17}).user == "17"
    assert item(1)["id"] == Record.model_validate(record(1, [1], 2)).history[0].id
