"""Each layer's rotation is what its keys show: layers that do not rotate, several bases, parts of a head."""

import pytest
import torch
from tiny import SHAPE, batch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

import kvframe
from kvframe.errors import ModelError, StageError
from kvframe.hf import model_info
from kvframe.rope import LayerRopes, Rope, of_layers
from kvframe.types import Needs

SMOL = {**SHAPE, "bos_token_id": 1, "eos_token_id": 2}


def made(config, model, **changes):
    torch.manual_seed(3)
    return model(config(**SMOL | changes)).eval()


FAMILIES = {
    # Rotated channels of each compressed layer, and the base they turn with.
    "smollm3": (lambda: made(SmolLM3Config, SmolLM3ForCausalLM, no_rope_layers=[1, 0, 1]), [16, 0, 16]),
    "exaone4": (
        lambda: made(
            Exaone4Config,
            Exaone4ForCausalLM,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
        [0, 0],
    ),
    "gemma3": (
        lambda: made(
            Gemma3TextConfig,
            Gemma3ForCausalLM,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
        ),
        [16, 16],
    ),
    "phi3 in part": (lambda: made(Phi3Config, Phi3ForCausalLM, partial_rotary_factor=0.5), [8, 8, 8]),
    "glm": (lambda: made(GlmConfig, GlmForCausalLM, partial_rotary_factor=0.5, attention_bias=True), [8, 8, 8]),
    "cohere": (lambda: made(CohereConfig, CohereForCausalLM), [16, 16, 16]),
    "gpt2": (
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=97, n_positions=512)).eval(),
        [0, 0, 0],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_token_has_the_same_key_before_rotation(family, dtype):
    """In the first layer, where keys depend on nothing but token and position: turned back they are equal."""
    make, channels = FAMILIES[family]
    model = make().to(dtype)
    info = model_info(model)
    assert [2 * len(info.rope[layer].inv_freq) for layer in range(info.layers)] == channels
    if family == "gpt2" or info.layer_ids[0] != 0:
        return
    cache = kvframe.load("identity").cache(model)
    model(torch.full((1, 90), 5), cache=cache)
    keys = cache.compressed_layers[0].observe(Needs()).keys
    plain = info.rope[0].unrotate(keys, torch.arange(90))
    rounding = 6 * torch.finfo(dtype).eps * float(keys.abs().max())
    assert torch.allclose(plain, plain[:, :, :1].expand_as(plain), 0, rounding)


def test_two_bases_in_one_model_are_told_apart():
    changes = {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    }
    info = model_info(made(Gemma3TextConfig, Gemma3ForCausalLM, **changes))
    assert torch.allclose(info.rope.inv_freq, 1e6 ** (-torch.arange(0, 16, 2) / 16))


def test_a_module_that_turns_otherwise_than_its_rotary_module_says_is_refused():
    """What counts is what comes into the cache, not what a module of the model offers."""
    model = made(LlamaConfig, LlamaForCausalLM)
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, 3 * position_ids)
    with pytest.raises(ModelError, match="keys of layer 0 are turned otherwise"):
        model_info(model)


def test_a_rotation_changed_later_is_seen():
    model = made(LlamaConfig, LlamaForCausalLM)
    before = model_info(model).rope
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert torch.equal(model_info(model).rope.inv_freq, before.inv_freq)  # the old one is a view of the same numbers
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5
    assert torch.equal(model_info(model).rope.inv_freq, before.inv_freq * 0.5)


def test_equal_tokens_of_a_layer_that_does_not_rotate_merge_without_loss():
    torch.manual_seed(0)
    config = SMOL | {"vocab_size": 16, "num_hidden_layers": 1, "initializer_range": 0.3, "no_rope_layers": [0]}
    model = SmolLM3ForCausalLM(SmolLM3Config(**config)).eval()
    prompt, last = torch.randint(3, 7, (1, 400)), torch.tensor([[4]])
    want = model(torch.cat([prompt, last], 1)).logits[0, -1]
    cache = kvframe.load("centroidkv", {"budget.ratio": 8, "protect.recent": 16, "protect.sink": 0}).cache(model)
    model(prompt, cache=cache)
    got = model(last, cache=cache).logits[0, -1]
    assert cache.report().entry_ratio > 7.9
    assert torch.allclose(got, want, 0, 1e-4 * float(want.abs().max()))


