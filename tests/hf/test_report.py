"""What a report says was asked for, what is held, and why the two differ."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, tiny_model

import kvframe
from kvframe.plain import held_tensors
from kvframe.report import size_text
from kvframe.types import storage_bytes

SMALL = {"protect.recent": 5, "protect.sink": 2}
AATC = {"name": "aatc.transform", "calibration": "prompt", "joint_heads": "all"}


def compressed(model, overrides, lengths=(200,), spec="identity"):
    cache, inputs = kvframe.load(spec, {**SMALL, **overrides}).cache(model), batch(list(lengths))
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    model(**inputs, position_ids=positions, cache=cache)
    cache.compress()
    return cache


@pytest.mark.parametrize(
    ("budget", "asked"),
    [
        ({"ratio": 4}, "in entries (asked 4.00), "),
        ({"entries": 20}, "in entries (asked 20 a head), "),
        ({"ratio": 8, "of": "bytes"}, "in bytes (asked 8)"),
        ({"bytes": "64KiB"}, "in bytes (asked 64.0KiB)"),
    ],
    ids=str,
)
def test_it_says_what_the_spec_asked_for(llama, budget, asked):
    """Before there is a prompt, for one that is whole, for one that is compressed."""
    overrides = {"allocator": "top_k", "budget": budget}
    assert asked in str(kvframe.load("identity", {**SMALL, **overrides}).cache(llama).report())
    for length in (3, 41, 200):
        report = compressed(llama, overrides, [length]).report()
        assert asked in str(report)
        assert str(report).count("asked") == 1
    if budget == {"ratio": 4}:
        assert report.requested_ratio == pytest.approx(4, rel=0.01)
        assert compressed(llama, overrides, [3]).report().requested_ratio == 4


@pytest.mark.parametrize(
    ("overrides", "all_bought"),
    [
        ({"allocator": "top_k", "encoder": "int8", "budget": {"ratio": 2, "of": "bytes"}}, True),
        ({"allocator": "top_k", "encoder": "int8", "budget": {"ratio": 6, "of": "bytes"}}, False),
        ({"allocator": "graded", "encoder": {**AATC, "offers": [1, 2]}, "budget": {"ratio": 2, "of": "bytes"}}, True),
        ({"allocator": "graded", "encoder": {**AATC, "offers": [1, 2]}, "budget": {"ratio": 16, "of": "bytes"}}, False),
        ({"allocator": "top_k", "budget": {"ratio": 1}}, False),
        ({"allocator": "top_k", "budget": {"entries": 999}}, True),
    ],
    ids=str,
)
def test_a_budget_that_nothing_is_left_to_spend_on_says_so(overrides, all_bought):
    model = tiny_model("llama", max_position_embeddings=2048)
    cache = compressed(model, overrides, [900, 700])
    said = (
        "2 of 2 rows (900, 700 tokens) are smaller than the budget: all of it is kept, as finely as the encoder codes"
    )
    assert (said in cache.report().notes) == all_bought
    held = sum(int(part.encoded.offsets[-1]) for layer in cache.compressed_layers for part in layer.parts)
    assert (held == 3 * 2 * (1600 - 10)) == (all_bought or overrides["budget"] == {"ratio": 1})


@pytest.mark.parametrize(
    ("budget", "allowed"),
    [
        ({"ratio": 8, "of": "bytes"}, 3 * 2 * 2 * 16 * 4 * 240 // 8),
        ({"bytes": "8KiB"}, 2 * 8192),
        ({"bytes": "1GiB"}, 0),
        ({"ratio": 8}, 0),
    ],
    ids=str,
)
def test_a_budget_of_bytes_says_what_it_does_not_pay_for(llama, caplog, budget, allowed):
    """What an encoder learned from the prompt is no entry's: the figures are those of the tensors held. Nothing is said
    where that is a small part of the budget, or where entries are counted."""
    encoder = {**AATC, "joint_heads": 1}
    cache = compressed(llama, {"allocator": "top_k", "encoder": encoder, "budget": budget}, [150, 90])
    report = cache.report()
    learned = storage_bytes(list(held_tensors(cache.states)))
    assert report.bytes_by_part["learned"] == learned > 0
    said = (
        f"the budget of {size_text(allowed)} does not pay for what the encoder learned from this prompt, "
        f"{size_text(learned)}: {size_text(report.bytes)} are held, and {size_text(report.full_bytes)} would be the "
        "full cache; what is learned from a text (kvframe calibrate) is shared by all caches"
    )
    logged = [r.getMessage() for r in caplog.records if "does not pay for" in r.getMessage()]
    assert [note for note in report.notes if "does not pay for" in note] == ([said] if allowed else [])
    assert logged == ([f"T{said[1:]}."] if allowed else [])
    if allowed:
        # So it is: what is held of the context is more than was asked for.
        assert report.bytes_by_part["compressed"] + report.bytes_by_part["recent"] + learned > allowed
    # Later turns have nothing to add to it.
    later, places = batch([30, 30])["input_ids"], torch.arange(30) + torch.tensor([[150], [90]])
    llama(input_ids=later, position_ids=places, cache=cache)
    cache.compress()
    assert [note for note in cache.report().notes if "does not pay for" in note] == ([said] if allowed else [])
