"""The command answers at once, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest

from bottega import cli
from small_run import bottega, command, environment


def processor_seconds(arguments: list[str]) -> float:
    """Of the child alone: on a busy machine the wall clock would measure the others."""
    child = subprocess.Popen(command(arguments), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stderr is not None
    child.stderr.close()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_answers_within_half_a_second() -> None:
    assert statistics.median(processor_seconds(["--help"]) for _ in range(3)) < 0.5


@pytest.mark.parametrize("what", ["recipes", "schema"])
def test_verbs_that_only_read_recipes_answer_soon(what: str) -> None:
    assert processor_seconds([what]) < 1.5


@pytest.mark.parametrize(
    "module",
    [
        "bottega",
        "bottega.cli",
        "bottega.schema.load",
        "bottega.data.prepare",
        "bottega.data.worker",
        "bottega.core.loop",
    ],
)
def test_importing_loads_no_framework(module: str) -> None:
    look = f"import sys, {module}; print([m for m in ('torch', 'jax', 'transformers', 'tensorboard', 'wandb') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "[]"


def test_help_names_every_verb_and_every_verb_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == cli.main([]) == cli.main(["help"]) == 0
    shown = capsys.readouterr().out
    for name, verb in cli.VERBS.items():
        assert f"\n  {name} " in shown
        assert verb.says in shown
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--help"])
        assert ended.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import bottega as package

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"bottega {package.__version__}\n"


def test_json_is_one_object_on_standard_output() -> None:
    done = bottega(["recipes", "--json"])
    assert done.returncode == 0
    assert {"language", "image"} <= {recipe["name"] for recipe in json.loads(done.stdout)["recipes"]}
    assert done.stderr == ""


def test_output_that_nobody_reads_is_no_error() -> None:
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
