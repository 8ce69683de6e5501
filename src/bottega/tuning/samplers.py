"""Samplers that propose the keys of a trial: Optuna's, seeded by the number of the trial, a grid, and CMA-ES without pickles.

Optuna's samplers draw from one stream of random numbers, so a study that is killed and continued, or worked on by several
processes, would repeat its first draws. Here the seed of each proposal follows from the seed of the study and the number of the trial.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from bottega.core.errors import EnvironmentProblem
from bottega.tuning.space import encode_choice


def build_sampler(method: str, *, seed: int, grid: Sequence[Mapping[str, Any]] = ()) -> BaseSampler:
    """Return the sampler of a method; `grid` are the points of method grid."""
    if method == "grid":
        return GridSampler(grid)
    return SeededSampler(lambda number: _build_seeded(method, _derive_seed(seed, number)))


def check_packages(method: str) -> None:
    """Raise EnvironmentProblem if a package that a method needs is missing; Optuna would notice it at the second trial."""
    package = {"cmaes": "cmaes", "gp": "torch"}.get(method)
    if package is not None and importlib.util.find_spec(package) is None:
        raise EnvironmentProblem(f"--method {method} needs {package}; pip install 'bottega[tune]'")


def _derive_seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"tune {seed} {number}".encode()).digest()[:4], "big")


def _build_seeded(method: str, seed: int) -> BaseSampler:
    if method == "random":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experimental classes and options
        if method == "tpe":
            return TPESampler(seed=seed, group=True, multivariate=True)
        if method == "cmaes":
            return ReplayedCmaEsSampler(seed=seed, n_startup_trials=1, warn_independent_sampling=False)
        from optuna.samplers import GPSampler

        return GPSampler(seed=seed, deterministic_objective=False)


@final
class SeededSampler(BaseSampler):
    """A sampler that is built anew for each trial, with a seed of its own."""

    def __init__(self, build: Callable[[int], BaseSampler]) -> None:
        self._build = build
        self._samplers: dict[int, BaseSampler] = {}

    def _get(self, trial: FrozenTrial) -> BaseSampler:
        if trial.number not in self._samplers:
            self._samplers = {trial.number: self._build(trial.number)}  # the earlier ones are not needed any more
        return self._samplers[trial.number]

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._get(trial).before_trial(study, trial)

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._get(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._get(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._get(trial).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Do nothing: what a sampler would record after a trial is derived from the trials themselves."""


@final
class GridSampler(BaseSampler):
    """Trial `n` gets the n-th point of the grid, so that several processes never take the same one."""

    def __init__(self, grid: Sequence[Mapping[str, Any]]) -> None:
        self._grid = grid

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        # Trials beyond the limit have a number, but no point.
        earlier = [other for other in study.get_trials(deepcopy=False) if other.number < trial.number]
        index = sum("over_limit" not in other.user_attrs for other in earlier)
        return encode_choice(self._grid[index % len(self._grid)][param_name])


class ReplayedCmaEsSampler(CmaEsSampler):
    """CMA-ES whose state is computed from the finished trials; Optuna's stores it as a pickle, which could run code."""

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        self._space = super().infer_relative_search_space(study, trial)
        self._direction = study.direction
        return self._space

    def _split_optimizer_str(self, optimizer_str: str) -> dict[str, str]:
        return {}

    def _restore_optimizer(self, completed_trials: list[FrozenTrial]) -> Any:
        """Return the optimizer after all complete generations."""
        from optuna._transform import _SearchSpaceTransform

        transform = _SearchSpaceTransform(self._space, transform_step=True, transform_0_1=True)
        optimizer = self._init_optimizer(transform, self._direction)
        sign = 1.0 if self._direction == StudyDirection.MINIMIZE else -1.0
        while True:
            trials = self._get_solution_trials(completed_trials, optimizer.generation)
            if len(trials) < optimizer.population_size:
                return optimizer
            chosen = trials[: optimizer.population_size]
            optimizer.tell([(transform.transform(trial.params), sign * trial.values[0]) for trial in chosen])
