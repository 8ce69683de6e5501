"""Screenshots of the report: python docs/images/report.py RUN STUDY writes report.png and report-study.png (needs Chromium)."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import bottega

HERE = Path(__file__).parent


def main() -> None:
    run, study = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as programs:
        browser = programs.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for path, name, scheme, height in (
            (run, "report.png", "light", 1150),
            (study, "report-study.png", "dark", 1000),
        ):
            report = bottega.report(path, out=Path(folder) / f"{name}.html")["report"]
            page = browser.new_page(viewport={"width": 1180, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(Path(report).as_uri())
            page.wait_for_timeout(1000)
            page.screenshot(path=HERE / name)
        browser.close()


if __name__ == "__main__":
    main()
