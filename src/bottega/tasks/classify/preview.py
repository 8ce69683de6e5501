"""Preview of prepared texts and their labels."""

from __future__ import annotations

import json
from typing import Any

from bottega.data.prepare.preview import Preview


class LabelledTextPreview(Preview):
    """Shows each text with its label, or its list of labels."""

    column, unit = "input_ids", "tokens"

    def describe(self, row: dict[str, Any]) -> str:
        return str(row["text"])

    def public_fields(self, row: dict[str, Any]) -> dict[str, Any]:
        label = json.loads(row["label"]) if self.prepared.metadata.get("multi_label") else row["label"]
        return {"text": row["text"], "label": label, "source": row["key"]}
