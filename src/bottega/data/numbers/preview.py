"""Preview of prepared vectors."""

from __future__ import annotations

import numpy as np

from bottega.data.prepare.preview import Preview


class NumbersPreview(Preview):
    """Describes rows of numbers."""

    column = "x"

    def describe_array(self, content: np.ndarray) -> str:
        return f"{len(content)} numbers: {np.array2string(np.asarray(content), threshold=8, precision=4)}"
