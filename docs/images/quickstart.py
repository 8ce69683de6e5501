"""Draw docs/images/quickstart.svg from the log of a real run: python docs/images/quickstart.py runs/language-0d3322"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def main(run: Path) -> None:
    log = (run / "log.txt").read_text(encoding="utf-8").splitlines()
    lines = [match[1] for line in log if (match := re.match(r"\d{4}-\S+ \S+ (?:INFO )?(.*)", line))]
    steps = [line for line in lines if re.match(r"step +\d+/", line)]
    shown = steps[4::15]
    console = Console(record=True, width=118, file=io.StringIO(), highlight=False)
    console.print(Text("$ make quickstart", style="bold"))
    console.print(Text(next(line for line in lines if "parameters" in line)))
    for line in lines:
        if "validation" in line:
            console.print(Text(line, style="green"))
        elif line in shown:
            console.print(Text(line))
    sample = max(run.glob("samples/step-*/00.txt")).read_text(encoding="utf-8").strip().splitlines()[:10]
    console.print(Text("\na sample:\n", style="bold"))
    # A bar before each line: some viewers drop spaces at its start, and Python cannot do without them.
    console.print(Text("\n".join(f"│ {line}" for line in sample)))
    console.print()
    console.print(Text(next(line for line in reversed(lines) if line.startswith("next:")), style="bold"))
    console.save_svg(str(Path(__file__).with_suffix(".svg")), title="bottega train language")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
