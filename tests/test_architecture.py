"""The tree keeps its shape: imports point down, the light parts stay light, and files stay readable."""

from __future__ import annotations

import ast
import importlib
import operator
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bottega

PACKAGE = Path(bottega.__file__).parent
ROOT = PACKAGE.parents[1]
FILES = sorted(PACKAGE.rglob("*.py"))
FRAMEWORK_FREE = ("storage", "core", "config", "data")
REFERENCE = re.compile(r'"(bottega(?:\.\w+)+):([\w.]+)"')
"""A function or class by name, as `ModelSpec` and the table of engines have it."""
LONGEST_FILE = 400
LARGEST_CORE = 1800


def names_of(*packages: str) -> list[str]:
    """Every module of these packages, found on disk and not by importing them."""
    found = []
    for package in packages:
        found.append(f"bottega.{package}")
        folder = [str(PACKAGE / package)]
        found += [module.name for module in pkgutil.walk_packages(folder, f"bottega.{package}.")]
    return found


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_the_import_contracts_hold() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    if not program.exists():
        pytest.skip("import-linter is not installed; pip install 'bottega[dev]'")
    done = subprocess.run([program, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_light_modules_load_no_framework() -> None:
    """The contracts see our own imports; this sees also what a third-party package would drag in."""
    modules = ["bottega", "bottega.cli", *names_of(*FRAMEWORK_FREE)]
    code = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        "print(sorted({'torch', 'jax', 'flax', 'transformers', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_file_says_its_idea_in_its_first_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "the module has no docstring"
    assert text.startswith('"""'), "the docstring is not the first line"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    assert lines_of(path) <= LONGEST_FILE, "look for the second idea in it"


def test_core_stays_small() -> None:
    assert sum(lines_of(path) for path in (PACKAGE / "core").glob("*.py")) < LARGEST_CORE


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    drawers = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert not [relative(path) for path in FILES if path.name in drawers]


def test_only_one_module_writes_to_the_terminal() -> None:
    """It escapes what comes from outside, and outlives a console that is gone; a rich console of one's own does neither."""
    writers = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            imported = node.module if isinstance(node, ast.ImportFrom) else ""
            if called in ("print", "sys.stderr.write", "sys.stdout.write") or imported == "rich.console":
                writers.append(relative(path))
    assert set(writers) <= {"terminal.py"}, "use bottega.terminal"


# Nothing reaches through

OTHERS_PRIVATE = {"_actions", "_fingerprint", "_indices", "_parameters", "_modules", "_from_config"}
"""Of argparse, datasets, torch and transformers, which have no public name for it."""
OF_TUPLES = {"_replace", "_asdict", "_fields", "_make"}


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(tree: ast.AST) -> set[str]:
    """What a file calls by a name with an underscore because it is its own: functions, methods and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return set(filter(is_private, names))


def foreign_modules(tree: ast.AST) -> set[str]:
    """The names under which a file has packages of others."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names - {"bottega"}


def reached_through(path: Path) -> list[str]:
    """Private attributes of objects that a file has from elsewhere, and private names that it imports."""
    tree = tree_of(path)
    own, foreign = private_names(tree), foreign_modules(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bottega"):
            found += [f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)]
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        of = ast.unparse(node.value)
        is_engine = of.rpartition(".")[2].endswith("engine") and "engines" not in path.parts
        is_theirs = of.partition(".")[0] in foreign or node.attr in OTHERS_PRIVATE | OF_TUPLES
        if is_engine or not (of in ("self", "cls", "super()") or node.attr in own or is_theirs):
            found.append(f"{of}.{node.attr}")
    return found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nobody_touches_what_is_private_to_another(path: Path) -> None:
    assert reached_through(path) == [], "give it a public name, or ask for what you need of it"


OUTSIDE_ENGINES = [path for path in FILES if "engines" not in path.relative_to(PACKAGE).parts]


@pytest.mark.parametrize("path", OUTSIDE_ENGINES, ids=relative)
def test_an_engine_is_known_by_its_interface_alone(path: Path) -> None:
    """Lazily or not, for types or not, by an import or by a string."""
    text = path.read_text(encoding="utf-8")
    assert "TorchEngine" not in text, "use bottega.core.engine.Engine"
    assert "engines.torch" not in text, "open it by bottega.engines.backend"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "bottega.engines":
            assert "torch" not in {alias.name for alias in node.names}, "open it by bottega.engines.backend"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_what_a_spec_names_is_there(path: Path) -> None:
    for module, name in REFERENCE.findall(path.read_text(encoding="utf-8")):
        operator.attrgetter(name)(importlib.import_module(module))


def test_only_one_module_renames_and_flushes() -> None:
    """A temporary name, a flush and a rename is what makes a file whole or not there; storage/ does that for everybody."""
    alone = {
        "os.rename",
        "os.replace",
        "os.fsync",
        "os.sync",
        "tempfile.mkstemp",
        "tempfile.mkdtemp",
        "NamedTemporaryFile",
    }
    callers = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            # Of a path, .rename(x) and .replace(x) take one argument; of a text, replace takes two.
            moves = called.endswith((".rename", ".replace")) and len(node.args) == 1 and not node.keywords
            if called in alone or moves or (isinstance(node, ast.Constant) and str(node.value).startswith(".tmp")):
                callers.append(relative(path))
    assert {path for path in callers if not path.startswith("storage/")} == set(), "use bottega.storage.durable"


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Which of the modules importing a file imports: not what its functions import, nor what only types need."""

    def walk(node: ast.AST) -> set[str]:
        found: set[str] = set()
        for child in ast.iter_child_nodes(node):
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if is_for_types or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("bottega"):
                named = [f"{child.module}.{alias.name}" for alias in child.names]
                found |= {name if name in modules else str(child.module) for name in named}
            found |= walk(child)
        return found

    return walk(tree_of(path))


def test_no_module_imports_itself_through_others() -> None:
    names = {relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in FILES}
    modules = {f"bottega.{name}": path for name, path in names.items() if name != "__init__"}
    left = {name: (imported_modules(path, {*modules}) & {*modules}) - {name} for name, path in modules.items()}
    while True:
        leaves = {name for name, needs in left.items() if not needs & {*left}}
        if not leaves:
            break
        left = {name: needs for name, needs in left.items() if name not in leaves}
    assert not left, "these import each other"
