"""Keywords: prompts within the token limit, parsing of free answers, and a cache that decodes each prompt once."""

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
from tiny_pipelines import write_llama

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
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("language_model"))


@pytest.fixture(scope="session")
def model(model_folder: Path) -> FrozenLanguageModel:
    return load_language_model(model_folder, precision="fp32", checkpointing=False)


def _record(captions: Iterable[str], *, wish: str = "star", user: str = "7") -> Record:
    history = tuple(Item(id=str(number), caption=caption) for number, caption in enumerate(captions))
    return Record(user=user, history=history, target=Item(id="t", caption="a red star"), wish=wish)


def _generator(folder: Path, options: Keywords, *, cache: Path) -> KeywordGenerator:
    return KeywordGenerator(PromptBuilder(folder, options), cache=cache)


def _decode(prompts: PromptBuilder, ids: Any) -> str:
    return prompts.tokenizer.decode(ids)


def _check_stage(stage: str, done: int, total: int) -> None:
    assert stage == "keywords"


def _fail_if_loaded() -> Any:
    raise AssertionError("the language model is not needed")


class _ScriptedModel:
    """A language model with scripted answers that counts the decoded rows."""

    def __init__(self, generator: KeywordGenerator, *texts: str) -> None:
        self.answers = [generator.prompts.tokenizer.encode(text) for text in texts]
        self.rows = 0

    def to(self, device: Any) -> _ScriptedModel:
        return self

    def decode(self, ids: Any, mask: Any, **options: Any) -> list[list[int]]:
        self.rows += len(ids)
        return [self.answers[row % len(self.answers)] for row in range(len(ids))]


# Prompts


def test_prompts_follow_the_templates(model_folder: Path, tmp_path: Path) -> None:
    builder = PromptBuilder(model_folder, SHORT)
    record = _record(["a red\n star", "a {wish} blue moon"])
    assert (
        _decode(builder, builder.build_preference_prompt(record))
        == "likes: a red star\na {wish} blue moon of 2 keywords:"
    )
    assert _decode(builder, builder.build_target_prompt("moon")) == "a moon, keywords:"
    assert (
        _decode(builder, builder.build_image_prompt(record))
        == "a star\nlikes: a red star\na {wish} blue moon of 2 keywords:"
    )
    assert builder.build_image_prompt(record).dtype.name == "int64"
    assert builder.build_image_prompt(record)[0] == builder.tokenizer.tokenizer.bos_token_id


def test_the_wish_may_be_anywhere_in_the_preference_template(model_folder: Path, tmp_path: Path) -> None:
    options = SHORT.model_copy(update={"preference_prompt": "{history}; now a {wish}:"})
    builder = PromptBuilder(model_folder, options)
    assert _decode(builder, builder.build_image_prompt(_record(["red"], wish="moon"))) == "red; now a moon:"
    assert _decode(builder, builder.build_preference_prompt(_record(["red"], wish="moon"))) == "red; now a moon:"


@pytest.mark.parametrize("length", [40, 55, 70, 200])
def test_the_oldest_captions_are_dropped_first(model_folder: Path, tmp_path: Path, length: int) -> None:
    builder = PromptBuilder(model_folder, SHORT, length=length)
    captions = [f"a red star {number}" for number in range(20)]
    for prompt, start in (
        (builder.build_preference_prompt, "likes: "),
        (builder.build_image_prompt, "a star\nlikes: "),
    ):
        ids = prompt(_record(captions))
        text = _decode(builder, ids)
        assert len(ids) <= length
        assert text.startswith(start)
        assert text.endswith(" of 2 keywords:")
        remaining = text.removeprefix(start).removesuffix(" of 2 keywords:").split("\n")
        assert remaining == captions[-len(remaining) :]
        longer = _record(captions[-len(remaining) - 1 :])
        unlimited = PromptBuilder(model_folder, SHORT, length=480)
        build_prompt = unlimited.build_preference_prompt if start == "likes: " else unlimited.build_image_prompt
        assert (
            len(remaining) == len(captions) or len(build_prompt(longer)) > length
        )  # one more caption would not have fitted


