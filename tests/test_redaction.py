"""Secrets are redacted by name, shape, address and environment; ordinary text stays as it is."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega import redaction
from bottega.config.credentials import (
    find_ambiguous_secret,
    read_secret,
    restore_credentials,
    strip_credentials_in_values,
)
from bottega.config.load import to_yaml
from bottega.config.recipe import diff_recipes
from bottega.core.errors import UsageError
from bottega.core.rundir import RunDirectory
from bottega.redaction import CREDENTIALS_VARIABLE, redact_document, redact_text, redact_values
from bottega.secret_names import has_name_marker, is_secret_name
from bottega.tasks.recipes import load_recipe, parse_overrides
from bottega.tasks.registry import TASKS

SECRET = "canary-3f9a7c"
SHAPES = {
    "huggingface": "hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh",
    "openai": "sk-proj-4f8aQ2_x9Lm-7c1bZZ0pTr5e",
    "github": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "github fine-grained": "github_pat_11ABCDEFG0abcdefghij_klmnop",
    "aws": "AKIAIOSFODNN7EXAMPLE",
    "slack": "xoxb-123456789012-abcdefghij",
    "gitlab": "glpat-ABCdef_123-456789012",
    "google": "AIza" + "Sy4f8aQ2x9Lm7c1bZZ0pTr5eabcdefghijk"[:35],
    "jwt": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n-----END RSA PRIVATE KEY-----",
}
SECRET_NAMES = (
    *(
        "token",
        "api_key",
        "api-key",
        "apiKey",
        "access_token",
        "accessToken",
        "hf_token",
        "hub_token",
        "password",
        "passphrase",
    ),
    *("client_secret", "credentials", "private_key", "x-api-key", "model.api_key", "--api-key", "api_key_2", "db_pass"),
    *(
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "MYSQL_PWD",
        "MY_COMPANY_TOKEN",
        "SSH_PRIVATE_KEY",
    ),
)
ORDINARY_NAMES = (
    *(
        "max_tokens",
        "num_tokens",
        "special_tokens",
        "tokens",
        "pad_token",
        "eos_token",
        "image_token",
        "tokenizer",
        "EOS_TOKEN",
    ),
    *(
        "token_embedding",
        "token_ids",
        "key",
        "keys",
        "results_key",
        "label_key",
        "key_size",
        "monkey",
        "keyword",
        "secretary",
    ),
    *(
        "password_field_width",
        "PWD",
        "OLDPWD",
        "GPG_KEY",
        "first_pass",
        "forward_pass",
        "AWS_ACCESS_KEY_ID",
        "data.train.path",
    ),
)


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CREDENTIALS_VARIABLE, "{}")


# Names


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_value_of_a_secret_name_is_redacted(name: str) -> None:
    assert is_secret_name(name)
    for text in (
        f"{name}={SECRET}",
        f"got {name}='{SECRET} {SECRET}' there",
        f"({name}={SECRET}, x=1)",
        json.dumps({name: SECRET}),
        repr({name: SECRET}),
        json.dumps({"message": json.dumps({name: f'{SECRET}"{SECRET}'})}),
        f"{name}: {SECRET}",
        f"run --{name.strip('-')} {SECRET} --other 3",
        f'note="{name}={SECRET}"',
        f"a=b={name}={SECRET}",
        json.dumps(f"line\n{name}={SECRET}\n{name}={SECRET}"),
    ):
        assert SECRET not in redact_text(text), redact_text(text)
    for values in (
        {name: SECRET},
        {"a": [{name: [SECRET]}]},
        [f"--{name.strip('-')}", SECRET],
        (f"{name}={SECRET} {SECRET}",),
    ):
        assert SECRET not in json.dumps(redact_values(values))


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_value_of_an_ordinary_name_stays(name: str) -> None:
    for text in (f"{name}={SECRET}", f'"{name}": "{SECRET}"', f"{name}: {SECRET}", f"--{name} {SECRET}"):
        assert redact_text(text) == text
    assert redact_values({name: SECRET, "command": [f"--{name}", SECRET]}) == {
        name: SECRET,
        "command": [f"--{name}", SECRET],
    }


NAME_STARTS = st.sampled_from(["", "my_", "model.", "db", "user", "api", "hf", "secret", "x-", "MY_"])
NAME_ENDS = st.sampled_from(
    ["pass", "pwd", "key", "token", "secret", "password", "passcode", "credentials", "authorization"]
)
CASES = st.sampled_from([str.lower, str.upper, str.capitalize])


@given(NAME_STARTS, st.sampled_from(["", "_", "-"]), NAME_ENDS, CASES, st.sampled_from(["", "_2"]))
def test_every_secret_name_has_a_marker(start: str, separator: str, end: str, change_case: Any, number: str) -> None:
    name = start + separator + change_case(end) + number
    if is_secret_name(name):
        assert has_name_marker(f"{name}=x")


def test_capitals_separate_the_parts_of_a_name() -> None:
    assert redact_text("dbPass=hunter2222") == "dbPass=***"


def test_no_key_of_a_recipe_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it or its value would be replaced in every recipe.yaml."""
    names: set[str] = set()

    def visit(schema: Any) -> None:
        for name, inner in (
            schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
        ):
            if name == "properties" and isinstance(inner, dict):
                names.update(inner)
            visit(inner)

    for spec in TASKS.values():
        visit(spec.recipe.model_json_schema())
    assert len(names) > 100
    assert [name for name in sorted(names) if is_secret_name(name)] == []
    for name in names:
        monkeypatch.setenv("SERVICE_PASSWORD", name)
        assert redact_values({name: name}) == {name: name}


