"""A study: the trials of a search in Optuna's storage. With samplers.py and journal.py the only place that knows Optuna.

The process that searches asks for the keys of a trial, reports its evaluations, and tells how it ended; trials themselves are
ordinary runs and never import Optuna. Any number of processes may work on one study.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, final

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.trial import FrozenTrial, TrialState

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.redaction import redact_text, redact_values
from bottega.tuning.journal import JOURNAL_FILE, LockedJournal
from bottega.tuning.samplers import build_sampler
from bottega.tuning.space import Choices, Dimension, decode_choice, encode_choice, is_active

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.filterwarnings("ignore", module=r"optuna\.")

PROGRESS_UNITS = 1000
"""Evaluations are reported at thousandths of the run, so that runs of different lengths and batch sizes can be compared."""

IDENTITY_ATTRIBUTE = "bottega"
"""Attribute of the study with the recipe, the space and the metrics it was started with, as JSON."""

DRIVERS = {"postgresql": "'psycopg[binary]'", "mysql+pymysql": "pymysql", "mysql": "mysqlclient"}
"""Beginning of a database URL -> the package that SQLAlchemy needs for it."""

ASHA_FIRST_RUNG = 300
"""When asha first compares trials, in thousandths of the run."""

OVER_LIMIT = "over_limit"
STORAGE_RETRIES = 9
"""How often an operation on a busy database is repeated, waiting twice as long each time, from 0.1 s."""
TRANSIENT_ERRORS = (
    "locked",
    "already exists",
    "unique",
    "deadlock",
    "connection",
    "could not connect",
    "server closed",
)
"""Texts of database errors after which an operation is repeated."""

State = Literal["running", "complete", "pruned", "failed"]
_STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running",
    TrialState.WAITING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}
T = TypeVar("T")


@dataclass(frozen=True)
class Objective:
    """A metric that is optimised."""

    name: str
    mode: Literal["min", "max"]

    def is_better(self, value: float, than: float) -> bool:
        """Return whether `value` is better than another one."""
        return value > than if self.mode == "max" else value < than


@dataclass(frozen=True)
class TrialRecord:
    """What the storage knows of a trial."""

    number: int
    state: State
    keys: dict[str, Any]
    """Recipe key -> value."""
    values: tuple[float, ...] | None
    """Value of each objective; None unless it is complete."""
    curve: dict[int, float]
    """Thousandths of the run -> value of the first objective."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Details: owner, proposed (all keys are drawn), run, step, steps, reason and lines of a failure, same_as (the trial with the
    same keys whose result was taken), over_limit."""
    seconds: float | None = None

    @property
    def is_over_limit(self) -> bool:
        """Whether it was created after the last one that the study may have, and so was never trained."""
        return OVER_LIMIT in self.attributes

    @property
    def is_finished(self) -> bool:
        """Whether the trial has ended, in any way."""
        return self.state != "running"


def build_pruner(name: str, *, first_evaluation: int) -> optuna.pruners.BasePruner:
    """Return a pruner; `first_evaluation` is when a run is first evaluated, in thousandths of its length."""
    if name == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=0, n_min_trials=3)
    if name == "asha":
        # At a tenth of a run the order of trials says little about its end: with that as the first rung, half of all searches
        # of benchmarks/search_quality.py lost their best trials.
        first_rung = max(first_evaluation, ASHA_FIRST_RUNG)
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=first_rung, reduction_factor=3)
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner(
            min_resource=first_evaluation, max_resource=PROGRESS_UNITS, reduction_factor=3
        )
    return optuna.pruners.NopPruner()


def open_storage(storage: str | None, folder: Path) -> BaseStorage:
    """Open the storage of a study: a database by its URL, or the journal file in the folder of the study."""
    if storage is None:
        return JournalStorage(LockedJournal(folder / JOURNAL_FILE))
    if "://" not in storage:
        raise UsageError(
            f"--storage {storage}: expected a URL such as sqlite:///tune.db, postgresql://user@host/db or "
            "mysql://user@host/db"
        )
    import sqlalchemy

    # SQLite makes writers wait for each other, by default for 5 seconds only.
    options = {"connect_args": {"timeout": 60}} if storage.startswith("sqlite") else {"pool_pre_ping": True}
    label = f"--storage {redact_text(storage)}"
    try:
        return get_storage(retry(lambda: RDBStorage(storage, engine_kwargs=options)))
    except sqlalchemy.exc.ArgumentError:
        raise UsageError(f"{label}: not a database URL; write sqlite:///tune.db or postgresql://user@host/db") from None
    except ImportError:
        driver = next((package for prefix, package in DRIVERS.items() if storage.startswith(prefix)), None)
        remedy = f"; pip install {driver}" if driver is not None else "; install the one that SQLAlchemy names for it"
        raise EnvironmentProblem(f"{label}: the driver of this database is not installed{remedy}") from None
    except EnvironmentProblem as error:
        raise EnvironmentProblem(f"{label}: cannot connect: {str(error).partition(': ')[2]}") from None


def retry(operation: Callable[[], T]) -> T:
    """Return the result of an operation on the storage, repeated while a database is locked or being created by another process."""
    import sqlalchemy

    for attempt in range(STORAGE_RETRIES):
        try:
            return operation()
        except sqlalchemy.exc.ArgumentError:
            raise  # not a URL
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            is_transient = any(text in str(error).lower() for text in TRANSIENT_ERRORS)
            if not is_transient or attempt == STORAGE_RETRIES - 1:
                reason = redact_text(str(error.__cause__ or error).strip().splitlines()[0])
                raise EnvironmentProblem(f"the storage of the study cannot be used: {reason}") from error
            time.sleep(0.1 * 2**attempt)
    raise AssertionError("unreachable")


@final
class Study:
    """Proposes the keys of trials and records how they end."""

    def __init__(
        self,
        storage: BaseStorage,
        name: str,
        *,
        dimensions: Sequence[Dimension],
        base: Mapping[str, Any],
        objectives: Sequence[Objective],
        method: str = "tpe",
        pruner: str = "none",
        seed: int = 0,
        grid: Sequence[Mapping[str, Any]] = (),
        first_evaluation: int = 100,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        """Create or open a study. `base` maps the keys of conditions that are not searched to their values.

        Raises UsageError if the study in the storage has another `identity`.
        """
        self.objectives = tuple(objectives)
        self._storage = storage
        self._dimensions, self._base = list(dimensions), dict(base)
        self._study = retry(
            lambda: optuna.create_study(
                storage=storage,
                study_name=name,
                load_if_exists=True,
                directions=["maximize" if objective.mode == "max" else "minimize" for objective in objectives],
                sampler=build_sampler(method, seed=seed, grid=grid),
                pruner=build_pruner(pruner, first_evaluation=first_evaluation),
            )
        )
        self._study_id = retry(lambda: storage.get_study_id_from_name(name))
        if identity is not None:
            self._check_identity(name, dict(identity))

    def _get_trial_id(self, number: int) -> int:
        return retry(lambda: self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number))

    def _check_identity(self, name: str, identity: dict[str, Any]) -> None:
        stored = self._study.user_attrs.get(IDENTITY_ATTRIBUTE)
        identity = redact_values(json.loads(json.dumps(identity, default=str)))
        if stored is None:
            retry(lambda: self._study.set_user_attr(IDENTITY_ATTRIBUTE, json.dumps(identity, sort_keys=True)))
            return
        old = redact_values(json.loads(stored))  # a variable may have become secret since
        changes = [
            f"{key}: {old.get(part, {}).get(key)} -> {identity.get(part, {}).get(key)}"
            for part in identity
            for key in {**old.get(part, {}), **identity[part]}
            if old.get(part, {}).get(key) != identity[part].get(key)
        ]
        if changes:
            more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
            raise UsageError(
                f"study {name} was started with another recipe or space ({'; '.join(changes[:3])}{more}); choose "
                "another --study, or start over with --fresh"
            )

    def ask(self, *, limit: int | None = None, owner: str = "") -> TrialRecord | None:
        """Return a new trial with its keys; None if the study has `limit` trials, of all processes together.

        `owner` is the folder that its run will be in, which alone may continue it.
        """
        if limit is not None and sum(not trial.is_over_limit for trial in self.list_trials()) >= limit:
            return None
        trial = retry(self._study.ask)
        retry(lambda: trial.set_user_attr("owner", owner))
        earlier = [other for other in self.list_trials() if other.number < trial.number]
        if limit is not None and sum(not other.is_over_limit for other in earlier) >= limit:
            # Another machine took the last one at the same moment.
            retry(lambda: trial.set_user_attr(OVER_LIMIT, True))
            self._tell(trial.number, state=TrialState.FAIL)
            return None
        self._suggest(trial)
        return self.get_trial(trial.number)

    def complete_proposal(self, number: int) -> TrialRecord:
        """Return a trial whose process died while it was proposed, with its remaining keys filled in."""
        self._suggest(optuna.trial.Trial(self._study, self._get_trial_id(number)))
        return self.get_trial(number)

    def _suggest(self, trial: optuna.trial.Trial) -> None:
        """Draw the keys of a trial in order; a key whose condition does not hold is left out."""
        values = dict(self._base)
        for dimension in self._dimensions:
            if is_active(dimension, values):
                values[dimension.key] = retry(lambda dimension=dimension: _suggest_value(trial, dimension))  # type: ignore[misc]
        retry(lambda: trial.set_user_attr("proposed", True))

    def report(self, number: int, progress: int, value: float) -> bool:
        """Record an evaluation at `progress` thousandths of the run; return whether the trial should be pruned."""
        frozen, trial_id = self._get_frozen(number), self._get_trial_id(number)
        if progress in frozen.intermediate_values or not math.isfinite(value):
            return False
        # By the storage, because a trial continued from an earlier process has no Trial object.
        retry(lambda: self._storage.set_trial_intermediate_value(trial_id, progress, value))
        if len(self.objectives) > 1:
            return False
        return self._study.pruner.prune(self._study, self._get_frozen(number))

    def finish(self, number: int, values: Sequence[float]) -> None:
        """Record the values of a trial that has ended."""
        self._tell(number, values=list(values))

    def prune(self, number: int) -> None:
        """Record that a trial was ended early."""
        self._tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """Record that a trial failed; it gets no value."""
        self.set_attributes(number, reason=reason)
        self._tell(number, state=TrialState.FAIL)

    def _tell(self, number: int, *, values: list[float] | None = None, state: TrialState | None = None) -> None:
        """End a trial; one that somebody else has ended stays as it is."""
        retry(lambda: self._study.tell(number, values, state=state, skip_if_finished=True))

    def set_attributes(self, number: int, **attributes: Any) -> None:
        """Record details of a trial."""
        trial_id = self._get_trial_id(number)
        for key, value in redact_values(attributes).items():
            retry(lambda key=key, value=value: self._storage.set_trial_user_attr(trial_id, key, value))  # type: ignore[misc]

    def get_trial(self, number: int) -> TrialRecord:
        """Return the present state of a trial."""
        return _to_record(self._get_frozen(number))

    def list_trials(self) -> list[TrialRecord]:
        """Return all trials by number."""
        return [_to_record(trial) for trial in self._study.get_trials(deepcopy=False)]

    def compute_importances(self) -> dict[str, float]:
        """Return the importance of each key for the first objective, by PED-ANOVA; empty with too few trials."""
        completed = [trial for trial in self._study.get_trials(deepcopy=False) if trial.state == TrialState.COMPLETE]
        if len(completed) < 4 or len({trial.values[0] for trial in completed}) < 2:
            return {}
        # With a target, the evaluator explains low values.
        sign = -1.0 if self.objectives[0].mode == "max" else 1.0
        target = None if len(self.objectives) == 1 else (lambda trial: sign * trial.values[0])
        try:
            return dict(optuna.importance.get_param_importances(self._study, target=target))
        except (ValueError, RuntimeError, ZeroDivisionError):
            return {}

    def find_pareto_front(self) -> list[int]:
        """Return the numbers of the trials that no other trial beats in every objective."""
        return [trial.number for trial in self._study.best_trials] if len(self.objectives) > 1 else []

    def _get_frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]


def _suggest_value(trial: optuna.trial.Trial, dimension: Dimension) -> Any:
    space = dimension.values
    if isinstance(space, Choices):
        # Lists and blocks are stored as text: Optuna's choices are numbers, text, booleans and null.
        return decode_choice(trial.suggest_categorical(dimension.key, [encode_choice(value) for value in space.values]))
    if space.is_integer:
        return trial.suggest_int(dimension.key, int(space.low), int(space.high), log=space.is_log)
    return trial.suggest_float(dimension.key, space.low, space.high, log=space.is_log)


def _to_record(trial: FrozenTrial) -> TrialRecord:
    duration = trial.duration.total_seconds() if trial.duration is not None else None
    return TrialRecord(
        number=trial.number,
        state=_STATES[trial.state],
        keys={key: decode_choice(value) for key, value in trial.params.items()},
        values=tuple(trial.values) if trial.state == TrialState.COMPLETE and trial.values is not None else None,
        curve=dict(trial.intermediate_values),
        attributes=dict(trial.user_attrs),
        seconds=duration,
    )


def delete_study(storage: BaseStorage, name: str) -> None:
    """Delete a study from a database, if it is there."""
    try:
        optuna.delete_study(study_name=name, storage=storage)
    except KeyError:
        pass
