"""A report that follows a run while it trains: a server on this machine alone, whose address holds a secret."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bottega.core.errors import EnvironmentProblem, first_line
from bottega.core.rundir import LOCK
from bottega.redaction import redact_text
from bottega.reporting.page import Page, render_page
from bottega.storage.durable import is_locked

REFRESH_SECONDS = 5.0
"""Seconds between two questions of the page whether the run has changed."""
WATCHED_FILES = (
    *("metrics.jsonl", "modules.jsonl", "recipe.yaml", "environment.json", "data.json", "memory.json", "LOCK"),
    *("log.txt", "checkpoints", "samples", "evaluation/*", "results", "profile", "study.json", "crossval.json"),
    "fold-*/metrics.jsonl",
)
"""Files and folders of a run whose change makes a new page."""


class LiveServer(ThreadingHTTPServer):
    """Serves one page at http://127.0.0.1:PORT/TOKEN/; every other address is not found.

    Only this machine can connect, and only who knows the token gets the page: other users of the machine, and web pages in the
    same browser, do not. A request by another host name is refused, so that no foreign name can be pointed at this server.
    """

    daemon_threads = True

    def __init__(self, paths: Iterable[Path], build: Callable[[], Page], *, port: int = 0) -> None:
        self.paths, self.build = tuple(paths), build
        self.token = secrets.token_urlsafe(24)
        self._rendered: tuple[str, bytes] | None = None
        self._lock = threading.Lock()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise EnvironmentProblem(f"--port {port}: {error.strerror}; choose another, or leave it out") from None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def compute_version(self) -> str:
        """Return a text that changes when the files of the report change."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(f"{path}\0{is_locked(path / LOCK)}\0".encode("utf-8", "replace"))
            for pattern in WATCHED_FILES:
                for file in sorted(path.glob(pattern)):
                    try:
                        status = os.stat(file)
                    except OSError:  # renamed meanwhile
                        continue
                    digest.update(f"{file}\0{status.st_mtime_ns}\0{status.st_size}\0".encode("utf-8", "replace"))
        return digest.hexdigest()

    def render(self) -> bytes:
        """Return the page, built again only if the files have changed."""
        with self._lock:
            version = self.compute_version()
            if self._rendered is None or self._rendered[0] != version:
                page = replace(self.build(), refresh_seconds=REFRESH_SECONDS, version=version)
                self._rendered = version, render_page(page).encode("utf-8", "replace")
            return self._rendered[1]


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").partition(":")[0]
        token, _, name = self.path.removeprefix("/").partition("?")[0].partition("/")
        if host not in ("127.0.0.1", "localhost") or not hmac.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            if name == "":
                self._send(self.server.render(), "text/html; charset=utf-8")
            elif name == "version":
                self._send(self.server.compute_version().encode(), "text/plain")
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except ConnectionError:
            pass  # the page was closed
        except Exception as error:  # a run that is deleted or written meanwhile; the next request may succeed
            text = redact_text(f"the report cannot be built now: {first_line(error)}").encode("utf-8", "replace")
            self._send(text, "text/plain; charset=utf-8", HTTPStatus.SERVICE_UNAVAILABLE)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, content: bytes, content_type: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing: the terminal belongs to the command."""
