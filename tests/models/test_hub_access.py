"""An unresponsive hub is contacted once and reported in one line, and cached models still load."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bottega.config.data import Source
from bottega.core.errors import EnvironmentProblem
from bottega.data.formats import hub
from bottega.data.text.vocabulary import load_pretrained_tokenizer
from bottega.models.folders import hub_access
from bottega.models.folders.resolve import resolve_model

constants = pytest.importorskip("huggingface_hub.constants")


class SilentServer:
    """A local server that accepts connections and never answers."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                self.connections.append(self.listening.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self.listening.close()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentServer]:
    server = SilentServer()
    endpoint = f"http://127.0.0.1:{server.port}"
    for name in hub_access.PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_access, "ANSWER_SECONDS", 0.3)
    hub_access._find_unreachable_reason.cache_clear()
    hub._load_dataset.cache_clear()
    yield server
    hub_access._find_unreachable_reason.cache_clear()
    server.close()


def test_every_kind_of_name_gives_up_after_one_request(
    silent_server: SilentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for request in (
        lambda: resolve_model("owner/name", key="model.from").path,
        lambda: load_pretrained_tokenizer("owner/name"),
        lambda: hub.count_bytes(Source(path="owner/name", kind="huggingface")),
    ):
        with pytest.raises(EnvironmentProblem, match=r"http://127\.0\.0\.1:\d+ did not answer within 0\.3 s") as caught:
            request()
        assert len(str(caught.value).splitlines()) == 1
    assert len(silent_server.connections) <= 1, "there is no retry"
    assert constants.HF_HUB_OFFLINE is False
    assert datasets.config.HF_HUB_OFFLINE is False


def test_cached_model_is_read_without_the_hub(silent_server: SilentServer, tmp_path: Path) -> None:
    commit = "0" * 40
    folder = tmp_path / "hub" / "models--owner--name"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    assert resolve_model("owner/name", key="model.from").path == snapshot


def test_proxy_error_hides_the_password(silent_server: SilentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://anna:canary@127.0.0.1:{silent_server.port}")
    with pytest.raises(EnvironmentProblem, match=rf"through http://127\.0\.0\.1:{silent_server.port}") as caught:
        resolve_model("owner/name", key="model.from")
    assert "canary" not in str(caught.value)
