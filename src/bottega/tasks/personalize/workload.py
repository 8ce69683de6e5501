"""The workload of personalised images: user records, keywords, frozen models and the sampler of one recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, final

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.core.types import Models
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.models.device import choose_device
from bottega.models.frozen.config import FrozenPrecision
from bottega.storage.durable import replacing_file
from bottega.tasks.generation.paths import NoisePath
from bottega.tasks.generation.sampling_options import check_steps
from bottega.tasks.metadata import read_metadata
from bottega.tasks.personalize.config import PersonalizeRecipe
from bottega.tasks.personalize.data.condition_tokens import ConditionTokenizer, PromptedRows, RecordKeywords
from bottega.tasks.personalize.data.prepare import prepare_people
from bottega.tasks.personalize.data.records import PersonalRows, Record
from bottega.tasks.personalize.frozen_models import (
    METADATA_FILE,
    GeneratorTokenizer,
    PersonalizeMetadata,
    find_frozen_models,
    load_generator_tokenizer,
)
from bottega.tasks.personalize.image_sampler import ImageSampler
from bottega.tasks.personalize.keyword_cache import append_answers, read_cached_answers
from bottega.tasks.personalize.keywords import KeywordGenerator
from bottega.tasks.personalize.prompts import ImagePrompts
from bottega.tasks.personalize.run_keywords import RunKeywords, ignore_progress, list_records
from bottega.tasks.personalize.sampler import PersonalizeSampler
from bottega.tasks.personalize.task import Personalize
from bottega.tasks.processor import FileProcessor, Processor
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Workload

ANSWERS_FILE = "keywords.jsonl"


def open_workload(recipe: Recipe, *, progress: ProgressCallback, processor: Path | None = None) -> PersonalizeWorkload:
    """Open the task for training; with `processor`, a resumed run keeps the keywords that it began with."""
    assert isinstance(recipe, PersonalizeRecipe)
    metadata = find_frozen_models(recipe)  # before the data, which may take long
    answers = read_cached_answers(processor / ANSWERS_FILE) if processor is not None else {}
    prepared = prepare_people(recipe.data, progress=progress)
    workload = PersonalizeWorkload(recipe, metadata, prepared, resumed_answers=answers)
    workload.run_keywords.generate_tables(prepared, list(prepared.tables), progress)
    return workload


def reopen_workload(recipe: Recipe, processor: Path, fingerprint: str) -> PersonalizeWorkload:
    """Open the task of a finished run, whose data is prepared again only when it is used."""
    assert isinstance(recipe, PersonalizeRecipe)
    metadata = read_metadata(processor / METADATA_FILE, PersonalizeMetadata.model_validate_json)
    answers = read_cached_answers(processor / ANSWERS_FILE)
    return PersonalizeWorkload(
        recipe, metadata.relocate(recipe, processor), None, expected_fingerprint=fingerprint, resumed_answers=answers
    )


def resolve_precision(recipe: PersonalizeRecipe) -> FrozenPrecision:
    """Return the precision of the frozen models; `auto` depends on the device of the recipe."""
    precision = recipe.model.frozen_precision
    if precision != "auto":
        return precision
    return "bf16" if choose_device(recipe.device).type == "cuda" else "fp32"


def build_task(
    recipe: PersonalizeRecipe,
    metadata: PersonalizeMetadata,
    prompts: ImagePrompts,
    generator_tokenizer: GeneratorTokenizer,
) -> Personalize:
    """Return the task; raises UsageError if the recipe does not fit the image generator."""
    model, pipeline = recipe.model, generator_tokenizer.metadata
    path = NoisePath(
        objective=pipeline.objective, schedule=pipeline.schedule, shift=pipeline.shift, min_snr=model.min_snr
    )
    if model.min_snr is not None and not path.uses_schedule:
        raise UsageError(
            f"model.min_snr: {pipeline.folder} is a {pipeline.objective} model, which has no noise schedule; remove model.min_snr"
        )
    pipeline.check_side(recipe.data.image_size)
    side = recipe.data.image_size // pipeline.downsample
    return Personalize(
        shape=metadata.shape,
        path=path,
        language_model=metadata.language_model.folder,
        image_model=metadata.diffusion.folder,
        precision=resolve_precision(recipe),
        checkpointing=recipe.training.gradient_checkpointing,
        image_size=recipe.data.image_size,
        latent=(side, side, pipeline.latent_channels),
        weights=model.weights,
        keyword_dropout=model.keyword_dropout,
        start_tokens=prompts.encode_words(model.start_words or ()),
        empty=generator_tokenizer.empty_text_ids,
    )


@final
class PersonalizeWorkload(Workload):
    """A frozen image generator with soft prompts that adapt it to what a user likes."""

    recipe: PersonalizeRecipe
    task: Personalize
    data: TableData
    unit = "images"

    def __init__(
        self,
        recipe: PersonalizeRecipe,
        metadata: PersonalizeMetadata,
        prepared: PreparedData | None,
        *,
        expected_fingerprint: str | None = None,
        resumed_answers: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Take either prepared data, or the fingerprint that the data of a finished run must have.

        `resumed_answers` are the answers of the language model that the run has trained with.
        """
        self.recipe, self.metadata = recipe, metadata
        self.prompts = ImagePrompts(
            folder=metadata.language_model.folder,
            options=recipe.model.keywords,
            length=recipe.data.sequence_length,
            reserved=metadata.shape.num_image_tokens + metadata.shape.num_prefix_tokens,
            content=metadata.language_model.content,
        )
        precision = resolve_precision(recipe)
        generator = KeywordGenerator(self.prompts.builder, precision=precision, resumed_answers=resumed_answers)
        self.run_keywords = RunKeywords(
            generator, folder=self.prompts.folder, precision=precision, device=recipe.device
        )
        self.generator_tokenizer = load_generator_tokenizer(metadata.diffusion)
        self.condition_tokenizer = ConditionTokenizer(self.prompts, self.generator_tokenizer)
        self.task = build_task(recipe, metadata, self.prompts, self.generator_tokenizer)
        samples = recipe.samples
        check_steps(samples.steps, samples.sampler, self.task.path.max_steps, prefix="samples.")
        self.data = TableData(
            recipe,
            prepare=lambda recipe: prepare_people(recipe.data, progress=ignore_progress),
            read_table=self._read_table,
            read_external=self._read_external,
            prepared=prepared,
            expected_fingerprint=expected_fingerprint,
            notes=lambda prepared: generator.notes,
            derived_fingerprint=self.run_keywords.hash_tables,
        )
        self.processor = PersonalizeProcessor(metadata, generator)
        self.sampler = PersonalizeSampler(self)

    @property
    def frozen_hashes(self) -> dict[str, str]:
        return self.metadata.component_hashes

    def personal_rows(self, name: str) -> PersonalRows:
        """Return the records of one prepared table."""
        return PersonalRows(self.data.prepared, name)

    def generate_keywords(
        self, records: Sequence[Record], models: Models | None = None, progress: ProgressCallback = ignore_progress
    ) -> list[RecordKeywords]:
        """Return the keywords of each record; without `models`, the language model is loaded if it is needed."""
        return self.run_keywords.generate(records, models, progress)

    def _read_table(self, prepared: PreparedData, name: str, *, is_training: bool) -> Source:
        return self.run_keywords.read_table(prepared, name, self.condition_tokenizer)

    def _read_external(self, external: ExternalData) -> Source:
        prepared = prepare_people(external.replace_in(self.recipe.data), progress=ignore_progress)
        rows = PersonalRows(prepared, external.table)
        return PromptedRows(rows, self.generate_keywords(list_records(rows)), self.condition_tokenizer)

    @cached_property
    def image_sampler(self) -> ImageSampler:
        """Generates images for records and their keywords."""
        clip = self.metadata.clip.folder if self.metadata.clip is not None else None
        zero_unconditional = self.generator_tokenizer.metadata.zero_unconditional
        return ImageSampler(
            self.recipe, self.task, self.condition_tokenizer, clip=clip, zero_unconditional=zero_unconditional
        )

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        from bottega.tasks.personalize.export import export_personalize

        return export_personalize(self, models, folder)


@final
class PersonalizeProcessor(Processor):
    """Metadata of the frozen models, and the answers of the language model that the run has used."""

    def __init__(self, metadata: PersonalizeMetadata, generator: KeywordGenerator) -> None:
        self.metadata, self.generator = metadata, generator

    def save(self, folder: Path) -> None:
        FileProcessor(
            METADATA_FILE,
            self.metadata.model_dump_json(indent=1) + "\n",
            parse=PersonalizeMetadata.model_validate_json,
            is_same=self.metadata.check_same_models,
            mismatch="the sizes of the frozen models differ from those of this run; start over with --fresh",
        ).save(folder)
        with replacing_file(folder / ANSWERS_FILE) as temporary:
            append_answers(temporary, self.generator.answers)
