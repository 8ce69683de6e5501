"""The branch of personalised pictures: people, what a language model says of them, and what is drawn for them."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.core.types import Models
from bottega.data.image.write import FORMATS
from bottega.data.output_files import is_folder, require_suffix
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.models.device import choose_device
from bottega.models.frozen.config import FrozenPrecision
from bottega.models.frozen.language import load_language_model
from bottega.storage.durable import replacing_file
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.sampling_options import check_steps
from bottega.tasks.metadata import read_metadata
from bottega.tasks.personalize.arms import generate_arm
from bottega.tasks.personalize.config import PersonalizeRecipe
from bottega.tasks.personalize.contact_sheets import Comparison, write_comparison_sheet
from bottega.tasks.personalize.data.condition_tokens import PromptedRows, Said
from bottega.tasks.personalize.data.prepare import prepare_people
from bottega.tasks.personalize.data.records import PersonalRows, Record, evenly_spaced
from bottega.tasks.personalize.frozen_models import METADATA_FILE, PersonalizeMetadata, find_frozen_models
from bottega.tasks.personalize.image_sampler import PersonalImages, PersonalSampler
from bottega.tasks.personalize.keyword_cache import append_answers, read_cached_answers
from bottega.tasks.personalize.keywords import Say
from bottega.tasks.personalize.prompts import Teller
from bottega.tasks.personalize.task import Personalize
from bottega.tasks.personalize.user_requests import UserRequest, find_users, read_history, request_for_record
from bottega.tasks.processor import FileProcessor, Processor
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Workload

__all__ = ["PersonalizeWorkload", "generate_arm", "prepare", "reopen"]

ANSWERS_FILE = "keywords.jsonl"
REMEMBERS = True
"""See `registry.prepare`."""
MAX_IMAGES, MOST_LETTERS = 10_000, 1000
COUNT, PEOPLE = 4, 4
"""Pictures for each wish, and how many people, where nobody says."""


def _silent(stage: str, done: int, total: int) -> None:
    pass


def prepare(recipe: Recipe, *, progress: Say, processor: Path | None = None) -> PersonalizeWorkload:
    """With `codec`, a run that goes on with the keywords it began with, on whichever machine."""
    assert isinstance(recipe, PersonalizeRecipe)
    facts = find_frozen_models(recipe)  # before the data, which may take long
    said = read_cached_answers(processor / ANSWERS_FILE) if processor is not None else {}
    prepared = prepare_people(recipe.data, progress=progress)
    return PersonalizeWorkload(recipe, facts, prepared, remembered=said).ask_all(progress)


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> PersonalizeWorkload:
    assert isinstance(recipe, PersonalizeRecipe)
    facts = read_metadata(processor / METADATA_FILE, PersonalizeMetadata.model_validate_json).relocate(
        recipe, processor
    )
    return PersonalizeWorkload(
        recipe, facts, None, expected=fingerprint, remembered=read_cached_answers(processor / ANSWERS_FILE)
    )


def resolve_precision(recipe: PersonalizeRecipe) -> FrozenPrecision:
    """Of the frozen models, as the device of the recipe has it."""
    asked = recipe.model.frozen_precision
    if asked != "auto":
        return asked
    return "bf16" if choose_device(recipe.device).type == "cuda" else "fp32"


@final
class PersonalizeWorkload(Workload):
    """A frozen image generator that learns to follow what a person likes."""

    recipe: PersonalizeRecipe
    task: Personalize
    data: TableData
    unit = "images"

    def __init__(
        self,
        recipe: PersonalizeRecipe,
        facts: PersonalizeMetadata,
        prepared: PreparedData | None,
        *,
        expected: str | None = None,
        remembered: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Either with prepared data, or again for a finished run, whose data is prepared when asked for. `remembered` is what
        the language model has said in this run."""
        self.recipe, self.metadata = recipe, facts
        self.teller = Teller(recipe, facts, precision=resolve_precision(recipe), remembered=remembered or {})
        self.task = self._task()
        self._said: dict[str, list[Said]] = {}
        samples = recipe.samples
        check_steps(samples.steps, samples.sampler, self.task.path.max_steps, prefix="samples.")
        self.data = TableData(
            recipe,
            prepare=lambda recipe: prepare_people(recipe.data, progress=_silent),
            read_table=self._read_table,
            read_external=self._read_external,
            prepared=prepared,
            expected=expected,
            notes=lambda prepared: self.teller.prompts.keyworder.notes,
            derived_fingerprint=self._hash_keywords,
        )
        self.processor = PersonalizeProcessor(facts, self.teller)
        self.sampler = PersonalizeSampler(self)

    # The models

    def _task(self) -> Personalize:
        model, image = self.recipe.model, self.teller.texts.facts
        path = NoisePath(objective=image.objective, schedule=image.schedule, shift=image.shift, min_snr=model.min_snr)
        if model.min_snr is not None and not path.uses_schedule:
            raise UsageError(
                f"model.min_snr: {model.min_snr:g}, and {image.folder} is a {image.objective}, which has none; "
                "leave it out"
            )
        image.check_side(self.recipe.data.image_size)
        side = self.recipe.data.image_size // image.downsample
        return Personalize(
            shape=self.metadata.shape,
            path=path,
            language_model=self.metadata.language_model.folder,
            image_model=self.metadata.diffusion.folder,
            precision=resolve_precision(self.recipe),
            checkpointing=self.recipe.training.gradient_checkpointing,
            image_size=self.recipe.data.image_size,
            latent=(side, side, image.latent_channels),
            weights=model.weights,
            keyword_dropout=model.keyword_dropout,
            start_tokens=self.teller.prompts.encode_words(model.start_words or ()),
            empty=self.teller.texts.empty,
        )

    @property
    def frozen_hashes(self) -> dict[str, str]:
        return self.metadata.frozen

    def _hash_keywords(self) -> str:
        said = sorted((name, keywords) for name, keywords in self._said.items())
        return hashlib.sha256(repr(said).encode()).hexdigest()

    # Data

    def personal_rows(self, name: str) -> PersonalRows:
        return PersonalRows(self.data.prepared, name)

    def _read_table(self, prepared: PreparedData, name: str, *, is_training: bool) -> Source:
        if name not in self._said:
            self._ask([name], _silent)
        return PromptedRows(PersonalRows(prepared, name), self._said[name], self.teller.sayings)

    def ask_all(self, say: Say) -> PersonalizeWorkload:
        """Has the language model say its keywords of everybody."""
        self._ask(list(self.data.prepared.tables), say)
        return self

    def _ask(self, names: Sequence[str], say: Say) -> None:
        records = {name: _records(self.personal_rows(name)) for name in names}
        found = self.keywords([one for several in records.values() for one in several], say=say)
        for name, several in records.items():
            self._said[name], found = found[: len(several)], found[len(several) :]

    def keywords(self, records: Sequence[Record], models: Models | None = None, say: Say = _silent) -> list[Said]:
        """What the language model says of each; it is loaded only where an answer is not known yet."""
        device = choose_device(self.recipe.device)
        loaded: list[Any] = []

        def load() -> Any:
            folder = self.metadata.language_model.folder
            if not loaded:
                opened = load_language_model(
                    folder, precision=resolve_precision(self.recipe), checkpointing=False, device=device
                )
                loaded.append(opened.to(device))
            return loaded[0]

        if models is not None:
            model = models["language_model"]
            return self.teller.keywords(records, model, next(model.parameters()).device, say)
        return self.teller.keywords(records, load, device, say)

    def _read_external(self, external: ExternalData) -> Source:
        rows = PersonalRows(prepare_people(external.replace_in(self.recipe.data), progress=_silent), external.table)
        return PromptedRows(rows, self.keywords(_records(rows)), self.teller.sayings)

    # Pictures

    @cached_property
    def image_sampler(self) -> PersonalSampler:
        return PersonalSampler(self.recipe, self.task, self.teller, self.metadata)

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        from bottega.tasks.personalize.export import export_personalize

        return export_personalize(self, models, folder)


