"""What cannot be done with a cache is said in a sentence, and the cache stays as it was."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from tiny import batch, greedy, tiny_model
from torch import Tensor

import kvframe
from kvframe.builtin.kernels import Reference
from kvframe.builtin.scorers import Uniform
from kvframe.errors import BudgetError, InputError, KvframeError, ModelError, StageError
from kvframe.hf import Prefill, load_model
from kvframe.pipeline import Pipeline
from kvframe.types import Observation, Segments

SMALL = {"protect.recent": 5, "protect.sink": 2}
TOP_K = {"allocator": "top_k", "budget.ratio": 2, "scorer": {"name": "baselines.snapkv", "window": 7}, **SMALL}


def test_budget_below_the_protected_tokens(llama):
    cache = kvframe.load("identity", {**TOP_K, "budget.ratio": 16, "budget.strict": True}).cache(llama)
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


class Moody(Uniform):
    """A scorer that fails until it is mended."""

    broken: ClassVar[bool] = True

    def score(self, observation: Observation, segments: Segments) -> Tensor:
        return torch.ones(2) + torch.ones(3) if self.broken else super().score(observation, segments)


def test_a_stage_that_fails_leaves_the_cache_as_it_was(llama, monkeypatch):
    sound = kvframe.load("identity", {**TOP_K, "scorer": "uniform"})
    failing = Pipeline(sound.spec.model_copy(update={"scorer": Moody()}))
    cache, other = failing.cache(llama), sound.cache(llama)
    prompt = batch([40, 31])
    for each in (cache, other):
        llama(**prompt, cache=each)
    before = str(cache.report())
    for act in (cache.compress, lambda: llama(torch.tensor([[5], [6]]), cache=cache)):
        with pytest.raises(StageError, match=r"scorer 'uniform' fails with RuntimeError: The size of tensor"):
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
    for _ in range(2):
        with pytest.raises(StageError, match="attention 'reference' fails with ZeroDivisionError"):
            greedy(llama, batch([40]), cache)
        assert cache.report().tokens == (40,)
        assert not cache.report().compress_seconds
        cache.reset()
    llama(**batch([40]), cache=cache)
    assert cache.report().tokens == (40,)


COUNT = "must be a whole number of tokens, or one for each row, but is"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda p, m, c: kvframe.load(3), r"A pipeline's source must be the name of a spec .*, but is 3"),
        (lambda p, m, c: kvframe.load("snapkv", ["a"]), r"overrides must be a mapping such as .*, but is \['a'\]"),
        (lambda p, m, c: kvframe.load("snapkv", {3: 4}), r"A key of overrides must be a path of keys .*, but is 3"),
        (lambda p, m, c: kvframe.load("./my.yaml"), r"no spec named './my.yaml'; a file is given as pathlib.Path\("),
        (lambda p, m, c: Pipeline("snapkv"), r"spec must be a PipelineSpec \(kvframe.load makes .*, but is 'snapkv'"),
        (lambda p, m, c: p.cache("smollm2"), "model must be a transformers model, .*, but is 'smollm2'"),
        (lambda p, m, c: p.cache((m, None)), r"model must be a transformers model, .*, but is \(LlamaForCausalLM"),
        (lambda p, m, c: p.cache(m, prefix_length="4"), f"prefix_length {COUNT} '4'"),
        (lambda p, m, c: p.cache(m, prefix_length=1.5), f"prefix_length {COUNT} 1.5"),
        (lambda p, m, c: p.cache(m, prefix_length=-1), "prefix_length must not be negative, but is -1"),
        (lambda p, m, c: p.cache(m, suffix_length=[1, 2.5]), rf"suffix_length {COUNT} \[1, 2.5\]"),
        (lambda p, m, c: p.cache(m, suffix_length=True), f"suffix_length {COUNT} True"),
        (lambda p, m, c: c.compress(1.5), f"suffix_length {COUNT} 1.5"),
        (lambda p, m, c: c.prefill(m, [1, 2, 3]), r"input_ids must be a tensor .*, but is \[1, 2, 3\]"),
        (lambda p, m, c: c.prefill(m, torch.ones(2, 9)), "input_ids must be whole numbers .*, but are torch.float32"),
        (lambda p, m, c: c.prefill("m", torch.ones(2, 9)), "model must be the cache's model, but is 'm'"),
        (lambda p, m, c: c.prefill(m, torch.ones(2, 9).long(), [1]), r"attention_mask must be a tensor .* \[1\]"),
        (lambda p, m, c: c.select("0"), "indices must be numbers of rows, or a mask of 2, but is '0'"),
        (lambda p, m, c: c.select([7]), r"The rows of a cache of 2 are 0 to 1, but \[7\] are asked for"),
        (lambda p, m, c: c.reorder_cache(None), "indices must be numbers of rows, or a mask of 2, but is None"),
        (lambda p, m, c: c.batch_repeat_interleave(1.5), "repeats must be a whole number, but is 1.5"),
        (lambda p, m, c: c.batch_repeat_interleave(0), "repeats must be at least 1, but is 0"),
        (lambda p, m, c: c.crop(1.5), "tokens_to_remove must be a whole number, but is 1.5"),
        (lambda p, m, c: c.crop(-1.0), "tokens_to_remove must be a whole number, but is -1.0"),
        (lambda p, m, c: c.to("toaster"), "device 'toaster' cannot be used here .*; pass another"),
        (lambda p, m, c: c.to(None), "device must be the name of a device, .*, but is None"),
        (lambda p, m, c: c.save(3), "The path of a cache must be a str or a pathlib.Path, but is 3"),
        (lambda p, m, c: c.save("x", "gpt2"), "tokenizer must be a tokenizer of transformers, or None, but is 'gpt2'"),
        (lambda p, m, c: kvframe.load_cache(3, m), "The path of a cache must be a str or a pathlib.Path, but is 3"),
        (lambda p, m, c: kvframe.load_cache("/", m), "The cache / cannot be read: it is a folder; name"),
        (lambda p, m, c: Prefill(m, p), "pipelines must be a list of pipelines, but is Pipeline"),
        (lambda p, m, c: Prefill(m, ["snapkv"]), "must be what kvframe.load returns, but is 'snapkv'"),
        (lambda p, m, c: Prefill(m, []).fork("snapkv"), "pipeline must be what kvframe.load returns, but is 'snapkv'"),
        (lambda p, m, c: load_model(3), "The name of a model must be a str or a pathlib.Path, but is 3"),
        (lambda p, m, c: load_model("smollm2", device=3.5), "device must be the name of a device, .*, but is 3.5"),
    ],
)
def test_arguments_of_a_wrong_type(llama, call, said):
    pipeline = kvframe.load("identity", TOP_K)
    cache = pipeline.cache(llama)
    llama(**batch([30, 20]), cache=cache)
    before = str(cache.report())
    with pytest.raises(KvframeError, match=said) as error:
        call(pipeline, llama, cache)
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 400
    assert str(cache.report()) == before
    assert torch.equal(cache.compressed_layers[0].recent.keys[:, :, -1], llama_keys(llama, batch([30, 20])))


def llama_keys(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The first layer's keys of the last column, without a compressing cache."""
    return model(**inputs).past_key_values.layers[0].keys[:, :, -1]


def test_gradients_are_refused(llama):
    with torch.enable_grad(), pytest.raises(InputError, match=r"torch.no_grad"):
        llama(**batch([9]), cache=kvframe.load("identity").cache(llama))


def test_models_without_a_known_contract():
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=50))
    with pytest.raises(ModelError, match="no attention contract that kvframe knows"):
        kvframe.load("identity").cache(bloom)
    with pytest.raises(ModelError, match="no layer with full attention"):
        kvframe.load("identity").cache(tiny_model("mistral", sliding_window=16))
    dynamic = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ModelError, match="'dynamic'"):
        kvframe.load("identity").cache(dynamic)
