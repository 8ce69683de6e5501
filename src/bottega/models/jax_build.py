"""Builds JAX models from model specs, with initial or pretrained weights or as shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bottega.core.model_spec import ModelSpec, resolve_reference, return_built
from bottega.models import find_framework
from bottega.models.folders.pretrained import fill_tensors
from bottega.models.folders.resolve import resolve_model
from bottega.models.jax_layers import Module

FRAMEWORK = "jax"


def has_jax_form(spec: ModelSpec) -> bool:
    """Return whether a model is one of JAX already, or can be built in JAX from its parameters alone."""
    if spec.parts or spec.changes:
        return False
    if spec.architecture is return_built:
        return find_framework(spec.config) == FRAMEWORK
    if not isinstance(spec.architecture, str) or "{framework}" not in spec.architecture:
        return False
    return find_spec(spec.architecture.format(framework=FRAMEWORK).partition(":")[0]) is not None


def build_abstract_model(spec: ModelSpec) -> Module:
    """Return a model whose parameters have shapes and dtypes, but no values."""
    if spec.architecture is return_built:
        graph, state = nnx.split(spec.config)
        built: Module = nnx.merge(graph, jax.eval_shape(lambda values: values, state))
        return built
    architecture = resolve_reference(spec.architecture, FRAMEWORK)

    def build() -> Module:
        model: Module = architecture(spec.config, **spec.options)
        model.parameter_names = tuple(model.variables())
        return model

    abstract: Module = nnx.eval_shape(build)
    return abstract


def build_model(spec: ModelSpec, seed: int) -> Module:
    """Return a model with its initial or pretrained weights, on the default device."""
    model = build_abstract_model(spec)
    set_parameters(model, draw_weights(spec, model, seed))
    return model


def draw_weights(spec: ModelSpec, model: Module, seed: int) -> dict[str, Any]:
    """Return the weights that a model starts with, by name: on the host, or where they are if it is built already.

    `load` of a spec, if it has a form in JAX, is `load(shapes, folder)` and returns the weights of the folder by name.
    """
    if spec.architecture is return_built:
        return dict(spec.config.named_parameters())
    shapes = {name: variable.shape for name, variable in model.variables().items()}
    values: dict[str, np.ndarray] = {}
    if spec.pretrained is None or spec.starts_initial:
        assert spec.initial is not None, "every model with a JAX form has a rule for its initial values"
        values |= resolve_reference(spec.initial.rule, FRAMEWORK)(shapes, seed, **spec.initial.options)
    if spec.pretrained is not None:
        if isinstance(spec.load, str) and "{framework}" in spec.load:
            return values | resolve_reference(spec.load, FRAMEWORK)(shapes, spec.pretrained)
        values |= {name: np.empty(shape, np.float32) for name, shape in shapes.items() if name not in values}
        folder = resolve_model(spec.pretrained, key="model.from").path
        fill_tensors(values, folder, shape=getattr(model, "shape", None))
    return values


def set_parameters(model: Module, values: Mapping[str, Any]) -> None:
    """Set parameters by name; values may be arrays of the host or of a device."""
    variables = model.variables()
    for name, value in values.items():
        variables[name].set_value(jnp.asarray(value))
