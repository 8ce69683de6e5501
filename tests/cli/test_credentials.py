"""A signature or password in a data URL is in no file that a run writes and in nothing that it prints."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from small_run import environment, run_bottega, settings, train_arguments, write_text

pytest.importorskip("fsspec")
FOLDER, SECRETS = "BOTTEGA_TEST_REMOTE", "BOTTEGA_TEST_SECRETS"  # as remote_store.py reads them
CANARY, RENEWED, WRONG = "canary-51b7e2", "canary-renewed-9f", "canary-wrong-c3"
ALL = tuple(word.encode() for word in (CANARY, RENEWED, WRONG, "canary-user"))
SIGNED = f"https://far.example/texts/far.txt?se=2030&sig={CANARY}"
BY_PASSWORD = f"https://canary-user:{CANARY}@far.example/texts/far.txt"


class RemoteStoreCommands:
    """Runs commands with a fake remote store and a home directory of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_text(folder / "store" / "far.txt")
        # Loaded at every Python start, so that subprocesses of a command register the store too.
        (folder / "site" / "sitecustomize.py").write_text("import remote_store; remote_store.register()\n")
        self.output = b""

    def __call__(self, *arguments: str, code: int = 0, setup_code: str = "") -> subprocess.CompletedProcess[str]:
        env = {"HOME": str(self.folder / "home"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        env |= {FOLDER: str(self.folder / "store"), SECRETS: f"{CANARY} {RENEWED}"}
        env["PYTHONPATH"] = os.pathsep.join([str(self.folder / "site"), environment()["PYTHONPATH"]])
        process = run_bottega(arguments, env=env, cwd=self.folder, setup_code=setup_code)
        assert process.returncode == code, process.stderr
        self.output += process.stdout.encode() + process.stderr.encode()
        return process

    def run_each(self, *calls: tuple[list[str], int]) -> list[str]:
        """Run each command, check its exit code, and return its standard error."""
        return [self(*arguments, code=code).stderr for arguments, code in calls]

    def check_clean(self) -> None:
        assert not [word for word in ALL if word in self.output], self.output.decode()
        assert find_leaks(path for path in self.folder.rglob("*") if path.is_file()) == []


def find_leaks(files: Iterable[Path]) -> list[Path]:
    return [path for path in files if any(word in path.read_bytes() for word in ALL)]


@pytest.fixture
def remote(tmp_path: Path) -> RemoteStoreCommands:
    for name in ("store", "home", "cache", "site"):
        (tmp_path / name).mkdir()
    return RemoteStoreCommands(tmp_path)


def remote_train_arguments(remote: RemoteStoreCommands, address: str, **changes: Any) -> list[str]:
    return train_arguments(remote.folder / "runs", Path("x"), **{"name": "r", "data.train.path": address, **changes})


@pytest.mark.parametrize("address", [SIGNED, pytest.param(BY_PASSWORD, marks=pytest.mark.slow)])
def test_run_resume_and_export_do_not_leak_credentials(remote: RemoteStoreCommands, address: str) -> None:
    trackers = {"logging.tensorboard": True, "logging.wandb.enabled": True, "logging.wandb.offline": True}
    if address == BY_PASSWORD:
        trackers = {"logging.tensorboard": True}
    remote(*remote_train_arguments(remote, address, **trackers, **{"training.max_steps": 4}))
    run = remote.folder / "runs" / "r"
    assert "https://far.example/texts/far.txt" in (run / "recipe.yaml").read_text()
    assert "far.example" in json.dumps(json.loads((run / "environment.json").read_text())["command"])
    remote(*remote_train_arguments(remote, address.replace(CANARY, RENEWED), **trackers, **{"training.max_steps": 8}))
    assert "resumed" in (run / "log.txt").read_text()
    assert ("logging.wandb.enabled" in trackers) == any(run.glob("wandb/offline-run-*/*.wandb"))
    remote.run_each(
        (["export", "runs/r"], 0),
        (["evaluate", "runs/r", "--data", address, "--json", "--out", "evaluated"], 0),
        (["data", "language", "--data", address, "--json"], 0),
        (["prepare", "language", "--data", address, "--out", "prepared", "--json"], 0),
        (["plan", "--check", *remote_train_arguments(remote, address)[1:], "--json"], 0),
        (["plan", "--check", *remote_train_arguments(remote, address)[1:]], 0),
    )
    assert "https://far.example/texts/far.txt" in (run / "final" / "README.md").read_text()
    remote.check_clean()


def test_errors_and_crashes_do_not_leak_credentials(remote: RemoteStoreCommands) -> None:
    wrong = SIGNED.replace(CANARY, WRONG)
    recipe = remote.folder / "mine.yaml"
    recipe.write_text(json.dumps(settings(remote.folder / "runs", Path("x"), **{"data.train.path": SIGNED})) + "\n: [")
    refused, bare, traced, *_ = remote.run_each(
        (remote_train_arguments(remote, wrong), 5),
        (remote_train_arguments(remote, "https://far.example/texts/far.txt"), 5),
        ([*remote_train_arguments(remote, wrong), "--debug"], 5),
        (remote_train_arguments(remote, SIGNED, **{"training.max_steps": f"'{SIGNED}'"}), 2),
        (remote_train_arguments(remote, SIGNED, **{"data.train.kind": "shards"}), 3),
        (remote_train_arguments(remote, SIGNED, **{"data.train.kind": "parquet"}), 3),
        (["data", SIGNED, "--data", SIGNED], 2),
        (["evaluate", SIGNED], 2),
        (["train", SIGNED], 2),
        (["train", "language", f"--dataa={SIGNED}"], 2),
        (["prepare", "language", "--data", SIGNED, "--out", SIGNED, "--bogus", SIGNED], 2),
        (["train", "mine.yaml"], 2),
    )
    assert "https://far.example/texts/far.txt cannot be reached (PermissionError)" in refused
    assert "give it again in data.train.path or --data: they are never stored" in bare
    assert "Traceback" in traced
    recipe.unlink()
    remote.check_clean()


def test_killed_run_does_not_leak_credentials(remote: RemoteStoreCommands) -> None:
    """Killed right after its first checkpoint, before any cleanup."""
    code = "import os; from bottega.core import saver; original = saver.Saver.save\n"
    code += "def save(self, *args, **options):\n    original(self, *args, **options); os._exit(77)\n"
    code += "saver.Saver.save = save"
    remote(*remote_train_arguments(remote, SIGNED), setup_code=code, code=77)
    remote.check_clean()


def test_fold_subprocesses_read_the_remote_data(remote: RemoteStoreCommands) -> None:
    """Folds of a cross-validation are trained in subprocesses, from recipes without the credential."""
    rows = "".join(f"{text},{label}\n" for text, label in [("good day", "a"), ("bad night", "b")] * 12)
    (remote.folder / "store" / "far.csv").write_text("text,label\n" + rows)
    address = SIGNED.replace("far.txt", "far.csv")
    options = [
        "training.max_steps=2",
        "training.batch_size=4",
        "logging.tensorboard=false",
        "logging.report=false",
        "samples.every=null",
    ]
    small = ["data.tokenizer.min_frequency=1", "model.embed_size=8"]
    remote("crossval", "classify/sst2", "--folds", "2", "--data", address, "--out", "folds", *options, *small)
    assert len(list((remote.folder / "folds").glob("fold-*/recipe.yaml"))) == 2
    remote.check_clean()
