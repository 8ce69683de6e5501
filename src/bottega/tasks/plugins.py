"""Plugins: tasks from files that the command line names, and from installed packages with an entry point.

Code is loaded because `--plugin` or an installed package says so, never because a recipe or a checkpoint does. A run
records the name and the hash of its plugin, so that a message can name it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from bottega.config.recipe import Recipe
from bottega.config.task_spec import TaskSpec
from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.tasks.registry import TASKS
from bottega.terminal import print_notice

ENTRY_POINT_GROUP = "bottega.tasks"
FLAG = "--plugin"
RECORD_KEY = "plugin"
"""Key in environment.json of a run: the plugin that defines its task."""


@dataclass(frozen=True)
class Plugin:
    """A Python file or an installed package that defines tasks."""

    name: str
    """Name of the file without its suffix, or name and version of the package."""
    sha256: str
    """Hash of the file, or of the module that the entry point names."""
    path: str | None = None
    """Absolute path of the file; None for an installed package."""


_LOADED: dict[str, Plugin] = {}
"""Task -> the plugin that defines it."""


def load_plugin_flags(words: Sequence[str]) -> list[str]:
    """Load each `--plugin FILE` of a command line; return the remaining words."""
    other_words: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            return [*other_words, word, *remaining]
        if word == FLAG:
            if not remaining:
                _raise_missing_file()
            load_plugin(remaining.pop(0) or _raise_missing_file())
        elif word.startswith(f"{FLAG}="):
            load_plugin(word.removeprefix(f"{FLAG}=") or _raise_missing_file())
        else:
            other_words.append(word)
    return other_words


def _raise_missing_file() -> NoReturn:
    raise UsageError(f"{FLAG} needs a file, such as {FLAG} my_task.py")


def build_plugin_flags() -> list[str]:
    """Return the flags that load the same plugins in another `bottega` process: a fold, a dependency, a trial."""
    files = dict.fromkeys(plugin.path for plugin in _LOADED.values() if plugin.path is not None)
    return [word for path in files for word in (FLAG, path)]


def quote_plugin_flags() -> str:
    """Return the flags of `build_plugin_flags` quoted for a shell, for commands shown to the user."""
    return "".join(f" {word}" for word in map(shlex.quote, build_plugin_flags()))


def build_bottega_command(words: Sequence[str]) -> list[str]:
    """Return the command line of another `bottega` process with the plugins of this one."""
    return [sys.executable, "-m", "bottega", *words, *build_plugin_flags()]


def load_plugin(file: str | Path) -> list[str]:
    """Import a file and add its tasks (`TASK`, or several in `TASKS`) to the registry; return their names."""
    path = Path(file).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist" if not path.exists() else "is not a Python file"
        raise UsageError(f"{FLAG} {file}: {problem}; give a .py file that defines TASK")
    loaded = [task for task, plugin in _LOADED.items() if plugin.path == str(path)]
    if loaded:
        return loaded
    return _register_tasks(_import_file(path, given_path=str(file)), Plugin(path.stem, _hash_file(path), str(path)))


def load_installed() -> None:
    """Add the tasks of installed packages. One that cannot be loaded is reported and left out: other tasks do not need it."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        package = point.dist.name if point.dist is not None else point.value
        try:
            loaded = point.load()
            module = sys.modules[point.module]
            file = getattr(module, "__file__", None)
            version = f" {point.dist.version}" if point.dist is not None else ""
            plugin = Plugin(f"{package}{version}", _hash_file(Path(file)) if file is not None else "")
            _register_tasks(loaded, plugin)
        except Exception as error:
            print_notice(f"bottega: the installed plugin {package} is left out: {type(error).__name__}: {error}")


def build_plugin_record(recipe: Recipe, run: Path, *, has_begun: bool) -> dict[str, str] | None:
    """Return the plugin of a run's task as recorded when the run started; None for a bundled task."""
    plugin = _LOADED.get(recipe.task)
    if plugin is None:
        return None
    recorded = _read_record(run) if has_begun else {}
    return recorded or {key: value for key, value in asdict(plugin).items() if value is not None}


