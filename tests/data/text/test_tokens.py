"""Prepared text: nothing is lost, splits are deterministic, and windows cover every token."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.config.data import HeldOut, Source, TextData
from bottega.core.errors import DataError
from bottega.data.loading.loader import Loader, iter_eval_batches
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.prepared import PreparedData
from bottega.data.tables.cache import MANIFEST
from bottega.data.text.tokens import TokenDocuments, TokenWindows
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.tasks.language.prepare import prepare_language

CHARACTERS = TokenizerSpec(kind="characters")
BYTES = TokenizerSpec(kind="bytes")
VERSE = "".join(f"line {i}: {'abcdefghij'[i % 10] * (i % 7)}\n" for i in range(400))


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Show no progress bar."""


class Texts:
    """Prepared texts and their samples."""

    def __init__(self, prepared: PreparedData) -> None:
        self.prepared, self.folder, self.tokenizer = prepared, prepared.folder, prepared.tokenizer
        self.fingerprint, self.tables = prepared.fingerprint, prepared.tables

    def train(self, length: int, *, seed: int, **options: Any) -> TokenWindows:
        return TokenWindows(self.folder, "train", sequence_length=length, seed=seed, **options)

    def validation(self, length: int, **options: Any) -> TokenWindows:
        return TokenWindows(self.folder, "validation", sequence_length=length, **options)

    def documents(self, length: int, **options: Any) -> TokenDocuments:
        return TokenDocuments(self.folder, "train", sequence_length=length, **options)


def prepare_text(
    path: Path,
    validation: Path | float | None,
    spec: TokenizerSpec,
    *,
    cache: Path,
    progress: ProgressCallback = ignore_progress,
) -> Texts:
    held_out = HeldOut(path=str(validation)) if isinstance(validation, Path) else HeldOut(split=validation)
    data = TextData(train=Source(path=str(path)), validation=None if validation is None else held_out)
    return Texts(prepare_language(data, spec, progress=progress, cache=cache))


def prepare(
    tmp_path: Path, texts: dict[str, str], spec: TokenizerSpec = BYTES, validation: Path | float | None = 0.1
) -> Texts:
    folder = tmp_path / "corpus"
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text)
    path = folder / next(iter(texts)) if len(texts) == 1 else folder
    return prepare_text(path, validation, spec, cache=tmp_path / "cache")


def read_tokens(texts: Texts, split: str) -> np.ndarray:
    return texts.prepared.table(split).values("tokens")


def read_keys(texts: Texts, split: str) -> list[str]:
    table = texts.prepared.table(split)
    return [table.row("key", number) for number in range(len(table))]


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }


def test_single_text_is_split_at_its_end_without_end_of_text(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, {"verse.txt": VERSE}, CHARACTERS)
    cut = int(len(VERSE) * 0.9)
    tokenizer = prepared.tokenizer
    assert tokenizer.vocab_size == len(set(VERSE)) + 1
    assert tokenizer.decode(read_tokens(prepared, "train")) == VERSE[:cut]
    assert tokenizer.decode(read_tokens(prepared, "validation")) == VERSE[cut:]
    assert len(read_tokens(prepared, "train")) == prepared.tables["train"]["bytes"] == cut


@pytest.mark.parametrize("spec", [BYTES, CHARACTERS, TokenizerSpec(kind="bpe", vocab_size=300)])
def test_many_texts_are_joined_with_end_of_text_and_none_is_lost(tmp_path: Path, spec: TokenizerSpec) -> None:
    texts = {f"{i:02}.txt": f"text {i} é " * (i + 1) for i in range(30)}
    prepared = prepare(tmp_path, texts, spec)
    texts_by_split = {}
    for split in ("train", "validation"):
        ids = read_tokens(prepared, split)
        assert ids[-1] == prepared.tokenizer.eos_token_id
        parts = np.split(ids, np.flatnonzero(ids == prepared.tokenizer.eos_token_id) + 1)[:-1]
        texts_by_split[split] = [prepared.tokenizer.decode(part[:-1]) for part in parts]
        counts = prepared.tables[split]
        assert counts["documents"] == counts["rows"] == len(parts)
        assert counts["bytes"] == sum(len(text.encode()) for text in texts_by_split[split])
    assert sorted(texts_by_split["train"] + texts_by_split["validation"]) == sorted(texts.values())
    fraction = prepared.tables["validation"]["bytes"] / sum(len(text.encode()) for text in texts.values())
    assert 0.05 < fraction <= 0.11


