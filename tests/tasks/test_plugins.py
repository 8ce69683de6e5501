"""The task that docs/extend.md builds, from outside the package: every verb, kill and resume, folds, ranks; and bad plugins."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import plugin_scope
from bottega.config.registry import TaskRegistry
from bottega.core.errors import BottegaError, EnvironmentProblem, UsageError
from bottega.tasks import plugins
from bottega.tasks.recipes import check_recipe
from bottega.tasks.registry import TASKS
from small_run import bottega, environment

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
FLAG = ("--plugin", "regression.py")
SMALL = (
    "training.max_steps=12",
    "training.batch_size=8",
    "checkpoint.every=4",
    "evaluation.every=4",
    "logging.tensorboard=false",
)


def write_plugin(folder: Path) -> Path:
    """The file of the page, from its pieces."""
    blocks = re.findall(r"^```python\n(# regression\.py.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    file = folder / "regression.py"
    file.write_text("\n\n".join(blocks))
    return file


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_plugin(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, (60, 3))
    rows = [f"{a:.2f},{b:.2f},{c:.2f},{3 * a - b:.3f}" for a, b, c in x]
    (tmp_path / "houses.csv").write_text("\n".join(["area,rooms,age,price", *rows]) + "\n")
    recipe = re.search(r"^```yaml\n(# houses\.yaml.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert recipe is not None
    (tmp_path / "houses.yaml").write_text(recipe[1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tasks() -> Iterator[TaskRegistry]:
    with plugin_scope.isolated() as tasks:
        yield tasks


def weights(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "checkpoints" / "last" / "model.safetensors")


def train(place: Path, *more: str, **options: object) -> subprocess.CompletedProcess[str]:
    return bottega(["train", "houses.yaml", *SMALL, *FLAG, *more], cwd=place, **options)  # type: ignore[arg-type]


def test_the_page_stays_short(place: Path) -> None:
    assert len((place / "regression.py").read_text().splitlines()) < 150


def test_a_plugin_trains_evaluates_predicts_and_exports(place: Path) -> None:
    done = train(place, "name=a", "training.max_steps=150")
    assert done.returncode == 0, done.stderr
    run = place / "runs" / "a"
    evaluated = bottega(["evaluate", "runs/a", "--json", *FLAG], cwd=place)
    measured = json.loads(evaluated.stdout)["metrics"]
    assert measured["r2"] > 0.9
    assert measured["mae"] < 4
    (place / "new.csv").write_text("area,rooms,age\n5,1,2\n1,8,3\n")
    predicted = json.loads(bottega(["predict", "runs/a", "new.csv", "--json", *FLAG], cwd=place).stdout)["predictions"]
    assert [row["row"] for row in predicted] == ["new.csv:2", "new.csv:3"]
    assert np.allclose([row["predicted"] for row in predicted], [14, -5], atol=3)
    assert bottega(["export", "runs/a", *FLAG], cwd=place).returncode == 0
    exported = load_file(run / "final" / "model.safetensors")
    assert json.loads((run / "final" / "config.json").read_text())["model"]["hidden_size"] == 64
    assert exported["layers.0.weight"].shape == (64, 3)


def test_a_run_knows_its_plugin_and_asks_for_it(place: Path) -> None:
    assert train(place, "name=a").returncode == 0
    known = json.loads((place / "runs" / "a" / "environment.json").read_text())["plugin"]
    digest = hashlib.sha256((place / "regression.py").read_bytes()).hexdigest()
    assert known == {"name": "regression", "path": str(place / "regression.py"), "sha256": digest}
    for verb in ("evaluate", "predict", "export", "inspect"):
        asked = bottega([verb, "runs/a"], cwd=place)
        assert asked.returncode == 2, verb
        assert "came from the plugin regression.py; give it again: --plugin" in asked.stderr
    again = train(place, "name=a")
    assert again.returncode == 0
    assert "has changed" not in again.stderr
    (place / "regression.py").write_text((place / "regression.py").read_text() + "\n# edited\n")
    for steps in (16, 20):  # also after it has gone on once
        more = train(place, "name=a", f"training.max_steps={steps}")
        assert more.returncode == 0
        assert "the plugin regression has changed since this run began" in more.stderr + more.stdout
    evaluated = bottega(["evaluate", "runs/a", *FLAG], cwd=place)
    assert evaluated.returncode == 0
    assert "has changed since this run began" in evaluated.stderr


def test_rows_of_an_encoder_that_was_edited_are_made_again(place: Path) -> None:
    assert train(place, "name=a").returncode == 0
    plugin = place / "regression.py"
    plugin.write_text(plugin.read_text().replace("return float(record", "return 2 * float(record"))
    again = train(place, "name=a", "training.max_steps=16")
    assert again.returncode == 3
    assert "--allow-data-change" in again.stderr


@pytest.mark.slow
def test_a_killed_run_of_a_plugin_goes_on_bit_for_bit(place: Path) -> None:
    words = ["verify-resume", "houses.yaml", *FLAG, "--steps", "12", "--kills", "1"]
    done = bottega(words, cwd=place)
    assert done.returncode == 0, done.stderr
    assert "equal bit for bit" in done.stderr


@pytest.mark.slow
def test_folds_are_started_with_the_plugin(place: Path) -> None:
    done = bottega(["crossval", "houses.yaml", "--folds", "2", "--json", *SMALL, *FLAG], cwd=place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folds"] == 2


def test_two_ranks_learn_what_one_does(place: Path) -> None:
    assert train(place, "name=one").returncode == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "bottega"]
    words = ["train", "houses.yaml", *SMALL, *FLAG, "name=two"]
    done = subprocess.run([*launch, *words], cwd=place, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    one, two = weights(place / "runs" / "one"), weights(place / "runs" / "two")
    assert all(np.allclose(one[name], two[name], atol=1e-4) for name in one)


def test_micro_batches_give_the_same_mean(place: Path) -> None:
    assert train(place, "name=whole").returncode == 0
    assert train(place, "name=split", "training.micro_batch_size=3").returncode == 0
    whole, split = weights(place / "runs" / "whole"), weights(place / "runs" / "split")
    assert all(np.allclose(whole[name], split[name], atol=1e-4) for name in whole)


@pytest.mark.slow
def test_a_dependency_is_trained_with_the_plugin(place: Path) -> None:
    """Under a launcher a dependency is a process of its own, which only has the plugin if it is handed on."""
    plugin = place / "regression.py"
    key = '    hidden_size: plugin.Positive = Field(64, description="width of the hidden layers")\n'
    more = '    start: str | None = Field(None, description="a run to compare with")\n'
    assert key in plugin.read_text()
    plugin.write_text(plugin.read_text().replace(key, key + more))
    (place / "built.yaml").write_text(
        "extends: houses.yaml\nneeds: {base: {recipe: houses.yaml, settings: {training.max_steps: 3}}}\n"
        "model: {start: needs.base}\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "bottega"]
    words = ["train", "built.yaml", *SMALL, *FLAG, "name=built"]
    done = subprocess.run([*launch, *words], cwd=place, capture_output=True, text=True, env=environment(), timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(list((place / "runs" / "parts").glob("*/recipe.yaml"))) == 1


def test_processes_that_load_data_find_the_plugin(place: Path) -> None:
    """The encoder is a class of the plugin, and a large table is prepared by processes of their own."""
    first = "import bottega.data.prepare.jobs as jobs; jobs.WORTH_PROCESSES = 0; jobs._workers = lambda jobs: 2"
    done = train(place, "name=a", "data.workers=1", first=first)
    assert done.returncode == 0, done.stderr


def install(folder: Path, value: str, name: str = "houses") -> None:
    """A package with an entry point, as pip leaves it."""
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[bottega.tasks]\nregression = {value}\n")


def test_an_installed_package_needs_no_flag(place: Path) -> None:
    packages = place / "packages"
    packages.mkdir()
    write_plugin(packages).rename(packages / "house_models.py")
    (place / "regression.py").unlink()
    install(packages, "house_models:TASK")
    path = environment(PYTHONPATH=str(packages) + ":" + environment()["PYTHONPATH"])
    done = bottega(["train", "houses.yaml", *SMALL, "name=a"], cwd=place, env=path, cold=True)
    assert done.returncode == 0, done.stderr
    known = json.loads((place / "runs" / "a" / "environment.json").read_text())["plugin"]
    assert known["name"] == "houses 1.2"
    assert "path" not in known
    asked = bottega(["evaluate", "runs/a"], cwd=place)
    assert asked.returncode == 2
    assert "came from the installed package houses 1.2; install it again" in asked.stderr


def test_a_broken_installed_package_is_told_and_left_out(
    tmp_path: Path, tasks: TaskRegistry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "no_such_module:TASK", name="broken")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.load_installed()
    assert "the installed plugin broken is left out: ModuleNotFoundError" in capsys.readouterr().err
    assert "language" in tasks


def test_a_file_is_the_same_by_any_path_and_whatever_lies_beside(place: Path) -> None:
    """A child is started as `python -m bottega`, which looks into the working directory first."""
    (place / "there").mkdir()
    (place / "regression.py").rename(place / "there" / "regression.py")
    (place / "regression.py").write_text("raise RuntimeError('not this one')\n")
    words = ["train", "houses.yaml", *SMALL, "--plugin", "there/../there/regression.py", "name=a"]
    for cold in (False, True):
        done = bottega(words, cwd=place, cold=cold)
        assert done.returncode == 0, done.stderr


def test_an_error_in_a_plugin_names_its_line(place: Path) -> None:
    plugin = place / "regression.py"
    plugin.write_text(plugin.read_text().replace("squares = (error /", "squares = (eror /"))
    done = train(place)
    assert done.returncode == 1
    assert re.search(r"bottega: plugin regression.py, line \d+, in loss: NameError: name 'eror'", done.stderr)
    plugin.write_text(
        plugin.read_text().replace("(squares * counted).sum(), 1.0", "squares * counted, 1.0").replace("eror", "error")
    )
    assert "the plugin regression, or a bug in bottega" in train(place).stderr


def test_samples_to_predict_need_their_columns(place: Path) -> None:
    assert train(place, "name=a").returncode == 0
    (place / "new.csv").write_text("area,rooms,age\n5,1,2\n1,red,3\n")
    done = bottega(["predict", "runs/a", "new.csv", *FLAG], cwd=place)
    assert done.returncode == 3
    assert "new.csv, line 3: rooms is 'red', which is not a number" in done.stderr
    measured = bottega(["evaluate", "runs/a", "--data", "new.csv", *FLAG], cwd=place)
    assert measured.returncode == 3
    assert "no column 'price'" in measured.stderr


def test_repeated_rows_are_counted(place: Path) -> None:
    (place / "houses.csv").write_text("area,rooms,age,price\n" + "1,2,3,4\n" * 4 + "5,6,7,8\n")
    done = bottega(["data", "houses.yaml", "--json", "data.validation=null", *FLAG], cwd=place)
    assert json.loads(done.stdout)["duplicates"] == {"train": 3}


def test_a_recipe_never_loads_code(place: Path) -> None:
    (place / "evil.py").write_text("from pathlib import Path\nPath('was-run').touch()\nTASK = None\n")
    for words in (["plugin=evil.py"], ["--config", "evil.yaml"]):
        (place / "evil.yaml").write_text("plugin: evil.py\ntask: language\nplugins: [evil.py]\n")
        assert bottega(["train", "language", *words], cwd=place).returncode == 2
    assert not (place / "was-run").exists()


@pytest.mark.parametrize(
    ("name", "text", "kind", "says"),
    [
        ("missing.py", None, UsageError, "does not exist; give a .py file that defines TASK"),
        ("plugin.txt", "TASK = 1", UsageError, "is not a Python file"),
        ("my-task.py", "TASK = 1", UsageError, "is not a name that Python can import; rename the file"),
        ("json.py", "TASK = 1", UsageError, "there is another module json"),
        ("one_syntax.py", "def f(:\n", EnvironmentProblem, "line 1: SyntaxError"),
        ("one_raise.py", "x = 1\nraise ValueError('no luck')\n", EnvironmentProblem, "line 2: ValueError: no luck"),
        ("one_exit.py", "import sys\nsys.exit(3)\n", EnvironmentProblem, "line 2: SystemExit: 3"),
        (
            "one_nameless.py",
            "from bottega.plugin import Recipe, TaskSpec\nTASK = TaskSpec('one', Recipe, open=print, reopen=print)\n",
            UsageError,
            "task one: Recipe must declare its name",
        ),
        (
            "one_schemaless.py",
            "from bottega.plugin import TaskSpec\nTASK = TaskSpec('one', dict, open=print, reopen=print)\n",
            UsageError,
            "task one: its recipe must be a subclass of bottega.plugin.Recipe",
        ),
        ("one_empty.py", "", UsageError, "plugin one_empty: defines no task; set TASK = TaskSpec(...)"),
        ("one_wrong.py", "TASK = 3", UsageError, "plugin one_wrong: defines no task"),
        (
            "one_taken.py",
            "from bottega.tasks.recall.spec import SPEC as TASK\n",
            UsageError,
            "Bottega itself has a task",
        ),
    ],
)
def test_a_bad_plugin_is_told_in_one_line(
    tmp_path: Path, tasks: TaskRegistry, name: str, text: str | None, kind: type[BottegaError], says: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(kind, match=re.escape(says)) as caught:
        plugins.load_plugin(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


def test_what_a_plugin_prints_is_no_result(
    tmp_path: Path, tasks: TaskRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one_loud.py").write_text("print('hello')\n")
    with pytest.raises(UsageError):
        plugins.load_plugin(tmp_path / "one_loud.py")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "hello\n")


def test_a_folder_and_a_lonely_flag_are_refused(tmp_path: Path, tasks: TaskRegistry) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        plugins.load_plugin(tmp_path)
    for words in (["houses.yaml", "--plugin"], ["--plugin", "", "houses.yaml"], ["--plugin="]):
        with pytest.raises(UsageError, match="needs a file"):
            plugins.load_plugin_flags(words)


def test_a_plugin_is_loaded_once_and_handed_on(place: Path, tasks: TaskRegistry) -> None:
    assert plugins.load_plugin_flags(["a.yaml", "--plugin=regression.py", "x=1", *FLAG]) == ["a.yaml", "x=1"]
    assert plugins.plugin_flags() == ["--plugin", str(place / "regression.py")]
    assert check_recipe(["houses.yaml"]).recipe.task == "regression"
    assert list(TASKS)[-1] == "regression"


def test_an_unknown_task_says_that_a_plugin_may_be_missing(place: Path) -> None:
    done = bottega(["train", "houses.yaml"], cwd=place)
    assert done.returncode == 2
    assert "got 'regression'; to use a task of a plugin, add --plugin FILE" in done.stderr
