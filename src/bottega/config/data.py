"""The `data` section that all tasks share: sources, mixture, splits, order, and unreadable records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from bottega.config.layers import BUILTIN_KINDS
from bottega.config.section import (
    Encoding,
    Label,
    Number,
    Pattern,
    Positive,
    Probability,
    Rate,
    RunName,
    Section,
    Whole,
)
from bottega.config.units import Duration, Interval

SourceKind = Literal[
    "auto",
    "embedded",
    "text",
    "lines",
    "jsonl",
    "json",
    "csv",
    "parquet",
    "arrow",
    "huggingface",
    "shards",
    "tfrecord",
    "webdataset",
    "images",
    "audio",
    "video",
    "idx",
    "numpy",
    "synthetic",
]


class Source(Section):
    """One source of data: a file, a folder, an address or a Hugging Face data set."""

    kind: SourceKind = Field(
        "auto", description="format; auto detects it from the path (for validation and test: as for train)"
    )
    path: str | None = Field(
        None, description="file, folder, glob pattern, s3:// gs:// az:// address, or Hugging Face data set"
    )
    more_paths: tuple[str, ...] | None = Field(
        None, description="more files or folders of the same kind; a list in path sets both"
    )
    field: str | tuple[str, ...] | None = Field(
        None,
        description="field of a row to read: a name, the index of a column, or a list of text fields to join; null looks for the "
        "usual names",
    )
    label: str | None = Field(None, description="field of the class or condition; null looks for the usual names")
    encoding: Encoding | None = Field(None, description="encoding of text and tables, such as latin-1; null is UTF-8")
    split: str | None = Field(None, description="split of a Hugging Face data set, such as train")
    subset: str | None = Field(None, description="configuration of a Hugging Face data set")
    columns: tuple[str, ...] | None = Field(None, description="column names of a table without a header")
    delimiter: str | None = Field(None, min_length=1, max_length=1, description="delimiter of a table; null detects it")
    metadata: str | None = Field(
        None,
        description="table of a media folder with one row for each file; null uses metadata.* or the sub-folders as classes",
    )
    pattern: Pattern | None = Field(
        None, description="regular expression for fields in a record's name: '(?P<label>[0-9])_(?P<speaker>[a-z]+)_'"
    )
    name: RunName | None = Field(
        None, description="name of this source in messages and metrics; null is source-0, source-1, ..."
    )
    labels: tuple[Label, ...] | None = Field(
        None, min_length=1, description="use only examples of these classes, such as [0, 1]; null uses all"
    )
    weight: Number | None = Field(None, gt=0, description="sampling weight in a weighted mixture; null is 1")
    limit: Positive | None = Field(None, description="maximum number of examples from this source")
    repeat: Positive | None = Field(None, description="passes over this source in an epoch; null is one")

    @model_validator(mode="before")
    @classmethod
    def _split_path_list(cls, values: Any) -> Any:
        """Split a list in `path` into `path` and `more_paths`."""
        if not isinstance(values, dict) or not isinstance(values.get("path"), list | tuple):
            return values
        first, *others = values["path"] or [None]
        return {**values, "path": first, **({"more_paths": others} if others else {})}


class HeldOut(Source):
    """Validation or test data: a fraction of train, or a source of its own."""

    split: Number | str | None = Field(  # type: ignore[assignment]
        None, description="fraction of train to hold out, such as 0.05; or the split of a Hugging Face data set"
    )

    @model_validator(mode="after")
    def _check_split(self) -> HeldOut:
        if isinstance(self.split, float):
            if not 0 < self.split < 1:
                raise ValueError(f"split: expected a fraction between 0 and 1, got {self.split}")
            if self.path is not None:
                raise ValueError("split (a fraction of train) and path (separate data) cannot be combined; keep one")
        return self


class Splitting(Section):
    """How the examples held out of train for validation and test are chosen."""

    by: Literal["fraction", "hash", "file", "stratified", "group"] = Field(
        "fraction",
        description="fraction: exact fractions; hash: by hash of a field, stable as the data grows; file: whole files; "
        "stratified: the same fraction of each class; group: all rows of a group, such as a user, on one side",
    )
    field: str | None = Field(
        None, description="hash: field to hash, null is the row's name; group: field of the group"
    )
    seed: Whole = Field(0, ge=0, description="seed of the split")
    folds: Positive | None = Field(
        None, ge=2, description="number of cross-validation folds, instead of a fraction; validation is one of them"
    )
    fold: Whole = Field(0, ge=0, description="index of the validation fold")

    @model_validator(mode="after")
    def _check_options(self) -> Splitting:
        if self.by == "group" and self.field is None:
            raise ValueError("by: group needs field; set it, such as field: user")
        if self.folds is not None and self.fold >= self.folds:
            raise ValueError(
                f"fold: expected at most {self.folds - 1}, because there are {self.folds} folds counted from 0; got {self.fold}"
            )
        return self


DIFFICULTY_FRACTIONS = {"easy": 1 / 3, "medium": 2 / 3, "hard": 1.0}
"""Named difficulty of a curriculum stage -> fraction of the examples, easiest first."""


class Stage(Section):
    """One stage of a curriculum."""

    share: Probability = Field(1.0, gt=0, description="fraction of the examples to train on, easiest first")
    steps: Duration = Field(
        description='length of the stage: steps, "1 epoch" or "20%"; the last stage lasts until the end'
    )
    batch_size: Positive | None = Field(None, description="batch size in this stage; null is training.batch_size")
    learning_rate: Rate | None = Field(
        None, description="peak learning rate in this stage; null is training.learning_rate"
    )
    replay: Number = Field(0.0, ge=0, lt=1, description="fraction of each batch from the examples of earlier stages")

    @model_validator(mode="before")
    @classmethod
    def _convert_aliases(cls, values: Any) -> Any:
        """Convert `difficulty: easy` and `epochs: 5`, which other trainers use."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if "difficulty" in values:
            name = values.pop("difficulty")
            if name not in DIFFICULTY_FRACTIONS:
                raise ValueError(f"difficulty: expected one of {', '.join(DIFFICULTY_FRACTIONS)}, got {name!r}")
            if "share" in values and values["share"] != DIFFICULTY_FRACTIONS[name]:
                raise ValueError(
                    f"difficulty: {name} and share: {values['share']} both set the fraction of examples; keep one"
                )
            values["share"] = DIFFICULTY_FRACTIONS[name]
        if "epochs" in values:
            if "steps" in values:
                raise ValueError("epochs and steps both set the length of the stage; keep one")
            values["steps"] = f"{values.pop('epochs')} epochs"
        return values


