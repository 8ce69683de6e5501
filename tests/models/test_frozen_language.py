"""Hidden states after a prompt (batch-independent, prefixes in every layer, gradients to trainable parameters), and
decoding, free or constrained to a list of words."""

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
from bottega.models.frozen.language import (
    FrozenLanguageModel,
    LanguageModelMetadata,
    load_language_model,
    read_language_model_metadata,
)
from bottega.models.frozen.soft_prompts import SoftPrompts, build_soft_prompts
from tiny_pipelines import llama_tokenizer, t5_tokenizer, write_llama

VOCAB_SIZE = 60
LENGTHS = (11, 4, 7)
WITH_PREFIXES = ("llama", "qwen3", "mistral", "gpt2", "gemma", "gemma3_text")
WITHOUT_PREFIXES = ("bloom", "falcon", "mamba", "gemma2")


def _config(kind: str) -> Any:
    import transformers as t

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common = {**sizes, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
    vocabulary = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    builders: dict[str, Callable[[], Any]] = {
        "llama": lambda: t.LlamaConfig(**common, **vocabulary),
        "qwen3": lambda: t.Qwen3Config(**common, **vocabulary, head_dim=16),
        "mistral": lambda: t.MistralConfig(**common, **vocabulary, sliding_window=40),
        "gpt2": lambda: t.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **vocabulary),
        "gemma": lambda: t.GemmaConfig(**common, **vocabulary, head_dim=8),
        "gemma3_text": lambda: t.Gemma3TextConfig(
            **common, **vocabulary, head_dim=8, sliding_window=40, layer_types=["sliding_attention", "full_attention"]
        ),
        "windowed": lambda: t.MistralConfig(**common, **vocabulary, sliding_window=3),
        "bloom": lambda: t.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **vocabulary),
        "falcon": lambda: t.FalconConfig(**sizes, **vocabulary),
        "mamba": lambda: t.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, **vocabulary),
        "gemma2": lambda: t.Gemma2Config(**common, **vocabulary, head_dim=8),
        "clip_text": lambda: t.CLIPTextConfig(**sizes, intermediate_size=48, **vocabulary),
    }
    return builders[kind]()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model folder of each kind, with weights large enough that every token affects the output."""

    @cache
    def build(kind: str) -> Path:
        import transformers as t
        from transformers.utils import logging

        logging.disable_progress_bar()
        path = tmp_path_factory.mktemp(kind)
        config = _config(kind)
        model = t.CLIPTextModel(config) if kind == "clip_text" else t.AutoModelForCausalLM.from_config(config)
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
        model.save_pretrained(path)
        return path

    return build


def _load(path: Path, *, checkpointing: bool = False) -> FrozenLanguageModel:
    return load_language_model(path, precision="fp32", checkpointing=checkpointing)


def _build_soft_prompts(path: Path, prefixes: int, **options: Any) -> SoftPrompts:
    metadata = read_language_model_metadata(path)
    shape = SoftPromptShape(
        hidden_size=metadata.hidden_size,
        num_layers=metadata.num_layers,
        num_kv_heads=metadata.num_kv_heads,
        head_size=metadata.head_size,
        text_size=8,
        num_image_tokens=3,
        num_prefix_tokens=prefixes,
        **options,
    )
    soft = build_soft_prompts(shape, 1, token_scale=0.3)
    if prefixes and shape.projection is None:
        with torch.no_grad():
            soft.prefix.mul_(50)  # as large as real keys and values, so that errors show
    return soft


def _draw_prompts(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB_SIZE, (len(lengths), max(lengths)), generator=draw)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return ids, mask


def _reference_states(lm: FrozenLanguageModel, ids: Tensor, soft: SoftPrompts) -> Tensor:
    """Compute the states of one unpadded row with transformers, the prefixes in its cache."""
    from transformers import DynamicCache

    shape = soft.shape
    past = None
    if shape.num_prefix_tokens:
        past = DynamicCache()
        for layer, pair in enumerate(soft.prefixes()):
            keys, values = (tensor.view(1, -1, shape.num_kv_heads, shape.head_size).transpose(1, 2) for tensor in pair)
            past.update(keys, values, layer)
    embeddings = torch.cat([lm.model.get_input_embeddings()(ids), soft.image_tokens[None]], 1)
    options = {"past_key_values": past} if past is not None else {}
    return lm.model.base_model(inputs_embeds=embeddings, use_cache=False, **options).last_hidden_state[
        :, -shape.num_image_tokens :
    ]


def _compute_gradients(soft: SoftPrompts, states: Tensor) -> dict[str, Tensor]:
    soft.zero_grad()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(9))
    (states * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in soft.named_parameters() if parameter.grad is not None}


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare up to float32 rounding, which two layers amplify: their weights are ten times as large as trained ones."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


# Hidden states


@pytest.mark.parametrize("prefixes", [0, 3])
@pytest.mark.parametrize("kind", WITH_PREFIXES)
def test_batched_states_match_transformers_on_each_row_alone(
    folder: Callable[[str], Path], kind: str, prefixes: int
) -> None:
    lm, soft = _load(folder(kind)), _build_soft_prompts(folder(kind), prefixes)
    ids, mask = _draw_prompts()
    states = lm.encode_image_tokens(ids, mask, soft)
    for row, length in enumerate(LENGTHS):
        _assert_close(states[row : row + 1], _reference_states(lm, ids[row : row + 1, :length], soft))


@pytest.mark.parametrize("prefixes", [0, 2])
def test_padding_does_not_change_the_states(folder: Callable[[str], Path], prefixes: int) -> None:
    lm, soft = _load(folder("llama")), _build_soft_prompts(folder("llama"), prefixes)
    ids, mask = _draw_prompts()
    expected = lm.encode_image_tokens(ids, mask, soft)
    other = torch.where(mask.bool(), ids, 7)
    _assert_close(lm.encode_image_tokens(other, mask, soft), expected)
    wider = torch.nn.functional.pad(ids, (0, 9)), torch.nn.functional.pad(mask, (0, 9))
    _assert_close(lm.encode_image_tokens(*wider, soft), expected)
    left_padded = torch.stack([row.roll(max(LENGTHS) - length) for row, length in zip(ids, LENGTHS, strict=True)])
    _assert_close(lm.encode_image_tokens(left_padded, mask.flip(1), soft), expected)


@pytest.mark.parametrize("kind", WITH_PREFIXES)
def test_prefixes_of_every_layer_are_used(folder: Callable[[str], Path], kind: str) -> None:
    lm, soft = _load(folder(kind)), _build_soft_prompts(folder(kind), 2)
    gradients = _compute_gradients(soft, lm.encode_image_tokens(*_draw_prompts(), soft))
    assert (gradients["prefix"].abs().amax(-1) > 1e-6).all()  # keys and values, of each token in each layer
    assert (gradients["image_tokens"].abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("prefixes", [0, 2])
def test_sliding_window_follows_the_row_and_always_includes_the_prefix(
    folder: Callable[[str], Path], prefixes: int
) -> None:
    """Padding between prompt and image tokens would shift the window."""
    lm, soft = _load(folder("windowed")), _build_soft_prompts(folder("windowed"), prefixes)
    ids, mask = _draw_prompts()
    together = lm.encode_image_tokens(ids, mask, soft)
    alone = [
        lm.encode_image_tokens(ids[row : row + 1, :n], mask[row : row + 1, :n], soft) for row, n in enumerate(LENGTHS)
    ]
    _assert_close(together, torch.cat(alone))
    # Two layers with a window of 3: the last image token attends to 5 tokens, not to the first of the prompt.
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % VOCAB_SIZE
    _assert_close(lm.encode_image_tokens(changed, mask, soft)[:, -1], together[:, -1])
    if prefixes:
        assert _compute_gradients(soft, together)["prefix"].abs().min() > 0


@pytest.mark.parametrize("kind", WITHOUT_PREFIXES)
def test_any_architecture_works_without_prefixes(folder: Callable[[str], Path], kind: str) -> None:
    lm, soft = _load(folder(kind)), _build_soft_prompts(folder(kind), 0)
    ids, mask = _draw_prompts()
    states = lm.encode_image_tokens(ids, mask, soft)
    for row, length in enumerate(LENGTHS):
        _assert_close(states[row : row + 1], _reference_states(lm, ids[row : row + 1, :length], soft))
    assert _compute_gradients(soft, states)["image_tokens"].abs().min() > 0
    with pytest.raises(UsageError, match=r"model\.num_prefix_tokens: .*; set it to 0"):
        read_language_model_metadata(folder(kind)).require_prefixes(1)


def _flash_reference(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, *, scale: float
) -> list[Tensor]:
    """Reference of the GPU kernel: a causal mask aligned to the last key."""
    assert (dropout, is_causal) == (0.0, True)
    mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    return [torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)]


def test_causal_flash_attention_matches_the_explicit_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explicit mask is compared with transformers above."""
    monkeypatch.setattr(prefix_attention, "flash", _flash_reference)
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, size, 8, generator=rng) for heads, size in ((4, 5), (2, 8), (2, 8)))
    mask = torch.ones(5, 8, dtype=torch.bool).tril(3)
    expanded = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query, *expanded, attn_mask=mask, scale=0.3)
    assert torch.allclose(
        prefix_attention.causal_flash_attention(query, key, value, scale=0.3), expected.transpose(1, 2), atol=1e-6
    )


