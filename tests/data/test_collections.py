"""Published collections become personal records: items of one user, in one split, with the target not in the history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bottega.core.errors import CheckpointError, DataError, UsageError
from bottega.data.prepare.prepared import PreparedData
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.collections import read_collection
from bottega.tasks.personalize.data.item_captions import FileCaptions, caption_images
from bottega.tasks.personalize.data.records import PersonalRows, Record
from bottega.tasks.personalize.data.tables import prepare_personal
from small_collections import write_captioning_model, write_flickr, write_image, write_pog, write_ser

TABLE = "FLICKR-AES_image_labeled_by_each_worker.csv"


def build_data(folder: Path, collection: str, **options: Any) -> PersonalizeData:
    fields = {"train": {"path": str(folder)}, "collection": collection, "image_size": 8, "history_length": 3, **options}
    return PersonalizeData.model_validate(fields)


def read_records(folder: Path, collection: str, **options: Any) -> list[Record]:
    records = [record for _, record in read_collection(folder, build_data(folder, collection, **options)).records]
    assert all(isinstance(record, Record) for record in records)
    return records  # type: ignore[return-value]


def prepare_collection(folder: Path, collection: str, **options: Any) -> PreparedData:
    return prepare_personal(build_data(folder, collection, **options))


@pytest.fixture
def flickr_folder(tmp_path: Path) -> Path:
    return write_flickr(tmp_path / "flickr")


@pytest.fixture(params=["flickr", "pog", "ser"])
def collection_case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, dict[str, Any]]:
    folder = {"flickr": write_flickr, "pog": write_pog, "ser": write_ser}[request.param](tmp_path / request.param)
    captions = {} if request.param == "pog" else {"captions": str(folder / "captions.json")}
    return folder, request.param, captions


def test_every_record_of_every_collection(collection_case: tuple[Path, str, dict[str, Any]]) -> None:
    folder, collection, captions = collection_case
    splits = {"validation": {"split": 0.25}, "test": {"split": 0.25}}
    prepared_data = prepare_collection(folder, collection, **captions, **splits)
    users = {}
    for table in ("train", "validation", "test"):
        rows = PersonalRows(prepared_data, table)
        users[table] = set(rows.users)
        for number in range(len(rows)):
            record = rows.record(number)
            ids = [item.id for item in record.history]
            assert record.target.id not in ids
            assert len(set(ids)) == len(ids)
            assert 1 <= len(ids) <= 3
            assert all(item.caption for item in record.items)
            assert rows.image(record.target).shape == (8, 8, 3)
    assert sum(map(len, users.values())) == len(users["train"] | users["validation"] | users["test"])
    assert sum(counts["rows"] for counts in prepared_data.tables.values()) == len(
        read_records(folder, collection, **captions)
    )


def test_records_hold_the_images_a_worker_liked(flickr_folder: Path) -> None:
    lines = (flickr_folder / TABLE).read_text().splitlines()[1:]
    rated = [[cell.strip() for cell in line.split(",")] for line in lines]
    liked: dict[str, set[str]] = {}
    for worker, name, score in rated:
        if int(score) >= 4:
            liked.setdefault(worker, set()).add(name.removesuffix(".jpg"))
    records = read_records(flickr_folder, "flickr")
    targets: dict[str, set[str]] = {}
    for record in records:
        assert {item.id for item in record.items} <= liked[record.user]
        assert len(record.history) == 3
        targets.setdefault(record.user, set()).add(record.target.id)
    assert {worker: len(names) - 3 for worker, names in liked.items() if len(names) > 3} == {
        worker: len(names) for worker, names in targets.items()
    }
    assert "ALAZY" not in targets
    [(reason, count)] = read_collection(flickr_folder, build_data(flickr_folder, "flickr")).left_out.items()
    assert "workers who liked 3 pictures or fewer" in reason
    assert count == sum(len(names) for names in liked.values() if len(names) <= 3)
    assert len(read_records(flickr_folder, "flickr", min_score=2)) > len(records)


def test_records_do_not_depend_on_the_order_of_ratings(tmp_path: Path) -> None:
    first = read_records(write_flickr(tmp_path / "a"), "flickr")
    for order in range(3):
        assert read_records(write_flickr(tmp_path / "a", order=order), "flickr") == first


@pytest.mark.parametrize("form", ["semicolons", "tabs", "quotes", "bom"])
def test_ratings_are_read_with_any_delimiter_and_quoting(tmp_path: Path, form: str) -> None:
    folder = write_flickr(tmp_path / "a")
    first = read_records(folder, "flickr")
    table = folder / TABLE
    lines = [[cell.strip() for cell in line.split(",")] for line in table.read_text().splitlines()]
    delimiter = {"semicolons": ";", "tabs": "\t"}.get(form, ",")
    if form == "quotes":
        lines = [[f'"{cell}"' for cell in cells] for cells in lines]
    text = "\r\n".join(delimiter.join(cells) for cells in lines) + "\r\n\r\n"
    table.write_bytes(text.encode("utf-8-sig" if form == "bom" else "utf-8"))
    assert read_records(folder, "flickr") == first


def test_repeated_ratings_are_averaged(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    (folder / "40K").mkdir(parents=True)
    rows = [
        "worker, imagePair, score",
        *(f"A, p{number}.jpg, 5" for number in range(4)),
        "A, p0.jpg, 2",
        "A, p1.jpg, 4",
    ]
    (folder / TABLE).write_text("\n".join(rows))
    assert {item.id for record in read_records(folder, "flickr", history_length=2) for item in record.items} == {
        "p1",
        "p2",
        "p3",
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("A, p.jpg, good", "the score 'good' is not a number"),
        ("A, , 4", "has no picture"),
        ("A, p.jpg, nan", "not a number"),
    ],
)
def test_invalid_rating_is_refused_or_skipped(flickr_folder: Path, row: str, message: str) -> None:
    table = flickr_folder / TABLE
    table.write_text(table.read_text() + row + "\n")
    captions = {"captions": str(flickr_folder / "captions.json")}
    with pytest.raises(DataError, match=message):
        prepare_collection(flickr_folder, "flickr", **captions)
    skipped = prepare_collection(flickr_folder, "flickr", **captions, bad_records="skip", max_bad=0.1)
    assert skipped.metadata["bad"] == 1
    assert message in skipped.notes()[-1]


def test_images_in_another_folder_are_read_with_the_setting(flickr_folder: Path, tmp_path: Path) -> None:
    captions = {"captions": str(flickr_folder / "captions.json")}
    before = prepare_collection(flickr_folder, "flickr", **captions)
    (flickr_folder / "40K").rename(tmp_path / "photos")
    with pytest.raises(DataError, match="does not exist"):
        prepare_collection(flickr_folder, "flickr", **captions)
    after = prepare_collection(flickr_folder, "flickr", **captions, pictures=str(tmp_path / "photos"))
    assert after.tables == before.tables


def test_pog_records_hold_the_last_clicked_items(tmp_path: Path) -> None:
    folder = write_pog(tmp_path / "pog")
    outfits = {
        line.partition(",")[0]: set(line.partition(",")[2].split(";"))
        for line in (folder / "outfit_data.txt").read_text().splitlines()
    }
    lines = [line.split(",") for line in (folder / "user_data.txt").read_text().splitlines()]
    collection = read_collection(folder, build_data(folder, "pog"))
    for key, record in collection.records:
        assert isinstance(record, Record)
        user, clicked, outfit = lines[int(key.rpartition(" ")[2]) - 1]
        items = clicked.split(";")
        assert record.user == user
        assert record.target.id in outfits[outfit]
        assert record.target.id not in items
        last = list(dict.fromkeys(items[::-1]))[:3][::-1]
        assert [item.id for item in record.history] == last, "each item once, at its last click"
        assert record.target.caption == f"a coat, number {record.target.id[1:]}", "a title may contain commas"
        assert all((item.image is not None) == (int(item.id[1:]) % 2 == 0) for item in record.items)
    assert collection.left_out["the same as an earlier line"] == 1
    assert len(collection.records) + sum(collection.left_out.values()) == len(lines)
    assert len(read_collection(folder, build_data(folder, "pog"), limit=4).records) == 4


def test_missing_files_of_pog_are_reported_by_name(tmp_path: Path) -> None:
    folder = write_pog(tmp_path / "pog")
    users = folder / "user_data.txt"
    users.write_text(users.read_text() + "p1,t1;t2\n")
    with pytest.raises(DataError, match=r"user_data.txt, line 26: expected user,item;item;...,outfit"):
        prepare_collection(folder, "pog")
    (folder / "item_data.txt").unlink()
    with pytest.raises(DataError, match=r"has no item_data.txt"):
        prepare_collection(folder, "pog")
    for path in (folder / "images").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"has no images; put them into .*images"):
        prepare_collection(folder, "pog")


def test_ser_record_holds_stickers_of_one_pack(tmp_path: Path) -> None:
    folder = write_ser(tmp_path / "ser")
    records = read_records(folder, "ser")
    for record in records:
        assert {item.id.partition("/")[0] for item in record.items} == {record.user}
        assert record.style in ("happiness", "anger", None)
        number = int(record.target.id.rpartition("_")[2].removesuffix(".png"))
        assert record.style in (("happiness", "anger")[number % 2], None)
    # Every sticker of a pack that is large enough is a target once.
    assert len({record.target.id for record in records}) == len(records) == 4 + 5 + 6 + 7
    assert sum(record.style is None for record in records) == 1, "one has no annotation"
    assert read_collection(folder, build_data(folder, "ser")).left_out == {"in 2 packs of 3 stickers or fewer": 5}


def test_stickers_without_annotations(tmp_path: Path) -> None:
    folder = write_ser(tmp_path / "ser")
    for path in sorted((folder / "Annotations").rglob("*.json")):
        path.unlink()
    assert all(record.style is None for record in read_records(folder, "ser"))
    (folder / "Annotations/bad.json").write_text("{")
    with pytest.raises(DataError, match=r"bad.json: not valid JSON"):
        read_records(folder, "ser")


@pytest.mark.parametrize("collection", ["flickr", "pog", "ser"])
def test_folder_of_another_layout_is_refused(tmp_path: Path, collection: str) -> None:
    (tmp_path / "notes").mkdir()
    write_image(tmp_path / "a.png", 0)
    with pytest.raises(DataError, match=r"has no"):
        prepare_collection(tmp_path, collection)


def test_captions_are_generated_by_a_model_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bottega.models.frozen import captioner
    from bottega.tasks.personalize.data.prepare import prepare_people

    folder, model = write_ser(tmp_path / "ser"), write_captioning_model(tmp_path / "blip")
    loads: list[Path] = []
    load_captioner = captioner.load_captioner
    monkeypatch.setattr(captioner, "load_captioner", lambda folder: loads.append(folder) or load_captioner(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = build_data(folder, "ser", captions=str(model))
    stages: dict[str, tuple[int, int]] = {}
    first = PersonalRows(
        prepare_people(data, progress=lambda stage, done, total: stages.update({stage: (done, total)})), "train"
    )
    assert stages["captions"] == (22, 22)
    assert loads == [model]
    captions = {item.id: item.caption for n in range(len(first)) for item in first.record(n).items}
    assert all(captions.values())
    assert len(set(captions.values())) > 1, "captions depend on the image"
    assert not any("[" in text for text in captions.values())
    again = PersonalRows(prepare_people(build_data(folder, "ser", captions=str(model), image_size=16)), "train")
    assert loads == [model], "captions are cached"
    assert {item.id: item.caption for n in range(len(again)) for item in again.record(n).items} == captions
    write_captioning_model(model, seed=5)
    other = PersonalRows(prepare_people(data), "train")
    assert len(loads) == 2
    assert {item.id: item.caption for n in range(len(other)) for item in other.record(n).items} != captions


def test_unsuitable_captioning_models_are_refused(tmp_path: Path) -> None:
    from bottega.models.frozen.captioner import load_captioner
    from bottega.tasks.personalize.data.prepare import prepare_people

    folder = write_ser(tmp_path / "ser")
    model = write_captioning_model(tmp_path / "blip")
    config = json.loads((model / "config.json").read_text())
    for change, message in (
        ({"auto_map": {"AutoModel": "x.Y"}}, "never run"),
        ({"model_type": "llama"}, "contains a llama"),
    ):
        (model / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UsageError, match=message):
            prepare_people(build_data(folder, "ser", captions=str(model)))
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles are never opened"):
        load_captioner(model)
    with pytest.raises(UsageError, match="is not the folder of a captioning model"):
        prepare_people(build_data(folder, "ser", captions=str(model)))


def test_caption_table_without_a_caption_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "captions.csv"
    path.write_text("id,caption\na,\nb,\n")
    with pytest.raises(DataError, match=r"captions\.csv has no captions; give a table .* a text in at least one row"):
        FileCaptions(path)


def test_empty_caption_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    path = write_image(tmp_path / "a.png", 1)
    with pytest.raises(DataError, match=r"gives an empty caption for .*a.png"):
        caption_images(
            {"x": path}, tmp_path, lambda folder: lambda images: [" " for _ in images], progress=lambda *of: None
        )
