"""Population-based training (Jaderberg et al., 2017) over exact checkpoints.

Members train side by side for an interval. Then the worst copy the checkpoint of one of the best (exploit) and perturb its keys (explore).
One interval of one member is a segment: a run that starts from the last checkpoint of another segment and pauses at a step. What happens
next depends only on the seed and on the values of the finished segments, so a killed search continues where it was, and
the winner can be trained again from its recorded keys, with the same weights bit for bit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.config.load import to_yaml
from bottega.core import checkpoint as checkpoints
from bottega.core.errors import DirectoryInUse, Interrupted, UsageError
from bottega.core.rundir import RunDirectory
from bottega.redaction import redact_text
from bottega.run.job_pool import WAIT_SECONDS, ChildRun, Job, JobPool
from bottega.signals import REQUEUE_EXIT_CODE, StopSignals
from bottega.storage.durable import delete_folder, hold_lock
from bottega.terminal import escape_controls
from bottega.tuning.plan import StudyFailed, StudyPlan
from bottega.tuning.space import Choices, Dimension, Range, is_active
from bottega.tuning.study_folder import LOCKS_FOLDER, STATE_FILE
from bottega.tuning.trial_run import MetricsTail, describe_failure

CHANGEABLE_KEYS = (
    "training.learning_rate",
    "training.weight_decay",
    "training.max_grad_norm",
    "training.label_smoothing",
    "training.optimizer.betas",
    "training.optimizer.beta1",
    "training.optimizer.beta2",
    "training.optimizer.eps",
    "training.optimizer.momentum",
    "training.ema",
    "model.dropout",
    "model.word_dropout",
    "model.attention_dropout",
    "model.expert_dropout",
    "model.load_balancing_weight",
    "model.z_weight",
    "model.routing_loss_weight",
    "model.firing_weight",
)
"""Keys that may change when a run is resumed from a checkpoint: they change neither tensors nor the data nor its order."""

FACTORS = (0.8, 1.25)
"""A number is multiplied by one of these when it is perturbed."""
RESAMPLE_PROBABILITY = 0.25
"""Probability that a key is drawn anew from its space instead of being perturbed."""
REPLAY_FOLDER = "replay"


@dataclass(frozen=True)
class Segment:
    """One interval of one member."""

    member: int
    generation: int
    start: int
    """Steps before the segment."""
    end: int
    keys: dict[str, Any]
    parent: str | None
    """The segment whose checkpoint it starts from; None at the beginning."""
    value: float | None = None
    reason: str | None = None
    """Why it failed; None if it did not."""
    code: int | None = None
    """Exit code of a failure."""

    @property
    def name(self) -> str:
        """The folder name of its run."""
        return f"gen-{self.generation:03d}-member-{self.member:02d}"


def check_population(plan: StudyPlan) -> list[int]:
    """Return the steps at which members are compared, 0 and the last step included; raises UsageError with the problem."""
    for dimension in plan.dimensions:
        if dimension.key not in CHANGEABLE_KEYS:
            raise UsageError(
                f"--space {dimension.key}: cannot change within a run, so pbt cannot search it; use --method tpe, or one of "
                f"{', '.join(CHANGEABLE_KEYS)}"
            )
    if plan.storage is not None:
        raise UsageError(
            f"--storage {redact_text(plan.storage)}: pbt keeps its state in the folder of the study; remove it"
        )
    if plan.options.pruner != "none":
        raise UsageError(f"--pruner {plan.options.pruner}: pbt replaces bad members instead; remove it")
    if plan.options.trials is not None:
        raise UsageError("--trials: the number of members of pbt is tune.population; set that instead")
    if plan.recipe.training.early_stopping is not None:
        raise UsageError("training.early_stopping: pbt compares members at the same step; set it to null")
    total = plan.recipe.training.max_steps
    if total is None:
        raise UsageError("training.max_steps: pbt needs a length in steps; set it in place of num_epochs")
    if plan.options.every.unit == "epochs":
        raise UsageError(f"tune.every: expected steps or percent with pbt, got {plan.options.every}")
    interval = plan.options.every.to_steps(total, 1)
    if not 0 < interval < total:
        raise UsageError(f"tune.every: {plan.options.every} leaves no interval within {total} steps; lower it")
    return [*range(0, total, interval), total]


def run_population(
    plan: StudyPlan, boundaries: list[int], environments: list[dict[str, str]], console: Any, *, verify: bool = False
) -> dict[str, Any]:
    """Train a population, write its report, and return it; the same call continues an earlier one."""
    from bottega.tuning.population_report import build_report, write_report

    def log(text: str) -> None:
        console.print(escape_controls(text), soft_wrap=True, markup=False)

    with hold_lock(plan.folder / LOCKS_FOLDER / "population", wait=False) as is_free:
        if not is_free:
            raise DirectoryInUse(f"{plan.folder} is in use by another bottega tune; one process trains a population")
        population = Population(plan, boundaries, log=log)
        log(
            f"{plan.folder}: {plan.options.population} members, {len(boundaries) - 1} generations of "
            f"{boundaries[1]} steps, {len(environments)} at a time"
        )
        is_finished = population.train(environments)
        if not population.segments:
            raise Interrupted("the time is up before the first interval; the same command continues", 0)
        report = build_report(plan, population.segments)
        report["finished"] = is_finished
        if verify and is_finished:
            report["verified"] = population.replay_lineage(report, environments)
        write_report(plan, report)
    return report


@final
class Population:
    """The segments of a search, those that have ended with their values."""

    def __init__(self, plan: StudyPlan, boundaries: Sequence[int], *, log: Any) -> None:
        self._plan, self._boundaries, self._log = plan, list(boundaries), log
        self.segments: dict[str, Segment] = {}
        """Ended segments by name."""
        self._state = plan.folder / STATE_FILE
        self._read_state()

    def train(self, environments: list[dict[str, str]]) -> bool:
        """Train all generations; return whether they were finished before the time limit.

        Raises Interrupted after a signal, with every segment saved, and StudyFailed if all members fail.
        """
        deadline = float("inf")
        if self._plan.options.timeout is not None:
            deadline = time.monotonic() + self._plan.options.timeout.amount
        segments = self._create_first_generation()
        for generation in range(len(self._boundaries) - 1):
            waiting = [segment for segment in segments if segment.name not in self.segments]
            if not self._train_segments(waiting, environments, deadline=deadline):
                self._log("the time is up; every member is saved, and the same command continues")
                return False
            segments = [self.segments[segment.name] for segment in segments]
            if all(segment.value is None for segment in segments):
                raise StudyFailed(
                    f"every member of {self._plan.folder} failed; the first: {segments[0].reason}", segments[0].code
                )
            values = [segment.value for segment in segments if segment.value is not None]
            best = max(values) if self._is_max else min(values)
            self._log(
                f"generation {generation} at step {segments[0].end}: best {self._plan.objectives[0].name} {best:.4f}, "
                f"worst {min(values) if self._is_max else max(values):.4f}"
            )
            if generation + 2 < len(self._boundaries):
                self._delete_checkpoints(generation - 1)
                segments = self._create_next_generation(segments, generation + 1)
        return True

    @property
    def _is_max(self) -> bool:
        return self._plan.objectives[0].mode == "max"

    def _create_first_generation(self) -> list[Segment]:
        segments = []
        for member in range(self._plan.options.population):
            rng = self._get_rng(0, member)
            keys: dict[str, Any] = {}
            for dimension in self._plan.dimensions:
                if is_active(dimension, {**self._plan.base, **keys}):
                    keys[dimension.key] = draw_value(dimension, rng)
            segments.append(Segment(member, 0, 0, self._boundaries[1], keys, None))
        return segments

    def _create_next_generation(self, segments: list[Segment], generation: int) -> list[Segment]:
        """Return the next segment of each member: the worst copy one of the best and perturb its keys, the others go on."""
        worst_value = float("-inf") if self._is_max else float("inf")
        ranked = sorted(segments, key=lambda s: s.value if s.value is not None else worst_value, reverse=self._is_max)
        count = max(1, int(self._plan.options.exploit * len(ranked)))
        best, worst = ranked[:count], ranked[-count:]
        failed = [segment for segment in segments if segment.value is None]
        best = [segment for segment in best if segment.value is not None]
        start, end = self._boundaries[generation : generation + 2]
        following = []
        for segment in segments:
            rng = self._get_rng(generation, segment.member)
            parent, keys = segment, segment.keys
            if segment in failed or (segment in worst and segment not in best):
                parent = best[int(rng.integers(len(best)))]
                keys = {
                    dimension.key: perturb_value(dimension, parent.keys[dimension.key], rng)
                    for dimension in self._plan.dimensions
                    if dimension.key in parent.keys
                }
                self._log(f"member {segment.member}: copies member {parent.member} at step {start}")
            following.append(Segment(segment.member, generation, start, end, keys, parent.name))
        return following

    def _get_rng(self, generation: int, member: int) -> np.random.Generator:
        return np.random.default_rng([self._plan.options.seed, generation, member])

    def _train_segments(
        self, segments: list[Segment], environments: list[dict[str, str]], *, deadline: float, folder: str = "trials"
    ) -> bool:
        """Train segments in parallel and record how each ended; return whether all have ended before the deadline."""
        by_name = {segment.name: segment for segment in segments}
        waiting = [self._write_job(segment, folder) for segment in segments]
        with StopSignals() as stop, JobPool(environments, log=self._log) as pool:
            while (pool.children or waiting) and not (stop.received is not None and not pool.children):
                if time.monotonic() > deadline:
                    return False
                while stop.received is None and pool.start_next(waiting) is not None:
                    pass
                time.sleep(WAIT_SECONDS)
                if stop.received is not None:
                    pool.forward_signal(stop.received)
                for child in pool.collect_ended():
                    segment = self._end_segment(by_name[child.job.name], child, is_stopping=stop.received is not None)
                    if segment is not None:
                        self.segments[segment.name] = segment
                        if folder == "trials":
                            self._write_state()
                    elif stop.received is None:
                        waiting.append(child.job)
        if stop.received is not None:
            raise Interrupted(
                f"stopped by {stop.received.name}; every member has saved a checkpoint, and the same command continues",
                stop.exit_code,
            )
        return True

    def _write_job(self, segment: Segment, folder: str) -> Job:
        """Write the recipe of a segment, and return the job that trains it up to its last step."""
        output_dir = self._plan.folder / folder
        recipe = self._plan.build_trial_recipe(
            segment.keys, name=segment.name, checkpoint__every=None, output_dir=str(output_dir)
        )
        file = self._plan.folder / "recipes" / folder / f"{segment.name}.yaml"
        run = RunDirectory(output_dir / segment.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        run.write(file, to_yaml(recipe), redact=False)
        arguments = ["--until", str(segment.end)]
        if segment.parent is not None:
            checkpoint = RunDirectory(output_dir / segment.parent).checkpoints / checkpoints.step_folder_name(
                segment.start
            )
            arguments += ["--resume-from", str(checkpoint)]
        return Job(run, file, tuple(arguments), num_processes=recipe.distributed.processes or 1)

    def _end_segment(self, segment: Segment, child: ChildRun, *, is_stopping: bool) -> Segment | None:
        """Return the segment with its value or the reason of its failure; None if it was stopped and goes on later."""
        rows = MetricsTail(child.job.run.metrics)
        rows.read()
        at_end = [row for row in rows.evaluations if row["step"] == segment.end]
        value = at_end[-1].get(self._plan.objectives[0].name) if at_end else None
        if child.code == 0 and value is not None:
            return replace(segment, value=value)
        if is_stopping or child.code == REQUEUE_EXIT_CODE:
            return None
        reason = describe_failure(child)
        self._log(f"member {segment.member} failed at step {rows.step}: {reason}")
        return replace(segment, reason=reason, code=child.code)

    def _delete_checkpoints(self, generation: int) -> None:
        """Delete the checkpoints of a generation that no later segment starts from."""
        for segment in self.segments.values():
            folder = self._plan.folder / "trials" / segment.name / "checkpoints"
            if segment.generation == generation and folder.is_dir():
                delete_folder(folder)

    def replay_lineage(self, report: Mapping[str, Any], environments: list[dict[str, str]]) -> bool:
        """Train the winner again from its recorded keys; return whether its weights are the same bit for bit."""
        lineage = [self.segments[Path(entry["run"]).name] for entry in report["lineage"]]
        recorded = dict(self.segments)
        if (self._plan.folder / REPLAY_FOLDER).is_dir():
            delete_folder(self._plan.folder / REPLAY_FOLDER)
        for segment in lineage:
            self._log(f"replaying {segment.name} to step {segment.end}")
            self._train_segments([segment], environments[:1], deadline=float("inf"), folder=REPLAY_FOLDER)
            replayed = self.segments[segment.name]
            self.segments = dict(recorded)
            if replayed.reason is not None:
                self._log(f"the replay of {segment.name} failed: {replayed.reason}")
                return False
        name = checkpoints.step_folder_name(lineage[-1].end)
        files = [
            self._plan.folder / folder / lineage[-1].name / "checkpoints" / name / "model.safetensors"
            for folder in ("trials", REPLAY_FOLDER)
        ]
        missing = next((file for file in files if not file.is_file()), None)
        if missing is not None:
            self._log(f"cannot compare the weights: {missing} is missing")
            return False
        is_same = files[0].read_bytes() == files[1].read_bytes()
        self._log("the replayed weights are " + ("the same, bit for bit" if is_same else "not the same"))
        return is_same

    def _read_state(self) -> None:
        if not self._state.is_file():
            return
        try:
            fields = json.loads(self._state.read_bytes())
            segments = {name: Segment(**entry) for name, entry in fields["segments"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{self._state} is damaged; restore it, or start over with --fresh") from None
        if fields.get("identity") != self._describe_identity():
            raise UsageError(
                f"{self._plan.folder} has a population of another recipe or space; choose another --study, or start over with --fresh"
            )
        self.segments = segments

    def _write_state(self) -> None:
        segments = {name: vars(segment) for name, segment in self.segments.items()}
        text = json.dumps({"identity": self._describe_identity(), "segments": segments}, indent=1)
        RunDirectory(self._plan.folder).write(self._state, text + "\n")

    def _describe_identity(self) -> dict[str, Any]:
        options = self._plan.options
        size = {
            "population": options.population,
            "every": str(options.every),
            "exploit": options.exploit,
            "seed": options.seed,
        }
        return json.loads(json.dumps({**self._plan.identity, "population": size}, default=str))


def draw_value(dimension: Dimension, rng: np.random.Generator) -> Any:
    """Draw a value of a dimension."""
    space = dimension.values
    if isinstance(space, Choices):
        return space.values[int(rng.integers(len(space.values)))]
    low, high = (np.log(space.low), np.log(space.high)) if space.is_log else (space.low, space.high)
    value = float(rng.uniform(low, high))
    return _clip(float(np.exp(value)) if space.is_log else value, space)


def perturb_value(dimension: Dimension, value: Any, rng: np.random.Generator) -> Any:
    """Return a value near another one: a number is multiplied by a factor, a choice replaced by one of its neighbours."""
    space = dimension.values
    if rng.random() < RESAMPLE_PROBABILITY:
        return draw_value(dimension, rng)
    if isinstance(space, Choices):
        index = space.values.index(value) + (1 if rng.random() < 0.5 else -1)
        return space.values[min(max(index, 0), len(space.values) - 1)]
    return _clip(value * FACTORS[int(rng.integers(2))], space)


def _clip(value: float, space: Range) -> float:
    value = min(max(value, space.low), space.high)
    return round(value) if space.is_integer else value
