"""Scores of generated samples: equal counts, the same held-out samples, an unbiased judge, bounded memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_media
from bottega.analysis import generation_scores, judge_model
from bottega.analysis.evaluate import format_report
from bottega.core.errors import DataError, UsageError
from bottega.tasks.generation.sampler import GenerationSampler
from bottega.tasks.generation.workload import GenerationWorkload

JUDGE = {"judge": {"recipe": "classify/image", "settings": {"training.max_steps": 4, "training.batch_size": 8}}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on 27 images; 9 are held out. The judge is trained by the first evaluation."""
    options: dict[str, Any] = {"training.max_steps": 2, "needs": JUDGE, "name": "pictures"}
    return Path(small_media.train(tmp_path_factory.mktemp("runs"), **options).path)


@pytest.fixture
def workload(run: Path) -> GenerationWorkload:
    loaded = bottega.load(run, device="cpu").workload
    assert isinstance(loaded, GenerationWorkload)
    return loaded


@pytest.mark.parametrize(("count", "compared"), [(4, 4), (9, 9), (20, 9)])
def test_distributions_are_compared_at_equal_counts(
    run: Path, monkeypatch: pytest.MonkeyPatch, count: int, compared: int
) -> None:
    counts: dict[str, list[int]] = {"moments": [], "fid": []}
    moments = generation_scores.feature_moments

    def count_moments(features: np.ndarray) -> Any:
        counts["moments"].append(len(features))
        return moments(features)

    def fid(samples: np.ndarray, training: np.ndarray) -> float:
        counts["fid"].append(len(samples))
        return 0.0

    monkeypatch.setattr(generation_scores, "feature_moments", count_moments)
    monkeypatch.setattr(generation_scores, "_build_fid_function", lambda *_: fid)
    result = bottega.evaluate(run, count=count, inception="weights.safetensors")
    assert counts["moments"] == [27, compared, compared], "training data, generated samples, real samples"
    assert counts["fid"] == [compared, compared]
    assert result["counts"] == {
        "generated": count,
        "real": 9,
        "compared": compared,
        "training": 27,
        "training_available": 27,
    }
    line = f"compared with 27 of 27 training samples, distributions at {compared} samples each"
    assert line in format_report(result).splitlines()


def test_fewer_samples_cover_the_held_out_data_evenly() -> None:
    assert generation_scores._choose_matching_indices(3, 9).tolist() == [0, 3, 6], (
        "for data sorted by class, one of each"
    )
    assert generation_scores._choose_matching_indices(11, 9).tolist() == [*range(9), 0, 1]
    for count in range(1, 9):
        assert len(set(generation_scores._choose_matching_indices(count, 9).tolist())) == count


