"""The frozen tokenizer of a generator over codes: how it is found and checked, and the model over its codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

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
from bottega.tasks.generation.config import AudioRecipe, ImageRecipe, VideoRecipe
from bottega.tasks.metadata import read_metadata

if TYPE_CHECKING:
    from bottega.tasks.generation.code_language import CodeLanguage

METADATA_FILE, KIND = "tokenizer.json", "tokenizer"
TRANSFORMER_FOLDER = "transformer"
"""Subfolder of an export that holds the language model."""


class TokenizerMetadata(BaseModel):
    """The tokenizer of a run, saved with it: a model over codes works only with the tokenizer it was trained with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    content: str
    """Hash of its configuration and weights."""


@final
@dataclass(frozen=True)
class CodeTokenizer:
    """A frozen tokenizer, and the models that can be built over its codes."""

    metadata: TokenizerMetadata
    shape: CodesShape
    metrics = ("loss", "bits_per_code")

    @property
    def downsample(self) -> int:
        """Pixels per code along each side."""
        return self.shape.autoencoder.downsample

    def build_shape(
        self, model: Any, *, grid: tuple[int, ...], channels: int, condition: ConditionShape
    ) -> CodeGeneratorShape:
        """Return the shape of a language model over the codes of samples with these sides."""
        if channels != self.shape.autoencoder.channels:
            expected = self.shape.autoencoder.channels
            raise UsageError(
                f"model.tokenizer: {self.metadata.folder} reads {expected} channels, but the data has {channels}; "
                f"set data.channels to {expected}"
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
                # Two thirds of the usual 4 x hidden_size, since a gated layer has a third matrix.
                intermediate_size=-(-model.hidden_size * 8 // 3 // 32) * 32,
                vocab_size=self.shape.num_codes + condition.size + 1,
                context=math.prod(codes),
                dropout=model.dropout or 0.0,
            ),
        )
        return CodeGeneratorShape(backbone=backbone, condition=condition)

    def build_task(
        self, key: str, shape: CodeGeneratorShape, *, condition_dropout: float, base_folder: Path | None
    ) -> CodeLanguage:
        """Return the task, which needs torch; `base_folder` is the folder of an exported generator to start from."""
        from bottega.tasks.generation.code_language import CodeLanguage, FrozenCodes

        if base_folder is not None and not (base_folder / TRANSFORMER_FOLDER).is_dir():
            raise UsageError(
                f"model.from: {base_folder} is not an exported generator over codes; give one, or remove it"
            )
        return CodeLanguage(
            key=key,
            shape=shape,
            latents=FrozenCodes(folder=self.metadata.folder),
            condition_dropout=condition_dropout,
            pretrained=str(base_folder / TRANSFORMER_FOLDER) if base_folder is not None else None,
        )

    def match_mel(self, mel: MelProcessor) -> MelProcessor:
        """Return the recipe's mel processor with the scale that the tokenizer was trained with."""
        tokenizer_mel = MelProcessor.load(Path(self.metadata.folder))
        for name, value in mel.mel.model_dump().items():
            if value != (expected := getattr(tokenizer_mel.mel, name)):
                is_band = name in ("low", "high")
                owner, remedy = (
                    ("model.vocoder", "give a vocoder with that band")
                    if is_band
                    else (f"data.{name}", f"set data.{name}={expected}")
                )
                raise UsageError(
                    f"{owner}: {value}, but model.tokenizer ({self.metadata.folder}) was trained with {name} {expected}; "
                    f"{remedy}"
                )
        return mel.model_copy(update={"scale": tokenizer_mel.scale})

    def save(self, processor: Path) -> None:
        """Write what identifies the tokenizer to a processor folder."""
        (processor / METADATA_FILE).write_text(self.metadata.model_dump_json(indent=1) + "\n")

    def check_saved(self, processor: Path) -> None:
        """Raise CheckpointError if a saved processor belongs to another tokenizer."""
        current, recorded = self.metadata, _read_saved_metadata(processor)
        check_same_model(
            KIND,
            current_hash=current.content,
            recorded_hash=recorded.content,
            name=current.folder,
            recorded=recorded.folder,
        )


def resolve_code_tokenizer(recipe: ImageRecipe | AudioRecipe | VideoRecipe) -> CodeTokenizer:
    """Return the tokenizer that a recipe names; raise UsageError if it does not fit the recipe."""
    model = recipe.model
    if isinstance(recipe, VideoRecipe):
        raise UsageError("model.backbone: tokens is for images and mel spectrograms; use dit for video")
    if model.tokenizer is None:
        raise UsageError("model.tokenizer: missing; backbone tokens needs one, such as needs.tokens or an exported run")
    if model.condition not in ("none", "class"):
        raise UsageError(f"model.condition: {model.condition} is not supported with backbone tokens; use class or none")
    if model.vae is not None:
        raise UsageError("model.vae: backbone tokens uses a tokenizer instead; remove it")
    if isinstance(recipe, AudioRecipe) and model.axes == 1:  # type: ignore[attr-defined]
        raise UsageError("model.axes: expected 2 (time and frequency) with backbone tokens, got 1; set model.axes=2")
    folder = resolve_tokenizer_folder(recipe, model.tokenizer)
    shape, config = read_codes_config(folder)
    medium = "audio" if isinstance(recipe, AudioRecipe) else "image"
    for key, value in (("input", medium), ("normalise", recipe.data.normalise)):
        trained_value = config.get(key)
        if trained_value != value:
            remedy = f"set data.{key}={trained_value}" if key != "input" else f"give one that reads {medium}"
            raise UsageError(f"model.tokenizer: {folder} was trained with {key} {trained_value}, not {value}; {remedy}")
    return CodeTokenizer(TokenizerMetadata(folder=str(folder), content=hash_model_folder(folder)), shape)


def reopen_code_tokenizer(recipe: ImageRecipe | AudioRecipe | VideoRecipe, processor: Path) -> CodeTokenizer:
    """Return the tokenizer of a finished run.

    It must be unchanged, at its recorded path or, for a run that was moved with its dependencies, beside the run.
    """
    metadata, name = _read_saved_metadata(processor), str(recipe.model.tokenizer)
    runs_folder = processor.absolute().parent.parent  # of RUNS/RUN/processor
    candidates = [
        lambda: Path(metadata.folder),
        lambda: resolve_tokenizer_folder(recipe, name, runs_folder=runs_folder),
    ]
    owner = processor.parent if name.startswith(dependencies.REFERENCE_PREFIX) else None
    folder = find_frozen_model(KIND, metadata.content, candidates, recorded_folder=metadata.folder, owner=owner)
    return CodeTokenizer(metadata.model_copy(update={"folder": str(folder)}), read_codes_config(folder)[0])


def resolve_tokenizer_folder(recipe: Any, name: str, *, runs_folder: Path | None = None) -> Path:
    """Return the folder of a tokenizer: the export of a dependency or of a run, or a folder itself."""
    message, key = "has no tokenizer; give a run or an exported folder", "model.tokenizer"
    model = dependencies.resolve_model_reference(
        recipe, name, key=key, runs_folder=runs_folder, required_file=None, missing_message=message
    )
    if not (model.path / CONFIG).is_file():
        remedy = "give a run or an exported folder"
        if model.origin in ("dependency", "run"):
            remedy = f"run bottega export {model.path.parent} first"
        raise UsageError(f"{key}: {model.path.absolute()} has no tokenizer; {remedy}")
    return model.path.absolute()


def _read_saved_metadata(processor: Path) -> TokenizerMetadata:
    return read_metadata(processor / METADATA_FILE, TokenizerMetadata.model_validate_json)