class Competence(Section):
    """Competence-based curriculum (Platanios et al., 2019).

    At step t the easiest fraction min(1, (t (1 - initial^power) / steps + initial^power)^(1/power)) is used.
    """

    initial: Number = Field(
        0.1, gt=0, lt=1, description="fraction of the examples used at the first step, easiest first"
    )
    steps: Duration = Field(
        Interval(50, "percent"), description='when all examples are used: steps, "1 epoch" or "50%"'
    )
    power: Number = Field(2.0, gt=0, description="1 adds examples at a constant rate, 2 at a decreasing rate")


class Curriculum(Section):
    """Curriculum learning: easy examples first."""

    by: str = Field(
        "length", description="difficulty measure: length, rarity, or the name of a numeric field; small is easy"
    )
    stages: tuple[Stage, ...] = Field((), description="stages, easiest first")
    competence: Competence | None = Field(None, description="increase the difficulty continuously, instead of stages")

    @model_validator(mode="after")
    def _check_stages_or_competence(self) -> Curriculum:
        if bool(self.stages) == (self.competence is not None):
            raise ValueError("expected either stages or competence")
        return self

    @property
    def depends_on_run_length(self) -> bool:
        """Whether the curriculum depends on the length of the run."""
        lengths = [stage.steps for stage in self.stages] if self.competence is None else [self.competence.steps]
        return any(length.unit == "percent" for length in lengths)


