"""Redaction of secrets: `redact_text` and `redact_values` replace them by `***` in everything that is written or printed.

A secret is recognised in four ways (docs/secrets.md):

- by its name: `api_key`, `hf_token`, `password` and the like, in a block of values, as NAME=value or as --name value;
- by its shape: tokens with a known prefix, JWTs, private keys, `Bearer ...`;
- as part of an address: `user:password@` and query parameters that do not select the data are removed;
- by its value: that of an environment variable with a secret name, wherever it appears in a text.

In a block of values, such as a recipe, the values of the environment are not searched for if they are ordinary words, as all
keys and choices of a recipe are: with PGPASSWORD=language, `task: language` stays a recipe that can be loaded.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit, urlunsplit

from bottega.secret_names import has_name_marker, is_secret_name

REPLACEMENT = "***"
MIN_ENVIRONMENT_VALUE = 8
"""Characters of the shortest value of an environment variable that is searched for: shorter ones are parts of ordinary words."""
_ORDINARY_WORDS = re.compile(r"[a-z]{1,15}(?:[ ._/-][a-z]{1,15})*")
"""Lower-case words, as tasks, metrics, kinds and recipes are named. Generated passwords have capitals, digits or at least 16 letters."""
CREDENTIALS_VARIABLE = "BOTTEGA_CREDENTIALS"
"""The environment variable that passes secrets of a recipe to child processes, as JSON: public text -> secret text."""

PUBLIC_PARAMETERS = frozenset(
    {"id", "file", "filename", "name", "path", "part", "page", "chunk", "shard", "split", "subset", "offset", "limit"}
    | {"format", "version", "versionid", "revision", "ref", "branch", "download", "dl", "raw", "export"}
)
"""Query parameters that select the data. Any other parameter may be a credential."""
LABEL_MAPS = frozenset({"class_names", "class_weights", "id2label", "label2id", "per_class"})
"""Blocks whose keys are labels of the data: there a class called `password` does not name a secret."""

_CONTAINER_SCHEMES = frozenset({"abfs", "abfss", "az", "wasb", "wasbs"})
"""Schemes with a container in place of a user: abfs://container@account/path."""

# One slash is enough, because pathlib collapses two; quotes and brackets end an address in a message.
_ADDRESS = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]*:/{1,3}[^\s\"'<>`]+")
_QUERY = re.compile(r"\?(?=[^?/]*=)")
"""Outside of http a question mark is also a wildcard, as in part?/year=2020/a.parquet."""

_SHAPES = re.compile(
    r"(?:(?<!\w)|(?<=\\[nrt]))(?:"  # in JSON a line break is written as \n
    r"hf_[A-Za-z0-9]{30,}"
    r"|sk-(?=[\w-]*[0-9A-Z])[\w-]{20,}"
    r"|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}\b|AIza[\w-]{35}"
    r"|xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{20,}"
    r"|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|nvapi-[\w-]{40,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"
    r")"
    r"|(?<=[Bb]earer )(?=\S*[0-9A-Z])[\w.~+/=-]{16,}"
    r"|(?i:(?<=authorization: )|(?<=authorization:))(?:(?i:basic|bearer|digest|negotiate|token)\s+[\w.~+/=-]+"
    r"|(?=\S*[0-9])[\w.~+/=-]{6,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.{0,16384}?-----END [A-Z ]*PRIVATE KEY-----|[A-Za-z0-9+/=\s\\]*)"
)
_SHAPE_MARKERS = (
    *("hf_", "sk-", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_", "glpat-", "AKIA", "ASIA", "AIza", "xox"),
    *("xapp-", "npm_", "pypi-", "nvapi-", "eyJ", "earer ", "uthorization", "UTHORIZATION", "PRIVATE KEY"),
)
"""One of these is in every text that `_SHAPES` matches; looking for them is ten times as fast."""

_HEAD = re.compile(r"(?<![\w.-])(?P<name>(?:--?)?[A-Za-z_][\w.-]{0,99})(?P<end>\\*[\"'])?(?P<separator>\s*[=:]\s*)")
"""The start of NAME=value, "name": "value" and name: value."""
_QUOTED = r"(?P<quote>\\*[\"'])(?P<quoted>.*?)(?<!\\)(?P=quote)"
_VALUE = re.compile(rf"{_QUOTED}|(?P<open>\\*[\"'][^\n]*)|(?P<plain>[^\s\"'`{{\[\\][^\s\"'`]*)")
"""A value; a quotation that is not closed ends with its line."""
_OPTION = re.compile(
    rf"(?<![\w-])(?P<name>--[A-Za-z][\w.-]*)(?P<space>\s+)(?:{_QUOTED}|(?P<plain>[^\s\"'`-][^\s\"'`]*))"
)
"""--name value."""
_HARMLESS = re.compile(
    r"|null|none|~|true|false|\*+|[-+]?[0-9]{1,5}|[-+]?[0-9]*\.[0-9]+(?:e[-+]?[0-9]+)?", re.IGNORECASE
)
"""Values that are not secret even under a secret name."""
_CREDENTIAL_LIKE = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])\S{6,}|\S{20,}")


