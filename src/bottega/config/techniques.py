"""What is added to plain training: the techniques of a recipe, each with its own options."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from bottega.config.section import Dropout, Number, Positive, Probability, Section
from bottega.config.wording import sentence
from bottega.nearness import near_names

ELSEWHERE = {
    "curriculum": "data.curriculum",
    "mixture": "data.sources and data.mixture",
    "unfreeze": "training.unfreeze",
    "freeze": "training.freeze",
    "head": "training.freeze: [backbone]",
    "multitask": "task: multitask",
}
"""What people look for here and finds its place in another block."""


class LoraOptions(Section):
    """Low-rank changes of matrices; the base stays as it is (Hu et al., 2021)."""

    rank: Positive = Field(8, description="of the change; its parameters grow with it")
    alpha: Number | None = Field(None, gt=0, description="the change is scaled by alpha / rank; null is twice the rank")
    dropout: Dropout = Field(0.0, description="share of the inputs of the change that is dropped while training")
    targets: tuple[str, ...] | Literal["all-linear"] | None = Field(
        None, description="ends of module names, or patterns over them; null is every matrix inside the blocks"
    )
    train: tuple[str, ...] | None = Field(
        None, description="parts that learn in full beside it; null is what begins at random, such as a head"
    )
    start: str | None = Field(None, description="a folder of an adapter to start from, ours or peft's")


class AdapterOptions(Section):
    """Narrow layers behind the blocks' outputs; the base stays as it is (Houlsby et al., 2019)."""

    size: Positive = Field(32, description="width of the narrow layer")
    targets: tuple[str, ...] | None = Field(
        None, description="ends of module names, or patterns over them; null is the last matrix of each half block"
    )
    train: tuple[str, ...] | None = Field(
        None, description="parts that learn in full beside it; null is what begins at random, such as a head"
    )
    start: str | None = Field(None, description="a folder of an adapter of ours to start from")


class DistillOptions(Section):
    """Learn what a teacher answers, beside what the data says (Hinton et al., 2015)."""

    teacher: str = Field(description="a run, needs.NAME, or a folder of transformers")
    temperature: Number = Field(2.0, gt=0, description="softens both answers; of classes and tokens alone")
    alpha: Probability = Field(0.5, description="share of the teacher in the loss; the data has the rest")
    hidden: Number = Field(0.0, ge=0, description="weight of what the blocks between say; 0 is none")


class EwcOptions(Section):
    """Weights that mattered for earlier sources are held where they were (Kirkpatrick et al., 2017)."""

    strength: Number = Field(1000.0, ge=0, description="of the pull back to the old weights")
    samples: Positive = Field(256, description="examples of a source that tell how much each weight mattered")
    decay: Probability = Field(1.0, description="of what was known of still earlier sources; 1 forgets none")


class ReplayOptions(Section):
    """A part of each batch comes from earlier sources."""

    share: Probability = Field(0.2, gt=0, lt=1, description="of each batch, once there is something earlier")
    memory: Positive | None = Field(None, description="examples kept of each earlier source; null is all")


class MamlOptions(Section):
    """Learn weights that a few steps adapt to a new task (Finn et al., 2017; Nichol et al., 2018)."""

    method: Literal["maml", "fomaml", "reptile", "none"] = Field(
        "maml", description="through the steps, as if they were none, by their sum; none adapts in validation alone"
    )
    inner_steps: Positive = Field(3, description="of adaptation in an episode")
    inner_rate: Number = Field(0.1, gt=0, description="learning rate of these steps")
    by: str | None = Field(
        None, description="what makes a task: label, source, region of a text, or a field; null is the first there is"
    )
    ways: Positive | None = Field(None, description="classify: classes in an episode, numbered anew; null is all")
    shots: Positive = Field(5, description="examples to adapt to; classify: of each class")
    queries: Positive = Field(5, description="examples that measure it; classify: of each class")