def test_validation_documents_are_stable_when_documents_are_added(tmp_path: Path) -> None:
    texts = {f"{i:02}.txt": f"document {i:02}\n" * 10 for i in range(40)}
    first = prepare(tmp_path, texts)
    names = read_keys(first, "validation")
    assert len(names) == 4
    second = prepare(tmp_path, {**texts, "new.txt": "document nn\n" * 10})
    new_names = read_keys(second, "validation")
    assert len(set(names) & set(new_names)) >= 3


@pytest.mark.parametrize("sizes", [(1000, 1), (1, 1000), (5, 5), (1000, 900)])
def test_neither_split_is_empty(tmp_path: Path, sizes: tuple[int, int]) -> None:
    prepared = prepare(tmp_path, {f"{i}.txt": "x" * size for i, size in enumerate(sizes)})
    assert prepared.tables["train"]["documents"] == prepared.tables["validation"]["documents"] == 1


def test_separate_validation_source_and_no_validation(tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"text": "what Ünseen"}\n')
    prepared = prepare(tmp_path, {"a.txt": VERSE}, CHARACTERS, validation=tmp_path / "other.jsonl")
    assert prepared.tokenizer.decode(read_tokens(prepared, "validation")) == "what Ünseen"
    assert prepared.tables["train"]["bytes"] == len(VERSE)
    alone = prepare(tmp_path, {"a.txt": VERSE}, BYTES, validation=None)
    assert list(alone.tables) == ["train"]


def test_tokenizer_is_trained_on_train_alone(tmp_path: Path) -> None:
    text = "train " * 900 + "QQQQ" * 150
    prepared = prepare(tmp_path, {"a.txt": text}, TokenizerSpec(kind="bpe", vocab_size=300))
    assert not any("QQ" in token for token in prepared.tokenizer.backend.get_vocab())


def test_inputs_are_prepared_once_for_each_setting(tmp_path: Path) -> None:
    stages: list[str] = []
    (tmp_path / "a.txt").write_text(VERSE)
    cache = tmp_path / "cache"

    def run(spec: TokenizerSpec = BYTES, fraction: float = 0.1) -> Texts:
        stages.clear()
        return prepare_text(
            tmp_path / "a.txt", fraction, spec, cache=cache, progress=lambda stage, done, total: stages.append(stage)
        )

    first = run()
    assert set(stages) == {"hash", "encode"}
    assert run().folder == first.folder
    assert "encode" not in stages
    assert (
        run(BYTES.model_copy(update={"vocab_size": 999})).folder == first.folder
    )  # bytes have no vocab_size to choose
    others = [
        run(CHARACTERS),
        run(fraction=0.2),
        run(TokenizerSpec(vocab_size=300)),
        run(TokenizerSpec(vocab_size=301)),
    ]
    (tmp_path / "a.txt").write_text(VERSE + "x")
    others.append(run())
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 6


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(VERSE)
    reports: list[tuple[str, int, int]] = []
    prepare_text(tmp_path / "a.txt", 0.1, BYTES, cache=tmp_path / "c", progress=lambda *fields: reports.append(fields))
    assert reports[-1] == ("encode", len(VERSE), len(VERSE))
    for stage in ("hash", "encode"):
        done = [done for name, done, _ in reports if name == stage]
        assert done == sorted(done)
        assert done[-1] == len(VERSE)


def test_preparing_twice_gives_the_same_files(tmp_path: Path) -> None:
    texts = {"a.txt": VERSE, "b.txt": VERSE[::-1], "c.txt": "short"}
    spec = TokenizerSpec(kind="bpe", vocab_size=400)
    first = read_files(prepare(tmp_path, texts, spec).folder)
    (tmp_path / "cache").rename(tmp_path / "old")
    assert read_files(prepare(tmp_path, texts, spec).folder) == first


