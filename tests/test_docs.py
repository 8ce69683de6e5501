"""Every command and snippet of the documentation runs.

Each page of README.md, CONTRIBUTING.md and docs/ is run from top to bottom in a temporary folder with a small text,
`my.txt`, and the output of docs/images/samples.py. The language of a fence decides how its block is run:

- `bash`: each line is a command. `bottega ...` runs in this process through `bottega.cli.main` and must give exit code
  0, or the code of a trailing comment such as `# exit 2`. `torchrun` on one machine is run in full. `ls`, `tail` and
  similar commands are run by a shell. Commands that cannot run here (`make`, `tensorboard`, several machines, GPUs)
  are checked instead: the make target exists, the recipe and settings after `-m bottega train` resolve.
- `python` is executed, with one namespace per page; if its first line is a comment such as `# mine.py`, it is saved
  under that name instead (`# mine.py, continued` appends to it) and becomes a plugin for later blocks.
- `yaml` must be a recipe or a part of one; if its first line is a comment such as `# mine.yaml`, it is also saved under
  that name for later commands.

To be fast, a command that trains is made small and otherwise unchanged: one narrow layer, one batch of validation, few
or short samples, and 4 steps unless its line sets the number (SMALLER, below; keys set by the line take precedence);
so are its dependencies. `evaluate` draws 24 samples. A recipe for GPUs is only validated against its schema;
tests/test_recipes.py trains its small form. Preparing data takes seconds, so pages share one cache.
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
SMALLER_DEPENDENCY = {"training.max_steps": 4, "training.batch_size": 16, "evaluation.max_batches": 1}
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
    """State shared by the blocks of one page."""

    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "docs"})


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read_blocks(path: Path) -> list[Block]:
    blocks: list[Block] = []
    inside: tuple[int, str, list[str]] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.fullmatch(r"\s*```(\w*)\s*", line)
        if fence and inside is None:
            inside = (number, fence[1], [])
        elif fence and inside is not None:
            start, kind, lines = inside
            blocks.append(Block(start, kind, textwrap.dedent("\n".join(lines)) + "\n"))
            inside = None
        elif inside is not None:
            inside[2].append(line)
    assert inside is None, f"{path.name}: the fence of line {inside and inside[0]} is not closed"
    return blocks


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
    [pytest.param(p, marks=() if relative(p) in SHORT_PAGES else pytest.mark.slow) for p in PAGES if read_blocks(p)],
    ids=relative,
)
def test_commands_and_snippets_of_a_page_run(path: Path, page: Page) -> None:
    for block in read_blocks(path):
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
            assert block.kind in ("text", "json"), f"{where}: a block of kind {block.kind!r}; use bash, python or text"


def run_line(line: str, where: str) -> None:
    comment = re.search(r"#\s*exit (\d+)\s*$", line)
    expected = int(comment[1]) if comment else 0
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)  # such as OMP_NUM_THREADS=1, which the fixture sets
    program, rest = words[0], words[1:]
    if program == "bottega":
        code, output = run_bottega(rest)
        assert code == expected, f"{where}: {line}\nexit code {code}, expected {expected}\n{output}"
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), (
            f"{where}: no target {rest[0]}"
        )
    elif program in SHELL:
        subprocess.run(["bash", "-c", line], check=True, capture_output=True)
    elif program in ("torchrun", "accelerate"):
        check_launcher(program, rest, line, where)
    elif program == "python" and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).is_file(), f"{where}: no file {rest[0]}"
    else:
        assert program in NOT_RUN, f"{where}: {program} is neither run nor listed in NOT_RUN"


def run_bottega(arguments: list[str]) -> tuple[int, str]:
    """Run a `bottega` line in its small form, with support for `> file`."""
    target = None
    if ">" in arguments:
        index = arguments.index(">")
        arguments, target = arguments[:index], arguments[index + 1]
    verb, rest = arguments[0], arguments[1:]
    if verb == "train" and set(rest) & set(FOR_GPUS):
        resolve_recipe(rest)  # validated only; training needs a GPU
        return 0, ""
    if verb == "train" or (verb == "inspect" and not Path(rest[0]).is_dir()):
        rest = [*rest, *small_overrides(rest)]
    elif verb == "verify-resume":
        rest = [*rest, *(s for s in small_overrides(rest) if not s.startswith("training."))]
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
    """Return whether one of the arguments is a run that generates samples."""
    files = [Path(word) / "recipe.yaml" for word in rest]
    tasks = [check_recipe([file]).recipe.task for file in files if file.is_file()]
    return any(task in ("image", "audio", "video") for task in tasks)


def small_overrides(arguments: list[str]) -> list[str]:
    text = " ".join(arguments)
    recipe = resolve_recipe(arguments)
    settings = {**SMALLER, **SMALLER_BY_TASK.get(recipe.task, {})}
    settings |= {key: json.dumps(value) for key, value in small_dependency_settings(recipe).items()}
    if recipe.task in ("image", "audio", "video") and recipe.data.train.kind == "embedded":
        settings["data.validation.split"] = "0.02"  # the held-out data is evaluated in full, and Griffin-Lim is slow
    return [
        f"{key}={value}"
        for key, value in settings.items()
        if key not in text and f"--{key.rpartition('.')[2]}" not in text
    ]


def small_dependency_settings(recipe: Recipe) -> dict[str, Any]:
    """Return small settings for the dependencies of a recipe, recursively."""
    result = {}
    for name, dependency in recipe.needs.items():
        if dependency.recipe is not None:
            inner = small_dependency_settings(check_recipe([dependency.recipe]).recipe)
            result[f"needs.{name}.settings"] = {**SMALLER_DEPENDENCY, **inner}
    return result


def resolve_recipe(arguments: list[str]) -> Recipe:
    """Resolve the recipe of a command line, without the options of the verb."""
    verb_options = (*OPTIONS, *WITH_VALUE)
    settings = [
        word
        for i, word in enumerate(arguments)
        if word not in verb_options and arguments[max(0, i - 1)] not in WITH_VALUE
    ]
    return check_recipe(*parse_overrides(settings)).recipe


def check_launcher(program: str, arguments: list[str], line: str, where: str) -> None:
    index = arguments.index("bottega")
    assert arguments[index - 1] == "-m", f"{where}: a rank is started with -m bottega"
    verb, *rest = arguments[index + 1 :]
    if program == "accelerate" or "--nnodes" in arguments:
        resolve_recipe(rest)
        return
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *arguments[: index + 1],
        verb,
        *rest,
        *small_overrides(rest),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0, f"{where}: {line}\n{done.stdout}{done.stderr}"


def run_python(block: Block, path: Path, page: Page) -> None:
    if named := re.match(r"#\s*([\w.-]+\.py)(, continued)?\s*\n", block.text):
        file = page.folder / named[1]
        before = file.read_text(encoding="utf-8") if named[2] else ""
        file.write_text(before + block.text, encoding="utf-8")
        return
    # Leading empty lines, so that a traceback has the line number of the page.
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


# Statements about the code.


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{relative(path)} links to {target}"
        if anchor:
            assert anchor in list_anchors(linked), f"{relative(path)} links to {target}; {file} has no such heading"


def list_anchors(path: Path) -> set[str]:
    """Return the anchors of headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", cli.VERBS)
