"""Any encoder of transformers as a classifier: its own layers under names of ours, and a head that may be new.

Whatever the architecture, `backbone.…` is the encoder, `pooling.…` what stands between it and the last layer (nothing for
BERT), and `head.weight`, `head.bias` the last layer, so that one pattern freezes the same part of all.

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
from bottega.models.folders.transformers_loader import isolated_rng, load_encoder, quiet_logging
from bottega.models.folders.untrusted import attribute_errors_to, load_transformers_config
from bottega.models.initial import fill_parameters, initial_value
from bottega.models.text_classifier.config import DROPOUTS, PretrainedShape

NEW_PARAMETERS = ("head.", "pooling.", "backbone.pooler.")
"""What a folder may lack: an encoder that was trained to fill in words has no use for it."""


class PretrainedClassifier(nn.Module):
    """`network` is the whole model as transformers builds it; here its parts are hung up under other names."""

    def __init__(self, shape: PretrainedShape, network: Any) -> None:
        super().__init__()
        self.shape = shape
        self.paths = locate_backbone_and_head(network, shape.num_labels)
        prefix, path = self.paths
        self.backbone: Any = getattr(network, prefix)
        self.head: Any = network.get_submodule(path)
        # Called by the network as before, but registered once and under our name: beside the registry a plain attribute
        # is found first.
        del network._modules[prefix]
        network.__dict__[prefix] = self.backbone
        network.set_submodule(path, nn.Identity())  # what comes out in place of logits is what they are told by
        self.pooling: Any = network
        self.padding = shape.config_dict.get("pad_token_id")
        self._is_checkpointed = False

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, K] of tokens [B, T]; `mask` is true where there is text."""
        return self.head(self.features(ids, mask))

    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[B, D]: what the last layer sees, with the dropout before it while training."""
        if self.padding is not None:
            ids = ids.masked_fill(~mask, self.padding)  # by it decoders tell the last token, which answers for the text
        return self.pooling(input_ids=ids, attention_mask=mask.long()).logits

    @property
    def checkpoint_blocks(self) -> bool:
        return self._is_checkpointed

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, value: bool) -> None:
        if value and not self.backbone.supports_gradient_checkpointing:
            raise UsageError(f"training.gradient_checkpointing: {type(self.backbone).__name__} does not offer it")
        if value:
            self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.backbone.gradient_checkpointing_disable()
        self._is_checkpointed = value


def locate_backbone_and_head(network: Any, num_labels: int) -> tuple[str, str]:
    """Where transformers keeps the encoder and the last layer, such as ("roberta", "classifier.out_proj")."""
    prefix = network.base_model_prefix
    linear = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == num_labels and not name.startswith(f"{prefix}.")
    ]
    if prefix not in network._modules or not linear:
        raise UsageError(f"pretrained: {type(network).__name__} has no encoder with a linear layer after it")
    return prefix, linear[-1]


def read_pretrained_shape(
    folder: Path, names: Sequence[str], *, multi_label: bool = False, **dropouts: float | None
) -> PretrainedShape:
    """The configuration of a folder's model, with the classes it is to tell and other dropout where that is given."""
    transformers = _transformers()
    require_config(folder, key="pretrained", what="encoder")
    config = load_transformers_config(folder, key="pretrained", what="encoder")
    if type(config) not in transformers.AutoModelForSequenceClassification._model_mapping:
        raise UsageError(f"pretrained: {folder} holds a {config.model_type}, which cannot classify texts")
    for key, share in dropouts.items():
        fields = [field for field in DROPOUTS[key] if hasattr(config, field)]
        if share is not None and not fields:
            raise UsageError(f"model.{key}: {share:g}, and a {config.model_type} has none; leave it out")
        for field in fields if share is not None else ():
            setattr(config, field, share)
    config.id2label = dict(enumerate(map(str, names)))
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.problem_type = "multi_label_classification" if multi_label else "single_label_classification"
    return PretrainedShape(config=config.to_json_string(use_diff=False))


