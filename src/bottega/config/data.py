"""What every task's data has in a recipe: sources, how they are combined, split and ordered, and what a bad record does."""

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
    kind: SourceKind = Field("auto", description="format; auto tells it from the path (and validation from train)")
    path: str | None = Field(
        None, description="file, folder, pattern, s3:// gs:// az:// address, or Hugging Face data set"
    )
    more_paths: tuple[str, ...] | None = Field(
        None, description="further files or folders of the same kind; path may be given as a list of all of them"
    )
    field: str | tuple[str, ...] | None = Field(
        None,
        description="which field of a row is read: a name, the number of a column counted from 0, or a list of texts to "
        "join; null finds the usual one",
    )
    label: str | None = Field(None, description="which field is the class or condition; null finds the usual one")
    encoding: Encoding | None = Field(None, description="of text and tables, such as latin-1; null is UTF-8")
    split: str | None = Field(None, description="named part of a Hugging Face data set, such as train")
    subset: str | None = Field(None, description="named configuration of a Hugging Face data set")
    columns: tuple[str, ...] | None = Field(None, description="names of the columns of a table without a header")
    delimiter: str | None = Field(None, min_length=1, max_length=1, description="of a table; null finds it")
    metadata: str | None = Field(
        None, description="table beside a media folder, one row a file; null takes metadata.* or the sub-folders"
    )
    pattern: Pattern | None = Field(
        None, description="fields in a record's name, as named groups: '(?P<label>[0-9])_(?P<speaker>[a-z]+)_'"
    )
    name: RunName | None = Field(None, description="what messages and measures call it; null is source-0 and so on")
    labels: tuple[Label, ...] | None = Field(
        None, min_length=1, description="only the examples of these classes, such as [0, 1]; null is all"
    )
    weight: Number | None = Field(None, gt=0, description="share in a weighted mixture; null is 1")
    limit: Positive | None = Field(None, description="at most so many examples of this source")
    repeat: Positive | None = Field(None, description="how often an epoch sees this source; null is once")

    @model_validator(mode="before")
    @classmethod
    def _several_paths(cls, values: Any) -> Any:
        """A list of paths is the first and the others."""
        if not isinstance(values, dict) or not isinstance(values.get("path"), list | tuple):
            return values
        first, *others = values["path"] or [None]
        return {**values, "path": first, **({"more_paths": others} if others else {})}


class HeldOut(Source):
    split: Number | str | None = Field(  # type: ignore[assignment]
        None, description="share of train kept back, such as 0.05; or the named part of a Hugging Face data set"
    )

    @model_validator(mode="after")
    def _share_or_source(self) -> HeldOut:
        if isinstance(self.split, float):
            if not 0 < self.split < 1:
                raise ValueError(f"split: expected a share between 0 and 1, got {self.split}")
            if self.path is not None:
                raise ValueError("a share of train (split) and a source of its own (path) exclude each other")
        return self


class Splitting(Section):
    """How shares of train are chosen for validation and test."""

    by: Literal["fraction", "hash", "file", "stratified", "group"] = Field(
        "fraction",
        description="fraction: exact shares; hash: of a field, stable as the data grows; file: whole files; "
        "stratified: each class its share; group: all rows of one user on one side",
    )
    field: str | None = Field(None, description="hash: what is hashed, null is the row's name; group: whose rows")
    seed: Whole = Field(0, ge=0, description="another seed is another split")
    folds: Positive | None = Field(None, ge=2, description="in place of a share: validation is one of so many parts")
    fold: Whole = Field(0, ge=0, description="which of them")

    @model_validator(mode="after")
    def _needs(self) -> Splitting:
        if self.by == "group" and self.field is None:
            raise ValueError("by: group needs field, such as user")
        if self.folds is not None and self.fold >= self.folds:
            raise ValueError(f"fold {self.fold} is not one of {self.folds}, counted from 0")
        return self


DIFFICULTY_FRACTIONS = {"easy": 1 / 3, "medium": 2 / 3, "hard": 1.0}
"""Named difficulty of a stage -> its share: the easiest third, two thirds, or all of the examples."""