def redact_text(text: str) -> str:
    """Return `text` with every secret in it replaced by `***`, and addresses without their credentials."""
    return _redact_patterns(_redact_environment(text, with_words=True))


def _redact_environment(text: str, *, with_words: bool) -> str:
    pattern = _environment.get_pattern(with_words=with_words)
    return text if pattern is None else pattern.sub(REPLACEMENT, text)


def _redact_patterns(text: str) -> str:
    """Redact all that can be recognised without the environment."""
    if ":/" in text:
        text = _ADDRESS.sub(_strip_match, text)
    if any(marker in text for marker in _SHAPE_MARKERS):
        text = _SHAPES.sub(REPLACEMENT, text)
    if has_name_marker(text):
        text = _redact_assignments(text)
        if "--" in text:
            text = _OPTION.sub(_redact_option, text)
    return text


def redact_values(value: Any) -> Any:
    """Return nested blocks and lists with every secret in a text replaced by `***`; other values are unchanged.

    In a list of words, such as a command line, the word after --name is redacted if the name is that of a secret.
    Ordinary words are not searched for, even if they are the value of a secret variable.
    """
    return _redact_value(value, is_secret=False)


def redact_document(text: str, suffix: str) -> str:
    """Return the text of a file without secrets; a `.json` file stays valid, because only its texts are changed."""
    if suffix != ".json":
        return redact_text(text)
    try:
        value = json.loads(text)
    except ValueError:
        return redact_text(text)
    redacted = redact_values(value)
    return text if redacted == value else json.dumps(redacted, indent=1, ensure_ascii=False) + "\n"


def is_secret_value(name: str, value: Any) -> bool:
    """Return whether a value is a secret because of its name: text, or a whole number of six digits or more."""
    if not is_secret_name(name) or not LABEL_MAPS.isdisjoint(name.split(".")[:-1]):
        return False
    if isinstance(value, bool) or not isinstance(value, str | int):
        return False
    return _HARMLESS.fullmatch(str(value).strip()) is None


def strip_credentials(address: str) -> str:
    """Return an address without user, password and query parameters that may be credentials.

    Text that is not an address is returned unchanged.
    """
    scheme, separator, rest = address.partition("://")
    if not separator or not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*", scheme):
        return address
    is_http = scheme.lower() in ("http", "https")
    if not is_http and not _QUERY.search(rest):
        # In other stores a question mark is a wildcard, and # part of a name.
        host, slash, path = rest.partition("/")
        return f"{scheme}://{_strip_user(host, scheme)}{slash}{path}"
    try:
        parts = urlsplit(address)
    except ValueError:  # such as an IPv6 address that is not closed
        return f"{scheme}://"
    public_pairs = [pair for pair in parts.query.split("&") if pair.partition("=")[0].lower() in PUBLIC_PARAMETERS]
    return urlunsplit((parts.scheme, _strip_user(parts.netloc, scheme), parts.path, "&".join(public_pairs), ""))


