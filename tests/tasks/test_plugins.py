"""The task of docs/extend.md as a plugin: every command, kill and resume, folds and ranks; and invalid plugins."""

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
from small_run import environment, run_bottega

PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
FLAG = ("--plugin", "regression.py")
SMALL = (
    "training.max_steps=12",
    "training.batch_size=8",
    "checkpoint.every=4",
    "evaluation.every=4",
    "logging.tensorboard=false",
    "logging.report=false",
)


def write_plugin(folder: Path) -> Path:
    """Write the plugin of the page, joined from its code blocks."""
    blocks = re.findall(r"^```python\n(# regression\.py.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    file = folder / "regression.py"
    file.write_text("\n\n".join(blocks))
    return file


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def train(project: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return run_bottega(["train", "houses.yaml", *SMALL, *FLAG, *arguments], cwd=project, **options)  # type: ignore[arg-type]


def test_the_example_plugin_stays_short(project: Path) -> None:
    assert len((project / "regression.py").read_text().splitlines()) < 150


def test_a_plugin_trains_evaluates_predicts_and_exports(project: Path) -> None:
    process = train(project, "name=a", "training.max_steps=150")
    assert process.returncode == 0, process.stderr
    run = project / "runs" / "a"
    evaluated = run_bottega(["evaluate", "runs/a", "--json", *FLAG], cwd=project)
    metrics = json.loads(evaluated.stdout)["metrics"]
    assert metrics["r2"] > 0.9
    assert metrics["mae"] < 4
    (project / "new.csv").write_text("area,rooms,age\n5,1,2\n1,8,3\n")
    predicted = json.loads(run_bottega(["predict", "runs/a", "new.csv", "--json", *FLAG], cwd=project).stdout)[
        "predictions"
    ]
    assert [row["row"] for row in predicted] == ["new.csv:2", "new.csv:3"]
    assert np.allclose([row["predicted"] for row in predicted], [14, -5], atol=3)
    assert run_bottega(["export", "runs/a", *FLAG], cwd=project).returncode == 0
    exported = load_file(run / "final" / "model.safetensors")
    assert json.loads((run / "final" / "config.json").read_text())["model"]["hidden_size"] == 64
    assert exported["layers.0.weight"].shape == (64, 3)


def test_a_run_records_its_plugin_and_requires_it(project: Path) -> None:
    assert train(project, "name=a").returncode == 0
    recorded = json.loads((project / "runs" / "a" / "environment.json").read_text())["plugin"]
    digest = hashlib.sha256((project / "regression.py").read_bytes()).hexdigest()
    assert recorded == {"name": "regression", "path": str(project / "regression.py"), "sha256": digest}
    for verb in ("evaluate", "predict", "export", "inspect"):
        process = run_bottega([verb, "runs/a"], cwd=project)
        assert process.returncode == 2, verb
        assert "came from the plugin regression.py; give it again: --plugin" in process.stderr
    again = train(project, "name=a")
    assert again.returncode == 0
    assert "has changed" not in again.stderr
    (project / "regression.py").write_text((project / "regression.py").read_text() + "\n# edited\n")
    for steps in (16, 20):  # also after it was resumed once
        resumed = train(project, "name=a", f"training.max_steps={steps}")
        assert resumed.returncode == 0
        assert "the plugin regression has changed since this run began" in resumed.stderr + resumed.stdout
    evaluated = run_bottega(["evaluate", "runs/a", *FLAG], cwd=project)
    assert evaluated.returncode == 0
    assert "has changed since this run began" in evaluated.stderr


def test_an_edited_encoder_is_a_data_change(project: Path) -> None:
    assert train(project, "name=a").returncode == 0
    plugin = project / "regression.py"
    plugin.write_text(plugin.read_text().replace("return float(record", "return 2 * float(record"))
    again = train(project, "name=a", "training.max_steps=16")
    assert again.returncode == 3
    assert "--allow-data-change" in again.stderr


@pytest.mark.slow
def test_plugin_resume_is_bitwise_equal_after_a_kill(project: Path) -> None:
    command = ["verify-resume", "houses.yaml", *FLAG, "--steps", "12", "--kills", "1"]
    process = run_bottega(command, cwd=project)
    assert process.returncode == 0, process.stderr
    assert "equal bit for bit" in process.stderr


@pytest.mark.slow
def test_trials_of_a_search_get_the_plugin(project: Path) -> None:
    words = ["tune", "houses.yaml", "--space", "training.learning_rate=[1e-3,1e-2]", "--method", "grid", "--jobs", "1"]
    process = run_bottega([*words, "--json", *SMALL, *FLAG], cwd=project)
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert [trial["state"] for trial in report["trials"]] == ["complete"] * 2
    assert report["task"] == "regression"


@pytest.mark.slow
def test_cross_validation_passes_the_plugin_to_each_fold(project: Path) -> None:
    process = run_bottega(["crossval", "houses.yaml", "--folds", "2", "--json", *SMALL, *FLAG], cwd=project)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["folds"] == 2


def test_two_ranks_train_the_same_weights_as_one(project: Path) -> None:
    assert train(project, "name=one").returncode == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "bottega"]
    command = ["train", "houses.yaml", *SMALL, *FLAG, "name=two"]
    process = subprocess.run(
        [*launch, *command], cwd=project, capture_output=True, text=True, env=environment(), timeout=120
    )
    assert process.returncode == 0, process.stderr
    single, distributed = weights(project / "runs" / "one"), weights(project / "runs" / "two")
    assert all(np.allclose(single[name], distributed[name], atol=1e-4) for name in single)


def test_micro_batches_give_the_same_mean(project: Path) -> None:
    assert train(project, "name=whole").returncode == 0
    assert train(project, "name=split", "training.micro_batch_size=3").returncode == 0
    unsplit, split = weights(project / "runs" / "whole"), weights(project / "runs" / "split")
    assert all(np.allclose(unsplit[name], split[name], atol=1e-4) for name in unsplit)


@pytest.mark.slow
def test_a_dependency_is_trained_with_the_plugin(project: Path) -> None:
    """Under a launcher a dependency is trained in its own process, which must be given the plugin."""
    plugin = project / "regression.py"
    key = '    hidden_size: plugin.Positive = Field(64, description="width of the hidden layers")\n'
    added_key = '    start: str | None = Field(None, description="a run to compare with")\n'
    assert key in plugin.read_text()
    plugin.write_text(plugin.read_text().replace(key, key + added_key))
    (project / "built.yaml").write_text(
        "extends: houses.yaml\nneeds: {base: {recipe: houses.yaml, settings: {training.max_steps: 3}}}\n"
        "model: {start: needs.base}\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "bottega"]
    command = ["train", "built.yaml", *SMALL, *FLAG, "name=built"]
    process = subprocess.run(
        [*launch, *command], cwd=project, capture_output=True, text=True, env=environment(), timeout=200
    )
    assert process.returncode == 0, process.stderr
    assert len(list((project / "runs" / "parts").glob("*/recipe.yaml"))) == 1


def test_data_workers_import_the_plugin(project: Path) -> None:
    """The encoder is a class of the plugin, and a large table is prepared in worker processes."""
    setup_code = "import bottega.data.prepare.jobs as jobs; jobs.MIN_BYTES_FOR_WORKERS = 0; jobs._choose_num_workers = lambda jobs: 2"
    process = train(project, "name=a", "data.workers=1", setup_code=setup_code)
    assert process.returncode == 0, process.stderr


def install(folder: Path, value: str, name: str = "houses") -> None:
    """Write the metadata of an installed package with an entry point."""
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[bottega.tasks]\nregression = {value}\n")


def test_an_installed_package_needs_no_flag(project: Path) -> None:
    packages = project / "packages"
    packages.mkdir()
    write_plugin(packages).rename(packages / "house_models.py")
    (project / "regression.py").unlink()
    install(packages, "house_models:TASK")
    path = environment(PYTHONPATH=str(packages) + ":" + environment()["PYTHONPATH"])
    process = run_bottega(["train", "houses.yaml", *SMALL, "name=a"], cwd=project, env=path, cold=True)
    assert process.returncode == 0, process.stderr
    recorded = json.loads((project / "runs" / "a" / "environment.json").read_text())["plugin"]
    assert recorded["name"] == "houses 1.2"
    assert "path" not in recorded
    evaluated = run_bottega(["evaluate", "runs/a"], cwd=project)
    assert evaluated.returncode == 2
    assert "came from the installed package houses 1.2; install it again" in evaluated.stderr


def test_a_broken_installed_plugin_is_reported_and_skipped(
    tmp_path: Path, tasks: TaskRegistry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "no_such_module:TASK", name="broken")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.load_installed()
    assert "the installed plugin broken is left out: ModuleNotFoundError" in capsys.readouterr().err
    assert "language" in tasks


def test_a_plugin_file_is_loaded_by_path_and_not_from_the_working_directory(project: Path) -> None:
    """A child process is started as `python -m bottega`, which searches the working directory first."""
    (project / "there").mkdir()
    (project / "regression.py").rename(project / "there" / "regression.py")
    (project / "regression.py").write_text("raise RuntimeError('not this one')\n")
    command = ["train", "houses.yaml", *SMALL, "--plugin", "there/../there/regression.py", "name=a"]
    for cold in (False, True):
        process = run_bottega(command, cwd=project, cold=cold)
        assert process.returncode == 0, process.stderr


def test_an_error_in_a_plugin_names_its_line(project: Path) -> None:
    plugin = project / "regression.py"
    plugin.write_text(plugin.read_text().replace("squares = (error /", "squares = (eror /"))
    process = train(project)
    assert process.returncode == 1
    assert re.search(r"bottega: plugin regression.py, line \d+, in loss: NameError: name 'eror'", process.stderr)
    plugin.write_text(
        plugin.read_text().replace("(squares * counted).sum(), 1.0", "squares * counted, 1.0").replace("eror", "error")
    )
    assert "an error in the plugin regression or in bottega" in train(project).stderr


def test_invalid_samples_to_predict_are_refused(project: Path) -> None:
    assert train(project, "name=a").returncode == 0
    (project / "new.csv").write_text("area,rooms,age\n5,1,2\n1,red,3\n")
    process = run_bottega(["predict", "runs/a", "new.csv", *FLAG], cwd=project)
    assert process.returncode == 3
    assert "new.csv, line 3: rooms is 'red', which is not a number" in process.stderr
    evaluated = run_bottega(["evaluate", "runs/a", "--data", "new.csv", *FLAG], cwd=project)
    assert evaluated.returncode == 3
    assert "no column 'price'" in evaluated.stderr


def test_repeated_rows_are_counted(project: Path) -> None:
    (project / "houses.csv").write_text("area,rooms,age,price\n" + "1,2,3,4\n" * 4 + "5,6,7,8\n")
    process = run_bottega(["data", "houses.yaml", "--json", "data.validation=null", *FLAG], cwd=project)
    assert json.loads(process.stdout)["duplicates"] == {"train": 3}


def test_a_recipe_never_loads_code(project: Path) -> None:
    (project / "evil.py").write_text("from pathlib import Path\nPath('was-run').touch()\nTASK = None\n")
    for arguments in (["plugin=evil.py"], ["--config", "evil.yaml"]):
        (project / "evil.yaml").write_text("plugin: evil.py\ntask: language\nplugins: [evil.py]\n")
        assert run_bottega(["train", "language", *arguments], cwd=project).returncode == 2
    assert not (project / "was-run").exists()


@pytest.mark.parametrize(
    ("name", "text", "kind", "message"),
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
        ("one_empty.py", "", UsageError, "plugin one_empty defines no task; set TASK = TaskSpec(...)"),
        ("one_wrong.py", "TASK = 3", UsageError, "plugin one_wrong defines no task"),
        (
            "one_taken.py",
            "from bottega.tasks.recall.spec import SPEC as TASK\n",
            UsageError,
            "Bottega itself has a task",
        ),
    ],
)
def test_an_invalid_plugin_is_refused_in_one_line(
    tmp_path: Path, tasks: TaskRegistry, name: str, text: str | None, kind: type[BottegaError], message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(kind, match=re.escape(message)) as caught:
        plugins.load_plugin(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


def test_output_of_a_plugin_goes_to_stderr(
    tmp_path: Path, tasks: TaskRegistry, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one_loud.py").write_text("print('hello')\n")
    with pytest.raises(UsageError):
        plugins.load_plugin(tmp_path / "one_loud.py")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def test_a_folder_and_an_empty_plugin_flag_are_refused(tmp_path: Path, tasks: TaskRegistry) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        plugins.load_plugin(tmp_path)
    for arguments in (["houses.yaml", "--plugin"], ["--plugin", "", "houses.yaml"], ["--plugin="]):
        with pytest.raises(UsageError, match="needs a file"):
            plugins.load_plugin_flags(arguments)


def test_a_plugin_is_loaded_once_and_passed_to_children(project: Path, tasks: TaskRegistry) -> None:
    assert plugins.load_plugin_flags(["a.yaml", "--plugin=regression.py", "x=1", *FLAG]) == ["a.yaml", "x=1"]
    assert plugins.build_plugin_flags() == ["--plugin", str(project / "regression.py")]
    assert check_recipe(["houses.yaml"]).recipe.task == "regression"
    assert list(TASKS)[-1] == "regression"


def test_an_unknown_task_suggests_the_plugin_flag(project: Path) -> None:
    process = run_bottega(["train", "houses.yaml"], cwd=project)
    assert process.returncode == 2
    assert "got 'regression'; to use a task of a plugin, add --plugin FILE" in process.stderr
