"""What a block of a recipe is, and the kinds of values that stand in it."""

from __future__ import annotations

import codecs
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from bottega.config.credentials import strip_credentials_in_values


class Section(BaseModel):
    """A block: closed, frozen, each field with a description."""

    # Built when first used: of all tasks, a command needs one.
    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, coerce_numbers_to_str=True, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _strip_credentials(cls, values: Any) -> Any:
        """No recipe holds the credentials of an address, so nothing that is written from one does."""
        return strip_credentials_in_values(values) if isinstance(values, dict) else values


def _precision(value: Any) -> Any:
    if value is True:
        return "auto"
    return "fp32" if value is False or value == "no" else value


def _switch(value: Any) -> Any:
    words = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _frozen(value: Any) -> Any:
    return None if value == "none" else value


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _activation(value: Any) -> Any:
    return "silu" if value == "swish" else value


def _device(value: Any) -> Any:
    return "cuda" if isinstance(value, str) and value.lower() == "gpu" else value


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


def _label(value: Any) -> Any:
    """As the data has it: true is the class of that name, and 3.0 the class 3."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else value


def _encoding(value: str) -> str:
    try:
        return codecs.lookup(value).name
    except LookupError:
        raise ValueError(
            f"{value!r} is not an encoding that Python knows; latin-1, cp1252 and utf-16 are usual"
        ) from None


def _run_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", value, re.ASCII):
        raise ValueError(f"expected letters, digits, '-', '_' and '.', because it names a folder; got {value!r}")
    return value


# Strict, because Python counts True as 1: `batch_size: true` would be a batch of one.
Whole = Annotated[int, Strict()]
Positive = Annotated[int, Strict(), Field(gt=0)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Rate = Annotated[Number, Field(gt=0)]
Probability = Annotated[Number, Field(ge=0, le=1)]
Dropout = Annotated[Number, Field(ge=0, lt=1)]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], BeforeValidator(_device)]
Activation = Annotated[Literal["silu", "gelu", "relu"], BeforeValidator(_activation)]
Precision = Annotated[Literal["auto", "fp32", "bf16", "fp16"], BeforeValidator(_precision)]
AutoSwitch = Annotated[Literal["auto"] | bool, BeforeValidator(_switch)]
Scale = Annotated[Annotated[Number, Field(ge=0)] | None, BeforeValidator(_frozen)]
Mode = Literal["min", "max"]
Level = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)]
Collection = Annotated[Literal["flickr", "pog", "ser"], BeforeValidator(_lower)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Label = Annotated[str, BeforeValidator(_label)]
Encoding = Annotated[str, AfterValidator(_encoding)]
RunName = Annotated[str, AfterValidator(_run_name)]
