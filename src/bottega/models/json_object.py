"""One JSON object from a file that somebody saved beside weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bottega.core.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give the folder of a saved model") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__} where an object was expected")
    return found
