"""Attention weights are given, or the call that asks for them is refused and has changed nothing."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, tiny_model

import kvframe
from kvframe.errors import InputError

NAMES = ["llama", "gemma3"]


def started(name, implementation="eager", **settings):
    model = tiny_model(name)
    model.set_attn_implementation(implementation)
    cache = kvframe.load("snapkv", {"budget.ratio": 2, "protect.recent": 4, **settings}).cache(model)
    return model, cache


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_weights_of_a_prompt_are_the_models_own(name):
    model, cache = started(name)
    inputs = batch([40, 33])
    own = model(**inputs, output_attentions=True).attentions
    found = model(**inputs, cache=cache, output_attentions=True).attentions
    assert len(found) == len(own) == 3
    for mine, theirs in zip(found, own, strict=True):
        assert torch.equal(mine, theirs)


def state(cache):
    return [
        (layer.get_seq_length(), layer.parts, layer.recent.keys.clone())
        if hasattr(layer, "parts")
        else (layer.get_seq_length(), None, layer.keys.clone())
        for layer in cache.layers
    ]


def unchanged(before, after):
    return all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compressed", [False, True])
@torch.no_grad()
def test_a_step_that_has_none_is_refused_and_changes_nothing(name, compressed):
    model, cache = started(name)
    token, step = torch.tensor([[5]]), {"cache": cache, "use_cache": True}
    model(**batch([40]), cache=cache)
    if compressed:
        model(token, **step)
    before = state(cache)
    with pytest.raises(InputError, match="cannot be had over a compressed cache"):
        model(token, output_attentions=True, **step)
    assert unchanged(before, state(cache))
    assert model(token, output_attentions=False, **step).logits.isfinite().all()


@torch.no_grad()
def test_the_configuration_asks_too():
    model, cache = started("llama")
    model.config._output_attentions = True
    inputs = batch([40])
    assert len(model(**inputs, cache=cache).attentions) == 3
    with pytest.raises(InputError, match="output_attentions"):
        model(torch.tensor([[5]]), cache=cache)


@torch.no_grad()
def test_an_implementation_without_weights_is_refused():
    model, cache = started("llama", "sdpa")
    with pytest.raises(InputError, match=r"'eager' alone; call model.set_attn_implementation"):
        model(**batch([40]), cache=cache, output_attentions=True)
    assert cache.get_seq_length() == 0
    assert model(**batch([40]), cache=cache).logits.isfinite().all()


@pytest.mark.parametrize("flush", ["prefill.flush", "decode.flush"])
@torch.no_grad()
def test_nothing_is_compressed_in_blocks_before_a_refusal(flush):
    model, cache = started("llama", **{flush: 8})
    model(**batch([40]), cache=cache)
    before = state(cache)
    with pytest.raises(InputError, match="output_attentions"):
        model(batch([24])["input_ids"], cache=cache, output_attentions=True)
    assert unchanged(before, state(cache))


def test_generating_with_weights_says_why_not():
    model, cache = started("llama")
    with pytest.raises(InputError, match="compressed cache"):
        model.generate(
            **batch([40]), cache=cache, max_new_tokens=3, do_sample=False, pad_token_id=0,
            output_attentions=True, return_dict_in_generate=True,
        )  # fmt: skip
