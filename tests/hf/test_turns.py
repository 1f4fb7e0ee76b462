"""Conversations: each turn attends what was kept of the ones before, as it is stored."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tiny import batch, tiny_model
from transformers import DynamicCache, TextStreamer

import kvframe

SETTINGS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 5}
SPEC = {
    "protect.recent": 5,
    "protect.sink": 2,
    "allocator": "baselines.ada",
    "scorer": {"name": "baselines.snapkv", "window": 7},
    "budget.ratio": 3,
}


def converse(model, cache, turns):
    """Three prompts, each followed by an answer; all tokens `[B, T]`, and what `watch` saw after each turn."""
    history, mask, seen = None, None, []
    for prompt in turns:
        ids, valid = prompt["input_ids"], prompt["attention_mask"]
        history = ids if history is None else torch.cat([history, ids], 1)
        mask = valid if mask is None else torch.nn.functional.pad(mask, (0, history.shape[1] - mask.shape[1]), value=1)
        history = model.generate(history, attention_mask=mask, cache=cache, **SETTINGS)
        seen.append(cache)
        if hasattr(cache, "fork"):
            seen[-1] = cache.fork()
    return history, seen


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_with_everything_kept_three_turns_are_the_stock_ones(name):
    model = tiny_model(name)
    turns = [batch([40, 22], seed=1), batch([12, 12], seed=2), batch([25, 25], seed=3)]
    expected, _ = converse(model, DynamicCache(config=model.config), turns)
    cache = kvframe.load("identity", {"protect.recent": 5, "protect.sink": 2}).cache(model)
    assert torch.equal(converse(model, cache, turns)[0], expected)
    assert cache.report().tokens == tuple(n + 12 + 25 + 3 * 5 - 1 for n in (40, 22))


@pytest.mark.parametrize("encoder", ["dense", "int8"])
def test_what_was_kept_stays_as_it_is(llama, encoder):
    turns = [batch([60, 41], seed=1), batch([30, 30], seed=2), batch([30, 30], seed=3)]
    cache = kvframe.load("identity", {**SPEC, "encoder": encoder}).cache(llama)
    _, seen = converse(llama, cache, turns)
    for before, after in pairwise(seen):
        for mine, theirs in zip(before.compressed_layers, after.compressed_layers, strict=True):
            old, new = (layer.parts[-1].encoded for layer in (mine, theirs))
            for pair, (begin, end) in enumerate(zip(old.bounds, old.bounds[1:], strict=False)):
                first = new.bounds[pair]
                for key, codes in old.codes.items():
                    assert torch.equal(new.codes[key][first : first + end - begin], codes[begin:end])
        assert after.report().entry_ratio >= 3
        assert after.report().entries > before.report().entries
    assert seen[-1].report().compress_seconds > seen[0].report().compress_seconds


def test_tokens_are_streamed_as_they_come(llama):
    class Tokenizer:
        def decode(self, ids, **settings):
            return "".join(f"{int(token)} " for token in torch.as_tensor(ids).flatten())

    class Heard(TextStreamer):
        def __init__(self):
            super().__init__(Tokenizer(), skip_prompt=True)
            self.text = ""

        def on_finalized_text(self, text, stream_end=False):
            self.text += text

    inputs, pipeline, heard = batch([40]), kvframe.load("identity", SPEC), Heard()
    out = llama.generate(**inputs, cache=pipeline.cache(llama), streamer=heard, **SETTINGS)
    assert heard.text.split() == [str(int(token)) for token in out[0, 40:]]
    assert torch.equal(out, llama.generate(**inputs, cache=pipeline.cache(llama), **SETTINGS))
