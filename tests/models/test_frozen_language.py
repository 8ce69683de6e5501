"""Hidden states after a prompt: each row as if it were alone, prefixes in every layer, gradients to all that learns; and
answers in words, free or out of a list."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.frozen import prefix_attention
from bottega.models.frozen.allowed_words import AllowedWords
from bottega.models.frozen.config import SoftPromptShape
from bottega.models.frozen.language import FrozenLanguageModel, load_language_model, read_language_model_metadata
from bottega.models.frozen.soft_prompts import SoftPrompts, build_soft_prompts
from tiny_pipelines import llama, llama_tokenizer, t5_tokenizer

WORDS = 60
LENGTHS = (11, 4, 7)
WITH_PREFIXES = ("llama", "qwen3", "mistral", "gpt2", "gemma", "gemma3_text")
OF_THEIR_OWN = ("bloom", "falcon", "mamba")


def _config(kind: str) -> Any:
    import transformers as t

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    usual = {**sizes, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
    ends = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    made: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**usual, **ends),
        "qwen3": lambda: t.Qwen3Config(**usual, **ends, head_dim=16),
        "mistral": lambda: t.MistralConfig(**usual, **ends, sliding_window=40),
        "gpt2": lambda: t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **ends),
        "gemma": lambda: t.GemmaConfig(**usual, **ends, head_dim=8),
        "gemma3_text": lambda: t.Gemma3TextConfig(
            **usual, **ends, head_dim=8, sliding_window=40, layer_types=["sliding_attention", "full_attention"]
        ),
        "windowed": lambda: t.MistralConfig(**usual, **ends, sliding_window=3),
        "bloom": lambda: t.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **ends),
        "falcon": lambda: t.FalconConfig(**sizes, **ends),
        "mamba": lambda: t.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, **ends),
        "gemma2": lambda: t.Gemma2Config(**usual, **ends, head_dim=8),
        "bert": lambda: t.CLIPTextConfig(**sizes, intermediate_size=48, **ends),
    }
    return made[kind]()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of each kind, with weights that make every token matter."""

    @cache
    def made(kind: str) -> Path:
        import transformers as t
        from transformers.utils import logging

        logging.disable_progress_bar()
        place = tmp_path_factory.mktemp(kind)
        config = _config(kind)
        model = t.CLIPTextModel(config) if kind == "bert" else t.AutoModelForCausalLM.from_config(config)
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
        model.save_pretrained(place)
        return place

    return made


def _load(place: Path, *, checkpointing: bool = False) -> FrozenLanguageModel:
    return load_language_model(place, precision="fp32", checkpointing=checkpointing)


def _soft(place: Path, prefixes: int, **more: Any) -> SoftPrompts:
    facts = read_language_model_metadata(place)
    shape = SoftPromptShape(
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        head_size=facts.head_size,
        text_size=8,
        num_image_tokens=3,
        num_prefix_tokens=prefixes,
        **more,
    )
    soft = build_soft_prompts(shape, 1, token_scale=0.3)
    if prefixes and shape.projection is None:
        with torch.no_grad():
            soft.prefix.mul_(50)  # as large as real keys and values, so that every mistake with them shows
    return soft


def _prompts(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, WORDS, (len(lengths), max(lengths)), generator=draw)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return ids, mask


def _plain(lm: FrozenLanguageModel, ids: Tensor, soft: SoftPrompts) -> Tensor:
    """One unpadded row as transformers does it, prefixes in its cache."""
    from transformers import DynamicCache

    facts = soft.shape
    past = None
    if facts.num_prefix_tokens:
        past = DynamicCache()
        for layer, both in enumerate(soft.prefixes()):
            keys, values = (one.view(1, -1, facts.num_kv_heads, facts.head_size).transpose(1, 2) for one in both)
            past.update(keys, values, layer)
    words = torch.cat([lm.model.get_input_embeddings()(ids), soft.image_tokens[None]], 1)
    more = {"past_key_values": past} if past is not None else {}
    return lm.model.base_model(inputs_embeds=words, use_cache=False, **more).last_hidden_state[
        :, -facts.num_image_tokens :
    ]


def _gradients(soft: SoftPrompts, states: Tensor) -> dict[str, Tensor]:
    soft.zero_grad()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(9))
    (states * weights).sum().backward()
    return {name: one.grad.clone() for name, one in soft.named_parameters() if one.grad is not None}