def test_every_stage_serves_layers_that_rotate_differently():
    """At ratio 1 a model of mixed layers answers as with the full cache, whatever its keys went through."""
    model = FAMILIES["smollm3"][0]()
    inputs = batch([70, 41])
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(**inputs, **settings)
    for name in ("snapkv", "gracekv", "centroidkv", "forest", "expectedattention"):
        cache = kvframe.load(name, {"budget.ratio": 1, "protect.recent": 8}).cache(model)
        assert torch.equal(model.generate(**inputs, cache=cache, **settings), want), name
        assert isinstance(cache.info.rope, LayerRopes)
    for name in ("aatc", "aatc-codespace"):
        changes = {"encoder.calibration": "prompt", "encoder.key_bits": 12, "encoder.value_bits": 12}
        cache = kvframe.load(name, {**changes, "protect.recent": 8, "encoder.protected_layers": 0}).cache(model)
        assert torch.equal(model.generate(**inputs, cache=cache, **settings), want), name


def test_a_model_whose_layers_differ_has_no_rotation_as_a_whole():
    turned, still = Rope(torch.ones(4)), Rope(torch.empty(0))
    assert of_layers([turned, Rope(torch.ones(4)), turned]) is turned
    mixed = of_layers([turned, still])
    assert (mixed[0], mixed[1]) == (turned, still)
    for wrong in (
        lambda: mixed.rotate(torch.ones(8), torch.ones(1)),
        lambda: mixed.unrotate(torch.ones(8), torch.ones(1)),
        lambda: mixed.inv_freq,
        lambda: mixed.scaling,
    ):
        with pytest.raises(StageError, match=r"model\.rope\[layer\]"):
            wrong()
    x = torch.randn(3, 8)
    assert torch.equal(still.rotate(x, torch.arange(3)), x)
    with pytest.raises(TypeError):
        iter(turned)


def test_queries_turn_as_keys_do():
    """What stages see of queries belongs to the same rotation."""
    model = FAMILIES["smollm3"][0]()
    from kvframe.hf.reader import Reader

    reader = Reader(model, Needs(queries="all"))
    model(torch.full((1, 33), 5), cache=reader)
    seen = reader.observation(0)
    first = seen.layers[0]
    plain = seen.model.rope[0].unrotate(first.queries, torch.arange(33))
    assert torch.allclose(plain, plain[:, :, :1].expand_as(plain), atol=1e-4)


@pytest.mark.parametrize("family", ["glm", "cohere"])
def test_neighbouring_channels_that_turn_together(family):
    """Stages and encoders see the half-split order, the model its own; biases are those of what stages see."""
    model = FAMILIES[family][0]()
    inputs = batch([70, 41])
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(**inputs, **settings)
    wide = {"encoder.calibration": "prompt", "encoder.key_bits": 12, "encoder.value_bits": 12}
    for name, changes in (
        ("gracekv", {"budget.ratio": 1}),
        ("centroidkv", {"budget.ratio": 1, "decode.flush": 2}),
        ("int8", {}),
        ("aatc", {**wide, "encoder.protected_layers": 0}),
    ):
        cache = kvframe.load(name, {"protect.recent": 8, **changes}).cache(model)
        assert torch.equal(model.generate(**inputs, cache=cache, **settings), want), name
    if family == "glm":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.bias.normal_()
                layer.self_attn.v_proj.bias.normal_()
        info = model_info(model)
        key, value = info.projection_bias(1)
        projection = model.model.layers[1].self_attn.k_proj
        assert torch.equal(key.view(2, 16)[:, :4], projection.bias.view(2, 16)[:, [0, 2, 4, 6]])
        assert torch.equal(value, model.model.layers[1].self_attn.v_proj.bias)
