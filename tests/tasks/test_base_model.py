"""Base models: found after a move, paths never looked up on the hub, trainable parameter counts, and refusals."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import bottega
import small_run
from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError
from bottega.models.folders.resolve import resolve_model
from bottega.tasks.base_model import resolve_base_folder
from small_fine_tuning import LANGUAGE, NULL_SIZES, STEADY, classify, train, write_bases

LORA = {"name": "lora", "options": {"rank": 2}}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    requests: list[str] = []

    def download(name: str, **_: Any) -> str:
        requests.append(name)
        raise LocalEntryNotFoundError("An error happened\nGot: ConnectError")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return requests


@pytest.fixture
def home(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the base model under runs/, referred to by a relative path."""
    (tmp_path / "work").mkdir()
    shutil.copytree(bases / "language", tmp_path / "work" / "runs" / "tb")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def fine_tune(home: Path, *, technique: Any = LORA, start: str = "runs/tb", **changes: Any) -> Path:
    text = small_run.write_text(home.parent / "other.txt", seed=1)
    run_settings = {"output_dir": "runs", "name": "k1", "data.train.path": str(text), "model.from": start}
    settings = {
        **LANGUAGE,
        **NULL_SIZES,
        **STEADY,
        **run_settings,
        "techniques": [technique] if technique else [],
        **changes,
    }
    return bottega.train("language/shakespeare", settings).path


@pytest.mark.parametrize("technique", [LORA, None], ids=["lora", "full"])
def test_a_run_moved_with_its_base_evaluates_exports_and_resumes(
    home: Path, tmp_path: Path, technique: Any, no_hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fine_tune(home, technique=technique)
    before = bottega.load(run, device="cpu").evaluate()
    (tmp_path / "mv").mkdir()
    for name in ("k1", "tb"):
        shutil.copytree(home / "runs" / name, tmp_path / "mv" / name, symlinks=True)
    shutil.rmtree(home)
    monkeypatch.chdir(tmp_path / "mv")
    saved = bottega.load("k1", device="cpu")
    assert saved.evaluate() == before
    final = saved.export()
    if technique is not None:
        origin = json.loads((final / "adapter" / "bottega.json").read_text())["from"]
        assert origin == str(tmp_path / "mv" / "tb" / "final")
    longer = bottega.train("k1/recipe.yaml", {"output_dir": ".", "training.max_steps": 10})
    assert longer.step == 10
    assert no_hub == []


def test_a_full_run_is_evaluated_when_its_base_is_gone(home: Path, no_hub: list[str]) -> None:
    run = fine_tune(home, technique=None)
    before = bottega.load(run, device="cpu").evaluate()
    shutil.rmtree(home / "runs" / "tb")
    assert bottega.load(run, device="cpu").evaluate() == before
    assert no_hub == []


def test_a_classifier_evaluates_with_its_saved_tokenizer(bases: Path, tmp_path: Path, no_hub: list[str]) -> None:
    recipe, settings = classify(bases, tmp_path)
    shutil.copytree(bases / "encoder", tmp_path / "encoder")
    changes = {"model.from": str(tmp_path / "encoder"), "name": "texts", "training.max_steps": 2}
    run = bottega.train(recipe, {**settings, **STEADY, **changes}).path
    before = bottega.load(run, device="cpu").evaluate()
    shutil.rmtree(tmp_path / "encoder")
    assert bottega.load(run, device="cpu").evaluate() == before


def test_evaluate_and_resume_without_the_base_raise_the_same_error(home: Path, no_hub: list[str]) -> None:
    run = fine_tune(home)
    shutil.rmtree(home / "runs" / "tb")
    message = r"^the base model of this run, model\.from runs/tb, no longer exists; restore it$"
    with pytest.raises(CheckpointError, match=message):
        bottega.load(run)
    with pytest.raises(CheckpointError, match=message):
        fine_tune(home, **{"training.max_steps": 12})
    assert no_hub == []


def test_a_base_outside_the_runs_is_found_by_its_absolute_path(
    home: Path, tmp_path: Path, no_hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "runs").rename(home / "bases")
    run = fine_tune(home, start="bases/tb").absolute()
    monkeypatch.chdir(tmp_path)
    assert bottega.load(run, device="cpu").model is not None, "the base model has not moved"
    shutil.rmtree(home / "bases")
    with pytest.raises(CheckpointError, match=r"model\.from bases/tb, no longer exists; restore it$"):
        bottega.load(run)
    assert no_hub == []


def test_a_path_is_never_looked_up_on_the_hub(home: Path, no_hub: list[str]) -> None:
    (home / "kept").mkdir()
    for name in ("./no", "/no/where", "~/no", "runs/no", "a/b/c", "kept/no", "../no"):
        with pytest.raises(UsageError, match=rf"^model\.from: {re.escape(name)} is not a local folder; ") as caught:
            resolve_model(name, key="model.from")
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"^model\.from: mine/no is not a local folder; "):
        fine_tune(home, start="mine/no", output_dir="mine")
    assert no_hub == []
    for name in ("nosuchdir", "owner/model"):
        message = rf"^model\.from: {name} is not a local folder, and the hub could not be reached; .*$"
        with pytest.raises(EnvironmentProblem, match=message):
            resolve_base_folder(name)
    assert no_hub == ["nosuchdir", "owner/model"]