@final
class PersonalizeProcessor(Processor):
    """Metadata of the frozen models, and the keywords that the language model answered with."""

    def __init__(self, metadata: PersonalizeMetadata, teller: Teller) -> None:
        self.metadata, self.teller = metadata, teller

    def save(self, folder: Path) -> None:
        FileProcessor(
            METADATA_FILE,
            self.metadata.model_dump_json(indent=1) + "\n",
            parse=PersonalizeMetadata.model_validate_json,
            is_same=self.metadata.check_same_models,
            mismatch="the frozen models have other sizes than this run began with; start over with --fresh",
        ).save(folder)
        with replacing_file(folder / ANSWERS_FILE) as temporary:
            append_answers(temporary, self.teller.prompts.keyworder.answered)


@final
class PersonalizeSampler(Sampler):
    """Images for users and wishes."""

    requests = ("user", "wish", "history", "count", "seed", "steps", "sampler", "guidance", "negative_prompt")

    def __init__(self, workload: PersonalizeWorkload) -> None:
        self.workload, self.recipe = workload, workload.recipe

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Held-out people: what they liked, what they wish for, and that drawn without and with personalisation."""
        name = next(
            (one for one in ("validation", "test") if one in self.workload.data.prepared.tables),
            self.workload.data.prepared.training_tables[0],
        )
        rows = self.workload.personal_rows(name)
        people = [request_for_record(rows, number) for number in evenly_spaced(len(rows), self.recipe.samples.count)]
        records = [person.record for person in people]
        said = self.workload.keywords(records, models)
        seed = self.recipe.seed
        without, _ = generate_arm(self.workload, models, records, arm="none", device=device, seed=seed, keywords=said)
        personal, _ = generate_arm(
            self.workload, models, records, arm="both", device=device, seed=seed, keywords=said, pick=True
        )
        known = [
            self.workload.image_sampler.summarize_user(person, one) for person, one in zip(people, said, strict=True)
        ]
        write_comparison_sheet(
            [Comparison(*row) for row in zip(known, without, personal, strict=True)], folder / "sheet.png"
        )

    def generate(
        self,
        models: Models,
        *,
        device: Any,
        user: Any = None,
        wish: Any = None,
        history: Any = None,
        count: int | None = None,
        seed: int = 0,
        stream: Any = None,
        say: Say = _silent,
        **how: Any,
    ) -> PersonalImages:
        """For each user and each wish `count` pictures; a picture is a function of its number and the seed alone."""
        if count is not None and count < 1:
            raise UsageError(f"--count {count}: at least one picture is asked for")
        _check_wishes(_several(wish))
        people = self._asked_for(_several(user), _several(wish), history)
        is_plain = user is None and wish is None and history is None
        each = count if count is not None else 1 if is_plain else COUNT
        if len(people) * each > MAX_IMAGES:
            raise UsageError(
                f"--count {each}: {len(people) * each:,} pictures are asked for at once; {MAX_IMAGES:,} are the most, so "
                "ask several times, with another --seed"
            )
        said = self.workload.keywords([person.record for person in people], models)
        return self.workload.image_sampler.generate(
            models, people, said, each=each, device=device, seed=seed, say=say, **how
        )

    def _asked_for(self, users: list[str], wishes: list[str], history: Any) -> list[UserRequest]:
        if history is not None and users:
            raise UsageError(
                f"--history {history}: is for somebody new, and --user {users[0]} is known; give one of them"
            )
        if history is not None:
            people = read_history(Path(history), wishes=wishes)
        else:
            held_out_first = sorted(self.workload.data.prepared.tables, key=lambda name: name.startswith("train"))
            tables = [self.workload.personal_rows(name) for name in held_out_first]
            shown = list(dict.fromkeys(tables[0].users))[: 1 if wishes else PEOPLE]
            people = find_users(users or shown, tables)
        return [person.with_wish(one) for person in people for one in wishes] if wishes else people

    def example_flags(self) -> str:
        held_out = sorted(self.workload.data.prepared.tables, key=lambda name: name.startswith("train"))
        record = self.workload.personal_rows(held_out[0]).record(0)
        return f" --user {shlex.quote(record.user)} --wish {shlex.quote(record.wish_or_caption)}"

    def check_output(self, path: Path) -> None:
        if not is_folder(path):
            require_suffix(path, FORMATS)

    def present(self, generated: PersonalImages, out: Path | None, *, run: Path, **request: Any) -> dict[str, Any]:
        return generated.write(out or run / "generated")


def _records(rows: PersonalRows) -> list[Record]:
    return [rows.record(number) for number in range(len(rows))]


def _check_wishes(wishes: list[str]) -> None:
    for wish in wishes:
        if not wish.strip():
            raise UsageError(f'--wish {wish!r}: is blank; say what the picture should show, such as --wish "a star"')
        if len(wish) > MOST_LETTERS:
            raise UsageError(f"--wish: has {len(wish):,} letters; {MOST_LETTERS:,} are the most")


def _several(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]
