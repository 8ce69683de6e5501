"""Evaluation of personalized generation: selection of users, image metrics and tests between arms.

The generator is deterministic, so that every expected number can be derived.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from PIL import Image
from torch import nn

from bottega.analysis import evaluate as evaluation
from bottega.analysis import statistics as st
from bottega.analysis.compare import compare, format_report, plot_comparison
from bottega.analysis.personalize_arms import average_by_user, compare_arms, summarise_arms, swap_histories
from bottega.analysis.personalize_evaluation import PersonalizedGenerator, evaluate_personalization
from bottega.analysis.personalize_metrics import ImageMetrics, People
from bottega.analysis.personalize_truth import (
    ClipFieldClassifier,
    TruthFields,
    build_preference_keys,
    build_prompts,
    find_sticker_classifier,
    find_truth_fields,
    match_keywords,
    score_fields,
    score_keywords,
)
from bottega.core.errors import DataError, UsageError
from bottega.core.noise import numpy_generator
from bottega.tasks.metrics.clip_scores import classify_zero_shot, cosine_similarity, similarity_to_history
from bottega.tasks.personalize.data.records import Item, Record
from recorded_figures import list_texts, record_figures

WORDS = {
    "colour": ("amber", "jade", "plum", "teal"),
    "pattern": ("lined", "plain", "spotted"),
    "shape": ("house", "ship", "tree"),
}
ALL_WORDS = [word for words in WORDS.values() for word in words]
SIDE = 32


# Synthetic images that encode their labels in their first pixels.


def draw_image(shape: str, colour: str, pattern: str) -> np.ndarray:
    """Return an image with its words encoded in the first three pixels, which is all that `Oracle` reads."""
    pixels = np.full((SIDE, SIDE, 3), 30 * ALL_WORDS.index(colour), np.uint8)
    for column, word in enumerate((colour, pattern, shape)):
        pixels[0, column] = ALL_WORDS.index(word)
    return pixels


def make_item(index: int, shape: str, colour: str, pattern: str) -> Item:
    article = "an" if colour[0] in "aeiou" else "a"
    return Item(id=str(index), caption=f"{article} {colour} {pattern} {shape}", image=f"{shape}/{colour}/{pattern}")


def make_record(
    number: int, *, colour: str | None = None, pattern: str | None = None, user: str | None = None
) -> Record:
    """Return a record of a user who prefers a (colour, pattern) pair; four of five liked images have it."""
    rng = random.Random(number)
    colour = colour or WORDS["colour"][number % 4]
    pattern = pattern or WORDS["pattern"][number % 3]
    shape_of_wish = rng.choice(WORDS["shape"])
    others = [choice for choice in WORDS["shape"] if choice != shape_of_wish]
    history = [make_item(10 * number + i, rng.choice(others), colour, pattern) for i in range(4)]
    history.append(make_item(10 * number + 4, others[0], rng.choice(WORDS["colour"]), rng.choice(WORDS["pattern"])))
    truth = {"colour": colour, "pattern": pattern, "shape": shape_of_wish}
    target = make_item(10 * number + 9, shape_of_wish, colour, pattern)
    return Record(
        user=user or f"p{number}", history=tuple(history), target=target, wish=f"a {shape_of_wish}", truth=truth
    )


class RecordTable(list[Record]):
    def record(self, index: int) -> Record:
        return self[index]

    def image(self, item: Item) -> np.ndarray:
        assert item.image is not None
        shape, colour, pattern = item.image.split("/")
        return draw_image(shape, colour, pattern)


class TinyVisionTower(nn.Module):
    """A vision tower with one layer, for the perceptual distance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(12.0).view(4, 3) - 5)
        tower = SimpleNamespace(encoder=SimpleNamespace(layers=[self.layer]))
        self.network = SimpleNamespace(config=SimpleNamespace(model_type="siglip"), vision_model=tower)

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layer(pixels.flatten(1, 2))


