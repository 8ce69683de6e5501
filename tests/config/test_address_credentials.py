"""Credentials in addresses: stripped, while everything that identifies the data remains."""

from __future__ import annotations

import json

import pytest

from bottega.config.credentials import restore_credentials
from bottega.config.data import Source
from bottega.config.load import to_yaml
from bottega.config.recipe import diff_recipes
from bottega.core.errors import UsageError
from bottega.redaction import (
    CREDENTIALS_VARIABLE,
    redact_text,
    strip_credentials,
)
from bottega.tasks.recipes import load_recipe

SECRET = "canary-7d1f0c"


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CREDENTIALS_VARIABLE, "{}")


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (f"https://h.org/a.csv?sig={SECRET}&se=2030", "https://h.org/a.csv"),
        (f"https://anna:{SECRET}@h.org:8443/a.csv", "https://h.org:8443/a.csv"),
        (f"https://{SECRET}@h.org/a.csv?{SECRET}#{SECRET}", "https://h.org/a.csv"),
        (f"https://h.org/get?id=7&X-Amz-Signature={SECRET}&format=csv", "https://h.org/get?id=7&format=csv"),
        (f"HTTPS://h.org/a.csv?token={SECRET}", "https://h.org/a.csv"),
        (f"s3://{SECRET}:{SECRET}@bucket/a.txt?token={SECRET}#x", "s3://bucket/a.txt"),
        (f"https://[::1/a?sig={SECRET}", "https://"),
        (f"abfs://box:{SECRET}@account.dfs.core.windows.net/a.csv", "abfs://account.dfs.core.windows.net/a.csv"),
    ],
)
def test_credentials_are_stripped(address: str, public: str) -> None:
    assert strip_credentials(address) == public
    assert strip_credentials(public) == public
    assert SECRET not in redact_text(f"cannot read '{address}'; or {address}, or {address.replace('://', ':/')}.")


@pytest.mark.parametrize(
    "text",
    [
        "data/my file.txt",
        "C:/data?sig=1",
        "s3://bucket/part-?.csv",
        "s3://bucket/part?/year=2020/a.parquet",
        "s3://bucket/a#1.csv",
        "abfs://box@account.dfs.core.windows.net/a.csv",
        "https://h.org/a.csv?download=1",
        "gs://bucket/{000..012}.tar",
    ],
)
def test_addresses_without_credentials_are_unchanged(text: str) -> None:
    assert strip_credentials(text) == text
    source = Source(path=text)
    assert (source.path, restore_credentials(text)) == (text, text)


def test_credentials_are_stripped_inside_a_sentence() -> None:
    text = f"('https://a:{SECRET}@h.org/a.csv?sig={SECRET}'); see https://h.org/b?sig={SECRET}, and note a: b"
    assert redact_text(text) == "('https://h.org/a.csv'); see https://h.org/b, and note a: b"


def make_overrides(query: str) -> dict[str, object]:
    return {"data.train.path": f"https://h.org/a.txt{query}", "needs": {"judge": {"recipe": "classify"}}}


def test_recipe_holds_no_credentials_and_new_ones_are_not_a_change() -> None:
    first = load_recipe(["language", make_overrides(f"?sig={SECRET}")]).recipe
    assert SECRET not in to_yaml(first) + repr(first) + json.dumps(first.results_key())
    assert restore_credentials("https://h.org/a.txt") == f"https://h.org/a.txt?sig={SECRET}", (
        "the reader does not get the credential"
    )
    second = load_recipe(["language", make_overrides("?sig=renewed")]).recipe
    assert diff_recipes(first, second) == []
    assert first.run_name() == second.run_name()
    assert diff_recipes(first, load_recipe(["language", make_overrides("?id=2&sig=renewed")]).recipe)


def test_addresses_that_differ_in_credentials_only_are_refused() -> None:
    sources = [{"path": f"https://h.org/a.txt?piece={number}"} for number in (1, 2)]
    with pytest.raises(UsageError, match=r"https://h\.org/a\.txt is given twice"):
        load_recipe(["language", {"data.train.path": None, "data.sources": sources}])
    load_recipe(["language", {"data.sources": [{"path": f"https://h.org/a.txt?part={n}&sig=x"} for n in (1, 2)]}])


def test_error_message_has_no_credentials() -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe(["language", {"training.max_steps": f"https://h.org/a?sig={SECRET}", "seed": f"h://u:{SECRET}@x"}])
    assert SECRET not in str(caught.value)
