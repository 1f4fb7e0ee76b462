"""Beam search, batches that are split or multiplied, and tokens that are taken back."""

from __future__ import annotations

import pytest
import torch
from tiny import MODELS, batch, greedy, row_of, tiny_model

import kvframe
from kvframe.errors import InputError

SMALL = {"protect.recent": 5, "protect.sink": 2}
TOP_K = {"allocator": "top_k", "budget.ratio": 2, "scorer": {"name": "baselines.snapkv", "window": 7}, **SMALL}
ADA = {**TOP_K, "allocator": "baselines.ada"}
PLAIN = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
WATCHED = {**TOP_K, "segmenter": "gracekv.curvature", "encoder": {"name": "baselines.kivi", "bits": 4}}


def prompted(pipeline, model, inputs):
    cache = pipeline.cache(model)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    model(**inputs, position_ids=positions, cache=cache)
    return cache


def steps(model, cache, inputs, tokens):
    """Logits of feeding `tokens [B, n]` one by one after the prompt `inputs`."""
    out = []
    for n in range(tokens.shape[1]):
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, n + 1), value=1)
        positions = mask.sum(1, keepdim=True) - 1
        out.append(model(tokens[:, n : n + 1], attention_mask=mask, position_ids=positions, cache=cache).logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("name", MODELS)
def test_beam_search_gives_the_stock_beams(name):
    model, inputs = tiny_model(name), batch([33, 18])
    settings = {**PLAIN, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 9}
    expected = model.generate(**inputs, **settings)
    cache = kvframe.load("identity", {**SMALL, "decode.flush": 4}).cache(model)
    assert torch.equal(model.generate(**inputs, cache=cache, **settings), expected)
    assert len(cache.report().tokens) == 6


@pytest.mark.parametrize("overrides", [TOP_K, {**ADA, "decode.flush": 4}, WATCHED], ids=["top_k", "flush", "watched"])
def test_picked_rows_go_on_as_if_alone(llama, overrides):
    inputs, pipeline = batch([41, 28, 23]), kvframe.load("identity", overrides)
    tokens = torch.arange(3 * 9).view(3, 9) % 40 + 3
    for compressed in (False, True):
        cache = prompted(pipeline, llama, inputs)
        if compressed:
            cache.compress()
        for rows in ([2, 0], torch.tensor([False, True, False])):
            picked = cache.select(rows)
            names = torch.arange(3)[rows].tolist()
            logits = steps(llama, picked, {k: v[names] for k, v in inputs.items()}, tokens[names])
            reports = []
            for at, row in enumerate(names):
                one = row_of(inputs, row)
                alone = prompted(pipeline, llama, one)
                expected = steps(llama, alone, one, tokens[row : row + 1])
                assert torch.allclose(logits[at : at + 1], expected, atol=2e-5)
                reports.append(alone.report())
            report = picked.report()
            assert report.tokens == tuple(r.tokens[0] for r in reports)
            if len(names) == 1:
                assert report.entry_ratio == pytest.approx(reports[0].entry_ratio)
        assert cache.report().tokens == (41, 28, 23)


def test_rows_are_multiplied(llama):
    inputs, pipeline = batch([30, 22]), kvframe.load("identity", ADA)
    cache = prompted(pipeline, llama, inputs)
    cache.compress()
    cache.batch_repeat_interleave(2)
    twice = {k: v.repeat_interleave(2, 0) for k, v in inputs.items()}
    tokens = torch.tensor([[5, 6], [5, 6], [7, 8], [7, 8]])
    logits = steps(llama, cache, twice, tokens)
    assert torch.equal(logits[0], logits[1])
    alone = steps(llama, prompted(pipeline, llama, row_of(inputs, 1)), row_of(inputs, 1), tokens[2:3])
    assert torch.allclose(logits[3:], alone, atol=2e-5)


def test_lengths_given_by_row_follow_their_rows(llama):
    inputs = batch([41, 30])
    pipeline = kvframe.load("identity", TOP_K)
    cache = pipeline.cache(llama, suffix_length=[9, 4])
    llama(**inputs, cache=cache)
    cache.batch_select_indices(torch.tensor([1]))
    cache.compress()
    alone = pipeline.cache(llama, suffix_length=4)
    llama(**row_of(inputs, 1), cache=alone)
    alone.compress()
    assert cache.report().entries == alone.report().entries


@pytest.mark.parametrize("rows", [[], [0, 2], [-1]])
def test_rows_that_are_not_there(llama, rows):
    cache = prompted(kvframe.load("identity", TOP_K), llama, batch([20, 20]))
    with pytest.raises(InputError, match="rows of a cache of 2 are 0 to 1"):
        cache.batch_select_indices(torch.tensor(rows, dtype=torch.int64))
    assert cache.report().tokens == (20, 20)
    for wrong in (torch.tensor([0.5]), torch.tensor([True])):
        with pytest.raises(InputError, match="by number, or by a mask of 2"):
            cache.select(wrong)


@pytest.mark.parametrize("overrides", [TOP_K, {**ADA, "decode.flush": 4}, WATCHED], ids=["top_k", "flush", "watched"])
def test_tokens_taken_back_were_never_there(llama, overrides):
    inputs, pipeline = batch([41, 28]), kvframe.load("identity", overrides)
    tokens, drafts = torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.tensor([[11, 12, 13, 14], [15, 16, 17, 18]])
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 4), value=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    for compressed in (False, True):
        expected, cache = prompted(pipeline, llama, inputs), pipeline.cache(llama)
        if compressed:
            cache = prompted(pipeline, llama, inputs)
            expected.compress()
            cache.compress()
            llama(drafts, attention_mask=mask, position_ids=positions[:, -4:], cache=cache)
        else:
            drafted = torch.cat([inputs["input_ids"], drafts], 1)
            llama(drafted, attention_mask=mask, position_ids=positions, cache=cache)
        cache.crop(-4)
        assert cache.report().tokens == expected.report().tokens == (41, 28)
        logits = steps(llama, cache, inputs, tokens)
        assert torch.allclose(logits, steps(llama, expected, inputs, tokens), atol=2e-5)
        assert cache.report().entries == expected.report().entries


