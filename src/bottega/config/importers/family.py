"""What the trainers built on transformers have in common: length, batch, update rule, schedule, precision, cadences."""

from __future__ import annotations

import math
import re
from typing import Any

from bottega.config.importers.mapping import Sheet, is_off, number, per_cent, switch, text, whole
from bottega.config.importers.watched import watched
from bottega.config.wording import shown

UNSHARDED = "train refuses it until sharding is built; leave it out for a model that fits one GPU"
_MEMORY = "the same rule; its state is kept in full precision here"

OPTIMIZERS: dict[str, tuple[str, str | None]] = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla"), ("adamw", None)),
    **dict.fromkeys(("adamw_torch_npu_fused", "adamw_apex_fused", "adamw_anyprecision"), ("adamw", None)),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit"), ("adamw", _MEMORY)),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit", "paged_adamw_8bit", "ao_adamw_4bit"), ("adamw", _MEMORY)),
    **dict.fromkeys(("ao_adamw_8bit", "ao_adamw_fp8"), ("adamw", _MEMORY)),
    **dict.fromkeys(("lion", "lion_32bit", "lion_pytorch"), ("lion", None)),
    **dict.fromkeys(("lion_8bit", "paged_lion", "paged_lion_32bit", "paged_lion_8bit"), ("lion", _MEMORY)),
    "optimi_adamw": ("adamw", None),
    "adafactor": ("adafactor", None),
    "muon": ("muon", None),
    "sgd": ("sgd", None),
}
"""Their update rule -> ours, and what differs."""

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "polynomial": "polynomial",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
    "reduce_lr_on_plateau": "plateau",
    "one_cycle": "one_cycle",
}

_DIFFERS = {
    "warmup_stable_decay": "decays along a line here",
    # Theirs falls by a scale of 10,000 steps where there is no warm-up; ours by that of one step.
    "inverse_sqrt": "falls by the length of the warm-up; give it one",
}
"""What a schedule of a like name does differently."""

_SHAPE = {
    "num_cycles": ("cycles", whole),
    "power": ("power", number),
    "lr_end": ("eta_min", number),
    "min_lr": ("eta_min", number),
    "min_lr_rate": ("min_ratio", number),
    "min_lr_ratio": ("min_ratio", number),
    "factor": ("factor", number),
    "patience": ("patience", whole),
}
"""lr_scheduler_kwargs -> keys of training.scheduler."""


def length(sheet: Sheet, epochs_key: str, *, default: int) -> None:
    """Steps win over epochs, as they do there."""
    if sheet.is_open("max_steps"):
        if isinstance(sheet.get("max_steps"), int) and sheet.get("max_steps") <= 0:
            sheet.leave("max_steps", "meaningless here", "switched off there")
        else:
            sheet.convert("max_steps", "training.max_steps", whole)
    if sheet.ours("training.max_steps"):
        sheet.leave(epochs_key, "meaningless here", "max_steps is given and wins")
    elif sheet.is_open(epochs_key):
        amount = sheet.get(epochs_key)
        part = isinstance(amount, float) and math.isfinite(amount) and amount != int(amount)
        note = "a whole number of epochs here; set training.max_steps for a part of one" if part else None
        sheet.convert(epochs_key, "training.num_epochs", lambda v: math.ceil(v) if part else whole(v), note=note)
    else:
        sheet.default(epochs_key, default, "training.num_epochs", default)


def batch(sheet: Sheet, size_key: str, *, default: int) -> None:
    """Both numbers are taken over as they are: with gradient_accumulation_steps our batch is per process too."""
    size = sheet.convert(size_key, "training.batch_size", whole)
    passes = sheet.convert("gradient_accumulation_steps", "training.gradient_accumulation_steps", whole)
    if size is None:
        sheet.default(size_key, default, "training.batch_size", default)
    if passes is None:
        sheet.default("gradient_accumulation_steps", 1, "training.gradient_accumulation_steps", 1)
    batch_note(sheet, size or default, passes or 1)


def batch_note(sheet: Sheet, size: int, passes: int) -> None:
    sheet.notes.append(f"batch: {size} a process x {passes} = {size * passes} a step with one process, as there")


