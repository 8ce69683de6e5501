"""Configurations from anywhere: whatever stands in a config.json, the answer is a model or one clear refusal."""

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
from bottega.models.autoencoder.vae import load_autoencoder
from bottega.models.clip.torch import load_clip
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Transformer
from bottega.models.folders.pretrained import export_transformers, read_decoder_shape
from bottega.models.frozen.language import load_language_model
from bottega.models.text_classifier.pretrained import build_pretrained, read_pretrained_shape
from bottega.models.text_encoder import load_text_encoder, read_text_encoder_metadata

transformers = pytest.importorskip("transformers")
VALUES: tuple[Any, ...] = ("text", {"a": 1}, [1, "x"], -3, 0, True)
REFUSED = {2, 3, 4, 5, 7}


def decoder(folder: Path) -> Path:
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


def bert(folder: Path) -> Path:
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=12))
    with tiny_pipelines._quiet():
        model.save_pretrained(folder)
    return folder


def autoencoder(folder: Path) -> Path:
    with tiny_pipelines._quiet():
        tiny_pipelines._vae().save_pretrained(folder)
    return folder


def both_of_text(folder: Path) -> Any:
    return read_text_encoder_metadata(folder), load_text_encoder(folder)


CASES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "decoder": (decoder, read_decoder),
    "classifier": (bert, read_classifier),
    "text encoder": (bert, both_of_text),
    "language model": (
        tiny_pipelines.llama,
        lambda folder: load_language_model(folder, precision="fp32", checkpointing=False),
    ),
    "clip": (tiny_pipelines.clip, load_clip),
    "autoencoder": (autoencoder, load_autoencoder),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[[Path], Any]]:
    make, read = CASES[request.param]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        folder = make(tmp_path_factory.mktemp("model") / "folder")
    read(folder)
    return folder, read


def changed(folder: Path, target: Path, config: str) -> Path:
    shutil.copytree(folder, target, symlinks=True)
    (target / "config.json").write_text(config)
    return target


def test_any_value_in_any_place_gives_a_model_or_a_refusal(
    case: tuple[Path, Callable[[Path], Any]], tmp_path: Path
) -> None:
    folder, read = case
    config = json.loads((folder / "config.json").read_text())
    places = [(key,) for key in config]
    places += [(key, inner) for key, value in config.items() if isinstance(value, dict) for inner in value]
    for number, place in enumerate(places):
        value = VALUES[number % len(VALUES)]
        hostile = json.loads(json.dumps(config))
        block = hostile if len(place) == 1 else hostile[place[0]]
        block[place[-1]] = value
        target = changed(folder, tmp_path / str(number), json.dumps(hostile))
        try:
            read(target)
        except Exception as error:
            is_refused = isinstance(error, BottegaError) and error.code in REFUSED
            if not is_refused:
                raise AssertionError(f"{'.'.join(place)} = {value!r} gives {error!r}") from error
        shutil.rmtree(target)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": "large"}, "hidden_size must be a number, got 'large'"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantized weights are not supported",
        ),
        ({"quantization_config": {"quant_method": "x"}}, "use the folder of the original weights"),
    ],
)
def test_what_cannot_be_built_is_named(
    case: tuple[Path, Callable[[Path], Any]], tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    folder, read = case
    config = json.loads((folder / "config.json").read_text()) | change
    with pytest.raises(UsageError, match=reason):
        read(changed(folder, tmp_path / "x", json.dumps(config)))


def test_a_config_of_a_hundred_thousand_brackets(case: tuple[Path, Callable[[Path], Any]], tmp_path: Path) -> None:
    folder, read = case
    deep = '{"model_type": "qwen3", "a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    with pytest.raises(UsageError, match="nested too deeply"):
        read(changed(folder, tmp_path / "x", deep))
