"""Canaries of every class of secret are fed to everything that writes; no file and no output contains one of them."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from bottega.analysis import evaluate, lr_find
from bottega.callbacks.console import Console
from bottega.callbacks.jsonl import JsonLines
from bottega.callbacks.log_file import LogFile
from bottega.callbacks.tensorboard import TensorBoard
from bottega.core import checkpoint
from bottega.core.callback import Progress
from bottega.core.errors import DataError, Diverged, describe_error
from bottega.core.rundir import RunDirectory
from bottega.engines.nonfinite import NonfiniteRecovery
from bottega.redaction import CREDENTIALS_VARIABLE
from bottega.run import environment as run_environment
from bottega.tasks.evaluation_data import DataRequest
from bottega.terminal import print_notice
from small_run import environment, run_bottega

CANARIES = {
    "password of an address": "canaryPassword5e1",
    "signature of an address": "canarySignature7b2",
    "environment variable": "canaryVariable9c4",
    "named on the command line": "canaryNamed3d8",
    "named in a text": "canaryText6f0",
    "token by its shape": "hf_canaryShapeAbCdEfGhIjKlMnOpQrStUvWx",
}
PASSWORD, SIGNATURE, VARIABLE, NAMED, TEXT, SHAPE = CANARIES.values()
ADDRESS = f"https://canary-user:{PASSWORD}@far.example/tables/houses.csv?se=2030&sig={SIGNATURE}"
NOISE = f"403 for {ADDRESS} with {VARIABLE}, password='{TEXT}' and {SHAPE} (--api-key {TEXT})"
SECRET_ENVIRONMENT = {"SERVICE_API_KEY": VARIABLE, "WANDB_API_KEY": f"{VARIABLE}{'0' * 24}"}
FOLDER, STORE_SECRETS, NOISE_VARIABLE = "BOTTEGA_TEST_REMOTE", "BOTTEGA_TEST_SECRETS", "BOTTEGA_TEST_NOISE"
PAGE = Path(__file__).parents[1] / "docs" / "extend.md"

PLUGIN_ENDING = f"""
import os
from bottega.callbacks.console import Console
from bottega.terminal import print_notice

NOISE = os.environ["{NOISE_VARIABLE}"]
CRASH = os.environ.get("BOTTEGA_TEST_CRASH")
start_console, compute_score = Console.start, Regression.score


def start(self, progress):
    self.warn(NOISE)
    self.info(NOISE)
    if "BOTTEGA_TEST_STDERR" in os.environ:  # as a library may do
        os.write(2, NOISE.encode())
    print_notice(f"{{len(plugin.read_secret('api_key') or '')}} characters")
    start_console(self, progress)


def score(self, rows):
    if CRASH == "bug":
        raise RuntimeError(NOISE)
    if CRASH == "data":
        raise plugin.DataError(NOISE)
    return compute_score(self, rows)


Console.start, Console.state_dict = start, lambda self: {{"note": NOISE}}
export_table = RegressionTraining.export
RegressionTraining.export = lambda self, *words: {{**export_table(self, *words), "license": NOISE}}
Regression.score = score
"""


@pytest.fixture(autouse=True)
def no_stored_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes that other tests have loaded in this process may have stored secrets for their children."""
    monkeypatch.delenv(CREDENTIALS_VARIABLE, raising=False)