class Stage(Section):
    share: Probability = Field(1.0, gt=0, description="the easiest so many of the examples")
    steps: Duration = Field(description='how long: steps, "1 epoch" or "20%"; the last stage goes on to the end')
    batch_size: Positive | None = Field(None, description="of this stage; null is training.batch_size")
    learning_rate: Rate | None = Field(None, description="the schedule's peak in this stage; null is training's")
    replay: Number = Field(0.0, ge=0, lt=1, description="share of each batch from the examples of earlier stages")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """`difficulty: easy` and `epochs: 5`, as other guides write a stage."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        if "difficulty" in values:
            name = values.pop("difficulty")
            if name not in DIFFICULTY_FRACTIONS:
                raise ValueError(f"difficulty: expected one of {', '.join(DIFFICULTY_FRACTIONS)}, got {name!r}")
            if "share" in values and values["share"] != DIFFICULTY_FRACTIONS[name]:
                raise ValueError(f"difficulty: {name} and share: {values['share']} both say what is seen; keep one")
            values["share"] = DIFFICULTY_FRACTIONS[name]
        if "epochs" in values:
            if "steps" in values:
                raise ValueError("epochs and steps both say how long the stage is; keep one")
            values["steps"] = f"{values.pop('epochs')} epochs"
        return values


class Competence(Section):
    """Platanios et al., 2019: at step t the easiest min(1, (t (1 - initial^power) / steps + initial^power)^(1/power))."""

    initial: Number = Field(0.1, gt=0, lt=1, description="the easiest so many of the examples at the first step")
    steps: Duration = Field(Interval(50, "percent"), description='when all of them are seen: steps, "1 epoch" or "50%"')
    power: Number = Field(2.0, gt=0, description="1 adds as many examples in every step, 2 fewer and fewer")


class Curriculum(Section):
    by: str = Field("length", description="length, rarity, or the name of a field with a score; small is easy")
    stages: tuple[Stage, ...] = Field((), description="from easy to hard")
    competence: Competence | None = Field(None, description="a little harder all the time, in place of stages")

    @model_validator(mode="after")
    def _one_of_two(self) -> Curriculum:
        if bool(self.stages) == (self.competence is not None):
            raise ValueError("expected either stages or competence")
        return self

    @property
    def depends_on_run_length(self) -> bool:
        """Whether the length of the run decides what is seen when."""
        lengths = [stage.steps for stage in self.stages] if self.competence is None else [self.competence.steps]
        return any(length.unit == "percent" for length in lengths)


class Replay(Source):
    share: Number = Field(0.1, gt=0, lt=1, description="of the samples that come from this earlier data")


class Online(Section):
    """A stream: each example comes once, in the order of the data, and is measured before it is learnt from."""

    replay: Number = Field(0.25, ge=0, lt=1, description="share of each batch that was there before; 0 is none")
    memory: Positive | None = Field(None, description="replay: of the last so many examples; null is all")

    @model_validator(mode="after")
    def _memory_has_a_use(self) -> Online:
        if self.memory is not None and not self.replay:
            raise ValueError(f"memory {self.memory} is of what is replayed; give replay a share such as 0.2")
        return self


def _switched(value: Any) -> Any:
    return {} if value is True else None if value is False else value


class Data(Section):
    """What every task's data has; the tasks add to it."""

    train: Source = Field(default_factory=Source, description="what is learned from")
    sources: tuple[Source, ...] | None = Field(None, min_length=1, description="several sources in place of train")
    mixture: Literal["concatenate", "weighted", "temperature", "sequence"] | None = Field(
        None,
        description="how sources are combined: each example once an epoch, by weight, by size, or one source after the "
        "other; null is by weight where one is given, else the first",
    )
    temperature: Number | None = Field(
        None, gt=0, description="mixture temperature: shares are size^(1/temperature); null is 1"
    )
    replay: Replay | None = Field(None, description="earlier data, mixed in so that it is not forgotten")
    curriculum: Curriculum | None = Field(None, description="from easy to hard, in stages")
    online: Annotated[Online | None, BeforeValidator(_switched)] = Field(
        None, description="true: a stream with one pass, in the order of the data; or how much of it is replayed"
    )
    validation: HeldOut | None = Field(None, description="what measures progress: {split: 0.05} or a source")
    test: HeldOut | None = Field(None, description="what measures the result, never looked at while training")
    split: Splitting | None = Field(None, description="how shares of train are chosen; null is by exact fraction")
    bad_records: Literal["stop", "skip"] | None = Field(
        None, description="what a row that cannot be read does; null: media are skipped, all else stops"
    )
    max_bad: Probability | None = Field(None, description="skip: at most this share may be bad; null is 0.001")
    limit: Whole | None = Field(None, gt=0, description="only the first so many examples, for a trial")
    workers: Whole = Field(0, ge=0, description="processes that prepare batches; the order does not depend on it")
    prefetch: Positive | Literal["auto"] = Field("auto", description="batches prepared ahead")
    pin_memory: bool = Field(True, description="page-locked batches, for faster copies to a GPU")

    @model_validator(mode="after")
    def _fits(self) -> Data:
        usual = type(self).model_fields["train"].get_default(call_default_factory=True)
        if self.sources is not None and self.train != usual:
            raise ValueError("train and sources both say what is learned from; keep one")
        if (self.mixture == "temperature" or self.temperature is not None) and self.sources is None:
            raise ValueError("temperature: a mixture by size needs sources")
        if self.temperature is not None and self.mixture not in (None, "temperature"):
            raise ValueError(f"temperature has no meaning with mixture {self.mixture}; leave one out")
        if self.mixture == "sequence":
            self._check_sequence()
        if self.online is not None:
            self._check_online()
        return self

    def _check_online(self) -> None:
        is_weighted = self.temperature is not None or any(one.weight is not None for one in self.sources or ())
        ordered = {
            "mixture": self.mixture not in (None, "concatenate") or is_weighted,
            "replay": self.replay is not None,
            "curriculum": self.curriculum is not None,
        }
        for key, is_said in ordered.items():
            if is_said:
                remedy = "say online.replay, a share of what was there before" if key == "replay" else "leave one out"
                raise ValueError(
                    f"{key}: a stream (online) takes its sources as they come, one after the other; {remedy}"
                )

    def _check_sequence(self) -> None:
        if self.sources is None or len(self.sources) < 2:
            raise ValueError("mixture: a sequence needs two sources or more, one after the other")
        for key in ("replay", "curriculum"):
            if getattr(self, key) is not None:
                remedy = "name the earlier data as the first source" if key == "replay" else "leave one out"
                raise ValueError(f"{key}: a sequence has an order of its own; {remedy}")
        names = get_source_names(self.sources)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sources: {names.count(name)} are named {name}; give each a name of its own")


