"""Speed of the data layer compared with the simplest equivalent code, as ratios of CPU time (below 1: faster).

  python benchmarks/data_speed.py

Ratios are of the best of several interleaved rounds, so that other work on the machine affects both sides.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from bottega.config.data import Cleaning, Source, Splitting
from bottega.data.formats import tar
from bottega.data.formats.reader import Piece
from bottega.data.loading.loader import Loader
from bottega.data.order.permutation import permute
from bottega.data.sources.source import ArraySource
from bottega.data.tables.splits import SplitTable, assign_splits
from bottega.data.text.clean import clean_text
from bottega.data.text.duplicates import minhash_signature
from bottega.data.text.vocabulary import TokenizerSpec, build_tokenizer

Work = Callable[[], object]
TEXT = "It was a dark night, and the rain fell in torrents except at occasional intervals.\n" * 25_000


def measure_seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(name: str, ours: Work, theirs: Work, *, rounds: int = 5) -> None:
    best = [
        min(times)
        for times in zip(*[(measure_seconds(ours), measure_seconds(theirs)) for _ in range(rounds)], strict=True)
    ]
    print(f"{name:<58} {best[0] / best[1]:8.2f}   ({best[0] * 1e3:.2f} ms vs {best[1] * 1e3:.2f} ms)", flush=True)


def write_archive(folder: Path) -> Path:
    path = folder / "a.tar"
    with tarfile.open(path, "w") as out:
        for name in (f"{i:05}.{suffix}" for i in range(2000) for suffix in ("png", "wav")):
            member = tarfile.TarInfo(name)
            member.size = 300
            out.addfile(member, io.BytesIO(bytes(300)))
    return path


def read_with_tarfile(path: Path) -> None:
    with tarfile.open(path) as members:
        for info in members:
            members.extractfile(info).read()  # type: ignore[union-attr]


def main() -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = write_archive(Path(folder))
        piece = Piece(path, path.name)
        compare(
            "tar: 2,000 samples vs tarfile",
            lambda: list(tar.read(piece, Source())),
            lambda: read_with_tarfile(path),
        )

    loader = Loader(ArraySource({"x": np.arange(1_000_000)}), 8, seed=0)
    compare(
        "order: step 1,000,000,000 vs step 1 (200 steps)",
        lambda: [loader.indices(10**9 + step) for step in range(200)],
        lambda: [loader.indices(1 + step) for step in range(200)],
    )
    compare(
        "order: a million indices vs numpy's permutation",
        lambda: permute(np.arange(1_000_000), size=1_100_000, seed=0, epoch=0),
        lambda: np.random.default_rng(0).permutation(1_100_000),
    )
    values, index = np.arange(1000), np.arange(8)
    stream = Loader(ArraySource({"x": values}), 8, seed=0)(0)
    compare(
        "loader: 10,000 batches of 8 vs the gather alone",
        lambda: list(islice(stream, 10_000)),
        lambda: [{"x": values[index]} for _ in range(10_000)],
    )

    keys = rng.integers(0, 2**64, 1_000_000, dtype=np.uint64)
    rows = SplitTable(keys, rng.integers(1, 10_000, len(keys)), keys // 2**44, keys % 1000, keys // 2**48)
    for rule in ("fraction", "hash", "file", "stratified", "group"):
        options = Splitting(by=rule, field="user" if rule == "group" else None)
        compare(
            f"split: a million rows by {rule} vs sorting",
            lambda options=options: assign_splits(rows, options, 0.05, 0.05),
            lambda: np.argsort(keys, kind="stable"),
        )

    raw = TEXT.encode()
    compare("clean: 2 MB of clean text vs its CRC", lambda: clean_text(TEXT, Cleaning()), lambda: zlib.crc32(raw))
    compare("duplicates: the signature of 2 MB vs its CRC", lambda: minhash_signature(TEXT), lambda: zlib.crc32(raw))
    for kind in ("bytes", "characters"):
        tokenizer = build_tokenizer(TokenizerSpec(kind=kind), [TEXT])
        tokenizer.encode(TEXT)
        compare(
            f"tokenizer: 2 MB as {kind} vs a copy as 16 bits",
            lambda tokenizer=tokenizer: tokenizer.encode(TEXT),
            lambda: np.frombuffer(TEXT.encode(), np.uint8).astype(np.uint16),
        )


if __name__ == "__main__":
    main()
