"""Records of people: what is read is what was written, split by person, and every picture decoded once."""

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
from bottega.tasks.personalize.data import image_files as pictures_module
from bottega.tasks.personalize.data.records import Item, PersonalRows, Record
from bottega.tasks.personalize.data.tables import prepare_personal
from small_collections import item, people, picture, record, records

SIZE = 8


def prepared(path: Path, **options: Any) -> PreparedData:
    data = {"train": {"path": str(path)}, "image_size": SIZE, **options}
    return prepare_personal(PersonalizeData.model_validate(data))


def said(rows: PersonalRows) -> list[dict[str, Any]]:
    return [rows.record(number).model_dump(exclude_defaults=True) for number in range(len(rows))]


@pytest.mark.parametrize("name", ["people.jsonl", "people.json"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    wanted = records()
    found = prepared(people(tmp_path, wanted, name))
    rows = PersonalRows(found, "train")
    assert found.tables == {"train": {"rows": 20, "users": 10}}
    assert said(rows) == [Record.model_validate(row).model_dump(exclude_defaults=True) for row in wanted]
    assert rows.users == [row["user"] for row in wanted]
    again = pickle.loads(pickle.dumps(rows))
    assert said(again) == said(rows)
    assert again.fingerprint == rows.fingerprint


def test_samples_show_the_target(tmp_path: Path) -> None:
    rows = PersonalRows(prepared(people(tmp_path)), "train")
    index = np.array([3, 0, 19])
    batch = rows.rows(index, np.zeros(3, np.int64))
    assert batch["image"].shape == (3, SIZE, SIZE, 3)
    assert batch["image"].dtype == np.float32
    assert batch["person"].tolist() == [3, 0, 19]
    assert batch["person"].dtype == np.int64
    for pixels, number in zip(batch["image"], index.tolist(), strict=True):
        target = rows.record(number).target
        whole = decode_image(tmp_path / str(target.image), channels=3)
        wanted = resize_image(whole, (SIZE, SIZE), mode="crop")
        assert (rows.image(target) == wanted).all()
        assert np.abs(pixels - (wanted / 127.5 - 1)).max() < 1e-6
    assert "thing" in rows.describe(0, 0)


def test_large_collections_stay_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = people(tmp_path)
    decoded = PersonalRows(prepared(path), "train")
    monkeypatch.setattr("bottega.tasks.personalize.data.tables.DECODED_LIMIT", 1)
    monkeypatch.setattr("bottega.tasks.personalize.data.tables.VERSION", "encoded")
    encoded = PersonalRows(prepared(path), "train")
    assert (decoded.encoder.store, encoded.encoder.store) == ("decoded", "encoded")
    index, epoch = np.arange(20), np.zeros(20, np.int64)
    assert (decoded.rows(index, epoch)["image"] == encoded.rows(index, epoch)["image"]).all()
    assert (decoded.image(decoded.record(4).history[1]) == encoded.image(encoded.record(4).history[1])).all()


def test_every_picture_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = people(tmp_path)
    (tmp_path / "pictures/5.png").write_bytes((tmp_path / "pictures/4.png").read_bytes())
    seen: list[str] = []
    plain = pictures_module.ImageEncoder.rows

    def counted(self: Any, row: Any) -> Any:
        seen.append(row.key)
        return plain(self, row)

    monkeypatch.setattr(pictures_module.ImageEncoder, "rows", counted)
    rows = PersonalRows(prepared(path), "train")
    named = {one.image for number in range(len(rows)) for one in rows.record(number).items}
    assert len(seen) == len(set(seen)) == len(named) - 1, "4.png and 5.png are the same picture"
    prepared(path)
    assert len(seen) == len(named) - 1, "the second time nothing is decoded"


def test_many_processes_write_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = people(tmp_path)
    one = PersonalRows(prepared(path), "train")
    monkeypatch.setattr("bottega.tasks.personalize.data.tables.VERSION", "several")
    monkeypatch.setattr("bottega.tasks.personalize.data.image_files.JOB_BYTES", 2000)
    monkeypatch.setattr("bottega.data.prepare.jobs.WORTH_PROCESSES", 1)
    stages: dict[str, tuple[int, int]] = {}
    data = PersonalizeData.model_validate({"train": {"path": str(path)}, "image_size": SIZE})
    several = PersonalRows(
        prepare_personal(data, progress=lambda stage, done, total: stages.update({stage: (done, total)})), "train"
    )
    assert (one.images.values("image") == several.images.values("image")).all()
    assert {stage: done == total for stage, (done, total) in stages.items()} == {"hash": True, "decode": True}


def test_the_name_is_of_content(tmp_path: Path) -> None:
    a, b = people(tmp_path / "a"), people(tmp_path / "b")
    first = prepared(a)
    assert prepared(b).fingerprint == first.fingerprint, "where it lies does not matter"
    assert prepared(a, image_size=SIZE * 2).fingerprint != first.fingerprint
    assert prepared(a, history_length=2).fingerprint != first.fingerprint
    bad = [*records(), record(99, [], 3)]
    skipped = [people(tmp_path / name, bad, "bad.jsonl") for name in ("a", "b")]
    one, other = (prepared(path, bad_records="skip", max_bad=0.1) for path in skipped)
    assert one.metadata["bad"] == 1
    assert one.fingerprint == other.fingerprint, "of what is left out neither"
    picture(tmp_path / "b/pictures/3.png", 99)
    assert prepared(b).fingerprint != first.fingerprint, "another picture under the same name is other data"


def test_histories_end_with_the_last(tmp_path: Path) -> None:
    path = people(tmp_path)
    long, short = (PersonalRows(prepared(path, **how), "train") for how in ({}, {"history_length": 2}))
    for number in range(len(long)):
        assert short.record(number).history == long.record(number).history[-2:]


def test_split_by_user(tmp_path: Path) -> None:
    path = people(tmp_path, records(users=40))
    options: dict[str, Any] = {"validation": {"split": 0.2}, "test": {"split": 0.1}}
    found = prepared(path, **options)
    users = {name: set(PersonalRows(found, name).users) for name in found.tables}
    assert {name: len(names) for name, names in users.items()} == {"train": 28, "validation": 8, "test": 4}
    assert not users["train"] & users["validation"]
    assert not users["test"] & (users["train"] | users["validation"])
    assert sum(counts["rows"] for counts in found.tables.values()) == 80
    # The order of the records says nothing about who is on which side.
    turned = people(tmp_path, records(users=40)[::-1], "turned.jsonl")
    again = prepared(turned, **options)
    assert {name: set(PersonalRows(again, name).users) for name in again.tables} == users
    other = prepared(path, **options, split={"seed": 1})
    assert set(PersonalRows(other, "test").users) != users["test"]


def test_folds_hold_everybody_out_once(tmp_path: Path) -> None:
    path = people(tmp_path)
    held_out = [PersonalRows(prepared(path, split={"folds": 4, "fold": fold}), "validation").users for fold in range(4)]
    assert sorted(user for users in held_out for user in set(users)) == sorted({row["user"] for row in records()})


def test_a_folder_brings_its_parts(tmp_path: Path) -> None:
    everyone = records()
    people(tmp_path, everyone[:12], "train.jsonl")
    people(tmp_path, everyone[12:16], "val.json")
    people(tmp_path, everyone[16:], "test-000000.jsonl")
    expected = {"train": 12, "validation": 4, "test": 4}
    for options in (
        {},
        {"validation": {"split": 0.1}, "test": {"split": 0.1}},
        {"validation": {"split": "validation"}},
    ):
        found = prepared(tmp_path, **options)
        assert {name: counts["rows"] for name, counts in found.tables.items()} == expected
    assert any("validation is" in note for note in prepared(tmp_path, validation={"split": 0.1}).notes())


def test_held_out_files_of_their_own(tmp_path: Path) -> None:
    """Two folders may call different pictures the same."""
    train, held_out = people(tmp_path / "a", records()[:12]), people(tmp_path / "b", records()[12:])
    picture(tmp_path / "b/pictures/7.png", 70)
    found = prepared(train, validation={"path": str(held_out)})
    rows = PersonalRows(found, "validation")
    for number in range(len(rows)):
        for one in rows.record(number).items:
            name = str(one.image).partition("#")[0]
            assert (
                rows.image(one)
                == resize_image(decode_image(tmp_path / "b" / name, channels=3), (SIZE, SIZE), mode="crop")
            ).all()


def test_packed_records_are_read(tmp_path: Path) -> None:
    path = people(tmp_path)
    (tmp_path / "people.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert prepared(tmp_path / "people.jsonl.gz").tables["train"]["rows"] == 20


def test_limit_takes_the_first(tmp_path: Path) -> None:
    path = people(tmp_path)
    rows = PersonalRows(prepared(path, train={"path": str(path), "limit": 5}), "train")
    assert said(rows) == [Record.model_validate(row).model_dump(exclude_defaults=True) for row in records()[:5]]


def test_records_of_the_published_programs(tmp_path: Path) -> None:
    theirs = [
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
    found = PersonalRows(prepared(people(tmp_path, theirs, "train.json")), "train").record(0)
    assert (found.user, found.history[0].id, found.target.caption, found.style) == ("W1", "i1", "two", "calm")


def test_a_history_may_be_words_alone(tmp_path: Path) -> None:
    row = record(1, [1, 2], 3)
    row["history"][0]["image"] = None
    rows = PersonalRows(prepared(people(tmp_path, [row])), "train")
    assert rows.table.row("history", 0).tolist()[0] == -1
    with pytest.raises(DataError, match="has no prepared image"):
        rows.image(rows.record(0).history[0])


def test_pictures_of_another_folder(tmp_path: Path) -> None:
    path = people(tmp_path / "data")
    (tmp_path / "records").mkdir()
    moved = path.rename(tmp_path / "records/people.jsonl")
    with pytest.raises(DataError, match=r"data\.pictures"):
        prepared(moved)
    assert prepared(moved, pictures=str(tmp_path / "data")).tables["train"]["rows"] == 20


def test_prepared_shards_are_opened_as_they_are(tmp_path: Path) -> None:
    found = prepared(people(tmp_path))
    data = PersonalizeData.model_validate({"train": {"path": str(found.folder)}, "image_size": SIZE})
    assert prepare_personal(data).fingerprint == found.fingerprint
    with pytest.raises(UsageError, match="was prepared at 8"):
        prepare_personal(data.model_copy(update={"image_size": 16}))


def test_captions_from_a_file(tmp_path: Path) -> None:
    blank = records()
    for row in blank:
        for one in [*row["history"], row["target"]]:
            one["caption"] = ""
    path = people(tmp_path, blank)
    numbers = range(24)
    (tmp_path / "by-id.csv").write_text("id,caption\n" + "".join(f"i{n},a thing no. {n}\n" for n in numbers))
    lines = [json.dumps({"file_name": f"{n}.png", "text": f"a thing no. {n}"}) for n in numbers]
    (tmp_path / "by-name.jsonl").write_text("\n".join(lines))
    (tmp_path / "plain.json").write_text(json.dumps({f"i{n}": f"a thing no. {n}" for n in numbers}))
    for name in ("by-id.csv", "by-name.jsonl", "plain.json"):
        rows = PersonalRows(prepared(path, captions=str(tmp_path / name)), "train")
        for number in range(len(rows)):
            assert all(one.caption == f"a thing no. {one.id[1:]}" for one in rows.record(number).items), name


def test_a_record_asks_for_its_wish() -> None:
    made = Record(user="1", history=(Item(id="a", caption="x"),), target=Item(id="b", caption="y"))
    assert made.wish_or_caption == "y"
    assert made.model_copy(update={"wish": "a star"}).wish_or_caption == "a star"
    assert Record.model_validate({**record(1, [1], 2), "user": 17}).user == "17"
    assert item(1)["id"] == Record.model_validate(record(1, [1], 2)).history[0].id
