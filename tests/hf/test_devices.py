"""Caches that are moved."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, tiny_model

import kvframe
from kvframe.testing.checks.pipeline import held_tensors

FITTED = {"name": "aatc.transform", "calibration": "prompt", "joint_heads": 1, "key_bits": 4}
SPEC = {
    "protect.recent": 5,
    "protect.sink": 2,
    "segmenter": "gracekv.curvature",
    "scorer": {"name": "baselines.snapkv", "window": 7},
    "allocator": "baselines.ada",
    "budget.ratio": 2,
    "decode.flush": 4,
}


def compressed(model, encoder):
    cache = kvframe.load("identity", {**SPEC, "encoder": encoder}).cache(model)
    model(**batch([70]), cache=cache)
    cache.compress()
    return cache


@pytest.mark.parametrize("encoder", ["dense", "int8", FITTED], ids=["dense", "int8", "fitted"])
def test_everything_moves(encoder):
    model = tiny_model("gemma3")
    cache = compressed(model, encoder)
    before = [tensor.device.type for tensor in held_tensors(cache)]
    assert set(before) == {"cpu"}
    model.to("meta")
    assert cache.to("meta") is cache
    moved = [tensor.device.type for tensor in held_tensors({**vars(cache), "layers": cache.compressed_layers})]
    assert set(moved) == {"meta"}
    assert all(layer.keys.device.type == "meta" for layer in cache.layers if getattr(layer, "keys", None) is not None)
    if isinstance(encoder, dict):
        coded = [layer.parts[-1].state for layer in cache.compressed_layers]
        assert all(mine is theirs for mine, theirs in zip(coded, cache.states, strict=True))


@pytest.mark.parametrize("encoder", ["dense", FITTED], ids=["dense", "fitted"])
def test_a_moved_cache_goes_on(llama, encoder):
    cache = compressed(llama, encoder)
    other = cache.fork().to("cpu")
    for token in range(5, 14):
        step = torch.tensor([[token]])
        assert torch.equal(llama(step, cache=other).logits, llama(step, cache=cache).logits)
