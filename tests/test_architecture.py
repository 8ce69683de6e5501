"""The structure of the package: import contracts, framework-free modules, file sizes, private names."""

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
REFERENCE = re.compile(r'"(bottega(?:\.(?:\w+|\{framework\}))+):([\w.]+)"')
"""A function or class by name, as in `ModelSpec` and the table of engines; of each framework, if it says so."""
MAX_FILE_LINES = 400
MAX_CORE_LINES = 1800


def list_modules(*packages: str) -> list[str]:
    """Return every module of these packages, listed from disk without importing them."""
    names = []
    for package in packages:
        names.append(f"bottega.{package}")
        folder = [str(PACKAGE / package)]
        names += [module.name for module in pkgutil.walk_packages(folder, f"bottega.{package}.")]
    return names


def count_lines(path: Path) -> int:
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
    """Import contracts cover our own imports; this also covers what third-party packages import."""
    modules = ["bottega", "bottega.cli", *list_modules(*FRAMEWORK_FREE)]
    code = (
        f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
        "print(sorted({'torch', 'jax', 'flax', 'transformers', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_starts_with_a_docstring(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), "the module has no docstring"
    assert text.startswith('"""'), "the docstring is not the first line"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_file_is_not_too_long(path: Path) -> None:
    assert count_lines(path) <= MAX_FILE_LINES, "split it into two files"


def test_core_stays_small() -> None:
    assert sum(count_lines(path) for path in (PACKAGE / "core").glob("*.py")) < MAX_CORE_LINES


def test_there_are_no_utils_modules() -> None:
    forbidden = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert not [relative(path) for path in FILES if path.name in forbidden]


def test_only_one_module_writes_to_the_terminal() -> None:
    """`bottega.terminal` escapes control characters and survives a closed console."""
    writers = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            imported = node.module if isinstance(node, ast.ImportFrom) else ""
            if called in ("print", "sys.stderr.write", "sys.stdout.write") or imported == "rich.console":
                writers.append(relative(path))
    assert set(writers) <= {"terminal.py"}, "use bottega.terminal"


# Private names

FOREIGN_PRIVATE = {"_actions", "_fingerprint", "_indices", "_parameters", "_modules", "_from_config"}
"""Private names of argparse, datasets, torch and transformers without a public alternative."""
NAMEDTUPLE_METHODS = {"_replace", "_asdict", "_fields", "_make"}


def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def list_private_names(tree: ast.AST) -> set[str]:
    """Return the private functions, classes and attributes that a file defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return set(filter(is_private, names))


def list_foreign_modules(tree: ast.AST) -> set[str]:
    """Return the names under which a file imports third-party packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names - {"bottega"}


def find_private_uses(path: Path) -> list[str]:
    """Return private attributes of foreign objects that a file uses, and private names that it imports."""
    tree = parse_file(path)
    own, foreign = list_private_names(tree), list_foreign_modules(tree)
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bottega"):
            names += [f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)]
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        owner = ast.unparse(node.value)
        is_engine = owner.rpartition(".")[2].endswith("engine") and "engines" not in path.parts
        is_foreign = owner.partition(".")[0] in foreign or node.attr in FOREIGN_PRIVATE | NAMEDTUPLE_METHODS
        if is_engine or not (owner in ("self", "cls", "super()") or node.attr in own or is_foreign):
            names.append(f"{owner}.{node.attr}")
    return names


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_private_names_are_not_used_by_other_files(path: Path) -> None:
    assert find_private_uses(path) == [], "give it a public name, or use the public interface"


OUTSIDE_ENGINES = [path for path in FILES if "engines" not in path.relative_to(PACKAGE).parts]


@pytest.mark.parametrize("path", OUTSIDE_ENGINES, ids=relative)
def test_engines_are_used_through_their_interface(path: Path) -> None:
    """Neither by a lazy import, for types, nor by a string."""
    text = path.read_text(encoding="utf-8")
    assert "TorchEngine" not in text, "use bottega.core.engine.Engine"
    assert "engines.torch" not in text, "open it by bottega.engines.backend"
    for node in ast.walk(parse_file(path)):
        if isinstance(node, ast.ImportFrom) and node.module == "bottega.engines":
            assert "torch" not in {alias.name for alias in node.names}, "open it by bottega.engines.backend"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_references_in_strings_resolve(path: Path) -> None:
    for module, name in REFERENCE.findall(path.read_text(encoding="utf-8")):
        for framework in ("torch", "jax") if "{framework}" in module else ("",):
            operator.attrgetter(name)(importlib.import_module(module.format(framework=framework)))


def test_only_storage_renames_and_syncs_files() -> None:
    """Atomic writes (temporary name, fsync, rename) are implemented once, in storage/."""
    reserved = {
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
            # Path.rename and Path.replace take one argument, str.replace takes two.
            moves = called.endswith((".rename", ".replace")) and len(node.args) == 1 and not node.keywords
            if called in reserved or moves or (isinstance(node, ast.Constant) and str(node.value).startswith(".tmp")):
                callers.append(relative(path))
    assert {path for path in callers if not path.startswith("storage/")} == set(), "use bottega.storage.durable"


def list_imports(path: Path, modules: set[str]) -> set[str]:
    """Return the modules that a file imports at import time, without those for types only."""

    def walk(node: ast.AST) -> set[str]:
        names: set[str] = set()
        for child in ast.iter_child_nodes(node):
            is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if is_for_types or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(child, ast.ImportFrom) and (child.module or "").startswith("bottega"):
                full_names = [f"{child.module}.{alias.name}" for alias in child.names]
                names |= {name if name in modules else str(child.module) for name in full_names}
            names |= walk(child)
        return names

    return walk(parse_file(path))


def test_there_are_no_import_cycles() -> None:
    names = {relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in FILES}
    modules = {f"bottega.{name}": path for name, path in names.items() if name != "__init__"}
    remaining = {name: (list_imports(path, {*modules}) & {*modules}) - {name} for name, path in modules.items()}
    while True:
        leaves = {name for name, needs in remaining.items() if not needs & {*remaining}}
        if not leaves:
            break
        remaining = {name: needs for name, needs in remaining.items() if name not in leaves}
    assert not remaining, "import cycle"
