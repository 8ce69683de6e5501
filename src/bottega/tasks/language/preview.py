"""Preview of prepared text."""

from __future__ import annotations

from typing import Any

from bottega.data.prepare.preview import Preview


class TextPreview(Preview):
    """Shows rows of tokens as text."""

    column = unit = "tokens"

    def describe(self, row: dict[str, Any]) -> str:
        return self.prepared.tokenizer.decode(row["tokens"][:400])

    def public_fields(self, row: dict[str, Any]) -> dict[str, Any]:
        tokens = row["tokens"]
        if len(tokens) and tokens[-1] == self.prepared.metadata["end_of_text"]:
            tokens = tokens[:-1]
        return {"text": self.prepared.tokenizer.decode(tokens), "source": row["key"]}
