"""The recipe schema as JSON Schema for editors, and as a commented recipe to start from."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, TypeAdapter
from pydantic.fields import FieldInfo

from bottega.config.registry import TaskRegistry
from bottega.config.schema_keys import get_section_type
from bottega.config.section import Section
from bottega.config.technique_spec import TECHNIQUES
from bottega.config.yaml_io import dump_yaml
from bottega.core.errors import UsageError


def build_json_schema(tasks: TaskRegistry) -> dict[str, Any]:
    """Return the JSON Schema of a recipe, one alternative for each task, for completion and validation in an editor."""
    tasks.discover()
    recipe_types = [_build_input_union(spec.inputs) if spec.inputs else spec.recipe for spec in tasks.values()]
    union: Any = Annotated[_build_union(recipe_types), Field(discriminator="task")]
    schema = TypeAdapter(union).json_schema(by_alias=True)
    schema["$defs"]["Technique"]["properties"]["name"]["enum"] = list(TECHNIQUES)
    for recipe in tasks.schemas:
        schema["$defs"][recipe.__name__]["properties"]["extends"] = {
            "type": "string",
            "description": "recipe to start from: a bundled name, or a path relative to this file",
        }
    for number, (task, spec) in enumerate(tasks.items()):
        if spec.inputs:
            # anyOf: a recipe without data.input may fit the schemas of several inputs, and a discriminator maps to one place.
            refs = [{"$ref": f"#/$defs/{recipe.__name__}"} for recipe in spec.inputs.values()]
            schema["$defs"][task] = {"anyOf": refs}
            schema["oneOf"][number] = {"$ref": f"#/$defs/{task}"}
            schema["discriminator"]["mapping"][task] = f"#/$defs/{task}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Bottega recipe", **schema}


def _build_input_union(schemas: Mapping[str, type[Section]]) -> Any:
    """Combine the schemas of a task, one for each data.input, in a union. The union is never used for validation, so its discriminator returns None."""
    tagged = [Annotated[schema, Tag(name)] for name, schema in schemas.items()]
    return Annotated[_build_union(tagged), Discriminator(lambda value: None)]


def _build_union(types: Sequence[Any]) -> Any:
    return functools.reduce(operator.or_, types[1:], types[0])


def render_recipe_template(tasks: TaskRegistry, task: str) -> str:
    """Return a recipe with every key, its default and its description. `task` may be task/input, such as classify/image."""
    tasks.discover()
    input_schemas = {f"{name}/{input}": schema for name, spec in tasks.items() for input, schema in spec.inputs.items()}
    schemas = {**{name: spec.recipe for name, spec in tasks.items()}, **input_schemas}
    if task not in schemas:
        hint = "to use a task of a plugin, add --plugin FILE"
        raise UsageError(f"task: expected one of {', '.join(schemas)}, got {task!r}; {hint}")
    initial_values = {"training.max_steps": 1000, **tasks[task.partition("/")[0]].init_values}
    lines = [f"# A recipe for the task {task} with the default of every key; leave out what you do not change.", ""]
    return "\n".join(lines + _render_block(schemas[task], schemas[task].model_validate({}), "", initial_values)) + "\n"


def _render_block(schema: type[Section], values: Section, prefix: str, initial_values: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    indent = "  " * prefix.count(".")
    plain_values = values.model_dump(mode="json", by_alias=True)
    for field, info in schema.model_fields.items():
        name = info.alias or field
        key, value = prefix + name, getattr(values, field)
        if key == "origin":
            continue
        if isinstance(value, Section):
            lines += [
                f"{indent}{name}:  # {info.description}",
                *_render_block(type(value), value, key + ".", initial_values),
            ]
        else:
            text = dump_yaml(initial_values.get(key, plain_values[name]), flow=True).strip()
            lines.append(f"{indent}{name}: {text}  # {_describe_field(info)}")
    return lines


def _describe_field(info: FieldInfo) -> str:
    """Return the description, and the keys of a block that is off by default."""
    inner = get_section_type(info.annotation)
    keys = f"; keys: {', '.join(inner.model_fields)}" if inner is not None else ""
    return f"{info.description}{keys}"