def test_long_captions_are_truncated_and_long_templates_are_refused(model_folder: Path, tmp_path: Path) -> None:
    builder = PromptBuilder(model_folder, SHORT, length=80)
    long_text = " ".join(["star moon"] * 100)
    ids = builder.build_image_prompt(_record(["a red star", long_text], wish=long_text))
    assert len(ids) <= 80
    assert "star moon star moon" in _decode(builder, ids)
    assert len(builder.build_target_prompt(long_text)) <= 80
    tight = PromptBuilder(model_folder, SHORT, length=3)
    for build_prompt in (
        lambda: tight.build_preference_prompt(_record(["red"])),
        lambda: tight.build_target_prompt("moon"),
    ):
        with pytest.raises(UsageError, match=r"data\.sequence_length: 3 tokens cannot hold model\.keywords\."):
            build_prompt()


def test_the_prompt_leaves_positions_for_the_answer_and_the_soft_tokens(model_folder: Path, tmp_path: Path) -> None:
    context = 512
    assert PromptBuilder(model_folder, SHORT, length=600).length == context - 12
    assert PromptBuilder(model_folder, SHORT, length=600, reserved=40).length == context - 40


def test_token_ids_beyond_the_vocabulary_are_refused(model_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 40}))
    with pytest.raises(UsageError, match="belongs to the model"):
        PromptBuilder(other, SHORT).build_target_prompt("moon")


# Conversations

TEMPLATE = (
    "{% for m in messages %}<<{{ m['role'] }}>>{{ m['content'] }}{{ eos_token if m['role'] == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<<assistant>>{% endif %}"
)


def _with_template(model_folder: Path, target: Path, template: str) -> Path:
    shutil.copytree(model_folder, target)
    (target / "chat_template.jinja").write_text(template)
    return target


def test_the_chat_template_is_used_if_it_ends_turns_with_eos(model_folder: Path, tmp_path: Path) -> None:
    builder = PromptBuilder(_with_template(model_folder, tmp_path / "chat", TEMPLATE), SHORT)
    assert builder.tokenizer.is_chat
    assert _decode(builder, builder.build_target_prompt("moon")) == "<<user>>a moon, keywords:<<assistant>>"
    # A turn ends in a token that is not this model's EOS: the template belongs to another model.
    foreign = _with_template(model_folder, tmp_path / "base", TEMPLATE.replace("eos_token if", "'star' if"))
    assert not PromptBuilder(foreign, SHORT).tokenizer.is_chat


def test_chat_templates_run_in_a_sandbox(model_folder: Path, tmp_path: Path) -> None:
    evil = "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ raise_exception('no such role') }}"
    builder = PromptBuilder(_with_template(model_folder, tmp_path / "evil", evil), SHORT)
    with pytest.raises(UsageError, match=r"the chat template of .* fails") as problem:
        builder.build_target_prompt("moon")
    assert "\n" not in str(problem.value)


def test_only_base_models_stop_at_line_breaks(model_folder: Path, tmp_path: Path) -> None:
    chat = _generator(_with_template(model_folder, tmp_path / "chat", TEMPLATE), FREE, cache=tmp_path)
    base = _generator(model_folder, FREE, cache=tmp_path)
    assert chat.decoder.line_breaks == []
    assert [base.prompts.tokenizer.decode([number]) for number in base.decoder.line_breaks] == ["\n"]


# Parsing of answers


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


def test_a_truncated_last_word_is_dropped() -> None:
    assert parse_keywords("red, blue, gre", 6, is_truncated=True) == ("red", "blue")
    assert parse_keywords("red", 6, is_truncated=True) == ("red",)


def test_decoded_keywords_are_among_the_allowed_words(
    model_folder: Path, model: FrozenLanguageModel, tmp_path: Path
) -> None:
    generator = _generator(model_folder, SHORT, cache=tmp_path)
    records = [_record([f"a {first} star", f"a {second} moon"]) for first in ALLOWED for second in ALLOWED]
    progress: list[tuple[int, int]] = []
    keywords = generator.generate_preferences(
        records, model, "cpu", lambda stage, done, total: progress.append((done, total))
    )
    assert all(1 <= len(words) <= 2 and set(words) <= set(ALLOWED) for words in keywords)
    assert len(set(keywords)) > 1  # the keywords depend on the prompt
    assert progress[0] == (0, 36)
    assert progress[-1] == (36, 36)
    assert generator.notes == []
    # The answers do not depend on the batch.
    other_generator = _generator(model_folder, SHORT, cache=tmp_path / "other")
    assert other_generator.generate_preferences(records[5:6], model, "cpu", _check_stage) == keywords[5:6]
    assert (
        other_generator.generate_targets(["a star", "a star"], model, "cpu", _check_stage)[0]
        == generator.generate_targets(["a star"], model, "cpu", _check_stage)[0]
    )


