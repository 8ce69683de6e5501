"""The package with one file more, as a person would have it who adds an objective: links to all other files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import bottega

PACKAGE = Path(bottega.__file__).parent


def run_with_file(name: str, text: str, script: str, folder: Path) -> str:
    """Run a script whose first argument is `folder`, in a process of its own. Gives the last line that it prints."""
    ours = shutil.ignore_patterns("__pycache__")
    copied = shutil.copytree(PACKAGE, folder / "src" / "bottega", copy_function=os.symlink, ignore=ours)
    assert not (copied / name).exists()
    (copied / name).write_text(text)
    paths = [str(copied.parent), str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", script, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
