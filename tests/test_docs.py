"""Every command and snippet of the documentation runs.

Each page of README.md, CONTRIBUTING.md and docs/ is walked from top to bottom in a folder of its own that holds a small
text, `my.txt`, and what docs/images/samples.py makes. Blocks are told by their fence:

- `bash`: each line is a command. `bottega ...` runs in this process through `bottega.cli.main` and must give exit code
  0, or the one that a trailing `# exit 2` names. `torchrun` on one machine runs for real. `ls`, `tail` and the like go
  to a shell. What cannot run here (`make`, `tensorboard`, several machines, GPUs) is checked as far as it can be: the
  make target exists, the recipe and settings behind `-m bottega train` resolve.
- `python` is executed, with one namespace for a page; if its first line is a comment such as `# mine.py`, it is saved there
  instead (`# mine.py, continued` adds to it), and is a plugin for what follows.
- `yaml` must be a recipe or a part of one; if its first line is a comment such as `# mine.yaml`, it is also saved there
  for the commands below it.

To be fast, and changing nothing else, a command that trains is made small: one narrow layer, one batch of validation,
few or short samples, and 4 steps where its line does not say how many (SMALLER, below; a key that the line sets itself is
left alone); so are the parts it needs. `evaluate` draws 24 samples. A recipe made for GPUs is not trained but held
against its schema; tests/test_recipes.py trains its small form. Preparing data takes seconds, so pages share one cache.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import plugin_scope
from bottega import cli
from bottega.config.recipe import Recipe
from bottega.core import errors
from bottega.core.errors import BottegaError
from bottega.models.decoder.config import DOCUMENTED_PARAMETERS, shape_for_size
from bottega.tasks.plugins import load_plugin
from bottega.tasks.recipes import check_recipe, parse_overrides

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

SMALLER = {"training.max_steps": "4", "evaluation.max_batches": "1"}
GENERATOR = {
    "model.hidden_size": "32",
    "model.num_layers": "1",
    "training.batch_size": "16",
    "samples.count": "4",
    "samples.steps": "2",
}
AUTOENCODER = {
    "model.hidden_size": "8",
    "model.layers_per_block": "1",
    "training.batch_size": "16",
    "samples.count": "2",
}
SMALLER_BY_TASK = {
    "language": {"model.num_layers": "1", "samples.max_new_tokens": "8"},
    "classify": {"training.batch_size": "16"},
    "image": GENERATOR,
    "audio": GENERATOR,
    "video": GENERATOR,
    "image_vae": AUTOENCODER,
    "image_tokens": AUTOENCODER,
    "align": {"model.num_layers": "1", "training.batch_size": "16", "samples.count": "4"},
    "personalize": {"training.batch_size": "8", "samples.count": "2", "samples.steps": "2"},
    "routing": {"model.hidden_size": "32", "training.batch_size": "16"},
    "recall": {"training.batch_size": "16"},
    "multitask": {"training.batch_size": "8", "evaluation.batch_size": "8"},
}
SMALLER_PART = {"training.max_steps": 4, "training.batch_size": 16, "evaluation.max_batches": 1}
FOR_GPUS = (
    *("language/verse", "language/stanza", "language/epic", "language/shakespeare-gpu"),
    *("image/fashion", "image/photos", "image/text", "image_vae/photos"),
    *("audio/spoken-digits", "audio/speech", "video/clips"),
)
SHORT_PAGES = ("README.md", "CONTRIBUTING.md", "docs/index.md", "docs/library.md", "docs/resume.md")
"""Pages that `make test` runs; all others are run by `make campaigns`."""
SHELL = ("ls", "tail", "head", "cat", "cp")
OPTIONS = ("--json", "--quiet", "--fresh", "--allow-data-change", "--debug")
WITH_VALUE = ("--resume_from", "--kills", "--steps", "--plugin")
NOT_RUN = {"tensorboard": "serves until it is stopped", "pip": "needs the network", "pre-commit": "changes the clone"}


@dataclass(frozen=True)
class Block:
    line: int
    kind: str
    text: str


@dataclass
class Page:
    """What the blocks of one page share."""

    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "docs"})


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_of(path: Path) -> list[Block]:
    found: list[Block] = []
    inside: tuple[int, str, list[str]] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.fullmatch(r"\s*```(\w*)\s*", line)
        if fence and inside is None:
            inside = (number, fence[1], [])
        elif fence and inside is not None:
            start, kind, lines = inside
            found.append(Block(start, kind, textwrap.dedent("\n".join(lines)) + "\n"))
            inside = None
        elif inside is not None:
            inside[2].append(line)
    assert inside is None, f"{path.name}: the fence of line {inside and inside[0]} is not closed"
    return found


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs-cache")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs-samples")
    runpy.run_path(str(ROOT / "docs" / "images" / "samples.py"))["make"](folder)
    return folder


@pytest.fixture
def page(tmp_path: Path, shared_cache: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    shutil.copytree(samples, tmp_path, dirs_exist_ok=True)
    lines = (
        f"The {n}th apprentice ground {n % 7} colours and wrote it down on line {n} of the book.\n" for n in range(400)
    )
    (tmp_path / "my.txt").write_text("".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared_cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with plugin_scope.isolated():
        yield Page(tmp_path)


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if relative(p) in SHORT_PAGES else pytest.mark.slow) for p in PAGES if blocks_of(p)],
    ids=relative,
)
def test_what_a_page_shows_runs(path: Path, page: Page) -> None:
    for block in blocks_of(path):
        where = f"{relative(path)}:{block.line}"
        if block.kind == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.strip() and not line.lstrip().startswith("#"):
                    run_line(line, where)
        elif block.kind == "python":
            run_python(block, path, page)
        elif block.kind == "yaml":
            read_yaml(block, where, page)
        else:
            assert block.kind in ("text", "json"), f"{where}: a block of kind {block.kind!r}; say bash, python or text"


def run_line(line: str, where: str) -> None:
    said = re.search(r"#\s*exit (\d+)\s*$", line)
    expected = int(said[1]) if said else 0
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)  # such as OMP_NUM_THREADS=1, which is set for all of them
    program, rest = words[0], words[1:]
    if program == "bottega":
        code, output = call(rest)
        assert code == expected, f"{where}: {line}\nexit code {code}, expected {expected}\n{output}"
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
            f"{where}: no target {rest[0]}"
        )
    elif program in SHELL:
        subprocess.run(["bash", "-c", line], check=True, capture_output=True)
    elif program in ("torchrun", "accelerate"):
        launch(program, rest, line, where)
    elif program == "python" and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).is_file(), f"{where}: no file {rest[0]}"
    else:
        assert program in NOT_RUN, f"{where}: {program} is neither run nor known to need something that is not here"


def call(words: list[str]) -> tuple[int, str]:
    """A `bottega` line, made small; `> file` is understood."""
    target = None
    if ">" in words:
        at = words.index(">")
        words, target = words[:at], words[at + 1]
    verb, rest = words[0], words[1:]
    if verb == "train" and set(rest) & set(FOR_GPUS):
        what_is_trained(rest)  # held against the schema; to train it takes what is not here
        return 0, ""
    if verb == "train" or (verb == "inspect" and not Path(rest[0]).is_dir()):
        rest = [*rest, *smaller(rest)]
    elif verb == "verify-resume":
        rest = [*rest, *(s for s in smaller(rest) if not s.startswith("training."))]
    elif verb == "evaluate" and "--count" not in rest and _generates(rest):
        rest = [*rest, "--count", "24"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([verb, *rest])
        except SystemExit as leaving:  # --help
            code = int(leaving.code or 0)
    if target:
        Path(target).write_text(out.getvalue(), encoding="utf-8")
    return code, out.getvalue() + err.getvalue()


def _generates(rest: list[str]) -> bool:
    """Whether one of these words is a run that draws samples."""
    files = [Path(word) / "recipe.yaml" for word in rest]
    tasks = [check_recipe([file]).recipe.task for file in files if file.is_file()]
    return any(task in ("image", "audio", "video") for task in tasks)


def smaller(words: list[str]) -> list[str]:
    said = " ".join(words)
    recipe = what_is_trained(words)
    settings = {**SMALLER, **SMALLER_BY_TASK.get(recipe.task, {})}
    settings |= {key: json.dumps(value) for key, value in smaller_parts(recipe).items()}
    if recipe.task in ("image", "audio", "video") and recipe.data.train.kind == "embedded":
        settings["data.validation.split"] = "0.02"  # all that is held out is measured, and Griffin-Lim takes its time
    return [
        f"{key}={value}"
        for key, value in settings.items()
        if key not in said and f"--{key.rpartition('.')[2]}" not in said
    ]


def smaller_parts(recipe: Recipe) -> dict[str, Any]:
    """Settings of the parts a recipe needs, and of those that these need."""
    found = {}
    for name, need in recipe.needs.items():
        if need.recipe is not None:
            inner = smaller_parts(check_recipe([need.recipe]).recipe)
            found[f"needs.{name}.settings"] = {**SMALLER_PART, **inner}
    return found


def what_is_trained(words: list[str]) -> Recipe:
    """The verb's own options say nothing of it."""
    own = (*OPTIONS, *WITH_VALUE)
    settings = [word for i, word in enumerate(words) if word not in own and words[max(0, i - 1)] not in WITH_VALUE]
    return check_recipe(*parse_overrides(settings)).recipe


