"""Suggestions correct typing errors: a similar name, or none."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega import cli
from bottega.config.schema_keys import collect_schema_keys
from bottega.core.errors import UsageError
from bottega.models.device import choose_device
from bottega.similar_names import find_similar_names
from bottega.tasks.language.config import LanguageRecipe
from bottega.tasks.recipes import load_recipe

KEYS = sorted(key for key in collect_schema_keys(LanguageRecipe) if "*" not in key)


@given(st.sampled_from(KEYS), st.integers(0, 60), st.sampled_from(string.ascii_lowercase), st.integers(0, 2))
def test_single_typing_error_suggests_the_key(key: str, position: int, letter: str, kind: int) -> None:
    """One letter inserted, deleted or transposed: the key is among the suggestions."""
    at = position % len(key)
    typed = {
        0: key[:at] + letter + key[at:],
        1: key[:at] + key[at + 1 :],
        2: key[:at] + key[at : at + 2][::-1] + key[at + 2 :],
    }
    assert key in find_similar_names(typed[kind], KEYS, count=5)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("gpu", ["cpu", "mps", "auto"]),
        ("data.train.encoding", ["data.train.weight", "data.train.field", "data.train.columns"]),
        ("sgd", ["adam", "lion"]),
    ],
)
def test_other_words_get_no_suggestion(word: str, names: list[str]) -> None:
    assert find_similar_names(word, names) == []


def test_gpu_means_cuda_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_recipe(["language", {"device": "gpu"}]).recipe.device == "cuda"
    with pytest.raises(UsageError, match=r"device: 'tpu' is not a device; choose from auto, cpu, cuda, mps"):
        choose_device("tpu")
    assert cli.main(["plan", "language", "device=tpu"]) == 2
    assert "did you mean" not in capsys.readouterr().err