def optimizer(sheet: Sheet, key: str) -> None:
    asked = str(sheet.get(key)).lower() if sheet.is_open(key) else None
    if asked is not None and asked in OPTIMIZERS:
        name, note = OPTIMIZERS[asked]
        sheet.put(key, "training.optimizer.name", name, note=note)
    elif asked is not None:
        sheet.leave(key, "no counterpart", "adamw is used; there is also muon, lion, adafactor, sgd and adam")
    first, second = sheet.get("adam_beta1"), sheet.get("adam_beta2")
    row = sheet.ours("training.optimizer.name")
    if first is not None or second is not None:
        pair = [0.9 if first is None else first, 0.999 if second is None else second]
        for beta in ("adam_beta1", "adam_beta2"):
            sheet.convert(beta, "training.optimizer.betas", lambda _: [number(part) for part in pair])
    elif row is not None and row.becomes == "lion":
        sheet.default("adam_beta1, adam_beta2", [0.9, 0.999], "training.optimizer.betas", [0.9, 0.999])
    sheet.convert("adam_epsilon", "training.optimizer.eps", number)
    if row is not None and row.becomes == "sgd":
        sheet.default("momentum", 0.0, "training.optimizer.momentum", 0.0)


def clipping(sheet: Sheet) -> None:
    """0 is off there; here that is null."""
    note = "null is off" if sheet.get("max_grad_norm") == 0 else None
    sheet.convert("max_grad_norm", "training.max_grad_norm", lambda v: number(v) or None, note=note)


def schedule(sheet: Sheet, key: str, *, default: str) -> None:
    asked = str(sheet.get(key)).lower() if sheet.is_open(key) else None
    if asked is None:
        sheet.default(key, default, "training.scheduler.name", SCHEDULES[default])
    elif asked in SCHEDULES:
        sheet.put(key, "training.scheduler.name", SCHEDULES[asked], note=_DIFFERS.get(asked))
    else:
        sheet.leave(key, "no counterpart", "cosine is used; docs/recipes.md names the others")
    for theirs, (name, convert) in _SHAPE.items():
        sheet.convert(f"lr_scheduler_kwargs.{theirs}", f"training.scheduler.{name}", convert)
    _decay_steps(sheet)
    if asked == "polynomial":
        sheet.default("lr_scheduler_kwargs.lr_end", 1e-7, "training.scheduler.eta_min", 1e-7)
    if asked == "reduce_lr_on_plateau":
        sheet.default("lr_scheduler_kwargs.factor", 0.1, "training.scheduler.factor", 0.1)
        sheet.default("lr_scheduler_kwargs.patience", 10, "training.scheduler.patience", 10)
    _warmup(sheet, has_none=asked in ("constant", "reduce_lr_on_plateau"))


def _decay_steps(sheet: Sheet) -> None:
    """Steps of the last part there, a share of the run here; the share needs the length."""
    key, steps = "lr_scheduler_kwargs.num_decay_steps", sheet.ours("training.max_steps")
    if steps is not None:
        sheet.convert(key, "training.scheduler.decay_fraction", lambda v: whole(v) / steps.becomes)
    sheet.leave(key, "no counterpart", "a share of the run here, training.scheduler.decay_fraction; needs max_steps")


def _warmup(sheet: Sheet, *, has_none: bool) -> None:
    key, ours = "warmup_steps", "training.scheduler.warmup_steps"
    for said in ("warmup_steps", "warmup_ratio"):
        if has_none:
            sheet.leave(said, "meaningless here", "their schedule of this name has no warm-up")
    steps = sheet.get(key)
    if isinstance(steps, int | float) and 0 < steps < 1:
        sheet.convert(key, ours, per_cent)
    elif steps or not sheet.get("warmup_ratio"):
        sheet.convert(key, ours, whole)
    else:
        sheet.leave(key, "meaningless here", "0, so warmup_ratio decides")
    if sheet.ours(ours):
        sheet.leave("warmup_ratio", "meaningless here", "warmup_steps is given and wins")
    sheet.convert("warmup_ratio", ours, lambda v: per_cent(number(v)))


