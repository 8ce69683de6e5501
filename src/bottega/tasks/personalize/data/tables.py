"""Preparation of user records: tables of records, and every distinct image decoded once."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from bottega.core.errors import DataError, UsageError
from bottega.data.image.encoder import ImageEncoder
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.media import MAX_DECODED_BYTES
from bottega.data.prepare.prepared import FORMAT_VERSION, META_FILE, PreparedData, open_if_prepared
from bottega.data.prepare.tally import Tally
from bottega.data.records.record import BadRecord
from bottega.data.tables.cache import get_or_build
from bottega.data.tables.shards import TEXT, Column, ShardWriter
from bottega.storage.cache_folder import default_cache
from bottega.storage.durable import flush_all, write_atomic
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.image_files import ImageFiles, decode_images
from bottega.tasks.personalize.data.item_captions import (
    CaptionerLoader,
    FileCaptions,
    caption_images,
    is_captioning_model,
)
from bottega.tasks.personalize.data.record_files import SKIP_HINT, LocatedRecord, RecordTables, read_records
from bottega.tasks.personalize.data.records import NAMES_TABLE, Item, Record

TASK = "personalize"
# Increase it when the same records would give other tables.
VERSION = 2
COLUMNS = {
    "key": TEXT,
    "user": TEXT,
    "record": TEXT,
    "target": Column("<i8"),
    "history": Column("<i8", varying=True),
}
"""Target and history are numbers of images, -1 for an item without one."""
NAME_COLUMNS = {"name": TEXT, "picture": Column("<i8")}
FIRST_WORDINGS = (
    ("is not a valid record: ", "is no record: "),
    ("is not a known key; the keys are ", "is no key of it; there is "),
    ("is not a number", "is no number"),
    ("the image file ", "the picture "),
    (" is outside ", " lies outside "),
    (
        "; set data.pictures to its folder, or move the file",
        "; name that folder with data.pictures, or move the picture into it",
    ),
    (" cannot be accessed: ", " cannot be looked for: "),
    ("; set data.pictures if the images are elsewhere", "; name their folder with data.pictures if it is another"),
    ("the wish is blank; remove it, or describe the image;", "the wish is blank; leave it out, or say what is wished;"),
    (" has none for it;", " says nothing about it;"),
    (
        "or set data.captions to a file of captions or to the folder of a captioning model",
        "or name a file of captions or the folder of a captioning model with data.captions",
    ),
    ("an unpaired surrogate", "half a surrogate pair"),
    ("; a record looks like ", "; one is such as "),
)
"""Reasons of bad records -> their first wording, which cache keys contain."""


def prepare_personal(
    data: PersonalizeData,
    *,
    progress: ProgressCallback = lambda stage, done, total: None,
    cache: Path | None = None,
    load_captioner: CaptionerLoader | None = None,
) -> PreparedData:
    """Return tables of records and images, from the cache or prepared now.

    `load_captioner` loads the captioning model if data.captions is the folder of one.
    """
    prepared = open_if_prepared(data, task=TASK)
    if prepared is not None:
        size = prepared.metadata["image_size"]
        if size != data.image_size:
            raise UsageError(
                f"data.image_size: {prepared.folder} was prepared at {size}, not {data.image_size}; set {size}, or prepare again"
            )
        return prepared
    plan = _build_plan(data, load_captioner, progress)
    folder = get_or_build(cache or default_cache(), plan.key, lambda folder: _build_tables(plan, folder, progress))
    return PreparedData(folder, plan.key)


@dataclass(frozen=True)
class PreparationPlan:
    """Records that passed all checks that need no decoded image."""

    records: RecordTables
    images: ImageFiles
    data: PersonalizeData

    @property
    def stop_on_bad(self) -> bool:
        """Whether a bad record is an error rather than skipped."""
        return self.data.bad_records != "skip"

    @cached_property
    def all_records(self) -> list[LocatedRecord]:
        """The records of all tables."""
        return [located for table in self.records.tables.values() for located in table]

    @property
    def _bad_reasons(self) -> list[str]:
        """Reasons of bad records without their folders, for the cache key, in the wording of the first version."""
        sources = (self.data.train, self.data.validation, self.data.test)
        paths = [source.path for source in sources if source is not None and source.path is not None]
        roots = sorted({str(Path(path).expanduser()) for path in (*paths, self.data.pictures or "")} - {"."}, key=len)
        reasons = list(self.records.tally.named)
        for root in reversed(roots):  # the longest first: one may contain another
            reasons = [text.replace(root, "") for text in reasons]
        for wording, first_wording in FIRST_WORDINGS:
            reasons = [text.replace(wording, first_wording) for text in reasons]
        return reasons

    @cached_property
    def key(self) -> str:
        """Cache key: a hash of the records and the contents of their images, wherever the files are."""
        tally = self.records.tally
        policy = (
            (FORMAT_VERSION, VERSION, TASK, len(self.records.notes)),
            self.data.image_size,
            self.stop_on_bad,
            self.data.max_bad,
            (tally.bad, self._bad_reasons, sorted(tally.dropped.items())),
        )
        digest = hashlib.sha256(repr(policy).encode())
        for name, records in self.records.tables.items():
            digest.update(f"\0table {name}\0".encode())
            for located in records:
                hashes = [self.images.get_hash(located, item) for item in located.record.items]
                digest.update(
                    f"{located.key}\0{located.record.model_dump_json()}\0{hashes}\0".encode(errors="surrogatepass")
                )
        return digest.hexdigest()[:32]


def _build_plan(
    data: PersonalizeData, load_captioner: CaptionerLoader | None, progress: ProgressCallback
) -> PreparationPlan:
    plan = PreparationPlan(read_records(data), ImageFiles(), data)
    _drop_bad_records(plan, plan.images.find_problem)
    plan.images.hash_all((located for table in plan.records.tables.values() for located in table), progress)
    _add_captions(plan, load_captioner, progress)
    plan.records.tally.check(data.max_bad)
    return plan


def _drop_bad_records(plan: PreparationPlan, find_problem: Callable[[LocatedRecord], BadRecord | None]) -> None:
    """Drop the records with a problem; with data.bad_records=stop, raise an error for the first."""
    for name, records in plan.records.tables.items():
        valid = []
        for located in records:
            bad = find_problem(located)
            if bad is None:
                valid.append(located)
            else:
                plan.records.tally.count_bad(bad, stop=plan.stop_on_bad)
        plan.records.tables[name] = valid


def _add_captions(plan: PreparationPlan, load_captioner: CaptionerLoader | None, progress: ProgressCallback) -> None:
    """Add missing captions from data.captions, and drop the records that still lack one."""
    captions = plan.data.captions
    if captions is not None:
        path = Path(captions).expanduser()
        find_caption = (
            _make_model_lookup(plan, path, load_captioner, progress)
            if is_captioning_model(path)
            else _make_file_lookup(path)
        )
        item_cache: dict[tuple[Path, str, str | None, str], Item] = {}
        for name, records in plan.records.tables.items():
            plan.records.tables[name] = [_add_caption(located, find_caption, item_cache) for located in records]
    remedy = (
        f"data.captions={captions} has none for it"
        if captions is not None
        else "add one, or set data.captions to a file of captions or to the folder of a captioning model"
    )

    def find_missing_caption(located: LocatedRecord) -> BadRecord | None:
        item = next((item for item in located.record.items if not item.caption.strip()), None)
        if item is None:
            return None
        field = "target" if item is located.record.target else "history"
        return BadRecord(
            located.key, located.where, f"item {item.id!r} of the {field} has no caption: {remedy}; {SKIP_HINT}"
        )

    _drop_bad_records(plan, find_missing_caption)


def _make_file_lookup(path: Path) -> Callable[[LocatedRecord, Item], str]:
    captions = FileCaptions(path)
    return lambda located, item: captions.get_caption(item) or item.caption


def _make_model_lookup(
    plan: PreparationPlan, folder: Path, load_captioner: CaptionerLoader | None, progress: ProgressCallback
) -> Callable[[LocatedRecord, Item], str]:
    """Return a lookup that captions the items without a caption by the model of `folder`."""
    paths = {
        plan.images.hashes[path]: path
        for table in plan.records.tables.values()
        for located in table
        for item in located.record.items
        if not item.caption.strip() and (path := plan.images.get_path(located, item)) is not None
    }
    if load_captioner is None:
        raise UsageError(
            f"data.captions: {folder} is a folder, but captioning models are not available here; give a caption file"
        )
    captions = caption_images(paths, folder, load_captioner, progress=progress) if paths else {}
    return lambda located, item: item.caption.strip() or captions.get(plan.images.get_hash(located, item) or "", "")


def _add_caption(
    located: LocatedRecord,
    find_caption: Callable[[LocatedRecord, Item], str],
    item_cache: dict[tuple[Path, str, str | None, str], Item],
) -> LocatedRecord:
    """Return the record with captions; `item_cache` has items with their captions, since an item is in many histories."""
    items = []
    for item in located.record.items:
        key = (located.root, item.id, item.image, item.caption)
        if key not in item_cache:
            item_cache[key] = item.model_copy(update={"caption": find_caption(located, item)})
        items.append(item_cache[key])
    update = {"history": tuple(items[:-1]), "target": items[-1]}
    return located._replace(record=located.record.model_copy(update=update))


def _build_tables(plan: PreparationPlan, folder: Path, progress: ProgressCallback) -> None:
    """Write tables and metadata; decoded parts of an interrupted preparation are reused, see `get_or_build`."""
    if (folder / META_FILE).is_file():
        shutil.rmtree(folder / "parts", ignore_errors=True)
        return
    first_uses: dict[str, tuple[Path, str]] = {}
    for located in plan.all_records:
        for item in located.record.items:
            path = plan.images.get_path(located, item)
            if path is not None:
                first_uses.setdefault(plan.images.hashes[path], (path, located.where))
    encoder = _choose_encoder(plan.data.image_size, len(first_uses))
    paths, locations = [path for path, _ in first_uses.values()], [where for _, where in first_uses.values()]
    reason_by_index = decode_images(
        paths, list(first_uses), locations, folder, encoder=encoder, stop=plan.stop_on_bad, progress=progress
    )
    damage_by_hash = {
        image_hash: reason_by_index[index] for index, image_hash in enumerate(first_uses) if index in reason_by_index
    }
    valid_hashes = [image_hash for image_hash in first_uses if image_hash not in damage_by_hash]
    numbers = {image_hash: number for number, image_hash in enumerate(valid_hashes)}
    tally, tables = _write_tables(plan, folder, numbers, damage_by_hash)
    meta = {
        "format": FORMAT_VERSION,
        "task": TASK,
        "key": plan.key,
        "tables": tables,
        **vars(tally),
        "classes": None,
        "image_size": plan.data.image_size,
        "pictures": len(numbers),
        "notes": plan.records.notes,
        "encoder": asdict(encoder),
    }
    shutil.rmtree(folder / "parts", ignore_errors=True)
    flush_all(folder)
    write_atomic(folder / META_FILE, json.dumps(meta, indent=1))


def _choose_encoder(size: int, count: int) -> ImageEncoder:
    is_small = size * size * 3 * count <= MAX_DECODED_BYTES
    return ImageEncoder(size=(size, size), channels=3, resize="crop", store="decoded" if is_small else "encoded")


def _write_tables(
    plan: PreparationPlan, folder: Path, numbers: dict[str, int], damage_by_hash: dict[str, str]
) -> tuple[Tally, dict[str, dict[str, int]]]:
    """Write the tables of records and the table of image names; return the tally, and the rows and users of each table.

    `numbers` is hash -> row of an image in the table of images.
    """
    tally = Tally(**{**vars(plan.records.tally), "named": list(plan.records.tally.named)})
    names: dict[str, str] = {}
    tables = {}
    for table, records in plan.records.tables.items():
        users: set[str] = set()
        with ShardWriter(folder / table, COLUMNS) as writer:
            for located in records:
                hashes = [plan.images.get_hash(located, item) for item in located.record.items]
                reason = next(
                    (damage_by_hash[image_hash] for image_hash in hashes if image_hash in damage_by_hash), None
                )
                if reason is not None:
                    tally.count_bad(BadRecord(located.key, located.where, reason), stop=plan.stop_on_bad)
                    continue
                record = _make_names_unique(located.record, hashes, names)
                users.add(record.user)
                row = {"key": located.key, "user": record.user, "record": record.model_dump_json()}
                image_numbers = [-1 if image_hash is None else numbers[image_hash] for image_hash in hashes]
                writer.add({**row, "target": image_numbers[-1], "history": image_numbers[:-1]})
        tables[table] = {"rows": writer.num_rows, "users": len(users)}
    tally.check(plan.data.max_bad)
    for table, counts in tables.items():
        if not counts["rows"]:
            raise DataError(f"data.{table}: all records are bad; the first: {tally.named[0]}")
    with ShardWriter(folder / NAMES_TABLE, NAME_COLUMNS) as writer:
        for name, image_hash in names.items():
            writer.add({"name": name, "picture": numbers[image_hash]})
    return tally, tables


def _make_names_unique(record: Record, hashes: list[str | None], names: dict[str, str]) -> Record:
    """Return the record with unique image names: two folders may have an a.png each."""
    items = []
    for item, image_hash in zip(record.items, hashes, strict=True):
        if item.image is not None and image_hash is not None and names.setdefault(item.image, image_hash) != image_hash:
            item = item.model_copy(update={"image": f"{item.image}#{image_hash[:16]}"})
            names[str(item.image)] = image_hash
        items.append(item)
    return record.model_copy(update={"history": tuple(items[:-1]), "target": items[-1]})
