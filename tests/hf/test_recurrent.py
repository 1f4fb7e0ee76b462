"""Models in which some layers recur: attention is compressed, and what recurs goes on as in transformers' own cache."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from hybrids import BEGIN_ANEW, REFUSED, SERVED, hybrid_model
from tiny import batch, greedy, row_of
from transformers import DynamicCache

import kvframe
from kvframe.errors import InputError, ModelError
from kvframe.hf.finding import blocks_of
from kvframe.types import storage_bytes

SMALL = {"protect.recent": 5, "protect.sink": 2}
TOP_K = {"allocator": "top_k", "budget.ratio": 2, "scorer": {"name": "baselines.snapkv", "window": 7}, **SMALL}
FLUSH = {**TOP_K, "allocator": "baselines.ada", "decode.flush": 4}
PLAIN = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}


# Their decoders keep positions to themselves.
LISTENED_TO = ["granite4", "granite4_rope", "zamba", "zaya"]
MODES = ["compressed", "waiting"]


def prompted(model, overrides, inputs, compressed=True):
    cache = kvframe.load("identity", overrides).cache(model)
    read(model, cache, inputs)
    if compressed:
        cache.compress()
    return cache


def read(model, cache, inputs):
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    return model(**inputs, position_ids=positions, cache=cache).logits[:, -1:]


def steps(model, cache, inputs, tokens):
    """Logits of feeding `tokens [B, n]` one by one after the prompt `inputs`."""
    out = []
    for n in range(tokens.shape[1]):
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, n + 1), value=1)
        positions = mask.sum(1, keepdim=True) - 1
        out.append(model(tokens[:, n : n + 1], attention_mask=mask, position_ids=positions, cache=cache).logits)
    return torch.cat(out, 1)


def some_tokens(rows, count=9):
    return torch.arange(rows * count).view(rows, count) % 40 + 3


def alike(found, expected):
    """Whether two ways of computing the same differ in the lower half of their digits alone. A state that has seen
    padding, or another row, differs in the first."""
    bound = torch.finfo(expected.dtype).eps ** 0.5 * expected.abs().max()
    return bool((found - expected).abs().max() <= bound)


def answers(model, cache, inputs, tokens):
    return torch.cat([read(model, cache, inputs), steps(model, cache, inputs, tokens)], 1)


@pytest.mark.parametrize("name", SERVED)
def test_identity_gives_the_tokens_of_the_stock_cache(name):
    model, inputs, tokens = hybrid_model(name), batch([33, 18]), some_tokens(2)
    cache = kvframe.load("identity", SMALL).cache(model)
    expected = answers(model, DynamicCache(config=model.config), inputs, tokens)
    assert alike(answers(model, cache, inputs, tokens), expected)
    assert all(layer.parts for layer in cache.compressed_layers)
    cache.reset()
    assert torch.equal(greedy(model, inputs, cache), greedy(model, inputs))


@pytest.mark.parametrize("name", SERVED)
def test_identity_is_as_near_to_the_model_in_bfloat16_as_the_stock_cache(name):
    model, inputs, tokens = copy.deepcopy(hybrid_model(name)).bfloat16(), batch([33, 18]), some_tokens(2)
    exact = copy.deepcopy(model).float()
    expected = answers(exact, DynamicCache(config=model.config), inputs, tokens)
    stock, own = DynamicCache(config=model.config), kvframe.load("identity", SMALL).cache(model)
    errors = [(answers(model, cache, inputs, tokens) - expected).abs().max() for cache in (own, stock)]
    # Both round as often, each in its own order.
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("name", SERVED)
def test_a_row_in_a_padded_batch_goes_on_as_alone(name):
    model, inputs, tokens = hybrid_model(name), batch([41, 28, 23]), some_tokens(3)
    logits = steps(model, prompted(model, FLUSH, inputs), inputs, tokens)
    for row in range(3):
        one = row_of(inputs, row)
        alone = prompted(model, FLUSH, one)
        assert alike(logits[row : row + 1], steps(model, alone, one, tokens[row : row + 1]))
        assert alone.report().entry_ratio > 1.5


@pytest.mark.parametrize("compressed", [True, False], ids=MODES)
@pytest.mark.parametrize("name", SERVED)
def test_a_loaded_cache_goes_on_as_the_saved_one(tmp_path, name, compressed):
    model, inputs, tokens, path = hybrid_model(name), batch([41, 28]), some_tokens(2), tmp_path / "cache.safetensors"
    cache = prompted(model, FLUSH, inputs, compressed)
    cache.save(path)
    written = path.read_bytes()
    first, second = (kvframe.load_cache(path, model) for _ in range(2))
    expected = steps(model, cache, inputs, tokens)
    for loaded in (first, second, kvframe.load_cache(path, model)):
        assert torch.equal(steps(model, loaded, inputs, tokens), expected)
    assert path.read_bytes() == written


@pytest.mark.parametrize("compressed", [True, False], ids=MODES)
@pytest.mark.parametrize("name", SERVED)
def test_forks_and_moved_caches_go_on_alike_and_leave_each_other_alone(name, compressed):
    model, inputs, tokens = hybrid_model(name), batch([41, 28]), some_tokens(2)
    cache = prompted(model, FLUSH, inputs, compressed)
    forks = [cache.fork(), copy.deepcopy(cache), cache.fork().to("cpu")]
    expected = steps(model, cache, inputs, tokens)
    for fork in forks:
        late = fork.fork()
        assert torch.equal(steps(model, fork, inputs, tokens), expected)
        assert torch.equal(steps(model, late, inputs, tokens), expected)


@pytest.mark.parametrize("compressed", [True, False], ids=MODES)
@pytest.mark.parametrize("name", SERVED)
def test_picked_and_multiplied_rows_go_on_as_they_were(name, compressed):
    model, inputs, tokens = hybrid_model(name), batch([41, 28, 23]), some_tokens(3)
    cache = prompted(model, FLUSH, inputs, compressed)
    picked, thrice = cache.select([2, 0]), cache.select([1])
    thrice.batch_repeat_interleave(3)
    expected = steps(model, cache, inputs, tokens)
    for made, rows in ((picked, [2, 0]), (thrice, [1, 1, 1])):
        found = steps(model, made, {key: value[rows] for key, value in inputs.items()}, tokens[rows])
        assert alike(found, expected[rows])


@pytest.mark.parametrize("name", SERVED)
def test_a_reset_cache_begins_anew_with_another_batch(name):
    model, inputs, tokens = hybrid_model(name), batch([26]), some_tokens(1)
    cache = prompted(model, FLUSH, batch([41, 28, 23]))
    steps(model, cache, batch([41, 28, 23]), some_tokens(3))
    cache.reset()
    read(model, cache, inputs)
    expected = steps(model, prompted(model, FLUSH, inputs), inputs, tokens)
    assert torch.equal(steps(model, cache, inputs, tokens), expected)


@pytest.mark.parametrize("name", SERVED)
def test_beams_are_those_of_the_stock_cache(name):
    model, inputs = hybrid_model(name), batch([33, 18])
    settings = {**PLAIN, "num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 7}
    cache = kvframe.load("identity", {**SMALL, "decode.flush": 4}).cache(model)
    found, expected = model.generate(**inputs, cache=cache, **settings), model.generate(**inputs, **settings)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [name for name in SERVED if name not in BEGIN_ANEW])
def test_a_prompt_in_chunks_and_a_later_one_are_read_as_one(name):
    model, inputs = hybrid_model(name), batch([41, 9])
    more = batch([6, 6], seed=1)["input_ids"]
    whole = {
        "input_ids": torch.cat([inputs["input_ids"], more], 1),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 6), value=1),
    }
    expected = read(model, DynamicCache(config=model.config), whole)
    for chunk in (8, 41):
        cache = kvframe.load("identity", SMALL).cache(model)
        cache.prefill(model, **inputs, chunk=chunk)
        positions = whole["attention_mask"].cumsum(1)[:, 41:] - 1
        later = model(more, attention_mask=whole["attention_mask"], position_ids=positions, cache=cache)
        assert alike(later.logits[:, -1:], expected)


@pytest.mark.parametrize("name", BEGIN_ANEW)
def test_a_model_that_begins_anew_with_each_piece_is_not_read_in_chunks(name):
    model, inputs = hybrid_model(name), batch([41])
    cache = kvframe.load("identity", SMALL).cache(model)
    with pytest.raises(InputError, match=f"{type(model).__name__} cannot go on .* with several tokens at once"):
        cache.prefill(model, **inputs, chunk=8)
    expected = read(model, DynamicCache(config=model.config), inputs)
    assert alike(cache.prefill(model, **inputs)[:, None], expected)
    with pytest.raises(InputError, match="give context and question together"):
        cache.prefill(model, inputs["input_ids"][:, :4])
    # Or else there is nothing to refuse.
    stock = DynamicCache(config=model.config)
    for piece in inputs["input_ids"].split(8, 1):
        found = model(piece, cache=stock).logits[:, -1:]
    assert not alike(found, expected)


@pytest.mark.parametrize("name", SERVED)
def test_the_report_counts_what_is_compressed(name):
    model, inputs = hybrid_model(name), batch([41, 28])
    stock = DynamicCache(config=model.config)
    read(model, stock, inputs)
    cache = prompted(model, TOP_K, inputs)
    report = cache.report()
    full = [stock.layers[layer.layer] for layer in report.layers]
    assert report.full_bytes == sum(t.numel() * t.element_size() for layer in full for t in (layer.keys, layer.values))
    beside = [t for t in (cache.valid, cache.positions, cache.recent_validity_bias) if t is not None]
    beside += cache.columns.tensors()
    assert report.bytes == sum(layer.bytes for layer in report.layers) + storage_bytes(beside)
    assert report.entry_ratio == pytest.approx(2, rel=0.05)
    assert report.other_layers == sum(not dummy for dummy in stock.is_dummy) - len(full)


@pytest.mark.parametrize("name", SERVED)
def test_tokens_are_taken_back_where_transformers_can(name):
    model, inputs, tokens = hybrid_model(name), batch([41]), some_tokens(1)
    cache = prompted(model, TOP_K, inputs)
    steps(model, cache, inputs, tokens[:, :1])
    kept = cache.fork()
    if cache.is_croppable:
        cache.activate_past_recording()
        kept.activate_past_recording()
        steps(model, cache, {"attention_mask": torch.ones(1, 42)}, tokens[:, 1:4])
        cache.crop(-3)
        after = [steps(model, c, {"attention_mask": torch.ones(1, 42)}, tokens[:, 4:]) for c in (cache, kept)]
        assert torch.equal(*after)
        return
    expected = steps(model, kept, {"attention_mask": torch.ones(1, 42)}, tokens[:, 1:])
    with pytest.raises(InputError, match="cannot take tokens back"):
        cache.crop(-1)
    assert torch.equal(steps(model, cache, {"attention_mask": torch.ones(1, 42)}, tokens[:, 1:]), expected)
    with pytest.raises(ValueError, match="stateful models"):
        model.generate(**inputs, cache=kvframe.load("identity").cache(model), prompt_lookup_num_tokens=3, **PLAIN)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_says_so_when_a_cache_is_made(name):
    model = hybrid_model(name)
    with pytest.raises(ModelError, match=f"^{type(model).__name__} .*{REFUSED[name]}"):
        kvframe.load("identity").cache(model)


@pytest.mark.parametrize("name", LISTENED_TO)
def test_positions_are_those_that_the_decoder_was_told(name):
    model, ids = hybrid_model(name), batch([20])["input_ids"]
    told = torch.arange(20)[None] + torch.arange(20)[None].ge(9) * 31
    cache = kvframe.load("identity", SMALL).cache(model)
    model(ids, position_ids=told, cache=cache)
    assert torch.equal(cache.positions, told)
    # Another cache in between, and a decoder that is told nothing.
    model(ids, position_ids=told + 5, cache=DynamicCache(config=model.config))
    model(ids[:, :4], cache=cache)
    assert torch.equal(cache.positions[:, 20:], torch.arange(20, 24)[None])


@pytest.mark.parametrize("name", SERVED)
def test_nothing_stays_on_the_model(name):
    model = hybrid_model(name)
    gc.collect()

    def hooks():
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    before, cache = hooks(), prompted(model, TOP_K, batch([20]))
    # Only a decoder that keeps positions to itself is listened to.
    assert hooks() - before == (name in LISTENED_TO)
    del cache
    gc.collect()
    assert hooks() == before


@pytest.mark.parametrize("name", SERVED)
def test_a_call_that_breaks_off_moves_no_state(name):
    """Refused in the first layers, or interrupted before the last that keeps anything: it can be made again."""
    model, inputs, tokens = hybrid_model(name), batch([41, 28]), some_tokens(2, 3)
    cache, other = prompted(model, TOP_K, inputs), prompted(model, TOP_K, inputs)
    last = max(index for index, dummy in enumerate(cache.is_dummy) if not dummy)

    def interrupt(module, args):
        raise KeyboardInterrupt

    for column in range(tokens.shape[1]):
        token, seen = tokens[:, column : column + 1], inputs["attention_mask"].sum(1, keepdim=True) + column
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, column + 1), value=1)
        call = {"input_ids": token, "attention_mask": mask, "position_ids": seen}
        with torch.enable_grad(), pytest.raises(InputError, match=r"torch.no_grad"):
            model(**call, cache=cache)
        handle = blocks_of(model)[last].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**call, cache=cache)
        handle.remove()
        assert torch.equal(model(**call, cache=cache).logits, model(**call, cache=other).logits)