def describe_plugin_error(error: BaseException) -> str | None:
    """Return a message that locates an error in a plugin; None if no plugin file is loaded."""
    files = {plugin.path: plugin.name for plugin in _LOADED.values() if plugin.path is not None}
    location, trace = None, error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in files:
            location = f"{Path(code.co_filename).name}, line {trace.tb_lineno}, in {code.co_name}"
        trace = trace.tb_next
    text = " ".join(str(error).split())
    if location is not None:
        return f"plugin {location}: {type(error).__name__}: {text} (--debug shows more)"
    if files:
        names = ", ".join(files.values())
        return f"an error in the plugin {names} or in bottega: {type(error).__name__}: {text} (--debug shows where)"
    return None


def describe_plugin_change(recipe: Recipe, run: Path) -> str | None:
    """Return a note if a run was started with another version of its plugin."""
    plugin, recorded = _LOADED.get(recipe.task), _read_record(run)
    if plugin is None or recorded.get("sha256") in (None, plugin.sha256):
        return None
    return f"the plugin {plugin.name} has changed since this run began; its results may differ"


def describe_missing_plugin(run: Path) -> str | None:
    """Return how to load the plugin of a run; None if its task is a bundled one."""
    recorded = _read_record(run)
    name = recorded.get("name")
    if name is None:
        return None
    if "path" not in recorded:
        return f"its task came from the installed package {name}; install it again"
    return f"its task came from the plugin {name}.py; give it again: {FLAG} {recorded['path']}"


def is_plugin_loaded(run: Path) -> bool:
    """Return whether the plugin of a run is loaded, in any version."""
    return any(plugin.name == _read_record(run).get("name") for plugin in _LOADED.values())


def _read_record(run: Path) -> dict[str, Any]:
    try:
        recorded = json.loads((run / "environment.json").read_bytes())[RECORD_KEY]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return recorded if isinstance(recorded, dict) else {}


def _import_file(path: Path, *, given_path: str) -> ModuleType:
    """Import a file by its own name and folder, so that data loader processes can unpickle its classes."""
    name = path.stem
    if not name.isidentifier():
        raise UsageError(f"{FLAG} {given_path}: {name} is not a name that Python can import; rename the file")
    conflicting_file = _find_conflicting_module(name, path)
    if conflicting_file is not None:
        raise UsageError(f"{FLAG} {given_path}: there is another module {name} ({conflicting_file}); rename the file")
    # In front, as Python puts the folder of a script: this file wins over others of the same name.
    sys.path.insert(0, str(path.parent))
    importlib.invalidate_caches()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # standard output is for results
            return importlib.import_module(name)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        line = _describe_line(error, path)
        raise EnvironmentProblem(f"{FLAG} {given_path}{line}: {type(error).__name__}: {error}") from error


def _find_conflicting_module(name: str, path: Path) -> str | None:
    """Return the file of another module of this name, loaded or importable; None if there is none."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
        return (file or "part of Python") if file is None or Path(file).resolve() != path else None
    if name in sys.stdlib_module_names:
        return "part of Python"
    spec = importlib.util.find_spec(name)
    installed = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")]
    if spec is None or spec.origin is None:
        return None
    return spec.origin if any(Path(spec.origin).resolve().is_relative_to(folder) for folder in installed) else None


def _describe_line(error: BaseException, path: Path) -> str:
    """Return ", line N" for the innermost line of the file in the traceback, or an empty string."""
    line, trace = (
        getattr(error, "lineno", None) if getattr(error, "filename", None) == str(path) else None,
        error.__traceback__,
    )
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f", line {line}" if line is not None else ""


def _register_tasks(loaded: Any, plugin: Plugin) -> list[str]:
    """Register the tasks of a module, or the TaskSpecs that an entry point names; return their names."""
    exported = getattr(loaded, "TASKS", getattr(loaded, "TASK", None)) if isinstance(loaded, ModuleType) else loaded
    candidates = list(exported) if isinstance(exported, list | tuple) else [exported]
    specs = [spec for spec in candidates if isinstance(spec, TaskSpec)]
    if not specs or len(specs) < len(candidates):
        raise UsageError(f"plugin {plugin.name} defines no task; set TASK = TaskSpec(...), or TASKS to a list of them")
    TASKS.add(*specs, plugin=plugin.name)
    _LOADED.update({spec.name: plugin for spec in specs})
    return [spec.name for spec in specs]


def _hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