def launch(program: str, words: list[str], line: str, where: str) -> None:
    at = words.index("bottega")
    assert words[at - 1] == "-m", f"{where}: a rank is started with -m bottega"
    verb, *rest = words[at + 1 :]
    if program == "accelerate" or "--nnodes" in words:
        what_is_trained(rest)
        return
    command = [sys.executable, "-m", "torch.distributed.run", *words[: at + 1], verb, *rest, *smaller(rest)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0, f"{where}: {line}\n{done.stdout}{done.stderr}"


def run_python(block: Block, path: Path, page: Page) -> None:
    if named := re.match(r"#\s*([\w.-]+\.py)(, continued)?\s*\n", block.text):
        file = page.folder / named[1]
        before = file.read_text(encoding="utf-8") if named[2] else ""
        file.write_text(before + block.text, encoding="utf-8")
        return
    # Empty lines in front, so that a traceback names the line of the page.
    code = compile("\n" * block.line + block.text, str(path), "exec")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, page.names)


def read_yaml(block: Block, where: str, page: Page) -> None:
    named = re.match(r"#\s*([\w.-]+\.yaml)\s*\n", block.text)
    file = page.folder / (named[1] if named else "block.yaml")
    file.write_text(block.text, encoding="utf-8")
    for plugin in page.folder.glob("*.py"):
        load_plugin(plugin)
    try:
        check_recipe([file])
    except BottegaError as error:
        raise AssertionError(f"{where}: {error}") from None


