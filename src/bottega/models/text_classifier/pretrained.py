"""Text classifiers from pretrained encoders of transformers, with uniform parameter names across architectures.

`backbone.…` is the encoder, `pooling.…` the layers between it and the last one (none for BERT), and `head.weight`,
`head.bias` the last layer, so that one pattern freezes the same layers of every architecture.

B batch   T tokens   D features   K classes
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError
from bottega.models.folders.resolve import require_config, resolve_model
from bottega.models.folders.transformers_loader import isolated_rng, load_with_info, quiet_logging
from bottega.models.folders.untrusted import attribute_errors_to, load_transformers_config, require_safetensors
from bottega.models.initial import fill_parameters, initial_value
from bottega.models.text_classifier.config import DROPOUTS, PretrainedShape

KEY = "model.from"
NEW_PARAMETERS = ("head.", "pooling.", "backbone.pooler.")
"""Prefixes of parameters that a folder may lack, as a masked language model does; they are then initialised."""


class PretrainedClassifier(nn.Module):
    """A sequence classification model of transformers (`network`) with its modules registered under our names."""

    def __init__(self, shape: PretrainedShape, network: Any) -> None:
        super().__init__()
        self.shape = shape
        self.paths = locate_backbone_and_head(network, shape.num_labels)
        """Attribute of the encoder and module path of the last layer, as the network names them."""
        backbone_name, head_path = self.paths
        self.backbone: Any = getattr(network, backbone_name)
        self.head: Any = network.get_submodule(head_path)
        # A plain attribute, so that the network can still call its encoder while it is registered only under our name.
        del network._modules[backbone_name]
        network.__dict__[backbone_name] = self.backbone
        network.set_submodule(head_path, nn.Identity())  # the network then returns features in place of logits
        self.pooling: Any = network
        self.pad_token_id = shape.config_dict.get("pad_token_id")
        self._is_checkpointed = False

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return logits (B, K) of tokens `ids` (B, T); `mask` (B, T) is true for text."""
        return self.head(self.features(ids, mask))

    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the input of the last layer (B, D), after dropout in training."""
        if self.pad_token_id is not None:
            ids = ids.masked_fill(~mask, self.pad_token_id)  # decoders pool at the last token that is not padding
        return self.pooling(input_ids=ids, attention_mask=mask.long()).logits

    @property
    def checkpoint_blocks(self) -> bool:
        return self._is_checkpointed

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, value: bool) -> None:
        if value and not self.backbone.supports_gradient_checkpointing:
            name = type(self.backbone).__name__
            raise UsageError(f"training.gradient_checkpointing: {name} does not support it; set it to false")
        if value:
            self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.backbone.gradient_checkpointing_disable()
        self._is_checkpointed = value


def locate_backbone_and_head(network: Any, num_labels: int) -> tuple[str, str]:
    """Return the attribute of the encoder and the module path of the last layer: ("roberta", "classifier.out_proj")."""
    backbone_name = network.base_model_prefix
    head_paths = [
        path
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == num_labels
        and not path.startswith(f"{backbone_name}.")
    ]
    if backbone_name not in network._modules or not head_paths:
        raise UsageError(
            f"{KEY}: {type(network).__name__} has no encoder with a linear layer after it; use an encoder such as BERT"
        )
    return backbone_name, head_paths[-1]


def read_pretrained_shape(
    folder: Path, names: Sequence[str], *, multi_label: bool = False, **dropouts: float | None
) -> PretrainedShape:
    """Return the configuration of a folder's model with the classes `names`, and with `dropouts` that are not None.

    Keys of `dropouts` are the recipe's: those of DROPOUTS.
    """
    transformers = _import_transformers()
    require_config(folder, key=KEY, description="encoder")
    config = load_transformers_config(folder, key=KEY, description="encoder")
    if type(config) not in transformers.AutoModelForSequenceClassification._model_mapping:
        raise UsageError(
            f"{KEY}: {folder} contains a {config.model_type}, which cannot classify texts; use an encoder such as BERT"
        )
    for key, value in dropouts.items():
        fields = [field for field in DROPOUTS[key] if hasattr(config, field)]
        if value is not None and not fields:
            raise UsageError(f"model.{key}: a {config.model_type} has no such dropout; remove the key (got {value:g})")
        for field in fields if value is not None else ():
            setattr(config, field, value)
    config.id2label = dict(enumerate(map(str, names)))
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.problem_type = "multi_label_classification" if multi_label else "single_label_classification"
    return PretrainedShape(config=config.to_json_string(use_diff=False))


def lacks_pooler(name: str) -> bool:
    """Return whether the encoder that `name` refers to has no pooling layer among its weights."""
    from safetensors import safe_open

    for file in resolve_model(name, key=KEY).path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            if any("pooler." in tensor_name for tensor_name in tensors.keys()):  # noqa: SIM118  (it is not a dict)
                return False
    return True


def build_pretrained(shape: PretrainedShape, seed: int, *, folder: Path | str | None) -> PretrainedClassifier:
    """Return a classifier with the weights of a folder, and initial values for a head that the folder lacks.

    Without a folder all weights are initial values; a finished run is opened in this way, because its checkpoint has
    all weights.
    """
    if folder is None:
        model = PretrainedClassifier(shape, _build_network(shape))
        fill_parameters(model, functools.partial(_compute_initial_value, seed=seed))
        return model.train()
    folder = resolve_model(str(folder), key=KEY).path
    with attribute_errors_to(folder, key=KEY):
        network, missing_names = _load_network(shape, folder)
    paths = locate_backbone_and_head(network, shape.num_labels)
    model = PretrainedClassifier(shape, network)
    new_names = {_to_our_name(name, *paths) for name in missing_names}
    missing_encoder_names = sorted(name for name in new_names if not name.startswith(NEW_PARAMETERS))
    if missing_encoder_names:
        raise CheckpointError(
            f"{folder} lacks {missing_encoder_names[0]} ({len(missing_encoder_names)} missing tensors); "
            "it is not a complete encoder: download or export it again"
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in new_names:
                parameter.copy_(torch.from_numpy(_compute_initial_value(name, tuple(parameter.shape), seed=seed)))
    return model.train()


def export_pretrained(state: Mapping[str, Tensor], shape: PretrainedShape, folder: Path | str) -> Path:
    """Write config.json and model.safetensors for AutoModelForSequenceClassification."""
    network = _build_network(shape)
    paths = locate_backbone_and_head(network, shape.num_labels)
    tensors = {name: tensor.detach().cpu() for name, tensor in state.items()}
    network.load_state_dict({_to_their_name(name, *paths): tensor for name, tensor in tensors.items()})
    with quiet_logging():
        network.save_pretrained(Path(folder))
    return Path(folder)


def _load_network(shape: PretrainedShape, folder: Path) -> tuple[Any, set[str]]:
    """Return the network, and the names of parameters that the folder lacks or has for other classes."""
    auto_class = _import_transformers().AutoModelForSequenceClassification
    require_safetensors(folder)
    with isolated_rng():
        network, info = load_with_info(
            auto_class,
            folder,
            description="a text encoder",
            errors=(OSError, ValueError, RuntimeError),
            dtype=torch.float32,
            config=_build_config(shape),
            ignore_mismatched_sizes=True,
        )
    mismatched = {name if isinstance(name, str) else name[0] for name in info["mismatched_keys"]}
    return network, set(info["missing_keys"]) | mismatched


def _build_network(shape: PretrainedShape) -> Any:
    transformers = _import_transformers()
    with quiet_logging(), isolated_rng():
        return transformers.AutoModelForSequenceClassification.from_config(
            _build_config(shape), trust_remote_code=False, dtype=torch.float32
        )


def _build_config(shape: PretrainedShape) -> Any:
    values = json.loads(shape.config)
    return _import_transformers().AutoConfig.for_model(values.pop("model_type"), **values)


def _compute_initial_value(name: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    """Return one initial value as `initial_value` does; a weight with one axis is a norm, whatever its name."""
    if name.endswith(".weight") and len(shape) == 1:
        return np.ones(shape, np.float32)
    return initial_value(name, shape, seed, residual_layers=1)


def _to_our_name(name: str, backbone_name: str, head_path: str) -> str:
    for theirs, ours in ((backbone_name, "backbone"), (head_path, "head")):
        if name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return f"pooling.{name}"


def _to_their_name(name: str, backbone_name: str, head_path: str) -> str:
    module, _, suffix = name.partition(".")
    return {"backbone": f"{backbone_name}.{suffix}", "head": f"{head_path}.{suffix}"}.get(module, suffix)


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentProblem(f"{KEY}: pretrained encoders need transformers; pip install 'bottega[hub]'") from error
    return transformers