class Replay(Source):
    """Earlier data that is mixed into training."""

    share: Number = Field(0.1, gt=0, lt=1, description="fraction of the samples from this earlier data")


class Online(Section):
    """Online learning: one pass in the order of the data; each example is evaluated before it is trained on."""

    replay: Number = Field(
        0.25, ge=0, lt=1, description="fraction of each batch replayed from earlier examples; 0 turns it off"
    )
    memory: Positive | None = Field(None, description="replay from this many of the latest examples; null is all")

    @model_validator(mode="after")
    def _check_memory(self) -> Online:
        if self.memory is not None and not self.replay:
            raise ValueError(f"memory {self.memory} has no effect without replay; set replay, such as 0.2")
        return self


def _convert_switch(value: Any) -> Any:
    """Convert true to a block with its defaults, and false to null."""
    return {} if value is True else None if value is False else value


class Data(Section):
    """Data settings that every task has; each task adds its own."""

    train: Source = Field(default_factory=Source, description="training data")
    sources: tuple[Source, ...] | None = Field(None, min_length=1, description="several sources, instead of train")
    mixture: Literal["concatenate", "weighted", "temperature", "sequence"] | None = Field(
        None,
        description="how sources are combined: concatenate uses each example once in an epoch, weighted samples by weight, temperature "
        "by size, sequence trains on one after the other; null is weighted if a weight is set, else concatenate",
    )
    temperature: Number | None = Field(
        None, gt=0, description="mixture temperature: sampling weights are size^(1/temperature); null is 1"
    )
    replay: Replay | None = Field(None, description="earlier data to mix in, against forgetting")
    curriculum: Curriculum | None = Field(None, description="curriculum: easy examples first")
    online: Annotated[Online | None, BeforeValidator(_convert_switch)] = Field(
        None, description="true trains online, in one pass and in the order of the data; or a block with its options"
    )
    validation: HeldOut | None = Field(None, description="validation data: {split: 0.05} or a source")
    test: HeldOut | None = Field(None, description="test data, not used during training")
    split: Splitting | None = Field(None, description="how held-out examples are chosen; null is by exact fraction")
    bad_records: Literal["stop", "skip"] | None = Field(
        None, description="what to do with unreadable records; null skips media and stops for all else"
    )
    max_bad: Probability | None = Field(None, description="skip: maximum fraction of unreadable records; null is 0.001")
    limit: Whole | None = Field(
        None, gt=0, description="use only this many examples, from the start of the data, for a trial"
    )
    workers: Whole = Field(0, ge=0, description="processes that prepare batches; does not change the order")
    prefetch: Positive | Literal["auto"] = Field("auto", description="batches to prepare in advance")
    pin_memory: bool = Field(True, description="page-locked batches, for faster copies to a GPU")

    @model_validator(mode="after")
    def _check_combinations(self) -> Data:
        default = type(self).model_fields["train"].get_default(call_default_factory=True)
        if self.sources is not None and self.train != default:
            raise ValueError("train and sources both set the training data; keep one")
        if (self.mixture == "temperature" or self.temperature is not None) and self.sources is None:
            raise ValueError("mixture: temperature samples by size and needs several data.sources")
        if self.temperature is not None and self.mixture not in (None, "temperature"):
            raise ValueError(f"temperature has no effect with mixture {self.mixture}; keep one")
        if self.mixture == "sequence":
            self._check_sequence()
        if self.online is not None:
            self._check_online()
        return self

    def _check_online(self) -> None:
        is_weighted = self.temperature is not None or any(source.weight is not None for source in self.sources or ())
        conflicts = {
            "mixture": self.mixture not in (None, "concatenate") or is_weighted,
            "replay": self.replay is not None,
            "curriculum": self.curriculum is not None,
        }
        for key, is_set in conflicts.items():
            if is_set:
                remedy = "set online.replay instead" if key == "replay" else "keep one"
                raise ValueError(f"{key}: a stream (online) trains on its sources one after the other; {remedy}")

    def _check_sequence(self) -> None:
        if self.sources is None or len(self.sources) < 2:
            raise ValueError("mixture: a sequence needs two or more data.sources")
        for key in ("replay", "curriculum"):
            if getattr(self, key) is not None:
                remedy = "make the earlier data the first source" if key == "replay" else "keep one"
                raise ValueError(f"{key}: cannot be combined with mixture: sequence; {remedy}")
        names = get_source_names(self.sources)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sources: {names.count(name)} are named {name}; give each a different name")


