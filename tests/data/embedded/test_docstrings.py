"""The embedded docstrings: unchanged content, no near-duplicates, and no text that names its own label."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bottega.config.data import HeldOut, Source
from bottega.data.embedded.docstrings import FILE
from bottega.data.tables.classes import read_text_column
from bottega.data.text.duplicates import find_near_unique, minhash_signature
from bottega.data.text.labelled import open_labelled_texts
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.classify.config import ClassifyData, ClassifyRecipe
from bottega.tasks.classify.prepare import prepare_classify
from bottega.tasks.recipes import check_recipe

LINES = gzip.decompress(FILE.read_bytes())
ROWS = [json.loads(line) for line in LINES.splitlines()]
PACKAGES = (
    *("asyncio", "email", "http", "idlelib", "importlib", "logging"),
    *("multiprocessing", "tkinter", "unittest", "urllib", "xml"),
)


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


def test_content_matches_the_hash_of_the_measured_version() -> None:
    assert hashlib.sha256(LINES).hexdigest()[:16] == "efc54a3080c885f6"
    assert FILE.stat().st_size < 250_000
    assert FILE.with_name("docstrings.LICENSE").read_text().count("Python Software Foundation") >= 2
    counts = Counter(row["label"] for row in ROWS)
    assert tuple(sorted(counts)) == PACKAGES
    assert (sum(counts.values()), min(counts.values()), max(counts.values())) == (2508, 77, 400)


def test_no_text_names_its_package() -> None:
    named = re.compile("|".join(PACKAGES), re.IGNORECASE)
    assert not [row["text"] for row in ROWS if named.search(row["text"])]
    assert all(row["group"].startswith(f"{row['label']}.") for row in ROWS)


def test_there_are_no_near_duplicates() -> None:
    assert find_near_unique(np.stack([minhash_signature(row["text"]) for row in ROWS]), 0.5).all()


def test_validation_split_keeps_groups_together(tmp_path: Path) -> None:
    recipe = check_recipe(["classify"]).recipe
    assert isinstance(recipe, ClassifyRecipe)
    prepared = prepare_classify(recipe.data, TokenizerSpec(kind="words"), seed=0, progress=quiet, cache=tmp_path)
    assert prepared.classes.names == PACKAGES
    sides = {}
    for name in ("train", "validation"):
        keys = read_text_column(prepared.table(name), "key")
        sides[name] = {ROWS[int(key.rpartition(":")[2]) - 1]["group"] for key in keys}
        assert set(read_text_column(prepared.table(name), "label")) == set(PACKAGES), "every class is on both sides"
    assert not sides["train"] & sides["validation"]
    assert len(prepared.table("validation")) == pytest.approx(0.2 * len(ROWS), abs=25)
    assert len(open_labelled_texts(prepared, "train")) + len(prepared.table("validation")) == len(ROWS)


def test_any_source_may_be_embedded_and_other_data_needs_no_group(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"a text {n}", "label": "xml"}) + "\n" for n in range(9)))
    data = ClassifyData(train=Source(path=str(path)), validation=HeldOut(kind="embedded"))
    prepared = prepare_classify(data, TokenizerSpec(kind="words"), seed=0, progress=quiet, cache=tmp_path / "cache")
    assert len(prepared.table("validation")) == len(ROWS)
    assert check_recipe(["classify", {"data.train.path": str(path)}]).recipe.data.split is None
