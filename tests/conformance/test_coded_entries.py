"""Entries that stand for several tokens, and differ in number from head to head, can be coded head by head."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, tiny_model

import kvframe
from kvframe.errors import SpecError
from kvframe.registry import registry

MERGING = {"protect.sink": 0, "protect.recent": 5, "budget.ratio": 3}
HEADS_APART = {"name": "aatc.transform", "calibration": "prompt", "joint_heads": 1, "key_bits": 4, "value_bits": 4}


def test_merged_entries_of_each_head_are_coded():
    if "aatc.transform" not in registry().stages["encoder"]:
        pytest.fail("the encoder of this distribution is missing")
    model = tiny_model("llama")
    inputs, settings = batch([60, 44]), {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    caches = []
    for encoder in ("dense", HEADS_APART):
        cache = kvframe.load("gracekv", {**MERGING, "encoder": encoder}).cache(model, suffix_length=4)
        model.generate(**inputs, cache=cache, pad_token_id=0, **settings)
        caches.append(cache)
    plain, coded = caches
    merged = 0
    for one, other in zip(plain.compressed_layers, coded.compressed_layers, strict=True):
        exact, rebuilt = one.parts[-1].decode(), other.parts[-1].decode()
        assert torch.equal(rebuilt.offsets, exact.offsets)
        assert torch.equal(rebuilt.log_multiplicity, exact.log_multiplicity)
        assert float((rebuilt.keys - exact.keys).norm() / exact.keys.norm()) < 0.5
        merged += int((exact.log_multiplicity > 0).sum())
    assert merged > 0
    assert coded.report().bytes_by_part["compressed"] < plain.report().bytes_by_part["compressed"]


@pytest.mark.parametrize("name", ["gracekv", "gracekv-paper"])
def test_heads_that_differ_are_not_coded_together(name):
    with pytest.raises(SpecError, match=r"joint_heads: 1"):
        kvframe.load(name, {**MERGING, "encoder": "aatc.transform"})
