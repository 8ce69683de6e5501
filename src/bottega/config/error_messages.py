"""Error messages for values that do not fit the schema: location, key as typed, expected and actual value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from bottega.config.aliases import resolve_alias
from bottega.config.layers import FlatConfig, Location, Problem
from bottega.config.schema_keys import suggest_key
from bottega.config.section import Section
from bottega.secret_names import is_secret_name
from bottega.similar_names import find_similar_names

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a block of keys",
    "model_type": "a block of keys",
    "model_attributes_type": "a block of keys",
}
_LIMITS = {
    "greater_than": ("gt", "a number above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "a number below"),
    "less_than_equal": ("le", "at most"),
}


def describe_validation_error(
    error: ValidationError, *, schema: type[Section], flat: FlatConfig, lines: Mapping[str, Location]
) -> list[Problem]:
    """Return one problem for each key; the alternatives of a union are joined into one sentence."""
    details_by_key: dict[str, list[Any]] = {}
    for detail in error.errors(include_url=False):
        details_by_key.setdefault(_find_key(detail, flat), []).append(detail)
    problems = []
    for key, details in details_by_key.items():
        has_inner_errors = any(other.startswith(key + ".") for other in details_by_key)
        if not (has_inner_errors and all(detail["type"] in ("too_short", "too_long") for detail in details)):
            problems.append(_build_problem(key, details, schema, flat, lines))
    return problems


def _find_key(detail: Any, flat: FlatConfig) -> str:
    """Return the dotted key of an error: its location without the names of union alternatives."""
    key = ""
    value: Any = None
    for part in detail["loc"]:
        child_key = f"{key}.{part}" if key else str(part)
        is_inside_value = isinstance(value, dict | list) and not isinstance(
            part, str if isinstance(value, list) else int
        )
        is_key = child_key in flat or any(other.startswith(child_key + ".") for other in flat)
        if not (is_key or is_inside_value or detail["type"] == "missing"):
            break
        value = flat[child_key].value if child_key in flat else _get_child(value, part)
        key = child_key
    return key


def _get_child(value: Any, part: str | int) -> Any:
    try:
        return value[part]
    except (TypeError, KeyError, IndexError):
        return None


def _build_problem(
    key: str, details: list[Any], schema: type[Section], flat: FlatConfig, lines: Mapping[str, Location]
) -> Problem:
    location, typed_key = locate_key(key, flat, lines)
    if details[0]["type"] == "extra_forbidden":
        return _build_unknown_key_problem(key, location, typed_key, schema)
    return Problem(location, typed_key, describe_error_details(details), key)


def locate_key(key: str, flat: FlatConfig, lines: Mapping[str, Location]) -> tuple[Location | None, str]:
    """Return the location of a key and the key as typed; for a block, the line where it starts."""
    if key in flat:
        return flat[key].location, flat[key].typed_key
    ancestor = key
    while "." in ancestor:
        ancestor, _, _ = ancestor.rpartition(".")
        if ancestor in flat:
            entry = flat[ancestor]
            typed_key = entry.typed_key + key.removeprefix(ancestor)
            return _find_nearest_line(typed_key, lines, entry.location), typed_key
    inner_entries = [entry for other, entry in flat.items() if other.startswith(key + ".")]
    # A key that was changed on the command line is more likely wrong than the file.
    command_line_entry = next((entry for entry in inner_entries if not entry.location.line), None)
    if key in lines and command_line_entry is None:
        return lines[key], key
    inner_entry = command_line_entry or next(iter(inner_entries), None)
    return (inner_entry.location if inner_entry else None), key


def _find_nearest_line(typed_key: str, lines: Mapping[str, Location], block_location: Location) -> Location:
    """Return the line of the closest enclosing key, because a missing key has no line of its own.

    Only lines of the file that sets the block count: `lines` may describe an earlier file, whose block was replaced.
    """
    while (typed_key not in lines or lines[typed_key].file != block_location.file) and "." in typed_key:
        typed_key = typed_key.rpartition(".")[0]
    return lines[typed_key] if typed_key in lines and lines[typed_key].file == block_location.file else block_location


SECRETS_HINT = "put secrets into environment variables, never into a recipe"


def _build_unknown_key_problem(key: str, location: Location | None, typed_key: str, schema: type[Section]) -> Problem:
    # The value is not shown, because it may be a secret.
    if is_secret_name(typed_key) or typed_key.rpartition(".")[2].lower() == "key":
        return Problem(location, typed_key, f"unknown key; {SECRETS_HINT}", key)
    if key == "model.activation":
        return Problem(location, typed_key, "unknown key; the activation of this model is fixed: remove it", key)
    similar_key = suggest_key(key, schema)
    if similar_key is None:
        return Problem(location, typed_key, "unknown key", key)
    suggested_key = similar_key if "." in similar_key or "." not in key else f"{key.rpartition('.')[0]}.{similar_key}"
    return Problem(
        location, typed_key, f"unknown key; did you mean {similar_key}?", next(iter(resolve_alias(suggested_key, 0)))
    )


def describe_error_details(details: list[Any]) -> str:
    """Return the message for the errors of one value: alternatives of a union are joined by "or", limits are named."""
    for detail in details:
        if detail["type"] in _LIMITS:
            name, words = _LIMITS[detail["type"]]
            return f"expected {words} {detail['ctx'][name]:g}, got {format_value(detail['input'])}"
    if len(details) == 1 and details[0]["type"] not in (*_EXPECTED, "literal_error"):
        return _describe_single_error(details[0])
    choices = [choice for detail in details if detail["type"] == "literal_error" for choice in _parse_choices(detail)]
    expected = list(dict.fromkeys(_EXPECTED[detail["type"]] for detail in details if detail["type"] in _EXPECTED))
    if choices:
        expected.append(f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0])
    if not expected:
        return _describe_single_error(details[0])
    value = details[0]["input"]
    similar_names = find_similar_names(str(value), choices)
    hint = (
        f"; did you mean {similar_names[0]}?"
        if similar_names
        else suggest_list_syntax(value)
        if expected == ["a list"]
        else ""
    )
    return f"expected {' or '.join(expected)}, got {format_value(value)}{hint}"


def suggest_list_syntax(value: Any) -> str:
    """Return a hint on how to write a list, for a value that is a single item or a map from indices to items."""
    if isinstance(value, dict):
        # `data.sources.0.path=x` is parsed as a block whose keys are numbers.
        is_numbered = bool(value) and all(str(key).isdecimal() for key in value)
        return "; give the whole list: [{…}, {…}]" if is_numbered else "; write [{…}]"
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"; write [{', '.join(part.strip() for part in str(value).split(','))}]"
    return ""


def _parse_choices(detail: Any) -> list[str]:
    """Parse pydantic's `'a', 'b' or 'c'` into names."""
    return [choice.strip("'") for choice in re.split(r", | or ", detail["ctx"]["expected"])]


