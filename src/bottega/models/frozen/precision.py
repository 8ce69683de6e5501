"""Dtypes and quantization of frozen models, which need fewer bits than trained ones."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch

from bottega.core.errors import EnvironmentProblem
from bottega.models.frozen.config import FrozenPrecision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTIZED_PRECISIONS = ("8bit", "4bit")
KEY = "model.frozen_precision"
MIN_COMPILED_PARAMETERS = 10**8
"""Number of parameters from which compiling a frozen model pays off; smaller ones finish before they are compiled."""


def default_device() -> torch.device:
    """Return the default device of frozen models: a GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_worth_compiling(model: torch.nn.Module) -> bool:
    """Return whether a model is large enough for compilation, which takes minutes, to pay off."""
    return sum(parameter.numel() for parameter in model.parameters()) >= MIN_COMPILED_PARAMETERS


def frozen_dtype(precision: FrozenPrecision, device: torch.device | str) -> torch.dtype:
    """Return the dtype of frozen weights and activations; for quantized models, of all that is not quantized."""
    if precision in DTYPES:
        return DTYPES[precision]
    # Most CPUs compute bf16 more slowly than float32.
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def build_quantization_config(
    precision: FrozenPrecision,
    *,
    library: Literal["transformers", "diffusers"] = "transformers",
    device: torch.device | str | None = None,
) -> Any | None:
    """Return the bitsandbytes configuration for `from_pretrained(quantization_config=)`; None without quantization.

    transformers and diffusers each have a class of that name, and take only their own.
    """
    if precision not in QUANTIZED_PRECISIONS:
        return None
    if find_spec("bitsandbytes") is None:
        raise EnvironmentProblem(f"{KEY}: {precision} needs bitsandbytes; pip install bitsandbytes, or use bf16")
    device = default_device() if device is None else torch.device(device)
    if library == "diffusers" and device.type != "cuda":
        raise EnvironmentProblem(f"{KEY}: {precision} needs a GPU for image generators; use auto, or train on a GPU")
    config_class: Any = import_module(library).BitsAndBytesConfig
    if precision == "8bit":
        # bitsandbytes warns at every call that its kernels compute in fp16; the rest stays bf16, where gradients do not
        # underflow.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return config_class(load_in_8bit=True)
    dtype = frozen_dtype(precision, device)
    # NormalFloat (Dettmers et al., 2023): its levels follow the distribution of weights; gradients pass through unharmed.
    return config_class(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
