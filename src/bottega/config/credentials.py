"""Credentials in addresses of data: removed before anything is written, and kept in the environment for reading the data.

A signed address (`?sig=…`) or `user:password@` gives access to anyone who sees it, so no recipe contains one: every section of a
recipe strips its addresses on construction, and `restore_credentials` adds them again in this process.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

CREDENTIALS_VARIABLE = "BOTTEGA_CREDENTIALS"
"""The environment variable that passes credentials to child processes, as JSON: stripped address -> full address."""

PUBLIC_PARAMETERS = frozenset(
    {"id", "file", "filename", "name", "path", "part", "page", "chunk", "shard", "split", "subset", "offset", "limit"}
    | {"format", "version", "versionid", "revision", "ref", "branch", "download", "dl", "raw", "export"}
)
"""Query parameters that select the data. Any other parameter may be a credential."""

_CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "az", "wasb", "wasbs"})
"""Schemes with a container in place of a user: abfs://container@account/path."""

# One slash is enough, because pathlib collapses two; quotes and brackets end an address in a message.
_ADDRESS = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]*:/{1,3}[^\s\"'<>`]+")
_QUERY = re.compile(r"\?(?=[^?/]*=)")
"""Outside of http a question mark is also a wildcard, as in part?/year=2020/a.parquet."""


def strip_credentials(address: str) -> str:
    """Return an address without user, password and query parameters that may be credentials.

    Text that is not an address is returned unchanged.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*", scheme):
        return address
    is_http = scheme.lower() in ("http", "https")
    if not is_http and not _QUERY.search(rest):
        # In other stores a question mark is a wildcard, and # part of a name.
        host, slash, path = rest.partition("/")
        return f"{scheme}://{_strip_user(host, scheme)}{slash}{path}"
    try:
        parts = urlsplit(address)
    except ValueError:  # such as an IPv6 address that is not closed
        return f"{scheme}://"
    public_pairs = [pair for pair in parts.query.split("&") if pair.partition("=")[0].lower() in PUBLIC_PARAMETERS]
    return urlunsplit((parts.scheme, _strip_user(parts.netloc, scheme), parts.path, "&".join(public_pairs), ""))


def strip_credentials_in_text(text: str) -> str:
    """Return a message with every address in it stripped."""
    if ":/" not in text:
        return text
    return _ADDRESS.sub(_strip_match, text)


def strip_credentials_in_values(value: Any) -> Any:
    """Return (nested) values of a recipe with all addresses stripped; the credentials are kept in the environment."""
    if isinstance(value, dict):
        return {key: strip_credentials_in_values(inner) for key, inner in value.items()}
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
        os.environ[CREDENTIALS_VARIABLE] = json.dumps({**_read_stored_credentials(), stripped: value})
    return stripped


def find_ambiguous_address(value: Any) -> str | None:
    """Return an address that two different values have in common once stripped, or None."""
    originals: dict[str, str] = {}

    def visit(inner: Any) -> str | None:
        if isinstance(inner, dict | list | tuple):
            return next(filter(None, map(visit, inner.values() if isinstance(inner, dict) else inner)), None)
        if not isinstance(inner, str) or "://" not in inner:
            return None
        stripped = strip_credentials(inner)
        return stripped if originals.setdefault(stripped, inner) != inner else None

    return visit(value)


def restore_credentials(address: str) -> str:
    """Return an address with the credentials that this process has for it, if any."""
    return _read_stored_credentials().get(address, address)


def _read_stored_credentials() -> dict[str, str]:
    try:
        addresses = json.loads(os.environ.get(CREDENTIALS_VARIABLE, "{}"))
    except ValueError:
        return {}
    return addresses if isinstance(addresses, dict) else {}


def _strip_user(host: str, scheme: str) -> str:
    user, separator, address = host.rpartition("@")
    return host if not separator or (scheme.lower() in _CONTAINER_SCHEMES and ":" not in user) else address


def _strip_match(match: re.Match[str]) -> str:
    """Strip one address inside a sentence, without the punctuation after it."""
    address = match.group()
    trimmed = address.rstrip(".,;:)]}")
    scheme, _, rest = trimmed.partition(":")
    slashes = rest[: len(rest) - len(rest.lstrip("/"))]
    stripped = strip_credentials(f"{scheme}://{rest.lstrip('/')}")
    return stripped.replace("://", f":{slashes}", 1) + address[len(trimmed) :]
