"""The plugin as users meet it: specs, mixed pipelines, generation with a padded batch."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvframe
import kvframe_gracekv
from kvframe.errors import BudgetError, InputError, ModelError
from kvframe.registry import build, registry
from kvframe.spec import validate_spec

STAGES = list(kvframe_gracekv.kvframe_register_stages())
SPECS = ["gracekv", "gracekv-paper"]
SMALL = {"protect.recent": 5, "protect.sink": 2, "budget.ratio": 3}
MIXED = {
    "segmenter alone": {"segmenter": "gracekv.curvature", "allocator": "baselines.chunk", "scorer": "baselines.snapkv"},
    "scorer with top_k": {"scorer": {"name": "gracekv.value_flow", "hops": 0}},
    "scorer with ada": {"scorer": "gracekv.value_flow", "allocator": "baselines.ada"},
    "scorer with soft matching": {"scorer": "gracekv.value_flow", "allocator": "centroidkv.soft_matching"},
    "exact flow on another's score": {"scorer": "baselines.h2o", "allocator": "gracekv.exact_flow"},
    "budget flow on another's score": {
        "segmenter": {"name": "chunks", "size": 16},
        "scorer": "baselines.snapkv",
        "allocator": {"name": "gracekv.budget_flow", "cuts": "boundary"},
    },
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=61,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def batch(lengths):
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        ids[row, -n:] = torch.randint(3, 61, (n,), generator=generator)
        mask[row, -n:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, pipeline, **lengths):
    cache = pipeline.cache(model, **lengths)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(**inputs, cache=cache, **settings)
    return out[:, inputs["input_ids"].shape[1] :], cache


def test_registers_its_stages_and_specs():
    found = build([EntryPoint("gracekv", "kvframe_gracekv", "kvframe")])
    assert {name for name, owner in found.owners.items() if owner.name == "gracekv"} == {
        *(f"{stage.kind}:{stage.model_fields['name'].default}" for stage in STAGES),
        *(f"spec:{name}" for name in SPECS),
    }


@pytest.mark.parametrize("name", SPECS)
def test_specs_load_and_round_trip(name):
    spec = kvframe.load(name).spec
    assert validate_spec(spec.dump()) == spec
    assert spec.description.endswith(".")


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_stages_are_documented(stage):
    assert stage.paper
    assert stage.__doc__
    for name, field in stage.model_fields.items():
        assert name == "name" or field.description


@pytest.mark.parametrize("name", SPECS)
def test_generates_the_same_for_a_row_alone_and_in_a_padded_batch(model, name):
    pipeline, inputs = kvframe.load(name, SMALL), batch([60, 41, 33])
    together, cache = generate(model, inputs, pipeline, suffix_length=6)
    report = cache.report()
    assert report.entry_ratio >= 3
    assert not any(note.startswith("no question") for note in report.notes)
    for row, n in enumerate((60, 41, 33)):
        alone = {key: tensor[row : row + 1, -n:] for key, tensor in inputs.items()}
        assert torch.equal(generate(model, alone, pipeline, suffix_length=6)[0][0], together[row])


@pytest.mark.parametrize("name", SPECS)
def test_ratio_one_is_the_full_cache(model, name):
    inputs = batch([50, 31])
    pipeline = kvframe.load(name, {**SMALL, "budget.ratio": 1})
    got, cache = generate(model, inputs, pipeline)
    plain = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(got, plain[:, 50:])
    assert cache.report().entry_ratio == 1
    assert any(note.startswith("no question is marked") for note in cache.report().notes)


@pytest.mark.parametrize("overrides", MIXED.values(), ids=MIXED)
def test_stages_work_with_those_of_others(model, overrides):
    segmenter = overrides.get("segmenter", "whole")
    changes = {"segmenter": segmenter, "allocator": "top_k", "encoder": "dense", **SMALL, **overrides}
    if str(changes["allocator"]).startswith("centroidkv") and "centroidkv" not in {p.name for p in registry().plugins}:
        pytest.fail("the centroidkv plugin of this distribution is missing")
    inputs = batch([60, 41])
    _, cache = generate(model, inputs, kvframe.load("identity", changes), suffix_length=4)
    assert cache.report().entry_ratio >= 2.9


@pytest.mark.parametrize("name", SPECS)
def test_entries_can_be_coded_head_by_head(model, name):
    inputs = batch([60, 41])
    dense, _ = generate(model, inputs, kvframe.load(name, SMALL), suffix_length=6)
    coded, cache = generate(model, inputs, kvframe.load(name, {**SMALL, "encoder": "int8"}), suffix_length=6)
    assert coded.shape == dense.shape
    assert cache.report().entry_ratio >= 3


def test_bad_input_is_one_sentence(model):
    pipeline, inputs = kvframe.load("gracekv", SMALL), batch([30])
    with pytest.raises(InputError, match="suffix_length 40 exceed the 30 tokens"):
        generate(model, inputs, pipeline, suffix_length=40)
    with pytest.raises(BudgetError, match=r"below its 6 protected tokens; lower budget\.ratio"):
        generate(model, inputs, kvframe.load("gracekv", {**SMALL, "budget.ratio": 20, "budget.strict": True}))
    _, cache = generate(model, inputs, kvframe.load("gracekv", {**SMALL, "budget.ratio": 5}))
    assert "the budget is small: the recent window was shortened to 4 tokens" in cache.report().notes
    short, cache = generate(model, batch([9]), kvframe.load("gracekv", {**SMALL, "budget.ratio": 1.2}))
    assert short.shape == (1, 6)  # shorter than a slot
    assert cache.report().entry_ratio >= 1.2


def test_a_question_longer_than_the_context_or_all_there_is(model):
    pipeline, inputs = kvframe.load("gracekv-paper", SMALL), batch([40])
    _, cache = generate(model, inputs, kvframe.load("gracekv", {**SMALL, "protect.recent": 3}), suffix_length=24)
    assert cache.report().entry_ratio >= 2.5
    out, cache = generate(model, inputs, pipeline, suffix_length=40)
    assert out.shape == (1, 6)
    assert any(note.startswith("nothing was compressed") for note in cache.report().notes)


def test_models_that_cannot_be_observed_are_named(model, monkeypatch):
    pipeline, inputs = kvframe.load("gracekv-paper", SMALL), batch([40])
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with torch.no_grad(), pytest.raises(ModelError, match="Surprisal needs input_ids, but the model was called with"):
        model(inputs_embeds=embeds, cache=pipeline.cache(model))
    monkeypatch.setattr("kvframe.hf.watch.blocks_of", lambda model: [])
    with pytest.raises(ModelError, match=r"hidden states of LlamaForCausalLM cannot be captured: it has no list of"):
        pipeline.cache(model)
