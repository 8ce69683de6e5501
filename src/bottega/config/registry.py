"""The registry of tasks, which is passed to the recipe loader so that it imports no task itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from bottega.config.layers import FlatConfig
from bottega.config.recipe import Recipe
from bottega.config.schema_keys import has_key
from bottega.config.task_spec import TaskSpec
from bottega.core.errors import UsageError


class TaskRegistry(Mapping[str, TaskSpec]):
    """Name -> task, in the order of addition."""

    def __init__(self, specs: Iterable[TaskSpec] = (), *, discover: Callable[[], None] | None = None) -> None:
        """`discover` adds the tasks of installed plugin packages. It searches all installed packages, so it is called only for
        an unknown name or key."""
        self._specs: dict[str, TaskSpec] = {}
        self._discover = discover
        self.add(*specs)

    def __getitem__(self, name: str) -> TaskSpec:
        if name not in self._specs:
            self.discover()
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def discover(self) -> None:
        """Add the tasks of installed packages, once."""
        discover, self._discover = self._discover, None
        if discover is not None:
            discover()

    def add(self, *specs: TaskSpec, plugin: str | None = None) -> None:
        """Add tasks; `plugin` is the file or package they come from. Raises UsageError for a name that is taken."""
        for spec in specs:
            _check_schemas(spec)
            existing = self._specs.get(spec.name)
            if existing is not None:
                owner = f"the plugin {existing.plugin}" if existing.plugin is not None else "Bottega itself"
                raise UsageError(f"task {spec.name}: {owner} has a task of this name; rename the one of {plugin}")
            self._specs[spec.name] = replace(spec, plugin=plugin)

    @property
    def schemas(self) -> tuple[type[Recipe], ...]:
        """The schemas of all tasks."""
        return tuple(schema for spec in self.values() for schema in spec.schemas.values())

    def get_schema(self, task: str, flat: FlatConfig) -> type[Recipe]:
        """Return the schema of a task for the `data.input` in `flat`."""
        spec = self[task]
        input_name = flat["data.input"].value if "data.input" in flat else None
        return spec.inputs.get(str(input_name), spec.recipe)

    def find_input_with_key(self, task: str, schema: type[Recipe], key: str) -> str | None:
        """Return a data.input whose schema has `key`, for a key that `schema` does not have."""
        candidates = self[task].inputs.items()
        return next((name for name, other in candidates if other is not schema and has_key(key, other)), None)


def _check_schemas(spec: TaskSpec) -> None:
    """Refuse a task whose schemas are not subclasses of Recipe, or whose `task` field defaults to another name."""
    for schema in spec.schemas.values():
        if not (isinstance(schema, type) and issubclass(schema, Recipe)):
            raise UsageError(
                f"task {spec.name}: its recipe must be a subclass of bottega.plugin.Recipe, got {schema!r}"
            )
        if schema.model_fields["task"].default != spec.name:
            line = f'task: Literal["{spec.name}"] = Field("{spec.name}", description="...")'
            raise UsageError(f"task {spec.name}: {schema.__name__} must declare its name: {line}")