def test_an_adapter_is_refused_as_a_base_model(home: Path) -> None:
    narrow = {"name": "adapter", "options": {"size": 2}}
    run = fine_tune(home, technique=narrow)
    with pytest.raises(UsageError, match="contains only an adapter, not a complete model"):
        resolve_base_folder(str(run))
    final = bottega.load(run, device="cpu").export()
    for name in (run, final, final / "adapter"):
        with pytest.raises(
            UsageError,
            match=rf"not a complete model; set model.from to its base .* to {final / 'adapter'}",
        ):
            resolve_base_folder(str(name))


def test_trainable_parameters_are_equal_in_log_and_model_card(home: Path) -> None:
    run = fine_tune(home)
    log = (run / "log.txt").read_text()
    counts = re.search(r"([\d,]+) of ([\d,]+) parameters trainable", log)
    assert counts is not None
    saved = bottega.load(run, device="cpu")
    sizes = {name: p.numel() for name, p in saved.model.named_parameters()}
    assert counts[1] == f"{sum(size for name, size in sizes.items() if 'lora_' in name):,}"
    assert counts[2] == f"{sum(sizes.values()):,}"
    card = (saved.export() / "README.md").read_text()
    assert f"- {counts[1]} of {counts[2]} parameters trainable" in card
    assert re.findall(r"[\d,]+ parameters", card) == [f"{counts[2]} parameters"]
    assert f"- data: path `{home.parent / 'other.txt'}`\n" in card
    assert "null" not in card
    frozen = fine_tune(home, technique=None, name="frozen", **{"training.freeze": ["model.embed_tokens"]})
    num_trainable = sum(size for name, size in sizes.items() if "lora_" not in name and "embed" not in name)
    assert f" {num_trainable:,} of " in (frozen / "log.txt").read_text()


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_exported_files_follow_the_umask(bases: Path, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        for name in ("language", "image"):
            folder = bottega.load(bases / name, device="cpu").export(tmp_path / name)
            modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
            assert any(name.endswith(".safetensors") for name in modes)
            assert set(modes.values()) == {0o666 & ~mask}
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"targets": ["("]}, {}, r"^techniques\.lora\.targets: '\(' is not a regular expression"),
        ({"train": ["nix"]}, {}, r"^techniques\.lora\.train: 'nix' is not a module"),
        ({"train": ["("]}, {}, r"^techniques\.lora\.train: '\(' is not a regular expression"),
        ({"targets": ["lm_head"]}, {}, r"^techniques\.lora\.targets: .*it is tied to the embedding"),
        (
            {},
            {"training.groups": [{"pattern": ".*embed.*", "scale": None}, {"pattern": ".*"}]},
            r"^training\.groups: '\.\*embed\.\*' matches model\.embed_tokens\.weight of the base model",
        ),
        ({}, {"training.freeze": ["model.embed_tokens"]}, r"^training\.freeze: .* of the base"),
        (
            {},
            {"training.freeze": ["backbone"]},
            r"^training\.freeze: remove backbone, because .* already freezes the base model",
        ),
    ],
)
def test_invalid_lora_options_are_refused_by_key(
    home: Path, options: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        fine_tune(home, technique={"name": "lora", "options": options}, **changes)


def test_a_rank_beyond_the_matrix_is_noted(home: Path) -> None:
    run = fine_tune(home, technique={"name": "lora", "options": {"rank": 17}}, **{"training.max_steps": 1})
    assert "techniques.lora.rank: 17 is above the full rank of" in (run / "log.txt").read_text()
    other = fine_tune(
        home, name="low", technique={"name": "lora", "options": {"rank": 16}}, **{"training.max_steps": 1}
    )
    assert "techniques.lora.rank" not in (other / "log.txt").read_text()


def test_freezing_the_backbone_freezes_its_lora_layers(bases: Path, tmp_path: Path) -> None:
    changes = {"training.freeze": ["backbone"], "training.max_steps": 1, "name": "head"}
    run = train(bases, tmp_path, "classify", technique=LORA, **changes).path
    saved = bottega.load(run, device="cpu")
    trainable = {name for name, group in saved.engine.settings.items() if group.scale is not None}
    assert trainable
    assert all(name.startswith("head.") for name in trainable)


def test_a_sequence_is_evaluated_by_source_as_training_does(tmp_path: Path) -> None:
    first = small_run.write_text(tmp_path / "one.txt", words=900)
    second = small_run.write_text(tmp_path / "two.txt", seed=1, words=500)
    sources = [{"path": str(first), "name": "first"}, {"path": str(second), "name": "second"}]
    settings = {k: v for k, v in small_run.settings(tmp_path, first).items() if k != "data.train.path"}
    changes = {"data.sources": sources, "data.mixture": "sequence", "data.validation.split": 0.2, "name": "turns"}
    run = bottega.train("language", {**settings, **changes, "evaluation.max_batches": None})
    logged = [row for row in run.history() if row["kind"] == "eval"][-1]
    metrics = bottega.load(run.path, checkpoint="last", device="cpu").evaluate()
    assert {"loss", "first/loss", "second/loss", "first/bits_per_byte"} <= metrics.keys()
    assert metrics == {name: logged[name] for name in metrics}
    other = small_run.write_text(tmp_path / "other.txt", seed=2)
    assert "first/loss" not in bottega.load(run.path, device="cpu").evaluate(other)
