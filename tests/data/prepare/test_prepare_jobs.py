"""Preparation jobs: resuming after a kill, identical bytes for any number of jobs, flat memory."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bottega.config.data import Deduplication, HeldOut, Replay, Source, Splitting, TextData
from bottega.core.errors import DataError
from bottega.data.prepare import inputs, jobs
from bottega.data.prepare.prepared import PreparedData
from bottega.data.tables.cache import MANIFEST
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.language.prepare import prepare_language

BYTES = TokenizerSpec(kind="bytes")


def write_rows(path: Path, count: int, *, seed: int = 0) -> Path:
    rng = random.Random(seed)
    with path.open("w") as out:
        for number in range(count):
            words = " ".join(rng.choice(("alpha", "beta", "gamma", "délta")) for _ in range(rng.randrange(1, 40)))
            out.write(json.dumps({"text": f"{number} {words}", "user": number % 7, "label": number % 3}) + "\n")
    return path


def prepare(path: Path, cache: Path, **options: Any) -> PreparedData:
    data = TextData(train=Source(path=str(path)), **{"validation": HeldOut(split=0.2), **options})
    return prepare_language(data, BYTES, progress=lambda stage, done, total: None, cache=cache)


def read_files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def read_texts(prepared: PreparedData, table: str) -> list[str]:
    rows = prepared.table(table)
    return [prepared.tokenizer.decode(rows.row("tokens", n)[:-1]) for n in range(len(rows))]


def test_many_jobs_on_several_processes_give_the_bytes_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 400)
    one_job = read_files(prepare(path, tmp_path / "one-job").folder)
    monkeypatch.setattr(inputs, "JOB_BYTES", 3000)
    many = read_files(prepare(path, tmp_path / "many").folder)
    monkeypatch.setattr(jobs, "MIN_BYTES_FOR_WORKERS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert many == one_job == read_files(prepare(path, tmp_path / "processes").folder)


def test_every_record_is_in_one_split(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 300)
    expected = sorted(json.loads(line)["text"] for line in path.read_text().splitlines())
    held_out = {"validation": HeldOut(split=0.2), "test": HeldOut(split=0.1)}
    for by in ("fraction", "hash", "stratified", "group"):
        split = Splitting(by=by, field="user" if by == "group" else None)
        prepared = prepare(path, tmp_path / "cache", split=split, **held_out)
        splits = {table: read_texts(prepared, table) for table in ("train", "validation", "test")}
        assert sorted(chain.from_iterable(splits.values())) == expected, by
        assert len(splits["train"]) > len(splits["validation"]) > 0, by
    folds = [prepare(path, tmp_path / "cache", split=Splitting(folds=5, fold=k)) for k in range(5)]
    assert sorted(chain.from_iterable(read_texts(fold, "validation") for fold in folds)) == expected


def test_group_is_in_one_split(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 300)
    users = {row["text"]: row["user"] for row in map(json.loads, path.read_text().splitlines())}
    prepared = prepare(path, tmp_path / "cache", split=Splitting(by="group", field="user"))
    splits = [{users[text] for text in read_texts(prepared, table)} for table in ("train", "validation")]
    assert not splits[0] & splits[1]
    assert len(splits[0] | splits[1]) == 7


def test_hash_split_is_stable_when_the_data_grows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 200)
    before = set(read_texts(prepare(path, tmp_path / "cache", split=Splitting(by="hash")), "validation"))
    write_rows(path, 400)
    after = set(read_texts(prepare(path, tmp_path / "cache", split=Splitting(by="hash")), "validation"))
    assert before < after


def test_duplicates_of_held_out_texts_leave_the_training_data(tmp_path: Path) -> None:
    rows = [{"text": f"text number {i} of many, all different from each other"} for i in range(50)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows + rows[:10] + [{"text": "held out text"}])))
    (tmp_path / "held.jsonl").write_text(json.dumps({"text": "Held  out text"}) + "\n")
    prepared = prepare(
        tmp_path / "train.jsonl",
        tmp_path / "cache",
        validation=HeldOut(path=str(tmp_path / "held.jsonl")),
        deduplicate=Deduplication(),
    )
    assert read_texts(prepared, "validation") == ["Held  out text"]
    assert sorted(read_texts(prepared, "train")) == sorted(row["text"] for row in rows)
    assert prepared.metadata["dropped"] == {"duplicate": 11}


def test_bad_rows_are_refused_or_skipped_and_reported(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 100)
    lines = path.read_text().splitlines()
    lines[41] = '{"text": '
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 42"):
        prepare(path, tmp_path / "cache")
    with pytest.raises(DataError, match=r"line 42.*1 of 100 records are bad, more than data\.max_bad=0\.001"):
        prepare(path, tmp_path / "cache", bad_records="skip")
    prepared = prepare(path, tmp_path / "cache", bad_records="skip", max_bad=0.02)
    assert prepared.metadata["bad"] == 1
    assert "line 42" in prepared.metadata["named"][0]
    assert len(read_texts(prepared, "train")) + len(read_texts(prepared, "validation")) == 99


SLOW = """
    import sys, threading
    from pathlib import Path
    from bottega.data.prepare import inputs, jobs
    from bottega.data.prepare.encode import EncodeJobs
    from bottega.tasks.language.prepare import prepare_language
    from bottega.data.text.vocabulary import TokenizerSpec
    from bottega.config.data import HeldOut, Source, TextData

    inputs.JOB_BYTES = 2000
    work = EncodeJobs.run_job
    def run_logged(self, number, out):
        with open(sys.argv[3], "a") as log:
            log.write(f"{number}\\n")
        if number == int(sys.argv[4]):
            threading.Event().wait()  # for the kill
        return work(self, number, out)
    EncodeJobs.run_job = run_logged
    data = TextData(train=Source(path=sys.argv[1]), validation=HeldOut(split=0.2))
    prepare_language(data, TokenizerSpec(kind="bytes"), progress=lambda *a: None, cache=Path(sys.argv[2]))