def read_contents(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, and those inside it if it is compressed."""
    data = path.read_bytes()
    yield data
    if data[:2] == b"\x1f\x8b":
        yield gzip.decompress(data)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from map(archive.read, archive.namelist())


def find_leaks(folder: Path) -> list[tuple[str, str]]:
    """Return file and class of every canary in the content or the name of a file."""
    return [
        (str(path.relative_to(folder)), kind)
        for path in folder.rglob("*")
        for content in (path.name.encode(), *(read_contents(path) if path.is_file() else ()))
        for kind, canary in CANARIES.items()
        if canary.encode() in content
    ]


def list_canaries(text: str) -> list[str]:
    return [kind for kind, canary in CANARIES.items() if canary in text]


# Each writer by itself


def write_run_file(folder: Path) -> None:
    RunDirectory(folder).write(folder / "report.json", json.dumps({"reason": NOISE, "api_key": TEXT, "n": 1.5}))
    assert json.loads((folder / "report.json").read_text())["n"] == 1.5
    RunDirectory(folder).write(folder / "best.yaml", f"# {NOISE}\na: 1\n")


def write_log(folder: Path) -> None:
    LogFile(folder / "log.txt").write(NOISE, "ERROR")


def write_metrics(folder: Path) -> None:
    JsonLines(folder / "metrics.jsonl", pytest.fail).after_step(Progress(total=1), {NOISE: 1.0})  # type: ignore[arg-type]


def write_events(folder: Path) -> None:
    events = TensorBoard(folder / "events", pytest.fail)  # type: ignore[arg-type]
    samples = folder.parent / "samples"
    samples.mkdir()
    (samples / "0.txt").write_text(NOISE)
    events.start(Progress(total=1))
    events.after_sample(Progress(total=1), samples)
    events.finish(Progress(total=1), None)


def write_checkpoint(folder: Path) -> None:
    path = checkpoint.write(
        folder,
        step=1,
        files={"model.safetensors": {"a": np.zeros(2, np.float32)}},
        progress={"callbacks": {"a": {"api_key": TEXT, "note": NOISE}}},
        fingerprint={"data": NOISE},
    )
    checkpoint.verify(path)


def write_environment(folder: Path) -> None:
    original = sys.argv
    sys.argv = ["bottega", "train", f"model.api_key={NAMED} {NAMED}", "--token", NAMED, ADDRESS, f"note={NOISE}"]
    try:
        (folder / "environment.json").write_text(json.dumps(run_environment.describe_environment("torch", "cpu", 1)))
    finally:
        sys.argv = original


def write_trials(folder: Path, storage: str | None = None) -> None:
    pytest.importorskip("optuna", reason="needs optuna; pip install 'bottega[tune]'")
    from bottega.tuning.study import Objective, Study, open_storage

    study = Study(
        open_storage(storage, folder),
        "s",
        dimensions=[],
        base={},
        objectives=[Objective("loss", "min")],
        identity={"recipe": {"a": NOISE}},
    )
    trial = study.ask()
    assert trial is not None
    study.set_attributes(trial.number, reason=NOISE, lines=[NOISE], keys={"model.api_key": TEXT})


def write_trials_to_a_database(folder: Path) -> None:
    write_trials(folder, f"sqlite:///{folder}/study.db")


def write_evaluation(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "_evaluate", lambda *_, **__: {"metrics": {"loss": 1.0}, "notes": [NOISE]})
        evaluate.evaluate_run("run", request=DataRequest(), out=folder)


def write_range_test(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lr_find, "try_plot", lambda *_, **__: False)
        lr_find.write_report({"command": ["bottega", "train", f"model.api_key={NAMED}"], "notes": [NOISE]}, folder)


def write_nonfinite_report(folder: Path) -> None:
    engine, loader, saver = mock.Mock(rank=0, world_size=1, task=None), mock.Mock(), mock.Mock()
    engine.find_nonfinite_module.return_value = NOISE
    loader.indices.return_value = np.zeros(2, np.int64), np.zeros(2, np.int64)
    loader.batch.return_value = {"x": np.zeros(2, np.float32)}
    recovery = NonfiniteRecovery(
        engine=engine, loader=loader, saver=saver, policy="halt", folder=folder, warn=print_notice
    )
    with pytest.raises(Diverged):
        recovery(Progress(total=1), 0)


def write_error(folder: Path) -> None:
    errors = [RuntimeError(NOISE), DataError(NOISE), OSError(2, NOISE)]
    (folder / "crash.txt").write_text("\n".join(describe_error(error)[1] for error in errors[:2]))
    for error in errors:
        print_notice(describe_error(error)[1])


def print_to_the_console(folder: Path) -> None:
    console = Console(unit="samples", log=folder / "log.txt")
    console.warn(NOISE)
    console.info(NOISE)
    console.rich.print(NOISE, soft_wrap=True)
    print_notice(NOISE)


WRITERS: tuple[Callable[[Path], None], ...] = (
    write_run_file,
    write_log,
    write_metrics,
    write_events,
    write_checkpoint,
    write_environment,
    write_trials,
    write_trials_to_a_database,
    write_evaluation,
    write_range_test,
    write_nonfinite_report,
    write_error,
    print_to_the_console,
)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_writer_redacts(
    write: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**SECRET_ENVIRONMENT, CREDENTIALS_VARIABLE: "{}"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "written"
    folder.mkdir()
    write(folder)
    output = capfd.readouterr()
    assert any(path.is_file() for path in folder.rglob("*"))
    assert find_leaks(folder) == []
    assert list_canaries(output.out + output.err) == []


# Commands


class Commands:
    """Runs commands on a table behind an address with a password and a signature, with a plugin that passes canaries on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("store", "home", "site"):
            (folder / name).mkdir()
        (folder / "site" / "sitecustomize.py").write_text("import remote_store; remote_store.register()\n")
        rng = np.random.default_rng(0)
        rows = [f"{a:.2f},{b:.2f},{c:.2f},{3 * a - b:.3f}" for a, b, c in rng.uniform(0, 10, (60, 3))]
        (folder / "store" / "houses.csv").write_text("\n".join(["area,rooms,age,price", *rows]) + "\n")
        page = PAGE.read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(# regression\.py.*?)^```", page, re.MULTILINE | re.DOTALL)
        field = "class RegressionModel(plugin.Model):\n"
        source = "\n\n".join(blocks).replace(
            field, f'{field}    api_key: str | None = Field(None, description="a secret")\n'
        )
        (folder / "regression.py").write_text(source + PLUGIN_ENDING)
        recipe = re.search(r"^```yaml\n(# houses\.yaml.*?)^```", page, re.MULTILINE | re.DOTALL)
        assert recipe is not None
        (folder / "houses.yaml").write_text(recipe[1])
        self.output = ""

    def run(self, *words: str, code: int = 0, **variables: str) -> str:
        """Run a command, check its exit code, and return its standard error."""
        env = {
            **SECRET_ENVIRONMENT,
            FOLDER: str(self.folder / "store"),
            STORE_SECRETS: SIGNATURE,
            NOISE_VARIABLE: NOISE,
        }
        env |= {"HOME": str(self.folder / "home"), "XDG_CACHE_HOME": str(self.folder / "cache")}
        env["PYTHONPATH"] = os.pathsep.join([str(self.folder / "site"), environment()["PYTHONPATH"]])
        process = run_bottega([*words, "--plugin", "regression.py"], env={**env, **variables}, cwd=self.folder)
        assert process.returncode == code, process.stderr
        self.output += process.stdout + process.stderr
        return process.stderr

    def check_clean(self) -> None:
        assert list_canaries(self.output) == [], self.output
        assert "canary-user" not in self.output
        assert find_leaks(self.folder) == []


SETTINGS = (
    "houses.yaml",
    f"data.train.path={ADDRESS}",
    f"model.api_key={NAMED}",
    *("training.max_steps=4", "training.batch_size=8", "evaluation.every=2", "checkpoint.every=2", "logging.every=1"),
    *("output_dir=runs", "device=cpu"),
)


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    pytest.importorskip("fsspec")
    folder = tmp_path / "project"
    folder.mkdir()
    return Commands(folder)


def has_wandb() -> bool:
    try:
        import wandb  # noqa: F401
    except ImportError:
        return False
    return True


def test_run_evaluation_and_export_are_clean(commands: Commands) -> None:
    trackers = ["logging.tensorboard=true"]
    if has_wandb():
        trackers += ["logging.wandb.enabled=true", "logging.wandb.offline=true"]
        trackers += [f"logging.wandb.notes={NOISE}", f"logging.wandb.tags=[{SHAPE}]"]
    error = commands.run("train", *SETTINGS, "name=r", *trackers)
    run = commands.folder / "runs" / "r"
    assert f"{len(NAMED)} characters" in error, "the plugin does not get its secret"
    assert re.search(r"api_key: .?\*\*\*", (run / "recipe.yaml").read_text())
    assert "***" in (run / "log.txt").read_text()
    assert any("***" in path.read_text() for path in run.glob("checkpoints/step-*/progress.json"))
    assert "model.api_key=***" in json.loads((run / "environment.json").read_text())["command"]
    assert any(run.glob("events.out.tfevents.*"))
    assert any(run.glob("wandb/offline-run-*/*.wandb")) == has_wandb()
    error = commands.run("train", *SETTINGS, "name=r", *trackers, "training.max_steps=6")
    assert "resumed" in error
    commands.run("evaluate", "runs/r", "--data", ADDRESS, "--json", "--out", "evaluated")
    commands.run("export", "runs/r", "--json")
    commands.run("runs", "runs", "--json")
    # A file of another program, or of an earlier version, may hold secrets that the report must not show.
    (run / "data.json").write_text(json.dumps({"notes": [NOISE], "api_key": TEXT}))
    commands.run("report", "runs/r", "--json", "--out", "page.html")
    (run / "data.json").unlink()
    assert "***" in (run / "report.html").read_text(), "written by train"
    assert "***" in (commands.folder / "page.html").read_text()
    commands.check_clean()


def test_crashes_and_refusals_are_clean(commands: Commands) -> None:
    for crash, code in (("bug", 1), ("data", 3)):
        error = commands.run("train", *SETTINGS, f"name={crash}", "--debug", code=code, BOTTEGA_TEST_CRASH=crash)
        assert "Traceback" in error
        assert "***" in (commands.folder / "runs" / crash / "log.txt").read_text().splitlines()[-1]
    commands.run("train", *SETTINGS, f"training.hf_token={TEXT}", code=2)
    commands.run("train", *SETTINGS, f"training.max_steps={SHAPE}", code=2)
    commands.run("train", *SETTINGS, "--password", TEXT, code=2)
    commands.run("evaluate", ADDRESS, "--debug", code=2)
    commands.run("plan", *SETTINGS, "--json")
    commands.run("plan", *SETTINGS)
    commands.check_clean()


def test_second_value_of_a_stored_secret_resumes(commands: Commands) -> None:
    commands.run("train", *SETTINGS, "name=r")
    renewed = [word.replace(NAMED, TEXT) for word in SETTINGS]
    error = commands.run("train", *renewed, "name=r", "training.max_steps=6")
    assert "resumed" in error
    assert f"{len(TEXT)} characters" in error
    without = [word for word in SETTINGS if NAMED not in word]
    error = commands.run("train", *without, "name=r", "training.max_steps=8", API_KEY="from-outside")
    assert "resumed" in error
    assert f"{len('from-outside')} characters" in error
    commands.check_clean()


def test_metadata_of_prepared_data_is_clean(commands: Commands) -> None:
    """A message about a bad record quotes it."""
    table = (commands.folder / "store" / "houses.csv").read_text() + f"1,2,3,password={TEXT}\n"
    (commands.folder.parent / "bad.csv").write_text(table)
    settings = [word for word in SETTINGS if not word.startswith(("data.", "output_dir"))]
    commands.run(
        "prepare", *settings, "data.train.path=../bad.csv", "data.bad_records=skip", "data.max_bad=0.5", "--json"
    )
    metadata = [path for path in commands.folder.rglob("meta.json") if "password" in path.read_text()]
    assert metadata, "no file names the bad record"
    commands.check_clean()


@pytest.mark.slow
def test_studies_folds_and_range_tests_are_clean(commands: Commands) -> None:
    space = ["--space", "training.learning_rate=log(1e-4,1e-2)", "--trials", "2", "--jobs", "1", "--method", "random"]
    commands.run("tune", *SETTINGS, *space, "--study", "a", "--json", BOTTEGA_TEST_STDERR="1")
    commands.run(
        *("tune", *SETTINGS, *space, "--study", "b", "--storage", "sqlite:///study.db"),
        code=3,
        BOTTEGA_TEST_CRASH="data",
    )
    commands.run("lr-find", *SETTINGS, "--out", "range")
    commands.run("lr-find", *SETTINGS, "--out", "range", "--json")
    commands.run("crossval", *SETTINGS, "--folds", "2", "--out", "folds", "--json")
    assert (commands.folder / "study.db").is_file()
    assert any(commands.folder.rglob("lr-find.json"))
    assert any(commands.folder.rglob("crossval.json"))
    assert any(commands.folder.rglob("*.stderr"))
    commands.check_clean()


def test_leaks_are_noticed(tmp_path: Path) -> None:
    """The search for canaries looks into compressed files, archives and names."""
    files: dict[str, Any] = {"a.bin": b"\x00" + SHAPE.encode(), "b.gz": gzip.compress(NAMED.encode()), TEXT: b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as archive:
        archive.writestr("member", VARIABLE * 100)
    assert len(set(find_leaks(tmp_path))) == 4
