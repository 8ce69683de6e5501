"""A fake https:// file system that requires a signature or a password.

It replaces the one of fsspec, which needs a network package and a server.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem

FOLDER = "BOTTEGA_TEST_REMOTE"
"""Environment variable with the folder of the remote files."""
SECRETS = "BOTTEGA_TEST_SECRETS"
"""Environment variable with the valid signatures and passwords, separated by spaces."""


class RemoteStore(AbstractFileSystem):
    """Maps a URL to the file of the same name in the folder, and refuses one without a valid signature or password."""

    protocol: ClassVar[tuple[str, ...]] = ("http", "https")
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def _file(self, url: str) -> Path:
        parts = urlsplit(url)
        credentials = {*parse_qs(parts.query).get("sig", ()), parts.password}
        if not credentials & set(os.environ[SECRETS].split()):
            raise PermissionError(f"403 for {url}")
        return Path(os.environ[FOLDER], Path(parts.path).name)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "type": "file", "size": self._file(path).stat().st_size, "ETag": "1"}

    def isdir(self, path: str) -> bool:
        return False

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return self._file(path).open("rb")


def register() -> None:
    for scheme in ("http", "https"):
        fsspec.register_implementation(scheme, RemoteStore, clobber=True)