def _same(found: Tensor, expected: Tensor) -> None:
    """To rounding in float32, through two layers whose weights are ten times those of a trained model."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


# Hidden states


@pytest.mark.parametrize("prefixes", [0, 3])
@pytest.mark.parametrize("kind", WITH_PREFIXES)
def test_rows_are_what_transformers_makes_of_each_alone(
    folder: Callable[[str], Path], kind: str, prefixes: int
) -> None:
    lm, soft = _load(folder(kind)), _soft(folder(kind), prefixes)
    ids, mask = _prompts()
    found = lm.states(ids, mask, soft)
    for row, length in enumerate(LENGTHS):
        _same(found[row : row + 1], _plain(lm, ids[row : row + 1, :length], soft))


@pytest.mark.parametrize("prefixes", [0, 2])
def test_padding_is_never_read_wherever_it_is(folder: Callable[[str], Path], prefixes: int) -> None:
    lm, soft = _load(folder("llama")), _soft(folder("llama"), prefixes)
    ids, mask = _prompts()
    expected = lm.states(ids, mask, soft)
    other = torch.where(mask.bool(), ids, 7)
    _same(lm.states(other, mask, soft), expected)
    wider = torch.nn.functional.pad(ids, (0, 9)), torch.nn.functional.pad(mask, (0, 9))
    _same(lm.states(*wider, soft), expected)
    turned = torch.stack([row.roll(max(LENGTHS) - length) for row, length in zip(ids, LENGTHS, strict=True)])
    _same(lm.states(turned, mask.flip(1), soft), expected)


@pytest.mark.parametrize("kind", WITH_PREFIXES)
def test_prefixes_of_every_layer_are_used(folder: Callable[[str], Path], kind: str) -> None:
    lm, soft = _load(folder(kind)), _soft(folder(kind), 2)
    found = _gradients(soft, lm.states(*_prompts(), soft))
    assert (found["prefix"].abs().amax(-1) > 1e-6).all()  # keys and values, of each token in each layer
    assert (found["image_tokens"].abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("prefixes", [0, 2])
def test_a_window_moves_with_the_row_and_always_has_the_prefix(folder: Callable[[str], Path], prefixes: int) -> None:
    """Padding between prompt and image tokens would count as distance."""
    lm, soft = _load(folder("windowed")), _soft(folder("windowed"), prefixes)
    ids, mask = _prompts()
    together = lm.states(ids, mask, soft)
    alone = [lm.states(ids[row : row + 1, :n], mask[row : row + 1, :n], soft) for row, n in enumerate(LENGTHS)]
    _same(together, torch.cat(alone))
    # Two layers that see 3 tokens each: the last image token sees 5, and not the first of the prompt.
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % WORDS
    _same(lm.states(changed, mask, soft)[:, -1], together[:, -1])
    if prefixes:
        assert _gradients(soft, together)["prefix"].abs().min() > 0


@pytest.mark.parametrize("kind", [*OF_THEIR_OWN, "gemma2"])
def test_any_model_can_be_read_without_prefixes(folder: Callable[[str], Path], kind: str) -> None:
    lm, soft = _load(folder(kind)), _soft(folder(kind), 0)
    ids, mask = _prompts()
    found = lm.states(ids, mask, soft)
    for row, length in enumerate(LENGTHS):
        _same(found[row : row + 1], _plain(lm, ids[row : row + 1, :length], soft))
    assert _gradients(soft, found)["image_tokens"].abs().min() > 0
    with pytest.raises(UsageError, match=r"model\.num_prefix_tokens: .*; set it to 0"):
        read_language_model_metadata(folder(kind)).require_prefixes(1)


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, *, scale: float) -> list[Tensor]:
    """What a GPU's kernel computes: causal, counted from the last key."""
    assert (dropout, is_causal) == (0.0, True)
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return [torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)]


