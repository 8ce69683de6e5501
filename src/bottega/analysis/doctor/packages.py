"""Check the installed packages: missing, outside the required range, broken, conflicting, other than tested; and extras."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from bottega.analysis.doctor.check_result import NO_BREAK, CheckResult, Problem
from bottega.analysis.doctor.probes import build_probe_command, run_probes
from bottega.analysis.doctor.requirements import (
    EXTRA_PURPOSES,
    Requirement,
    normalize_name,
    read_requirements,
    read_tested_versions,
    read_version,
)

IMPORT_SECONDS = 120.0
OWN_MODULE = "bottega.run.session"
"""A module that imports most others of Bottega, as training does."""
PURPOSE_WIDTH = 37
OUT_OF_MEMORY = re.compile(r"MemoryError|annot allocate memory|failed to map segment")
NUM_NAMED = 3
"""Packages that a note names before it only counts them."""


@dataclass(frozen=True)
class Package:
    """A required package as it is installed here: `version` is None if it is missing, `error` why it cannot be used."""

    requirement: Requirement
    version: str | None
    error: str | None = None
    shadow: str | None = None
    """A file elsewhere that is imported in its place, if it cannot be imported."""

    @property
    def is_optional(self) -> bool:
        """Whether training works without it."""
        return bool(self.requirement.extra)


def check_packages(*, imports: bool, on_step: Callable[[str], None], torch_error: str | None = None) -> CheckResult:
    """Compare installed packages with the requirements of Bottega, and with `imports` import each of them.

    `torch_error` is why torch cannot be imported, which is reported with the devices: packages that fail for the same reason are not.
    """
    try:
        requirements = read_requirements()
    except importlib.metadata.PackageNotFoundError:
        unknown = Problem(
            "packages",
            "Bottega is not installed as a package, so its requirements are not known",
            "pip install bottega, or pip install --editable . in a clone",
        )
        own_problems = _find_own_import_problems(on_step) if torch_error is None else ()
        return CheckResult("packages", problems=(unknown, *own_problems))
    packages = list_packages(requirements, imports=imports, on_step=on_step, torch_error=torch_error)
    problems = [problem for package in packages if (problem := _find_problem(package)) is not None]
    # With such a problem, it would be the reason.
    if imports and torch_error is None and not any(problem.stops_training for problem in problems):
        problems += _find_own_import_problems(on_step)
    missing = _list_missing_extras(packages)
    values = {
        "packages": [
            {
                "name": package.requirement.name,
                "required": package.requirement.specifier,
                "extra": package.requirement.extra,
                "version": package.version,
                "tested": read_tested_versions().get(normalize_name(package.requirement.name)),
                "error": package.error,
                "shadow": package.shadow,
            }
            for package in packages
        ],
        "missing_extras": [
            {
                "extra": extra,
                "packages": names,
                "is_partly_installed": any(p.version for p in _list_own_packages(packages, extra)),
                "enables": EXTRA_PURPOSES.get(extra, ""),
                "install": f"pip install 'bottega[{extra}]'",
            }
            for extra, names in missing.items()
        ],
    }
    lines, notes = tuple(_describe_installed(packages)), tuple(_list_notes(packages))
    return CheckResult("packages", lines, values, tuple(problems), notes)


def describe_missing_extras(values: Mapping[str, Any]) -> CheckResult:
    """Return a section with a line for each extra of which packages are missing: what it enables and how to install it."""
    lines = []
    for row in values.get("missing_extras", []):
        purpose = row["enables"] or ", ".join(row["packages"])
        lines.append((row["extra"], f"{purpose:<{PURPOSE_WIDTH}} {_keep_together(row['install'])}"))
    return CheckResult("missing extras", tuple(lines))


def list_packages(
    requirements: Sequence[Requirement],
    *,
    imports: bool,
    on_step: Callable[[str], None],
    torch_error: str | None = None,
) -> list[Package]:
    """Return the state of each required package."""
    versions = {requirement.name: read_version(requirement.name) for requirement in requirements}
    # torch is imported by the probe of the devices.
    modules = dict.fromkeys(r.module for r in requirements if versions[r.name] is not None and r.module != "torch")
    errors = import_modules(list(modules), on_step=on_step) if imports else {}
    packages = []
    for requirement in requirements:
        version = versions[requirement.name]
        error = torch_error if requirement.module == "torch" else errors.get(requirement.module)
        shadow = find_shadow(requirement) if version is not None and error is not None else None
        if version is None or (error == torch_error and shadow is None):
            error = None
        packages.append(Package(requirement, version, error, shadow))
    return packages


def find_shadow(requirement: Requirement) -> str | None:
    """Return the file that is imported in the place of an installed package, such as a numpy.py in a folder of PYTHONPATH."""
    try:
        spec = PathFinder.find_spec(requirement.module)
        distribution = importlib.metadata.distribution(requirement.name)
    except (ImportError, ValueError):  # PackageNotFoundError is an ImportError
        return None
    if spec is None or spec.origin is None or '"editable"' in (distribution.read_text("direct_url.json") or ""):
        return None
    folder = Path(str(distribution.locate_file(""))).resolve()
    return None if Path(spec.origin).resolve().is_relative_to(folder) else spec.origin


def import_modules(modules: Sequence[str], *, on_step: Callable[[str], None]) -> dict[str, str]:
    """Import modules in a child process; return module -> error of those that fail, also by a crash of the process."""
    errors: dict[str, str] = {}
    remaining = list(modules)
    while remaining:
        command = build_probe_command("import_probe", {"modules": remaining})
        result = run_probes([command], seconds=IMPORT_SECONDS, on_step=on_step)[0]
        rows = result.select("imported")
        errors |= {row["module"]: row["error"] for row in rows if row["error"] is not None}
        remaining = remaining[len(rows) :]
        if remaining:
            errors[remaining.pop(0)] = result.error or "the process ended"
    return errors


def _find_own_import_problems(on_step: Callable[[str], None]) -> Iterator[Problem]:
    """Yield why Bottega's own modules cannot be imported, for requirements of requirements and incomplete copies of Bottega."""
    for module, error in import_modules([OWN_MODULE], on_step=on_step).items():
        remedy = "pip install --force-reinstall bottega, or pip install --editable . in a clone"
        yield Problem("packages", f"{module} cannot be imported: {error}", remedy, stops_training=True)