def lacks_pooler(name: str) -> bool:
    """Whether the folder of an encoder has no layer between its blocks and a head."""
    from safetensors import safe_open

    for file in resolve_model(name, key="model.from").path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            if any("pooler." in name for name in tensors.keys()):  # noqa: SIM118 (it has no other way)
                return False
    return True


def build_pretrained(shape: PretrainedShape, seed: int, *, folder: Path | str | None) -> PretrainedClassifier:
    """With the weights of a folder, and our own initial ones for the head it lacks; without a folder, for all.

    The second is how a run is opened again: its checkpoint holds all weights.
    """
    if folder is None:
        model = PretrainedClassifier(shape, _network(shape))
        fill_parameters(model, functools.partial(_initial, seed=seed))
        return model.train()
    folder = resolve_model(str(folder), key="model.from").path
    with attribute_errors_to(folder, key="pretrained"):
        network, absent = _loaded(shape, folder)
    prefix, path = locate_backbone_and_head(network, shape.num_labels)
    model = PretrainedClassifier(shape, network)
    fresh = {_ours(name, prefix, path) for name in absent}
    lacking = sorted(name for name in fresh if not name.startswith(NEW_PARAMETERS))
    if lacking:
        raise CheckpointError(f"{folder}: lacks {lacking[0]} ({len(lacking)} missing tensors); it is no whole encoder")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in fresh:
                parameter.copy_(torch.from_numpy(_initial(name, tuple(parameter.shape), seed=seed)))
    return model.train()


def export_pretrained(state: Mapping[str, Tensor], shape: PretrainedShape, folder: Path | str) -> Path:
    """config.json and model.safetensors, which AutoModelForSequenceClassification opens."""
    network = _network(shape)
    prefix, path = locate_backbone_and_head(network, shape.num_labels)
    theirs = {name: tensor.detach().cpu() for name, tensor in state.items()}
    network.load_state_dict({_theirs(name, prefix, path): tensor for name, tensor in theirs.items()})
    with quiet_logging(_transformers()):
        network.save_pretrained(Path(folder))
    return Path(folder)


def _loaded(shape: PretrainedShape, folder: Path) -> tuple[Any, set[str]]:
    """The network, and the names of what the folder does not have for it, a head for other classes among them."""
    kind = _transformers().AutoModelForSequenceClassification
    with isolated_rng():
        network, seen = load_encoder(kind, folder, config=_config(shape), ignore_mismatched_sizes=True)
    mismatched = {name if isinstance(name, str) else name[0] for name in seen["mismatched_keys"]}
    return network, set(seen["missing_keys"]) | mismatched


def _network(shape: PretrainedShape) -> Any:
    transformers = _transformers()
    with quiet_logging(transformers), isolated_rng():
        return transformers.AutoModelForSequenceClassification.from_config(
            _config(shape), trust_remote_code=False, dtype=torch.float32
        )


def _config(shape: PretrainedShape) -> Any:
    values = json.loads(shape.config)
    return _transformers().AutoConfig.for_model(values.pop("model_type"), **values)


def _initial(name: str, shape: tuple[int, ...], *, seed: int) -> np.ndarray:
    """Like our own models; architectures spell their norms in many ways, but a weight with one side is always one."""
    if name.endswith(".weight") and len(shape) == 1:
        return np.ones(shape, np.float32)
    return initial_value(name, shape, seed, residual_layers=1)


def _ours(name: str, prefix: str, path: str) -> str:
    for theirs, ours in ((prefix, "backbone"), (path, "head")):
        if name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return f"pooling.{name}"


def _theirs(name: str, prefix: str, path: str) -> str:
    part, _, rest = name.partition(".")
    return {"backbone": f"{prefix}.{rest}", "head": f"{path}.{rest}"}.get(part, rest)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise EnvironmentProblem(
            "pretrained: an encoder of transformers needs a package; pip install 'bottega[hub]'"
        ) from error
    return transformers
