"""The language workload: texts, their tokenizer, and a decoder that is trained to predict the next token."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, final

from pydantic import ValidationError

from bottega.config.data import TextData
from bottega.config.recipe import Recipe
from bottega.core.errors import CheckpointError, DataError, UsageError
from bottega.core.model_spec import resolve_reference
from bottega.core.types import Models
from bottega.data.output_files import explain_write_errors
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.external import ExternalData
from bottega.data.sources.source import Source
from bottega.data.text.tokenizer import Tokenizer
from bottega.data.text.tokens import TokenDocuments, TokenWindows
from bottega.data.text.vocabulary import TokenizerSpec
from bottega.models import find_framework
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.kinds import (
    TRAINING_KEYS,
    apply_training_keys,
    describe_balance_problem,
    describe_shape_error,
    resolve_shape_fields,
    shape_to_recipe_keys,
)
from bottega.models.decoder.layout import OWN_MODEL_TYPE, select_layout
from bottega.models.folders.pretrained import export_transformers, read_decoder_shape
from bottega.tasks.base_model import find_base_folder, resolve_tokenizer_spec
from bottega.tasks.language.config import LanguageRecipe
from bottega.tasks.language.prepare import prepare_language
from bottega.tasks.language.task import Language
from bottega.tasks.processor import FolderProcessor
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Workload, choose_headline_metrics

SHAPE_FILE = "shape.json"
TOKEN_GENERATORS = {
    "torch": "bottega.tasks.language.sampling:generate_tokens_of_run",
    "jax": "bottega.tasks.language.jax_sampling:generate_tokens_of_run",
}
"""Framework -> the function that generates tokens."""
MAX_TEXTS = 100_000
"""Maximum number of texts generated at once: they are one batch, and its key-value cache fills the memory."""


def open_workload(recipe: Recipe, *, progress: Callable[[str, int, int], None]) -> LanguageWorkload:
    """Prepare the texts and open the workload."""
    assert isinstance(recipe, LanguageRecipe)
    prepared = prepare_language(recipe.data, resolve_tokenizer_spec(recipe), progress=progress)
    workload = LanguageWorkload(recipe, prepared.tokenizer, prepared)
    workload.sampler.resolve_sample_prompts()  # raises for an invalid prompt now rather than at the first sample
    return workload


def reopen_workload(recipe: Recipe, processor_folder: Path, fingerprint: str) -> LanguageWorkload:
    """Open the workload of a finished run from the folder of its saved processor."""
    assert isinstance(recipe, LanguageRecipe)
    # The shape is read from that folder, because the model that the run started from may be gone.
    try:
        shape = TransformerShape.model_validate_json((processor_folder / SHAPE_FILE).read_bytes())
    except (OSError, ValidationError):
        raise CheckpointError(
            f"cannot read {processor_folder / SHAPE_FILE}; run the training command again to rewrite it"
        ) from None
    return LanguageWorkload(
        recipe,
        Tokenizer.load(processor_folder),
        None,
        shape=shape,
        expected_fingerprint=fingerprint,
        processor_folder=processor_folder,
    )


class LanguageWorkload(Workload):
    """A language model, trained from scratch or from pretrained weights."""

    recipe: LanguageRecipe
    unit = "tokens"
    metrics: tuple[str, ...] = ("loss", "perplexity", "bits_per_byte")

    def __init__(
        self,
        recipe: LanguageRecipe,
        tokenizer: Tokenizer,
        prepared: PreparedData | None,
        *,
        shape: TransformerShape | None = None,
        expected_fingerprint: str | None = None,
        processor_folder: Path | None = None,
    ) -> None:
        """Open with `prepared` data, or reopen from a finished run's `processor_folder` and its data fingerprint."""
        self.recipe, self.tokenizer = recipe, tokenizer
        self._processor_folder = processor_folder
        self.shape = shape or resolve_decoder_shape(recipe, tokenizer.vocab_size)
        self.sequence_length = recipe.data.sequence_length or self.shape.context
        base_folder = find_base_folder(recipe, processor_folder=processor_folder)
        options = {"balance_weight", "z_weight", "zero_init_residual"}
        self.task: Language = Language(
            shape=self.shape,
            pretrained=str(base_folder) if base_folder else None,
            **recipe.model.model_dump(include=options, exclude_none=True),
        )
        self.metrics = (*type(self).metrics, *self.task.evaluation_metrics)
        self.data = TableData(
            recipe,
            prepare=self._prepare,
            read_table=self._read_table,
            read_external=self._read_external,
            prepared=prepared,
            expected_fingerprint=expected_fingerprint,
        )
        self.processor = LanguageProcessor(tokenizer, self.shape)
        self.sampler: LanguageSampler = LanguageSampler(recipe, tokenizer)

    @property
    def headline(self) -> tuple[str, ...] | None:
        """All metrics, but not the load of each expert."""
        return (
            choose_headline_metrics(self.recipe, "loss", "perplexity", "bits_per_byte", "load_entropy", "firing_rate")
            if self.task.evaluation_metrics
            else None
        )

    def _prepare(self, recipe: LanguageRecipe) -> PreparedData:
        spec = resolve_tokenizer_spec(recipe, processor_folder=self._processor_folder)
        return prepare_language(recipe.data, spec, progress=lambda stage, done, total: None)

    def _read_table(self, prepared: PreparedData, name: str, *, is_training: bool) -> Source:
        return self._open_tokens(prepared, name, seed=self.recipe.seed if is_training else None)

    def _read_external(self, external: ExternalData) -> Source:
        """Encode external texts with the tokenizer of this run."""
        own_data = self.recipe.data
        data = external.replace_in(TextData(train=own_data.train, sources=own_data.sources, clean=own_data.clean))
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(Path(folder))
            spec = TokenizerSpec(kind="pretrained", path=folder)
            prepared = prepare_language(data, spec, progress=lambda stage, done, total: None)
        return self._open_tokens(prepared, external.table, seed=None)

    def _open_tokens(self, prepared: PreparedData, table: str, *, seed: int | None) -> Source:
        """Return padded documents or packed windows; training data has a seed, by which windows are shifted."""
        data = self.recipe.data
        with_bytes = seed is None
        if data.padding:
            return TokenDocuments(prepared.folder, table, sequence_length=self.sequence_length, with_bytes=with_bytes)
        return TokenWindows(
            prepared.folder,
            table,
            sequence_length=self.sequence_length,
            seed=seed,
            with_document_ids=data.separate_documents,
            with_bytes=with_bytes,
        )

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write the model in the layout of transformers if it has the architecture, else in our own, which `model.from` reads."""
        eos_token_id, state = self.tokenizer.eos_token_id, models["model"].state_dict()
        export_transformers(state, self.shape, folder, bos_token_id=eos_token_id, eos_token_id=eos_token_id)
        self.tokenizer.save(folder)
        library = "bottega" if select_layout(self.shape, state) == OWN_MODEL_TYPE else "transformers"
        return {"library_name": library, "pipeline_tag": "text-generation"}

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        return self.task.add_perplexity(metrics)


@final
class LanguageProcessor(FolderProcessor):
    """The tokenizer and the shape of the model."""

    def __init__(self, tokenizer: Tokenizer, shape: TransformerShape) -> None:
        self.tokenizer, self.shape = tokenizer, shape

    def is_saved(self, folder: Path) -> bool:
        if not (folder / SHAPE_FILE).is_file():
            return False
        if Tokenizer.load(folder).fingerprint != self.tokenizer.fingerprint:
            raise DataError("the tokenizer of the data differs from that of this run; start over with --fresh")
        return True

    def write(self, folder: Path) -> None:
        self.tokenizer.save(folder)
        (folder / SHAPE_FILE).write_text(self.shape.model_dump_json(indent=1) + "\n")


@final
class LanguageSampler(Sampler):
    """Generates texts that continue prompts."""

    recipe: LanguageRecipe
    requests = ("prompt", "count", "max_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")

    def __init__(self, recipe: LanguageRecipe, tokenizer: Tokenizer) -> None:
        self.recipe, self.tokenizer = recipe, tokenizer

    def resolve_sample_prompts(self) -> tuple[str, ...]:
        """Return the prompts of the samples; raise UsageError if the tokenizer cannot encode one.

        The default is a line break, or the empty prompt if the vocabulary has no line break.
        """
        prompts = self.recipe.samples.prompts
        try:
            for prompt in prompts:
                self.tokenizer.encode(prompt)
        except UsageError as error:
            if prompts != type(self.recipe.samples).model_fields["prompts"].default:
                raise UsageError(f"samples.prompts: {error}") from None
            return ("",)
        return prompts

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        options, prompts = self.recipe.samples, self.resolve_sample_prompts()
        texts = self.generate(
            models,
            device=device,
            prompt=[prompts[i % len(prompts)] for i in range(options.count)],
            max_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=self.recipe.seed,
        )
        folder.mkdir(parents=True, exist_ok=True)
        for i, text in enumerate(texts):
            (folder / f"{i:02d}.txt").write_text(text + "\n", encoding="utf-8")

    def generate(
        self,
        models: Models,
        *,
        device: Any,
        prompt: str | list[str] = "",
        count: int = 1,
        max_tokens: int = 200,
        temperature: float = 0.8,
        stream: TextIO | None = None,
        progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
        **options: Any,
    ) -> list[str]:
        """Return each text with its prompt.

        A single text is written to `stream` token by token; of several, which are written when all are complete, `progress` is
        told the number of tokens.
        """
        if count < 1:
            raise UsageError(f"--count {count}: expected 1 or more")
        num_texts = count * (1 if isinstance(prompt, str) else len(prompt))
        if num_texts > MAX_TEXTS:
            raise UsageError(f"--count {count}: {num_texts:,} texts at once are too many; the maximum is {MAX_TEXTS:,}")
        prompts = [text for text in ([prompt] if isinstance(prompt, str) else prompt) for _ in range(count)]
        eos_token_id = self.tokenizer.eos_token_id
        prompt_tokens = [list(map(int, self.tokenizer.encode(text))) or [eos_token_id] for text in prompts]
        token_stream = stream if len(prompts) == 1 else None
        decoder = self.tokenizer.stream_decoder()
        generated: list[list[int]] = [[] for _ in prompts]
        options = {"max_new_tokens": max_tokens, "temperature": temperature, **options}
        generate_tokens = resolve_reference(TOKEN_GENERATORS[find_framework(models["model"])])
        tokens = generate_tokens(
            models["model"],
            prompt_tokens,
            device=device,
            mixed_precision=self.recipe.training.mixed_precision,
            stop_token=eos_token_id,
            **options,
        )
        if token_stream:  # after the options have been checked
            token_stream.write(prompts[0])
        for index, next_tokens in enumerate(tokens):
            if len(prompts) > 1:
                progress("tokens", index + 1, max_tokens)
            for i, token in enumerate(next_tokens):
                if token is not None and token != eos_token_id:
                    generated[i].append(token)
                    if token_stream:
                        token_stream.write(decoder.push(token))
                        token_stream.flush()
        texts = [text + self.tokenizer.decode(new_tokens) for text, new_tokens in zip(prompts, generated, strict=True)]
        if token_stream:
            token_stream.write(decoder.finish() + "\n")
        elif stream:
            stream.write(("\n" + "-" * 40 + "\n").join(texts) + "\n")
        return texts

    def example_flags(self) -> str:
        prompt = next(iter(self.recipe.samples.prompts), "")
        return f" --prompt {shlex.quote(prompt)}" if prompt.strip() else ""

    def present(self, generated: list[str], out: Path | None, *, run: Path, **request: Any) -> dict[str, Any]:
        """Write the texts to `out`, if given; `generate` has printed them already."""
        if out is not None:
            with explain_write_errors(out):
                out.write_text("\n\n".join(generated) + "\n", encoding="utf-8")
        return {"texts": generated}


def resolve_decoder_shape(recipe: LanguageRecipe, vocab_size: int) -> TransformerShape:
    """Return the dimensions of the model: those of its size or of `model.from`, overridden by those the recipe sets."""
    model, length, explicit = recipe.model, recipe.data.sequence_length, recipe.model.get_explicit_dimensions()
    if explicit.get("vocab_size", vocab_size) < vocab_size:
        raise UsageError(
            f"model.vocab_size: {explicit['vocab_size']} is less than the tokenizer's {vocab_size} tokens; remove it"
        )
    try:
        if model.from_ is not None:
            dims = _resolve_base_dimensions(recipe, explicit, vocab_size)
        else:
            dims = {"vocab_size": vocab_size, **resolve_shape_fields(model.kind, model.size, explicit)}
        if length is not None and "context" not in explicit:
            dims["context"] = max(length, int(dims.get("context", 0)))
        dims.setdefault("context", length or 256)
        length = length or int(dims["context"])
        if length > dims["context"]:
            raise UsageError(f"data.sequence_length: {length} tokens exceed model.context {dims['context']}; lower it")
        return TransformerShape(**dims)
    except ValidationError as error:
        key, text = describe_shape_error(error)
        raise UsageError(f"model.{key}: {text}") from None


def _resolve_base_dimensions(recipe: LanguageRecipe, explicit: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the dimensions of the model that a recipe starts from; raise UsageError if the recipe sets other ones."""
    base_folder = find_base_folder(recipe)
    assert base_folder is not None, "the recipe has model.from"
    shape = read_decoder_shape(base_folder)
    base_values = shape_to_recipe_keys(shape)
    # transformer is the default and may not have been set explicitly, so any kind in the folder is accepted.
    kind = {"kind": recipe.model.kind} if recipe.model.kind != "transformer" else {}
    loss_weights = ("balance_weight", "z_weight") if shape.experts is not None else ()
    for key, value in sorted({**kind, **explicit}.items()):
        # A bias takes part in the choice of experts, so weights that were trained with one keep it.
        is_free = key in TRAINING_KEYS and key in base_values and not (key == "balance" and base_values[key] == "bias")
        if not is_free and key not in loss_weights and value != base_values.get(key):
            raise UsageError(
                f"model.{key}: {value} differs from {base_values.get(key, 'none')} of model.from; remove it"
            )
    if shape.experts is not None and "balance_weight" in explicit:
        problem = describe_balance_problem(explicit.get("balance", base_values["balance"]), explicit["balance_weight"])
        if problem is not None:
            raise UsageError(f"model.balance_weight: {problem}")
    if shape.vocab_size < vocab_size:
        raise UsageError(
            f"model.from: its vocabulary of {shape.vocab_size} is less than the tokenizer's {vocab_size} tokens; "
            "remove data.tokenizer to use its own"
        )
    return apply_training_keys(shape, explicit)
