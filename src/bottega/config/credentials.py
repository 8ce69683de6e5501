"""Secrets in a recipe: removed before anything is written, and kept in the environment of this process and its children.

A signed address (`?sig=…`) or `user:password@` gives access to anyone who sees it, and so does the value of a key such as
`api_key`. No recipe contains one: every section strips its addresses and replaces the values of secret keys by `***` on
construction. `restore_credentials` and `read_secret` return them in this process.
"""

from __future__ import annotations

import json
import os
from typing import Any

from bottega.core.errors import UsageError
from bottega.redaction import CREDENTIALS_VARIABLE, LABEL_MAPS, REPLACEMENT, is_secret_value, strip_credentials
from bottega.secret_names import is_secret_name

SECOND_VALUE = "#2"
"""Ending of the name under which another value of a secret is stored, so that it is redacted, too."""


def strip_credentials_in_values(value: Any, *, has_labels: bool = False) -> Any:
    """Return (nested) values of a recipe without credentials of addresses and values of secret keys, which are kept in the environment.

    `has_labels` means that the keys of `value` are labels of the data, and no names of secrets.
    """
    if isinstance(value, dict):
        return {
            key: _store_secret(_get_name(key), str(inner))
            if isinstance(key, str) and not has_labels and is_secret_value(key, inner)
            else strip_credentials_in_values(inner, has_labels=key in LABEL_MAPS)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return (
            type(value)(strip_credentials_in_values(inner) for inner in value)
            if type(value) in (list, tuple)
            else value
        )
    if not isinstance(value, str) or "://" not in value:
        return value
    stripped = strip_credentials(value)
    if stripped != value:
        _store(stripped, value)  # the newest counts, since signatures expire
    return stripped


def find_ambiguous_secret(value: Any) -> tuple[str, str] | None:
    """Return key and message if two values differ only in what is stripped, because they would be read as one; else None.

    These are two addresses that differ only in a possible credential, and two values of one secret name.
    """
    originals: dict[str, str] = {}

    def visit(inner: Any, key: str = "") -> str | None:
        if isinstance(inner, dict):
            return next(filter(None, (visit(child, str(name)) for name, child in inner.items())), None)
        if isinstance(inner, list | tuple):
            return next(filter(None, map(visit, inner)), None)
        if is_secret_value(key, inner):
            public = _get_name(key)
        elif isinstance(inner, str) and "://" in inner:
            public = strip_credentials(inner)
        else:
            return None
        return public if originals.setdefault(public, str(inner)) != str(inner) else None

    public = visit(value)
    if public is None:
        return None
    if is_secret_name(public):
        return public, "two different values in this recipe; keep one, or give it in an environment variable"
    return "data", (
        f"{public} is given twice, with queries that differ only in a possible credential; download the files first"
    )


def restore_credentials(address: str) -> str:
    """Return an address with the credentials that this process has for it, if any."""
    return _read_stored_secrets().get(address, address)


def read_secret(name: str) -> str | None:
    """Return the value that a recipe or the command line gave to the secret key `name`, such as "api_key".

    If neither did, return the environment variable of that name in capitals; None if there is none. Raises UsageError if two
    recipes of this process, such as those of a run and a dependency, have different values under this name.
    """
    stored, name = _read_stored_secrets(), _get_name(name)
    if name + SECOND_VALUE in stored:
        raise UsageError(
            f"{name}: two recipes of this process have different values under this name; use one value for a run and its "
            "dependencies, or start a new process"
        )
    return stored.get(name) or os.environ.get(name.upper()) or None


def _get_name(key: str) -> str:
    return key.rpartition(".")[2]


def _store_secret(name: str, secret: str) -> str:
    """Store a secret by name and return what replaces it in the recipe; a second value is stored beside the first."""
    stored = _read_stored_secrets()
    if stored.get(name, secret) == secret:
        _store(name, secret)
    else:
        _store(name + SECOND_VALUE, secret)
    return REPLACEMENT


def _store(public: str, secret: str) -> None:
    os.environ[CREDENTIALS_VARIABLE] = json.dumps({**_read_stored_secrets(), public: secret})


def _read_stored_secrets() -> dict[str, str]:
    try:
        secrets = json.loads(os.environ.get(CREDENTIALS_VARIABLE, "{}"))
    except ValueError:
        return {}
    return secrets if isinstance(secrets, dict) else {}
