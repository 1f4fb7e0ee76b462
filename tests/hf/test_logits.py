"""Models that cap their attention's logits (Gemma 2) or let a sink share in the softmax (gpt-oss)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from tiny import batch, greedy, observation, row_of, tiny_model
from transformers import DynamicCache

import kvframe
from kvframe.budget import split_regions
from kvframe.builtin.kernels import Auto, Reference
from kvframe.errors import ModelError
from kvframe.execute import execute
from kvframe.hf.finding import attention_modules
from kvframe.hf.info import model_info
from kvframe.pipeline import Pipeline, exact_part
from kvframe.spec import Protect
from kvframe.split import QUERIES, attention_error
from kvframe.stages import Kernel
from kvframe.testing.numerics import FP32, logits_tolerance
from kvframe.types import LayerPlan

NAMES = ("gemma2", "gpt_oss")
SMALL = {"protect.recent": 5, "protect.sink": 2}
SNAP = {"scorer": {"name": "baselines.snapkv", "window": 7}, "allocator": "top_k", "budget.ratio": 2, **SMALL}
KIVI = {"encoder": {"name": "baselines.kivi"}, **SMALL}
# Bits of four, so that little is lost.
AATC = {"encoder.calibration": "prompt", "encoder.key_bits": 4, "encoder.value_bits": 4, **SMALL}
SPECS = {
    "snapkv": ("identity", SNAP),
    "expected": ("identity", {**SNAP, "scorer": "baselines.expected_attention"}),
    "h2o": ("identity", {**SNAP, "scorer": "baselines.h2o", "allocator": "baselines.ada"}),
    "gracekv": ("gracekv", {"budget.ratio": 2, **SMALL}),
    "centroidkv": ("centroidkv", {"budget.ratio": 2, **SMALL}),
    "int8": ("identity", {"encoder": "int8", **SMALL}),
    "kivi": ("identity", KIVI),
}


def read(model, inputs, cache, count=1):
    """The logits of the last `count` columns, read after all others, which a kvframe cache compresses first."""
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    model(**{k: v[:, :-count] for k, v in inputs.items()}, position_ids=positions[:, :-count], cache=cache)
    if not isinstance(cache, DynamicCache):
        cache.compress()
        assert all(layer.parts for layer in cache.compressed_layers)
    last = {"input_ids": inputs["input_ids"][:, -count:], "attention_mask": inputs["attention_mask"]}
    return model(**last, position_ids=positions[:, -count:], cache=cache).logits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_identity_follows_the_stock_answer(name, dtype):
    model, inputs = tiny_model(name).to(dtype), batch([40, 27, 9])
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    stock = model.generate(**inputs, **settings, output_logits=True, return_dict_in_generate=True)
    cache = kvframe.load("identity", SMALL).cache(model)
    mask, ids = inputs["attention_mask"], inputs["input_ids"]
    for step, wanted in enumerate(stock.logits):
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        got = model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits[:, -1]
        # Both round every activation to the dtype: a few units in the last place of the largest logit.
        assert float((got - wanted).abs().max()) <= 16 * torch.finfo(dtype).eps * float(wanted.abs().max()), step
        ids = stock.sequences[:, 40 + step, None]
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    assert all(layer.parts for layer in cache.compressed_layers)
    if dtype == torch.float32:
        assert torch.equal(greedy(model, inputs, kvframe.load("identity", SMALL).cache(model)), stock.sequences[:, 40:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernel", ["auto", "sdpa", "reference"])
@pytest.mark.parametrize("count", [1, 7])
def test_at_ratio_one_the_logits_are_those_of_the_full_cache(name, kernel, count):
    model, inputs = tiny_model(name), batch([80, 53])
    wanted = read(model, inputs, DynamicCache(config=model.config), count)
    got = read(model, inputs, kvframe.load("identity", {**SMALL, "attention": kernel}).cache(model), count)
    limit = logits_tolerance(wanted, 3, 64, 80)
    assert float((got - wanted).abs().max()) <= limit
    # Neither is a rounding: without caps and sinks the model says something else.
    plain = tiny_model(name, attn_logit_softcapping=None) if name == "gemma2" else tiny_model(name)
    for module in attention_modules(plain):
        if name == "gpt_oss":
            module.sinks.data.fill_(-torch.inf)
    without = read(plain, inputs, DynamicCache(config=plain.config), count)
    assert float((without - wanted).abs().max()) > 100 * limit


@pytest.mark.parametrize("name", NAMES)
def test_many_tokens_are_attended_in_code_space(name):
    """Enough of them that `auto` attends them where they lie: 15 bits a channel lose next to nothing."""
    model, inputs = tiny_model(name), batch([220, 150])
    wanted = read(model, inputs, DynamicCache(config=model.config))
    wide = {"encoder.key_bits": 15, "encoder.value_bits": 15, "encoder.key_shift": 0, "encoder.value_code": "max"}
    for rope in ("pre", "post"):
        cache = kvframe.load("aatc", {**AATC, **wide, "encoder.rope": rope}).cache(model)
        # A code's step is 2 ** -14 of the largest value of its channel.
        assert float((read(model, inputs, cache) - wanted).abs().max()) <= 2**-10 * float(wanted.abs().max()), rope


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_row_is_the_same_alone_and_in_a_padded_batch(name, spec):
    model, inputs = tiny_model(name), batch([71, 58, 43])
    pipeline = kvframe.load(*SPECS[spec])
    together = greedy(model, inputs, pipeline.cache(model))
    for row in range(3):
        assert torch.equal(greedy(model, row_of(inputs, row), pipeline.cache(model))[0], together[row])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", ["aatc", "aatc-codespace"])
def test_padding_changes_nothing_of_what_a_transform_learns(name, spec):
    """A transform that is fitted on the prompt is the whole batch's, so a row is a batch of its own here."""
    model, inputs = tiny_model(name), row_of(batch([70]), 0)
    padded = {k: torch.nn.functional.pad(v, (13, 0)) for k, v in inputs.items()}
    pipeline = kvframe.load(spec, AATC)
    assert torch.equal(greedy(model, padded, pipeline.cache(model)), greedy(model, inputs, pipeline.cache(model)))


