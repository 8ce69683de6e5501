"""Names of secrets: which keys, options and environment variables hold a credential, and which only contain the word.

The last part of a name decides, after its parts are separated at `_`, `-` and capitals: `model.hf_token` and `hfToken` both end
with the parts `hf` and `token`.

- `password`, `passphrase`, `secret`, `credential`, `authorization`, `apikey` are secret, whatever stands before them;
- `key` is secret after `api`, `access`, `secret`, `private` and the like: not `key`, `label_key`, `results_key`;
- `token` is secret alone, and after the name of a kind or a service (`access`, `auth`, `hf`, `github`): not `pad_token`,
  `image_token`. In a name of capitals, as environment variables have, it is secret unless a tokenizer has such a token;
- plurals (`max_tokens`, `special_tokens`, `keys`) and names that continue (`tokenizer`, `token_embedding`, `key_size`) are not.
"""

from __future__ import annotations

import re
from functools import lru_cache

_MARKERS = (
    "key",
    "token",
    "secret",
    "pass",
    "pwd",
    "credential",
    "uthoriz",
)
"""One of these is in every secret name, in lower case."""
_SECRET_ENDINGS = ("password", "passwd", "passphrase", "passcode", "secret", "apikey", "accesskey", "privatekey")
"""Ends of the last part: PGPASSWORD and clientsecret count."""
_SECRET_WORDS = frozenset({"secrets", "passwords", "credential", "credentials", "authorization"})
_KEY_KINDS = frozenset(
    {"api", "access", "secret", "private", "auth", "account", "storage", "signing", "encryption", "ssh", "subscription"}
    | {"shared", "service", "master", "license"}
)
_TOKEN_KINDS = frozenset(
    {
        "api",
        "access",
        "auth",
        "bearer",
        "refresh",
        "session",
        "security",
        "oauth",
        "oauth2",
        "jwt",
        "sas",
        "csrf",
        "login",
    }
    | {"secret", "private", "personal", "deploy", "service", "account", "client", "user", "bot", "app", "job", "admin"}
    | {"hf", "hub", "huggingface", "github", "gh", "gitlab", "git", "slack", "discord", "telegram", "npm", "pypi"}
    | {
        "wandb",
        "comet",
        "neptune",
        "clearml",
        "mlflow",
        "kaggle",
        "openai",
        "anthropic",
        "cohere",
        "replicate",
        "modal",
    }
    | {"aws", "azure", "gcp", "google", "gcs", "s3", "minio", "databricks", "snowflake", "vault", "dataset", "registry"}
)
_TOKENIZER_KINDS = frozenset(
    {
        "pad",
        "eos",
        "bos",
        "unk",
        "mask",
        "cls",
        "sep",
        "special",
        "image",
        "audio",
        "video",
        "text",
        "start",
        "end",
        "stop",
    }
    | {"first", "last", "next", "per", "new", "max", "min", "num", "trigger", "placeholder", "initializer", "added"}
)
_PASS_KINDS = frozenset(
    {"db", "database", "user", "smtp", "mail", "redis", "mysql", "pg", "postgres", "ftp", "proxy", "ssh"}
)
_ADDRESS_PARAMETERS = frozenset({"sig", "signature", "key", "code", "auth", "jwt", "sv_sig"})
"""Last parts of query parameters that sign an address, such as X-Amz-Signature."""
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def has_name_marker(text: str) -> bool:
    """Return whether a text may contain the name of a secret; False is certain, and fast."""
    lowered = text.lower()
    return any(marker in lowered for marker in _MARKERS)


@lru_cache(maxsize=4096)
def is_secret_name(name: str, *, in_address: bool = False) -> bool:
    """Return whether a key, an option or a variable names a secret; of a dotted key the last name counts.

    `in_address` also accepts the names of query parameters that sign an address.
    """
    last = re.split(r"[./:]", name.strip("-. "))[-1]
    parts = _PARTS.findall(last)
    while parts and parts[-1].isdigit():  # api_key_2
        parts.pop()
    if not parts:
        return False
    is_capitals = last.isupper()
    end, before = parts[-1].lower(), parts[-2].lower() if len(parts) > 1 else ""
    if end.endswith(_SECRET_ENDINGS) or end in _SECRET_WORDS or (in_address and end in _ADDRESS_PARAMETERS):
        return True
    if end == "key":
        return before in _KEY_KINDS
    if end == "token":
        return not before or before in _TOKEN_KINDS or (is_capitals and before not in _TOKENIZER_KINDS)
    return (end == "pwd" and bool(before)) or (end == "pass" and before in _PASS_KINDS)
