"""`bottega doctor` on packages: missing, too old, broken, conflicting, other than tested; and extras."""

from __future__ import annotations

import importlib.metadata
import runpy
from pathlib import Path
from typing import Any

import pytest

from bottega.analysis.doctor import packages, requirements
from bottega.analysis.doctor.check_result import NO_BREAK
from bottega.analysis.doctor.packages import check_packages
from bottega.analysis.doctor.requirements import Requirement, parse_requirement

ROOT = Path(__file__).parents[2]


def ignore_step(step: str) -> None:
    """Show nothing."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Versions by package in place of the installed ones; all are tested versions at first."""
    versions: dict[str, str | None] = {"s3fs": "2026.9", "gcsfs": "2026.9", "adlfs": "2026.9"}
    for requirement in requirements.read_requirements():
        name = requirement.name
        tested = requirements.read_tested_versions().get(requirements.normalize_name(name))
        versions.setdefault(name, tested or requirement.specifier.removeprefix(">="))
    monkeypatch.setattr(packages, "read_version", versions.get)
    monkeypatch.setattr(packages, "find_conflicts", lambda names: iter(()))
    return versions


def test_file_that_shadows_a_package_is_named(
    tmp_path: Path, installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A numpy.py on PYTHONPATH also makes torch fail; the file is reported, and torch is not."""
    (tmp_path / "numpy.py").write_text("raise ImportError('boo')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "import_modules", lambda modules, *, on_step: {"numpy": "ImportError: boo"})
    result = check_packages(imports=True, on_step=ignore_step, torch_error="ImportError: boo")
    (problem,) = result.problems
    assert f"is installed, but {tmp_path / 'numpy.py'} is imported instead: ImportError: boo" in problem.message
    assert problem.remedy == "rename that file, or remove its folder from PYTHONPATH"
    assert problem.stops_training


def test_package_that_needs_more_memory_is_not_to_be_reinstalled(
    installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {"scipy": "ImportError: libfoo.so: failed to map segment from shared object"}
    monkeypatch.setattr(packages, "import_modules", lambda modules, *, on_step: errors)
    (problem,) = check_packages(imports=True, on_step=ignore_step).problems
    assert "ulimit -v" in problem.remedy


def test_tested_versions_are_those_of_constraints_txt() -> None:
    text = runpy.run_path(str(ROOT / "tools" / "tested_versions.py"))["build_text"]()
    assert requirements.TESTED_VERSIONS_FILE.read_text() == text, "run python tools/tested_versions.py"


def test_every_extra_says_what_it_enables_in_one_line() -> None:
    extras = {requirement.extra for requirement in requirements.read_requirements()} - {""}
    assert set(requirements.EXTRA_PURPOSES) == extras
    assert max(map(len, requirements.EXTRA_PURPOSES.values())) <= packages.PURPOSE_WIDTH


def test_the_installed_metadata_has_no_other_markers_than_extras() -> None:
    """`parse_requirement` does not evaluate markers."""
    lines = importlib.metadata.requires("bottega") or []
    markers = {line.partition(";")[2].partition("==")[0].strip() for line in lines}
    assert markers == {"", "extra"}


@pytest.mark.parametrize(
    ("line", "requirement"),
    [
        ("numpy>=2.0", Requirement("numpy", ">=2.0")),
        ('s3fs; extra == "cloud"', Requirement("s3fs", "", "cloud")),
        ("optax (>=0.2.6,<1) ; extra == 'jax'", Requirement("optax", ">=0.2.6,<1", "jax")),
    ],
)
def test_lines_of_metadata_are_parsed(line: str, requirement: Requirement) -> None:
    assert parse_requirement(line) == requirement


def test_a_complete_installation_has_no_problems(installed: dict[str, str | None]) -> None:
    result = check_packages(imports=False, on_step=ignore_step)
    assert (result.problems, result.notes) == ((), ())
    assert result.values["missing_extras"] == []


def test_a_missing_required_package_stops_training(installed: dict[str, str | None]) -> None:
    installed["scipy"] = None
    (problem,) = check_packages(imports=False, on_step=ignore_step).problems
    assert problem.message == "scipy is not installed"
    assert problem.remedy == "pip install 'scipy>=1.13'"
    assert problem.stops_training


def test_a_missing_extra_is_one_line_and_no_problem(installed: dict[str, str | None]) -> None:
    installed.update(soundfile=None, soxr=None, zstandard=None)
    result = check_packages(imports=False, on_step=ignore_step)
    assert result.problems == ()
    lines = dict(packages.describe_missing_extras(result.values).lines)
    plain = {extra: " ".join(text.split()) for extra, text in lines.items()}
    assert plain["audio"] == ".flac, .mp3, .ogg; resampling pip install 'bottega[audio]'"
    assert set(lines) == {"audio", "data"}
    packages_line = dict(result.lines)["data"].replace(NO_BREAK, " ")
    assert ", zstandard missing, gigatoken " in packages_line, "what is missing of an extra that is partly installed"
    assert "audio" not in dict(result.lines)


def test_a_package_that_two_extras_share_does_not_make_the_second_partly_installed(
    installed: dict[str, str | None],
) -> None:
    installed.update(s3fs=None, gcsfs=None, adlfs=None)  # fsspec is installed by `data`
    result = check_packages(imports=False, on_step=ignore_step)
    assert [row["is_partly_installed"] for row in result.values["missing_extras"]] == [False]
    assert "cloud" not in dict(result.lines)


@pytest.mark.parametrize(("name", "stops"), [("torch", True), ("transformers", False)])
def test_a_version_outside_the_range_is_a_problem(name: str, stops: bool, installed: dict[str, str | None]) -> None:
    installed[name] = "1.0"
    (problem,) = check_packages(imports=False, on_step=ignore_step).problems
    user = "bottega" if stops else "bottega[hub]"
    assert problem.message.startswith(f"{name} 1.0 is installed, but {user} requires {name}>=")
    assert problem.stops_training is stops


@pytest.mark.parametrize("version", ["2.99.0.dev20261118+cu130", "2.13.0", "2.13.0+cu130"])
def test_nightly_and_local_versions_are_in_the_range(version: str, installed: dict[str, str | None]) -> None:
    installed["torch"] = version
    assert check_packages(imports=False, on_step=ignore_step).problems == ()


def test_versions_other_than_the_tested_ones_are_one_note(installed: dict[str, str | None]) -> None:
    installed.update(numpy="99.0", scipy="99.0", rich="99.0", pyarrow="99.0", wandb="99.0", torch="2.13.0+cu130")
    result = check_packages(imports=False, on_step=ignore_step)
    assert result.problems == ()
    (note,) = result.notes
    assert note.startswith("versions other than the tested ones: numpy 99.0 (tested: ")
    assert note.endswith(" and 2 more")


def test_a_version_that_cannot_be_compared_is_only_noted(installed: dict[str, str | None]) -> None:
    installed["numpy"] = "from-source"
    result = check_packages(imports=False, on_step=ignore_step)
    assert result.problems == ()
    assert "numpy from-source" in result.notes[0]


def test_without_packaging_missing_packages_are_still_reported(
    installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["scipy"] = None
    monkeypatch.setitem(__import__("sys").modules, "packaging", None)
    for name in ("specifiers", "version", "requirements"):
        monkeypatch.setitem(__import__("sys").modules, f"packaging.{name}", None)
    result = check_packages(imports=False, on_step=ignore_step)
    assert [problem.message for problem in result.problems] == ["scipy is not installed"]
    assert "versions were not compared" in result.notes[0]


def test_a_checkout_that_was_never_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", raise_error)
    (problem,) = check_packages(imports=False, on_step=ignore_step).problems
    assert "is not installed as a package" in problem.message
    assert not problem.stops_training
    monkeypatch.setattr(
        packages, "import_modules", lambda modules, on_step: {modules[0]: "ModuleNotFoundError: pydantic"}
    )
    _, broken = check_packages(imports=False, on_step=ignore_step).problems
    assert broken.message == "bottega.run.session cannot be imported: ModuleNotFoundError: pydantic"
    assert broken.stops_training


def test_broken_and_crashing_imports_are_told_apart_from_working_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "works": "",
        "lacks_a_part": "import a_module_that_nobody_has",
        "refuses": "raise RuntimeError('compiled for another numpy\\nmore')",
        "leaves": "raise SystemExit(3)",
        "crashes": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "works_too": "",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert packages.import_modules(list(sources), on_step=ignore_step) == {
        "lacks_a_part": "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
        "refuses": "RuntimeError: compiled for another numpy",
        "leaves": "SystemExit: 3",
        "crashes": "ended by SIGSEGV",
    }


def test_a_broken_import_names_the_package_and_the_remedy(
    installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {"PIL": "ImportError: libjpeg.so.62", "yaml": "ended by SIGILL"}
    monkeypatch.setattr(packages, "import_modules", lambda modules, on_step: errors if "yaml" in modules else {})
    result = check_packages(imports=True, on_step=ignore_step)
    pyyaml, pillow = result.problems
    assert pyyaml.message == "pyyaml 6.0.3 is installed, but cannot be imported: ended by SIGILL"
    assert pyyaml.remedy == "pip install --force-reinstall 'pyyaml>=6.0'"
    assert (pyyaml.stops_training, pillow.stops_training) == (True, False)


@pytest.mark.parametrize("scipy", ["1.17.1", None])
def test_bottega_itself_is_imported_unless_a_package_is_the_reason(
    scipy: str | None, installed: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["scipy"] = scipy
    errors = {packages.OWN_MODULE: "ImportError: a requirement of a requirement"}
    monkeypatch.setattr(
        packages, "import_modules", lambda modules, on_step: {m: errors[m] for m in modules if m in errors}
    )
    (problem,) = check_packages(imports=True, on_step=ignore_step).problems
    assert problem.stops_training
    assert problem.message.startswith("bottega.run.session cannot be imported" if scipy else "scipy is not installed")


def test_requirements_between_packages_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version, lines in (
        ("first", "1.0", ["second>=2.0", "third; extra == 'more'", "absent>=1"]),
        ("second", "1.5", ["first"]),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(header + "".join(f"Requires-Dist: {line}\n" for line in lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert list(packages.find_conflicts(["first"])) == [
        "first 1.0 requires second>=2.0, but 1.5 is installed; pip install 'second>=2.0'",
        "first 1.0 requires absent>=1, but it is missing; pip install 'absent>=1'",
    ]
