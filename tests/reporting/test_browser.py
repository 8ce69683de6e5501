"""The report in a real browser: no error, no request, no horizontal scroll, no serious fault of accessibility."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bottega.reporting.page import write_page
from bottega.reporting.write import build_page, write_run_report
from bottega.run_files.record import read_record
from small_report import HOSTILE, write_evaluation, write_run, write_samples, write_study

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright; pip install 'bottega[dev]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium; apt-get install chromium")

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Without its sandbox, because in a container tests run as root.
    with playwright.sync_playwright() as programs:
        chromium = programs.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all sections, over two runs, a study and hostile texts."""
    folder = tmp_path_factory.mktemp("browser")
    runs = [write_run(folder / f"run <b>{i}</b>", recipe={"notes": HOSTILE, "seed": i}) for i in range(2)]
    for run in runs:
        write_samples(run, text=HOSTILE)
        write_evaluation(run, classes=(HOSTILE, "b"))
    study = write_study(folder / "study", key=HOSTILE)
    write_page(build_page([*runs, study]), folder / "report.html")
    return folder / "report.html"


class OpenedPage:
    """A page in a browser, with everything that it wrote to the console and requested."""

    def __init__(self, browser: Any, path: Path, *, viewport: dict[str, int], dark: bool = False) -> None:
        self.context = browser.new_context(viewport=viewport, color_scheme="dark" if dark else "light")
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url[:80]))
        self.page.goto(path.as_uri())
        self.draw_all()

    def draw_all(self) -> None:
        """Scroll each chart into view, and wait until it is drawn."""
        for chart in self.page.query_selector_all("[data-chart]"):
            chart.scroll_into_view_if_needed()
            chart.wait_for_selector("svg", state="attached")

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.context.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESK], ids=["phone", "desk"])
def test_the_report_opens_offline_without_errors(
    browser: Any, report: Path, viewport: dict[str, int], dark: bool
) -> None:
    with OpenedPage(browser, report, viewport=viewport, dark=dark) as opened:
        assert opened.errors == []
        assert [url for url in opened.requests if not url.startswith(("data:", "file:"))] == []
        assert sum(url.startswith("file:") for url in opened.requests) == 1
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_hostile_text_is_shown_and_not_executed(browser: Any, report: Path) -> None:
    with OpenedPage(browser, report, viewport=DESK) as opened:
        assert opened.page.evaluate("typeof window.owned") == "undefined"
        assert opened.page.evaluate("document.querySelectorAll('h2 b, pre img, pre script').length") == 0
        assert "<script>window.owned = 1</script>" in opened.page.inner_text("pre >> visible=true")


def test_an_injected_script_is_blocked(browser: Any, report: Path, tmp_path: Path) -> None:
    """If escaping ever failed, the content security policy of the page would still block the script."""
    html = report.read_text().replace("<main", "<script>window.owned = 1</script><main", 1)
    (tmp_path / "injected.html").write_text(html)
    with OpenedPage(browser, tmp_path / "injected.html", viewport=DESK) as opened:
        assert opened.page.evaluate("typeof window.owned") == "undefined"
        assert any("Content Security Policy" in error for error in opened.errors)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_serious_fault(browser: Any, report: Path, dark: bool) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    with OpenedPage(browser, report, viewport=DESK, dark=dark) as opened:
        violations = axe.Axe().run(opened.page).response["violations"]
    serious = [
        (fault["id"], fault["nodes"][0]["html"][:200])
        for fault in violations
        if fault["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_controls_work_by_keyboard(browser: Any, report: Path) -> None:
    with OpenedPage(browser, report, viewport=DESK) as opened:
        page = opened.page
        path = "document.querySelector('[data-chart=\"sections/loss/0\"] svg').innerHTML"
        before = page.evaluate(path)
        page.focus("#smoothing")
        page.keyboard.press("Home")
        assert page.inner_text("#smoothing-value") == "0.00"
        assert page.evaluate(path) != before
        slider = page.locator(".stepper input").first
        slider.focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator(".samples").first.locator("output").inner_text() == "200"
        assert page.locator(".samples").first.locator(".sample-step:visible").count() == 1
        page.focus("#theme")
        page.keyboard.press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        assert opened.errors == []


def test_the_tooltip_shows_every_run_and_follows_in_all_charts(browser: Any, report: Path) -> None:
    with OpenedPage(browser, report, viewport=DESK) as opened:
        chart = opened.page.locator("[data-chart='sections/loss/0']")
        chart.scroll_into_view_if_needed()
        chart.hover(position={"x": 400, "y": 150})
        opened.page.wait_for_function("() => document.body.innerText.includes('run <b>1</b> · validation:')")
        assert opened.page.evaluate("document.querySelectorAll('[data-chart] b').length") == 0


def test_sound_and_video_can_be_played(browser: Any, tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("av", reason="needs av")
    from bottega.data.video.write import write_video

    run = write_run(tmp_path / "run")
    write_samples(run, steps=(100,))
    write_video(np.zeros((4, 16, 16, 3), np.uint8), 8, run / "samples" / "step-00000100" / "00.mp4")
    write_run_report(read_record(run))
    with OpenedPage(browser, run / "report.html", viewport=PHONE) as opened:
        for kind in ("audio", "video"):
            opened.page.wait_for_function(f"() => document.querySelector('{kind}').readyState >= 1")
            assert opened.page.evaluate(f"document.querySelector('{kind}').duration") > 0
            assert opened.page.evaluate(f"document.querySelector('{kind}').error") is None
        assert opened.errors == []


def test_a_long_run_is_a_small_page_that_draws_only_what_is_seen(browser: Any, tmp_path: Path) -> None:
    """A million steps, logged every ten; benchmarks/report_size.py measures how long the page takes to open."""
    rows = (
        f'{{"step": {10 * i}, "kind": "train", "samples": {i}, "loss": {9 if i == 777 else 1 / i}, "grad_norm": 1.5}}'
        for i in range(1, 100_001)
    )
    run = write_run(tmp_path / "run", metrics="\n".join(rows))
    write_run_report(read_record(run))
    assert os.path.getsize(run / "report.html") < 3e6
    page = browser.new_page(viewport=PHONE)
    page.goto((run / "report.html").as_uri())
    page.wait_for_selector("[data-chart='sections/loss/0'] svg", state="attached")
    data = page.evaluate(
        "JSON.parse(document.getElementById('report-data').textContent).sections.loss[0].series[0].points"
    )
    assert max(data[2]) == 9
    assert data[0][-1] == 1_000_000
    assert page.locator("[data-chart] svg").count() < page.locator("[data-chart]").count()
    page.close()