@pytest.mark.parametrize("value", [None, True, 0, 3, 0.25, "null", "true", "12345", "0.125", ""])
def test_switches_and_small_numbers_are_not_secrets(value: Any) -> None:
    assert redact_values({"token": value, "use_auth_token": value}) == {"token": value, "use_auth_token": value}


def test_labels_of_the_data_are_not_names_of_secrets() -> None:
    values = {
        "class_names": {"password": "Passwort"},
        "per_class": {"token": {"support": 1234567}},
        "class_weights": {"secret": 2.0},
    }
    assert redact_values(values) == values == strip_credentials_in_values(values)
    assert redact_text("data.class_names.token=Wort") == "data.class_names.token=Wort"


# Shapes and addresses


@pytest.mark.parametrize("token", SHAPES.values(), ids=SHAPES)
def test_tokens_are_recognised_by_their_shape(token: str) -> None:
    for text in (token, f"403 for '{token}'", f"x={token}, y", json.dumps({"a": f"line\n{token}\nline"})):
        assert token not in redact_text(text)
        assert json.dumps(token)[1:-1] not in redact_text(text)
        assert "***" in redact_text(text)


def test_headers_are_redacted() -> None:
    assert redact_text("Authorization: Basic dXNlcjpwYXNz") == "Authorization: ***"
    assert redact_text("curl -H 'Authorization: Bearer abc' x") == "curl -H 'Authorization: ***' x"
    assert redact_text("sent Bearer Ab12Ab12Ab12Ab12xyz") == "sent Bearer ***"


def test_sentences_about_secrets_stay() -> None:
    for text in (
        "model.api_key: unknown key; put secrets into environment variables, never into a recipe",
        "password: missing; give --password again",
        "unexpected token: 'x' at line 3",
        "not logged in: run `wandb login`, set WANDB_API_KEY, or set logging.wandb.offline=true",
        "the bearer of this token has a key",
    ):
        assert redact_text(text) == text


# Environment


