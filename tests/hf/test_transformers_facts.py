"""One test for each fact of transformers that kvframe builds on: when one fails, the transformers layer must follow."""

from __future__ import annotations

import inspect

import pytest
import torch
from tiny import MODELS, batch, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import create_causal_mask


class Spy(DynamicLayer):
    """Notes what a model passes to `update`."""

    def update(self, key_states, value_states, *args, **kwargs):
        self.passed = kwargs
        kwargs["kwargs"]["kvframe_probe"] = self
        return super().update(key_states, value_states)


@pytest.mark.parametrize("name", MODELS)
def test_update_gets_the_dict_that_reaches_the_attention_function(name):
    model, seen = tiny_model(name), []

    def attention(module, query, key, value, mask, **kwargs):
        seen.append((kwargs.get("kvframe_probe"), kwargs.get("position_ids")))
        # Caps and sinks come with the call, and can be read off the module.
        assert kwargs.pop("softcap", None) == getattr(module, "attn_logit_softcapping", None)
        assert kwargs.get("s_aux") is getattr(module, "sinks", None)
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("probe", attention)
    AttentionMaskInterface.register("probe", AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation("probe")
    cache = Cache(layers=[Spy() for _ in range(3)])
    model(**batch([9]), cache=cache)
    assert [probe for probe, _ in seen] == cache.layers
    assert all(torch.equal(positions, torch.arange(9)[None]) for _, positions in seen)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_layer_looks_its_attention_up_with_its_own_eager_function(name, attention, monkeypatch):
    model, asked = tiny_model(name), []
    if attention == "sdpa" and not model._supports_sdpa:  # Gemma 2 and gpt-oss have eager attention only
        assert model.config._attn_implementation == "eager"
        return
    model.set_attn_implementation(attention)
    look_up = AttentionInterface.get_interface

    def get_interface(self, attn_implementation, default):
        asked.append((attn_implementation, default.__name__))
        return look_up(self, attn_implementation, default)

    monkeypatch.setattr(AttentionInterface, "get_interface", get_interface)
    model(**batch([9]))
    assert asked == [(attention, "eager_attention_forward")] * 3


def test_assisted_generation_announces_drafts_and_says_how_many_there_are():
    model, calls = tiny_model("llama"), []

    class Told(DynamicCache):
        def activate_past_recording(self):
            calls.append("announced")
            super().activate_past_recording()

        def crop(self, tokens_to_remove):
            calls.append("crop")
            super().crop(tokens_to_remove)

    def note(module, args, kwargs):
        calls.append((kwargs["input_ids"].shape[1], kwargs["logits_to_keep"]))

    model.register_forward_pre_hook(note, with_kwargs=True)
    prompt = torch.arange(5, 17)[None].repeat(1, 3)
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 4}
    model.generate(prompt, cache=Told(config=model.config), prompt_lookup_num_tokens=2, **settings)
    assert calls[:3] == ["announced", (36 + 2, 1 + 2), "crop"]
    assert all(before == "crop" and call[0] == call[1] for before, call in zip(calls[2::2], calls[3::2], strict=False))


def test_an_attention_name_without_a_mask_function_gets_no_mask():
    model, masks = tiny_model("llama"), []

    def attention(module, query, key, value, mask, **kwargs):
        masks.append(mask)
        return AttentionInterface()["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("maskless_probe", attention)
    model.set_attn_implementation("maskless_probe")
    model(**batch([9, 5]))
    assert masks
    assert all(mask is None for mask in masks)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_mask_is_made_right_after_the_cache_was_asked_for_its_sizes(family, monkeypatch):
    """With those sizes, by keyword, and with the whole mask of two dimensions."""
    model, said = tiny_model(family), []
    make, sizes = AttentionMaskInterface()["sdpa"], Cache.get_mask_sizes

    def probe(*args, **kwargs):
        said.append({name: kwargs[name] for name in ("kv_length", "kv_offset", "q_length", "batch_size")})
        said[-1]["columns"] = kwargs["attention_mask"].shape[1]
        return make(*args, **kwargs)

    def asked(self, query_length, layer_idx):
        said.append(sizes(self, query_length, layer_idx))
        return said[-1]

    monkeypatch.setattr(Cache, "get_mask_sizes", asked)
    AttentionInterface.register("asked_probe", AttentionInterface()["sdpa"])
    AttentionMaskInterface.register("asked_probe", probe)
    model.set_attn_implementation("asked_probe")
    cache, inputs = DynamicCache(config=model.config), batch([40, 31])
    model(**inputs, cache=cache)
    model(torch.tensor([[5], [6]]), attention_mask=torch.ones(2, 41), cache=cache)
    assert len(said) == (8 if family == "gemma3" else 4)
    for (length, offset), made in zip(said[::2], said[1::2], strict=True):
        assert (made["kv_length"], made["kv_offset"], made["batch_size"]) == (length, offset, 2)
        assert made["columns"] in (40, 41)


def test_masks_follow_the_sizes_that_the_cache_gives():
    model = tiny_model("llama")

    class Short(DynamicLayer):
        def get_mask_sizes(self, query_length):
            return 4 + query_length, 6

        def get_seq_length(self):
            return 10

    padding = torch.ones(1, 13, dtype=torch.long)
    padding[0, 7] = 0
    embeds = torch.zeros(1, 3, 64)
    mask = create_causal_mask(model.config, embeds, padding, Cache(layers=[Short()]))
    expected = torch.ones(3, 7, dtype=torch.bool).tril(4)
    expected[:, 1] = False  # column 7 of the sequence is column 1 of the mask
    assert torch.equal(mask[0, 0], expected)


def test_the_logical_length_drives_positions():
    model = tiny_model("llama")

    class Long(DynamicLayer):
        def get_seq_length(self):
            return 100

        def get_mask_sizes(self, query_length):
            return query_length, 100

        def update(self, key_states, value_states, *args, **kwargs):
            self.positions = kwargs["kwargs"]["position_ids"]
            return super().update(key_states, value_states)

    cache = Cache(layers=[Long() for _ in range(3)])
    model(torch.tensor([[5, 6]]), cache=cache)
    assert cache.layers[0].positions.tolist() == [[100, 101]]


def test_layer_classes_tell_sliding_from_full_attention():
    kinds = [type(layer) for layer in DynamicCache(config=tiny_model("gemma3").config).layers]
    assert kinds == [DynamicSlidingWindowLayer, DynamicLayer, DynamicLayer]


def test_the_argument_is_called_cache():
    model = tiny_model("llama")
    assert "cache" in inspect.signature(type(model).forward.__wrapped__).parameters
    assert "cache_position" not in inspect.signature(type(model).forward.__wrapped__).parameters


def test_crop_takes_tokens_to_remove():
    layer = DynamicLayer()
    layer.update(torch.zeros(1, 1, 9, 2), torch.zeros(1, 1, 9, 2))
    layer.crop(-2)
    assert layer.get_seq_length() == 7


def test_the_fused_cpu_kernel_returns_the_log_sum_exp():
    query, keys, values = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    bias = torch.rand(1, 1, 1, 7)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(query, keys, values, 0.0, False, attn_mask=bias, scale=0.3)
    logits = query @ keys.mT * 0.3 + bias
    assert torch.allclose(lse, logits.logsumexp(-1), atol=1e-6)
    assert torch.allclose(out, logits.softmax(-1) @ values, atol=1e-6)