class PlasticityOptions(Section):
    """Weights of spiking layers also follow the timing of spikes (Bi & Poo, 1998; Pfister & Gerstner, 2006)."""

    rule: Literal["pair", "triplet"] = Field("pair", description="what counts: pairs of spikes, or triplets too")
    rate: Number = Field(1e-4, ge=0, description="how far weights move in a step, times the mean change of an example")
    a_plus: Number = Field(1.0, ge=0, description="gain of a pair whose input comes first")
    a_minus: Number = Field(1.35, ge=0, description="loss of a pair whose output comes first")
    tau_plus: Number = Field(4.0, gt=0, description="time steps in which that gain falls to a third (1/e)")
    tau_minus: Number = Field(4.0, gt=0, description="time steps in which that loss falls to a third (1/e)")
    a3_plus: Number = Field(0.05, ge=0, description="triplet: more gain after an earlier spike of the output")
    a3_minus: Number = Field(0.0, ge=0, description="triplet: more loss after an earlier spike of the input")
    tau_x: Number = Field(8.0, gt=0, description="triplet: time steps for which earlier input spikes count")
    tau_y: Number = Field(8.0, gt=0, description="triplet: time steps for which earlier output spikes count")
    reward: Literal["none", "accuracy", "loss"] = Field(
        "none", description="each example counts by how much better than usual it was told: right or not, or its loss"
    )
    reward_decay: Probability = Field(0.99, lt=1, description="of the running mean that says what is usual")
    bounds: Literal["hard", "soft"] = Field("hard", description="cut off at low and high, or slower towards them")
    low: Number = Field(-1.0, description="plasticity takes no weight below it")
    high: Number = Field(1.0, description="plasticity takes no weight above it")
    normalise: bool = Field(True, description="keep sum and length of each unit's incoming weights as they were")
    targets: tuple[str, ...] | None = Field(
        None, description="spiking layers by name, by the part they are in, or patterns; null is all of them"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> PlasticityOptions:
        if self.low >= self.high:
            raise ValueError(f"low: {self.low:g} must be below high, which is {self.high:g}")
        fields = type(self).model_fields
        for key in ("a3_plus", "a3_minus", "tau_x", "tau_y"):
            if self.rule == "pair" and getattr(self, key) != fields[key].default:
                raise ValueError(f"{key}: {getattr(self, key):g} is of the triplet rule; set rule: triplet")
        return self


OPTIONS: dict[str, type[Section]] = {
    "lora": LoraOptions,
    "adapter": AdapterOptions,
    "distill": DistillOptions,
    "ewc": EwcOptions,
    "replay": ReplayOptions,
    "maml": MamlOptions,
    "plasticity": PlasticityOptions,
}
SPELLINGS: dict[str, dict[str, str]] = {
    "lora": {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"},
    "adapter": {"bottleneck_size": "size", "adapter_layers": "targets", "target_modules": "targets"},
}
"""What peft and other guides call an option -> its name here."""


class Technique(Section):
    name: Literal["lora", "adapter", "distill", "ewc", "replay", "maml", "plasticity"] = Field(
        description="which technique"
    )
    options: SerializeAsAny[Section] | dict[str, Any] = Field(
        default_factory=dict, description="the technique's own settings", validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, values: Any) -> Any:
        """A name alone is a technique with its usual options."""
        values = {"name": values} if isinstance(values, str) else values
        if isinstance(values, dict) and (place := ELSEWHERE.get(str(values.get("name")))):
            raise ValueError(f"{values['name']} is no technique of this list; it is said as {place}")
        return values

    @field_validator("options", mode="before")
    @classmethod
    def _typed(cls, value: Any, info: Any) -> Any:
        schema = OPTIONS.get(info.data.get("name"))
        if schema is None or not isinstance(value, dict):
            return value
        try:
            return schema.model_validate(_respell(info.data["name"], value))
        except ValidationError as error:
            raise ValueError(_describe(error, schema)) from None


def _respell(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options under our names; peft and other guides have their own for some."""
    known = SPELLINGS.get(name, {})
    respelled: dict[str, Any] = {}
    for typed, value in options.items():
        key = known.get(typed, typed)
        if key in respelled and respelled[key] != value:
            raise ValueError(f"{typed}: {value!r} disagrees with {key}: {respelled[key]!r}; keep one of them")
        respelled[key] = value
    if name == "adapter" and respelled.get("targets") == "all":
        respelled["targets"] = None
    return respelled


def _describe(error: ValidationError, schema: type[Section]) -> str:
    """Return every problem of a technique's options in one line."""
    details: list[Any] = error.errors(include_url=False)
    together = [detail for detail in details if not detail["loc"]]  # of several keys together
    if together:
        return str(together[0]["msg"]).removeprefix("Value error, ")
    unknown = [str(detail["loc"][0]) for detail in details if detail["type"] == "extra_forbidden"]
    by_key: dict[str, Any] = {}
    for detail in details:
        by_key.setdefault(str(detail["loc"][0]), detail)
    problems = [_option_problem(key, detail, schema) for key, detail in by_key.items() if key not in unknown]
    return "; ".join([*problems, *([_unknown_options(unknown, schema)] if unknown else [])])


def _unknown_options(names: list[str], schema: type[Section]) -> str:
    near = {name: match[0] for name in names if (match := near_names(name, schema.model_fields))}
    if len(near) == len(names):
        return ", ".join(f"{name}: unknown key; did you mean {near[name]}?" for name in names)
    return f"{', '.join(names)}: unknown key{'s' if names[1:] else ''}; there is {', '.join(schema.model_fields)}"


def _option_problem(key: str, detail: Any, schema: type[Section]) -> str:
    if detail["type"] == "missing":
        return f"{key}: missing; it is {schema.model_fields[key].description}"
    if detail["type"] == "tuple_type" and isinstance(detail["input"], str):
        return f"{key}: expected a list, got {detail['input']!r}; write [{detail['input']}]"
    return f"{key}: {sentence([detail])}"
