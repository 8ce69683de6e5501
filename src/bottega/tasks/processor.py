"""What a run saves beside its weights to be used without its data: tokenizer, classes, sizes, scaling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from bottega.core.errors import DataError
from bottega.storage.durable import writing_folder
from bottega.tasks.metadata import MetadataUnreadable, read_metadata


class Processor(ABC):
    """Everything a model needs beside its weights to read inputs and write outputs."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write to `folder` unless a complete copy is there; raise DataError if that copy differs."""


class FolderProcessor(Processor):
    """A processor of several files, which are written together or not at all."""

    @abstractmethod
    def is_saved(self, folder: Path) -> bool:
        """Return whether `folder` holds a complete copy; raise DataError if it differs."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write all files to an existing folder."""

    def save(self, folder: Path) -> None:
        if not self.is_saved(folder):
            with writing_folder(folder) as temporary:
                self.write(temporary)


@final
@dataclass(frozen=True)
class FileProcessor(Processor):
    """A processor that is one text file."""

    name: str
    text: str
    parse: Callable[[bytes], Any]
    is_same: Callable[[Any], bool]
    """Whether what `parse` read from an earlier copy is equivalent."""
    mismatch: str
    """Error message if it is not."""

    def save(self, folder: Path) -> None:
        try:
            previous = read_metadata(folder / self.name, self.parse)
        except MetadataUnreadable:
            with writing_folder(folder) as temporary:
                (temporary / self.name).write_text(self.text)
            return
        if not self.is_same(previous):
            raise DataError(self.mismatch)