def test_generation_in_chunks_gives_the_same_samples(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = bottega.load(run, device="cpu")
    workload = saved.workload
    assert isinstance(workload, GenerationWorkload)
    held_out = generation_scores.collect_samples(workload, [workload.read_raw("validation")])
    progress: list[tuple[int, int]] = []

    def draw() -> np.ndarray:
        progress.clear()
        indices = generation_scores._choose_matching_indices(11, 9)
        record = lambda stage, done, total: progress.append((done, total))  # noqa: E731
        return generation_scores._draw_samples(saved, workload, held_out, indices, 0, record).samples

    expected = draw()
    total = progress[-1]
    monkeypatch.setattr(generation_scores, "CHUNK_SIZE", 4)
    np.testing.assert_allclose(draw().astype(int), expected, atol=1)
    assert progress[-1] == total
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_reference_samples_are_uint8_and_bounded(workload: GenerationWorkload, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = generation_scores.collect_samples(workload, [workload.read_raw("train")])
    assert everything.samples.shape == (27, 8, 8, 1)
    monkeypatch.setattr(generation_scores, "MAX_BYTES", 10 * 64)
    some = generation_scores.collect_samples(workload, [workload.read_raw("train")])
    assert (some.samples.dtype, some.samples.nbytes) == (np.uint8, 9 * 64)
    assert some.num_available == 27
    np.testing.assert_array_equal(some.samples, everything.samples[::3])
    np.testing.assert_array_equal(some.conditions["label"], everything.conditions["label"][::3])
    reference = generation_scores.Reference(workload, None, some, some)
    assert reference.training_values is some.samples, "no float copy, with or without a judge"


def test_judge_classifies_in_chunks(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = bottega.load(run, device="cpu")
    workload = saved.workload
    assert isinstance(workload, GenerationWorkload)
    judge = judge_model.JudgeModel.open_judge(saved, workload, [], quiet=True)
    assert judge is not None
    samples = generation_scores.collect_samples(workload, [workload.read_raw("train")]).samples
    expected_outputs = judge.classify(samples)
    sizes: list[int] = []
    normalise = judge_model.normalise_pixels

    def record_size(chunk: np.ndarray, **options: Any) -> np.ndarray:
        sizes.append(len(chunk))
        return normalise(chunk, **options)

    monkeypatch.setattr(judge_model, "normalise_pixels", record_size)
    monkeypatch.setattr(judge_model, "CHUNK_SIZE", 10)
    for output, expected in zip(judge.classify(samples), expected_outputs, strict=True):
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5)
    assert sizes == [10, 10, 7]


def test_judge_uses_its_last_checkpoint(
    run: Path, workload: GenerationWorkload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its best checkpoint was selected on the data that serve as real samples here."""
    checkpoints: list[Any] = []
    load = judge_model.load

    def record_load(path: Path, **options: Any) -> Any:
        checkpoints.append(options.get("checkpoint"))
        return load(path, **options)

    monkeypatch.setattr(judge_model, "load", record_load)
    assert judge_model.JudgeModel.open_judge(bottega.load(run, device="cpu"), workload, [], quiet=True) is not None
    assert checkpoints == ["last"]


def test_missing_judge_is_refused_before_generation(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise UsageError("no judge")

    monkeypatch.setattr(judge_model, "ensure_dependency", missing)
    monkeypatch.setattr(
        GenerationSampler, "draw", lambda *_, **__: pytest.fail("generated before the judge is available")
    )
    with pytest.raises(UsageError, match="no judge"):
        bottega.evaluate(run, count=4)


@pytest.mark.parametrize("condition", ["class", "none"])
def test_real_samples_are_those_of_the_loss(tmp_path: Path, condition: str) -> None:
    options = {"training.max_steps": 1, "data.validation.limit": 3, "needs": JUDGE, "model.condition": condition}
    path = small_media.train(tmp_path, **options).path
    source = bottega.load(path, device="cpu").workload.data.validation()
    assert source is not None
    assert len(source) == 3
    assert bottega.evaluate(path, count=4)["counts"]["real"] == 3


SMALL = {"training.max_steps": 1, "model.hidden_size": 16, "model.num_layers": 1}
SMALL_JUDGE = {"judge": {"recipe": "classify/image", "settings": {"training.max_steps": 2, "model.hidden_size": 8}}}


def test_judge_of_few_samples_uses_smaller_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_media.train(tmp_path, **SMALL, needs=SMALL_JUDGE).path
    first = bottega.evaluate(path, count=4, quiet=False)
    assert "training.batch_size is lowered from 64 to 16" in capsys.readouterr().err
    [judge] = (tmp_path / "parts").iterdir()
    assert bottega.load(judge).recipe.training.batch_size == 16
    # The next evaluation finds it under the same name, whether it is complete or has to be resumed.
    again = bottega.evaluate(path, count=4, quiet=False)
    shutil.rmtree(judge / "final")
    resumed = bottega.evaluate(path, count=4, quiet=False)
    assert first == again == resumed
    assert [path.name for path in (tmp_path / "parts").iterdir()] == [judge.name]


def write_one_class(folder: Path) -> Path:
    with np.load(small_media.write_images(folder)) as fields:
        path = folder / "one.npz"
        np.savez(path, image=fields["image"], label=np.full(36, "dark"))
    return path


def test_single_class_has_no_judged_scores(tmp_path: Path) -> None:
    path = small_media.train(
        tmp_path, **SMALL, needs=SMALL_JUDGE, **{"data.train.path": str(write_one_class(tmp_path))}
    ).path
    result = bottega.evaluate(path, count=4)
    assert set(result["real"]) == {"variance_ratio", "nearest_ratio"}
    [note] = result["notes"]
    assert note.startswith("the data has one class")
    assert format_report(result).splitlines()[-1] == note
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("is_judged", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_other_data_can_be_evaluated_after_the_own_data_changed(tmp_path: Path, is_judged: bool, is_gone: bool) -> None:
    path = small_media.train(tmp_path, **SMALL, needs=SMALL_JUDGE).path
    if is_judged:
        bottega.evaluate(path, count=4)
    own = small_media.write_images(tmp_path)
    other = own.rename(tmp_path / "other.npz")
    if not is_gone:
        with np.load(other) as fields:
            np.savez(own, image=255 - fields["image"], label=fields["label"])
    with pytest.raises(DataError, match=str(own)) as caught:
        bottega.evaluate(path, count=4)
    assert is_gone or "restore it, or evaluate other data with --data" in str(caught.value)
    result = bottega.evaluate(path, data=other, count=4)
    judged = {"conditional_accuracy"} if is_judged else set()
    assert set(result["real"]) == {"variance_ratio"} | judged
    assert str(own) in result["notes"][0]
    assert ("needs.judge is not trained yet" in str(result["notes"])) == (not is_judged)
    assert "training" not in result["counts"]
    assert len(list((tmp_path / "parts").glob("*"))) == is_judged, "no judge was trained on the changed data"


def test_nan_score_is_left_out_with_its_reason(tmp_path: Path) -> None:
    path = small_media.train(tmp_path, **SMALL, needs={}).path
    result = bottega.evaluate(path, split="train", count=4)
    assert np.isnan(result["metrics"]["nearest_ratio"])
    table = format_report(result)
    assert "nan" not in table
    assert [line for line in table.splitlines() if line.startswith("nearest_ratio")] == result["notes"]
    assert "are also training samples" in result["notes"][0]


def test_count_is_refused_for_a_classifier(tmp_path: Path) -> None:
    settings = {**small_media.image(tmp_path), "training.max_steps": 1, "model.hidden_size": 8}
    settings = {k: v for k, v in settings.items() if not k.startswith(("samples.", "model.num", "model.patch"))}
    path = bottega.train("classify/image", settings).path
    with pytest.raises(UsageError, match="count 4: the task classify does not score generated samples; remove it"):
        bottega.evaluate(path, count=4)
    assert bottega.evaluate(path, count=0)["metrics"]


@pytest.mark.parametrize(
    ("accuracy", "num_classes", "is_weak"),
    [(0.55, 10, True), (0.72, 10, True), (0.74, 10, False), (0.95, 10, False), (0.8, 2, True), (0.9, 2, False)],
)
def test_weak_judge_is_flagged(accuracy: float, num_classes: int, is_weak: bool) -> None:
    names = ("conditional_accuracy", "shape_accuracy", "frechet_distance", "pitch_accuracy", "variance_ratio")
    notes: list[str] = []
    judged = generation_scores._find_weak_judge_measures(
        {**dict.fromkeys(names, 0.3), "conditional_accuracy": accuracy}, num_classes, notes
    )
    assert judged == (names[:3] if is_weak else ())
    assert len(notes) == is_weak
    if is_weak:
        assert f"samples is {100 * accuracy:.0f} % (chance: {100 / num_classes:.0f} %)" in notes[0]
        assert "needs.judge" in notes[0]
    assert generation_scores._find_weak_judge_measures({"variance_ratio": 1.0}, 3, notes) == (), (
        "no judged metric without a judge"
    )


def test_table_marks_scores_of_a_weak_judge(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for min_skill, names in ((1.1, ["conditional_accuracy", "frechet_distance"]), (-1.0, [])):
        monkeypatch.setattr(generation_scores, "MIN_JUDGE_SKILL", min_skill)
        result = bottega.evaluate(run, count=6)
        assert result.get("weakly_judged", []) == names
        first_words = [line.split()[0] for line in format_report(result).splitlines() if line.strip()]
        marked = [word for word in first_words if word.endswith("*")]
        assert marked == [*(f"{name}*" for name in names), *(["*"] if names else [])]
