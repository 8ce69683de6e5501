"""The branch of several tasks: the branches of its parts side by side, each with its own data, codec and measures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

from bottega.config.load import to_yaml
from bottega.config.recipe import Recipe, diff_recipes
from bottega.core.errors import BottegaError, DataError, UsageError
from bottega.core.types import Models
from bottega.models.build import build_models
from bottega.models.decoder.config import MLP_RATIO
from bottega.similar_names import find_similar_names
from bottega.storage.durable import replacing_file
from bottega.tasks import dependencies, registry
from bottega.tasks.classify.config import ClassifyRecipe
from bottega.tasks.language.config import LanguageRecipe
from bottega.tasks.metadata import MetadataMissing, read_metadata
from bottega.tasks.multitask.config import MultitaskRecipe
from bottega.tasks.multitask.data import MultitaskData
from bottega.tasks.multitask.task import Multitask, add_prefix, part_modules, strip_prefix
from bottega.tasks.prediction import NewSamples
from bottega.tasks.processor import Processor
from bottega.tasks.recipes import check_recipe, load_recipe
from bottega.tasks.registry import TASKS
from bottega.tasks.sampler import Sampler
from bottega.tasks.workload import Workload

PARTS = "parts.json"
Say = Callable[[str, int, int], None]


def prepare(recipe: Recipe, *, progress: Say) -> MultitaskWorkload:
    assert isinstance(recipe, MultitaskRecipe)
    recipes = {name: build_part_recipe(recipe, name) for name in recipe.data.parts}
    parts: dict[str, Workload] = {}
    tokenizer: str | None = None
    given: list[str] = []
    for name in sorted(recipes, key=lambda name: _reads_first(recipes[name])):
        one = recipes[name]
        if isinstance(one, LanguageRecipe | ClassifyRecipe) and tokenizer is not None and one.model.from_ is None:
            recipes[name] = _with_tokenizer(one, tokenizer)
            given.append(name)
        parts[name] = _told(name, partial(registry.open_workload, recipes[name], progress=progress))
        if isinstance(one, LanguageRecipe | ClassifyRecipe) and tokenizer is None:
            tokenizer = str(parts[name].data.prepared.folder / "tokenizer")  # type: ignore[attr-defined]
    workload = MultitaskWorkload(recipe, recipes, {name: parts[name] for name in recipes}, given_tokenizer=given)
    workload.check_parts()
    return workload


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> MultitaskWorkload:
    assert isinstance(recipe, MultitaskRecipe)
    known = read_metadata(processor / PARTS, json.loads)
    recipes, parts = {}, {}
    for name in recipe.data.parts:
        one = _kept_recipe(processor, name)
        if one is None:
            raise MetadataMissing(
                f"{processor / name}.yaml cannot be read; start the same training again to have it written"
            )
        if name in known["given_tokenizer"]:
            one = _with_tokenizer(one, str(processor / name))  # where it lay in the cache it may be gone
        recipes[name] = one
        parts[name] = registry.reopen_workload(one, processor / name, str(known["data"][name]))
    return MultitaskWorkload(recipe, recipes, parts, given_tokenizer=known["given_tokenizer"])


def build_part_recipe(recipe: MultitaskRecipe, name: str) -> Recipe:
    """The whole recipe of one part: its own, with the trunk, the seed and the length of this one."""
    part, training = recipe.data.parts[name], recipe.training
    here = {"device": recipe.device, "seed": recipe.seed, "engine": recipe.engine, "name": None}
    keys = ("max_steps", "num_epochs", "batch_size", "gradient_accumulation_steps")
    length = {k: v for k in keys if (v := getattr(training, k)) is not None}
    if recipe.data.online is not None:
        length = (
            {"num_epochs": 1, **length} if training.max_steps is None else length
        )  # of the whole, which is a stream
    try:
        _refuse_task(check_recipe([part.recipe], check_conflicts=False).task_candidates)
        known = check_recipe([part.recipe, part.settings], check_conflicts=False).recipe
        given: dict[str, Any] = {"model": _trunk(recipe, known), "training": length}
        if recipe.data.tokenizer is not None and isinstance(known, LanguageRecipe | ClassifyRecipe):
            given["data"] = {"tokenizer": recipe.data.tokenizer.model_dump(exclude_none=True)}
        found = load_recipe([part.recipe, given, part.settings, here]).recipe
    except UsageError as error:
        raise UsageError("\n".join(f"data.parts.{name}: {line}" for line in str(error).splitlines())) from None
    _refuse(name, found)
    return found


def _refuse_task(tasks: Sequence[str]) -> None:
    """Before its settings, which would not fit either."""
    # What personalize trains stands between two frozen models, and is no trunk.
    there = [task for task, spec in TASKS.items() if spec.combines]
    if not set(tasks) & set(there):
        raise UsageError(f"a part cannot be of task {tasks[0]}; it can be {', '.join(there)}")


def _trunk(recipe: MultitaskRecipe, part: Recipe) -> dict[str, Any]:
    """The sizes of the shared trunk, as this part's model calls them. Weights that it starts from have their own."""
    model = recipe.model
    said = {k: getattr(model, k) for k in ("hidden_size", "num_layers", "num_heads", "dropout")}
    known = {k: v for k, v in said.items() if v is not None and k in type(part.model).model_fields}
    if getattr(part.model, "kind", None) in ("cnn", "pretrained") or getattr(part.model, "from_", None) is not None:
        return {k: v for k, v in known.items() if k == "dropout"}
    width, heads = model.hidden_size, model.num_heads
    if isinstance(part, LanguageRecipe) and part.model.kind == "ssm":
        return {k: v for k, v in known.items() if k != "num_heads"}  # it has no attention
    if isinstance(part, LanguageRecipe) and width is not None and heads is not None:
        return {**known, "num_kv_heads": heads, "head_size": width // heads, "intermediate_size": MLP_RATIO * width}
    return known


def _refuse(name: str, part: Recipe) -> None:
    """What a part cannot have."""
    for key, is_asked in {
        "techniques": bool(part.techniques),
        "data.curriculum": part.data.curriculum is not None,
        "data.mixture: sequence": part.data.mixture == "sequence",
        "data.online": part.data.online is not None,
        f"needs ({', '.join(dependencies.referenced_dependencies(part))})": bool(
            dependencies.referenced_dependencies(part)
        ),
    }.items():
        if is_asked:
            raise UsageError(f"data.parts.{name}: {key} does not go with several tasks; leave it out of the part")


def _reads_first(part: Recipe) -> int:
    """Whose tokenizer all texts are read with: that of given weights, then one that can be turned back into text."""
    if getattr(part.model, "from_", None) is not None:
        return 0
    return 1 if isinstance(part, LanguageRecipe) else 2


def _with_tokenizer(part: Any, folder: str) -> Any:
    tokenizer = part.data.tokenizer.model_copy(update={"kind": "pretrained", "path": folder, "vocab_size": None})
    return part.model_copy(update={"data": part.data.model_copy(update={"tokenizer": tokenizer})})


def _told(name: str, work: Callable[[], Any]) -> Any:
    """An error says which part it is about."""
    try:
        return work()
    except BottegaError as error:
        raise type(error)(f"data.parts.{name}: {error}") from error


@final
class MultitaskWorkload(Workload):
    def __init__(
        self,
        recipe: MultitaskRecipe,
        recipes: Mapping[str, Recipe],
        parts: Mapping[str, Workload],
        *,
        given_tokenizer: Sequence[str],
    ) -> None:
        """`recipes` are those of the parts, whole; `given_tokenizer` names the parts that read with another's."""
        self.recipe, self.recipes, self.parts = recipe, dict(recipes), dict(parts)
        self.weights = {name: part.weight for name, part in recipe.data.parts.items()}
        self.task = Multitask(
            parts={name: part.task for name, part in parts.items()}, weights=self.weights, balance=recipe.data.weights
        )
        self.unit = next(iter(parts.values())).unit
        self.data = MultitaskData(recipe, self.parts, lambda: self.sharing_summary)
        self.processor = MultitaskProcessor(self.recipes, self.parts, self.data, given_tokenizer)
        self.sampler = MultitaskSampler(recipe, self.parts)

    def check_parts(self) -> None:
        """What only the parts together can show, before anything is trained."""
        read = {name: part.tokenizer.fingerprint for name, part in self.parts.items() if hasattr(part, "tokenizer")}
        if len(set(read.values())) > 1:
            raise UsageError(
                f"data.parts: {', '.join(read)} read text with different tokenizers, so a token of one means nothing to the "
                "others; start them from the same weights, or leave model.from out"
            )
        for name, part in self.recipe.data.parts.items():
            there = self.parts[name].metrics
            if part.metric not in there:
                near = find_similar_names(part.metric, there)
                hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(there)}"
                raise UsageError(f"data.parts.{name}.metric: {part.metric} is not measured; {hint}")
        assert self.sharing_summary is not None, "a part that shares nothing is refused"

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        measured = [name for name, part in self.parts.items() if part.data.validation() is not None]
        return ("loss", *(f"{name}/{metric}" for name in measured for metric in self.parts[name].metrics))

    @property
    def headline(self) -> tuple[str, ...]:
        """The loss of all, and of each part what it is known by."""
        shown = [
            f"{name}/{metric}"
            for name, part in self.parts.items()
            for metric in dict.fromkeys((self.recipe.data.parts[name].metric, *(part.headline or ())))
        ]
        return ("loss", *shown)

    @property
    def frozen_hashes(self) -> dict[str, str]:
        return {
            f"{name}: {what}": found for name, part in self.parts.items() for what, found in part.frozen_hashes.items()
        }

    @cached_property
    def sharing_summary(self) -> str:
        """Which weights are one, in words."""
        model = build_models(self.task, self.recipe.seed)["model"]
        size = {name: sum(p.numel() for p in model.part(name).parameters()) for name in self.parts}
        once = sum(p.numel() for p in model.shared.parameters())
        groups: dict[tuple[str, ...], int] = {}
        for places in model.plan.values():
            groups[tuple(places)] = groups.get(tuple(places), 0) + 1
        shared = "; ".join(f"{count} layers by {', '.join(parts)}" for parts, count in groups.items())
        alone = ", ".join(f"{name} {number:,}" for name, number in size.items())
        return f"shared: {shared}: {once:,} parameters (with their own: {alone})"

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        """The parts' own words for what was measured, and the weighted sum of their losses."""
        found = {name: part.summarise(own) for name, part in self.parts.items() if (own := strip_prefix(name, metrics))}
        total = sum(self.weights[name] * own["loss"] for name, own in found.items() if "loss" in own)
        first = {
            f"{name}/{metric}": own[metric]
            for name, own in found.items()
            if (metric := self.recipe.data.parts[name].metric) in own
        }
        said = {key: value for name, own in found.items() for key, value in add_prefix(name, own).items()}
        return {"loss": total, **first, **said}

    def predict_samples(
        self, models: Models, new: NewSamples, *, part: str | None, device: Any
    ) -> list[dict[str, Any]]:
        there = {one.predictor.input for one in self.parts.values() if one.predictor is not None}
        kinds = [kind for kind in ("texts", "rows", "files") if kind in there]
        wanted = kinds if part is not None else kinds[:1]

        def is_wanted(one: Workload) -> bool:
            return one.predictor is not None and one.predictor.input in wanted

        name = _select_part(self.parts, part, wanted=is_wanted, verb="predict")
        return self.parts[name].predict_samples(part_modules(models, name), new, part=None, device=device)

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """A folder for each part, in the layout of its own ecosystem."""
        for name, part in self.parts.items():
            part.export(part_modules(models, name), folder / name)
        return {"library_name": "bottega", "pipeline_tag": "multitask"}


