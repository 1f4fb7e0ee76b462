"""What the cache observes for the stages, held against the model itself."""

from __future__ import annotations

import gc

import pytest
import torch
from curious import SEEN, curious_pipeline
from tiny import MODELS, batch, tiny_model

import kvframe
from kvframe.hf import Prefill
from kvframe.ops import attention_weights, cap_logits
from kvframe.spec import Protect


@pytest.fixture(autouse=True)
def _forget():
    SEEN.clear()
    yield
    SEEN.clear()


@pytest.mark.parametrize("name", MODELS)
def test_observation_is_what_the_model_computed(name):
    model, inputs = tiny_model(name), batch([60, 45])
    cache = curious_pipeline().cache(model)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    out = model(**inputs, position_ids=positions, cache=cache, output_hidden_states=True)
    cache.compress()
    seen = SEEN[0]
    valid = inputs["attention_mask"].bool()
    assert torch.equal(seen.valid, valid)
    assert torch.equal(seen.positions, positions)
    for depth, index in ((0.0, 0), (0.4, 1), (0.9, 2)):
        assert torch.equal(seen.hidden_states[depth][valid], out.hidden_states[index][valid])
    logits = out.logits[:, :-1].float().log_softmax(-1)
    expected = -logits.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    both = valid[:, 1:] & valid[:, :-1]
    assert torch.allclose(seen.surprisal[:, 1:][both], expected[both], atol=1e-4)
    assert float(seen.surprisal[0, 0]) == 0
    for index, layer in enumerate(seen.layers):
        weight = seen.model.output_weight(index)
        module = next(m for m in model.modules() if getattr(m, "layer_idx", None) == seen.model.layer_ids[index]
                      and hasattr(m, "o_proj"))  # fmt: skip
        through = torch.einsum("bhtd,hdm->btm", layer.head_outputs, weight)
        direct = module.o_proj(layer.head_outputs.transpose(1, 2).reshape(2, 5, -1))
        bias = 0 if module.o_proj.bias is None else module.o_proj.bias
        assert torch.allclose(through + bias, direct, atol=1e-5)
        assert layer.queries.shape[2] == 60
        assert layer.head_outputs.shape[2] == 5


@pytest.mark.parametrize("name", MODELS)
def test_attention_rebuilt_from_the_observation_gives_the_head_outputs(name):
    model, inputs = tiny_model(name), batch([40])
    cache = curious_pipeline().cache(model)
    model(**inputs, cache=cache)
    cache.compress()
    seen = SEEN[0]
    for index, layer in enumerate(seen.layers):
        keys = layer.keys.repeat_interleave(seen.model.group, 1)
        values = layer.values.repeat_interleave(seen.model.group, 1)
        logits = cap_logits(layer.queries @ keys.mT * seen.model.scale, seen.model.softcap)
        logits = logits.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf)
        sinks = seen.model.sinks(index)
        weights = attention_weights(logits, None if sinks is None else sinks[:, None])
        assert torch.allclose((weights @ values)[:, :, -5:], layer.head_outputs, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_keys_turn_back_to_what_the_projection_gave(name):
    model, inputs = tiny_model(name), batch([40])
    cache = curious_pipeline().cache(model)
    before = {}

    def note(module, args, kwargs):
        before[module.layer_idx] = args[0] if args else kwargs["hidden_states"]

    attention = [m for m in model.modules() if hasattr(m, "o_proj") and hasattr(m, "layer_idx")]
    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in attention]
    model(**inputs, cache=cache)
    cache.compress()
    for hook in hooks:
        hook.remove()
    seen = SEEN[0]
    for index, layer in enumerate(seen.layers):
        module = next(m for m in attention if m.layer_idx == seen.model.layer_ids[index])
        keys = module.k_proj(before[module.layer_idx]).view(1, 40, 2, 16)
        keys = module.k_norm(keys) if hasattr(module, "k_norm") else keys
        turned = seen.model.rope.unrotate(layer.keys, seen.positions[:, None])
        assert torch.allclose(turned, keys.transpose(1, 2), atol=1e-4)
        assert torch.allclose(seen.model.rope.rotate(turned, seen.positions[:, None]), layer.keys, atol=1e-4)


def test_chunks_are_watched_as_one(llama):
    inputs = batch([60])
    for pieces in ((60,), (25, 35), (1, 2, 57)):
        cache = curious_pipeline().cache(llama)
        for piece in inputs["input_ids"].split(pieces, 1):
            cache.pending = False  # a chunk of one token is no step here
            llama(piece, cache=cache)
        cache.compress()
    whole, *others = SEEN
    for other in others:
        assert torch.allclose(other.surprisal, whole.surprisal, atol=1e-4)
        for depth, states in whole.hidden_states.items():
            assert torch.allclose(other.hidden_states[depth], states, atol=1e-4)


def test_hooks_look_at_their_own_cache_and_go_with_it(llama):
    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in llama.modules())

    before = hooks()
    cache, other = curious_pipeline().cache(llama), kvframe.load("identity").cache(llama)
    assert hooks() > before
    llama(**batch([40], seed=1), cache=other)
    llama(**batch([50], seed=2), cache=cache)
    llama(**batch([40], seed=3))
    cache.compress()
    assert SEEN[0].surprisal.shape == (1, 50)
    del cache
    SEEN.clear()
    gc.collect()
    assert hooks() == before


def test_the_step_that_triggers_the_compression_is_not_observed(llama):
    """The first block's hook runs before the cache's own work of that step."""
    inputs = batch([20])
    SEEN.clear()
    cache = curious_pipeline(protect=Protect(sink=1, recent=4)).cache(llama)
    llama.generate(**inputs, cache=cache, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    with_explicit = curious_pipeline(protect=Protect(sink=1, recent=4)).cache(llama)
    llama(**inputs, cache=with_explicit)
    with_explicit.compress()
    for depth in (0.0, 0.4, 0.9):
        assert torch.equal(SEEN[0].hidden_states[depth], SEEN[1].hidden_states[depth])


def test_a_second_prefill_goes_on_observing(llama):
    pipeline = curious_pipeline()
    prefill = Prefill(llama, [pipeline])
    llama(**batch([40]), cache=prefill)
    second = prefill.fork()
    llama(torch.tensor([[4, 5]]), cache=second)
    second.fork(pipeline).compress()
    prefill.fork(pipeline).compress()
    for seen, tokens in zip(SEEN, (42, 40), strict=True):
        assert seen.surprisal.shape == (1, tokens)
        assert all(states.shape[1] == tokens for states in seen.hidden_states.values())
        assert all(layer.queries.shape[2] == tokens for layer in seen.layers)
