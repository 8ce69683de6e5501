"""Curricula: competence uses the easiest c(t) only; stages have their fraction, batch size and learning rate."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bottega
import small_media
import small_run
import small_texts
from bottega.config.data import Competence, Curriculum
from bottega.core.errors import BottegaError, UsageError
from bottega.core.schedule import Schedule
from bottega.data.loading.loader import Loader
from bottega.data.order.curriculum import NUM_LEVELS, compute_competence, plan_stages, rank_samples
from bottega.data.order.orders import CurriculumOrder
from bottega.data.prepare.scored_encoder import ScoredEncoder
from bottega.data.sources.source import ArraySource
from bottega.run.compose import build_plain_loader, count_total_steps
from bottega.tasks import registry
from bottega.tasks.language.prepare import TokenEncoder
from bottega.tasks.recipes import load_recipe
from small_run import differing_tensors, read_tensors


def make_order(
    competence: Competence, *, size: int, total: int, batch_size: int, steps_per_epoch: int = 10
) -> tuple[CurriculumOrder, np.ndarray]:
    """Return an order over shuffled scores, and the rank of each sample."""
    scores = np.random.default_rng(size).permutation(size)
    ranking = np.argsort(scores)
    curriculum = Curriculum(competence=competence)
    stages = plan_stages(
        curriculum,
        size=size,
        total_steps=total,
        steps_per_epoch=steps_per_epoch,
        batch_size=batch_size,
        batch_multiplier=1,
    )
    return CurriculumOrder(ranking, stages, seed=3), scores


@given(
    size=st.integers(60, 400),
    steps=st.integers(1, 120),
    extra_steps=st.integers(0, 60),
    initial=st.floats(0.15, 0.9),
    power=st.floats(0.5, 4),
    batch_size=st.sampled_from([1, 2, 8]),
)
def test_available_samples_follow_the_competence_up_to_all(
    size: int, steps: int, extra_steps: int, initial: float, power: float, batch_size: int
) -> None:
    competence = Competence.model_validate({"initial": initial, "steps": steps, "power": power})
    order, ranks = make_order(competence, size=size, total=steps + extra_steps, batch_size=batch_size)
    loader = Loader(ArraySource({"x": ranks}), batch_size, seed=0, order=order)
    for step in range(steps + extra_steps):
        available = compute_competence(step, competence, steps=steps)
        index, _ = loader.indices(step)
        assert ranks[index].max() < available * size + 1e-6
        pool = order.stages[order.schedule.stage_at(step)].num_samples
        assert pool > (available - (1 - initial) / NUM_LEVELS) * size - 1 - 1e-6, "it lags by a level or more"
    assert compute_competence(steps, competence, steps=steps) == pytest.approx(1)
    assert order.stages[-1].num_samples == size
    assert len(order.stages) <= NUM_LEVELS + 1
    last = order.schedule.start_positions[-1]
    assert set(order.indices(np.arange(last, last + size))[0]) == set(range(size))


def test_competence_is_the_published_formula() -> None:
    """Platanios et al., 2019, equation 5: square root, c0 = 0.01, T = 1000."""
    competence = Competence.model_validate({"initial": 0.01, "steps": 1000})
    for step in (0, 10, 250, 999, 1000, 5000):
        expected = min(1.0, math.sqrt(step * (1 - 0.01**2) / 1000 + 0.01**2))
        assert compute_competence(step, competence, steps=1000) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_the_batches_of_one_process(world: int) -> None:
    order, sample_ranks = make_order(Competence(initial=0.2), size=100, total=40, batch_size=8)
    source = ArraySource({"x": np.arange(100)})
    expected = Loader(source, 8, seed=0, order=order)
    ranks = [Loader(source, 8, seed=0, order=order, data_rank=rank, data_size=world) for rank in range(world)]
    streams = [rank(0) for rank in ranks]
    for step in range(40):
        batch = np.concatenate([next(stream)["x"] for stream in streams])
        assert (batch == expected.indices(step)[0]).all()
        assert sample_ranks[batch].max() < compute_competence(step, Competence(initial=0.2), steps=20) * 100 + 1e-6
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(
    ("options", "batch_size", "message"),
    [
        ({"steps": 41}, 4, r"competence\.steps is 41, but the run has 40"),
        ({"steps": 0}, 4, r"competence\.steps is 0"),
        ({"initial": 0.05}, 8, r"competence\.initial=0\.05 of 100 samples is 5, fewer than one batch of 8"),
    ],
)
def test_invalid_competence_is_refused(options: dict[str, Any], batch_size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_order(Competence.model_validate(options), size=100, total=40, batch_size=batch_size)


@pytest.mark.parametrize("curriculum", [{}, {"stages": []}, {"competence": {}, "stages": [{"steps": 3}]}])
def test_curriculum_needs_either_stages_or_competence(curriculum: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"data\.curriculum: expected either stages or competence"):
        load_recipe(["language", {"data.curriculum": curriculum}])


def test_run_with_relative_competence_steps_cannot_be_extended(tmp_path: Path, text_file: Path) -> None:
    changes = {"data.curriculum": {"by": "rarity", "competence": {"initial": 0.5, "steps": "50%"}}, "name": "grown"}
    small_run.train(tmp_path, text_file, **changes)
    with pytest.raises(UsageError, match="started with another recipe"):
        small_run.train(tmp_path, text_file, **changes, **{"training.max_steps": 12})


# Three media


def write_scored_texts(folder: Path) -> Path:
    file = folder / "scored.jsonl"
    rng = np.random.default_rng(1)
    lines = (json.dumps({**row, "hardness": float(rng.random())}) for row in small_texts.make_rows())
    file.write_text("".join(line + "\n" for line in lines))
    return file


def write_scored_images(folder: Path) -> Path:
    fields = dict(np.load(small_media.write_images(folder)))
    hardness = -fields["image"].mean(axis=(1, 2))
    np.savez(folder / "scored.npz", **fields, hardness=hardness)
    return folder / "scored.npz"


def language(folder: Path) -> tuple[str, dict[str, Any]]:
    return "language/shakespeare", {**small_run.settings(folder, write_scored_texts(folder)), "data.padding": True}


def classify(folder: Path) -> tuple[str, dict[str, Any]]:
    return "classify", {**small_texts.settings(folder), "data.train.path": str(write_scored_texts(folder))}


def image(folder: Path) -> tuple[str, dict[str, Any]]:
    return "image", {**small_media.image(folder), "data.train.path": str(write_scored_images(folder))}


MEDIA = [language, classify, image]
STAGES = [
    {"share": 0.4, "steps": 2, "batch_size": 4, "learning_rate": 1e-2},
    {"share": 0.7, "steps": "50%", "batch_size": 6},
    {"share": 1.0, "steps": 1, "learning_rate": 1e-4},
]
PEAK_LEARNING_RATES, BATCH_SIZES, FIRST_STEPS = (1e-2, 2e-3, 1e-4), (4, 6, 8), (0, 2, 6)
COMMON = {"training.learning_rate": 2e-3, "training.batch_size": 8, "training.scheduler.eta_min": 1e-5}


def test_images_are_ranked_by_their_score_field(tmp_path: Path) -> None:
    """Bright images are easy here, so that the images show the ranking."""
    name, values = image(tmp_path)
    recipe = load_recipe(
        [name, {**values, "data.curriculum": {"by": "hardness", "competence": {"initial": 0.5}}}]
    ).recipe
    source = registry.open_workload(recipe, progress=lambda stage, done, total: None).data.training()
    ranking = rank_samples(source, "hardness")
    brightness = source.rows(ranking, np.zeros_like(ranking))["image"].mean(axis=(1, 2, 3))
    assert (np.diff(brightness) <= 1e-6).all()
    assert brightness[0] > brightness[-1] + 0.5


def test_scored_texts_keep_their_counts_of_documents_and_bytes(tmp_path: Path) -> None:
    inner = TokenEncoder(tmp_path, "<u2", has_end_token=True)
    assert ScoredEncoder(inner, "hardness").summed_entries == inner.summed_entries == ("documents", "bytes")


@pytest.mark.parametrize("medium", MEDIA, ids=lambda m: m.__name__)
def test_each_stage_has_its_fraction_batch_size_and_learning_rate(medium: Any, tmp_path: Path) -> None:
    name, values = medium(tmp_path)
    curriculum = {"data.curriculum": {"by": "hardness", "stages": STAGES}}
    recipe = load_recipe([name, {**values, **COMMON, **curriculum}]).recipe
    source = registry.open_workload(recipe, progress=lambda stage, done, total: None).data.training()
    loader = build_plain_loader(recipe, source, data_size=1)
    assert count_total_steps(recipe, loader) == 8
    ranks = np.argsort(rank_samples(source, "hardness"))
    for step in range(8):
        stage = sum(step >= first for first in FIRST_STEPS) - 1
        index, _ = loader.indices(step)
        assert len(index) == BATCH_SIZES[stage]
        assert ranks[index].max() < max(1, round(STAGES[stage]["share"] * len(source)))
    run = bottega.train(recipe=name, overrides={**values, **COMMON, **curriculum, "name": "staged"})
    rates = [row["learning_rate"] for row in run.history() if row["kind"] == "train"]
    for step, rate in enumerate(rates):
        stage = sum(step >= first for first in FIRST_STEPS) - 1
        peak = PEAK_LEARNING_RATES[stage]
        shape = Schedule(recipe.training.scheduler.name, total=8, warmup=2, floor=min(1.0, 1e-5 / peak))
        assert rate == peak * shape(step)


def test_stages_of_all_samples_need_no_difficulty(tmp_path: Path, text_file: Path) -> None:
    """Windows of packed text have one length, so that `by: length`, the default, would be refused."""
    stages = [{"steps": "50%", "batch_size": 2}, {"steps": "50%", "batch_size": 6}]
    run = small_run.train(tmp_path, text_file, **{"data.curriculum": {"stages": stages}, "training.max_steps": 8})
    assert json.loads((run.path / "checkpoints" / "last" / "progress.json").read_text())["samples"] == 4 * 2 + 4 * 6
    with pytest.raises(UsageError, match="all samples have the same length"):
        small_run.train(tmp_path, text_file, **{"data.curriculum": {"stages": [{"share": 0.5, "steps": 2}, *stages]}})


@pytest.mark.parametrize("medium", MEDIA, ids=lambda m: m.__name__)
@pytest.mark.parametrize("kind", ["stages", "competence"])
def test_a_curriculum_resumes_bit_for_bit(medium: Any, kind: str, tmp_path: Path) -> None:
    name, values = medium(tmp_path)
    schedule = {"stages": STAGES} if kind == "stages" else {"competence": {"initial": 0.5, "steps": 6, "power": 1}}
    changes = {**values, **COMMON, "data.curriculum": {"by": "hardness", **schedule}}
    straight = bottega.train(name, {**changes, "name": "straight"})
    shutil.copytree(straight.path, tmp_path / "resumed", symlinks=True)
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000008")
    resumed = bottega.train(name, {**changes, "name": "resumed"})
    assert resumed.step == 8
    assert not differing_tensors(read_tensors(straight.path), read_tensors(resumed.path))


def test_curriculum_ranks_by_numeric_fields_only(tmp_path: Path) -> None:
    """Other fields are refused with a remedy."""
    errors = {
        ("image", "length"): "all samples have the same length; .* the name of a field with a score",
        ("image", "rarity"): "needs tokens, .* use the name of a field with a score",
        ("image", "label"): r"'label' \(data\.curriculum\.by\) must be a number, not 'dark'",
        ("classify", "label"): "must be a number, not 'cook'",
        ("classify", "mood"): r"'mood' \(data\.curriculum\.by\) must be a number, not None",
    }
    for medium in (image, classify):
        name, values = medium(tmp_path)
        for by in ("length", "rarity", "hardness", "label", "mood"):
            recipe = load_recipe(
                [name, {**values, "data.curriculum": {"by": by, "competence": {"initial": 0.5}}}]
            ).recipe
            error = errors.get((name, by), None if by != "mood" else "must be a number")

            def build_loader(recipe: Any = recipe) -> Loader:
                workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
                return build_plain_loader(recipe, workload.data.training(), data_size=1)

            if error is None:
                assert isinstance(build_loader().order, CurriculumOrder)
            else:
                with pytest.raises(BottegaError, match=error):
                    build_loader()
