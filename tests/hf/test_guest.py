"""kvframe is a guest in the model: whatever could be done with it before can be done while a cache lives and after."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from curious import curious_pipeline
from tiny import batch, greedy, tiny_model
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvframe
from kvframe.errors import ModelError

TOKENS = torch.arange(5, 24)[None]
SMALL = {"budget.ratio": 2, "protect.recent": 5, "protect.sink": 2}


def serve(model, _):
    settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=2, pad_token_id=0)
    # Without a limit the pages fill the machine's memory.
    pages = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    inputs = [TOKENS[0].tolist()]
    (output,) = model.generate_batch(inputs, settings, continuous_batching_config=pages).values()
    return torch.tensor(output.generated_tokens)


def exported(model, _):
    graph = torch.export.export(model, (TOKENS,), {"use_cache": False}, strict=False)
    return graph.module()(TOKENS, use_cache=False).logits


def compiled(model, _):
    return torch.compile(model, backend="eager", fullgraph=True)(TOKENS, use_cache=False).logits


def saved(model, folder):
    model.save_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert read.config._attn_implementation == "sdpa"
    return read(TOKENS).logits


def pickled(model, _):
    return pickle.loads(pickle.dumps(model))(TOKENS).logits


def saved_whole(model, _):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)(TOKENS).logits


def copied(model, _):
    return copy.deepcopy(model)(TOKENS).logits


def switched(model, _):
    model.set_attn_implementation("eager")
    attentions = model(TOKENS, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return torch.cat([*attentions, model(TOKENS).logits[..., : TOKENS.shape[1]][None].expand(1, 4, -1, -1)])


def trained(model, _):
    with torch.enable_grad():
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
    gradient = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    return gradient


def another_librarys(model, _):
    def halved(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return out / 2, weights

    if "halved" not in AttentionInterface():
        AttentionInterface.register("halved", halved)
    AttentionMaskInterface.register("halved", AttentionMaskInterface()["sdpa"])
    model.set_attn_implementation("halved")
    out = model(TOKENS).logits
    model.set_attn_implementation("sdpa")
    return out


ACTIONS = (
    serve,
    exported,
    compiled,
    saved,
    pickled,
    saved_whole,
    copied,
    switched,
    trained,
    another_librarys,
)


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_what_worked_before_a_cache_works_with_and_after_it(action, tmp_path):
    registered = dict(AttentionInterface._global_mapping)
    untouched = tiny_model("llama")
    expected = action(untouched, tmp_path / "before")
    model = tiny_model("llama")
    cache = curious_pipeline().cache(model)  # which has every hook there is
    first = greedy(model, batch([40]), cache)
    assert torch.equal(action(model, tmp_path / "with"), expected)
    del cache
    assert torch.equal(action(model, tmp_path / "after"), expected)
    assert set(vars(model)) == set(vars(untouched))
    assert (model.config.to_dict(), model.config._attn_implementation) == (untouched.config.to_dict(), "sdpa")
    assert all(AttentionInterface._global_mapping[name] is function for name, function in registered.items())
    assert torch.equal(greedy(model, batch([40]), curious_pipeline().cache(model)), first)


def test_a_model_goes_to_a_process_that_has_no_kvframe(tmp_path):
    model = tiny_model("llama")
    cache = curious_pipeline().cache(model)
    greedy(model, batch([40]), cache)
    torch.save((model, model(TOKENS).logits), tmp_path / "model.pt")
    code = (
        "import sys, torch; sys.modules['kvframe'] = None\n"
        f"model, logits = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        f"assert torch.equal(model(torch.arange(5, 24)[None]).logits, logits)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_copy_of_a_watched_model_shows_its_cache_nothing():
    model = tiny_model("llama")
    cache = curious_pipeline().cache(model)
    twin = copy.deepcopy(model)
    twin(TOKENS)
    with pytest.raises(ModelError, match="the model that it was made for"):
        twin(TOKENS, cache=cache)
    assert not cache.watch.tensors()


def test_each_part_of_a_model_keeps_its_attention():
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=96,
        image_seq_length=4,
        vision_feature_select_strategy="full",
    )
    model = LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
    ids = torch.cat([torch.tensor([[5] + [96] * 4]), torch.arange(6, 60)[None]], 1)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8)}
    expected = greedy(model, inputs)
    names = [part.config._attn_implementation for part in (model.model.vision_tower, model.model.language_model)]
    assert torch.equal(greedy(model, inputs, kvframe.load("identity", {"protect.recent": 5}).cache(model)), expected)
    cache = kvframe.load("snapkv", SMALL).cache(model)
    greedy(model, inputs, cache)
    assert cache.report().entry_ratio > 1.8
    again = [part.config._attn_implementation for part in (model.model.vision_tower, model.model.language_model)]
    assert again == names == ["eager", "sdpa"]


@pytest.mark.parametrize("before", ["sdpa", "eager"])
@pytest.mark.parametrize("after", ["sdpa", "eager", "registered"])
def test_attention_is_switched_while_a_cache_is_in_use(before, after):
    AttentionInterface.register("registered", sdpa_attention_forward)
    AttentionMaskInterface.register("registered", AttentionMaskInterface()["sdpa"])
    inputs, next_tokens = batch([40, 33]), torch.tensor([[5], [6]])
    model, logits = tiny_model("llama"), []
    for names in (("sdpa", "sdpa"), (before, after)):
        cache = kvframe.load("snapkv", SMALL).cache(model)
        for name, tokens in zip(names, (inputs, {"input_ids": next_tokens}), strict=True):
            model.set_attn_implementation(name)
            logits.append(model(**tokens, cache=cache).logits[:, -1])
        assert cache.report().tokens == (41, 34)
    assert torch.allclose(logits[2], logits[0], atol=1e-4)
    assert torch.allclose(logits[3], logits[1], atol=1e-4)


def test_masks_that_cannot_be_read_are_refused():
    model = tiny_model("llama")
    AttentionInterface.register("flat", sdpa_attention_forward)
    AttentionMaskInterface.register("flat", lambda *args, attention_mask=None, **kwargs: attention_mask)
    model.set_attn_implementation("flat")
    cache = kvframe.load("snapkv", SMALL).cache(model)
    with pytest.raises(ModelError, match=r"a mask that is not \[B, 1, Q, R\]"):
        model(**batch([40, 33]), cache=cache)
    AttentionMaskInterface.register("flat", AttentionMaskInterface()["flash_attention_2"])
    with pytest.raises(ModelError, match="'flat' has no kvframe counterpart"):
        kvframe.load("snapkv", SMALL).cache(model)


def test_attention_replaced_by_another_library_is_noticed_and_reached_again(monkeypatch):
    model, inputs, pipeline = tiny_model("llama"), batch([40]), kvframe.load("snapkv", SMALL)
    cache = pipeline.cache(model)
    expected = greedy(model, inputs, cache)
    monkeypatch.setattr(AttentionInterface, "get_interface", lambda self, name, default: self.get(name, default))
    cache.reset()
    with pytest.raises(ModelError, match="did not reach the kvframe cache"):
        greedy(model, inputs, cache)
    assert torch.equal(greedy(model, inputs, pipeline.cache(model)), expected)
