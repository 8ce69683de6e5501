"""Startup: heavy packages are imported only when they are needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bottega import cli
from small_run import command, environment, run_bottega

HEAVY = ("torch", "jax", "transformers", "tensorboard", "wandb", "numpy", "rich")


@pytest.mark.parametrize(
    ("arguments", "allowed", "max_modules"),
    [(["--help"], (), 250), (["recipes"], ("numpy",), 600), (["schema"], ("numpy",), 600)],
)
def test_quick_commands_import_few_modules(arguments: list[str], allowed: tuple[str, ...], max_modules: int) -> None:
    """Startup time is dominated by imports; benchmarks/start.py measures it."""
    look = (
        f"import contextlib, io, json, sys; from bottega import cli\n"
        f"with contextlib.redirect_stdout(io.StringIO()): assert cli.main({arguments!r}) == 0\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, env=environment())
    loaded = json.loads(done.stdout)
    assert [name for name in HEAVY if name in loaded and name not in allowed] == []
    assert len(loaded) <= max_modules


@pytest.mark.parametrize(
    "module",
    [
        "bottega",
        "bottega.cli",
        "bottega.config.load",
        "bottega.data.prepare",
        "bottega.data.loading.worker",
        "bottega.core.trainer",
    ],
)
def test_importing_loads_no_framework(module: str) -> None:
    look = f"import sys, {module}; print([m for m in ('torch', 'jax', 'transformers', 'tensorboard', 'wandb') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "[]"


def test_help_names_every_verb_and_every_verb_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == cli.main([]) == cli.main(["help"]) == 0
    output = capsys.readouterr().out
    for name, verb in cli.VERBS.items():
        assert f"\n  {name} " in output
        assert verb.summary in output
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import bottega as package

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"bottega {package.__version__}\n"


def test_json_is_one_object_on_standard_output() -> None:
    done = run_bottega(["recipes", "--json"])
    assert done.returncode == 0
    assert {"language", "image"} <= {recipe["name"] for recipe in json.loads(done.stdout)["recipes"]}
    assert done.stderr == ""


def test_closed_output_pipe_is_not_an_error() -> None:
    done = subprocess.run(
        f"{' '.join(command(['schema']))} | head -c 10",
        shell=True,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert len(done.stdout) == 10
    assert done.stderr == ""
