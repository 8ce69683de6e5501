"""Plasticity in a recipe: the STDP rule, the layers it applies to, and a check that one of them is trainable."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bottega.config.conflicts import find_technique_conflicts
from bottega.config.recipe import Recipe
from bottega.config.techniques import Technique
from bottega.core.engine import Engine
from bottega.core.errors import UsageError
from bottega.data.loading.loader import Loader
from bottega.models.spiking.stdp import STDPRule
from bottega.tasks.workload import Workload
from bottega.techniques.plasticity.config import SPEC, PlasticityOptions
from bottega.techniques.plasticity.torch import KEY, Plasticity, select_spiking_layers
from bottega.techniques.training_plan import TrainingPlan


def apply(plan: TrainingPlan, options: PlasticityOptions, recipe: Recipe, workload: Workload) -> TrainingPlan:
    """Update the weights of spiking layers by a local STDP rule."""
    _check_conflicts(recipe, options)
    task = Plasticity(
        inner=plan.task,
        rule=build_rule(options),
        rate=options.rate,
        reward=options.reward,
        reward_decay=options.reward_decay,
        bounds=options.bounds,
        low=options.low,
        high=options.high,
        normalise=options.normalise,
        targets=options.targets,
    )
    return replace(plan, task=task).with_train_start_hook(partial(_check_trainable, task=task))


def _check_conflicts(recipe: Recipe, options: PlasticityOptions) -> None:
    """Check conflicts if plasticity was added for the model or a stream; listed techniques are checked with the recipe."""
    if any(technique.name == SPEC.name for technique in recipe.techniques):
        return
    plasticity = Technique(name=SPEC.name, options=options)
    for key, _, text in find_technique_conflicts(
        recipe.model_copy(update={"techniques": (*recipe.techniques, plasticity)})
    ):
        is_requested = getattr(recipe.model, "plasticity", False)
        raise UsageError(f"{key}: {text}{'; or set model.plasticity: false' if is_requested else ''}")


def build_rule(options: PlasticityOptions) -> STDPRule:
    """Return the STDP rule of the options; the pair rule is the triplet rule with its third-order terms at 0."""
    is_triplet = options.rule == "triplet"
    return STDPRule(
        a_plus=options.a_plus,
        a_minus=options.a_minus,
        tau_plus=options.tau_plus,
        tau_minus=options.tau_minus,
        a3_plus=options.a3_plus if is_triplet else 0.0,
        a3_minus=options.a3_minus if is_triplet else 0.0,
        tau_x=options.tau_x,
        tau_y=options.tau_y,
    )


def _check_trainable(engine: Engine, loader: Loader, *, resumed: bool, task: Plasticity) -> None:
    """Raise UsageError if all spiking layers are frozen, since plasticity would silently have no effect."""
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    weights = [names[id(layer.synapse.weight)] for layer in select_spiking_layers(engine.model, task.targets)]
    parameters = engine.parameters()
    if not any(parameters[name].is_trainable for name in weights):
        raise UsageError(
            f"{KEY}: {weights[0]} and every other spiking layer is frozen; unfreeze one in training.freeze or training.groups "
            "(scale: 0 turns off only its gradient), or remove plasticity"
        )
