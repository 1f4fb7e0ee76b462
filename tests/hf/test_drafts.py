"""Assisted decoding gives the answer of plain decoding, however many drafts there are and whatever is compressed."""

from __future__ import annotations

import pytest
import torch
from curious import curious_pipeline
from tiny import batch, tiny_model

import kvframe
from kvframe.errors import InputError
from kvframe.hf.drafts import Drafts
from kvframe.spec import Decode

SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SMALL = {"budget.ratio": 4, "protect.recent": 6, "protect.sink": 2}
RANDOM = batch([96])["input_ids"]
REPEATED = batch([12])["input_ids"].repeat(1, 8)
SPECS = {
    "identity": ("identity", {}),
    "streamingllm": ("streamingllm", SMALL),
    "snapkv": ("snapkv", SMALL),
    "gracekv": ("gracekv", SMALL),
    "forest": ("forest", SMALL),
    "flushing": ("snapkv", SMALL | {"decode.flush": 5}),
    "coded": ("kivi", {"protect.recent": 6, "decode.flush": 7}),
}


def answer(model, prompt, cache, new=30, **more):
    return model.generate(prompt, cache=cache, max_new_tokens=new, **SETTINGS, **more)[0, prompt.shape[1] :].tolist()


def helper(drafts):
    """A model that drafts as the full cache would, which is right at first, and then not."""
    twin = tiny_model("llama")
    twin.generation_config.num_assistant_tokens = drafts
    twin.generation_config.num_assistant_tokens_schedule = "constant"
    twin.generation_config.assistant_confidence_threshold = 0.0
    return twin


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("spec", SPECS)
def test_an_assisted_answer_is_the_plain_one(spec, name):
    model, pipeline = tiny_model(name), kvframe.load(*SPECS[spec])
    for prompt in (RANDOM, REPEATED):
        plain_cache = pipeline.cache(model)
        plain = answer(model, prompt, plain_cache)
        for more in (
            {"assistant_model": helper(6)},
            {"prompt_lookup_num_tokens": 1},
            {"prompt_lookup_num_tokens": 80},
        ):
            cache = pipeline.cache(model)
            assert answer(model, prompt, cache, **more) == plain
            assert cache.report().tokens == plain_cache.report().tokens
            assert cache.report().entries == plain_cache.report().entries


@pytest.mark.parametrize("flush", [None, 4])
def test_what_is_watched_of_drafts_is_that_of_tokens(flush):
    model, pipeline = tiny_model("llama"), curious_pipeline(decode=Decode(flush=flush))
    plain, cache = pipeline.cache(model), pipeline.cache(model)
    expected = answer(model, REPEATED, plain)
    assert answer(model, REPEATED, cache, prompt_lookup_num_tokens=70) == expected
    for mine, theirs in zip(cache.watch.tails(), plain.watch.tails(), strict=True):
        assert torch.allclose(mine.tensor(1), theirs.tensor(1), atol=1e-4)
    if flush:
        for mine, theirs in zip(cache.compressed_layers, plain.compressed_layers, strict=True):
            assert torch.allclose(mine.queries.tensor(3), theirs.queries.tensor(3), atol=1e-4)
            assert torch.allclose(mine.outputs.tensor(3), theirs.outputs.tensor(3), atol=1e-4)


@pytest.mark.parametrize("first", [{"prompt_lookup_num_tokens": 9}, {}])
@pytest.mark.parametrize("then", [{"prompt_lookup_num_tokens": 9}, {}])
def test_a_second_turn_is_a_prompt_again(first, then):
    model, pipeline = tiny_model("llama"), kvframe.load("snapkv", SMALL)
    caches, prompt = [pipeline.cache(model), pipeline.cache(model)], REPEATED
    for more in (first, then):
        said = [answer(model, prompt, cache, **options) for cache, options in zip(caches, ({}, more), strict=True)]
        assert said[0] == said[1]
        assert caches[0].report().tokens == caches[1].report().tokens
        prompt = torch.cat([prompt, torch.tensor([said[0]]), RANDOM[:, :40]], 1)
    assert caches[0].report().entries == caches[1].report().entries


@pytest.mark.parametrize("read", [95, 60])
def test_a_prompt_that_was_read_before_is_not_read_again(read):
    model, pipeline = tiny_model("llama"), kvframe.load("snapkv", SMALL)
    said = []
    for more in ({}, {"prompt_lookup_num_tokens": 9}):
        cache = pipeline.cache(model)
        model(REPEATED[:, :read], cache=cache)
        said.append(answer(model, REPEATED, cache, **more))
        assert cache.report().tokens == (96 + 29,)
    assert said[0] == said[1]


def test_logits_are_those_of_the_pieces():
    model, pipeline = tiny_model("llama"), kvframe.load("snapkv", SMALL)
    cache, other = pipeline.cache(model), pipeline.cache(model)
    cache.activate_past_recording()
    drafts = torch.tensor([[5, 6, 7]])
    mask = torch.ones(1, 99, dtype=torch.long)
    out = model(torch.cat([RANDOM, drafts], 1), attention_mask=mask, cache=cache, logits_to_keep=4,
                output_hidden_states=True)  # fmt: skip
    wanted = [model(RANDOM, cache=other, logits_to_keep=1).logits]
    wanted += [model(drafts[:, n : n + 1], cache=other).logits for n in range(3)]
    assert torch.allclose(out.logits, torch.cat(wanted, 1), atol=1e-4)
    assert [states.shape[1] for states in out.hidden_states] == [99] * 4
    cache.crop(-2)
    other.crop(-2)
    again = [model(torch.tensor([[9]]), cache=each).logits for each in (cache, other)]
    assert torch.allclose(*again, atol=1e-4)


def test_a_call_with_drafts_that_fails_leaves_the_cache_as_it_was():
    model, pipeline = tiny_model("llama"), kvframe.load("snapkv", SMALL)
    expected = answer(model, REPEATED, pipeline.cache(model))
    cache, calls = pipeline.cache(model), []

    def failing(module, args, kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("full")

    handle = model.model.layers[1].register_forward_pre_hook(failing, with_kwargs=True)
    with pytest.raises(MemoryError):
        answer(model, REPEATED, cache, prompt_lookup_num_tokens=9)
    handle.remove()
    assert len(calls) == 2
    assert cache.report().tokens == ()
    assert answer(model, REPEATED, cache, prompt_lookup_num_tokens=9) == expected


def test_a_prompt_of_four_dimensions_cannot_come_with_drafts():
    model = tiny_model("llama")
    cache = kvframe.load("snapkv", SMALL).cache(model)
    cache.activate_past_recording()
    with pytest.raises(InputError, match="takes an attention_mask"):
        model(RANDOM, attention_mask=torch.ones(1, 1, 96, 96, dtype=torch.bool).tril(), cache=cache, logits_to_keep=3)
    assert cache.report().tokens == ()


def test_nothing_stands_on_the_model_when_the_cache_is_gone():
    model = tiny_model("llama")
    cache = kvframe.load("snapkv", SMALL).cache(model)
    answer(model, REPEATED, cache, prompt_lookup_num_tokens=9)
    assert isinstance(cache.announced, Drafts)
    del cache
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