"""


def test_killed_preparation_resumes_at_the_interrupted_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = write_rows(tmp_path / "rows.jsonl", 200), tmp_path / "log"
    arguments = [str(path), str(tmp_path / "cache"), str(log)]
    command = [sys.executable, "-c", textwrap.dedent(SLOW), *arguments]
    process = subprocess.Popen([*command, "4"])
    while not log.exists() or len(log.read_text().split()) < 5:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = log.read_text().split()
    subprocess.run([*command, "-1"], check=True, timeout=200)
    resumed = log.read_text().split()[len(first) :]
    # Only the job that the kill interrupted runs twice.
    assert resumed[0] == first[-1]
    assert not set(resumed[1:]) & set(first)
    monkeypatch.setattr(inputs, "JOB_BYTES", 2000)
    [entry] = [folder for folder in (tmp_path / "cache").iterdir() if folder.is_dir()]
    assert read_files(prepare(path, tmp_path / "uninterrupted").folder) == read_files(entry)


def test_memory_stays_flat(tmp_path: Path) -> None:
    """A text of 120 MB needs at most 300 MB more than Python and its libraries."""
    line = "the quick brown fox jumps over the lazy dog, as it does in every text of this kind\n"
    with (tmp_path / "big.txt").open("w") as out:
        for _ in range(120):
            out.write(line * (1_000_000 // len(line)))
    script = """if True:
        import resource, sys
        from pathlib import Path
        from bottega.tasks.language.prepare import prepare_language
        from bottega.data.text.vocabulary import TokenizerSpec
        from bottega.config.data import HeldOut, Source, TextData
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        data = TextData(train=Source(path=sys.argv[1] + "/big.txt"), validation=HeldOut(split=0.05))
        spec = TokenizerSpec(kind="bytes")
        ready = prepare_language(data, spec, progress=lambda *a: None, cache=Path(sys.argv[1], "cache"))
        assert ready.tables["train"]["bytes"] > 1e8
        peak = max(resource.getrusage(target).ru_maxrss for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        print(peak - before)
    """
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    kilobytes = int(process.stdout)
    assert kilobytes < 300_000, f"{kilobytes} kB more than before"


def test_several_sources_have_separate_tables_and_a_single_text_is_split(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 60)
    (tmp_path / "one.txt").write_text("line after line of one text\n" * 100)
    (tmp_path / "old.txt").write_text("what was learned before\n" * 50)
    data = TextData(
        sources=(Source(path=str(rows)), Source(path=str(tmp_path / "one.txt"))),
        replay=Replay(path=str(tmp_path / "old.txt")),
        validation=HeldOut(split=0.1),
    )
    prepared = prepare_language(data, BYTES, progress=lambda stage, done, total: None, cache=tmp_path / "cache")
    assert set(prepared.tables) == {"train.0", "train.1", "replay", "validation"}
    assert prepared.tables["train.1"]["bytes"] == 2520
    assert prepared.tables["replay"]["bytes"] == 1200
    num_bytes = sum(counts["bytes"] for counts in prepared.tables.values())
    written = sum(len(json.loads(line)["text"].encode()) for line in rows.read_text().splitlines())
    assert num_bytes == written + 2800 + 1200


@pytest.mark.parametrize("name", ["a.pkl", "../a.txt", "/a.txt", "0001.txt"])
def test_hostile_archive_member_is_refused_even_when_bad_records_are_skipped(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "many.tar", "w") as tar:
        for number in range(2000):
            tar.addfile(tarfile.TarInfo(f"{number:04}.txt"))
        tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(DataError, match=re.escape(repr(name))):
        prepare(tmp_path / "many.tar", tmp_path / "cache", bad_records="skip", max_bad=0.5)