def test_verb_page_lists_all_options(name: str) -> None:
    text = (ROOT / "docs" / "verbs" / f"{name}.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser()
    cli.VERBS[name].add_arguments(parser)
    options = [action.option_strings for action in parser._actions if action.option_strings and action.dest != "help"]
    missing = [names[0] for names in options if not any(f"`{name}" in text for name in names)]
    assert not missing, f"docs/verbs/{name}.md does not mention {', '.join(missing)}"
    assert f"verbs/{name}.md" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "resume.md").read_text(encoding="utf-8")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BottegaError)]
    for code in {0, 85, 130, 143, *(kind.code for kind in kinds)}:
        assert f"\n| {code} |" in text, f"docs/resume.md lacks exit code {code}"


@pytest.mark.parametrize("size", DOCUMENTED_PARAMETERS)
def test_table_of_sizes_matches_the_models(size: str) -> None:
    shape = shape_for_size(size, vocab_size=DOCUMENTED_PARAMETERS[size][0])
    numbers = (shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_size)
    numbers += (shape.intermediate_size, shape.context, shape.vocab_size, shape.num_parameters())
    row = f"| `{size}` | " + " | ".join(f"{number:,}" for number in numbers) + " |"
    assert row in (ROOT / "docs" / "language.md").read_text(encoding="utf-8"), row