def _find_problem(package: Package) -> Problem | None:
    requirement, version = package.requirement, package.version
    needed = f"{requirement.name}{requirement.specifier}"
    if version is None:
        if package.is_optional:
            return None
        return Problem(
            "packages", f"{requirement.name} is not installed", f"pip install '{needed}'", stops_training=True
        )
    use = f"bottega[{requirement.extra}]" if package.is_optional else "bottega"
    if not _accepts(requirement, version):
        message = f"{requirement.name} {version} is installed, but {use} requires {needed}"
        return Problem("packages", message, f"pip install '{needed}'", stops_training=not package.is_optional)
    if package.error is not None:
        message = f"{requirement.name} {version} is installed, but cannot be imported: {package.error}"
        remedy = f"pip install --force-reinstall '{needed}'"
        if package.shadow is not None:
            message = (
                f"{requirement.name} {version} is installed, but {package.shadow} is imported instead: {package.error}"
            )
            remedy = "rename that file, or remove its folder from PYTHONPATH"
        elif OUT_OF_MEMORY.search(package.error):
            remedy = "raise the memory limit of this process (ulimit -v), or end other processes"
        return Problem("packages", message, remedy, stops_training=not package.is_optional)
    return None


def _accepts(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.accepts(version)
    except ImportError:  # packaging, which tensorboard requires; a note says that ranges were not compared
        return True
    except ValueError:  # a version that does not follow PEP 440 cannot be compared
        return True


def _list_missing_extras(packages: Sequence[Package]) -> dict[str, list[str]]:
    """Return extra -> its packages that are missing, in the order of the requirements."""
    missing: dict[str, list[str]] = {}
    for package in packages:
        if package.is_optional and package.version is None:
            missing.setdefault(package.requirement.extra, []).append(package.requirement.name)
    return missing


def _list_own_packages(packages: Sequence[Package], extra: str) -> list[Package]:
    """Return the packages of an extra that no extra before it has."""
    group = [package for package in packages if package.requirement.extra == extra]
    earlier = {package.requirement.name for package in packages[: packages.index(group[0])]}
    return [package for package in group if package.requirement.name not in earlier]


def _describe_installed(packages: Sequence[Package]) -> Iterator[tuple[str, str]]:
    """Yield a line for the required packages and one for each extra of which packages are installed."""
    for extra in dict.fromkeys(package.requirement.extra for package in packages):
        group = _list_own_packages(packages, extra)
        if not extra or any(package.version for package in group):
            names = [f"{package.requirement.name} {package.version or 'missing'}" for package in group]
            yield extra or "required", ", ".join(map(_keep_together, names))


def _keep_together(text: str) -> str:
    """Return a text that is not wrapped within."""
    return text.replace(" ", NO_BREAK)


def _list_notes(packages: Sequence[Package]) -> Iterator[str]:
    try:
        import packaging.version
    except ImportError:
        yield "packaging is not installed, so versions were not compared; pip install packaging"
        return
    tested, other = read_tested_versions(), []
    for package in packages:
        version = tested.get(normalize_name(package.requirement.name))
        if version is None or package.version is None:
            continue
        try:
            is_tested = _public(package.version) == _public(version)
        except packaging.version.InvalidVersion:
            is_tested = False
        if not is_tested:
            other.append(f"{package.requirement.name} {package.version} (tested: {version})")
    if other:
        count = f" and {len(other) - NUM_NAMED} more" if len(other) > NUM_NAMED else ""
        yield f"versions other than the tested ones: {', '.join(other[:NUM_NAMED])}{count}"
    yield from find_conflicts([p.requirement.name for p in packages if p.version is not None])


def _public(version: str) -> str:
    """Return a version without its build, such as +cpu."""
    from packaging.version import Version

    return Version(version).public


def find_conflicts(names: Sequence[str]) -> Iterator[str]:
    """Yield what installed packages require of each other and do not have, as `pip check` does, for these and what they require."""
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement as ParsedRequirement

    queue, visited = list(names), set()
    while queue:
        name = normalize_name(queue.pop(0))
        if name in visited:
            continue
        visited.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in distribution.requires or []:
            try:
                requirement = ParsedRequirement(line)
            except InvalidRequirement:
                continue
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            queue.append(requirement.name)
            version = read_version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                actual = "it is missing" if version is None else f"{version} is installed"
                needed = f"{requirement.name}{requirement.specifier}"
                yield f"{name} {distribution.version} requires {needed}, but {actual}; pip install '{needed}'"