def test_empty_answers_are_counted_in_a_note(model_folder: Path, tmp_path: Path) -> None:
    generator = _generator(model_folder, FREE, cache=tmp_path)
    scripted = _ScriptedModel(generator, "Keywords: red, blue, moon", "")
    records = [_record(["red"]), _record(["blue star"])]
    assert generator.generate_preferences(records, scripted, "cpu", _check_stage) == [("red", "blue"), ()]
    assert generator.generate_targets(["moon"], scripted, "cpu", _check_stage) == [("red", "blue")]
    (note,) = generator.notes
    assert note.startswith("keywords: 1 of 2 preference answers contain no keyword")


# Cache


def test_cached_prompts_are_not_decoded_again(model_folder: Path, tmp_path: Path) -> None:
    generator = _generator(model_folder, FREE, cache=tmp_path)
    scripted = _ScriptedModel(generator, "red", "blue", "")
    records = [_record([word]) for word in ALLOWED]
    keywords = generator.generate_preferences([*records, *records], scripted, "cpu", _check_stage)
    assert scripted.rows == 6  # each distinct history is decoded once
    again = _generator(model_folder, FREE, cache=tmp_path)
    assert again.generate_preferences([*records, *records], _fail_if_loaded, "cpu", _check_stage) == keywords
    more = again.generate_preferences([*records, _record(["new"])], scripted, "cpu", _check_stage)
    assert scripted.rows == 7
    assert more[:6] == keywords[:6]


def test_the_cache_depends_on_the_model_and_the_prompt_but_not_on_the_folder(
    model_folder: Path, tmp_path: Path
) -> None:
    records = [_record(["a red star"])]

    def count_decoded_rows(folder: Path, options: Keywords) -> int:
        generator = _generator(folder, options, cache=tmp_path)
        scripted = _ScriptedModel(generator, "red")
        generator.generate_preferences(records, scripted, "cpu", _check_stage)
        return scripted.rows

    assert count_decoded_rows(model_folder, FREE) == 1
    assert count_decoded_rows(model_folder, FREE) == 0
    copy = tmp_path / "moved"
    shutil.copytree(model_folder, copy)
    assert count_decoded_rows(copy, FREE) == 0
    assert count_decoded_rows(write_llama(tmp_path / "weights", seed=1), FREE) == 1
    for change in (
        {"count": 1},
        {"max_tokens": 5},
        {"allowed": ("red",)},
        {"preference_prompt": "likes {history}:"},
        {"item": "- {caption}\n"},
    ):
        assert count_decoded_rows(model_folder, FREE.model_copy(update=change)) == 1, change
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 290, "content": "<new>"})
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert count_decoded_rows(copy, FREE) == 1


def _damage_last_line(text: str) -> str:
    return text.rstrip()[:-9]


def _damage_a_word(text: str) -> str:
    return text.replace("blue", "blew")


@pytest.mark.parametrize("damage", [_damage_last_line, _damage_a_word, lambda _: "[]\n3\nnull\n{}\n\x00"])
def test_a_damaged_cache_line_is_decoded_again(
    model_folder: Path, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    generator = _generator(model_folder, FREE, cache=tmp_path)
    records = [_record(["red"]), _record(["blue star"])]
    keywords = generator.generate_preferences(records, _ScriptedModel(generator, "red", "blue"), "cpu", _check_stage)
    (file,) = (tmp_path / "keywords").glob("*.jsonl")
    file.write_text(damage(file.read_text()))
    scripted = _ScriptedModel(generator, *(" ".join(words) for words in keywords))
    again = generator.generate_preferences(records, scripted, "cpu", _check_stage)
    assert scripted.rows >= 1
    assert len(again) == 2
    assert generator.generate_preferences(records, _fail_if_loaded, "cpu", _check_stage) == again


def test_an_unwritable_cache_is_reported_with_its_remedy(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keywords").write_text("a file")
    generator = _generator(model_folder, FREE, cache=tmp_path)
    with pytest.raises(EnvironmentProblem, match=r"cannot write keywords to .* set XDG_CACHE_HOME"):
        generator.generate_targets(["moon"], _ScriptedModel(generator, "red"), "cpu", _check_stage)