def test_a_fork_keeps_what_its_source_takes_back(llama):
    cache = prompted(kvframe.load("identity", TOP_K), llama, batch([30]))
    kept = cache.fork()
    before = kept.compressed_layers[0].recent.keys.clone()
    cache.crop(-6)
    llama(torch.full((1, 6), 5), cache=cache)
    assert torch.equal(kept.compressed_layers[0].recent.keys, before)


def test_compressed_tokens_cannot_be_taken_back(llama):
    cache = prompted(kvframe.load("identity", TOP_K), llama, batch([40]))
    cache.compress()
    with pytest.raises(InputError, match="last 5 tokens, which are held exactly, but 6"):
        cache.crop(-6)
    with pytest.raises(InputError, match="as a negative one, but 3 came"):
        cache.crop(3)
    assert cache.get_seq_length() == 40


def test_drafts_that_are_checked_give_the_stock_tokens(llama):
    inputs = batch([40])
    inputs["input_ids"][:, 20:] = inputs["input_ids"][:, :20]  # something to look up
    settings = {**PLAIN, "max_new_tokens": 24, "prompt_lookup_num_tokens": 4}
    cache = kvframe.load("identity", {**SMALL, "decode.flush": 6}).cache(llama)
    expected = greedy(llama, inputs, new=24)
    assert torch.equal(llama.generate(**inputs, cache=cache, **settings)[:, 40:], expected)
    assert cache.report().entry_ratio == 1
    assert cache.compressed_layers[0].parts
    small = kvframe.load("identity", {**TOP_K, "budget.ratio": 4, "decode.flush": 6}).cache(llama)
    llama.generate(**inputs, cache=small, **settings)
    assert small.report().entry_ratio >= 4
    assert small.compressed_layers[0].recent.length <= 5 + 6 + 5


def test_sliding_layers_take_back_what_they_kept():
    model, inputs = tiny_model("gemma3"), batch([40])
    for kept in (False, True):
        cache = prompted(kvframe.load("identity", SMALL), model, inputs)
        if kept:
            cache.activate_past_recording()
        expected = steps(model, cache.fork(), inputs, torch.tensor([[5, 6]]))
        steps(model, cache, inputs, torch.tensor([[5, 6]]))
        lengths = [layer.get_seq_length() for layer in cache.layers]
        if not kept:
            with pytest.raises(InputError, match="activate_past_recording"):
                cache.crop(-2)
            assert [layer.get_seq_length() for layer in cache.layers] == lengths
        else:
            cache.crop(-2)
            assert torch.allclose(steps(model, cache, inputs, torch.tensor([[5, 6]])), expected, atol=2e-5)
