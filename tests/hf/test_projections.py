"""Weights that are not matrices: packed bytes, adapters, layers with a forward of their own."""

import pytest
import torch
from tiny import batch, tiny_model
from torch import nn
from transformers.pytorch_utils import Conv1D
from wrapped import Adapted, EightBit, FourBit

import kvframe
from kvframe.errors import ModelError
from kvframe.hf import model_info
from kvframe.hf.projections import ROWS, check_linear, is_plain, linear_bias, linear_weight

SHORT = {"protect.recent": 8}


def test_the_matrix_of_any_linear_layer():
    torch.manual_seed(0)
    base = nn.Linear(ROWS + 13, 29)
    conv = Conv1D(29, ROWS + 13)
    adapted = Adapted(base).train()
    like = torch.empty(0)
    wanted = {
        base: base.weight.T,
        FourBit(base): base.weight.T,
        EightBit(base): None,
        conv: conv.weight,
        adapted: (base.weight + adapted.delta()).T,
    }
    for layer, weight in wanted.items():
        if weight is None:
            weight = (layer.qweight * layer.scale[:, None]).T
        found = linear_weight(layer, ROWS + 13, like)
        # f(x) - f(0) rounds twice, by half a unit of what comes out.
        assert torch.allclose(found, weight, 0, 2 * torch.finfo(torch.float32).eps * (1 + float(weight.abs().max())))
        bias = conv.bias if layer is conv else base.bias
        assert torch.equal(linear_bias(layer, ROWS + 13, like), bias)
        check_linear(layer, ROWS + 13, 29, like, "layer 0")
    assert adapted.training
    assert adapted.dropout.training


def test_what_is_plain():
    plain = nn.Linear(6, 5)
    assert is_plain(plain)
    assert is_plain(Conv1D(5, 6))
    patched = nn.Linear(6, 5)
    patched.forward = lambda x: nn.functional.linear(2 * x, patched.weight, patched.bias)
    assert not is_plain(patched)
    assert torch.allclose(linear_weight(patched, 6, torch.empty(0)), 2 * patched.weight.T, atol=1e-6)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
    for other in (FourBit(plain), EightBit(plain), Adapted(plain), normed):
        assert not is_plain(other)


class Curved(nn.Linear):
    def forward(self, x):
        return super().forward(x.relu())


class Fussy(nn.Linear):
    def forward(self, x, task):
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "said"), [(Curved, "is a Curved, whose response"), (Fussy, "is a Fussy, which does not")]
)
def test_what_is_no_matrix_is_refused(kind, said):
    model = tiny_model("llama")
    old = model.model.layers[1].self_attn.o_proj
    model.model.layers[1].self_attn.o_proj = kind(old.in_features, old.out_features)
    if kind is Fussy:  # which fails in the model, too
        with pytest.raises(ModelError, match="cannot be called with one token"):
            model_info(model)
        with pytest.raises(ModelError, match=said):
            check_linear(kind(64, 64), 64, 64, torch.empty(0), "layer 1 of LlamaForCausalLM")
        return
    with pytest.raises(ModelError, match=f"layer 1 of LlamaForCausalLM {said}.*merge_adapter") as error:
        kvframe.load("snapkv").cache(model)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("wrap", [FourBit, EightBit])
@pytest.mark.parametrize("name", ["snapkv", "gracekv", "gracekv-paper", "aatc", "gracekv+aatc"])
def test_equal_models_give_equal_answers(name, wrap):
    """Every projection packed, or the same numbers in plain layers."""
    changes = dict(SHORT) if name == "aatc" else {**SHORT, "budget.ratio": 3}
    if "aatc" in name:
        changes |= {"encoder.calibration": "prompt", "encoder.protected_layers": 0}
    answers = []
    for packed in (False, True):
        model = tiny_model("llama")
        for layer in model.model.layers:
            attention = layer.self_attn
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                old = getattr(attention, part)
                if wrap is EightBit and not packed:
                    with torch.no_grad():
                        scale = old.weight.abs().amax(1, keepdim=True) / 127
                        old.weight.copy_((old.weight / scale).round().to(torch.int8) * scale)
                if packed:
                    setattr(attention, part, wrap(old))
        cache = kvframe.load(name, changes).cache(model)
        inputs = batch([61, 37])
        model(**inputs, cache=cache)
        answers.append(model(inputs["input_ids"][:, :1], cache=cache).logits)
    # FourBit multiplies with the very same tensor; the codes of EightBit give the same numbers up to a rounding.
    limit = 0 if wrap is FourBit else 1e-4 * float(answers[0].abs().max())
    assert torch.allclose(*answers, 0, limit)


def test_adapters_on_every_projection_count():
    """Active, stacked, switched, off: the projection is what is applied, and biases are found below them."""
    torch.manual_seed(0)
    model = tiny_model("qwen2")
    attention = model.model.layers[0].self_attn
    base, key_bias = attention.o_proj, attention.k_proj.bias
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, name, Adapted(getattr(attention, name)).eval())
    adapted = attention.o_proj
    for active, off in ((["one"], False), (["two"], False), (["one", "two"], False), (["one"], True)):
        adapted.active_adapters, adapted.disable_adapters = active, off
        wanted = base.weight if off else base.weight + adapted.delta()
        info = model_info(model)
        found = info.output_weight(0).reshape(64, 64)
        assert torch.allclose(found, wanted.T, atol=2e-6)
        assert torch.allclose(info.projection_bias(0)[0], key_bias, atol=1e-6)
    inputs = batch([40, 23])
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(**inputs, **settings)
    cache = kvframe.load("gracekv", {**SHORT, "budget.ratio": 1}).cache(model)
    assert torch.equal(model.generate(**inputs, cache=cache, **settings), want)


def test_a_bias_that_is_scaled_on_its_way_is_not_given_as_one():
    """What comes between projection and cache is seen there: only what is plainly added is known."""
    model, scaled = tiny_model("qwen2"), tiny_model("qwen2")
    assert model_info(model).projection_bias(1)[0] is not None
    inner = scaled.model.layers[1].self_attn
    attend = type(inner).forward

    def forward(hidden_states, *args, **kwargs):
        update = kwargs["cache"].update
        kwargs["cache"].update = lambda keys, values, *more, **rest: update(keys * 0.5, values, *more, **rest)
        try:
            return attend(inner, hidden_states, *args, **kwargs)
        finally:
            del kwargs["cache"].update

    inner.forward = forward
    key, value = model_info(scaled).projection_bias(1)
    assert key is None
    assert torch.equal(value, inner.v_proj.bias)
