"""Resolving a name in a recipe to a model folder, for every kind of name and folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.models.folders import resolve
from bottega.models.folders.resolve import (
    ModelFolder,
    detect_folder_kind,
    find_component_folder,
    find_own_adapter,
    is_local_path,
    require_config,
    resolve_model,
    resolve_tokenizer,
)
from bottega.tasks import dependencies
from bottega.tasks.recipes import load_recipe

KEY = "model.from"


def write_folder(path: Path, *files: str) -> Path:
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text("{}")
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["recipe.yaml", "final/config.json"], "run"),
        (["model_index.json", "vae/config.json"], "pipeline"),
        (["model_index.json", "config.json"], "pipeline"),  # our exports are both
        (["config.json", "model.safetensors"], "model"),
        (["config.json", "adapter/bottega.json"], "model"),  # merged, with the adapter next to it
        (["adapter_config.json", "adapter_model.safetensors"], "adapter"),
        (["adapter_config.json", "config.json"], "adapter"),
        (["bottega.json"], "adapter"),
        (["adapter/bottega.json"], "adapter"),
        (["notes.txt"], "unknown"),
        ([], "unknown"),
    ],
)
def test_folder_kind_follows_its_files(tmp_path: Path, files: list[str], kind: str) -> None:
    assert detect_folder_kind(write_folder(tmp_path / "x", *files)) == kind


def test_local_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_folder(tmp_path / "model", "config.json")
    assert resolve_model(str(path), key=KEY) == ModelFolder(path, "model", "folder")
    assert resolve_model(path, key=KEY).path == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model", key=KEY).path == path
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "owner" / "name", "model_index.json")
    # It could also be a hub name: local folders come first.
    assert resolve_model("owner/name", key=KEY) == ModelFolder(Path("owner/name"), "pipeline", "folder")


def test_run_resolves_to_its_export(tmp_path: Path) -> None:
    run = write_folder(tmp_path / "run", "recipe.yaml")
    with pytest.raises(
        UsageError, match=rf"^model\.from: {run} is a run that was not exported; run bottega export {run} "
    ):
        resolve_model(run, key=KEY)
    assert resolve_model(run, key=KEY, required_file=None) == ModelFolder(run / "final", "unknown", "run")
    write_folder(run, "final/config.json")
    assert resolve_model(run, key=KEY) == ModelFolder(run / "final", "model", "run")
    with pytest.raises(UsageError, match="was not exported"):
        resolve_model(run, key=KEY, required_file="model_index.json")


def test_dependency_resolves_to_its_run(tmp_path: Path) -> None:
    recipe = load_recipe(
        ["image", {"output_dir": str(tmp_path), "needs": {"vae": {"recipe": "image_vae/digits"}}}]
    ).recipe
    run = dependencies.find_dependency_run(recipe, "vae")
    with pytest.raises(UsageError, match=r"^model\.vae: needs\.vae is not trained yet"):
        dependencies.resolve_model_reference(recipe, "needs.vae", key="model.vae")
    write_folder(run, "recipe.yaml")
    with pytest.raises(UsageError, match=rf"^model\.vae: {run} is a run that was not exported"):
        dependencies.resolve_model_reference(recipe, "needs.vae", key="model.vae")
    write_folder(run, "final/config.json")
    (run / "recipe.yaml").unlink()  # only the export was copied
    assert dependencies.resolve_model_reference(recipe, "needs.vae", key="model.vae") == ModelFolder(
        run / "final", "model", "dependency"
    )
    moved = write_folder(tmp_path / "elsewhere" / "parts" / run.name, "recipe.yaml", "final/config.json")
    resolved = dependencies.resolve_model_reference(
        recipe, "needs.vae", key="model.vae", runs_folder=tmp_path / "elsewhere"
    )
    assert resolved.path == moved / "final"


@pytest.mark.parametrize("name", ["./no", "/no/where", "~/no", "runs/no", "a/b/c", "../no"])
def test_local_path_is_not_requested_from_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_download", lambda *args, **options: pytest.fail("the network was accessed"))
    assert is_local_path(name)
    with pytest.raises(UsageError, match=rf"^model\.from: {name} is not a local folder; correct the path"):
        resolve_model(name, key=KEY)
    with pytest.raises(UsageError, match=r"^model\.from: owner/model is not a local folder"):
        resolve_model("owner/model", key=KEY, local_only=True)
    with pytest.raises(UsageError, match=r"^model\.vae: owner/model is not a folder; give a run$"):
        resolve_model("owner/model", key="model.vae", missing_message="is not a folder; give a run")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(UsageError, match=rf"^model\.from: {file} is not a local folder"):
        resolve_model(file, key=KEY)


def test_only_data_files_are_requested_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    request: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        request.update(options, name=name)
        return str(write_folder(tmp_path, "config.json"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/model", key=KEY) == ModelFolder(tmp_path, "model", "hub")
    assert request["name"] == "owner/model"
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in request["allow_patterns"])
    assert "*.safetensors" in request["allow_patterns"]
    resolve_model("owner/model", key=KEY, patterns=["a.json"])
    assert request["allow_patterns"] == ["a.json"]


def test_unreachable_hub_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        EnvironmentProblem, match=r"^model\.from: owner/model is not a local folder, and .*; "
    ) as caught:
        resolve_model("owner/model", key=KEY)
    assert "\n" not in str(caught.value)
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    with pytest.raises(UsageError, match=r"'a b' is neither a local folder nor a hub name"):
        resolve_model("a b", key=KEY)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'bottega\[hub\]'"):
        resolve_model("owner/model", key=KEY)
    with pytest.raises(EnvironmentProblem, match=r"tokenizer 'owner/model' is not a local folder"):
        resolve_tokenizer("owner/model")


def test_a_tokenizer_may_be_a_file(tmp_path: Path) -> None:
    file = write_folder(tmp_path, "tokenizer.json") / "tokenizer.json"
    assert resolve_tokenizer(str(file)) == file
    assert resolve_tokenizer(str(tmp_path)) == tmp_path
    assert resolve_tokenizer("./nowhere") == Path("nowhere"), "errors are raised by the reader"


def test_a_component_is_in_a_pipeline_or_is_the_folder(tmp_path: Path) -> None:
    pipeline = write_folder(tmp_path / "pipeline", "model_index.json", "vae/config.json")
    assert find_component_folder(pipeline, "vae") == pipeline / "vae"
    assert find_component_folder(pipeline / "vae", "vae") == pipeline / "vae"
    with pytest.raises(
        UsageError, match=rf"^model\.clip: {pipeline} has no config\.json; give the folder of a saved CLIP"
    ):
        require_config(pipeline, key="model.clip", description="CLIP")
    assert find_own_adapter(pipeline) is None
    assert (
        find_own_adapter(write_folder(tmp_path / "export", "adapter/bottega.json")) == tmp_path / "export" / "adapter"
    )


def test_resolving_imports_no_framework() -> None:
    code = "import sys, bottega.models.folders.resolve; print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}, check=True
    )
    assert result.stdout.strip() == "set()"
