"""In how many bits frozen models are kept: nothing learns in them, so fewer than training needs are enough."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch

from bottega.core.errors import EnvironmentProblem
from bottega.models.frozen.config import FrozenPrecision

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTISED = ("8bit", "4bit")
KEY = "model.frozen_precision"
LARGE = 10**8
"""Parameters of a frozen model below which it runs as it is: on a GPU a small one is done before it would be compiled."""


def default_device() -> torch.device:
    """Where frozen models go if nobody says: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_worth_compiling(model: torch.nn.Module) -> bool:
    """Whether compiling it is worth the minutes that it takes, where nobody says."""
    return sum(parameter.numel() for parameter in model.parameters()) >= LARGE


def frozen_dtype(precision: FrozenPrecision, device: torch.device | str) -> torch.dtype:
    """What frozen weights are kept and computed in; of quantised ones, what is between and around them."""
    if precision in DTYPES:
        return DTYPES[precision]
    # Processors compute bf16 more slowly than float32, unless they are of the few that have units for it.
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def build_quantization_config(
    precision: FrozenPrecision,
    *,
    library: Literal["transformers", "diffusers"] = "transformers",
    device: torch.device | str | None = None,
) -> Any | None:
    """That library's configuration of bitsandbytes, for `from_pretrained(quantization_config=)`; None where nothing is
    quantised. The two libraries each have a class of their own, under one name."""
    if precision not in QUANTISED:
        return None
    if find_spec("bitsandbytes") is None:
        raise EnvironmentProblem(f"{KEY}: {precision} needs bitsandbytes; pip install bitsandbytes, or say bf16")
    device = default_device() if device is None else torch.device(device)
    if library == "diffusers" and device.type != "cuda":
        raise EnvironmentProblem(f"{KEY}: {precision} needs a GPU for image generators; say auto, or train on one")
    options: Any = import_module(library).BitsAndBytesConfig
    if precision == "8bit":
        # It says at every call that its kernels compute in fp16; around them bf16 is wanted, where no gradient underflows.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return options(load_in_8bit=True)
    dtype = frozen_dtype(precision, device)
    # NormalFloat (Dettmers et al., 2023): its levels lie where weights do, and training goes through it unharmed.
    return options(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