def test_model_that_drops_the_prefixes_is_refused(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, soft = _load(folder("llama")), _build_soft_prompts(folder("llama"), 2)
    layer = lm.model.model.layers[1]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, prefixes=None, **k: forward(*a, **k))
    with pytest.raises(UsageError, match=r"1 of the 2 layers .* set it to 0"):
        lm.encode_image_tokens(*_draw_prompts(), soft)


@pytest.mark.filterwarnings("ignore::UserWarning")  # internal warnings of the compiler
@pytest.mark.parametrize("use_flash", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_share_one_graph_and_match_eager(
    folder: Callable[[str], Path], checkpointing: bool, use_flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []
    if use_flash:  # the path taken on a GPU
        monkeypatch.setattr(prefix_attention, "flash", _flash_reference)
        monkeypatch.setattr(prefix_attention, "_supports_flash", lambda key: True)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    plain, lm = _load(folder("llama")), _load(folder("llama"), checkpointing=checkpointing)
    monkeypatch.setattr(prefix_attention, "_has_flash", use_flash)  # after loading, which sets it by the device
    soft, (ids, mask) = _build_soft_prompts(folder("llama"), 2), _draw_prompts()
    lm.compile_parts(always=False)
    lm.encode_image_tokens(ids, mask, soft)
    assert not graphs, "small models are not compiled"
    lm.compile_parts(always=True)
    with torch.no_grad():
        assert torch.equal(lm.encode_image_tokens(ids, mask, soft), plain.encode_image_tokens(ids, mask, soft))
    assert not graphs, "inference is not compiled: its shapes vary"
    expected, states = plain.encode_image_tokens(ids, mask, soft), lm.encode_image_tokens(ids, mask, soft)
    _assert_close(states, expected)
    for name, value in _compute_gradients(soft, expected).items():
        _assert_close(_compute_gradients(soft, lm.encode_image_tokens(ids, mask, soft))[name], value)
    assert len(graphs) == 1, "both layers share one graph"


def test_compiled_model_that_drops_the_prefixes_is_refused(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    lm, soft = _load(folder("llama")), _build_soft_prompts(folder("llama"), 1)
    layer = lm.model.base_model.layers[1].self_attn
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *a, prefixes=None, **k: forward(*a, **k))
    lm.compile_parts(always=True)
    with pytest.raises(UsageError, match=r"1 of the 2 layers .* set it to 0"):
        lm.encode_image_tokens(*_draw_prompts(), soft)


def test_prefixes_of_mismatched_head_shape_are_refused(folder: Callable[[str], Path]) -> None:
    shape = _build_soft_prompts(folder("llama"), 1).shape.model_copy(update={"num_kv_heads": 4})
    with pytest.raises(UsageError, match=r"keys or values of 2 x 8, but prefixes are 32 wide"):
        _load(folder("llama")).encode_image_tokens(*_draw_prompts(), build_soft_prompts(shape, 0))


@pytest.mark.parametrize("kind", WITH_PREFIXES)
def test_without_prefixes_activations_are_saved_for_image_tokens_only(folder: Callable[[str], Path], kind: str) -> None:
    """Gradients equal those through the full prompt, with far less memory."""
    lm, soft = _load(folder(kind)), _build_soft_prompts(folder(kind), 0)
    ids, mask = _draw_prompts((24, 24))
    saved = {"cheap": 0, "plain": 0}

    def count_saved(name: str, run: Callable[[], Tensor]) -> Tensor:
        def save_tensor(tensor: Tensor) -> Tensor:
            saved[name] += tensor.numel() if tensor.requires_grad or tensor.grad_fn is not None else 0
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save_tensor, lambda tensor: tensor):
            return run()

    cheap = count_saved("cheap", lambda: lm.encode_image_tokens(ids, mask, soft))
    plain = count_saved("plain", lambda: torch.cat([_reference_states(lm, row[None], soft) for row in ids]))
    _assert_close(cheap, plain)
    _assert_close(_compute_gradients(soft, cheap)["image_tokens"], _compute_gradients(soft, plain)["image_tokens"])
    assert 3 * saved["cheap"] < saved["plain"]


@pytest.mark.parametrize("kind", WITH_PREFIXES)
@pytest.mark.parametrize("projection", [None, 6])
def test_gradients_match_prefixes_in_a_cache(folder: Callable[[str], Path], kind: str, projection: int | None) -> None:
    lm, soft = _load(folder(kind)), _build_soft_prompts(folder(kind), 2, projection=projection)
    ids, mask = _draw_prompts()
    expected = torch.cat([_reference_states(lm, ids[row : row + 1, :n], soft) for row, n in enumerate(LENGTHS)])
    ours, theirs = _compute_gradients(soft, lm.encode_image_tokens(ids, mask, soft)), _compute_gradients(soft, expected)
    for name, value in theirs.items():
        _assert_close(ours[name], value)


# Gradient checkpointing


class _CallCounter:
    def __init__(self, lm: FrozenLanguageModel) -> None:
        self.count = 0
        block = lm.model.base_model.h[0] if hasattr(lm.model.base_model, "h") else lm.model.base_model.layers[0]
        block.mlp.register_forward_pre_hook(lambda *_: setattr(self, "count", self.count + 1))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_checkpointing_recomputes_layers_with_the_same_gradients(folder: Callable[[str], Path], kind: str) -> None:
    path, batch = folder(kind), _draw_prompts()
    plain, checkpointed = _load(path), _load(path, checkpointing=True)
    # As engines do after loading; train() must not affect a frozen model.
    checkpointed.to("cpu").eval().requires_grad_(False)
    checkpointed.train()
    assert not any(module.training for module in checkpointed.modules())
    soft = _build_soft_prompts(path, 2)
    calls = _CallCounter(checkpointed)
    expected = _compute_gradients(soft, plain.encode_image_tokens(*batch, soft))
    states = checkpointed.encode_image_tokens(*batch, soft)
    assert calls.count == 1
    gradients = _compute_gradients(soft, states)
    assert calls.count == 2
    for name, value in expected.items():
        _assert_close(gradients[name], value)
    with torch.no_grad():
        checkpointed.encode_image_tokens(*batch, soft)
    assert calls.count == 3


def test_two_forwards_before_one_backward_use_their_own_prefixes(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    plain, checkpointed = _load(path), _load(path, checkpointing=True)
    soft_a, soft_b = _build_soft_prompts(path, 2), _build_soft_prompts(path, 3)
    first, second = _draw_prompts(seed=1), _draw_prompts((5, 9), seed=2)

    def compute_prefix_gradients(lm: FrozenLanguageModel) -> list[Tensor]:
        for soft in (soft_a, soft_b):
            soft.zero_grad()
        (
            lm.encode_image_tokens(*first, soft_a).sum() + lm.encode_image_tokens(*second, soft_b).square().sum()
        ).backward()
        return [soft.prefix.grad.clone() for soft in (soft_a, soft_b) if soft.prefix.grad is not None]

    for gradient, expected in zip(compute_prefix_gradients(checkpointed), compute_prefix_gradients(plain), strict=True):
        _assert_close(gradient, expected)


@pytest.mark.parametrize("prefixes", [0, 2])
def test_states_are_float32_and_accurate_in_bf16(folder: Callable[[str], Path], prefixes: int) -> None:
    path = folder("qwen3")
    soft, batch = _build_soft_prompts(path, prefixes), _draw_prompts()
    exact = _load(path).encode_image_tokens(*batch, soft)
    half = load_language_model(path, precision="bf16", checkpointing=True)
    assert next(half.parameters()).dtype == torch.bfloat16
    states = half.encode_image_tokens(*batch, soft)
    assert states.dtype == torch.float32
    assert (states - exact).abs().mean() < 0.05 * exact.abs().mean()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = _load(path, checkpointing=True).encode_image_tokens(*batch, soft)
        # Through the whole module, so that the mapping after the hidden states has a gradient too.
        gradients = _compute_gradients(soft, soft(lambda _: mixed))
    assert (mixed - exact).abs().mean() < 0.05 * exact.abs().mean()
    assert all(value.isfinite().all() and value.abs().max() > 0 for value in gradients.values())


# Folders


def test_metadata_is_read_without_weights(folder: Callable[[str], Path]) -> None:
    assert read_language_model_metadata(folder("qwen3")) == LanguageModelMetadata(
        hidden_size=32,
        num_layers=2,
        num_kv_heads=2,
        head_size=16,
        vocab_size=VOCAB_SIZE,
        max_positions=64,
        model_type="qwen3",
        supports_prefixes=True,
    )
    gpt2 = read_language_model_metadata(folder("gpt2"))
    assert (gpt2.hidden_size, gpt2.num_layers, gpt2.num_kv_heads, gpt2.head_size) == (32, 2, 4, 8)
    assert read_language_model_metadata(folder("mamba")).max_positions is None


def _copy_folder(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_invalid_folder_is_refused_in_one_line(folder: Callable[[str], Path], tmp_path: Path) -> None:
    def assert_refused(path: Path | str, match: str, kind: type[Exception] = UsageError) -> None:
        with pytest.raises(kind, match=match) as error:
            load_language_model(path, precision="fp32", checkpointing=False)
        assert "\n" not in str(error.value)

    assert_refused(tmp_path / "none", r"model\.language_model: .*/none is not a local folder")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", r"has no config\.json")
    broken = _copy_folder(folder("llama"), tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (broken / "evil.py").write_text("raise SystemExit('ran')")
    assert_refused(broken, "custom code .* never run")
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "nobody_knows"}))
    assert_refused(broken, "cannot read the configuration of the language model")
    assert_refused(folder("clip_text"), "does not generate text")
    (broken / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB_SIZE + 1}))
    assert_refused(
        broken, r"has the wrong shape of lm_head\.weight \(\[60, 32\], not \[61, 32\]\) and 1 more", CheckpointError
    )
    (broken / "config.json").write_text(json.dumps(config))
    weights = load_file(broken / "model.safetensors")
    incomplete = {name: value for name, value in weights.items() if "layers.1.mlp.up_proj" not in name}
    save_file(incomplete, broken / "model.safetensors", metadata={"format": "pt"})
    assert_refused(broken, r"lacks .*layers\.1\.mlp\.up_proj", CheckpointError)
    (broken / "model.safetensors").write_bytes((folder("llama") / "model.safetensors").read_bytes()[:-40])
    assert_refused(broken, "is damaged", CheckpointError)
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    assert_refused(broken, "pickles are never opened", CheckpointError)