class Oracle:
    """An encoder that reads the words encoded in an image; a text is a bag of words."""

    def __init__(self) -> None:
        self.clip = TinyVisionTower()

    def encode_images(self, images: np.ndarray) -> np.ndarray:
        vectors = np.zeros((len(images), len(ALL_WORDS)))
        for row, pixels in enumerate(images):
            vectors[row, pixels[0, :3, 0]] = 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def encode_texts(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.full((len(texts), len(ALL_WORDS)), 1e-3)
        for row, text in enumerate(texts):
            for column, word in enumerate(ALL_WORDS):
                vectors[row, column] += word in text
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def favourite_pair(record: Record) -> tuple[str, str]:
    """Return the most frequent colour and pattern of the history."""
    tags = [item.image.split("/") for item in record.history if item.image]
    return Counter(tag[1] for tag in tags).most_common(1)[0][0], Counter(tag[2] for tag in tags).most_common(1)[0][0]


class FakeGenerator:
    """Draws the shape of the wish and the part of the preference that the arm conditions on; records its calls."""

    def __init__(self, people: Sequence[Record]) -> None:
        self.people, self.calls = RecordTable(people), []  # type: ignore[var-annotated]

    def draw(self, arm: str, records: Sequence[Record], report_progress: Any) -> np.ndarray:
        self.calls.append((arm, [record.user for record in records], [favourite_pair(record) for record in records]))
        images = []
        for number, record in enumerate(records):
            guess = numpy_generator(0, "guess", number)
            colour, pattern = (WORDS[name][int(guess.integers(len(WORDS[name])))] for name in ("colour", "pattern"))
            liked_colour, liked_pattern = favourite_pair(record)
            if arm in ("soft", "both", "picked"):
                colour = liked_colour
            if arm in ("keywords", "both", "picked"):
                pattern = liked_pattern
            images.append(draw_image(record.wish_or_caption.removeprefix("a "), colour, pattern))
            report_progress("pictures", number + 1, len(records))
        return np.stack(images)

    def open(self, *, clip_scorer: Any = None) -> PersonalizedGenerator:
        def keywords(records: Sequence[Record]) -> list[tuple[str, ...]]:
            return [favourite_pair(record) for record in records]

        return PersonalizedGenerator(self.people, [self.people], keywords, self.draw, clip_scorer=clip_scorer)

    def evaluate(
        self, out: Path, *, clip_scorer: Any = None, count: int | None = None, **options: Any
    ) -> dict[str, Any]:
        reports: list[tuple[str, int, int]] = []
        options = {"lpips": None, **options}
        result = evaluate_personalization(
            self.open(clip_scorer=clip_scorer),
            count=count,
            out=out,
            report_progress=lambda *report: reports.append(report),
            **options,
        )
        assert {stage for stage, _, _ in reports} <= {"none", "keywords", "soft", "both", "picked", "shuffled"}
        return result


def read_rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "people.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def generator() -> FakeGenerator:
    return FakeGenerator([make_record(number) for number in range(24)])


@pytest.fixture(scope="module")
def evaluation_result(
    generator: FakeGenerator, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("evaluation")
    return out, generator.evaluate(out, clip_scorer=Oracle())


# All arms


def test_each_arm_uses_exactly_its_conditions(
    generator: FakeGenerator, evaluation_result: tuple[Path, dict[str, Any]]
) -> None:
    out, result = evaluation_result
    means = {arm: {name: v["mean"] for name, v in values.items()} for arm, values in result["arms"].items()}
    assert list(means) == ["none", "keywords", "soft", "both", "picked", "shuffled", "target"]
    for arm, colour, pattern in (("both", 1, 1), ("picked", 1, 1), ("target", 1, 1)):
        assert (means[arm]["colour_accuracy"], means[arm]["pattern_accuracy"]) == (colour, pattern)
    assert means["soft"]["colour_accuracy"] == means["keywords"]["pattern_accuracy"] == 1
    assert means["none"]["preference_accuracy"] < 0.4
    assert means["shuffled"]["preference_accuracy"] == 0  # the other user never prefers the same pair
    assert all(values["wish_accuracy"] == 1 for values in means.values())
    assert means["both"]["preference_accuracy"] == 1
    assert means["both"]["clip_preference"] > 0.7
    assert result["chance"]["preference_accuracy"] == pytest.approx(1 / 12)
    assert result["chance"]["wish_accuracy"] == pytest.approx(1 / 3)
    assert result["keywords"] == {"learnt": {"preference": 1.0, "colour": 1.0, "pattern": 1.0}}
    assert result["counts"] == {"people": 24, "records": 24}
    assert any("not LPIPS" in note for note in result["notes"])
    rows = read_rows(out)
    assert len(rows) == 24 * 7
    assert all({"user", "arm", "wish", "target", "keywords", "judge"} <= row.keys() for row in rows)
    assert {row["user"] for row in rows if row["arm"] == "both"} == {record.user for record in generator.people}
    # Images equal to the target have distance 0.
    for row in rows:
        if row["arm"] == "both":
            assert row["perceptual"] == pytest.approx(0, abs=1e-9)
            assert row["ssim"] == pytest.approx(1)


def test_all_arms_use_the_same_users_in_the_same_order(generator: FakeGenerator, tmp_path: Path) -> None:
    """Image n starts from noise n, so a different order would mean different noise."""
    generator.calls.clear()
    generator.evaluate(tmp_path, clip_scorer=Oracle(), count=9)
    users_by_call = [users for _, users, _ in generator.calls]
    assert all(users == users_by_call[0] for users in users_by_call)
    assert [arm for arm, _, _ in generator.calls] == ["none", "keywords", "soft", "both", "picked", "both"]
    own, others = generator.calls[3][2], generator.calls[5][2]
    assert all(mine != theirs for mine, theirs in zip(own, others, strict=True))
    assert Counter(own) == Counter(others)  # each history is used once


def test_shuffled_arm_never_uses_a_users_own_history(evaluation_result: tuple[Path, dict[str, Any]]) -> None:
    rows = [row for row in read_rows(evaluation_result[0]) if row["arm"] == "shuffled"]
    assert all(row["history_of"] != row["user"] for row in rows)
    assert sorted(row["history_of"] for row in rows) == sorted(row["user"] for row in rows)
    own = {row["user"]: row["keywords"] for row in read_rows(evaluation_result[0]) if row["arm"] == "both"}
    assert all(row["keywords"] == own[row["history_of"]] for row in rows), "the keywords used for generation"


def test_selection_covers_as_many_users_as_possible(tmp_path: Path) -> None:
    """A user with many records must not displace other users."""
    people = [make_record(number, user=f"p{number // 4 if number < 16 else number}") for number in range(20)]
    FakeGenerator(people).evaluate(tmp_path / "few", clip_scorer=Oracle(), count=8)
    rows = [row for row in read_rows(tmp_path / "few") if row["arm"] == "none"]
    assert len({row["user"] for row in rows}) == len(rows) == 8
    FakeGenerator(people).evaluate(tmp_path / "more", clip_scorer=Oracle(), count=12)
    rows = [row for row in read_rows(tmp_path / "more") if row["arm"] == "none"]
    assert (len(rows), len({row["user"] for row in rows})) == (12, 8)


def test_significance_tests_between_arms(evaluation_result: tuple[Path, dict[str, Any]]) -> None:
    tests = {(t["measure"], t["first"], t["second"]): t for t in evaluation_result[1]["tests"]}
    shuffled_to_both = tests["preference_accuracy", "shuffled", "both"]
    assert shuffled_to_both["difference"] == 1
    assert shuffled_to_both["people"] == 24
    assert shuffled_to_both["p"] == pytest.approx(st.mcnemar_test(24, 0).p)
    assert shuffled_to_both["p"] < shuffled_to_both["p_adjusted"] < 0.001
    assert tests["wish_accuracy", "none", "both"]["p_adjusted"] == 1
    same_measure = [t for t in evaluation_result[1]["tests"] if t["measure"] == "preference_accuracy"]
    assert [t["p_adjusted"] for t in same_measure] == st.holm_correction([t["p"] for t in same_measure])
    assert len(same_measure) == 5


def test_sheets_and_plot_are_written(evaluation_result: tuple[Path, dict[str, Any]]) -> None:
    out, result = evaluation_result
    pages = sorted((out / "sheets").iterdir())
    assert [page.name for page in pages] == ["00.png", "01.png", "02.png"]
    assert result["files"] == [str(out / "people.jsonl"), *map(str, pages), str(out / "arms.png")]
    for path in (*pages, out / "arms.png"):
        with Image.open(path) as image:
            assert len(image.getcolors(maxcolors=1 << 20)) > 8


def test_sheets_and_plot_name_the_arms_as_the_table_does(
    generator: FakeGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bottega.data.image.canvas import Canvas

    figures = record_figures(monkeypatch)
    texts: list[str] = []
    draw_text = Canvas.draw_text

    def record_text(self: Any, x: float, y: float, words: str, **style: Any) -> None:
        texts.append(words)
        width = self.measure_text(words, style.get("size", 12))
        assert style.get("anchor") != "lm" or (x + width) * 2 <= self.image.width, f"{words} runs off the page"
        draw_text(self, x, y, words, **style)

    monkeypatch.setattr(Canvas, "draw_text", record_text)
    result = generator.evaluate(tmp_path, clip_scorer=Oracle(), count=6)
    legend = list_texts(figures[-1])
    for arm in result["arms"]:
        assert texts.count(arm) == 1, "one heading on the sheet"
        assert any(label.startswith(f"{arm}: ") for label in legend)
    assert any("shuffled: another user's history" in words for words in texts)


def test_fewer_users_remove_stale_sheets(generator: FakeGenerator, tmp_path: Path) -> None:
    generator.evaluate(tmp_path, clip_scorer=Oracle(), count=9)
    assert len(list((tmp_path / "sheets").iterdir())) == 2
    (tmp_path / "sheets" / "notes.png").write_bytes(b"of somebody's own")
    generator.evaluate(tmp_path, clip_scorer=Oracle(), count=5)
    assert sorted(path.name for path in (tmp_path / "sheets").iterdir()) == ["00.png", "notes.png"]


def test_without_clip_its_metrics_are_left_out(generator: FakeGenerator, tmp_path: Path) -> None:
    result = generator.evaluate(tmp_path, count=6)
    assert "picked" not in result["arms"]
    assert set(result["arms"]["both"]) == {"ssim"}
    assert any("model.clip" in note for note in result["notes"])


def test_few_users_are_reported_without_significance_tests(generator: FakeGenerator, tmp_path: Path) -> None:
    result = generator.evaluate(tmp_path, clip_scorer=Oracle(), count=4)
    assert result["tests"] == []
    assert any("4 users" in note for note in result["notes"])
    alone = generator.evaluate(tmp_path, clip_scorer=Oracle(), count=1)
    assert "shuffled" not in alone["arms"]
    assert alone["arms"]["both"]["preference_accuracy"]["mean"] == 1


def test_without_truth_there_is_no_accuracy(tmp_path: Path) -> None:
    people = [make_record(number).model_copy(update={"truth": {}}) for number in range(6)]
    result = FakeGenerator(people).evaluate(tmp_path, clip_scorer=Oracle())
    assert "chance" not in result
    assert set(result["arms"]["both"]) == {"clip_preference", "clip_target", "clip_history", "ssim", "perceptual"}
    assert "shuffled" in result["arms"]
    assert not (tmp_path / "arms.png").exists()
    measures = {test["measure"] for test in result["tests"]}
    assert "clip_history" in measures


def test_without_truth_swapped_histories_have_other_keywords(tmp_path: Path) -> None:
    """Two preferences: assigned by name alone, half of the swapped histories would have the same preference."""
    people = [
        make_record(number, colour=WORDS["colour"][number % 2], pattern="plain").model_copy(update={"truth": {}})
        for number in range(12)
    ]
    FakeGenerator(people).evaluate(tmp_path, clip_scorer=Oracle())
    own = {record.user: favourite_pair(record) for record in people}
    rows = [row for row in read_rows(tmp_path) if row["arm"] == "shuffled"]
    assert len(rows) == 12
    assert all(own[row["user"]] != own[row["history_of"]] for row in rows)


def test_preference_keys_come_from_truth_keywords_or_the_user() -> None:
    people = [make_record(0), make_record(1), make_record(2), make_record(3, user="p0")]
    fields = find_truth_fields(people, people)
    assert build_preference_keys(people, [()] * 4, fields)[:2] == [("amber", "lined"), ("jade", "plain")]
    from_keywords = build_preference_keys(people, [("red", "Big"), ("big", "red", "red"), (), ("old",)], None)
    assert from_keywords == [("big", "old", "red"), ("big", "red"), ("", "p2"), ("big", "old", "red")]
    assert len(set(build_preference_keys(people, [()] * 4, None))) == 3


def test_table_has_all_arms_and_the_tests(evaluation_result: tuple[Path, dict[str, Any]]) -> None:
    out, result = evaluation_result
    table = evaluation.format_report(
        {"metrics": {"loss": 0.5, "preference_accuracy": 1.0}, **result, "folder": str(out)}
    )
    assert table.startswith("loss")
    lines = table.splitlines()
    (head,) = [line for line in lines if line.split()[:2] == ["none", "keywords"]]
    assert head.split() == ["none", "keywords", "soft", "both", "picked", "shuffled", "target", "chance"]
    (row,) = [line for line in lines if line.startswith("preference_accuracy ") and "-" not in line]
    assert row.split()[4:] == ["1.0000", "1.0000", "0.0000", "1.0000", "0.0833"]
    test_lines = [line for line in lines if line.startswith("preference_accuracy ") and "both - shuffled" in line]
    assert "McNemar" in test_lines[0]
    assert "< 0.0001" in test_lines[0]
    assert len({line.index(" p (Holm)") for line in lines if "p (Holm)" in line}) == 1


# Swapped histories


@settings(max_examples=60, deadline=None)
@given(some.lists(some.integers(0, 6), min_size=0, max_size=40), some.integers(0, 5))
def test_swapped_histories_never_share_a_preference(groups: list[int], seed: int) -> None:
    preferences = [(str(kind), "x") for kind in groups]
    swapped = swap_histories(preferences, seed=seed)
    largest_group = max(Counter(groups).values(), default=0)
    assert (swapped is None) == (not groups or 2 * largest_group > len(groups))
    if swapped is not None:
        assert sorted(swapped) == list(range(len(groups)))
        assert all(preferences[index] != preferences[other] for index, other in enumerate(swapped))
        assert swapped == swap_histories(preferences, seed=seed)


def test_swapped_histories_depend_on_the_seed() -> None:
    preferences = [(str(number % 5),) for number in range(48)]
    assert len({tuple(swap_histories(preferences, seed=seed) or ()) for seed in range(5)}) == 5


# Truth fields


def test_fields_named_in_the_wish_are_not_preferences() -> None:
    people = [make_record(number) for number in range(12)]
    fields = find_truth_fields(people[:3], people)
    assert fields is not None
    assert (fields.preference, fields.wish) == (("colour", "pattern"), ("shape",))
    assert fields.values["colour"] == WORDS["colour"]  # also those that only other users prefer
    assert fields.columns == ("preference", "colour", "pattern", "wish")
    # Without a wish the caption is the prompt; it names every field, so none is left as a preference.
    without_wish = [record.model_copy(update={"wish": None}) for record in people]
    of_captions = find_truth_fields(without_wish, without_wish)
    assert of_captions is not None
    assert of_captions.preference == ()
    # A field with a single value carries no preference.
    alike = [make_record(number, colour="jade") for number in range(12)]
    of_alike = find_truth_fields(alike, alike)
    assert of_alike is not None
    assert of_alike.columns == ("preference", "wish")
    assert find_truth_fields([record.model_copy(update={"truth": {}}) for record in people], people) is None


def test_prompts_vary_one_word_of_the_same_captions() -> None:
    fields = TruthFields(("colour",), (), {"colour": WORDS["colour"], "mood": ("calm", "wild")})
    captions = [
        "an amber lined ship",
        "a teal ship, and a plum one",
        "A jade tree",
        "no colour at all",
        "an amberish tree",
    ]
    colour, mood = build_prompts(fields, captions)
    assert (colour.names, colour.choices) == (("colour",), [(word,) for word in WORDS["colour"]])
    prompts = dict(zip(WORDS["colour"], colour.texts, strict=True))
    assert prompts["plum"] == ["A plum tree", "a plum lined ship"]
    assert prompts["amber"] == ["An amber tree", "an amber lined ship"]
    assert mood.texts == [["calm"], ["wild"]]  # words absent from all captions are prompts of their own
    many, _ = build_prompts(fields, [f"a teal house of {number}" for number in range(100)])
    assert {len(texts) for texts in many.texts} == {32}


def test_fields_that_occur_together_are_classified_jointly() -> None:
    people = [make_record(number) for number in range(12)]
    fields = find_truth_fields(people, people)
    assert fields is not None
    (joint,) = build_prompts(fields, [record.target.caption for record in people])
    assert len(joint.choices) == len(set(joint.choices)) == 4 * 3 * 3
    assert joint.texts[joint.choices.index(("amber", "plain", "ship"))] == ["an amber plain ship"]
    oracle = Oracle()
    shown = [choice for choice in joint.choices if choice[0] == "plum"]
    predicted = ClipFieldClassifier(fields, [record.target.caption for record in people], oracle.encode_texts).classify(
        oracle.encode_images(np.stack([draw_image(shape, colour, pattern) for colour, pattern, shape in shown]))
    )
    assert list(zip(predicted["colour"], predicted["pattern"], predicted["shape"], strict=True)) == shown
    # Too many combinations.
    wide = TruthFields(("a", "b"), (), {name: tuple(f"{name}{i}" for i in range(80)) for name in "ab"})
    assert [group.names for group in build_prompts(wide, ["a1 b2"])] == [("a",), ("b",)]


def test_clip_classifier_ignores_correlated_words() -> None:
    """Plum is always spotted and teal always lined: a mean over captions would confuse the pattern with the colour."""
    fields = TruthFields(("colour",), (), {"colour": ("plum", "teal")})
    captions = ["a plum spotted house", "a plum spotted tree", "a teal lined house", "a teal lined ship"]
    oracle = Oracle()
    words = ClipFieldClassifier(fields, captions, oracle.encode_texts)
    shown = np.stack([draw_image("house", "plum", "lined"), draw_image("house", "teal", "spotted")])
    assert words.classify(oracle.encode_images(shown)) == {"colour": ["plum", "teal"]}


def test_preference_accuracy_needs_every_field_right() -> None:
    people = [make_record(0), make_record(1), make_record(2)]
    fields = find_truth_fields(people, people)
    assert fields is not None
    predicted = {name: [record.truth[name] for record in people] for name in WORDS}
    predicted["colour"][0] = predicted["pattern"][1] = predicted["shape"][2] = "nothing"
    scores = {name: values.tolist() for name, values in score_fields(fields, predicted, people).items()}
    assert scores == {
        "preference": [False, False, True],
        "colour": [False, True, True],
        "pattern": [True, False, True],
        "wish": [True, True, False],
    }


def test_first_keyword_of_a_field_counts() -> None:
    """A list of all colours contains the right one without any preference learned."""
    people = [make_record(number) for number in range(4)]
    fields = find_truth_fields(people, [make_record(number) for number in range(12)])
    assert fields is not None
    everything = [WORDS["colour"] + WORDS["pattern"]] * 4
    assert score_keywords(fields, everything, people)["colour"].tolist() == [True, False, False, False]
    assert match_keywords(fields, ("spotted things", "teal")) == {"pattern": "spotted", "colour": "teal"}
    assert match_keywords(fields, ("tealish",)) == {}
    assert not score_keywords(fields, [()] * 4, people)["preference"].any()


def test_sticker_classifier_applies_to_stickers_only() -> None:
    from bottega.data.embedded import stickers

    fields = TruthFields(
        ("colour", "pattern"),
        ("shape",),
        {"colour": ("red", "blue"), "pattern": ("striped", "plain"), "shape": ("star", "moon")},
    )
    classifier = find_sticker_classifier(fields)
    assert classifier is not None
    images = np.stack(
        [
            stickers.draw_sticker(s, c, p, "white", rng=numpy_generator(0, s, c, p))
            for s, c, p in (("star", "red", "striped"), ("moon", "blue", "plain"))
        ]
    )
    assert classifier(images) == {"shape": ["star", "moon"], "colour": ["red", "blue"], "pattern": ["striped", "plain"]}
    assert find_sticker_classifier(TruthFields(("colour",), (), {"colour": WORDS["colour"]})) is None
    assert find_sticker_classifier(TruthFields(("mood",), (), {"mood": ("red", "blue")})) is None


# Numbers


def test_clip_scores_are_cosines() -> None:
    rng = numpy_generator(0, "vectors")
    a, b = rng.normal(size=(2, 3, 5))
    units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b)]
    expected = [float(x @ y / np.linalg.norm(x) / np.linalg.norm(y)) for x, y in zip(a, b, strict=True)]
    assert cosine_similarity(*units) == pytest.approx(expected)
    liked = [units[1][:2], units[1][:0], units[1][2:]]
    similarities = similarity_to_history(units[0], liked)
    assert similarities[0] == pytest.approx((units[0][0] @ units[1][0] + units[0][0] @ units[1][1]) / 2)
    assert math.isnan(similarities[1])
    with pytest.raises(AssertionError, match="unit vectors"):
        cosine_similarity(a, b)
    assert classify_zero_shot(units[0], 7 * units[0]) == [0, 1, 2]
    assert classify_zero_shot(units[0], units[0][::-1]) == [2, 1, 0]


def test_history_similarity_uses_liked_items_with_images() -> None:
    record = make_record(0)
    without_images = record.model_copy(
        update={"history": tuple(i.model_copy(update={"image": None}) for i in record.history)}
    )
    targets = np.stack([draw_image("tree", "teal", "plain")] * 2)
    people = People(
        [record, without_images],
        [0, 1],
        [("teal",), ()],
        targets,
        [[targets[0], draw_image("tree", "plum", "plain")], []].__getitem__,
    )
    rows = ImageMetrics(people, clip_scorer=Oracle()).measure_arm("both", targets)
    assert rows[0]["clip_history"] == pytest.approx((1 + 2 / 3) / 2)
    assert math.isnan(rows[1]["clip_history"])
    assert math.isnan(rows[1]["clip_preference"])  # no keywords to compare with
    assert (
        average_by_user([{**row, "clip_history": None if row["arm"] else 0} for row in rows], "both", "clip_history")
        == {}
    )


def make_rows(values_by_arm: dict[str, Sequence[float]], measure: str = "preference_accuracy") -> list[dict[str, Any]]:
    return [
        {"user": f"p{number}", "arm": arm, measure: value, "wish": "a", "target": "t"}
        for arm, values in values_by_arm.items()
        for number, value in enumerate(values)
    ]


def test_users_without_keywords_are_left_out_of_the_mean() -> None:
    values = {"p0": 0.5, "p1": math.nan, "p2": None, "p3": 0.7}
    rows = [{"arm": "both", "user": user, "clip_preference": value} for user, value in values.items()]
    assert average_by_user(rows, "both", "clip_preference") == {"p0": 0.5, "p3": 0.7}
    assert summarise_arms(rows)["both"]["clip_preference"]["mean"] == pytest.approx(0.6)


def test_pairs_are_matched_by_user_and_not_by_order() -> None:
    rng = random.Random(0)
    values = {"none": [rng.random() for _ in range(12)], "both": []}
    values["both"] = [value + 0.1 + 0.001 * i for i, value in enumerate(values["none"])]
    rows = make_rows(values, "clip_history")
    mixed = rows.copy()
    rng.shuffle(mixed)
    (first,), (second,) = compare_arms(rows), compare_arms(mixed)
    assert first == second
    assert first["p"] < 1e-10  # paired; unpaired, the difference would not be significant
    assert first["interval"]["low"] > 0.1
    assert first["wilcoxon_p"] == pytest.approx(2 / 2**12)


def test_user_with_many_records_counts_once() -> None:
    rows = make_rows({"none": [0] * 6, "both": [1] * 6})
    again = [{**row, "target": f"t{n}"} for row in rows if row["user"] == "p0" for n in range(20)]
    mean = summarise_arms(rows + again)["both"]["preference_accuracy"]
    assert mean["mean"] == 1
    assert compare_arms(rows + again)[0]["people"] == 6
    uneven = [*rows, {"user": "p0", "arm": "both", "preference_accuracy": 0, "wish": "a", "target": "t"}]
    assert average_by_user(uneven, "both", "preference_accuracy")["p0"] == 0.5
    assert summarise_arms(uneven)["both"]["preference_accuracy"]["mean"] == pytest.approx(5.5 / 6)


def test_interval_of_a_zero_fraction_is_wilson() -> None:
    summary = summarise_arms(make_rows({"none": [0] * 48}))["none"]["preference_accuracy"]
    assert summary["low"] == 0
    assert summary["high"] == st.wilson_interval(0, 48).high
    assert summary["high"] > 0.05


# compare


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write_run(name: str, rows: list[dict[str, Any]], *, split: str = "validation", **settings: Any) -> str:
        run = tmp_path / "runs" / name
        folder = run / "evaluation" / split
        folder.mkdir(parents=True)
        recipe = {
            "task": "personalize",
            "name": name,
            "model.diffusion": "sd",
            "model.language_model": "lm",
            **settings,
        }
        recipe |= {"data.train.path": "people.jsonl", "training.max_steps": 10}
        (run / "recipe.yaml").write_text(json.dumps(recipe))
        (folder / "people.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"runs/{name}"

    return write_run


ARMS = {"none": [0] * 9 + [1] * 3, "both": [1] * 10 + [0, 1], "target": [1] * 12}


def test_two_arms_of_one_run_are_paired_by_user(make_run: Any) -> None:
    run = make_run("a", make_rows(ARMS))
    report = compare([f"{run}:none", f"{run}:both"])
    (pair,) = report["pairs"]
    assert (report["metric"], report["mode"], pair["paired_by"]) == ("preference_accuracy", "max", "user")
    assert pair["p"] == pytest.approx(st.mcnemar_test(9, 1).p)
    assert pair["difference"] == pytest.approx(8 / 12)
    assert pair["better"] == "B"
    table = format_report(report)
    assert "evaluation/validation/people.jsonl" in table
    assert "12 people" in table
    plot_comparison(report, Path("compared.png"))


def test_every_evaluated_arm_can_be_compared(evaluation_result: tuple[Path, dict[str, Any]], make_run: Any) -> None:
    out, result = evaluation_result
    run = make_run("a", read_rows(out))
    report = compare([f"{run}:{arm}" for arm in result["arms"]])
    assert [group["mean"] for group in report["groups"]] == [
        values["preference_accuracy"]["mean"] for values in result["arms"].values()
    ]
    assert len(report["pairs"]) == 7 * 6 / 2


def test_plot_of_users_shows_means_only(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = record_figures(monkeypatch)
    run = make_run("a", make_rows(ARMS))
    plot_comparison(compare([f"{run}:none", f"{run}:both"]), Path("compared.png"))
    assert not any(line.get_marker() == "o" for line in figures[0].axes[0].lines), "an arm is not a run"
    texts = "\n".join(list_texts(figures[0]))
    assert "mean over 12 people with its 95 % interval" in texts
    assert "each dot" not in texts
    assert "n = 10 of 12 people where only one is right" in texts


def test_a_measure_has_one_test_for_all_pairs(make_run: Any) -> None:
    """A user with two records is half right in one arm; McNemar elsewhere would invert the order of p."""
    arms = {"none": [0] * 8, "keywords": [0] * 2 + [1] * 6, "both": [1] * 8, "shuffled": [0] * 8}
    rows = make_rows(arms)
    again = [row if row["arm"] != "keywords" else {**row, "preference_accuracy": 1} for row in rows[::8]]
    halves = [*rows, *again]
    assert average_by_user(halves, "keywords", "preference_accuracy")["p0"] == 0.5
    assert {test["test"].split()[0] for test in compare_arms(rows)} == {"McNemar's"}
    assert not {test["test"] for test in compare_arms(halves) if "McNemar" in test["test"]}
    run = make_run("a", halves)
    tests = {pair["test"] for pair in compare([f"{run}:{arm}" for arm in arms])["pairs"]}
    assert not any("McNemar" in test for test in tests)
    assert compare([f"{run}:none", f"{run}:both"])["pairs"][0]["test"].startswith("McNemar")


def test_two_runs_are_compared_by_their_arm_both(make_run: Any) -> None:
    rows = make_rows(ARMS)
    other = make_rows({**ARMS, "both": [0] * 12})
    random.Random(1).shuffle(other)
    first, second = make_run("a", rows), make_run("b", other, **{"model.num_image_tokens": 4})
    (pair,) = compare([first, second])["pairs"]
    assert pair["difference"] == pytest.approx(-11 / 12)
    assert pair["changed"] == {"model.num_image_tokens": [2, 4]}
    assert compare([f"{first}:none", second])["pairs"][0]["difference"] == pytest.approx(-3 / 12)


def test_runs_are_paired_by_user_in_any_file_order(make_run: Any) -> None:
    """One of twelve users differs; paired by line, half of them would."""
    values = [1, 0] * 6
    first = make_run("a", make_rows({"both": values}))
    rows = make_rows({"both": [0, *values[1:]]})
    second = make_run("b", [*rows[1:], rows[0]])
    (pair,) = compare([first, second])["pairs"]
    assert (pair["n"], pair["difference"]) == (1, pytest.approx(-1 / 12))


def test_named_metric_has_its_own_direction(make_run: Any) -> None:
    rng = random.Random(0)
    values = {"none": [rng.random() for _ in range(8)], "both": [rng.random() for _ in range(8)]}
    run = make_run("a", make_rows(values, "perceptual"))
    report = compare([f"{run}:none", f"{run}:both"], metric="perceptual")
    assert report["mode"] == "min"
    assert report["pairs"][0]["test"] == "paired t-test"


def test_invalid_comparisons_are_refused(make_run: Any, tmp_path: Path) -> None:
    def error_of(*names: str, kind: type[Exception] = UsageError, **options: Any) -> str:
        with pytest.raises(kind) as caught:
            compare(names, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    run = make_run("a", make_rows(ARMS))
    others = make_run("others", [{**row, "user": f"q{row['user']}"} for row in make_rows(ARMS)])
    wishes = make_run("wishes", [{**row, "wish": "another"} for row in make_rows(ARMS)])
    few = make_run("few", make_rows({arm: values[:4] for arm, values in ARMS.items()}))
    bare = make_run("bare", make_rows(ARMS), split="test")
    assert "given twice" in error_of(run, run)
    assert "given twice" in error_of(run, f"{run}:both")
    twice = error_of(f"{run}:none", f"{run}:none")
    assert twice == f"the arm none of {run} is given twice; give two different arms, such as {run}:none {run}:both"
    assert "different users" in error_of(run, others)
    assert "different users or wishes" in error_of(run, wishes)
    assert "fewer than 5" in error_of(f"{few}:none", f"{few}:both")
    assert "has no arm 'soft'" in error_of(run, f"{run}:soft")
    assert f"bottega evaluate {bare} first" in error_of(run, bare)
    assert "--split test first" in error_of(run, bare, split="test")
    assert "choose from preference_accuracy" in error_of(run, f"{run}:none", metric="fid")
    (tmp_path / "runs/wishes/evaluation/validation/people.jsonl").write_text('{"user": "p"}\n')
    assert "people.jsonl:1" in error_of(run, wishes, kind=DataError)
    words = make_run("words", [*make_rows(ARMS)[:-1], {**make_rows(ARMS)[-1], "preference_accuracy": "x"}])
    assert 'people.jsonl:36: preference_accuracy is "x", not a number' in error_of(words, run, kind=DataError)
    assert compare([f"{bare}:none", bare], split="test")["read_from"] == "evaluation/test/people.jsonl"


# The real task with random models


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import small_personal

    folder = tmp_path_factory.mktemp("personal")
    small_personal.train(folder, name="p", **{"training.max_steps": 2, "evaluation.every": 2, "checkpoint.every": 2})
    return folder / "p"


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    """Run a command and return its parsed JSON or its text."""
    from bottega.cli import main

    assert main(list(arguments)) == code
    output = capsys.readouterr()
    return json.loads(output.out) if "--json" in arguments and not code else output.out + output.err


@pytest.mark.slow
def test_evaluate_and_compare_from_the_command_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    from bottega.models.metric_networks.perceptual import Lpips

    assert set(run_cli(capsys, "evaluate", str(run), "--count", "0", "--json")["metrics"]) == {"loss"}
    assert not (run / "evaluation").exists()
    result = run_cli(capsys, "evaluate", str(run), "--json")
    folder = run / "evaluation" / "validation"
    assert result["folder"] == str(folder)
    assert result["counts"] == {"people": 8, "records": 8}
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["split"] == "validation"
    assert metrics["arms"] == result["arms"]
    assert metrics["clip_history"] == result["arms"]["both"]["clip_history"]["mean"]
    rows = read_rows(folder)
    assert len(rows) == 8 * 7
    # A second evaluation gives bitwise equal numbers.
    weights = tmp_path / "lpips.safetensors"
    save_file({name: torch.full_like(t, 0.01) for name, t in Lpips().state_dict().items()}, weights)
    arguments = ("evaluate", str(run), "--out", str(tmp_path / "again"), "--lpips", str(weights))
    assert "lpips" in run_cli(capsys, *arguments)
    again = read_rows(tmp_path / "again")
    assert all("lpips" in row for row in again if row["arm"] != "target")
    changing = ("perceptual", "lpips")
    assert [{k: v for k, v in row.items() if k not in changing} for row in again] == [
        {k: v for k, v in row.items() if k not in changing} for row in rows
    ]
    compared = run_cli(capsys, "compare", f"{run}:none", f"{run}:both", "--metric", "clip_history", "--json")
    pairs = average_by_user(rows, "none", "clip_history"), average_by_user(rows, "both", "clip_history")
    assert compared["pairs"][0]["difference"] == pytest.approx(
        np.mean(list(pairs[1].values())) - np.mean(list(pairs[0].values()))
    )
    assert "the task personalize does not use it" in run_cli(capsys, "evaluate", str(run), "--inception", "x", code=2)
    assert "only safetensors" in run_cli(capsys, "evaluate", str(run), "--lpips", "alex.pth", code=4)
    assert "no test data" in run_cli(capsys, "evaluate", str(run), "--split", "test", code=2)


@pytest.mark.slow
def test_arms_differ_only_in_their_conditions(run: Path) -> None:
    """With condition weights of 0, the arm `both` is bitwise equal to the arm `none`."""
    import bottega
    from bottega.analysis.personalize_generator import open_personalized_generator
    from bottega.tasks.personalize.arms import generate_arm
    from bottega.tasks.personalize.config import ConditionWeights

    saved = bottega.load(run, device="cpu")
    workload: Any = saved.workload
    source = workload.data.validation()
    assert source is not None
    with open_personalized_generator(saved, source, uses_own_data=True) as generator, saved.engine.sampling() as models:
        records = [generator.table.record(number) for number in range(5)]
        none, both = (generator.generate_arm(arm, records, lambda *progress: None) for arm in ("none", "both"))
        nothing = ConditionWeights(soft=0, keywords=0)
        without, _ = generate_arm(workload, models, records, arm="both", device="cpu", seed=0, weighting=nothing)
        fewer = generator.generate_arm("both", records[:2], lambda *progress: None)
    assert np.array_equal(none, without)
    assert not np.array_equal(none, both)
    assert np.abs(fewer.astype(int) - both[:2].astype(int)).max() <= 1  # rounding depends on the batch size


@pytest.mark.slow
def test_random_model_depends_on_its_seed_and_is_prompted_like_the_runs_own(run: Path, tmp_path: Path) -> None:
    import bottega
    from bottega.analysis.personalize_random_keywords import (
        generate_keywords,
        generate_random_keywords,
        write_random_model,
    )
    from bottega.models.frozen.language import read_language_model_metadata

    workload: Any = bottega.load(run, device="cpu").workload
    people = workload.personal_rows("validation")
    records = [people.record(number) for number in range(len(people))]
    folder = Path(workload.metadata.language_model.folder)
    first, second, third = (
        write_random_model(folder, tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1))
    )
    assert read_language_model_metadata(first) == read_language_model_metadata(folder)
    files = [(path / "model.safetensors").read_bytes() for path in (folder, first, second, third)]
    assert files[1] == files[2]
    assert len(set(files)) == 3
    own = generate_keywords(workload, folder, records, cache=tmp_path)
    assert own == [keywords.preference for keywords in workload.generate_keywords(records)]
    assert len(generate_random_keywords(workload, records)) == 8
