"""Keywords: prompts that fit, answers read from whatever is said, and each asked for once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.models.frozen.language import FrozenLanguageModel, load_language_model
from bottega.tasks.personalize.config import Keywords
from bottega.tasks.personalize.data.records import Item, Record
from bottega.tasks.personalize.keyword_parser import parse_keywords
from bottega.tasks.personalize.keywords import KeywordGenerator
from bottega.tasks.personalize.prompts import PromptBuilder
from tiny_pipelines import llama

ALLOWED = ("star", "moon", "red", "blue", "striped", "plain")
SHORT = Keywords(
    preference_prompt="likes: {history} of {count} keywords:",
    target_prompt="a {wish}, keywords:",
    item="{caption}\n",
    count=2,
    max_tokens=12,
    allowed=ALLOWED,
)
FREE = SHORT.model_copy(update={"allowed": None})


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("language_model"))


@pytest.fixture(scope="session")
def model(place: Path) -> FrozenLanguageModel:
    return load_language_model(place, precision="fp32", checkpointing=False)


def _record(captions: Iterable[str], *, wish: str = "star", user: str = "7") -> Record:
    history = tuple(Item(id=str(number), caption=caption) for number, caption in enumerate(captions))
    return Record(user=user, history=history, target=Item(id="t", caption="a red star"), wish=wish)


def _generator(folder: Path, options: Keywords, *, cache: Path) -> KeywordGenerator:
    return KeywordGenerator(PromptBuilder(folder, options), cache=cache)


def _decode(prompts: PromptBuilder, ids: Any) -> str:
    return prompts.tokenizer.decode(ids)


def _quiet(what: str, done: int, total: int) -> None:
    assert what == "keywords"


def _never() -> Any:
    raise AssertionError("the language model is not needed")


class _Speaker:
    """Answers as it is told, and counts."""

    def __init__(self, generator: KeywordGenerator, *texts: str) -> None:
        self.answers = [generator.prompts.tokenizer.encode(text) for text in texts]
        self.rows = 0

    def to(self, device: Any) -> _Speaker:
        return self

    def decode(self, ids: Any, mask: Any, **options: Any) -> list[list[int]]:
        self.rows += len(ids)
        return [self.answers[row % len(self.answers)] for row in range(len(ids))]


# What is asked


def test_prompts_say_what_the_templates_say(place: Path, tmp_path: Path) -> None:
    by = PromptBuilder(place, SHORT)
    record = _record(["a red\n star", "a {wish} blue moon"])
    assert _decode(by, by.preference_prompt(record)) == "likes: a red star\na {wish} blue moon of 2 keywords:"
    assert _decode(by, by.target_prompt("moon")) == "a moon, keywords:"
    assert _decode(by, by.image_prompt(record)) == "a star\nlikes: a red star\na {wish} blue moon of 2 keywords:"
    assert by.image_prompt(record).dtype.name == "int64"
    assert by.image_prompt(record)[0] == by.tokenizer.tokenizer.bos_token_id


def test_the_images_prompt_may_have_its_wish_elsewhere(place: Path, tmp_path: Path) -> None:
    options = SHORT.model_copy(update={"preference_prompt": "{history}; now a {wish}:"})
    by = PromptBuilder(place, options)
    assert _decode(by, by.image_prompt(_record(["red"], wish="moon"))) == "red; now a moon:"
    assert _decode(by, by.preference_prompt(_record(["red"], wish="moon"))) == "red; now a moon:"


@pytest.mark.parametrize("length", [40, 55, 70, 200])
def test_the_oldest_are_left_out_first_and_never_the_question(place: Path, tmp_path: Path, length: int) -> None:
    by = PromptBuilder(place, SHORT, length=length)
    captions = [f"a red star {number}" for number in range(20)]
    for prompt, start in ((by.preference_prompt, "likes: "), (by.image_prompt, "a star\nlikes: ")):
        ids = prompt(_record(captions))
        text = _decode(by, ids)
        assert len(ids) <= length
        assert text.startswith(start)
        assert text.endswith(" of 2 keywords:")
        kept = text.removeprefix(start).removesuffix(" of 2 keywords:").split("\n")
        assert kept == captions[-len(kept) :]
        longer = _record(captions[-len(kept) - 1 :])
        whole = PromptBuilder(place, SHORT, length=480)
        asks = whole.preference_prompt if start == "likes: " else whole.image_prompt
        assert len(kept) == len(captions) or len(asks(longer)) > length  # not one more would have fitted


def test_long_captions_leave_room_and_long_questions_are_refused(place: Path, tmp_path: Path) -> None:
    by = PromptBuilder(place, SHORT, length=80)
    wordy = " ".join(["star moon"] * 100)
    ids = by.image_prompt(_record(["a red star", wordy], wish=wordy))
    assert len(ids) <= 80
    assert "star moon star moon" in _decode(by, ids)
    assert len(by.target_prompt(wordy)) <= 80
    tight = PromptBuilder(place, SHORT, length=3)
    for ask in (lambda: tight.preference_prompt(_record(["red"])), lambda: tight.target_prompt("moon")):
        with pytest.raises(UsageError, match=r"data\.sequence_length: 3 tokens cannot hold model\.keywords\."):
            ask()


def test_the_answer_and_the_learned_tokens_have_positions_too(place: Path, tmp_path: Path) -> None:
    most = 512
    assert PromptBuilder(place, SHORT, length=600).length == most - 12
    assert PromptBuilder(place, SHORT, length=600, reserved=40).length == most - 40


def test_tokens_that_the_model_does_not_know_are_refused(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(place, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 40}))
    with pytest.raises(UsageError, match="belongs to the model"):
        PromptBuilder(other, SHORT).target_prompt("moon")


# Conversations

TEMPLATE = (
    "{% for m in messages %}<<{{ m['role'] }}>>{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<<assistant>>{% endif %}"
)


def _with_template(place: Path, target: Path, template: str) -> Path:
    shutil.copytree(place, target)
    (target / "chat_template.jinja").write_text(template)
    return target


def test_a_model_that_converses_is_asked_in_its_own_form(place: Path, tmp_path: Path) -> None:
    by = PromptBuilder(_with_template(place, tmp_path / "chat", TEMPLATE), SHORT)
    assert by.tokenizer.is_chat
    assert _decode(by, by.target_prompt("moon")) == "<<user>>a moon, keywords:<<assistant>>"
    # A turn ends in a token that the model has never learnt to say: the template is another model's.
    foreign = _with_template(place, tmp_path / "base", TEMPLATE.replace("eos_token if", "'star' if"))
    assert not PromptBuilder(foreign, SHORT).tokenizer.is_chat


def test_a_template_runs_in_a_sandbox_and_its_failure_is_one_line(place: Path, tmp_path: Path) -> None:
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ raise_exception('no such role') }}"
    by = PromptBuilder(_with_template(place, tmp_path / "evil", evil), SHORT)
    with pytest.raises(UsageError, match=r"the chat template of .* fails") as problem:
        by.target_prompt("moon")
    assert "\n" not in str(problem.value)


def test_a_model_that_converses_may_speak_in_lines(place: Path, tmp_path: Path) -> None:
    chat = _generator(_with_template(place, tmp_path / "chat", TEMPLATE), FREE, cache=tmp_path)
    base = _generator(place, FREE, cache=tmp_path)
    assert chat.decoder.line_breaks == []
    assert [base.prompts.tokenizer.decode([number]) for number in base.decoder.line_breaks] == ["\n"]


# What is answered


@pytest.mark.parametrize(
    ("answer", "keywords"),
    [
        ("red, striped, cosy", "red|striped|cosy"),
        (" Red; Striped; cosy.", "Red|Striped|cosy"),
        ("Keywords: red, blue, and green.", "red|blue|green"),
        (
            'Sure! Here are the keywords:\n\n1. Red\n2. Striped shirts\n3. "cosy"\n\nI hope this helps!',
            "Red|Striped shirts|cosy",
        ),
        ("Here are some keywords: red, blue\nLet me know if you need more.", "red|blue"),
        ("Based on the pictures, the keywords are: red, blue", "red|blue"),
        ("Subjects: cats, dogs\nColours: red\nMood: calm", "cats|dogs|red|calm"),
        ("- red\n- blue\n- RED\n", "red|blue"),
        ("* **red**\n* _blue_\nThese describe the taste.", "red|blue"),
        ("• red • blue", "red|blue"),
        ("1) red 2) blue", "red|blue"),
        ("#red #blue", "red|blue"),
        ('["red", "blue"]', "red|blue"),
        ("‘red’，«blue»", "red|blue"),
        ("red\nblue", "red|blue"),
        ("sci-fi, 3D art, black-and-white", "sci-fi|3D art|black-and-white"),
        ("<think>maybe green, or not</think>\nred, blue", "red|blue"),
        ("<think>red, or perhaps", ""),
        ("I am sorry, but I cannot tell what this person likes at all.", ""),
        ("", ""),
        (" \n , ,\n", ""),
        ("a, b, c, d, e, f, g, h", "a|b|c|d|e|f"),
    ],
)
def test_keywords_are_parsed_from_free_answers(answer: str, keywords: str) -> None:
    assert "|".join(parse_keywords(answer, 6)) == keywords


def test_half_a_word_is_not_heard() -> None:
    assert parse_keywords("red, blue, gre", 6, is_truncated=True) == ("red", "blue")
    assert parse_keywords("red", 6, is_truncated=True) == ("red",)


def test_allowed_words_come_out_of_the_model(place: Path, model: FrozenLanguageModel, tmp_path: Path) -> None:
    by = _generator(place, SHORT, cache=tmp_path)
    records = [_record([f"a {one} star", f"a {other} moon"]) for one in ALLOWED for other in ALLOWED]
    steps: list[tuple[int, int]] = []
    found = by.preferences(records, model, "cpu", lambda what, done, total: steps.append((done, total)))
    assert all(1 <= len(words) <= 2 and set(words) <= set(ALLOWED) for words in found)
    assert len(set(found)) > 1  # the prompt decides
    assert steps[0] == (0, 36)
    assert steps[-1] == (36, 36)
    assert by.notes == []
    # The same, whatever else is asked at once.
    alone = _generator(place, SHORT, cache=tmp_path / "other")
    assert alone.preferences(records[5:6], model, "cpu", _quiet) == found[5:6]
    assert (
        alone.targets(["a star", "a star"], model, "cpu", _quiet)[0] == by.targets(["a star"], model, "cpu", _quiet)[0]
    )


def test_free_answers_are_read_and_empty_ones_counted(place: Path, tmp_path: Path) -> None:
    by = _generator(place, FREE, cache=tmp_path)
    speaker = _Speaker(by, "Keywords: red, blue, moon", "")
    records = [_record(["red"]), _record(["blue star"])]
    assert by.preferences(records, speaker, "cpu", _quiet) == [("red", "blue"), ()]
    assert by.targets(["moon"], speaker, "cpu", _quiet) == [("red", "blue")]
    (note,) = by.notes
    assert note.startswith("keywords: 1 of 2 preference answers contain no keyword")


# Answers are kept


def test_the_second_time_nothing_is_decoded(place: Path, tmp_path: Path) -> None:
    by = _generator(place, FREE, cache=tmp_path)
    speaker = _Speaker(by, "red", "blue", "")
    records = [_record([word]) for word in ALLOWED]
    found = by.preferences([*records, *records], speaker, "cpu", _quiet)
    assert speaker.rows == 6  # the same history is asked about once
    again = _generator(place, FREE, cache=tmp_path)
    assert again.preferences([*records, *records], _never, "cpu", _quiet) == found
    more = again.preferences([*records, _record(["new"])], speaker, "cpu", _quiet)
    assert speaker.rows == 7
    assert more[:6] == found[:6]


def test_another_model_or_another_question_is_asked_anew(place: Path, tmp_path: Path) -> None:
    records = [_record(["a red star"])]

    def asked(folder: Path, options: Keywords) -> int:
        by = _generator(folder, options, cache=tmp_path)
        speaker = _Speaker(by, "red")
        by.preferences(records, speaker, "cpu", _quiet)
        return speaker.rows

    assert asked(place, FREE) == 1
    assert asked(place, FREE) == 0
    same = tmp_path / "moved"
    shutil.copytree(place, same)
    assert asked(same, FREE) == 0
    assert asked(llama(tmp_path / "weights", seed=1), FREE) == 1
    for change in (
        {"count": 1},
        {"max_tokens": 5},
        {"allowed": ("red",)},
        {"preference_prompt": "likes {history}:"},
        {"item": "- {caption}\n"},
    ):
        assert asked(place, FREE.model_copy(update=change)) == 1, change
    tokens = json.loads((same / "tokenizer.json").read_text())
    tokens["added_tokens"].append({**tokens["added_tokens"][0], "id": 290, "content": "<new>"})
    (same / "tokenizer.json").write_text(json.dumps(tokens))
    assert asked(same, FREE) == 1


def _damage_last_line(text: str) -> str:
    return text.rstrip()[:-9]


def _damage_a_word(text: str) -> str:
    return text.replace("blue", "blew")


@pytest.mark.parametrize("damage", [_damage_last_line, _damage_a_word, lambda _: "[]\n3\nnull\n{}\n\x00"])
def test_a_damaged_answer_is_asked_again(place: Path, tmp_path: Path, damage: Callable[[str], str]) -> None:
    by = _generator(place, FREE, cache=tmp_path)
    records = [_record(["red"]), _record(["blue star"])]
    found = by.preferences(records, _Speaker(by, "red", "blue"), "cpu", _quiet)
    (file,) = (tmp_path / "keywords").glob("*.jsonl")
    file.write_text(damage(file.read_text()))
    speaker = _Speaker(by, *(" ".join(words) for words in found))
    again = by.preferences(records, speaker, "cpu", _quiet)
    assert speaker.rows >= 1
    assert len(again) == 2
    assert by.preferences(records, _never, "cpu", _quiet) == again


def test_a_cache_that_cannot_be_written_is_one_line(place: Path, tmp_path: Path) -> None:
    (tmp_path / "keywords").write_text("a file")
    by = _generator(place, FREE, cache=tmp_path)
    with pytest.raises(EnvironmentProblem, match=r"cannot write keywords to .* set XDG_CACHE_HOME"):
        by.targets(["moon"], _Speaker(by, "red"), "cpu", _quiet)
