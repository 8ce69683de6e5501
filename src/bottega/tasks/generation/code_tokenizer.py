"""What a generator over codes knows of its tokenizer: which one it is, whether it fits, and the model over its codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from pydantic import BaseModel, ConfigDict

from bottega.core.errors import UsageError
from bottega.data.audio.mel import MelProcessor
from bottega.models.autoencoder.codes_folder import read_codes_config
from bottega.models.autoencoder.config import CodesShape
from bottega.models.decoder.config import TransformerShape
from bottega.models.generator.config import CodeGeneratorShape, CodesBackbone, ConditionShape
from bottega.models.pipeline.component import CONFIG
from bottega.tasks import dependencies
from bottega.tasks.frozen_models import check_same_model, find_frozen_model, hash_model_folder
from bottega.tasks.generation.code_language import CodeLanguage, FrozenCodes
from bottega.tasks.generation.config import AudioRecipe, ImageRecipe, VideoRecipe
from bottega.tasks.metadata import read_metadata

FACTS, WHAT = "tokenizer.json", "tokenizer"
TRANSFORMER = "transformer"
"""The part of an exported folder that holds the language model."""


class TokenizerMetadata(BaseModel):
    """Kept with a run: the model over codes understands no other tokenizer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    content: str
    """A hash of all that decides what its codes mean."""