def test_a_causal_kernel_is_the_mask_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask itself is what transformers is held against above."""
    monkeypatch.setattr(prefix_attention, "flash", _flash)
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, size, 8, generator=rng) for heads, size in ((4, 5), (2, 8), (2, 8)))
    mask = torch.ones(5, 8, dtype=torch.bool).tril(3)
    several = (one.repeat_interleave(2, 1) for one in (key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, *several, attn_mask=mask, scale=0.3)
    assert torch.allclose(
        prefix_attention.causal_flash_attention(query, key, value, scale=0.3), wanted.transpose(1, 2), atol=1e-6
    )


def test_a_model_that_loses_the_prefixes_on_the_way_is_refused(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, soft = _load(folder("llama")), _soft(folder("llama"), 2)
    layer = lm.model.model.layers[1]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, prefixes=None, **k: forward(*a, **k))
    with pytest.raises(UsageError, match=r"1 of the 2 layers .* set it to 0"):
        lm.states(*_prompts(), soft)


@pytest.mark.filterwarnings("ignore::UserWarning")  # what the compiler says to itself
@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_share_one_function_and_say_the_same(
    folder: Callable[[str], Path], checkpointing: bool, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []
    if is_fast:  # the way of a GPU
        monkeypatch.setattr(prefix_attention, "flash", _flash)
        monkeypatch.setattr(prefix_attention, "_fits", lambda key: True)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, lm = _load(folder("llama")), _load(folder("llama"), checkpointing=checkpointing)
    monkeypatch.setattr(prefix_attention, "_has_flash", is_fast)
    soft, (ids, mask) = _soft(folder("llama"), 2), _prompts()
    lm.compile_parts(always=False)
    lm.states(ids, mask, soft)
    assert not graphs, "a small one is not worth it"
    lm.compile_parts(always=True)
    with torch.no_grad():
        assert torch.equal(lm.states(ids, mask, soft), plain.states(ids, mask, soft))
    assert not graphs, "only what is trained comes in few shapes"
    expected, found = plain.states(ids, mask, soft), lm.states(ids, mask, soft)
    _same(found, expected)
    for name, value in _gradients(soft, expected).items():
        _same(_gradients(soft, lm.states(ids, mask, soft))[name], value)
    assert len(graphs) == 1, "of two layers"


def test_a_compiled_model_that_loses_the_prefixes_is_refused_too(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    lm, soft = _load(folder("llama")), _soft(folder("llama"), 1)
    layer = lm.model.base_model.layers[1].self_attn
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, prefixes=None, **k: forward(*a, **k))
    lm.compile_parts(always=True)
    with pytest.raises(UsageError, match=r"1 of the 2 layers .* set it to 0"):
        lm.states(*_prompts(), soft)


def test_heads_of_another_shape_are_refused(folder: Callable[[str], Path]) -> None:
    shape = _soft(folder("llama"), 1).shape.model_copy(update={"num_kv_heads": 4})
    with pytest.raises(UsageError, match=r"keys or values of 2 x 8, but prefixes are 32 wide"):
        _load(folder("llama")).states(*_prompts(), build_soft_prompts(shape, 0))


@pytest.mark.parametrize("kind", WITH_PREFIXES)
def test_without_prefixes_only_image_tokens_keep_anything(folder: Callable[[str], Path], kind: str) -> None:
    """The same gradients as through the whole prompt, for far less memory."""
    lm, soft = _load(folder(kind)), _soft(folder(kind), 0)
    ids, mask = _prompts((24, 24))
    kept = {"cheap": 0, "plain": 0}

    def measured(what: str, run: Callable[[], Tensor]) -> Tensor:
        def keep(one: Tensor) -> Tensor:
            kept[what] += one.numel() if one.requires_grad or one.grad_fn is not None else 0
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            return run()

    cheap = measured("cheap", lambda: lm.states(ids, mask, soft))
    plain = measured("plain", lambda: torch.cat([_plain(lm, row[None], soft) for row in ids]))
    _same(cheap, plain)
    _same(_gradients(soft, cheap)["image_tokens"], _gradients(soft, plain)["image_tokens"])
    assert 3 * kept["cheap"] < kept["plain"]


@pytest.mark.parametrize("kind", WITH_PREFIXES)
@pytest.mark.parametrize("projection", [None, 6])
def test_gradients_are_those_of_the_cached_way(
    folder: Callable[[str], Path], kind: str, projection: int | None
) -> None:
    lm, soft = _load(folder(kind)), _soft(folder(kind), 2, projection=projection)
    ids, mask = _prompts()
    expected = torch.cat([_plain(lm, ids[row : row + 1, :n], soft) for row, n in enumerate(LENGTHS)])
    ours, theirs = _gradients(soft, lm.states(ids, mask, soft)), _gradients(soft, expected)
    for name, value in theirs.items():
        _same(ours[name], value)


# Gradient checkpointing


class _Calls:
    def __init__(self, lm: FrozenLanguageModel) -> None:
        self.count = 0
        block = lm.model.base_model.h[0] if hasattr(lm.model.base_model, "h") else lm.model.base_model.layers[0]
        block.mlp.register_forward_pre_hook(lambda *_: setattr(self, "count", self.count + 1))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_checkpointing_computes_layers_again_and_changes_nothing(folder: Callable[[str], Path], kind: str) -> None:
    place, batch = folder(kind), _prompts()
    plain, twice = _load(place), _load(place, checkpointing=True)
    # As engines do, after it was loaded; and a training mode that somebody switches on is not for frozen models.
    twice.to("cpu").eval().requires_grad_(False)
    twice.train()
    assert not any(module.training for module in twice.modules())
    soft = _soft(place, 2)
    calls = _Calls(twice)
    expected = _gradients(soft, plain.states(*batch, soft))
    states = twice.states(*batch, soft)
    assert calls.count == 1
    found = _gradients(soft, states)
    assert calls.count == 2
    for name, value in expected.items():
        _same(found[name], value)
    with torch.no_grad():
        twice.states(*batch, soft)
    assert calls.count == 3


def test_two_forwards_before_one_backward_keep_their_prefixes_apart(folder: Callable[[str], Path]) -> None:
    place = folder("llama")
    plain, twice = _load(place), _load(place, checkpointing=True)
    one, other = _soft(place, 2), _soft(place, 3)
    first, second = _prompts(seed=1), _prompts((5, 9), seed=2)

    def both(lm: FrozenLanguageModel) -> list[Tensor]:
        for soft in (one, other):
            soft.zero_grad()
        (lm.states(*first, one).sum() + lm.states(*second, other).square().sum()).backward()
        return [soft.prefix.grad.clone() for soft in (one, other) if soft.prefix.grad is not None]

    for found, expected in zip(both(twice), both(plain), strict=True):
        _same(found, expected)


@pytest.mark.parametrize("prefixes", [0, 2])
def test_it_runs_in_the_precision_of_an_engine(folder: Callable[[str], Path], prefixes: int) -> None:
    place = folder("qwen3")
    soft, batch = _soft(place, prefixes), _prompts()
    exact = _load(place).states(*batch, soft)
    half = load_language_model(place, precision="bf16", checkpointing=True)
    assert next(half.parameters()).dtype == torch.bfloat16
    found = half.states(*batch, soft)
    assert found.dtype == torch.float32
    assert (found - exact).abs().mean() < 0.05 * exact.abs().mean()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = _load(place, checkpointing=True).states(*batch, soft)
        gradients = _gradients(soft, soft(lambda _: mixed))
    assert (mixed - exact).abs().mean() < 0.05 * exact.abs().mean()
    assert all(value.isfinite().all() and value.abs().max() > 0 for value in gradients.values())


# Folders


def test_facts_are_read_without_weights(folder: Callable[[str], Path]) -> None:
    facts = read_language_model_metadata(folder("qwen3"))
    assert facts[:] == (32, 2, 2, 16, WORDS, 64, "qwen3", True)
    assert read_language_model_metadata(folder("gpt2"))[:4] == (32, 2, 4, 8)
    assert read_language_model_metadata(folder("mamba")).max_positions is None


def _copy(place: Path, target: Path) -> Path:
    target.mkdir()
    for file in place.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_bad_folders_are_one_line_with_a_remedy(folder: Callable[[str], Path], tmp_path: Path) -> None:
    def refused(place: Path | str, match: str, kind: type[Exception] = UsageError) -> None:
        with pytest.raises(kind, match=match) as problem:
            load_language_model(place, precision="fp32", checkpointing=False)
        assert "\n" not in str(problem.value)

    refused(tmp_path / "none", r"model\.language_model: .*/none is not a local folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", r"has no config\.json")
    code = _copy(folder("llama"), tmp_path / "code")
    config = json.loads((code / "config.json").read_text())
    (code / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (code / "evil.py").write_text("raise SystemExit('ran')")
    refused(code, "custom code .* never run")
    (code / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    refused(code, "cannot read the configuration of the language model")
    refused(folder("bert"), "does not generate text")
    (code / "config.json").write_text(json.dumps({**config, "vocab_size": WORDS + 1}))
    refused(code, r"has another shape of lm_head\.weight \(\[60, 32\], not \[61, 32\]\) and 1 more", CheckpointError)
    (code / "config.json").write_text(json.dumps(config))
    weights = load_file(code / "model.safetensors")
    lost = {name: value for name, value in weights.items() if "layers.1.mlp.up_proj" not in name}
    save_file(lost, code / "model.safetensors", metadata={"format": "pt"})
    refused(code, r"lacks .*layers\.1\.mlp\.up_proj", CheckpointError)
    (code / "model.safetensors").write_bytes((folder("llama") / "model.safetensors").read_bytes()[:-40])
    refused(code, "is damaged", CheckpointError)
    (code / "model.safetensors").rename(code / "pytorch_model.bin")
    refused(code, "pickles are never opened", CheckpointError)


# Answers


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "windowed", "mamba"])
def test_answers_together_are_those_of_each_alone(folder: Callable[[str], Path], kind: str) -> None:
    lm = _load(folder(kind))
    ids, mask = _prompts()
    said = lm.decode(ids, mask, max_tokens=8)
    for row, length in enumerate(LENGTHS):
        assert said[row] == lm.decode(ids[row : row + 1, :length], mask[row : row + 1, :length], max_tokens=8)[0]
        words = ids[row : row + 1, :length]
        for token in said[row][:5]:  # each the likeliest after all before it
            assert lm.model(words).logits[0, -1].argmax() == token
            words = torch.cat([words, torch.tensor([[token]])], 1)


def test_answers_end_where_they_should(folder: Callable[[str], Path]) -> None:
    lm = _load(folder("llama"))
    ids, mask = _prompts()
    free = lm.decode(ids, mask, max_tokens=8)
    assert [len(row) for row in free] == [8, 8, 8]
    stop = free[0][3]
    ended = lm.decode(ids, mask, max_tokens=8, ends=[stop])
    assert ended[0] == free[0][: free[0].index(stop)] if stop != free[0][0] else ended[0][0] != stop
    begun = lm.decode(ids, mask, max_tokens=8, ends=[free[1][0]])
    assert begun[1]
    assert free[1][0] not in begun[1]


def test_what_a_folder_says_of_sampling_changes_no_answer(folder: Callable[[str], Path], tmp_path: Path) -> None:
    place = _copy(folder("llama"), tmp_path / "sampled")
    said = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 9.0, "eos_token_id": [2, 3]}
    (place / "generation_config.json").write_text(json.dumps(said))
    lm, batch = _load(place), _prompts()
    assert lm.end_tokens == (2, 3)
    assert lm.decode(*batch, max_tokens=8) == _load(folder("llama")).decode(*batch, max_tokens=8)


# Answers out of a list of words

LIST = ("star", "starfish", "starfish blue", "red", "redder", "moon", "moonlit blue sky", "striped")
TOKENIZERS = {"bytes and words": llama_tokenizer, "sentencepiece": t5_tokenizer}


def _encode(tokens: Any) -> Callable[[str], list[int]]:
    return lambda text: tokens(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("which", TOKENIZERS)
def test_every_walk_says_allowed_words_once_each(which: str) -> None:
    tokens = TOKENIZERS[which]()
    draw = random.Random(0)
    lengths, heard = set(), set()
    for _ in range(400):
        count = draw.randint(1, 9)
        allowed = AllowedWords(LIST, _encode(tokens), count=count)
        said: list[int] = []
        while True:
            following, may_end = allowed.allowed_next(said)
            assert following or may_end
            if may_end:
                whole = allowed.decode_words(said)
                assert 1 <= len(whole) <= min(count, len(LIST))
                assert len(set(whole)) == len(whole)
                text = tokens.decode(said)
                assert [word.strip() for word in text.split(",")] == list(whole)
                if not following or draw.random() < 0.2:
                    break
            else:
                # Cut in the middle of a word: only the whole ones count.
                assert set(allowed.decode_words(said)) <= set(LIST)
            said.append(draw.choice(following))
        lengths.add(len(whole))
        heard |= set(whole)
    assert heard == set(LIST)
    assert max(lengths) == len(LIST)


def test_every_list_of_allowed_words_can_be_said() -> None:
    tokens = llama_tokenizer()
    allowed = AllowedWords(LIST, _encode(tokens), count=4)
    draw = random.Random(1)
    for _ in range(100):
        wanted = draw.sample(LIST, draw.randint(1, 4))
        for text in (" " + ", ".join(wanted), ", ".join(wanted)):
            said: list[int] = []
            for token in _encode(tokens)(text):
                assert token in allowed.allowed_next(said)[0]
                said.append(token)
            assert allowed.allowed_next(said)[1]
            assert list(allowed.decode_words(said)) == wanted


@pytest.mark.parametrize("word", ["red, blue", "", "  ", "a\nb"])
def test_what_is_no_word_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="is not a word"):
        AllowedWords(["red", word], _encode(llama_tokenizer()), count=2)


def test_words_that_a_tokenizer_cannot_tell_apart_are_refused() -> None:
    with pytest.raises(UsageError, match="1 of the words have the same tokens"):
        AllowedWords(["é", "è"], lambda text: [ord(c) if ord(c) < 128 else 0 for c in text], count=2)


def _likes(lm: FrozenLanguageModel, follows: dict[int, int]) -> None:
    """From now on it wants to say one token after another, whatever its weights are."""

    def wants(_: Any, given: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        for row, token in enumerate(options["input_ids"][:, -1].tolist()):
            if token in follows:
                out.logits[row, -1, follows[token]] += 1000

    lm.model.register_forward_hook(wants, with_kwargs=True)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_says_allowed_words_only(tmp_path: Path, seed: int) -> None:
    lm = _load(llama(tmp_path / "llama", seed=seed))
    tokens = llama_tokenizer()
    allowed = AllowedWords(LIST, _encode(tokens), count=3)
    batch = [torch.tensor([tokens(text)["input_ids"]]) for text in ("a star:", "of blue, red:", "likes", "moon: moon:")]
    width = max(ids.shape[1] for ids in batch)
    ids = torch.cat([torch.nn.functional.pad(one, (0, width - one.shape[1])) for one in batch])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(one), (0, width - one.shape[1])) for one in batch])
    for most in (3, 60):
        said = lm.decode(ids, mask, max_tokens=most, allowed=allowed)
        for row, answer in enumerate(said):
            text = [word.strip() for word in tokens.decode(answer).split(",")]
            if most == 60:
                assert text == list(allowed.decode_words(answer))
            assert len(allowed.decode_words(answer)) <= 3
            assert set(allowed.decode_words(answer)) <= set(LIST)
            assert (
                answer
                == lm.decode(
                    ids[row : row + 1, : int(mask[row].sum())],
                    mask[row : row + 1, : int(mask[row].sum())],
                    max_tokens=most,
                    allowed=allowed,
                )[0]
            )


def test_what_a_model_wants_to_say_is_said(tmp_path: Path) -> None:
    lm, tokens = _load(llama(tmp_path / "llama")), llama_tokenizer()
    encode = _encode(tokens)
    allowed = AllowedWords(("red", "blue", "moon", "star"), encode, count=3)
    prompt = torch.tensor([encode("likes:")])
    answer = [*encode(" moon, red"), tokens.eos_token_id]
    # A comma is followed by whatever follows last, so two words and one comma are one way only.
    _likes(lm, dict(zip([int(prompt[0, -1]), *answer], answer, strict=False)))
    said = lm.decode(prompt, torch.ones_like(prompt), max_tokens=20, allowed=allowed)
    assert allowed.decode_words(said[0]) == ("moon", "red")


def test_an_answer_that_ends_early_waits_for_the_others(tmp_path: Path) -> None:
    lm, tokens = _load(llama(tmp_path / "llama")), llama_tokenizer()
    encode, end = _encode(tokens), tokens.eos_token_id
    allowed = AllowedWords(("red", "blue", "moon", "star"), encode, count=3)
    first, second = encode("likes:"), encode(" moon of")
    (moon,), (red,), (blue,), comma = encode(" moon"), encode(" red"), encode(" blue"), encode(",")[0]
    _likes(lm, {first[-1]: moon, moon: end, second[-1]: red, red: comma, comma: blue, blue: end})
    width = max(len(first), len(second))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in (first, second)])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in (first, second)])
    said = lm.decode(ids, mask, max_tokens=20, allowed=allowed)
    assert [allowed.decode_words(row) for row in said] == [("moon",), ("red", "blue")]


def test_what_is_not_allowed_is_not_said_even_if_wanted(tmp_path: Path) -> None:
    lm, tokens = _load(llama(tmp_path / "llama")), llama_tokenizer()
    encode = _encode(tokens)
    allowed = AllowedWords(("red", "blue"), encode, count=5)
    prompt = torch.tensor([encode("likes:")])
    colon, comma = int(prompt[0, -1]), encode(",")[0]
    (moon,), (red,) = encode(" moon"), encode(" red")
    _likes(lm, {colon: moon, red: comma, comma: red})
    said = allowed.decode_words(lm.decode(prompt, torch.ones_like(prompt), max_tokens=20, allowed=allowed)[0])
    assert set(said) <= {"red", "blue"}
    assert len(set(said)) == len(said)