def format_shape_error(error: ValidationError, *, keys_by_field: Mapping[str, str] | None = None) -> str:
    """Return the first problem of a model's shape with its recipe key, as "model.KEY: message".

    `keys_by_field` has the fields of the shape whose recipe keys have other names. The message of a validator of the whole
    shape has no location; it begins with the name of a field.
    """
    detail, keys_by_field = error.errors()[0], keys_by_field or {}
    message = detail["msg"].removeprefix("Value error, ")
    for field, key in keys_by_field.items():
        message = re.sub(rf"\b{field}\b", key, message)
    if not detail["loc"]:
        return f"model.{message}"
    field = ".".join(map(str, detail["loc"]))
    return f"model.{keys_by_field.get(field, field)}: {message}, got {format_value(detail['input'])}"


def _describe_single_error(detail: Any) -> str:
    if detail["type"] == "missing":
        return "missing"
    if detail["type"] in ("too_short", "too_long"):
        words = "at least" if detail["type"] == "too_short" else "at most"
        limit = detail["ctx"].get("min_length", detail["ctx"].get("max_length"))
        return f"expected a list of {words} {limit}, got {format_value(detail['input'])}"
    error = detail.get("ctx", {}).get("error")
    return str(error) if error is not None else str(detail["msg"])


def format_value(value: Any) -> str:
    """Return a value as a recipe would write it, shortened to 60 characters."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    if isinstance(value, dict):
        return "a block of keys"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
