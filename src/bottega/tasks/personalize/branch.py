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
from bottega.data.prepare.prepared import Prepared
from bottega.data.present import ending, is_folder
from bottega.data.sources.given import GivenData
from bottega.data.sources.source import Source
from bottega.models.device import choose_device
from bottega.models.frozen.config import FrozenPrecision
from bottega.models.frozen.language import load_language_model
from bottega.storage.durable import replacing_file
from bottega.tasks.from_tables import TableBranch
from bottega.tasks.generation.drawing import check_steps
from bottega.tasks.generation.paths import Path as NoisePath
from bottega.tasks.kept import keep_once, read_kept
from bottega.tasks.personalize.arms import draw_arm
from bottega.tasks.personalize.asks import Person, found_users, person_of, read_history
from bottega.tasks.personalize.config import PersonalizeRecipe
from bottega.tasks.personalize.data.prepare import prepare_people
from bottega.tasks.personalize.data.prompted import PromptedRows, Said
from bottega.tasks.personalize.data.records import PersonalRows, Record, evenly
from bottega.tasks.personalize.drawing import Artist, Drawn
from bottega.tasks.personalize.keyword_answers import add_answers, read_answers
from bottega.tasks.personalize.keywords import Say
from bottega.tasks.personalize.parts import FACTS, PersonalFacts, find_parts
from bottega.tasks.personalize.prompts import Teller
from bottega.tasks.personalize.sheets import Compared, compare_sheet
from bottega.tasks.personalize.task import Personalize

__all__ = ["PersonalizeBranch", "draw_arm", "prepare", "reopen"]

ANSWERS = "keywords.jsonl"
REMEMBERS = True
"""See `registry.prepare`."""
MOST_PICTURES, MOST_LETTERS = 10_000, 1000
COUNT, PEOPLE = 4, 4
"""Pictures for each wish, and how many people, where nobody says."""


def _silent(stage: str, done: int, total: int) -> None:
    pass


def prepare(recipe: Recipe, *, say: Say, codec: Path | None = None) -> PersonalizeBranch:
    """With `codec`, a run that goes on with the keywords it began with, on whichever machine."""
    assert isinstance(recipe, PersonalizeRecipe)
    facts = find_parts(recipe)  # before the data, which may take long
    said = read_answers(codec / ANSWERS) if codec is not None else {}
    return PersonalizeBranch(recipe, facts, prepare_people(recipe.data, progress=say), remembered=said).ask_all(say)


def reopen(recipe: Recipe, codec: Path, fingerprint: str) -> PersonalizeBranch:
    assert isinstance(recipe, PersonalizeRecipe)
    facts = read_kept(codec / FACTS, PersonalFacts.model_validate_json).again(recipe, codec)
    return PersonalizeBranch(recipe, facts, None, expected=fingerprint, remembered=read_answers(codec / ANSWERS))


def precision_of(recipe: PersonalizeRecipe) -> FrozenPrecision:
    """Of the frozen models, as the device of the recipe has it."""
    asked = recipe.model.frozen_precision
    if asked != "auto":
        return asked
    return "bf16" if choose_device(recipe.device).type == "cuda" else "fp32"


