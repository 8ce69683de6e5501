"""Untrusted configurations: any config.json gives a model or a one-line error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_pipelines
from bottega.core.errors import BottegaError, UsageError
from bottega.models.autoencoder.torch import load_autoencoder
from bottega.models.clip.torch import load_clip
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.models.folders.pretrained import export_transformers, read_decoder_shape
from bottega.models.frozen.language import load_language_model
from bottega.models.text_classifier.pretrained import build_pretrained, read_pretrained_shape
from bottega.models.text_encoder import load_text_encoder, read_text_encoder_metadata

transformers = pytest.importorskip("transformers")
HOSTILE_VALUES: tuple[Any, ...] = ("text", {"a": 1}, [1, "x"], -3, 0, True)
EXIT_CODES = {2, 3, 4, 5, 7}
"""Exit codes of the errors with which a folder may be refused."""


def save_decoder(folder: Path) -> Path:
    shape = TransformerShape(
        num_layers=1,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_size=4,
        intermediate_size=16,
        vocab_size=30,
        context=16,
    )
    return export_transformers(Transformer(shape).state_dict(), shape, folder)


def read_classifier(folder: Path) -> Any:
    return build_pretrained(read_pretrained_shape(folder, ("a", "b")), 0, folder=folder)


def read_decoder(folder: Path) -> Any:
    return Transformer(read_decoder_shape(folder))


def save_bert(folder: Path) -> Path:
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=12))
    with tiny_pipelines._without_progress_bars():
        model.save_pretrained(folder)
    return folder


def save_autoencoder(folder: Path) -> Path:
    with tiny_pipelines._without_progress_bars():
        tiny_pipelines._vae().save_pretrained(folder)
    return folder


def read_text_encoder(folder: Path) -> Any:
    return read_text_encoder_metadata(folder), load_text_encoder(folder)


# Kind of model -> (function that saves one in a folder, function that reads it)
CASES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "decoder": (save_decoder, read_decoder),
    "classifier": (save_bert, read_classifier),
    "text encoder": (save_bert, read_text_encoder),
    "language model": (
        tiny_pipelines.write_llama,
        lambda folder: load_language_model(folder, precision="fp32", checkpointing=False),
    ),
    "clip": (tiny_pipelines.write_clip, load_clip),
    "autoencoder": (save_autoencoder, load_autoencoder),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[Path], Any]]:
    save, read = CASES[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        folder = save(tmp_path_factory.mktemp("model") / "folder")
    read(folder)
    return folder, read


def copy_with_config(folder: Path, target: Path, config: str) -> Path:
    shutil.copytree(folder, target, symlinks=True)
    (target / "config.json").write_text(config)
    return target


def test_any_config_value_gives_a_model_or_an_error(case: tuple[Path, Callable[[Path], Any]], tmp_path: Path) -> None:
    folder, read = case
    config = json.loads((folder / "config.json").read_text())
    key_paths = [(key,) for key in config]
    key_paths += [(key, inner) for key, value in config.items() if isinstance(value, dict) for inner in value]
    for number, key_path in enumerate(key_paths):
        value = HOSTILE_VALUES[number % len(HOSTILE_VALUES)]
        hostile = json.loads(json.dumps(config))
        section = hostile if len(key_path) == 1 else hostile[key_path[0]]
        section[key_path[-1]] = value
        target = copy_with_config(folder, tmp_path / str(number), json.dumps(hostile))
        try:
            read(target)
        except Exception as error:
            is_refused = isinstance(error, BottegaError) and error.code in EXIT_CODES
            if not is_refused:
                raise AssertionError(f"{'.'.join(key_path)} = {value!r} gives {error!r}") from error
        shutil.rmtree(target)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": "large"}, "hidden_size must be a number, but is 'large'"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantized weights are not supported",
        ),
        ({"quantization_config": {"quant_method": "x"}}, "use the folder of the original weights"),
    ],
)
def test_impossible_config_is_named(
    case: tuple[Path, Callable[[Path], Any]], tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    folder, read = case
    config = json.loads((folder / "config.json").read_text()) | change
    with pytest.raises(UsageError, match=reason):
        read(copy_with_config(folder, tmp_path / "x", json.dumps(config)))


def test_deeply_nested_config_is_refused(case: tuple[Path, Callable[[Path], Any]], tmp_path: Path) -> None:
    folder, read = case
    deep = '{"model_type": "qwen3", "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.raises(UsageError, match=r"the JSON in .* is nested too deeply for a model's configuration"):
        read(copy_with_config(folder, tmp_path / "x", deep))
