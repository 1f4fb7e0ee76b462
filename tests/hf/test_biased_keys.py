"""Models that add large constants to their keys, as Qwen2.5 does: coded as well as models without, and through all
that a cache can be put through."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, greedy, tiny_model
from transformers import DynamicCache

import kvframe
from kvframe.builtin.encoders import Int8
from kvframe.types import Encoded

CODED = {
    "int8": {"protect.recent": 8},
    "int4": {"protect.recent": 8},
    "rotation": {"protect.recent": 8, "encoder.bits": 4},
    "kivi": {"protect.recent": 8, "encoder.bits": 4},
}
PER_ROW = ["int8", "int4", "rotation"]


def biased_model(bias):
    """Queries hardly look at the channels that the bias is in, as trained ones do."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            heads = attention.k_proj.bias.zero_().view(2, 16)
            heads[:, 15], heads[:, 7], heads[:, 14] = bias, -0.7 * bias, 0.5 * bias
            attention.q_proj.bias.zero_()
            attention.q_proj.weight.view(4, 16, 64)[:, [6, 7, 14, 15]] *= 1e-3
    return model


@torch.no_grad()
def distance(model, name):
    """How far the next token's distribution is from that of a full cache, in nats."""
    inputs = batch([150, 90])

    def after(cache):
        model(**inputs, cache=cache)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        logits = model(inputs["input_ids"][:, -1:], attention_mask=mask, cache=cache).logits
        return logits[:, -1].log_softmax(-1)

    full, got = after(DynamicCache(config=model.config)), after(kvframe.load(name, CODED[name]).cache(model))
    return float((full.exp() * (full - got)).sum(-1).mean())


@pytest.mark.parametrize("name", CODED)
def test_a_model_with_biases_is_coded_as_well_as_one_without(name):
    plain, biased = (distance(biased_model(bias), name) for bias in (0, 300))
    assert biased <= 1.5 * plain


def test_eight_bits_are_nearly_lossless():
    assert distance(biased_model(300), "int8") < 1e-3


@pytest.mark.parametrize("name", PER_ROW)
def test_only_models_with_a_bias_pay_for_positions(name):
    parts, bits = [], []
    for bias in (0, 300):
        model = biased_model(bias)
        pipeline = kvframe.load(name, CODED[name])
        cache = pipeline.cache(model)
        greedy(model, batch([60]), cache, new=2)
        parts.append(cache.compressed_layers[0].parts[-1])
        bits.append(pipeline.entry_bits(cache.info, 4))
    assert parts[0].encoded.positions is None
    assert parts[0].state == ()
    assert parts[1].encoded.positions is not None
    assert bits[1] == bits[0] + 32
    assert {n: t.shape for n, t in parts[0].encoded.codes.items()} == {
        n: t.shape for n, t in parts[1].encoded.codes.items()
    }


@pytest.mark.parametrize("name", PER_ROW)
def test_caches_of_biased_models_can_be_saved_forked_picked_from_and_flushed(name, tmp_path):
    model, inputs = biased_model(300), batch([70, 55])
    cache = kvframe.load(name, {**CODED[name], "decode.flush": 5}).cache(model)
    more = torch.arange(8)[None].expand(2, 8)

    @torch.no_grad()
    def steps(cache, tokens):
        out = []
        for column in tokens.T:
            mask = torch.ones(len(tokens), cache.get_seq_length() + 1, dtype=torch.long)
            mask[: len(tokens), :70] = inputs["attention_mask"][: len(tokens)]
            out.append(model(column[:, None], attention_mask=mask, cache=cache).logits)
        return torch.cat(out, 1)

    with torch.no_grad():
        model(**inputs, cache=cache)
    steps(cache, more)
    cache.save(tmp_path / "cache.safetensors")
    caches = [cache.fork(), kvframe.load_cache(tmp_path / "cache.safetensors", model), cache.to("cpu")]
    alone = cache.select([0])
    found = [steps(each, more) for each in caches]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.allclose(steps(alone, more[:1]), found[0][:1], atol=1e-3)
    assert len(cache.compressed_layers[0].parts) <= 2


def test_codes_are_attended_as_they_decode_by_every_kernel():
    model = biased_model(300)
    inputs = batch([100])
    found = {}
    for kernel in ("reference", "sdpa", "cpu", "auto"):
        cache = kvframe.load("int8", {"protect.recent": 8, "attention": kernel}).cache(model)
        found[kernel] = greedy(model, inputs, cache, new=6)
        part = cache.compressed_layers[0].parts[-1]
        query = torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(0))
        found[kernel] = cache.kernel.attend(query, part, 0.25)
    for kernel in ("sdpa", "cpu", "auto"):
        for mine, theirs in zip(found[kernel], found["reference"], strict=True):
            assert torch.allclose(mine, theirs, atol=1e-3, rtol=1e-3)


def test_codes_made_before_biases_were_known_still_decode():
    """A file that an earlier version wrote has codes without positions, and no state."""
    encoder, rows = Int8(), torch.randn(6, 8)
    codes = {"keys": rows.to(torch.int8), "values": rows.to(torch.int8)}
    codes |= {f"{name}_scale": torch.ones(6, 1, dtype=torch.bfloat16) for name in ("keys", "values")}
    back = encoder.decode(Encoded(torch.tensor([0, 2, 6]), codes, "int8", torch.float32), ())
    assert torch.equal(back.keys, codes["keys"].float())
