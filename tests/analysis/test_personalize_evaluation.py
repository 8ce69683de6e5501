"""An evaluation over people: who is drawn for, what each picture is worth, and whether arms differ; with a generator that
draws exactly what it is told, so that every number is known beforehand."""

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
from bottega.analysis.personalize_arms import compare_arms, mean_by_user, summarise_arms, swap_histories
from bottega.analysis.personalize_evaluation import PersonalizedGenerator, evaluate_personalization
from bottega.analysis.personalize_metrics import ImageMetrics, People
from bottega.analysis.personalize_truth import (
    ClipFieldClassifier,
    TruthFields,
    build_prompts,
    find_truth_fields,
    match_keywords,
    open_sticker_reader,
    preference_keys,
    score_fields,
    score_keywords,
)
from bottega.core.errors import DataError, UsageError
from bottega.core.noise import numpy_generator
from bottega.tasks.measures.clip_scores import classify_zero_shot, cosine_similarity, similarity_to_history
from bottega.tasks.personalize.data.records import Item, Record
from recorded_figures import record_figures, texts_of

WORDS = {
    "colour": ("amber", "jade", "plum", "teal"),
    "pattern": ("lined", "plain", "spotted"),
    "shape": ("house", "ship", "tree"),
}
EVERY = [word for words in WORDS.values() for word in words]
SIDE = 32


# A world in which pictures say what they show.


def picture(shape: str, colour: str, pattern: str) -> np.ndarray:
    """Its words as the three first pixels, which is all that the judge below looks at."""
    pixels = np.full((SIDE, SIDE, 3), 30 * EVERY.index(colour), np.uint8)
    for place, word in enumerate((colour, pattern, shape)):
        pixels[0, place] = EVERY.index(word)
    return pixels


def item(number: int, shape: str, colour: str, pattern: str) -> Item:
    article = "an" if colour[0] in "aeiou" else "a"
    return Item(id=str(number), caption=f"{article} {colour} {pattern} {shape}", image=f"{shape}/{colour}/{pattern}")


def person(number: int, *, colour: str | None = None, pattern: str | None = None, user: str | None = None) -> Record:
    """Likes a pair; four of five liked pictures have it."""
    rng = random.Random(number)
    colour = colour or WORDS["colour"][number % 4]
    pattern = pattern or WORDS["pattern"][number % 3]
    wished = rng.choice(WORDS["shape"])
    others = [shape for shape in WORDS["shape"] if shape != wished]
    history = [item(10 * number + i, rng.choice(others), colour, pattern) for i in range(4)]
    history.append(item(10 * number + 4, others[0], rng.choice(WORDS["colour"]), rng.choice(WORDS["pattern"])))
    truth = {"colour": colour, "pattern": pattern, "shape": wished}
    target = item(10 * number + 9, wished, colour, pattern)
    return Record(user=user or f"p{number}", history=tuple(history), target=target, wish=f"a {wished}", truth=truth)


class People_(list[Record]):
    def record(self, index: int) -> Record:
        return self[index]

    def image(self, item: Item) -> np.ndarray:
        assert item.image is not None
        shape, colour, pattern = item.image.split("/")
        return picture(shape, colour, pattern)


