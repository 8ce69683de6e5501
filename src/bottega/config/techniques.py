"""The `techniques` list of a recipe: names with options, validated by each technique's spec."""

from __future__ import annotations

from typing import Any

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_core import PydanticKnownError

from bottega.config.error_messages import describe_error_details
from bottega.config.section import Section
from bottega.config.technique_spec import TECHNIQUES, TechniqueSpec
from bottega.similar_names import find_similar_names

KEYS_FOR_NON_TECHNIQUES = {
    "curriculum": "data.curriculum",
    "mixture": "data.sources and data.mixture",
    "unfreeze": "training.unfreeze",
    "freeze": "training.freeze",
    "head": "training.freeze: [backbone]",
    "multitask": "task: multitask",
}
"""Name that other libraries list as a technique -> the recipe key that does it here."""


class Technique(Section):
    """A technique by name, with its options."""

    name: str = Field(description="name of the technique")
    options: SerializeAsAny[Section] | dict[str, Any] = Field(
        default_factory=dict, description="options of the technique", validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_name(cls, values: Any) -> Any:
        """Expand a bare name to a technique with default options."""
        values = {"name": values} if isinstance(values, str) else values
        if isinstance(values, dict) and (key := KEYS_FOR_NON_TECHNIQUES.get(str(values.get("name")))):
            raise ValueError(f"{values['name']} is not a technique; use {key} instead")
        return values

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value not in TECHNIQUES:
            *others, last = map(repr, TECHNIQUES)
            raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})
        return value

    @field_validator("options", mode="before")
    @classmethod
    def _validate_options(cls, value: Any, info: Any) -> Any:
        spec = TECHNIQUES.get(info.data.get("name"))
        if spec is None or not isinstance(value, dict):
            return value
        try:
            return spec.options.model_validate(_rename_options(spec, value))
        except ValidationError as error:
            raise ValueError(_describe_errors(error, spec.options)) from None


def _rename_options(spec: TechniqueSpec, options: dict[str, Any]) -> dict[str, Any]:
    """Replace the option names of peft and other libraries by ours."""
    renamed: dict[str, Any] = {}
    for typed_key, value in options.items():
        key = spec.option_aliases.get(typed_key, typed_key)
        if key in renamed and renamed[key] != value:
            raise ValueError(f"{typed_key}: {value!r} conflicts with {key}: {renamed[key]!r}; keep one")
        renamed[key] = value
    return spec.convert_options(renamed)


def _describe_errors(error: ValidationError, schema: type[Section]) -> str:
    """Return all problems of a technique's options in one line."""
    details: list[Any] = error.errors(include_url=False)
    combination_errors = [detail for detail in details if not detail["loc"]]
    if combination_errors:
        return str(combination_errors[0]["msg"]).removeprefix("Value error, ")
    unknown = [str(detail["loc"][0]) for detail in details if detail["type"] == "extra_forbidden"]
    first_details: dict[str, Any] = {}
    for detail in details:
        first_details.setdefault(str(detail["loc"][0]), detail)
    problems = [
        _describe_option_error(key, detail, schema) for key, detail in first_details.items() if key not in unknown
    ]
    return "; ".join([*problems, *([_describe_unknown_options(unknown, schema)] if unknown else [])])


def _describe_unknown_options(names: list[str], schema: type[Section]) -> str:
    similar = {name: match[0] for name in names if (match := find_similar_names(name, schema.model_fields))}
    if len(similar) == len(names):
        return ", ".join(f"{name}: unknown key; did you mean {similar[name]}?" for name in names)
    return f"{', '.join(names)}: unknown key{'s' if names[1:] else ''}; choose from {', '.join(schema.model_fields)}"


def _describe_option_error(key: str, detail: Any, schema: type[Section]) -> str:
    if detail["type"] == "missing":
        return f"{key}: missing ({schema.model_fields[key].description})"
    if detail["type"] == "tuple_type" and isinstance(detail["input"], str):
        return f"{key}: expected a list, got {detail['input']!r}; write [{detail['input']}]"
    return f"{key}: {describe_error_details([detail])}"