@pytest.mark.parametrize("secret", ["hunter2hunter2", 'qu"ote\\d secret', "päss wörd 12", "a/b+c==&d%20", "postgres"])
def test_values_of_secret_variables_are_redacted_in_any_text(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    text = f"login with {secret} failed"
    assert redact_text(text) == text
    monkeypatch.setenv("SERVICE_PASSWORD", secret)
    assert redact_text(text) == "login with *** failed"
    for form in (json.dumps(f"\n{secret}\n"), json.dumps(secret, ensure_ascii=False)):
        assert json.loads(redact_text(form)).strip() == "***"
    monkeypatch.setenv("SERVICE_PASSWORD", "another-value")
    assert redact_text(text) == text, "the environment was not read again"


def test_short_and_ordinary_variables_are_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_PASSWORD", "loss")
    monkeypatch.setenv("SERVICE_NAME", "language")
    monkeypatch.setenv("DB_PASSWORD", "postgres")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/home/anna/key.json")
    text = "language loss 0.5 by postgresql, see /home/anna/key.json"
    assert redact_text(text) == text


def test_passwords_of_addresses_in_variables_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", f"postgresql://anna:{SECRET}@h/db")
    monkeypatch.setenv(CREDENTIALS_VARIABLE, json.dumps({"https://h/a": f"https://h/a?X-Amz-Signature=sig{SECRET}"}))
    assert redact_text(f"{SECRET} and sig{SECRET}") == "*** and ***"


def test_environment_is_read_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = redaction._list_environment_secrets
    monkeypatch.setattr(redaction, "_list_environment_secrets", lambda: (calls.append(1), original())[1])
    monkeypatch.setenv("SERVICE_PASSWORD", "first-password")
    for _ in range(100):
        redact_text("a line")
    assert len(calls) == 1
    monkeypatch.setenv("SERVICE_PASSWORD", "second-password")
    assert redact_text("second-password") == "***"
    assert len(calls) == 2


# Ordinary text

WORDS = st.text(string.ascii_letters, min_size=1, max_size=12)
HASHES = st.text("0123456789abcdef", min_size=6, max_size=64)
FLOATS = st.floats(allow_nan=False).map(repr)
PATHS = st.lists(WORDS, min_size=1, max_size=5).map("/".join)
KEYS = st.sampled_from([name for name in ORDINARY_NAMES if "=" not in name])
OVERRIDES = st.builds("{}={}".format, KEYS, WORDS | HASHES | FLOATS | PATHS)
SAMPLES = st.builds("{}-{:08d}".format, WORDS, st.integers(0, 10**8 - 1))
TOKENS = st.sampled_from(["<|endoftext|>", "[MASK]", "▁the", "Ġtoken", "##ing", "</s>", "key", "token", "secret"])


@given(st.lists(WORDS | HASHES | FLOATS | PATHS | OVERRIDES | SAMPLES | TOKENS, max_size=20).map(" ".join))
def test_ordinary_text_stays(text: str) -> None:
    assert redact_text(text) == text


@given(st.text())
def test_redaction_of_any_text_ends_and_is_final(text: str) -> None:
    redacted = redact_text(text)
    assert redact_text(redacted) == redacted


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS | HASHES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS | WORDS.filter(lambda w: not is_secret_name(w)), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_ordinary_values_stay(value: Any) -> None:
    assert redact_values(value) == value
    text = json.dumps(value, indent=2)
    assert redact_document(text, ".json") == text


@given(JSON_VALUES, st.sampled_from(SECRET_NAMES), st.text(min_size=1))
def test_json_stays_valid(value: Any, name: str, noise: str) -> None:
    text = json.dumps({"a": value, name: SECRET + noise, "b": [f"{name}={SECRET}{noise}"]})
    redacted = redact_document(text, ".json")
    assert SECRET not in redacted
    assert json.loads(redacted)["a"] == value


@pytest.mark.parametrize(
    "piece",
    ["a=", "'a: ", "token: '", "password ", "eyJ", "https://", "--key ", "\\", "-----BEGIN PRIVATE KEY-----", "a.b-c"],
)
def test_repetitive_text_needs_no_deep_recursion(piece: str) -> None:
    redact_text(piece * 3000 + " password=")


# Recipes


class TestRecipe:
    """A secret key of a recipe, which only a plugin can declare, or a free block."""

    def test_stores_no_secret_and_a_new_one_is_not_a_change(self) -> None:
        first, second = (
            load_recipe(
                ["language", {"needs": {"judge": {"recipe": "classify", "settings": {"model.api_key": secret}}}}]
            ).recipe
            for secret in (SECRET, "renewed-4711")
        )
        assert SECRET not in to_yaml(first) + repr(first) + json.dumps(first.results_key())
        assert "'***'" in to_yaml(first) or '"***"' in to_yaml(first)
        assert diff_recipes(first, second) == []
        assert first.run_name() == second.run_name()

    def test_gives_the_secret_to_this_process_and_its_children(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert read_secret("model.api_key") is None
        monkeypatch.setenv("API_KEY", "from-the-environment")
        assert read_secret("model.api_key") == "from-the-environment"
        assert strip_credentials_in_values({"model": {"api_key": SECRET}}) == {"model": {"api_key": "***"}}
        assert read_secret("model.api_key") == SECRET
        assert strip_credentials_in_values({"model": {"api_key": "***"}}) == {"model": {"api_key": "***"}}
        assert read_secret("api_key") == SECRET, "the stored recipe replaced the secret"
        assert redact_text(f"403: {SECRET}") == "403: ***"

    def test_two_values_of_one_name_are_refused(self) -> None:
        assert find_ambiguous_secret({"a": {"api_key": "x1"}, "b": {"api_key": "x1"}, "c": "x"}) is None
        problem = find_ambiguous_secret({"a.api_key": SECRET, "b": {"api_key": "x"}})
        assert problem is not None
        assert problem[0] == "api_key"
        assert SECRET not in problem[1]

    def test_two_values_in_two_recipes_of_a_process_are_not_confused(self) -> None:
        strip_credentials_in_values({"model": {"api_key": SECRET}})
        strip_credentials_in_values({"teacher": {"api_key": SECRET}})
        assert read_secret("api_key") == SECRET
        strip_credentials_in_values({"model": {"api_key": "dependency-5518"}})
        with pytest.raises(UsageError, match="api_key: two recipes of this process") as caught:
            read_secret("api_key")
        assert not {SECRET, "dependency-5518"} & set(str(caught.value).split())
        assert redact_text(f"{SECRET} dependency-5518") == "*** ***"
        for signature in ("sig=first", "sig=renewed"):
            strip_credentials_in_values({"path": f"https://h/a.csv?{signature}"})
        assert restore_credentials("https://h/a.csv") == "https://h/a.csv?sig=renewed"

    @pytest.mark.parametrize("value", ["language", "training", "accuracy", "classify", "embedded", "micro_batch_size"])
    def test_is_the_same_if_a_secret_of_the_environment_is_an_ordinary_word(
        self, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        recipe = load_recipe(["classify", {"name": value.replace("/", "-"), "evaluation.metric": "accuracy"}]).recipe
        results_key, text = recipe.results_key(), to_yaml(recipe)
        monkeypatch.setenv("PGPASSWORD", value)
        assert to_yaml(recipe) == text
        assert recipe.results_key() == results_key
        directory = RunDirectory(tmp_path)
        directory.write(directory.recipe, to_yaml(recipe), redact=False)
        assert load_recipe([directory.recipe]).recipe == recipe
        assert redact_text(f"login with {value} failed") == "login with *** failed"

    def test_with_a_secret_of_the_environment_is_identified_by_its_own_values(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = f"/data/{SECRET}/a.csv"
        recipe = load_recipe(["classify", {"data.train.path": path, "data.train.kind": "csv"}]).recipe
        name = recipe.run_name()
        monkeypatch.setenv("SERVICE_TOKEN", SECRET)
        assert recipe.run_name() == name
        assert SECRET not in to_yaml(recipe)
        file = tmp_path / "recipe.yaml"
        file.write_text(to_yaml(recipe))
        assert diff_recipes(load_recipe([file]).recipe, recipe) == [], "the run cannot be resumed with its own recipe"

    def test_unknown_secret_key_is_an_error_without_the_value(self) -> None:
        with pytest.raises(UsageError, match="put secrets into environment variables") as caught:
            load_recipe(["language", {"training.hf_token": SECRET}])
        assert SECRET not in str(caught.value)

    def test_secret_in_place_of_a_number_is_not_quoted(self) -> None:
        with pytest.raises(UsageError, match=r"training.max_steps: .*\*\*\*") as caught:
            load_recipe(["language", {"training.max_steps": SHAPES["huggingface"]}])
        assert SHAPES["huggingface"] not in str(caught.value)


def test_a_name_that_looks_like_a_token_is_refused() -> None:
    with pytest.raises(UsageError, match="looks like a secret"):
        load_recipe(["classify", {"name": "ghp_abcdefghijklmnopqrstuvwxyz0123456789"}])


def test_a_secret_key_on_the_command_line_says_where_secrets_belong() -> None:
    for word in ("training.api_key=abc123", "--hf-token=abc123"):
        with pytest.raises(UsageError, match="put secrets into environment variables") as caught:
            parse_overrides(["language", word])
        assert "abc123" not in str(caught.value)


def test_a_token_of_letters_alone_is_redacted_and_a_word_is_not() -> None:
    assert redact_text("key sk-NOTESabcdefghijklmnopqrstuvwx") == "key ***"
    assert redact_text("sk-learn-compatible-estimators") == "sk-learn-compatible-estimators"