def test_damaged_tokens_are_prepared_again(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, {"a.txt": VERSE})
    good = read_tokens(prepared, "train").copy()
    (prepared.folder / "train" / "tokens.bin").write_bytes(b"\0" * good.nbytes)
    assert np.array_equal(read_tokens(prepare(tmp_path, {"a.txt": VERSE}), "train"), good)


def test_processes_preparing_at_once_do_the_work_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(VERSE)
    script = """if True:
        import sys
        from pathlib import Path
        from typing import Any
        from bottega.tasks.language.prepare import prepare_language
        from bottega.data.text.vocabulary import TokenizerSpec
        from bottega.config.data import HeldOut, Source, TextData
        stages = []
        data = TextData(train=Source(path=sys.argv[1] + "/a.txt"), validation=HeldOut(split=0.1))
        note = lambda stage, done, total: stages.append(stage)
        spec = TokenizerSpec(vocab_size=300)
        prepared = prepare_language(data, spec, cache=Path(sys.argv[1], "cache"), progress=note)
        assert "torch" not in sys.modules
        print(prepared.fingerprint, "encode" in stages)
    """
    command = [sys.executable, "-c", script, tmp_path]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=100)[0].split() for process in processes]
    assert len({fingerprint for fingerprint, _ in answers}) == 1
    assert sorted(built for _, built in answers) == ["False", "False", "True"]


def make_windows(tmp_path: Path, text: str = VERSE, **options: object) -> tuple[TokenWindows, np.ndarray]:
    prepared = prepare(tmp_path, {"a.txt": text}, CHARACTERS, validation=None)
    return prepared.train(**{"length": 16, "seed": 3, **options}), read_tokens(prepared, "train")  # type: ignore[arg-type]


def read_all_rows(source: TokenWindows, epoch: int = 0) -> np.ndarray:
    index = np.arange(len(source))
    return source.rows(index, np.full_like(index, epoch))["input_ids"]


def test_training_windows_follow_each_other_and_shift_with_the_epoch(tmp_path: Path) -> None:
    source, tokens = make_windows(tmp_path)
    offsets = set()
    for epoch in range(40):
        rows = read_all_rows(source, epoch)
        assert rows.dtype == np.int32
        assert rows.shape == (len(source), 17)
        assert np.array_equal(rows[:-1, -1], rows[1:, 0])
        covered = np.append(rows[:, :-1].ravel(), rows[-1, -1])
        offset = next(o for o in range(16) if np.array_equal(tokens[o : o + len(covered)], covered))
        offsets.add(offset)
    assert len(tokens) - len(source) * 16 < 32
    assert len(offsets) > 8
    assert not np.array_equal(read_all_rows(source, 1), read_all_rows(make_windows(tmp_path, seed=4)[0], 1))


def test_batch_of_several_epochs_has_the_rows_of_each(tmp_path: Path) -> None:
    source, _ = make_windows(tmp_path)
    index, epoch = np.array([0, 5, 2, 0]), np.array([1, 2, 1, 2])
    mixed = source.rows(index, epoch)["input_ids"]
    for row, i, e in zip(mixed, index, epoch, strict=True):
        assert np.array_equal(row, read_all_rows(source, e)[i])


@pytest.mark.parametrize("length", [17, 18, 31, 32, 33, 48, 49])
def test_short_texts_give_full_windows(tmp_path: Path, length: int) -> None:
    source, tokens = make_windows(tmp_path, VERSE[:length])
    assert len(source) >= 1
    for epoch in range(30):
        assert read_all_rows(source, epoch).shape == (len(source), 17)
    assert len(tokens) == length


def test_a_text_shorter_than_a_window_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"training text has 16 tokens, fewer than one window of 17"):
        make_windows(tmp_path, VERSE[:16])


@pytest.mark.parametrize("length", [2, 9, 16, 17, 33, 100])
def test_validation_windows_cover_every_target_once(tmp_path: Path, length: int) -> None:
    (tmp_path / "v.txt").write_text(VERSE[:length])
    prepared = prepare(tmp_path, {"a.txt": VERSE}, CHARACTERS, validation=tmp_path / "v.txt")
    source = prepared.validation(16)
    tokens = read_tokens(prepared, "validation")
    targets = np.concatenate([batch["input_ids"][:, 1:].ravel() for batch in iter_eval_batches(source, 4)])
    assert np.array_equal(targets, tokens[1 : 1 + len(targets)])
    assert length - 1 - len(targets) < min(16, length)
    assert np.array_equal(read_all_rows(source, 0), read_all_rows(source, 5))


