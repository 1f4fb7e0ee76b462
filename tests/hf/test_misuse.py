"""What cannot be done with a cache is said in a sentence, and the cache stays as it was."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from tiny import batch, greedy, tiny_model
from torch import Tensor

import kvframe
from kvframe.builtin.kernels import Reference
from kvframe.errors import BudgetError, InputError, ModelError, StageError
from kvframe.pipeline import Pipeline
from kvframe.registry import registry
from kvframe.types import Observation, Segments

SMALL = {"protect.recent": 5, "protect.sink": 2}
TOP_K = {"allocator": "top_k", "budget.ratio": 2, "scorer": {"name": "baselines.snapkv", "window": 7}, **SMALL}


def test_budget_below_the_protected_tokens(llama):
    cache = kvframe.load("identity", {**TOP_K, "budget.ratio": 16}).cache(llama)
    llama(**batch([40]), cache=cache)
    with pytest.raises(BudgetError, match=r"row 0 .*7 protected tokens; lower budget.ratio"):
        cache.compress()
    assert cache.compressed_layers[0].recent.length == 40


def test_suffix_longer_than_the_prompt(llama):
    cache = kvframe.load("identity", TOP_K).cache(llama, suffix_length=50)
    llama(**batch([40]), cache=cache)
    with pytest.raises(InputError, match="exceed the 40 tokens of row 0"):
        cache.compress()


@pytest.mark.parametrize("call", ["offload", "prefetch"])
def test_operations_not_supported_name_themselves(llama, call):
    cache = kvframe.load("identity", TOP_K).cache(llama)
    llama(**batch([40]), cache=cache)
    with pytest.raises(NotImplementedError, match=call):
        getattr(cache.compressed_layers[0], call)()


def test_a_cache_used_with_another_model_says_so(llama):
    cache, other = kvframe.load("identity", TOP_K).cache(llama), tiny_model("llama")
    with pytest.raises(ModelError, match="the model that it was made for"):
        other(**batch([9]), cache=cache)
    kvframe.load("identity", TOP_K).cache(other)  # now its attention is kvframe's, too
    with pytest.raises(ModelError, match="the model that it was made for"):
        other(**batch([9]), cache=kvframe.load("identity", TOP_K).cache(llama))
    deeper = tiny_model("llama", num_hidden_layers=4)
    kvframe.load("identity", TOP_K).cache(deeper)
    with pytest.raises(ModelError, match="the model that it was made for"):
        deeper(**batch([9]), cache=kvframe.load("identity", TOP_K).cache(llama))


def test_a_cache_used_for_another_batch_says_so(llama):
    cache = kvframe.load("identity", TOP_K).cache(llama)
    llama(**batch([30, 20]), cache=cache)
    with pytest.raises(InputError, match="holds 2 rows, but 1 came"):
        llama(torch.tensor([[5]]), cache=cache)
    assert cache.report().tokens == (30, 20)


def test_an_answer_that_was_not_watched_cannot_be_compressed(llama):
    cache = kvframe.load("identity", TOP_K).cache(llama)
    greedy(llama, batch([40]), cache, new=12)
    with pytest.raises(InputError, match=r"set decode\.flush"):
        cache.compress()


SnapKV = registry().stages["scorer"]["baselines.snapkv"]


class Moody(SnapKV):
    """A scorer that fails until it is mended."""

    broken: ClassVar[bool] = True

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        return torch.ones(2) + torch.ones(3) if self.broken else super().score(observation, segments)


def test_a_stage_that_fails_leaves_the_cache_as_it_was(llama, monkeypatch):
    sound = kvframe.load("identity", TOP_K)
    failing = Pipeline(sound.spec.model_copy(update={"scorer": Moody(window=7)}))
    cache, other = failing.cache(llama), sound.cache(llama)
    prompt = batch([40, 31])
    for each in (cache, other):
        llama(**prompt, cache=each)
    before = str(cache.report())
    for act in (cache.compress, lambda: llama(torch.tensor([[5], [6]]), cache=cache)):
        with pytest.raises(StageError, match=r"scorer 'baselines.snapkv' fails with RuntimeError: The size of tensor"):
            act()
    assert str(cache.report()) == before
    monkeypatch.setattr(Moody, "broken", False)
    answers = [llama(torch.tensor([[5], [6]]), cache=each).logits for each in (cache, other)]
    assert torch.equal(*answers)
    assert cache.report().entries == other.report().entries < 3 * 2 * 71


def test_a_kernel_that_fails_is_named(llama):
    sound = kvframe.load("identity", TOP_K)
    odd = type("Odd", (Reference,), {"__annotations__": {}, "attend": lambda self, *_: 1 / 0})()
    cache = Pipeline(sound.spec.model_copy(update={"attention": odd})).cache(llama)
    with pytest.raises(StageError, match="attention 'reference' fails with ZeroDivisionError"):
        greedy(llama, batch([40]), cache)
    with pytest.raises(InputError, match=r"broke off half-way, .*; call cache.reset\(\)"):
        llama(torch.tensor([[5]]), cache=cache)
    cache.reset()
    llama(**batch([40]), cache=cache)
    assert cache.report().tokens == (40,)


def test_gradients_are_refused(llama):
    with torch.enable_grad(), pytest.raises(InputError, match=r"torch.no_grad"):
        llama(**batch([9]), cache=kvframe.load("identity").cache(llama))


def test_models_without_a_known_contract():
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50))
    with pytest.raises(ModelError, match="no attention contract that kvframe knows"):
        kvframe.load("identity").cache(gpt2)
    with pytest.raises(ModelError, match="no layer with full attention"):
        kvframe.load("identity").cache(tiny_model("mistral", sliding_window=16))
    dynamic = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ModelError, match="'dynamic'"):
        kvframe.load("identity").cache(dynamic)
