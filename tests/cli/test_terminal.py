"""Every verb on a pseudo-terminal: its output is visible, and escape codes from data never reach the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bottega
import small_run
import small_texts
from bottega import cli
from pseudo_terminal import run_on_terminal

TITLE = "\x1b]0;owned\x07"
"""Sets the window title; with 52 instead of 0 it would write the clipboard."""
HOSTILE = f"{TITLE}\x9b31m\u202e"


class HostileFiles:
    """Runs, data and recipes for all verbs, with escape codes in their names and contents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"in{TITLE}out"
        self.folder.mkdir()
        self.text = self.folder / f"text{TITLE}.txt"
        line = f"alpha beta {HOSTILE} gamma delta\n"
        self.text.write_text(line * 120, encoding="utf-8")
        self.language = small_run.train(self.folder, self.text, name="language").path
        rows = [{**row, "label": row["label"] + TITLE, "text": row["text"] + TITLE} for row in small_texts.make_rows()]
        self.table = self.folder / f"table{TITLE}.jsonl"
        self.table.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.classify = self._classify("one")
        self.other = self._classify("two", seed=1)

    def classify_settings(self, **changes: Any) -> dict[str, Any]:
        own = small_texts.settings(self.folder, **{"data.train.path": str(self.table), "data.train.label": "label"})
        return {**own, **changes}

    def _classify(self, name: str, **changes: Any) -> Path:
        run = bottega.train("classify", self.classify_settings(name=name, **changes)).path
        bottega.evaluate(run, out=run / "results")
        return run

    def keys(self, settings: dict[str, Any]) -> list[str]:
        return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]

    def crossval(self) -> list[str]:
        few = {"training.max_steps": 2, "evaluation.every": 2, "data.validation": None, "name": "folds"}
        return ["crossval", "classify", *self.keys(self.classify_settings(**few)), "--folds", "2"]

    def tune(self) -> list[str]:
        few = {"training.max_steps": 2, "evaluation.every": 1, "name": None}
        space = ["--space", "training.learning_rate=[1e-3,1e-2]", "--method", "grid", "--study", f"study{TITLE[1:4]}"]
        return [
            "tune",
            "classify",
            *self.keys(self.classify_settings(**few)),
            *space,
            "--out",
            str(self.folder / "study"),
        ]

    def foreign(self) -> str:
        path = self.folder / "axolotl.yml"
        path.write_text("base_model: gpt2\nsequence_len: 64\nlearning_rate: 0.001\nmicro_batch_size: 2\nmax_steps: 3\n")
        return str(path)

    def train(self) -> list[str]:
        return small_run.train_arguments(self.folder, self.text, name="again", **{"samples.every": 8})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> HostileFiles:
    return HostileFiles(tmp_path_factory.mktemp("terminal"))


FEW = ("training.max_steps=2", "checkpoint.every=1", "evaluation.every=1")
CASES: dict[str, Any] = {
    "train": (lambda p: p.train(), ["step 8  validation", "next:  bottega generate"]),
    "evaluate": (lambda p: ["evaluate", p.classify], ["accuracy", "loss"]),
    "generate": (
        lambda p: ["generate", p.language, "--prompt", f"alpha{HOSTILE}", "--max_tokens=8"],
        ["alpha\\x1b]0;owned"],
    ),
    "predict": (lambda p: ["predict", p.classify, f"salt and onion{HOSTILE}"], ["salt and onion"]),
    "export": (lambda p: ["export", p.language, "--out", p.folder / f"export{TITLE}"], ["exported step-00000008 to"]),
    "prepare": (lambda p: ["prepare", "language", f"data.train.path={p.text}"], ["train", "shards"]),
    "data": (lambda p: ["data", p.table, "--out", p.folder / "report"], ["rows", "cook"]),
    "plan": (
        lambda p: ["plan", *small_run.train_arguments(p.folder, p.text)[1:], "--check"],
        ["valid; language"],
    ),
    "recipes": (lambda p: ["recipes"], ["language/shakespeare"]),
    "schema": (lambda p: ["schema"], ['"$defs"']),
    "init": (lambda p: ["init"], ["task: language"]),
    "import": (lambda p: ["import", p.foreign(), "--out", p.folder / f"recipe{TITLE}.yaml"], ["learning_rate"]),
    "doctor": (lambda p: ["doctor", "--quick", "--dir", p.folder], ["torch", "in\\x1b]0;owned"]),
    "inspect": (lambda p: ["inspect", p.language], ["parameters"]),
    "ledger": (lambda p: ["ledger", p.language, "--step", "1"], ["step 1: samples"]),
    "verify-resume": (
        lambda p: ["verify-resume", *small_run.train_arguments(p.folder, p.text)[1:], "--steps", "4", "--kills", "1"],
        ["equal bit for bit"],
    ),
    "runs": (lambda p: ["runs", p.folder], ["language", "finished", "8/8"]),
    "crossval": (lambda p: p.crossval(), ["fold-0", "accuracy"]),
    "tune": (lambda p: p.tune(), ["2 trials", "best: trial", "next:  bottega train"]),
    "diagnose": (lambda p: ["diagnose", p.classify], ["finished"]),
    "report": (lambda p: ["report", p.classify, p.language, "--out", p.folder / f"page{TITLE}.html"], ["MB)"]),
    "compare": (lambda p: ["compare", p.classify, p.other], ["A", "B"]),
    "lr-find": (
        lambda p: [
            "lr-find",
            *small_run.train_arguments(p.folder, p.text)[1:],
            "--steps",
            "10",
            "--out",
            p.folder / "found",
        ],
        ["lr-find.png"],
    ),
}
"""Verb -> (its arguments, texts that must be on the screen at the end)."""


def test_every_verb_has_a_case() -> None:
    assert set(CASES) == set(cli.VERBS), "a new verb needs a case"


STARTS_PROCESSES = ("crossval", "tune", "verify-resume")


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=pytest.mark.slow if verb in STARTS_PROCESSES else ()) for verb in cli.VERBS]
)
def test_output_is_visible_and_free_of_escape_codes(files: HostileFiles, verb: str) -> None:
    arguments_of, expected = CASES[verb]
    result = run_on_terminal([str(word) for word in arguments_of(files)], cwd=files.folder)
    assert result.code == 0, result.raw
    for text in expected:
        assert text in result.screen, result.raw
    assert result.commands == [], result.raw
    if verb == "train":
        log = (files.folder / "again" / "log.txt").read_text()
        assert "alpha" in log or "samples in" in log
        assert not any(sign in log for sign in HOSTILE if not sign.isprintable())


@pytest.mark.parametrize("word", [HOSTILE, f"--{HOSTILE}=1", f"{HOSTILE}=1", f"training.{HOSTILE}=2"])
@pytest.mark.parametrize("verb", [*cli.VERBS, f"no{HOSTILE}verb"])
def test_error_messages_contain_no_escape_codes(
    verb: str, word: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = cli.main([verb, word])
    output = capsys.readouterr()
    assert code == 2, output
    for sign in HOSTILE:
        assert sign.isprintable() or sign not in output.out + output.err
