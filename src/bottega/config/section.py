"""The base class of recipe sections, and the types of their values."""

from __future__ import annotations

import codecs
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, model_validator

from bottega.config.credentials import strip_credentials_in_values
from bottega.redaction import redact_values


class Section(BaseModel):
    """A section of a recipe: closed, frozen, with a description for each field."""

    # Schemas are built on first use, because a command needs the schema of one task only.
    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, coerce_numbers_to_str=True, defer_build=True
    )

    @model_validator(mode="before")
    @classmethod
    def _strip_credentials(cls, values: Any) -> Any:
        """Remove credentials of addresses and values of secret keys, so that nothing written from a recipe contains them."""
        return strip_credentials_in_values(values) if isinstance(values, dict) else values


def _normalise_precision(value: Any) -> Any:
    """Convert true to auto, and false and `no` to fp32."""
    if value is True:
        return "auto"
    return "fp32" if value is False or value == "no" else value


def _parse_switch(value: Any) -> Any:
    words = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _parse_scale(value: Any) -> Any:
    """Convert `none`, which freezes parameters, to None."""
    return None if value == "none" else value


def _to_upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _normalise_activation(value: Any) -> Any:
    return "silu" if value == "swish" else value


def _normalise_device(value: Any) -> Any:
    return "cuda" if isinstance(value, str) and value.lower() == "gpu" else value


def _to_lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _check_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is not a regular expression: {error}") from None
    return value


def _normalise_label(value: Any) -> Any:
    """Write a label as the data does: true is the class `true`, and 3.0 the class `3`."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else value


def _normalise_encoding(value: str) -> str:
    try:
        return codecs.lookup(value).name
    except LookupError:
        raise ValueError(
            f"{value!r} is not a Python text encoding; use one such as latin-1, cp1252 or utf-16"
        ) from None


def _check_run_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", value, re.ASCII):
        raise ValueError(f"expected letters, digits, '-', '_' and '.', because it names a folder; got {value!r}")
    if redact_values([value]) != [value]:
        raise ValueError("it looks like a secret, which would be in the name of a folder; choose another name")
    return value


# Strict, because True is an int in Python: `batch_size: true` would be a batch of one.
Whole = Annotated[int, Strict()]
Positive = Annotated[int, Strict(), Field(gt=0)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Rate = Annotated[Number, Field(gt=0)]
Probability = Annotated[Number, Field(ge=0, le=1)]
Dropout = Annotated[Number, Field(ge=0, lt=1)]
DecayRate = Annotated[Number, Field(ge=0, lt=1)]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], BeforeValidator(_normalise_device)]
Activation = Annotated[Literal["silu", "gelu", "relu"], BeforeValidator(_normalise_activation)]
Precision = Annotated[Literal["auto", "fp32", "bf16", "fp16"], BeforeValidator(_normalise_precision)]
AutoSwitch = Annotated[Literal["auto"] | bool, BeforeValidator(_parse_switch)]
Scale = Annotated[Annotated[Number, Field(ge=0)] | None, BeforeValidator(_parse_scale)]
Mode = Literal["min", "max"]
Level = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_to_upper)]
Collection = Annotated[Literal["flickr", "pog", "ser"], BeforeValidator(_to_lower)]
Pattern = Annotated[str, AfterValidator(_check_pattern)]
Label = Annotated[str, BeforeValidator(_normalise_label)]
Encoding = Annotated[str, AfterValidator(_normalise_encoding)]
RunName = Annotated[str, AfterValidator(_check_run_name)]