# Decoding


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "windowed", "mamba"])
def test_batched_decoding_matches_each_row_alone(folder: Callable[[str], Path], kind: str) -> None:
    lm = _load(folder(kind))
    ids, mask = _draw_prompts()
    answers = lm.decode(ids, mask, max_tokens=8)
    for row, length in enumerate(LENGTHS):
        assert answers[row] == lm.decode(ids[row : row + 1, :length], mask[row : row + 1, :length], max_tokens=8)[0]
        context = ids[row : row + 1, :length]
        for token in answers[row][:5]:  # each is the argmax after its context
            assert lm.model(context).logits[0, -1].argmax() == token
            context = torch.cat([context, torch.tensor([[token]])], 1)


def test_decoding_stops_at_stop_tokens_but_never_starts_with_one(folder: Callable[[str], Path]) -> None:
    lm = _load(folder("llama"))
    ids, mask = _draw_prompts()
    answers = lm.decode(ids, mask, max_tokens=8)
    assert [len(row) for row in answers] == [8, 8, 8]
    stop = answers[0][3]
    stopped = lm.decode(ids, mask, max_tokens=8, stop_tokens=[stop])
    if stop == answers[0][0]:
        assert stopped[0][0] != stop
    else:
        assert stopped[0] == answers[0][: answers[0].index(stop)]
    first_token = answers[1][0]
    restarted = lm.decode(ids, mask, max_tokens=8, stop_tokens=[first_token])
    assert restarted[1]
    assert first_token not in restarted[1]