def get_source_names(sources: Sequence[Source]) -> list[str]:
    return [source.name or f"source-{number}" for number, source in enumerate(sources)]


class Cleaning(Section):
    """What is done to each text before anything else; nothing unless asked for."""

    unicode: Literal["NFC", "NFKC", "none"] = Field("NFC", description="normal form of Unicode")
    control: bool = Field(True, description="remove control characters other than tab and line break")
    whitespace: bool = Field(True, description="one space for many, no space at line ends, at most one empty line")
    html: bool = Field(False, description="remove tags, scripts and entities")
    boilerplate: bool = Field(False, description="remove menus, cookie notices and other lines that are no prose")


class Filter(Section):
    """Which texts stay."""

    min_characters: Positive | None = Field(None, description="shorter texts are left out")
    max_characters: Positive | None = Field(None, description="longer texts are left out")
    min_words: Positive | None = Field(None, description="texts of fewer words are left out")
    languages: tuple[str, ...] | None = Field(
        None, min_length=1, description="only these, such as [en, de], told by script and frequent words"
    )
    max_symbol_share: Probability | None = Field(None, description="texts with more signs than this are left out")
    max_repeated_share: Probability | None = Field(None, description="texts with more repeated lines are left out")


class Deduplication(Section):
    method: Literal["exact", "near"] = Field("exact", description="equal texts, or similar ones as well (MinHash)")
    threshold: Probability = Field(0.8, gt=0, description="near: this share of common word runs makes a duplicate")


class TextData(Data):
    """What data made of text has besides."""

    clean: Cleaning | None = Field(None, description="what is done to each text; null leaves it as it is")
    filter: Filter | None = Field(None, description="which texts stay; null keeps all")
    deduplicate: Deduplication | None = Field(None, description="leave repeated texts out; null keeps all")


def find_held_out_problems(data: Data) -> list[tuple[str, str]]:
    """Held-out data must be said: without that, nothing would tell it from the embedded one."""
    found: list[tuple[str, str]] = []
    if data.replay is not None and data.replay.path is None and data.replay.kind not in BUILTIN_KINDS:
        found.append(("data.replay.path", "missing; name the earlier data"))
    for key, part in (("data.validation", data.validation), ("data.test", data.test)):
        said = part is None or part.path is not None or part.kind in BUILTIN_KINDS or part.split is not None
        if not said and not (key == "data.validation" and data.split is not None and data.split.folds):
            found.append((key, "needs split, a share of train such as 0.05, or path, data of its own"))
    return found