def precision(sheet: Sheet, *, default: str) -> None:
    """One key here for what is several switches there."""
    asked = [("bf16", "bf16"), ("bfloat16", "bf16"), ("pure_bf16", "bf16"), ("fp16", "fp16"), ("float16", "fp16")]
    key = "training.mixed_precision"
    for theirs, name in asked:
        value = sheet.get(theirs)
        if value is None or is_off(value) or sheet.ours(key):
            continue
        pure = theirs in ("bfloat16", "pure_bf16", "float16") or value == "full"
        note = "weights stay in fp32 here" if pure else None
        sheet.put(theirs, key, "auto" if str(value).lower() == "auto" else name, note=note)
    chosen = sheet.ours(key)
    for theirs, _ in asked:
        if chosen is None and sheet.is_open(theirs):
            sheet.put(theirs, key, "fp32")
        elif chosen is not None:
            sheet.leave(theirs, "meaningless here", f"{chosen.theirs} decides")
    if sheet.ours(key) is None:
        sheet.default("bf16", "auto" if default == "auto" else False, key, default)


def cadence(sheet: Sheet, ours: str, *, strategies: tuple[str, ...], steps: str, otherwise: Any = None) -> None:
    """A strategy (steps, epoch, no) and a number of steps there, one key here.

    `otherwise` is the number where the strategy is steps and none is given.
    """
    strategy = next((key for key in strategies if sheet.is_open(key)), None)
    asked = "steps" if strategy is None else str(sheet.get(strategy)).lower()
    if strategy is not None and asked == "epoch":
        sheet.put(strategy, ours, "1 epoch")
    elif strategy is not None and asked == "best":
        sheet.leave(strategy, "meaningless here", "the best checkpoint is always kept")
    elif strategy is not None and asked in ("no", "false", "none"):
        if ours == "logging.every":
            sheet.leave(strategy, "no counterpart", "the log is always written; logging.every says how often")
        else:
            sheet.put(strategy, ours, None, note="null is at the end only")
    elif asked == "steps":
        every = sheet.convert(steps, ours, _every)
        if strategy is not None and every is None and otherwise is not None:
            sheet.put(strategy, ours, otherwise)
        elif strategy is not None and every is not None:
            sheet.put(strategy, ours, every)
    if strategy is not None:
        sheet.leave(strategy, "not understood", f"expected steps, epoch or no, got {shown(sheet.get(strategy))}")
    sheet.leave(steps, "meaningless here", f"{strategy} says {asked}")


def _every(value: Any) -> Any:
    """Below 1 it is a share of the run."""
    amount = number(value)
    if amount <= 0:
        raise ValueError(f"expected a number of steps, got {shown(value)}")
    return per_cent(amount) if amount < 1 else whole(amount)


def best(sheet: Sheet, *, patience: str) -> None:
    """Which metric decides, and when to stop waiting for a better one."""
    metric = watched(sheet, metric="metric_for_best_model", mode="greater_is_better", ours="evaluation")
    waits = sheet.convert(patience, "training.early_stopping.patience", whole)
    sheet.convert("early_stopping_threshold", "training.early_stopping.threshold", number)
    if waits is not None and metric is not None:
        sheet.default("metric_for_best_model", metric, "training.early_stopping.metric", metric)
    sheet.leave(
        "load_best_model_at_end", "meaningless here", "the best checkpoint is always kept and is what is exported"
    )


def reporting(sheet: Sheet, key: str = "report_to") -> None:
    if not sheet.is_open(key):
        return
    value = sheet.get(key)
    asked = [str(part).lower() for part in (value if isinstance(value, list) else str(value).split(","))]
    others = sorted({part.strip() for part in asked} - {"wandb", "tensorboard", "none", "all", ""})
    if asked == ["all"]:
        sheet.leave(key, "meaningless here", "TensorBoard is written; logging.wandb.project adds Weights & Biases")
        return
    note = f"no counterpart: {', '.join(others)}" if others else None
    sheet.put(key, "logging.tensorboard", "tensorboard" in asked, note=note)
    if "wandb" in asked:
        sheet.put(key, "logging.wandb.enabled", True)


WANDB = {
    "use_wandb": ("logging.wandb.enabled", switch),
    "wandb_project": ("logging.wandb.project", text),
    "wandb_entity": ("logging.wandb.entity", text),
    "wandb_name": ("logging.wandb.name", text),
    "wandb_notes": ("logging.wandb.notes", text),
}