# What the pages say about the code is what the code says.


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{relative(path)} links to {target}"
        if anchor:
            assert anchor in anchors_of(there), f"{relative(path)} links to {target}; {file} has no such heading"


def anchors_of(path: Path) -> set[str]:
    """The anchors that a reader such as GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", cli.VERBS)
def test_a_verb_has_a_page_with_all_its_options(name: str) -> None:
    text = (ROOT / "docs" / "verbs" / f"{name}.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    cli.VERBS[name].add_arguments(parser)
    options = [action.option_strings for action in parser._actions if action.option_strings and action.dest != "help"]
    missing = [names[0] for names in options if not any(f"`{name}" in text for name in names)]
    assert not missing, f"docs/verbs/{name}.md does not mention {', '.join(missing)}"
    assert f"verbs/{name}.md" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_every_exit_code_is_in_the_table() -> None:
    text = (ROOT / "docs" / "resume.md").read_text(encoding="utf-8")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BottegaError)]
    for code in {0, 85, 130, 143, *(kind.code for kind in kinds)}:
        assert f"\n| {code} |" in text, f"docs/resume.md lacks exit code {code}"


@pytest.mark.parametrize("size", DOCUMENTED_PARAMETERS)
def test_the_table_of_sizes_is_counted(size: str) -> None:
    shape = shape_for_size(size, vocab_size=DOCUMENTED_PARAMETERS[size][0])
    numbers = (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_size)
    numbers += (shape.intermediate_size, shape.context, shape.vocab_size, shape.num_parameters())
    row = f"| `{size}` | " + " | ".join(f"{number:,}" for number in numbers) + " |"
    assert row in (ROOT / "docs" / "language.md").read_text(encoding="utf-8"), row