def test_a_validation_text_of_one_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("l")
    prepared = prepare(tmp_path, {"a.txt": VERSE}, CHARACTERS, validation=tmp_path / "v.txt")
    with pytest.raises(DataError, match="validation text has 1 tokens, fewer than one window of 2"):
        prepared.validation(16)
    with pytest.raises(DataError, match=r"too few to hold out a fraction of 0\.1"):
        prepare(tmp_path, {"b.txt": "x"}, validation=0.1)


def test_window_has_document_ids_and_byte_counts(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, {"a.txt": "aé", "b.txt": "bbbb", "c.txt": "c" * 40}, BYTES, validation=None)
    source = prepared.train(10, seed=0, with_document_ids=True, with_bytes=True)
    for epoch in range(10):
        rows = source.rows(np.array([0]), np.array([epoch]))
        tokens, documents = rows["input_ids"][0], rows["documents"][0]
        assert rows["documents"].dtype == np.int32
        assert rows["bytes"].dtype == np.int64
        assert documents.tolist() == [int((tokens[:j] == 256).sum()) for j in range(11)]
        assert rows["bytes"].tolist() == [int((tokens[1:] != 256).sum())]
    assert set(prepared.train(10, seed=0).rows(np.array([0]), np.array([0]))) == {"input_ids", "attention_mask"}


def test_bytes_of_all_targets_are_the_bytes_of_the_text(tmp_path: Path) -> None:
    text = "é and 한 " * 200
    prepared = prepare(tmp_path, {"a.txt": text}, TokenizerSpec(vocab_size=300), validation=0.5)
    source = prepared.validation(1, with_bytes=True)
    total = sum(int(batch["bytes"].sum()) for batch in iter_eval_batches(source, 64))
    first = prepared.tokenizer.byte_lengths[read_tokens(prepared, "validation")[0]]
    assert total + first == prepared.tables["validation"]["bytes"]


def test_token_windows_pickle_small_and_workers_change_nothing(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, {"a.txt": VERSE * 20}, TokenizerSpec(vocab_size=300))
    source = prepared.train(32, seed=1, with_document_ids=True, with_bytes=True)
    next(Loader(source, 8, seed=1)(0))
    assert len(pickle.dumps(source)) < 2000
    plain = islice(Loader(source, 8, seed=1)(0), 6)
    stream = Loader(source, 8, seed=1, workers=2, prefetch=2)(0)
    for batch, expected in zip(islice(stream, 6), plain, strict=True):
        assert batch.keys() == expected.keys() == {"input_ids", "attention_mask", "documents", "bytes"}
        assert all(np.array_equal(batch[name], expected[name]) for name in batch)
    stream.close()


def test_sample_description_has_its_position_and_text(tmp_path: Path) -> None:
    texts = {"a.txt": "first " * 3, "b.txt": VERSE}
    prepared = prepare(tmp_path, texts, BYTES, validation=None)
    source = prepared.train(32, seed=0)
    index = len(source) - 1
    head, text = source.describe(index, 2).split("\n", 1)
    tokens = source.rows(np.array([index]), np.array([2]))["input_ids"][0]
    assert text == prepared.tokenizer.decode(tokens)
    assert "from b.txt, its token " in head
    position = int(head.rsplit(" ", 1)[1])
    assert VERSE.encode()[position : position + 33] == bytes(tokens.astype(np.uint8))


def test_fingerprint_depends_on_split_length_and_seed(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, {"a.txt": VERSE})
    sources = [
        prepared.train(16, seed=0),
        prepared.train(17, seed=0),
        prepared.train(16, seed=1),
        prepared.validation(16),
    ]
    assert len({source.fingerprint for source in sources}) == 4
    assert prepared.train(16, seed=0, with_document_ids=True).fingerprint == sources[0].fingerprint
    assert len(sources[0].fingerprint) == len(hashlib.sha256().hexdigest())