@final
class PersonalizeBranch(TableBranch):
    recipe: PersonalizeRecipe
    task: Personalize
    unit = "images"
    requests = ("user", "wish", "history", "count", "seed", "steps", "sampler", "guidance", "negative_prompt")

    def __init__(
        self,
        recipe: PersonalizeRecipe,
        facts: PersonalFacts,
        prepared: Prepared | None,
        *,
        expected: str | None = None,
        remembered: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Either with prepared data, or again for a finished run, whose data is prepared when asked for. `remembered` is what
        the language model has said in this run."""
        self.recipe, self.facts, self._prepared, self._expected = recipe, facts, prepared, expected
        self.teller = Teller(recipe, facts, precision=precision_of(recipe), remembered=remembered or {})
        self.task = self._task()
        self._said: dict[str, list[Said]] = {}
        samples = recipe.samples
        check_steps(samples.steps, samples.sampler, self.task.path.most_steps, prefix="samples.")

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
            shape=self.facts.shape,
            path=path,
            language_model=self.facts.language_model.folder,
            image_model=self.facts.diffusion.folder,
            precision=precision_of(self.recipe),
            checkpointing=self.recipe.training.gradient_checkpointing,
            image_size=self.recipe.data.image_size,
            latent=(side, side, image.latent_channels),
            weights=model.weights,
            keyword_dropout=model.keyword_dropout,
            start_tokens=self.teller.prompts.tokens_of(model.start_words or ()),
            empty=self.teller.texts.empty,
        )

    @property
    def frozen(self) -> dict[str, str]:
        return self.facts.frozen

    @property
    def derived(self) -> str | None:
        said = sorted((name, keywords) for name, keywords in self._said.items())
        return hashlib.sha256(repr(said).encode()).hexdigest()

    # Data

    def prepare_again(self, recipe: Any) -> Prepared:
        return prepare_people(recipe.data, progress=_silent)

    def people(self, name: str) -> PersonalRows:
        return PersonalRows(self.prepared, name)

    def table(self, name: str, *, is_training: bool) -> Source:
        if name not in self._said:
            self._ask([name], _silent)
        return PromptedRows(self.people(name), self._said[name], self.teller.sayings)

    def ask_all(self, say: Say) -> PersonalizeBranch:
        """Has the language model say its keywords of everybody."""
        self._ask(list(self.prepared.tables), say)
        return self

    def _ask(self, names: Sequence[str], say: Say) -> None:
        records = {name: _records(self.people(name)) for name in names}
        found = self.keywords([one for several in records.values() for one in several], say=say)
        for name, several in records.items():
            self._said[name], found = found[: len(several)], found[len(several) :]

    def keywords(self, records: Sequence[Record], models: Models | None = None, say: Say = _silent) -> list[Said]:
        """What the language model says of each; it is loaded only where an answer is not known yet."""
        device = choose_device(self.recipe.device)
        loaded: list[Any] = []

        def load() -> Any:
            folder = self.facts.language_model.folder
            if not loaded:
                opened = load_language_model(
                    folder, precision=precision_of(self.recipe), checkpointing=False, device=device
                )
                loaded.append(opened.to(device))
            return loaded[0]

        if models is not None:
            model = models["language_model"]
            return self.teller.keywords(records, model, next(model.parameters()).device, say)
        return self.teller.keywords(records, load, device, say)

    @property
    def notes(self) -> list[str]:
        return [*super().notes, *self.teller.prompts.keyworder.notes]

    def other(self, given: GivenData) -> Source:
        rows = PersonalRows(prepare_people(given.section(self.recipe.data), progress=_silent), given.table)
        return PromptedRows(rows, self.keywords(_records(rows)), self.teller.sayings)

    def save_codec(self, folder: Path) -> None:
        keep_once(
            folder / FACTS,
            self.facts.model_dump_json(indent=1) + "\n",
            parse=PersonalFacts.model_validate_json,
            is_same=self.facts.check,
            otherwise="the frozen models have other sizes than this run began with; start over with --fresh",
        )
        with replacing_file(folder / ANSWERS) as temporary:
            add_answers(temporary, self.teller.prompts.keyworder.answered)

    # Pictures

    @cached_property
    def artist(self) -> Artist:
        return Artist(self.recipe, self.task, self.teller, self.facts)

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Held-out people: what they liked, what they wish for, and that drawn without and with personalisation."""
        name = next(
            (one for one in ("validation", "test") if one in self.prepared.tables), self.prepared.training_tables[0]
        )
        rows = self.people(name)
        people = [person_of(rows, number) for number in evenly(len(rows), self.recipe.samples.count)]
        records = [person.record for person in people]
        said = self.keywords(records, models)
        seed = self.recipe.seed
        without, _ = draw_arm(self, models, records, arm="none", device=device, seed=seed, keywords=said)
        personal, _ = draw_arm(self, models, records, arm="both", device=device, seed=seed, keywords=said, pick=True)
        known = [self.artist.known(person, one) for person, one in zip(people, said, strict=True)]
        compare_sheet([Compared(*row) for row in zip(known, without, personal, strict=True)], folder / "sheet.png")

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
    ) -> Drawn:
        """For each user and each wish `count` pictures; a picture is a function of its number and the seed alone."""
        if count is not None and count < 1:
            raise UsageError(f"--count {count}: at least one picture is asked for")
        _check_wishes(_several(wish))
        people = self._asked_for(_several(user), _several(wish), history)
        is_plain = user is None and wish is None and history is None
        each = count if count is not None else 1 if is_plain else COUNT
        if len(people) * each > MOST_PICTURES:
            raise UsageError(
                f"--count {each}: {len(people) * each:,} pictures are asked for at once; {MOST_PICTURES:,} are the most, so "
                "ask several times, with another --seed"
            )
        said = self.keywords([person.record for person in people], models)
        return self.artist.draw(models, people, said, each=each, device=device, seed=seed, say=say, **how)

    def _asked_for(self, users: list[str], wishes: list[str], history: Any) -> list[Person]:
        if history is not None and users:
            raise UsageError(
                f"--history {history}: is for somebody new, and --user {users[0]} is known; give one of them"
            )
        if history is not None:
            people = read_history(Path(history), wishes=wishes)
        else:
            held_out_first = sorted(self.prepared.tables, key=lambda name: name.startswith("train"))
            tables = [self.people(name) for name in held_out_first]
            shown = list(dict.fromkeys(tables[0].users))[: 1 if wishes else PEOPLE]
            people = found_users(users or shown, tables)
        return [person.wishing(one) for person in people for one in wishes] if wishes else people

    def example(self) -> str:
        held_out = sorted(self.prepared.tables, key=lambda name: name.startswith("train"))
        record = self.people(held_out[0]).record(0)
        return f" --user {shlex.quote(record.user)} --wish {shlex.quote(record.asked)}"

    def check_out(self, path: Path) -> None:
        if not is_folder(path):
            ending(path, FORMATS)

    def present(self, made: Drawn, out: Path | None, *, run: Path, **asked: Any) -> dict[str, Any]:
        return made.write(out or run / "generated")

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        from bottega.tasks.personalize.export import publish_personal

        return publish_personal(self, models, folder)


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
