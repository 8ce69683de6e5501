"""The packages that Bottega requires, from the metadata of the installed package, and the versions it was tested with.

Ranges come from the metadata that pip wrote (`Requires-Dist`), so they are those of the installed version. Tested versions come from
`tested_versions.txt` beside this file, which `python tools/tested_versions.py` writes from constraints.txt; a test compares them.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTED_VERSIONS_FILE = Path(__file__).with_name("tested_versions.txt")
UNLISTED_EXTRAS = ("dev",)
"""Extras of developers."""
IMPORT_NAMES = {"faiss-cpu": "faiss", "nvidia-ml-py": "pynvml", "pillow": "PIL", "pyyaml": "yaml"}
"""Distribution -> the module to import, where that is not the same word."""
EXTRA_PURPOSES = {
    "data": "images, Parquet, .zst, web addresses",
    "hub": "Hugging Face models and datasets",
    "audio": ".flac, .mp3, .ogg; resampling",
    "video": "video files, .m4a, .mp4 samples",
    "jax": "engine: jax",
    "tune": "bottega tune (hyperparameter search)",
    "faiss": "memory models that search by faiss",
    "wandb": "logging to Weights & Biases",
    "plots": "charts as .png files",
    "gpu": "GPU utilisation and power in the logs",
    "cloud": "data in s3://, gs:// and az://",
}
"""Extra -> what it enables."""


@dataclass(frozen=True)
class Requirement:
    """A package that Bottega requires, always or for an extra."""

    name: str
    specifier: str
    extra: str = ""
    """The extra that installs the package; empty for a package that every installation has."""

    @property
    def module(self) -> str:
        """The module to import."""
        return IMPORT_NAMES.get(self.name.lower(), self.name.lower().replace("-", "_"))

    def accepts(self, version: str) -> bool:
        """Return whether a version is in the required range; pre-releases count, as in a nightly build of torch.

        Raises ValueError if `version` is not one that can be compared.
        """
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        return SpecifierSet(self.specifier).contains(Version(version), prereleases=True)


def read_requirements() -> list[Requirement]:
    """Return the requirements of the installed package; raises PackageNotFoundError if it was never installed."""
    lines = importlib.metadata.requires("bottega") or []
    requirements = [parse_requirement(line) for line in lines]
    return [requirement for requirement in requirements if requirement.extra not in UNLISTED_EXTRAS]


def parse_requirement(line: str) -> Requirement:
    """Parse a line of metadata such as `pillow>=11.0; extra == "data"`, without packaging, which may be missing."""
    text, _, marker = line.partition(";")
    match = re.fullmatch(r"\s*([A-Za-z0-9._-]*[A-Za-z0-9])\s*\(?([^()]*)\)?\s*", text)
    if match is None:
        raise ValueError(f"{line!r} is not a requirement that can be read")
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
    return Requirement(match[1], match[2].strip(), extra[1] if extra else "")


def read_version(name: str) -> str | None:
    """Return the installed version of a package, None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def read_tested_versions() -> dict[str, str]:
    """Return the version of each package that Bottega was tested with; nothing if the file is missing."""
    try:
        lines = TESTED_VERSIONS_FILE.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {normalize_name(name): version for name, _, version in pairs}


def format_tested_versions(constraints: str, requirements: Sequence[Requirement]) -> str:
    """Return the contents of tested_versions.txt: the lines of constraints.txt for packages that Bottega requires itself."""
    names = {normalize_name(requirement.name) for requirement in requirements}
    lines = [line for line in constraints.splitlines() if normalize_name(line.partition("==")[0]) in names]
    return "# Written by tools/tested_versions.py from constraints.txt.\n" + "".join(
        f"{line}\n" for line in sorted(lines, key=str.lower)
    )


def normalize_name(name: str) -> str:
    """Return a package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