@final
@dataclass(frozen=True)
class CodeTokenizer:
    metadata: TokenizerMetadata
    shape: CodesShape
    metrics = ("loss", "bits_per_code")

    @property
    def downsample(self) -> int:
        return self.shape.autoencoder.downsample

    def build_shape(
        self, model: Any, *, grid: tuple[int, ...], channels: int, condition: ConditionShape
    ) -> CodeGeneratorShape:
        """The shape of a language model over the codes of samples with these sides."""
        if channels != self.shape.autoencoder.channels:
            known = self.shape.autoencoder.channels
            raise UsageError(
                f"model.tokenizer: {self.metadata.folder} knows {known} channels, and the data has {channels}; "
                f"set data.channels to {known}"
            )
        if model.hidden_size % (2 * model.num_heads):
            raise UsageError(
                f"model.hidden_size: {model.hidden_size} with backbone tokens must be a multiple of twice "
                f"num_heads {model.num_heads}"
            )
        codes = self.shape.autoencoder.latent_grid(grid)
        backbone = CodesBackbone(
            grid=grid,
            channels=channels,
            codes=codes,
            num_codes=self.shape.num_codes,
            transformer=TransformerShape(
                num_layers=model.num_layers,
                hidden_size=model.hidden_size,
                num_heads=model.num_heads,
                num_kv_heads=model.num_heads,
                head_size=model.hidden_size // model.num_heads,
                # Two thirds of the usual four times the width: the gate is a third matrix.
                intermediate_size=-(-model.hidden_size * 8 // 3 // 32) * 32,
                vocab_size=self.shape.num_codes + condition.size + 1,
                context=math.prod(codes),
                dropout=model.dropout or 0.0,
            ),
        )
        return CodeGeneratorShape(backbone=backbone, condition=condition)

    def build_task(
        self, key: str, shape: CodeGeneratorShape, *, condition_dropout: float, start: Path | None
    ) -> CodeLanguage:
        if start is not None and not (start / TRANSFORMER).is_dir():
            raise UsageError(f"model.from: {start} is no exported generator over codes")
        return CodeLanguage(
            key=key,
            shape=shape,
            latents=FrozenCodes(folder=self.metadata.folder),
            condition_dropout=condition_dropout,
            pretrained=str(start / TRANSFORMER) if start is not None else None,
        )

    def match_mel(self, own: MelProcessor) -> MelProcessor:
        """A recipe's spectrograms on the scale of those that the tokenizer has learnt."""
        known = MelProcessor.load(Path(self.metadata.folder))
        for name, asked in own.mel.model_dump().items():
            if asked != (has := getattr(known.mel, name)):
                owner = "model.vocoder" if name in ("low", "high") else f"data.{name}"
                raise UsageError(
                    f"{owner}: {asked}, and model.tokenizer ({self.metadata.folder}) was trained with {name} {has}"
                )
        return own.model_copy(update={"scale": known.scale})

    def save(self, processor: Path) -> None:
        (processor / FACTS).write_text(self.metadata.model_dump_json(indent=1) + "\n")

    def check(self, processor: Path) -> None:
        """A run goes on with the tokenizer it began with, or not at all."""
        now, before = self.metadata, _read(processor)
        check_same_model(WHAT, now=now.content, before=before.content, name=now.folder, previous=before.folder)


def resolve_code_tokenizer(recipe: ImageRecipe | AudioRecipe | VideoRecipe) -> CodeTokenizer:
    """The tokenizer that a recipe names; what it cannot do for the recipe is an error by name."""
    model = recipe.model
    if isinstance(recipe, VideoRecipe):
        raise UsageError("model.backbone: tokens is for pictures and mel spectrograms; video takes dit")
    if model.tokenizer is None:
        raise UsageError("model.tokenizer: missing; backbone tokens needs one, such as needs.tokens or an exported run")
    if model.condition not in ("none", "class"):
        raise UsageError(
            f"model.condition: {model.condition} cannot be asked of backbone tokens; it takes class or none"
        )
    if model.vae is not None:
        raise UsageError("model.vae: backbone tokens has a tokenizer in its place; leave it out")
    if isinstance(recipe, AudioRecipe) and model.axes == 1:  # type: ignore[attr-defined]
        raise UsageError("model.axes: 1 with backbone tokens, whose codes are of time and frequency; set model.axes=2")
    folder = resolve_tokenizer_folder(recipe, model.tokenizer)
    shape, said = read_codes_config(folder)
    medium = "audio" if isinstance(recipe, AudioRecipe) else "image"
    for key, asked in (("input", medium), ("normalise", recipe.data.normalise)):
        if said.get(key) != asked:
            remedy = f"set data.{key}={said.get(key)}" if key != "input" else f"give one that reads {medium}"
            raise UsageError(f"model.tokenizer: {folder} was trained with {key} {said.get(key)}, not {asked}; {remedy}")
    return CodeTokenizer(TokenizerMetadata(folder=str(folder), content=hash_model_folder(folder)), shape)


def reopen_code_tokenizer(recipe: ImageRecipe | AudioRecipe | VideoRecipe, processor: Path) -> CodeTokenizer:
    """As the run has kept it. The tokenizer may lie where it was, or where the recipe names it beside a run that was
    moved with its parts; it must be the same."""
    facts, name = _read(processor), str(recipe.model.tokenizer)
    runs = processor.absolute().parent.parent
    places = [lambda: Path(facts.folder), lambda: resolve_tokenizer_folder(recipe, name, beside=runs)]
    part_of = processor.parent if name.startswith(dependencies.PREFIX) else None
    folder = find_frozen_model(WHAT, facts.content, places, recorded=facts.folder, owner=part_of)
    return CodeTokenizer(facts.model_copy(update={"folder": str(folder)}), read_codes_config(folder)[0])


def resolve_tokenizer_folder(recipe: Any, name: str, *, beside: Path | None = None) -> Path:
    """Of a part of the recipe, of a run that was exported, or as it is."""
    absent, key = "holds no tokenizer; give a run or an exported folder", "model.tokenizer"
    found = dependencies.resolve_model_reference(
        recipe, name, key=key, beside=beside, required_file=None, missing_message=absent
    )
    if not (found.path / CONFIG).is_file():
        remedy = "give a run or an exported folder"
        if found.origin in ("part", "run"):
            remedy = f"say bottega export {found.path.parent} first"
        raise UsageError(f"{key}: {found.path.absolute()} holds no tokenizer; {remedy}")
    return found.path.absolute()


def _read(processor: Path) -> TokenizerMetadata:
    return read_metadata(processor / FACTS, TokenizerMetadata.model_validate_json)