class Eye(nn.Module):
    """A vision tower of one layer, for the perceptual distance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(12.0).view(4, 3) - 5)
        tower = SimpleNamespace(encoder=SimpleNamespace(layers=[self.layer]))
        self.network = SimpleNamespace(config=SimpleNamespace(model_type="siglip"), vision_model=tower)

    def images(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layer(pixels.flatten(1, 2))


class Oracle:
    """Reads what a picture says it shows; a text is the words in it."""

    def __init__(self) -> None:
        self.clip = Eye()

    def encode_images(self, pictures: np.ndarray) -> np.ndarray:
        found = np.zeros((len(pictures), len(EVERY)))
        for row, pixels in enumerate(pictures):
            found[row, pixels[0, :3, 0]] = 1
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    def encode_texts(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.full((len(texts), len(EVERY)), 1e-3)
        for row, text in enumerate(texts):
            for place, word in enumerate(EVERY):
                vectors[row, place] += word in text
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def favourites(record: Record) -> tuple[str, str]:
    """What the history says, which is all that a generator can know."""
    tags = [item.image.split("/") for item in record.history if item.image]
    return Counter(one[1] for one in tags).most_common(1)[0][0], Counter(one[2] for one in tags).most_common(1)[0][0]


class World:
    """Draws the shape of the wish, and of the taste as much as the arm may know; notes what it was asked."""

    def __init__(self, people: Sequence[Record]) -> None:
        self.people, self.asked = People_(people), []  # type: ignore[var-annotated]

    def draw(self, arm: str, records: Sequence[Record], say: Any) -> np.ndarray:
        self.asked.append((arm, [record.user for record in records], [favourites(record) for record in records]))
        found = []
        for number, record in enumerate(records):
            guess = numpy_generator(0, "guess", number)
            colour, pattern = (WORDS[name][int(guess.integers(len(WORDS[name])))] for name in ("colour", "pattern"))
            liked_colour, liked_pattern = favourites(record)
            if arm in ("soft", "both", "picked"):
                colour = liked_colour
            if arm in ("keywords", "both", "picked"):
                pattern = liked_pattern
            found.append(picture(record.wish_or_caption.removeprefix("a "), colour, pattern))
            say("pictures", number + 1, len(records))
        return np.stack(found)

    def studio(self, *, judge: Any = None) -> PersonalizedGenerator:
        def keywords(records: Sequence[Record]) -> list[tuple[str, ...]]:
            return [favourites(record) for record in records]

        return PersonalizedGenerator(self.people, [self.people], keywords, self.draw, judge=judge)

    def evaluated(self, out: Path, *, judge: Any = None, count: int | None = None, **options: Any) -> dict[str, Any]:
        said: list[tuple[str, int, int]] = []
        options = {"lpips": None, **options}
        found = evaluate_personalization(
            self.studio(judge=judge), count=count, out=out, report_progress=lambda *told: said.append(told), **options
        )
        assert {stage for stage, _, _ in said} <= {"none", "keywords", "soft", "both", "picked", "shuffled"}
        return found


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "people.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def world() -> World:
    return World([person(number) for number in range(24)])


@pytest.fixture(scope="module")
def measured(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("evaluation")
    return out, world.evaluated(out, judge=Oracle())


# The whole of it


def test_every_arm_gets_what_it_was_told(world: World, measured: tuple[Path, dict[str, Any]]) -> None:
    out, found = measured
    means = {arm: {name: v["mean"] for name, v in values.items()} for arm, values in found["arms"].items()}
    assert list(means) == ["none", "keywords", "soft", "both", "picked", "shuffled", "target"]
    for arm, colour, pattern in (("both", 1, 1), ("picked", 1, 1), ("target", 1, 1)):
        assert (means[arm]["colour_accuracy"], means[arm]["pattern_accuracy"]) == (colour, pattern)
    assert means["soft"]["colour_accuracy"] == means["keywords"]["pattern_accuracy"] == 1
    assert means["none"]["preference_accuracy"] < 0.4
    assert means["shuffled"]["preference_accuracy"] == 0  # a stranger never likes the same pair
    assert all(values["wish_accuracy"] == 1 for values in means.values())
    assert means["both"]["preference_accuracy"] == means["both"]["clip_preference"].__gt__(0.7) == 1
    assert found["chance"]["preference_accuracy"] == pytest.approx(1 / 12)
    assert found["chance"]["wish_accuracy"] == pytest.approx(1 / 3)
    assert found["keywords"] == {"learnt": {"preference": 1.0, "colour": 1.0, "pattern": 1.0}}
    assert found["counts"] == {"people": 24, "records": 24}
    assert any("not LPIPS" in note for note in found["notes"])
    rows = rows_of(out)
    assert len(rows) == 24 * 7
    assert all({"user", "arm", "wish", "target", "keywords", "judge"} <= row.keys() for row in rows)
    assert {row["user"] for row in rows if row["arm"] == "both"} == {record.user for record in world.people}
    # Of those that show what the target shows, the distance is 0.
    for row in rows:
        if row["arm"] == "both":
            assert row["perceptual"] == pytest.approx(0, abs=1e-9)
            assert row["ssim"] == pytest.approx(1)


def test_all_arms_are_drawn_for_the_same_people_in_the_same_order(world: World, tmp_path: Path) -> None:
    """Picture n begins with the noise of n, so that another order would be another noise."""
    world.asked.clear()
    world.evaluated(tmp_path, judge=Oracle(), count=9)
    users = [who for _, who, _ in world.asked]
    assert all(who == users[0] for who in users)
    assert [arm for arm, _, _ in world.asked] == ["none", "keywords", "soft", "both", "picked", "both"]
    own, others = world.asked[3][2], world.asked[5][2]
    assert all(mine != theirs for mine, theirs in zip(own, others, strict=True))
    assert Counter(own) == Counter(others)  # and everybody's history is used once


def test_shuffled_is_of_somebody_else_for_everybody(measured: tuple[Path, dict[str, Any]]) -> None:
    rows = [row for row in rows_of(measured[0]) if row["arm"] == "shuffled"]
    assert all(row["history_of"] != row["user"] for row in rows)
    assert sorted(row["history_of"] for row in rows) == sorted(row["user"] for row in rows)
    own = {row["user"]: row["keywords"] for row in rows_of(measured[0]) if row["arm"] == "both"}
    assert all(row["keywords"] == own[row["history_of"]] for row in rows), "the words that were drawn by"


def test_as_many_people_as_can_be_are_drawn_for(tmp_path: Path) -> None:
    """Somebody with many records must not take the place of others."""
    people = [person(number, user=f"p{number // 4 if number < 16 else number}") for number in range(20)]
    World(people).evaluated(tmp_path / "few", judge=Oracle(), count=8)
    rows = [row for row in rows_of(tmp_path / "few") if row["arm"] == "none"]
    assert len({row["user"] for row in rows}) == len(rows) == 8
    World(people).evaluated(tmp_path / "more", judge=Oracle(), count=12)
    rows = [row for row in rows_of(tmp_path / "more") if row["arm"] == "none"]
    assert (len(rows), len({row["user"] for row in rows})) == (12, 8)


def test_what_differs_is_found_and_what_does_not_is_not(measured: tuple[Path, dict[str, Any]]) -> None:
    tests = {(t["measure"], t["first"], t["second"]): t for t in measured[1]["tests"]}
    sure = tests["preference_accuracy", "shuffled", "both"]
    assert sure["difference"] == 1
    assert sure["people"] == 24
    assert sure["p"] == pytest.approx(st.mcnemar_test(24, 0).p)
    assert sure["p"] < sure["p_adjusted"] < 0.001
    assert tests["wish_accuracy", "none", "both"]["p_adjusted"] == 1
    of_one = [t for t in measured[1]["tests"] if t["measure"] == "preference_accuracy"]
    assert [t["p_adjusted"] for t in of_one] == st.holm_correction([t["p"] for t in of_one])
    assert len(of_one) == 5


def test_there_is_something_to_look_at(measured: tuple[Path, dict[str, Any]]) -> None:
    out, found = measured
    pages = sorted((out / "sheets").iterdir())
    assert [page.name for page in pages] == ["00.png", "01.png", "02.png"]
    assert found["files"] == [str(out / "people.jsonl"), *map(str, pages), str(out / "arms.png")]
    for path in (*pages, out / "arms.png"):
        with Image.open(path) as opened:
            assert len(opened.getcolors(maxcolors=1 << 20)) > 8


def test_pictures_name_the_arms_as_the_table_does(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bottega.data.image.canvas import Canvas

    figures = record_figures(monkeypatch)
    said: list[str] = []
    plain = Canvas.draw_text

    def noted(self: Any, x: float, y: float, words: str, **how: Any) -> None:
        said.append(words)
        width = self.measure_text(words, how.get("size", 12))
        assert how.get("anchor") != "lm" or (x + width) * 2 <= self.image.width, f"{words} runs off the page"
        plain(self, x, y, words, **how)

    monkeypatch.setattr(Canvas, "draw_text", noted)
    found = world.evaluated(tmp_path, judge=Oracle(), count=6)
    legend = texts_of(figures[-1])
    for arm in found["arms"]:
        assert said.count(arm) == 1, "one head on the sheet"
        assert any(text.startswith(f"{arm}: ") for text in legend)
    assert any("shuffled: another user's history" in words for words in said)


def test_fewer_people_leave_no_pages_of_more(world: World, tmp_path: Path) -> None:
    world.evaluated(tmp_path, judge=Oracle(), count=9)
    assert len(list((tmp_path / "sheets").iterdir())) == 2
    (tmp_path / "sheets" / "notes.png").write_bytes(b"of somebody's own")
    world.evaluated(tmp_path, judge=Oracle(), count=5)
    assert sorted(path.name for path in (tmp_path / "sheets").iterdir()) == ["00.png", "notes.png"]


def test_without_a_clip_what_it_would_say_is_left_out(world: World, tmp_path: Path) -> None:
    found = world.evaluated(tmp_path, count=6)
    assert "picked" not in found["arms"]
    assert set(found["arms"]["both"]) == {"ssim"}
    assert any("model.clip" in note for note in found["notes"])


def test_few_people_are_shown_and_not_tested(world: World, tmp_path: Path) -> None:
    found = world.evaluated(tmp_path, judge=Oracle(), count=4)
    assert found["tests"] == []
    assert any("4 people" in note for note in found["notes"])
    alone = world.evaluated(tmp_path, judge=Oracle(), count=1)
    assert "shuffled" not in alone["arms"]
    assert alone["arms"]["both"]["preference_accuracy"]["mean"] == 1


def test_without_truth_nothing_is_claimed_of_it(tmp_path: Path) -> None:
    people = [person(number).model_copy(update={"truth": {}}) for number in range(6)]
    found = World(people).evaluated(tmp_path, judge=Oracle())
    assert "chance" not in found
    assert set(found["arms"]["both"]) == {"clip_preference", "clip_target", "clip_history", "ssim", "perceptual"}
    assert "shuffled" in found["arms"]
    assert not (tmp_path / "arms.png").exists()
    measures = {test["measure"] for test in found["tests"]}
    assert "clip_history" in measures


def test_without_truth_a_stranger_has_other_keywords(tmp_path: Path) -> None:
    """Two tastes: by name alone, half of the strangers would like the same."""
    people = [
        person(number, colour=WORDS["colour"][number % 2], pattern="plain").model_copy(update={"truth": {}})
        for number in range(12)
    ]
    World(people).evaluated(tmp_path, judge=Oracle())
    own = {record.user: favourites(record) for record in people}
    rows = [row for row in rows_of(tmp_path) if row["arm"] == "shuffled"]
    assert len(rows) == 12
    assert all(own[row["user"]] != own[row["history_of"]] for row in rows)


def test_what_people_like_is_true_or_said_or_their_own() -> None:
    people = [person(0), person(1), person(2), person(3, user="p0")]
    fields = find_truth_fields(people, people)
    assert preference_keys(people, [()] * 4, fields)[:2] == [("amber", "lined"), ("jade", "plain")]
    said = preference_keys(people, [("red", "Big"), ("big", "red", "red"), (), ("old",)], None)
    assert said == [("big", "old", "red"), ("big", "red"), ("", "p2"), ("big", "old", "red")]
    assert len(set(preference_keys(people, [()] * 4, None))) == 3


def test_the_table_has_all_arms_and_the_tests(measured: tuple[Path, dict[str, Any]]) -> None:
    out, found = measured
    shown = evaluation.format_report(
        {"metrics": {"loss": 0.5, "preference_accuracy": 1.0}, **found, "folder": str(out)}
    )
    assert shown.startswith("loss")
    lines = shown.splitlines()
    (head,) = [line for line in lines if line.split()[:2] == ["none", "keywords"]]
    assert head.split() == ["none", "keywords", "soft", "both", "picked", "shuffled", "target", "chance"]
    (row,) = [line for line in lines if line.startswith("preference_accuracy ") and "-" not in line]
    assert row.split()[4:] == ["1.0000", "1.0000", "0.0000", "1.0000", "0.0833"]
    tested = [line for line in lines if line.startswith("preference_accuracy ") and "both - shuffled" in line]
    assert "McNemar" in tested[0]
    assert "< 0.0001" in tested[0]
    assert len({line.index(" p (Holm)") for line in lines if "p (Holm)" in line}) == 1


# Who is whose stranger


@settings(max_examples=60, deadline=None)
@given(some.lists(some.integers(0, 6), min_size=0, max_size=40), some.integers(0, 5))
def test_nobody_is_their_own_stranger(kinds: list[int], seed: int) -> None:
    tastes = [(str(kind), "x") for kind in kinds]
    given_to = swap_histories(tastes, seed=seed)
    most = max(Counter(kinds).values(), default=0)
    assert (given_to is None) == (not kinds or 2 * most > len(kinds))
    if given_to is not None:
        assert sorted(given_to) == list(range(len(kinds)))
        assert all(tastes[place] != tastes[other] for place, other in enumerate(given_to))
        assert given_to == swap_histories(tastes, seed=seed)


def test_strangers_are_drawn_by_the_seed() -> None:
    tastes = [(str(number % 5),) for number in range(48)]
    assert len({tuple(swap_histories(tastes, seed=seed) or ()) for seed in range(5)}) == 5


# What is known


def test_the_wish_says_which_fields_are_its_own() -> None:
    people = [person(number) for number in range(12)]
    fields = find_truth_fields(people[:3], people)
    assert fields is not None
    assert (fields.preference, fields.wish) == (("colour", "pattern"), ("shape",))
    assert fields.words["colour"] == WORDS["colour"]  # also those that only others like
    assert fields.columns == ("preference", "colour", "pattern", "wish")
    # Without a wish the caption is asked for, and says everything: nothing is left to be preferred.
    plain = [one.model_copy(update={"wish": None}) for one in people]
    of_captions = find_truth_fields(plain, plain)
    assert of_captions is not None
    assert of_captions.preference == ()
    # What is the same for all tells nobody apart.
    alike = [person(number, colour="jade") for number in range(12)]
    of_alike = find_truth_fields(alike, alike)
    assert of_alike is not None
    assert of_alike.columns == ("preference", "wish")
    assert find_truth_fields([one.model_copy(update={"truth": {}}) for one in people], people) is None


def test_all_words_of_a_field_are_looked_for_in_the_same_captions() -> None:
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
    said = dict(zip(WORDS["colour"], colour.texts, strict=True))
    assert said["plum"] == ["A plum tree", "a plum lined ship"]
    assert said["amber"] == ["An amber tree", "an amber lined ship"]
    assert mood.texts == [["calm"], ["wild"]]  # what nobody says is looked for as it is
    many, _ = build_prompts(fields, [f"a teal house of {number}" for number in range(100)])
    assert {len(texts) for texts in many.texts} == {32}


def test_words_are_looked_for_together_where_captions_have_them_together() -> None:
    people = [person(number) for number in range(12)]
    fields = find_truth_fields(people, people)
    assert fields is not None
    (together,) = build_prompts(fields, [one.target.caption for one in people])
    assert len(together.choices) == len(set(together.choices)) == 4 * 3 * 3
    assert together.texts[together.choices.index(("amber", "plain", "ship"))] == ["an amber plain ship"]
    oracle = Oracle()
    shown = [choice for choice in together.choices if choice[0] == "plum"]
    told = ClipFieldClassifier(fields, [one.target.caption for one in people], oracle.encode_texts).classify(
        oracle.encode_images(np.stack([picture(shape, colour, pattern) for colour, pattern, shape in shown]))
    )
    assert list(zip(told["colour"], told["pattern"], told["shape"], strict=True)) == shown
    # Too many to be tried with each other.
    wide = TruthFields(("a", "b"), (), {name: tuple(f"{name}{i}" for i in range(80)) for name in "ab"})
    assert [one.names for one in build_prompts(wide, ["a1 b2"])] == [("a",), ("b",)]


def test_clip_classifier_ignores_correlated_words() -> None:
    """All captions of plum are spotted ones, all of teal lined: a mean over them would read the pattern as the colour."""
    fields = TruthFields(("colour",), (), {"colour": ("plum", "teal")})
    captions = ["a plum spotted house", "a plum spotted tree", "a teal lined house", "a teal lined ship"]
    oracle = Oracle()
    words = ClipFieldClassifier(fields, captions, oracle.encode_texts)
    shown = np.stack([picture("house", "plum", "lined"), picture("house", "teal", "spotted")])
    assert words.classify(oracle.encode_images(shown)) == {"colour": ["plum", "teal"]}


def test_preference_is_all_of_it_at_once() -> None:
    people = [person(0), person(1), person(2)]
    fields = find_truth_fields(people, people)
    assert fields is not None
    told = {name: [record.truth[name] for record in people] for name in WORDS}
    told["colour"][0] = told["pattern"][1] = told["shape"][2] = "nothing"
    found = {name: values.tolist() for name, values in score_fields(fields, told, people).items()}
    assert found == {
        "preference": [False, False, True],
        "colour": [False, True, True],
        "pattern": [True, False, True],
        "wish": [True, True, False],
    }


def test_keywords_count_by_what_they_name_first() -> None:
    """Who lists all colours names the right one among them, and has understood nothing."""
    people = [person(number) for number in range(4)]
    fields = find_truth_fields(people, [person(number) for number in range(12)])
    assert fields is not None
    everything = [WORDS["colour"] + WORDS["pattern"]] * 4
    assert score_keywords(fields, everything, people)["colour"].tolist() == [True, False, False, False]
    assert match_keywords(fields, ("spotted things", "teal")) == {"pattern": "spotted", "colour": "teal"}
    assert match_keywords(fields, ("tealish",)) == {}
    assert not score_keywords(fields, [()] * 4, people)["preference"].any()


def test_stickers_are_read_by_a_ruler_and_other_data_is_not() -> None:
    from bottega.data.embedded import stickers

    ours = TruthFields(
        ("colour", "pattern"),
        ("shape",),
        {"colour": ("red", "blue"), "pattern": ("striped", "plain"), "shape": ("star", "moon")},
    )
    ruler = open_sticker_reader(ours)
    assert ruler is not None
    drawn = np.stack(
        [
            stickers.draw_sticker(s, c, p, "white", rng=numpy_generator(0, s, c, p))
            for s, c, p in (("star", "red", "striped"), ("moon", "blue", "plain"))
        ]
    )
    assert ruler(drawn) == {"shape": ["star", "moon"], "colour": ["red", "blue"], "pattern": ["striped", "plain"]}
    assert open_sticker_reader(TruthFields(("colour",), (), {"colour": WORDS["colour"]})) is None
    assert open_sticker_reader(TruthFields(("mood",), (), {"mood": ("red", "blue")})) is None


# Numbers


def test_clip_scores_are_cosines() -> None:
    rng = numpy_generator(0, "vectors")
    a, b = rng.normal(size=(2, 3, 5))
    units = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b)]
    by_hand = [float(x @ y / np.linalg.norm(x) / np.linalg.norm(y)) for x, y in zip(a, b, strict=True)]
    assert cosine_similarity(*units) == pytest.approx(by_hand)
    liked = [units[1][:2], units[1][:0], units[1][2:]]
    found = similarity_to_history(units[0], liked)
    assert found[0] == pytest.approx((units[0][0] @ units[1][0] + units[0][0] @ units[1][1]) / 2)
    assert math.isnan(found[1])
    with pytest.raises(AssertionError, match="unit vectors"):
        cosine_similarity(a, b)
    assert classify_zero_shot(units[0], 7 * units[0]) == [0, 1, 2]
    assert classify_zero_shot(units[0], units[0][::-1]) == [2, 1, 0]


def test_history_is_compared_with_what_was_liked_and_has_pictures() -> None:
    record = person(0)
    blind = record.model_copy(update={"history": tuple(i.model_copy(update={"image": None}) for i in record.history)})
    targets = np.stack([picture("tree", "teal", "plain")] * 2)
    people = People(
        [record, blind],
        [0, 1],
        [("teal",), ()],
        targets,
        [[targets[0], picture("tree", "plum", "plain")], []].__getitem__,
    )
    rows = ImageMetrics(people, judge=Oracle()).measure_arm("both", targets)
    assert rows[0]["clip_history"] == pytest.approx((1 + 2 / 3) / 2)
    assert math.isnan(rows[1]["clip_history"])
    assert math.isnan(rows[1]["clip_preference"])  # without keywords there is nothing to be near to
    assert (
        mean_by_user([{**row, "clip_history": None if row["arm"] else 0} for row in rows], "both", "clip_history") == {}
    )


def made_rows(right_of: dict[str, Sequence[float]], measure: str = "preference_accuracy") -> list[dict[str, Any]]:
    return [
        {"user": f"p{number}", "arm": arm, measure: value, "wish": "a", "target": "t"}
        for arm, values in right_of.items()
        for number, value in enumerate(values)
    ]


def test_who_has_no_keywords_is_left_out_of_the_mean_and_spoils_nobodys() -> None:
    values = {"p0": 0.5, "p1": math.nan, "p2": None, "p3": 0.7}
    rows = [{"arm": "both", "user": user, "clip_preference": value} for user, value in values.items()]
    assert mean_by_user(rows, "both", "clip_preference") == {"p0": 0.5, "p3": 0.7}
    assert summarise_arms(rows)["both"]["clip_preference"]["mean"] == pytest.approx(0.6)


def test_pairs_go_by_person_and_not_by_order() -> None:
    rng = random.Random(0)
    values = {"none": [rng.random() for _ in range(12)], "both": []}
    values["both"] = [value + 0.1 + 0.001 * i for i, value in enumerate(values["none"])]
    rows = made_rows(values, "clip_history")
    mixed = rows.copy()
    rng.shuffle(mixed)
    (one,), (other,) = compare_arms(rows), compare_arms(mixed)
    assert one == other
    assert one["p"] < 1e-10  # of pairs; as two groups nothing would be found
    assert one["interval"]["low"] > 0.1
    assert one["wilcoxon_p"] == pytest.approx(2 / 2**12)


def test_somebody_with_many_records_counts_once() -> None:
    rows = made_rows({"none": [0] * 6, "both": [1] * 6})
    again = [{**row, "target": f"t{n}"} for row in rows if row["user"] == "p0" for n in range(20)]
    mean = summarise_arms(rows + again)["both"]["preference_accuracy"]
    assert mean["mean"] == 1
    assert compare_arms(rows + again)[0]["people"] == 6
    uneven = [*rows, {"user": "p0", "arm": "both", "preference_accuracy": 0, "wish": "a", "target": "t"}]
    assert mean_by_user(uneven, "both", "preference_accuracy")["p0"] == 0.5
    assert summarise_arms(uneven)["both"]["preference_accuracy"]["mean"] == pytest.approx(5.5 / 6)


def test_a_share_of_nobody_is_not_certain() -> None:
    found = summarise_arms(made_rows({"none": [0] * 48}))["none"]["preference_accuracy"]
    assert found["low"] == 0
    assert found["high"] == st.wilson_interval(0, 48).high
    assert found["high"] > 0.05


# compare


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def made(name: str, rows: list[dict[str, Any]], *, split: str = "validation", **settings: Any) -> str:
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

    return made


ARMS = {"none": [0] * 9 + [1] * 3, "both": [1] * 10 + [0, 1], "target": [1] * 12}


def test_two_arms_of_one_run_are_compared_by_person(make: Any) -> None:
    run = make("a", made_rows(ARMS))
    report = compare([f"{run}:none", f"{run}:both"])
    (pair,) = report["pairs"]
    assert (report["metric"], report["mode"], pair["paired_by"]) == ("preference_accuracy", "max", "user")
    assert pair["p"] == pytest.approx(st.mcnemar_test(9, 1).p)
    assert pair["difference"] == pytest.approx(8 / 12)
    assert pair["better"] == "B"
    shown = format_report(report)
    assert "evaluation/validation/people.jsonl" in shown
    assert "12 people" in shown
    plot_comparison(report, Path("compared.png"))


def test_every_arm_that_was_evaluated_can_be_compared(measured: tuple[Path, dict[str, Any]], make: Any) -> None:
    out, found = measured
    run = make("a", rows_of(out))
    report = compare([f"{run}:{arm}" for arm in found["arms"]])
    assert [group["mean"] for group in report["groups"]] == [
        values["preference_accuracy"]["mean"] for values in found["arms"].values()
    ]
    assert len(report["pairs"]) == 7 * 6 / 2


def test_plot_of_people_shows_means_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = record_figures(monkeypatch)
    run = make("a", made_rows(ARMS))
    plot_comparison(compare([f"{run}:none", f"{run}:both"]), Path("compared.png"))
    assert not any(line.get_marker() == "o" for line in figures[0].axes[0].lines), "an arm is not a run"
    texts = "\n".join(texts_of(figures[0]))
    assert "mean over 12 people with its 95 % interval" in texts
    assert "each dot" not in texts
    assert "n = 10 of 12 people where only one is right" in texts


def test_a_measure_has_one_test_for_all_pairs(make: Any) -> None:
    """Somebody with two records is half right in one arm; with McNemar for the others the larger effect has the larger p."""
    arms = {"none": [0] * 8, "keywords": [0] * 2 + [1] * 6, "both": [1] * 8, "shuffled": [0] * 8}
    rows = made_rows(arms)
    again = [row if row["arm"] != "keywords" else {**row, "preference_accuracy": 1} for row in rows[::8]]
    halves = [*rows, *again]
    assert mean_by_user(halves, "keywords", "preference_accuracy")["p0"] == 0.5
    assert {test["test"].split()[0] for test in compare_arms(rows)} == {"McNemar's"}
    assert not {test["test"] for test in compare_arms(halves) if "McNemar" in test["test"]}
    run = make("a", halves)
    tests = {pair["test"] for pair in compare([f"{run}:{arm}" for arm in arms])["pairs"]}
    assert not any("McNemar" in test for test in tests)
    assert compare([f"{run}:none", f"{run}:both"])["pairs"][0]["test"].startswith("McNemar")


def test_two_runs_are_compared_by_the_whole_method(make: Any) -> None:
    rows = made_rows(ARMS)
    other = made_rows({**ARMS, "both": [0] * 12})
    random.Random(1).shuffle(other)
    one, two = make("a", rows), make("b", other, **{"model.num_image_tokens": 4})
    (pair,) = compare([one, two])["pairs"]
    assert pair["difference"] == pytest.approx(-11 / 12)
    assert pair["changed"] == {"model.num_image_tokens": [2, 4]}
    assert compare([f"{one}:none", two])["pairs"][0]["difference"] == pytest.approx(-3 / 12)


def test_runs_are_paired_by_person_however_their_files_are_sorted(make: Any) -> None:
    """Of twelve people one differs; paired by line, half of them would."""
    ours = [1, 0] * 6
    one = make("a", made_rows({"both": ours}))
    rows = made_rows({"both": [0, *ours[1:]]})
    two = make("b", [*rows[1:], rows[0]])
    (pair,) = compare([one, two])["pairs"]
    assert (pair["n"], pair["difference"]) == (1, pytest.approx(-1 / 12))


def test_a_measure_can_be_named_and_knows_its_direction(make: Any) -> None:
    rng = random.Random(0)
    values = {"none": [rng.random() for _ in range(8)], "both": [rng.random() for _ in range(8)]}
    run = make("a", made_rows(values, "perceptual"))
    report = compare([f"{run}:none", f"{run}:both"], metric="perceptual")
    assert report["mode"] == "min"
    assert report["pairs"][0]["test"] == "paired t-test"


def test_what_cannot_be_compared_is_refused(make: Any, tmp_path: Path) -> None:
    def refused(*names: str, kind: type[Exception] = UsageError, **options: Any) -> str:
        with pytest.raises(kind) as caught:
            compare(names, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    run = make("a", made_rows(ARMS))
    others = make("others", [{**row, "user": f"q{row['user']}"} for row in made_rows(ARMS)])
    wishes = make("wishes", [{**row, "wish": "another"} for row in made_rows(ARMS)])
    few = make("few", made_rows({arm: values[:4] for arm, values in ARMS.items()}))
    bare = make("bare", made_rows(ARMS), split="test")
    assert "given twice" in refused(run, run)
    assert "given twice" in refused(run, f"{run}:both")
    twice = refused(f"{run}:none", f"{run}:none")
    assert twice == f"the arm none of {run} is given twice; give two, such as {run}:none {run}:both"
    assert "different users" in refused(run, others)
    assert "different users or wishes" in refused(run, wishes)
    assert "fewer than 5" in refused(f"{few}:none", f"{few}:both")
    assert "has no arm 'soft'" in refused(run, f"{run}:soft")
    assert f"bottega evaluate {bare} first" in refused(run, bare)
    assert "--split test first" in refused(run, bare, split="test")
    assert "choose from preference_accuracy" in refused(run, f"{run}:none", metric="fid")
    (tmp_path / "runs/wishes/evaluation/validation/people.jsonl").write_text('{"user": "p"}\n')
    assert "people.jsonl:1" in refused(run, wishes, kind=DataError)
    words = make("words", [*made_rows(ARMS)[:-1], {**made_rows(ARMS)[-1], "preference_accuracy": "x"}])
    assert 'people.jsonl:36: preference_accuracy is "x", not a number' in refused(words, run, kind=DataError)
    assert compare([f"{bare}:none", bare], split="test")["read_from"] == "evaluation/test/people.jsonl"


# The real branch, between random models


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import small_personal

    folder = tmp_path_factory.mktemp("personal")
    small_personal.train(folder, name="p", **{"training.max_steps": 2, "evaluation.every": 2, "checkpoint.every": 2})
    return folder / "p"


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """What the command line says."""
    from bottega.cli import main

    assert main(list(words)) == code
    said = capsys.readouterr()
    return json.loads(said.out) if "--json" in words and not code else said.out + said.err


@pytest.mark.slow
def test_a_run_is_evaluated_and_compared_from_the_command_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    from bottega.models.metric_networks.perceptual import Lpips

    assert set(told(capsys, "evaluate", str(run), "--count", "0", "--json")["metrics"]) == {"loss"}
    assert not (run / "evaluation").exists()
    found = told(capsys, "evaluate", str(run), "--json")
    folder = run / "evaluation" / "validation"
    assert found["folder"] == str(folder)
    assert found["counts"] == {"people": 8, "records": 8}
    kept = json.loads((folder / "metrics.json").read_text())
    assert kept["split"] == "validation"
    assert kept["arms"] == found["arms"]
    assert kept["clip_history"] == found["arms"]["both"]["clip_history"]["mean"]
    rows = rows_of(folder)
    assert len(rows) == 8 * 7
    # Again, it is the same to the last digit; and for people alone what it is among all.
    weights = tmp_path / "lpips.safetensors"
    save_file({name: torch.full_like(t, 0.01) for name, t in Lpips().state_dict().items()}, weights)
    words = ("evaluate", str(run), "--out", str(tmp_path / "again"), "--lpips", str(weights))
    assert "lpips" in told(capsys, *words)
    again = rows_of(tmp_path / "again")
    assert all("lpips" in row for row in again if row["arm"] != "target")
    changing = ("perceptual", "lpips")
    assert [{k: v for k, v in row.items() if k not in changing} for row in again] == [
        {k: v for k, v in row.items() if k not in changing} for row in rows
    ]
    compared = told(capsys, "compare", f"{run}:none", f"{run}:both", "--metric", "clip_history", "--json")
    pairs = mean_by_user(rows, "none", "clip_history"), mean_by_user(rows, "both", "clip_history")
    assert compared["pairs"][0]["difference"] == pytest.approx(
        np.mean(list(pairs[1].values())) - np.mean(list(pairs[0].values()))
    )
    assert "the task personalize does not use it" in told(capsys, "evaluate", str(run), "--inception", "x", code=2)
    assert "only safetensors" in told(capsys, "evaluate", str(run), "--lpips", "alex.pth", code=4)
    assert "no test data" in told(capsys, "evaluate", str(run), "--split", "test", code=2)


@pytest.mark.slow
def test_arms_differ_in_what_is_known_and_in_nothing_else(run: Path) -> None:
    """With the weights of what is known at 0, the whole method draws what no personalisation draws, bit for bit."""
    import bottega
    from bottega.analysis.personalize_generator import open_personalized_generator
    from bottega.tasks.personalize.arms import generate_arm
    from bottega.tasks.personalize.config import ConditionWeights

    saved = bottega.load(run, device="cpu")
    workload: Any = saved.workload
    source = workload.data.validation()
    assert source is not None
    with open_personalized_generator(saved, source, is_own=True) as studio, saved.engine.sampling() as models:
        records = [studio.table.record(number) for number in range(5)]
        none, both = (studio.generate_arm(arm, records, lambda *told: None) for arm in ("none", "both"))
        nothing = ConditionWeights(soft=0, keywords=0)
        without, _ = generate_arm(workload, models, records, arm="both", device="cpu", seed=0, weighting=nothing)
        fewer = studio.generate_arm("both", records[:2], lambda *told: None)
    assert np.array_equal(none, without)
    assert not np.array_equal(none, both)
    assert np.abs(fewer.astype(int) - both[:2].astype(int)).max() <= 1  # a batch of another size may round otherwise


@pytest.mark.slow
def test_keywords_come_from_the_weights(run: Path, tmp_path: Path) -> None:
    """Drawn anew it is a model of the same shape that nobody taught, asked as the run asks its own."""
    import bottega
    from bottega.analysis.personalize_random_keywords import (
        generate_keywords,
        random_model_keywords,
        write_random_model,
    )
    from bottega.models.frozen.language import read_language_model_metadata

    workload: Any = bottega.load(run, device="cpu").workload
    people = workload.personal_rows("validation")
    records = [people.record(number) for number in range(len(people))]
    folder = Path(workload.metadata.language_model.folder)
    one, two, three = (write_random_model(folder, tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1)))
    assert read_language_model_metadata(one) == read_language_model_metadata(folder)
    files = [(place / "model.safetensors").read_bytes() for place in (folder, one, two, three)]
    assert files[1] == files[2]
    assert len(set(files)) == 3
    own = generate_keywords(workload, folder, records, cache=tmp_path)
    assert own == [said.preference for said in workload.keywords(records)]
    assert len(random_model_keywords(workload, records)) == 8
