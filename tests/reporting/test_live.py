"""A live report: served to this machine only, to who knows the address, and refreshed when the run changes."""

from __future__ import annotations

import http.client
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bottega import cli
from bottega.analysis.report import build_report_page, serve_report
from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.reporting import live
from bottega.reporting.live import LiveServer
from bottega.reporting.page import Page
from small_report import make_metrics, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def serving(run: Path) -> Iterator[LiveServer]:
    with LiveServer([run], lambda: build_report_page([run])) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def request(server: LiveServer, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={"Host": host} if host else {})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_only_the_address_with_the_token_is_served(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, page = request(server, f"/{server.token}/")
        assert status == 200
        assert "1,000 parameters" in page
        for path in (
            "/",
            f"/{server.token}x/",
            f"/{server.token[:-1]}/",
            f"/{server.token}/../recipe.yaml",
            "/recipe.yaml",
        ):
            assert request(server, path)[0] == 404
        assert request(server, f"/{server.token}/", host="evil.example:80")[0] == 404, "a foreign name for this machine"
        assert request(server, f"/{server.token}/", method="POST")[0] == 501
        assert request(server, f"/{server.token}/", host="127.0.0.1")[0] == 200, "port 80 is not in the header"


def test_two_servers_have_different_tokens(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run) as first, serving(run) as second:
        assert first.token != second.token
        assert len(first.token) >= 32


def test_the_page_changes_with_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metrics=make_metrics(3))
    with serving(run) as server:
        version = request(server, f"/{server.token}/version")[1]
        before = request(server, f"/{server.token}/")[1]
        assert request(server, f"/{server.token}/version")[1] == version
        (run / "metrics.jsonl").write_text(make_metrics(4))
        assert request(server, f"/{server.token}/version")[1] != version
        assert request(server, f"/{server.token}/")[1] != before


def test_the_end_of_a_run_is_a_change(tmp_path: Path) -> None:
    """The lock is released without a change of any file."""
    run = write_run(tmp_path / "run")
    with serving(run) as server:
        with Lock(RunDirectory(run)):
            version, page = server.compute_version(), server.render()
        assert server.compute_version() != version
        assert server.render() != page


def test_an_error_while_building_is_an_answer(tmp_path: Path) -> None:
    def fail() -> Page:
        raise TypeError("an odd file")

    with LiveServer([tmp_path], fail) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert request(server, f"/{server.token}/") == (503, "the report cannot be built now: an odd file")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_an_impossible_port_is_one_line(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--live", "run", f"--port={port}"]) == 2
    assert f"--port {port}: expected a number" in capsys.readouterr().err


def test_a_run_that_was_deleted_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run) as server:
        shutil.rmtree(run)
        status, text = request(server, f"/{server.token}/")
        assert status == 503
        assert "does not exist" in text


def test_a_taken_port_and_a_missing_run_are_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(run) as server, pytest.raises(EnvironmentProblem, match="choose another"):
        LiveServer([run], lambda: build_report_page([run]), port=server.server_port)
    with pytest.raises(UsageError, match="does not exist"):
        serve_report([str(tmp_path / "none")], port=0, announce=lambda url: None)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; apt-get install chromium")
def test_the_browser_shows_new_steps_without_a_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    playwright: Any = pytest.importorskip("playwright.sync_api", reason="needs playwright; pip install 'bottega[dev]'")
    monkeypatch.setattr(live, "REFRESH_SECONDS", 0.1)
    run = write_run(tmp_path / "run", metrics=make_metrics(30))
    errors: list[str] = []
    with serving(run) as server, playwright.sync_playwright() as programs:
        browser = programs.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.url)
        page.evaluate("window.isSamePage = true")
        page.locator("#smoothing").fill("0.9")
        page.locator("#keys-0-0 summary").click()
        (run / "metrics.jsonl").write_text(make_metrics(40))
        (run / "data.json").write_text('{"splits": {"train": 123456}}')
        page.wait_for_function("() => document.body.innerText.includes('123,456')")
        assert page.evaluate("window.isSamePage")
        assert page.locator("#smoothing").input_value() == "0.9"
        assert page.locator("#keys-0-0").get_attribute("open") is not None
        assert errors == []
        browser.close()