def get_source_names(sources: Sequence[Source]) -> list[str]:
    """Return the name of each source; unnamed ones are source-0, source-1, ..."""
    return [source.name or f"source-{number}" for number, source in enumerate(sources)]


class Cleaning(Section):
    """Cleaning of each text, before anything else."""

    unicode: Literal["NFC", "NFKC", "none"] = Field("NFC", description="Unicode normalisation form")
    control: bool = Field(True, description="remove control characters except tabs and line breaks")
    whitespace: bool = Field(True, description="collapse spaces, strip line ends, keep at most one empty line")
    html: bool = Field(False, description="remove tags, scripts and entities")
    boilerplate: bool = Field(False, description="remove menus, cookie notices and other lines that are not prose")


class Filter(Section):
    """Filters that drop texts."""

    min_characters: Positive | None = Field(None, description="drop shorter texts")
    max_characters: Positive | None = Field(None, description="drop longer texts")
    min_words: Positive | None = Field(None, description="drop texts with fewer words")
    languages: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="keep only these languages, such as [en, de], detected by script and frequent words",
    )
    max_symbol_share: Probability | None = Field(None, description="drop texts with a larger fraction of symbols")
    max_repeated_share: Probability | None = Field(
        None, description="drop texts with a larger fraction of repeated lines"
    )


class ExactDeduplication(Section):
    """Removal of samples other than texts that are equal once they are decoded."""

    method: Literal["exact"] = Field("exact", description="exact: equal after decoding and resizing")


class Deduplication(Section):
    """Removal of duplicate texts."""

    method: Literal["exact", "near"] = Field(
        "exact", description="exact: equal texts; near: similar texts too (MinHash)"
    )
    threshold: Probability = Field(
        0.8, gt=0, description="near: texts that share this fraction of word n-grams are duplicates"
    )

    def __repr_name__(self) -> str:
        return "Duplicates"  # the repr is part of the key of prepared data, and must not change with the class name


class TextData(Data):
    """Additional settings of text data."""

    clean: Cleaning | None = Field(None, description="clean each text; null leaves texts unchanged")
    filter: Filter | None = Field(None, description="drop texts; null keeps all")
    deduplicate: Deduplication | None = Field(None, description="drop duplicate texts; null keeps all")


def find_held_out_problems(data: Data) -> list[tuple[str, str]]:
    """Return (key, message) for validation, test and replay data that have neither a source nor a fraction."""
    problems: list[tuple[str, str]] = []
    if data.replay is not None and data.replay.path is None and data.replay.kind not in BUILTIN_KINDS:
        problems.append(("data.replay.path", "missing; give the path of the earlier data"))
    for key, held_out in (("data.validation", data.validation), ("data.test", data.test)):
        if held_out is None:
            continue
        has_data = held_out.path is not None or held_out.kind in BUILTIN_KINDS or held_out.split is not None
        if not has_data and not (key == "data.validation" and data.split is not None and data.split.folds):
            problems.append((key, "needs split, a fraction of train such as 0.05, or path, separate data"))
    return problems