def wandb_mode(sheet: Sheet) -> None:
    mode = sheet.get("wandb_mode")
    if mode == "offline":
        sheet.put("wandb_mode", "logging.wandb.offline", True)
    elif mode == "disabled":
        sheet.leave("use_wandb", "meaningless here", "wandb_mode says disabled")
        sheet.put("wandb_mode", "logging.wandb.enabled", False)
    else:
        sheet.leave("wandb_mode", "meaningless here", "what happens here anyway")


def sharding(sheet: Sheet) -> None:
    """DeepSpeed and FSDP: what is sharded, and what lies in host memory."""
    if isinstance(sheet.get("deepspeed"), str) and sheet.get("deepspeed"):
        name = sheet.get("deepspeed")
        stage = re.search(r"(?:zero|stage|z)[_-]?([0-3])", name, re.IGNORECASE)
        _stage(sheet, "deepspeed", stage and int(stage[1]))
        if "offload" in name.lower() and sheet.ours("distributed.strategy"):
            sheet.put("deepspeed", "distributed.offload", True, note=UNSHARDED)
    if sheet.is_open("deepspeed.zero_optimization.stage"):
        _stage(sheet, "deepspeed.zero_optimization.stage", sheet.get("deepspeed.zero_optimization.stage"))
    if sheet.get("deepspeed.zero_optimization.offload_optimizer.device") == "cpu":
        sheet.put("deepspeed.zero_optimization.offload_optimizer.device", "distributed.offload", True, note=UNSHARDED)
    sheet.leave_block("deepspeed", "no counterpart", "a setting of DeepSpeed")
    asked = sheet.get("fsdp")
    if asked is not None and not is_off(asked):
        words = " ".join(map(str, asked)) if isinstance(asked, list) else str(asked)
        whole_copies = "no_shard" in words
        note = None if whole_copies else UNSHARDED
        sheet.put("fsdp", "distributed.strategy", "ddp" if whole_copies else "fsdp", note=note)
        if "offload" in words:
            sheet.put("fsdp", "distributed.offload", True, note=UNSHARDED)
        for key in ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params"):
            sheet.convert(key, "distributed.offload", switch)
    elif sheet.is_open("fsdp_version") or any(not is_off(value) for value in sheet.under("fsdp_config").values()):
        # The newer way: a block of settings switches it on.
        key = "fsdp_version" if sheet.is_open("fsdp_version") else next(iter(sheet.under("fsdp_config")))
        sheet.put(key, "distributed.strategy", "fsdp", note=UNSHARDED)
        sheet.convert("fsdp_config.offload_params", "distributed.offload", switch)
    sheet.convert("fsdp_config.activation_checkpointing", "training.gradient_checkpointing", switch)
    sheet.leave_block("fsdp_config", "no counterpart", "a setting of their sharding")


def _stage(sheet: Sheet, key: str, stage: Any) -> None:
    if stage in (1, 2, 3):
        sheet.put(key, "distributed.strategy", "fsdp", note=f"ZeRO-{stage}; {UNSHARDED}")
    elif stage == 0:
        sheet.put(key, "distributed.strategy", "ddp")
    else:
        sheet.leave(key, "no counterpart", "DeepSpeed's own file; distributed.strategy is ddp or fsdp here")


def switches(sheet: Sheet) -> None:
    """Compiling, recomputing and what loads batches."""
    if str(sheet.get("gradient_checkpointing")).startswith("offload"):
        note = "activations are recomputed and not moved to host memory"
        sheet.put("gradient_checkpointing", "training.gradient_checkpointing", True, note=note)
    sheet.direct(
        {
            "gradient_checkpointing": ("training.gradient_checkpointing", switch),
            "torch_compile": ("training.compile", lambda v: v if v == "auto" else switch(v)),
            "dataloader_num_workers": ("data.workers", whole),
            "dataloader_pin_memory": ("data.pin_memory", switch),
        }
    )
    row = sheet.ours("data.workers")
    workers = max(1, row.becomes) if row else 1
    counted = "counted a worker there, in all here" if workers > 1 else None
    sheet.convert("dataloader_prefetch_factor", "data.prefetch", lambda v: whole(v) * workers, note=counted)