@final
class MultitaskProcessor(Processor):
    """The processors and recipes of all parts."""

    def __init__(
        self,
        recipes: Mapping[str, Recipe],
        parts: Mapping[str, Workload],
        data: MultitaskData,
        given_tokenizer: Sequence[str],
    ) -> None:
        self.recipes, self.parts, self.data, self.given_tokenizer = recipes, parts, data, list(given_tokenizer)

    def save(self, folder: Path) -> None:
        """Each part's own, and its recipe: a file that named it may be changed or gone when the run is opened again."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in self.parts.items():
            before = _kept_recipe(folder, name)
            changed = diff_recipes(before, self.recipes[name]) if before is not None else []
            changed = [one for one in changed if _is_its_own(one[0])]
            if changed:
                key, was, now = changed[0]
                raise DataError(
                    f"data.parts.{name}: {key}: {was} -> {now} since this run began; start over with --fresh"
                )
            part.processor.save(folder / name)
            with replacing_file(folder / f"{name}.yaml") as file:
                file.write_text(to_yaml(self.recipes[name]), encoding="utf-8")
        with replacing_file(folder / PARTS) as file:
            known = {"data": self.data.part_fingerprints(), "given_tokenizer": self.given_tokenizer}
            file.write_text(json.dumps(known, indent=1) + "\n")


@final
class MultitaskSampler(Sampler):
    """Samples of all parts; generates with the part that a request names."""

    def __init__(self, recipe: MultitaskRecipe, parts: Mapping[str, Workload]) -> None:
        self.recipe, self.parts = recipe, parts
        flags = dict.fromkeys(
            name
            for part in parts.values()
            if part.sampler.example_flags() is not None
            for name in part.sampler.requests
        )
        self.requests = ("part", *flags)

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        for name, part in self.parts.items():
            part.sampler.sample(part_modules(models, name), folder / name, device=device)

    def check_request(self, asked: Mapping[str, Any]) -> None:
        self._drawing(asked.get("part")).check_request({key: value for key, value in asked.items() if key != "part"})

    def generate(self, models: Models, *, device: Any, part: str | None = None, **asked: Any) -> Any:
        name = _select_part(self.parts, part, wanted=_draws, verb="generate")
        return self.parts[name].sampler.generate(part_modules(models, name), device=device, **asked)

    def example_flags(self) -> str | None:
        able = {name: found for name, part in self.parts.items() if (found := part.sampler.example_flags()) is not None}
        name = next(iter(able), None)
        return f" --part {name}{able[name]}" if name is not None else None

    def present(self, generated: Any, out: Path | None, *, run: Path, **request: Any) -> dict[str, Any]:
        part = self._drawing(request.pop("part", None))
        if out is not None:
            part.check_output(out)
        return part.present(generated, out, run=run, **request)

    def _drawing(self, name: str | None) -> Sampler:
        return self.parts[_select_part(self.parts, name, wanted=_draws, verb="generate")].sampler


def _select_part(
    parts: Mapping[str, Workload], name: str | None, *, wanted: Callable[[Workload], bool], verb: str
) -> str:
    """The part that is meant: the one that is named, or the only one that can do it."""
    able = [one for one, part in parts.items() if wanted(part)]
    if name is None and len(able) == 1:
        return able[0]
    if name in able:
        return name
    those = f"--part {' or '.join(able)}" if able else "(none can)"
    if name is None:
        raise UsageError(f"say which part is to {verb}: {those}")
    if name not in parts:
        raise UsageError(f"--part {name}: there is no such part; there are {', '.join(parts)}")
    raise UsageError(f"--part {name}: this part does not {verb}; say {those}")


def _is_its_own(key: str) -> bool:
    """Whether a key of a part's recipe decides anything: training is this run's affair, bar the form of a part's loss, and
    a tokenizer that it was given lies somewhere in the cache."""
    return not key.startswith(("training.", "evaluation.", "data.tokenizer.path")) or key == "training.label_smoothing"


def _draws(part: Workload) -> bool:
    return part.sampler.example_flags() is not None


def _kept_recipe(processor: Path, name: str) -> Recipe | None:
    path = processor / f"{name}.yaml"
    return load_recipe([path]).recipe if path.is_file() else None
