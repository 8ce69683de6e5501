"""A scope for plugins: restores tasks, modules and the search path afterwards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from bottega.config.registry import TaskRegistry
from bottega.tasks import plugins
from bottega.tasks.registry import TASKS


@contextlib.contextmanager
def isolated() -> Iterator[TaskRegistry]:
    tasks, loaded, modules, path = dict(TASKS), dict(plugins._LOADED), set(sys.modules), list(sys.path)
    try:
        yield TASKS
    finally:
        for name in {plugin.name for plugin in plugins._LOADED.values() if plugin.path is not None} - modules:
            sys.modules.pop(name, None)
        for table, before in ((TASKS._specs, tasks), (plugins._LOADED, loaded)):
            table.clear()
            table.update(before)
        sys.path[:] = path
