"""A copy of the package, by symbolic links, with an additional file, as for a user who adds an objective."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import bottega

PACKAGE = Path(bottega.__file__).parent


def run_with_file(name: str, text: str, script: str, folder: Path) -> str:
    """Run `script` with the extended package and `folder` as argument in a subprocess; return its last output line."""
    ignore = shutil.ignore_patterns("__pycache__")
    package = shutil.copytree(PACKAGE, folder / "src" / "bottega", copy_function=os.symlink, ignore=ignore)
    assert not (package / name).exists()
    (package / name).write_text(text)
    paths = [str(package.parent), str(Path(__file__).parent), *sys.path]
    process = subprocess.run(
        [sys.executable, "-c", script, folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]