def _strip_user(host: str, scheme: str) -> str:
    user, separator, address = host.rpartition("@")
    return host if not separator or (scheme.lower() in _CONTAINER_SCHEMES and ":" not in user) else address


def _strip_match(match: re.Match[str]) -> str:
    """Strip one address inside a sentence, without the punctuation after it."""
    address = match.group()
    trimmed = address.rstrip(".,;:)]}")
    scheme, _, rest = trimmed.partition(":")
    slashes = rest[: len(rest) - len(rest.lstrip("/"))]
    stripped = strip_credentials(f"{scheme}://{rest.lstrip('/')}")
    return stripped.replace("://", f":{slashes}", 1) + address[len(trimmed) :]


def _redact_assignments(text: str) -> str:
    """Redact NAME=value. The value of a name that is not secret is searched, too: note="token=abc" contains another one."""
    pieces: list[str] = []
    position = num_copied = 0
    while (head := _HEAD.search(text, position)) is not None:
        position = head.end()
        name = head["name"]
        if text[head.start() - 1 : head.start()] == "\\" and name[0] in "nrt" and is_secret_name(name[1:]):
            name = name[1:]  # in JSON a line break is written as \n
        value = _VALUE.match(text, position) if is_secret_name(name) else None
        if value is not None and _is_secret_assignment(name, head, value):
            quotation, plain = value["quote"] or "", value["plain"] or ""
            pieces += text[num_copied:position], quotation, REPLACEMENT, quotation, _get_punctuation(plain)
            position = num_copied = value.end()
    return "".join([*pieces, text[num_copied:]]) if pieces else text


def _is_secret_assignment(name: str, head: re.Match[str], value: re.Match[str]) -> bool:
    content = next(text for text in (value["quoted"], value["open"], value["plain"]) if text is not None)
    # Sentences such as "password: missing" and "unexpected token: 'x'" stay as they are.
    may_be_prose = ":" in head["separator"] and head["end"] is None
    if may_be_prose and (value["plain"] is not None or name.lower() == "token"):
        return _CREDENTIAL_LIKE.fullmatch(content) is not None
    return is_secret_value(name, content)


def _get_punctuation(value: str) -> str:
    """Return the punctuation at the end of an unquoted value, which belongs to the sentence."""
    return value[len(value.rstrip(".,;:)]}")) :]


def _redact_option(match: re.Match[str]) -> str:
    plain = match["plain"]
    value = plain if plain is not None else match["quoted"]
    is_prose = plain is not None and plain.isalpha() and len(plain) < MIN_ENVIRONMENT_VALUE
    if is_prose or not is_secret_value(match["name"], value):
        return match.group()  # a sentence such as "give --password again"
    quotation = match["quote"] or ""
    return f"{match['name']}{match['space']}{quotation}{REPLACEMENT}{quotation}{_get_punctuation(plain or '')}"


def _redact_value(value: Any, *, is_secret: bool, has_labels: bool = False) -> Any:
    """Redact one value; `is_secret` is true inside a block with a secret name, `has_labels` inside a map of labels."""
    if isinstance(value, str):
        if is_secret and _HARMLESS.fullmatch(value.strip()) is None:
            return REPLACEMENT
        return _redact_block_text(value)
    if isinstance(value, dict):
        return {
            _redact_block_text(name) if isinstance(name, str) else name: _redact_value(
                inner,
                is_secret=is_secret or (isinstance(name, str) and not has_labels and _names_secret(name, inner)),
                has_labels=name in LABEL_MAPS,
            )
            for name, inner in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_redact_items(value, is_secret=is_secret))
    return REPLACEMENT if is_secret and is_secret_value("secret", value) else value


def _redact_block_text(text: str) -> str:
    return _redact_patterns(_redact_environment(text, with_words=False))


def _names_secret(name: str, value: Any) -> bool:
    return is_secret_name(name) if isinstance(value, dict | list | tuple) else is_secret_value(name, value)


