"""A signature and a password of a data address stand in no file that a run leaves, and in nothing that it says."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from small_run import bottega, environment, settings, words, write_text

pytest.importorskip("fsspec")
FOLDER, SECRETS = "BOTTEGA_TEST_FAR", "BOTTEGA_TEST_SECRETS"  # as far_store.py reads them
CANARY, RENEWED, WRONG = "canary-51b7e2", "canary-renewed-9f", "canary-wrong-c3"
ALL = tuple(word.encode() for word in (CANARY, RENEWED, WRONG, "canary-user"))
SIGNED = f"https://far.example/texts/far.txt?se=2030&sig={CANARY}"
BY_PASSWORD = f"https://canary-user:{CANARY}@far.example/texts/far.txt"


class Far:
    """The command beside a store that is far away, with a home of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_text(folder / "store" / "far.txt")
        # Read by every Python at its start, so that processes started by a command know the store too.
        (folder / "site" / "sitecustomize.py").write_text("import far_store; far_store.register()\n")
        self.said = b""

    def __call__(self, *arguments: str, code: int = 0, first: str = "") -> subprocess.CompletedProcess[str]:
        env = {"HOME": str(self.folder / "home"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        env |= {FOLDER: str(self.folder / "store"), SECRETS: f"{CANARY} {RENEWED}"}
        env["PYTHONPATH"] = os.pathsep.join([str(self.folder / "site"), environment()["PYTHONPATH"]])
        done = bottega(arguments, env=env, cwd=self.folder, first=first)
        assert done.returncode == code, done.stderr
        self.said += done.stdout.encode() + done.stderr.encode()
        return done

    def each(self, *commands: tuple[list[str], int]) -> list[str]:
        """What each command writes to standard error, with the exit code it must have."""
        return [self(*words, code=code).stderr for words, code in commands]

    def check_clean(self) -> None:
        assert not [word for word in ALL if word in self.said], self.said.decode()
        assert leaks(path for path in self.folder.rglob("*") if path.is_file()) == []


def leaks(files: Iterable[Path]) -> list[Path]:
    return [path for path in files if any(word in path.read_bytes() for word in ALL)]


@pytest.fixture
def far(tmp_path: Path) -> Far:
    for name in ("store", "home", "cache", "site"):
        (tmp_path / name).mkdir()
    return Far(tmp_path)


def train_words(far: Far, address: str, **changes: Any) -> list[str]:
    return words(far.folder / "runs", Path("x"), **{"name": "r", "data.train.path": address, **changes})


@pytest.mark.parametrize("address", [SIGNED, pytest.param(BY_PASSWORD, marks=pytest.mark.slow)])
def test_a_run_its_resume_and_its_export_keep_the_secret(far: Far, address: str) -> None:
    trackers = {"logging.tensorboard": True, "logging.wandb.enabled": True, "logging.wandb.offline": True}
    if address == BY_PASSWORD:
        trackers = {"logging.tensorboard": True}
    far(*train_words(far, address, **trackers, **{"training.max_steps": 4}))
    run = far.folder / "runs" / "r"
    assert "https://far.example/texts/far.txt" in (run / "recipe.yaml").read_text()
    assert "far.example" in json.dumps(json.loads((run / "environment.json").read_text())["command"])
    far(*train_words(far, address.replace(CANARY, RENEWED), **trackers, **{"training.max_steps": 8}))
    assert "resumed" in (run / "log.txt").read_text()
    assert ("logging.wandb.enabled" in trackers) == any(run.glob("wandb/offline-run-*/*.wandb"))
    far.each(
        (["export", "runs/r"], 0),
        (["evaluate", "runs/r", "--data", address, "--json", "--out", "evaluated"], 0),
        (["data", "language", "--data", address, "--json"], 0),
        (["prepare", "language", "--data", address, "--out", "prepared", "--json"], 0),
        (["plan", "--check", *train_words(far, address)[1:], "--json"], 0),
        (["plan", "--check", *train_words(far, address)[1:]], 0),
    )
    assert "https://far.example/texts/far.txt" in (run / "final" / "README.md").read_text()
    far.check_clean()


def test_errors_and_crashes_keep_the_secret(far: Far) -> None:
    wrong = SIGNED.replace(CANARY, WRONG)
    recipe = far.folder / "mine.yaml"
    recipe.write_text(json.dumps(settings(far.folder / "runs", Path("x"), **{"data.train.path": SIGNED})) + "\n: [")
    refused, bare, traced, *_ = far.each(
        (train_words(far, wrong), 5),
        (train_words(far, "https://far.example/texts/far.txt"), 5),
        ([*train_words(far, wrong), "--debug"], 5),
        (train_words(far, SIGNED, **{"training.max_steps": f"'{SIGNED}'"}), 2),
        (train_words(far, SIGNED, **{"data.train.kind": "shards"}), 3),
        (train_words(far, SIGNED, **{"data.train.kind": "parquet"}), 3),
        (["data", SIGNED, "--data", SIGNED], 2),
        (["evaluate", SIGNED], 2),
        (["train", SIGNED], 2),
        (["train", "language", f"--dataa={SIGNED}"], 2),
        (["prepare", "language", "--data", SIGNED, "--out", SIGNED, "--bogus", SIGNED], 2),
        (["train", "mine.yaml"], 2),
    )
    assert "https://far.example/texts/far.txt cannot be reached (PermissionError)" in refused
    assert "give them again in data.train.path or --data" in bare
    assert "Traceback" in traced
    recipe.unlink()
    far.check_clean()


def test_what_a_killed_run_leaves_keeps_the_secret(far: Far) -> None:
    """Right after its first checkpoint: nothing has been tidied up."""
    code = "import os; from bottega.core import saver; whole = saver.Saver.save\n"
    code += "def save(self, *given, **named):\n    whole(self, *given, **named); os._exit(77)\n"
    code += "saver.Saver.save = save"
    far(*train_words(far, SIGNED), first=code, code=77)
    far.check_clean()


def test_processes_that_are_started_for_parts_read_the_data_too(far: Far) -> None:
    """Folds of a cross-validation are trained by processes of their own, from recipes without the credential."""
    rows = "".join(f"{text},{label}\n" for text, label in [("good day", "a"), ("bad night", "b")] * 12)
    (far.folder / "store" / "far.csv").write_text("text,label\n" + rows)
    address = SIGNED.replace("far.txt", "far.csv")
    options = ["training.max_steps=2", "training.batch_size=4", "logging.tensorboard=false", "samples.every=null"]
    small = ["data.tokenizer.min_frequency=1", "model.embed_size=8"]
    far("crossval", "classify/sst2", "--folds", "2", "--data", address, "--out", "folds", *options, *small)
    assert len(list((far.folder / "folds").glob("fold-*/recipe.yaml"))) == 2
    far.check_clean()