@pytest.mark.parametrize("name", NAMES)
def test_stages_are_told(name):
    model = tiny_model(name)
    info = model_info(model)
    assert info.softcap == (2.0 if name == "gemma2" else None)
    for layer, module in enumerate(m for m in attention_modules(model) if m.layer_idx in info.layer_ids):
        if name == "gpt_oss":
            assert torch.equal(info.sinks(layer), module.sinks)
            half = model_info(tiny_model(name).bfloat16()).sinks(layer)
            assert half.dtype == torch.float32
        else:
            assert info.sinks(layer) is None
    plain = model_info(tiny_model("llama"))
    assert (plain.softcap, plain.sinks(0)) == (None, None)


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_attention_that_the_model_gives(name):
    """TOVA's score is the last token's attention, meant over heads; the model itself says what that is."""
    model, inputs = tiny_model(name), batch([40])
    attended = model(**inputs, output_attentions=True).attentions
    seen = []
    pipeline = kvframe.load("identity", {**SNAP, "scorer": "baselines.tova"})

    class Spy(type(pipeline.spec.scorer)):
        def score(self, observation, segments):
            seen.append((observation, super().score(observation, segments)))
            return seen[0][1]

    cache = Pipeline(pipeline.spec.model_copy(update={"scorer": Spy()})).cache(model)
    model(**inputs, cache=cache)
    cache.compress()
    observed, scores = seen[0]
    for index, layer in enumerate(observed.model.layer_ids):
        wanted = attended[layer][0, :, -1].mean(0)
        assert float((scores[index, 0, 0] - wanted).abs().max()) <= 1e3 * FP32
        if name == "gpt_oss":
            assert float(scores[index, 0, 0].sum()) < 1 - 1e-3, "the sinks have their share"


@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, None), (None, torch.tensor([-1.0, 0, 1, 2, 3, 4])), (1.5, 2.0)])
def test_splits_are_judged_by_the_models_own_attention(softcap, sinks):
    """A part that lacks some tokens errs by what the spelled-out attention of the others errs by."""
    seen = observation([30, 21])
    sinks = torch.full((6,), sinks) if isinstance(sinks, float) else sinks
    seen = replace(seen, model=replace(seen.model, softcap=softcap, sinks=lambda layer: sinks))
    regions = split_regions(seen.valid, Protect(sink=0, recent=5))
    tail = regions.tail
    kept = seen.valid & ~tail & (torch.arange(30) % 3 > 0)
    plan = LayerPlan.keep(kept[:, None].expand(seen.shape[1:]))
    parts = [(exact_part(execute(plan, layer, seen.positions, seen.model.rope)),) for layer in seen.layers]

    def attend(layer, visible):
        keys, values = (x.repeat_interleave(3, 1).double() for x in (layer.keys, layer.values))
        logits = layer.queries[:, :, -QUERIES:].double() @ keys.mT * seen.model.scale
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        weights = logits.exp().masked_fill(~visible[:, None], 0)
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
        return weights @ values / total

    causal = torch.arange(30) <= torch.arange(30 - QUERIES, 30)[:, None]
    before = seen.valid & ~tail
    wanted = []
    for layer in seen.layers:
        whole = attend(layer, before[:, None] | (causal & tail[:, None]))
        coded = attend(layer, kept[:, None] | (causal & tail[:, None]))
        real = seen.valid[:, None, -QUERIES:, None]
        wanted.append(float(((whole - coded) * real).square().sum() / (whole * real).square().sum()))
    for kernel in (Auto(), Reference()):
        assert attention_error(seen, regions, parts, kernel) == pytest.approx(sum(wanted) / len(wanted), rel=1e-4)


class Uncapped(Kernel):
    """What a plugin's kernel looked like before there were caps."""

    name: Literal["mine.uncapped"] = "mine.uncapped"

    def attend(self, query, part, scale):
        return Reference().attend(query, part, scale)


# A stage that nobody registered is no member of the spec's unions, of which pydantic warns.
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_a_kernel_that_takes_no_cap_serves_every_other_model():
    spec = kvframe.load("identity", SMALL).spec
    pipeline = Pipeline(spec.model_copy(update={"attention": Uncapped()}))
    for name in ("llama", "gpt_oss"):
        model, inputs = tiny_model(name), batch([40, 27])
        assert torch.equal(greedy(model, inputs, pipeline.cache(model)), greedy(model, inputs))
    with pytest.raises(ModelError, match=r"Gemma2ForCausalLM caps .* at 2, but attention 'mine.uncapped' does not"):
        pipeline.cache(tiny_model("gemma2"))


def test_a_cap_that_a_model_names_but_does_not_apply_is_none():
    """What counts is what a layer gives to its attention function: Gemma 3 has the setting and leaves it at that."""
    model = tiny_model("gemma3", attn_logit_softcapping=2.0)
    assert model_info(model).softcap is None
    inputs = batch([40, 27])
    assert torch.equal(greedy(model, inputs, kvframe.load("identity", SMALL).cache(model)), greedy(model, inputs))


def test_layers_with_different_caps_are_refused():
    model = tiny_model("gemma2")
    attention_modules(model)[-1].attn_logit_softcapping = 3.0
    with pytest.raises(ModelError, match=r"^Gemma2ForCausalLM caps .* from layer to layer \(2\.0, 3\.0\)"):
        model_info(model)
