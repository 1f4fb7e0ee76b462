"""The cache on live models: what users call."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import MODELS, batch, greedy, row_of, tiny_model
from transformers import DynamicCache

import kvframe
from kvframe.errors import BudgetError
from kvframe.hf import Prefill
from kvframe.types import storage_bytes

SMALL = {"protect.recent": 5, "protect.sink": 2}
TOP_K = {"allocator": "top_k", "budget.ratio": 2, "scorer": {"name": "baselines.snapkv", "window": 7}, **SMALL}
ADA = {"allocator": "baselines.ada", "budget.ratio": 2, "scorer": {"name": "baselines.snapkv", "window": 7}, **SMALL}


@pytest.mark.parametrize("name", MODELS)
def test_identity_gives_the_stock_tokens(name):
    model, inputs = tiny_model(name), batch([40, 27, 9])
    expected = greedy(model, inputs)
    cache = kvframe.load("identity", SMALL).cache(model)
    assert torch.equal(greedy(model, inputs, cache), expected)
    assert cache.report().entry_ratio == 1


def test_eager_attention_underneath():
    model, inputs = tiny_model("llama"), batch([41, 28, 23])
    expected = greedy(model, inputs, kvframe.load("identity", ADA).cache(model))
    eager = tiny_model("llama")
    eager.set_attn_implementation("eager")
    assert torch.equal(greedy(eager, inputs, kvframe.load("identity", ADA).cache(eager)), expected)
    assert eager.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("overrides", [TOP_K, ADA, {"encoder": "int8", **SMALL}], ids=["top_k", "ada", "int8"])
def test_a_row_is_the_same_alone_and_in_a_padded_batch(name, overrides):
    model, inputs = tiny_model(name), batch([41, 28, 23])
    pipeline = kvframe.load("identity", overrides)
    together = greedy(model, inputs, pipeline.cache(model))
    for row in range(3):
        assert torch.equal(greedy(model, row_of(inputs, row), pipeline.cache(model))[0], together[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    model = tiny_model("llama").to(dtype)
    inputs = batch([40, 33])
    logits = model(**inputs, use_cache=False).logits[:, -1]
    cache = kvframe.load("identity", SMALL).cache(model)
    model(**{name: tensor[:, :-1] for name, tensor in inputs.items()}, cache=cache)
    last = {"input_ids": inputs["input_ids"][:, -1:], "attention_mask": inputs["attention_mask"]}
    ours = model(**last, cache=cache).logits[:, -1]
    assert cache.compressed_layers[0].parts
    # Both round every activation to the dtype: a few units in the last place of the largest logit.
    assert (logits - ours).abs().max() <= 16 * torch.finfo(dtype).eps * logits.abs().max()


def test_sampling_draws_the_stock_tokens(llama):
    inputs = batch([30])
    settings = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.8, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(3)
    expected = llama.generate(**inputs, **settings)
    torch.manual_seed(3)
    assert torch.equal(
        llama.generate(**inputs, cache=kvframe.load("identity", SMALL).cache(llama), **settings), expected
    )


def test_two_caches_in_turn_equal_each_alone(llama):
    first, second = batch([37, 20], seed=1), batch([22, 31], seed=2)
    pipelines = kvframe.load("identity", TOP_K), kvframe.load("identity", ADA)

    def start(pipeline, inputs):
        cache = pipeline.cache(llama)
        llama(**inputs, cache=cache)
        return cache

    def step(cache, inputs, n):
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, n + 1), value=1)
        positions = mask.sum(1, keepdim=True) - 1
        return llama(torch.full((2, 1), 5 + n), attention_mask=mask, position_ids=positions, cache=cache).logits

    alone = []
    for pipeline, inputs in zip(pipelines, (first, second), strict=True):
        cache = start(pipeline, inputs)
        alone.append([step(cache, inputs, n) for n in range(4)])
    caches = [start(p, i) for p, i in zip(pipelines, (first, second), strict=True)]
    for n in range(4):
        for which, inputs in enumerate((first, second)):
            assert torch.equal(step(caches[which], inputs, n), alone[which][n])


def test_the_model_behaves_as_before_with_a_stock_cache():
    for attention in ("sdpa", "eager"):
        model, inputs = tiny_model("llama"), batch([30, 20])
        model.set_attn_implementation(attention)
        before = model(**inputs).logits
        state = set(model.__dict__), {n: set(m.__dict__) for n, m in model.named_modules()}
        greedy(model, inputs, kvframe.load("identity", ADA).cache(model))
        assert torch.equal(model(**inputs).logits, before)
        assert (set(model.__dict__), {n: set(m.__dict__) for n, m in model.named_modules()}) == state
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        assert not any(hooks)


@pytest.mark.parametrize("recent", [0, 5])
def test_decoding_token_by_token_equals_one_block(llama, recent):
    inputs, more = batch([33, 18]), torch.tensor([[5, 9, 11, 20], [8, 30, 2 + 1, 7]])
    pipeline = kvframe.load("identity", {**ADA, "protect.recent": recent})
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 4), value=1)

    def compressed():
        cache = pipeline.cache(llama)
        llama(**inputs, cache=cache)
        cache.compress()
        return cache

    positions = mask.cumsum(1)[:, -4:] - 1
    block = llama(more, attention_mask=mask, position_ids=positions, cache=compressed()).logits
    cache = compressed()
    steps = [
        llama(more[:, n : n + 1], attention_mask=mask[:, : 34 + n], position_ids=positions[:, n : n + 1], cache=cache)
        for n in range(4)
    ]
    assert torch.allclose(torch.cat([s.logits for s in steps], 1), block, atol=2e-5)


def test_padding_on_the_right_changes_nothing(llama):
    left, right = batch([30, 21], "left"), batch([30, 21], "right")
    pipeline = kvframe.load("identity", ADA)
    caches = []
    for inputs in (left, right):
        cache = pipeline.cache(llama)
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        llama(**inputs, position_ids=positions, cache=cache)
        cache.compress()
        caches.append(cache)
    for mine, theirs in zip(caches[0].compressed_layers, caches[1].compressed_layers, strict=True):
        assert mine.parts[0].encoded.bounds == theirs.parts[0].encoded.bounds
        assert torch.allclose(mine.parts[0].decode().keys, theirs.parts[0].decode().keys, atol=1e-5)
    token, positions = torch.tensor([[5], [6]]), torch.tensor([[30], [21]])
    logits = [
        llama(token, attention_mask=torch.nn.functional.pad(i["attention_mask"], (0, 1), value=1),
              position_ids=positions, cache=c).logits
        for i, c in zip((left, right), caches, strict=True)
    ]  # fmt: skip
    assert torch.allclose(*logits, atol=2e-5)


def test_a_prompt_in_chunks_equals_the_prompt_in_one(llama):
    inputs = batch([40])
    pipeline = kvframe.load("identity", ADA)
    whole = pipeline.cache(llama)
    llama(**inputs, cache=whole)
    chunked = pipeline.cache(llama)
    for begin in range(0, 40, 17):
        llama(inputs["input_ids"][:, begin : begin + 17], cache=chunked)
    whole.compress()
    chunked.compress()
    for mine, theirs in zip(whole.compressed_layers, chunked.compressed_layers, strict=True):
        assert torch.allclose(mine.parts[0].decode().keys, theirs.parts[0].decode().keys, atol=1e-5)


def test_report_counts_the_storages_held(llama):
    inputs = batch([64, 64])
    for overrides in (TOP_K, ADA, {"encoder": "int8", **SMALL}):
        cache = kvframe.load("identity", overrides).cache(llama)
        llama(**inputs, cache=cache)
        cache.compress()
        held = [
            tensor
            for layer in cache.compressed_layers
            for tensor in (
                layer.recent._keys,
                layer.recent._values,
                *(t for p in layer.parts for t in p.encoded.tensors()),
            )
        ]
        report = cache.report()
        masks = storage_bytes([cache.valid, cache.positions, *cache.columns.tensors()])
        assert report.bytes == sum(t.untyped_storage().nbytes() for t in held) + masks
        assert report.bytes == sum(report.bytes_by_part.values())
        assert report.full_bytes == 3 * 2 * 2 * 64 * 16 * 2 * 4
        assert report.tokens == (64, 64)
        stock = DynamicCache(config=llama.config)
        llama(**inputs, cache=stock)
        assert report.full_bytes == storage_bytes([t for layer in stock.layers for t in (layer.keys, layer.values)])


def test_the_ragged_allocator_holds_the_bytes_of_the_uniform_one(llama):
    inputs = batch([200])
    sizes = {}
    for name in ("top_k", "baselines.ada"):
        overrides = {"allocator": name, "budget.ratio": 4, "scorer": "baselines.snapkv", "protect.recent": 8}
        cache = kvframe.load("identity", overrides).cache(llama)
        llama(**inputs, cache=cache)
        cache.compress()
        sizes[name] = cache.report().bytes
        assert cache.report().entry_ratio >= 4
    assert sizes["baselines.ada"] <= 1.05 * sizes["top_k"]


def test_prefix_and_suffix_are_kept_and_not_charged(llama):
    inputs = batch([60, 50])
    cache = kvframe.load("identity", {**TOP_K, "budget.ratio": 4}).cache(llama, prefix_length=3, suffix_length=[10, 6])
    llama(**inputs, cache=cache)
    cache.compress()
    report = cache.report()
    assert report.entry_ratio == pytest.approx(4, rel=0.1)
    context = (60 - 13) + (50 - 9)
    kept = report.entries / (3 * 2) - (13 + 9)
    assert context / kept >= 4


def test_query_agnostic_compression_comes_before_the_question(llama):
    inputs = batch([50])
    cache = kvframe.load("identity", TOP_K).cache(llama, suffix_length=6)
    llama(inputs["input_ids"][:, :44], cache=cache)
    cache.compress(suffix_length=0)
    body = cache.compressed_layers[0].parts[0].encoded.bounds
    tokens = llama(inputs["input_ids"][:, 44:], cache=cache).logits[:, -1:].argmax(-1)
    llama(tokens, cache=cache)
    assert cache.compressed_layers[0].parts[0].encoded.bounds == body
    assert cache.report().tokens == (51,)


def test_a_second_turn_is_compressed_in_its_turn(llama):
    pipeline = kvframe.load("identity", {**TOP_K, "budget.ratio": 4})
    cache, first, second = pipeline.cache(llama), batch([64], seed=1), batch([64], seed=2)
    answer = llama.generate(**first, cache=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)
    history = torch.cat([answer, second["input_ids"]], 1)
    llama.generate(history, cache=cache, max_new_tokens=4, do_sample=False, eos_token_id=None)
    report = cache.report()
    assert report.tokens == (64 + 4 + 64 + 3,)
    assert report.entry_ratio >= 4
    compressed = max(layer.entries[1] for layer in report.layers)
    assert compressed <= (64 + 4 + 64) / 4


def test_a_copy_goes_on_by_itself(llama):
    inputs, more = batch([44, 30]), torch.tensor([[4, 9, 8], [5, 7, 3]])
    for overrides in (TOP_K, {**ADA, "decode.flush": 4}):
        cache = kvframe.load("identity", overrides).cache(llama)
        prompt = kvframe.load("identity", overrides).cache(llama)
        expected = greedy(llama, inputs, cache)
        first = {**inputs, "position_ids": (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)}
        llama(**first, cache=prompt)
        before, copied = prompt.fork(), copy.deepcopy(prompt)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
        llama(more, attention_mask=mask, position_ids=mask.cumsum(1)[:, -3:] - 1, cache=prompt)
        tokens = llama(**first).logits[:, -1:].argmax(-1)
        for other in (before, copied):
            answer = [tokens]
            for n in range(9):
                mask = torch.nn.functional.pad(inputs["attention_mask"], (0, n + 1), value=1)
                positions = mask.sum(1, keepdim=True) - 1
                logits = llama(answer[-1], attention_mask=mask, position_ids=positions, cache=other).logits
                answer.append(logits[:, -1:].argmax(-1))
            assert torch.equal(torch.cat(answer, 1), expected)


def test_a_failed_compression_is_tried_again_and_loses_nothing(llama):
    cache = kvframe.load("identity", {**TOP_K, "budget.ratio": 16, "budget.strict": True}).cache(llama)
    llama(**batch([40]), cache=cache)
    for _ in range(2):
        with pytest.raises(BudgetError):
            llama(torch.tensor([[5]]), cache=cache)
        assert cache.report().tokens == (40,)
        assert cache.get_seq_length() == 40


def test_a_short_prompt_with_a_long_answer_is_flushed(llama):
    overrides = {**TOP_K, "budget.ratio": 8, "decode.flush": 8}
    cache = kvframe.load("identity", overrides).cache(llama)
    greedy(llama, batch([6]), cache, new=60)
    report = cache.report()
    assert report.tokens == (65,)
    assert cache.compressed_layers[0].recent.length <= 5 + 8
    assert max(layer.entries[1] for layer in report.layers) <= 2 + 60 / 8


def test_blocks_are_flushed_while_decoding(llama):
    overrides = {**TOP_K, "budget.ratio": 4, "decode.flush": 8}
    cache = kvframe.load("identity", overrides).cache(llama)
    greedy(llama, batch([40]), cache, new=60)
    report = cache.report()
    assert cache.compressed_layers[0].recent.length <= 5 + 8
    assert report.entry_ratio >= 4
    assert report.tokens == (99,)


def test_a_prefill_is_shared_and_stays_whole(llama):
    inputs = batch([44, 30])
    pipelines = [kvframe.load("identity", o) for o in (TOP_K, ADA)]
    prefill = Prefill(llama, pipelines)
    llama(**inputs, cache=prefill)
    before = [copy.copy(layer.recent.keys).clone() for layer in prefill.compressed_layers]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
    arguments = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
    for pipeline in pipelines:
        own = pipeline.cache(llama)
        llama(**inputs, cache=own)
        fork = prefill.fork(pipeline)
        token = torch.tensor([[4], [5]])
        assert torch.equal(llama(token, cache=own, **arguments).logits, llama(token, cache=fork, **arguments).logits)
    for layer, keys in zip(prefill.compressed_layers, before, strict=True):
        assert torch.equal(layer.recent.keys, keys)


def test_short_prompts_are_left_alone_and_the_report_says_so(llama):
    inputs = batch([7])
    expected = greedy(llama, inputs)
    cache = kvframe.load("identity", {**TOP_K, "budget.ratio": 64}).cache(llama)
    assert torch.equal(greedy(llama, inputs, cache), expected)
    assert "nothing was compressed" in str(cache.report())


@pytest.mark.parametrize("length", [1, 2, 3])
def test_tiny_prompts(llama, length):
    inputs = batch([length])
    cache = kvframe.load("identity", {"allocator": "top_k", "budget.ratio": 1, "protect.recent": 0}).cache(llama)
    assert torch.equal(greedy(llama, inputs, cache), greedy(llama, inputs))


@pytest.mark.parametrize("scorer", ["baselines.streaming", "baselines.snapkv"])
def test_short_rows_beside_long_ones_are_as_alone(llama, scorer):
    """Rows that are at first no longer than what is protected, in a batch with others: while the answer is written, and
    in a second turn."""
    overrides = {**TOP_K, "scorer": scorer, "budget.ratio": 2, "protect.sink": 4, "protect.recent": 16}
    lengths, more = [20, 200, 3], torch.tensor([[5 + n for n in range(60)]]).expand(3, -1)
    for flush in (None, 16):
        pipeline = kvframe.load("identity", {**overrides, "decode.flush": flush})

        def said(inputs, rows, pipeline=pipeline, flush=flush):
            cache, mask, out = pipeline.cache(llama), inputs["attention_mask"], []
            llama(**inputs, position_ids=(mask.cumsum(1) - 1).clamp_min(0), cache=cache)
            sizes = [1] * 60 if flush else [1, 45, 1, 1]
            for begin, size in zip(torch.tensor([0, *sizes]).cumsum(0).tolist(), sizes, strict=False):
                mask = torch.nn.functional.pad(mask, (0, size), value=1)
                positions = (mask.cumsum(1) - 1)[:, -size:]
                tokens = more[rows, begin : begin + size]
                out.append(llama(tokens, attention_mask=mask, position_ids=positions, cache=cache).logits)
            return torch.cat(out, 1), cache.report()

        inputs = batch(lengths)
        together, _ = said(inputs, [0, 1, 2])
        for row in range(3):
            alone, _ = said(row_of(inputs, row), [row])
            assert torch.allclose(together[row : row + 1], alone, atol=5e-5), (flush, row)