def test_generation_config_does_not_affect_greedy_decoding(folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = _copy_folder(folder("llama"), tmp_path / "sampled")
    generation_config = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "repetition_penalty": 9.0,
        "eos_token_id": [2, 3],
    }
    (path / "generation_config.json").write_text(json.dumps(generation_config))
    lm, batch = _load(path), _draw_prompts()
    assert lm.end_tokens == (2, 3)
    assert lm.decode(*batch, max_tokens=8) == _load(folder("llama")).decode(*batch, max_tokens=8)


# Decoding constrained to a list of words

ALLOWED = ("star", "starfish", "starfish blue", "red", "redder", "moon", "moonlit blue sky", "striped")
TOKENIZERS = {"bytes and words": llama_tokenizer, "sentencepiece": t5_tokenizer}


def _encode(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_random_walks_produce_each_allowed_word_at_most_once(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    draw = random.Random(0)
    lengths, covered = set(), set()
    for _ in range(400):
        count = draw.randint(1, 9)
        allowed = AllowedWords(ALLOWED, _encode(tokenizer), max_words=count)
        sequence: list[int] = []
        while True:
            next_tokens, may_end = allowed.allowed_next(sequence)
            assert next_tokens or may_end
            if may_end:
                words = allowed.decode_words(sequence)
                assert 1 <= len(words) <= min(count, len(ALLOWED))
                assert len(set(words)) == len(words)
                text = tokenizer.decode(sequence)
                assert [word.strip() for word in text.split(",")] == list(words)
                if not next_tokens or draw.random() < 0.2:
                    break
            else:
                # Cut in the middle of a word: only complete words count.
                assert set(allowed.decode_words(sequence)) <= set(ALLOWED)
            sequence.append(draw.choice(next_tokens))
        lengths.add(len(words))
        covered |= set(words)
    assert covered == set(ALLOWED)
    assert max(lengths) == len(ALLOWED)


def test_every_list_of_allowed_words_can_be_generated() -> None:
    tokenizer = llama_tokenizer()
    allowed = AllowedWords(ALLOWED, _encode(tokenizer), max_words=4)
    draw = random.Random(1)
    for _ in range(100):
        words = draw.sample(ALLOWED, draw.randint(1, 4))
        for text in (" " + ", ".join(words), ", ".join(words)):
            sequence: list[int] = []
            for token in _encode(tokenizer)(text):
                assert token in allowed.allowed_next(sequence)[0]
                sequence.append(token)
            assert allowed.allowed_next(sequence)[1]
            assert list(allowed.decode_words(sequence)) == words


@pytest.mark.parametrize("word", ["red, blue", "", "  ", "a\nb"])
def test_invalid_word_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="is not a word"):
        AllowedWords(["red", word], _encode(llama_tokenizer()), max_words=2)


def test_words_with_identical_tokens_are_refused() -> None:
    with pytest.raises(UsageError, match="1 of the words have the same tokens"):
        AllowedWords(["é", "è"], lambda text: [ord(c) if ord(c) < 128 else 0 for c in text], max_words=2)


def _bias_logits(lm: FrozenLanguageModel, successors: dict[int, int]) -> None:
    """Raise the logit of `successors[token]` after each `token`, whatever the weights are."""

    def raise_logits(_: Any, inputs: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        for row, token in enumerate(options["input_ids"][:, -1].tolist()):
            if token in successors:
                out.logits[row, -1, successors[token]] += 1000

    lm.model.register_forward_hook(raise_logits, with_kwargs=True)


@pytest.mark.parametrize("seed", range(4))
def test_random_model_generates_allowed_words_only(tmp_path: Path, seed: int) -> None:
    lm = _load(write_llama(tmp_path / "llama", seed=seed))
    tokenizer = llama_tokenizer()
    allowed = AllowedWords(ALLOWED, _encode(tokenizer), max_words=3)
    batch = [
        torch.tensor([tokenizer(text)["input_ids"]]) for text in ("a star:", "of blue, red:", "likes", "moon: moon:")
    ]
    width = max(ids.shape[1] for ids in batch)
    ids = torch.cat([torch.nn.functional.pad(row_ids, (0, width - row_ids.shape[1])) for row_ids in batch])
    mask = torch.cat(
        [torch.nn.functional.pad(torch.ones_like(row_ids), (0, width - row_ids.shape[1])) for row_ids in batch]
    )
    for max_tokens in (3, 60):
        answers = lm.decode(ids, mask, max_tokens=max_tokens, allowed=allowed)
        for row, answer in enumerate(answers):
            words = [word.strip() for word in tokenizer.decode(answer).split(",")]
            if max_tokens == 60:
                assert words == list(allowed.decode_words(answer))
            assert len(allowed.decode_words(answer)) <= 3
            assert set(allowed.decode_words(answer)) <= set(ALLOWED)
            assert (
                answer
                == lm.decode(
                    ids[row : row + 1, : int(mask[row].sum())],
                    mask[row : row + 1, : int(mask[row].sum())],
                    max_tokens=max_tokens,
                    allowed=allowed,
                )[0]
            )


def test_likeliest_allowed_words_are_generated(tmp_path: Path) -> None:
    lm, tokenizer = _load(write_llama(tmp_path / "llama")), llama_tokenizer()
    encode = _encode(tokenizer)
    allowed = AllowedWords(("red", "blue", "moon", "star"), encode, max_words=3)
    prompt = torch.tensor([encode("likes:")])
    answer = [*encode(" moon, red"), tokenizer.eos_token_id]
    # Each token has one successor, so no token may occur twice: two words have a single comma.
    _bias_logits(lm, dict(zip([int(prompt[0, -1]), *answer], answer, strict=False)))
    answers = lm.decode(prompt, torch.ones_like(prompt), max_tokens=20, allowed=allowed)
    assert allowed.decode_words(answers[0]) == ("moon", "red")


def test_answers_of_different_lengths_decode_in_one_batch(tmp_path: Path) -> None:
    lm, tokenizer = _load(write_llama(tmp_path / "llama")), llama_tokenizer()
    encode, end = _encode(tokenizer), tokenizer.eos_token_id
    allowed = AllowedWords(("red", "blue", "moon", "star"), encode, max_words=3)
    first, second = encode("likes:"), encode(" moon of")
    (moon,), (red,), (blue,), comma = encode(" moon"), encode(" red"), encode(" blue"), encode(",")[0]
    _bias_logits(lm, {first[-1]: moon, moon: end, second[-1]: red, red: comma, comma: blue, blue: end})
    width = max(len(first), len(second))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in (first, second)])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in (first, second)])
    answers = lm.decode(ids, mask, max_tokens=20, allowed=allowed)
    assert [allowed.decode_words(row) for row in answers] == [("moon",), ("red", "blue")]


def test_disallowed_words_are_never_generated_even_if_likeliest(tmp_path: Path) -> None:
    lm, tokenizer = _load(write_llama(tmp_path / "llama")), llama_tokenizer()
    encode = _encode(tokenizer)
    allowed = AllowedWords(("red", "blue"), encode, max_words=5)
    prompt = torch.tensor([encode("likes:")])
    colon, comma = int(prompt[0, -1]), encode(",")[0]
    (moon,), (red,) = encode(" moon"), encode(" red")
    _bias_logits(lm, {colon: moon, red: comma, comma: red})
    words = allowed.decode_words(lm.decode(prompt, torch.ones_like(prompt), max_tokens=20, allowed=allowed)[0])
    assert set(words) <= {"red", "blue"}
    assert len(set(words)) == len(words)
