"""A store behind https:// that opens to a signature or a password only.

It stands in for fsspec's own, which needs a network package and a server.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem

FOLDER = "BOTTEGA_TEST_FAR"
"""The environment variable with the folder whose files are served."""
SECRETS = "BOTTEGA_TEST_SECRETS"
"""The environment variable with the signatures and passwords that are valid, separated by blanks."""


class FarStore(AbstractFileSystem):
    """Every address is a file of the folder by its last name."""

    protocol: ClassVar[tuple[str, ...]] = ("http", "https")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def _file(self, address: str) -> Path:
        parts = urlsplit(address)
        offered = {*parse_qs(parts.query).get("sig", ()), parts.password}
        if not offered & set(os.environ[SECRETS].split()):
            raise PermissionError(f"403 for {address}")
        return Path(os.environ[FOLDER], Path(parts.path).name)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": self._file(path).stat().st_size, "ETag": "1"}

    def isdir(self, path: str) -> bool:
        return False

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return self._file(path).open("rb")


def register() -> None:
    for scheme in ("http", "https"):
        fsspec.register_implementation(scheme, FarStore, clobber=True)
