"""A saved cache, and a calibration, belong to a model whose keys and values would be the same."""

import copy

import pytest
import torch
from tiny import batch, tiny_model
from wrapped import Adapted

import kvframe
from kvframe.errors import InputError
from kvframe.hf import model_info
from kvframe.hf.fingerprint import LENGTH, PLACES, _sample


def fingerprint(model):
    return model_info(model).fingerprint


TOUCHED = [
    "model.embed_tokens.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.self_attn.k_proj.bias",
    "model.layers.2.self_attn.v_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
]


@pytest.mark.parametrize("name", TOUCHED)
def test_a_fine_tune_of_anything_that_keys_come_from_is_another_model(name):
    model = tiny_model("qwen2", tie_word_embeddings=False)
    before = fingerprint(model)
    torch.manual_seed(1)
    with torch.no_grad():
        tensor = model.get_parameter(name)
        tensor.add_(0.01 * torch.randn_like(tensor))
    assert fingerprint(model) != before


def test_the_head_does_not_count_and_dtype_neither():
    model = tiny_model("qwen2", tie_word_embeddings=False)
    before = fingerprint(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert fingerprint(model) == before
    assert fingerprint(copy.deepcopy(model).to(torch.bfloat16)) == before
    assert fingerprint(tiny_model("qwen2", tie_word_embeddings=False)) == before


def test_a_cache_of_a_fine_tune_of_queries_and_values_is_refused(tmp_path):
    model, tuned = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        for layer in tuned.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
                projection.weight.add_(0.2 * torch.randn_like(projection.weight))
    cache = kvframe.load("snapkv", {"budget.ratio": 2, "protect.recent": 8}).cache(tuned)
    tuned(**batch([50]), cache=cache)
    cache.compress()
    cache.save(tmp_path / "cache")
    kvframe.load_cache(tmp_path / "cache", tuned)
    with pytest.raises(InputError, match="made with another model"):
        kvframe.load_cache(tmp_path / "cache", model)


def test_adapters_count_while_they_work():
    model = tiny_model("llama")
    plain = fingerprint(model)
    torch.manual_seed(2)
    adapted = Adapted(model.model.layers[1].self_attn.v_proj)
    model.model.layers[1].self_attn.v_proj = adapted
    one = fingerprint(model)
    adapted.active_adapters = ["two"]
    two = fingerprint(model)
    adapted.active_adapters = ["one", "two"]
    both = fingerprint(model)
    adapted.scaling["two"] = 0.25
    weaker = fingerprint(model)
    adapted.disable_adapters = True
    off = fingerprint(model)
    assert len({plain, one, two, both, weaker}) == 5
    assert off == plain


def test_it_costs_little():
    """It looks at a few places of each tensor: of a large one no more than of a small one."""
    tensor = torch.randn(3001, 1009)
    assert len(_sample(tensor)) == 2 * PLACES * LENGTH
    assert len(_sample(tensor[:7, :7])) == 2 * 49
    assert _sample(tensor.T) != _sample(tensor)