def _redact_items(items: list[Any] | tuple[Any, ...], *, is_secret: bool) -> list[Any]:
    redacted: list[Any] = []
    previous = ""
    for item in items:
        name, separator, assigned = item.partition("=") if isinstance(item, str) else ("", "", "")
        if previous.startswith("--") and isinstance(item, str) and not item.startswith("--"):
            redacted.append(_redact_value(item, is_secret=is_secret or is_secret_value(previous, item)))
        elif separator and not re.search(r"\s", name) and is_secret_value(name, assigned):
            redacted.append(f"{name}={REPLACEMENT}")  # a word of a command line: its value may have spaces
        else:
            redacted.append(_redact_value(item, is_secret=is_secret))
        previous = item if isinstance(item, str) else ""
    return redacted


class _Environment:
    """The values of environment variables with a secret name, read again when the environment has changed."""

    def __init__(self) -> None:
        self._snapshot: dict[bytes, bytes] | None = None
        self._patterns: dict[bool, re.Pattern[str] | None] = {}

    def get_pattern(self, *, with_words: bool = True) -> re.Pattern[str] | None:
        """Return a pattern that matches every secret value, or all but ordinary words; None if there is none."""
        snapshot = dict(os.environb)
        if snapshot != self._snapshot:
            secrets = _list_environment_secrets()
            others = {secret for secret in secrets if _ORDINARY_WORDS.fullmatch(secret) is None}
            self._patterns = {True: _compile_values(secrets), False: _compile_values(others)}
            self._snapshot = snapshot
        return self._patterns[with_words]


_environment = _Environment()


def _list_environment_secrets() -> set[str]:
    """Return the values of variables with a secret name, and passwords and signatures in addresses of any variable."""
    secrets: set[str] = set()
    for name, value in os.environ.items():
        stored = _parse_stored_secrets(value) if name == CREDENTIALS_VARIABLE else {}
        secrets.update(*map(_list_address_secrets, [value, *stored.values()]))
        secrets.update(text for public, text in stored.items() if is_secret_name(public))
        # GOOGLE_APPLICATION_CREDENTIALS is the path of a file, which messages should name.
        is_path = name.upper().endswith("CREDENTIALS") and value.startswith(("/", "~", "."))
        if name != CREDENTIALS_VARIABLE and is_secret_value(name, value) and not is_path:
            secrets.add(value)
    return {text for text in (secret.strip() for secret in secrets) if len(text) >= MIN_ENVIRONMENT_VALUE}


def _parse_stored_secrets(value: str) -> dict[str, str]:
    try:
        stored = json.loads(value)
    except ValueError:
        return {}
    return {str(k): str(v) for k, v in stored.items()} if isinstance(stored, dict) else {}


def _list_address_secrets(address: str) -> list[str]:
    """Return password, signatures and tokens of an address; none of other text."""
    if "://" not in address or not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://\S+", address.strip()):
        return []
    try:
        parts = urlsplit(address)
    except ValueError:
        return []
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    parameters = [value for name, value in parse_qsl(parts.query) if is_secret_name(name, in_address=True)]
    return [password, unquote(password), *parameters]


def _compile_values(secrets: set[str]) -> re.Pattern[str] | None:
    """Return a pattern for secrets as they are, as JSON writes them and as they stand in an address."""
    patterns: dict[str, str] = {}
    for secret in secrets:
        forms = {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
        for form in forms | {quote(secret, safe=""), quote_plus(secret)}:
            escaped = re.escape(form)
            # A word or a number, such as the password `postgres`, is not searched inside longer ones; \n may stand before it in JSON.
            is_word = form.isalpha() or form.isdigit()
            patterns[form] = rf"(?:(?<![^\W_])|(?<=\\[nrt])){escaped}(?![^\W_])" if is_word else escaped
    longest_first = sorted(patterns, key=len, reverse=True)
    return re.compile("|".join(patterns[form] for form in longest_first)) if patterns else None
