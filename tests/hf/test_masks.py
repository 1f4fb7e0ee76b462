"""Masks beyond padding: documents and drafts that do not see each other, and tokens hidden after they were read. Exact
tokens follow the mask of each call as transformers' own cache does; compressed ones refuse it."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import batch, tiny_model
from torch.nn.functional import pad
from transformers import DynamicCache

import kvframe
from kvframe.errors import InputError
from kvframe.hf.columns import Columns

IDENTITY = ("identity", {"protect.recent": 5, "protect.sink": 2})
SNAPKV = ("snapkv", {"budget.ratio": 1, "protect.recent": 8, "protect.sink": 3})
DROPS = ("snapkv", {"budget.ratio": 3, "protect.recent": 8, "protect.sink": 3, "scorer.window": 9})
TOLERANCE = 5e-5  # fp32 sums of a few dozen terms in another order, through three layers, at logits of order 10


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    made = tiny_model("llama")
    made.set_attn_implementation(request.param)
    return made


def caches(model, *specs):
    return [DynamicCache(config=model.config), *(kvframe.load(name, changes).cache(model) for name, changes in specs)]


def as_float(mask):
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)


def given(model, mask):
    """A mask of four dimensions as the model's attention takes it: eager attention adds it to the logits."""
    return as_float(mask) if model.config._attn_implementation.endswith("eager") else mask


def same(got, wanted):
    return torch.allclose(got, wanted, atol=TOLERANCE)


def documents(*lengths):
    """Positions [1, T] and mask bool [1, 1, T, T] of documents that do not see each other."""
    owner = torch.cat([torch.full((n,), index) for index, n in enumerate(lengths)])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    causal = torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    return positions, ((owner[:, None] == owner) & causal)[None, None]


@pytest.mark.parametrize("spec", [IDENTITY, SNAPKV], ids=["identity", "snapkv"])
def test_documents_of_one_prompt_are_all_there_for_the_answer(model, spec):
    positions, mask = documents(19, 14, 8)
    tokens, found = batch([41])["input_ids"], []
    for cache in caches(model, spec):
        steps = [model(tokens, attention_mask=given(model, mask), position_ids=positions, cache=cache).logits]
        for n in range(3):
            where = torch.tensor([[19 + n]])
            steps.append(model(torch.tensor([[7 + n]]), position_ids=where, cache=cache).logits)
        found.append(torch.cat(steps, 1))
    assert len(cache.compressed_layers[0].parts) > 0
    assert cache.report().tokens == (44,)
    assert same(found[1], found[0])


@pytest.mark.parametrize("spec", [IDENTITY, DROPS], ids=["identity", "drops"])
def test_branches_of_drafts_do_not_see_each_other(model, spec):
    """A tree of drafts gives each branch what it gives when it is all there is."""
    tokens = batch([41])["input_ids"]
    cache = kvframe.load(*spec).cache(model)
    model(tokens, cache=cache)
    model(torch.tensor([[5]]), cache=cache)
    branches = [[11, 12, 13], [11, 14, 15], [16]]
    ids = torch.tensor([[11, 12, 13, 14, 15, 16]])
    depth = torch.tensor([[42, 43, 44, 43, 44, 42]])
    above = torch.eye(6, dtype=torch.bool)
    for draft, parents in ((1, [0]), (2, [0, 1]), (3, [0]), (4, [0, 3])):
        above[draft, parents] = True
    mask = torch.cat([torch.ones(6, 42, dtype=torch.bool), above], 1)[None, None]
    tree = cache.fork()
    logits = model(ids, attention_mask=given(model, mask), position_ids=depth, cache=tree).logits
    for branch, columns in zip(branches, ([0, 1, 2], [0, 3, 4], [5]), strict=True):
        alone = model(torch.tensor([branch]), cache=cache.fork()).logits
        assert same(logits[:, columns], alone)
    assert tree.report().tokens == (48,)


PLACES = {"sinks": slice(0, 2), "body": slice(20, 30), "body and window": slice(40, 56), "window": slice(54, 58)}


@pytest.mark.parametrize("spec", [IDENTITY, SNAPKV], ids=["identity", "snapkv"])
@pytest.mark.parametrize("place", PLACES)
def test_tokens_hidden_before_they_are_compressed_are_not_attended(model, spec, place):
    tokens, mask, found = batch([60])["input_ids"], torch.ones(1, 61, dtype=torch.long), []
    mask[:, PLACES[place]] = 0
    for cache in caches(model, spec):
        model(tokens, cache=cache)
        steps = []
        for n in range(3):
            where = {"attention_mask": pad(mask, (0, n), value=1), "position_ids": torch.tensor([[60 + n]])}
            steps.append(model(torch.tensor([[7 + n]]), cache=cache, **where).logits)
        found.append(torch.cat(steps, 1))
    assert len(cache.compressed_layers[0].parts) > 0
    assert same(found[1], found[0])


def test_generate_follows_a_mask_that_hides_what_was_read(model):
    tokens = batch([60])["input_ids"]
    whole, mask = torch.cat([tokens, torch.tensor([[7]])], 1), torch.ones(1, 61, dtype=torch.long)
    mask[:, 20:30] = mask[:, 55:57] = 0
    found = []
    for cache in caches(model, IDENTITY, SNAPKV):
        model(tokens, cache=cache)
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found.append(model.generate(whole, attention_mask=mask, cache=cache, **settings))
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


def started(model, spec=SNAPKV, steps=1):
    """Caches that have compressed a prompt of 60, transformers' own among them."""
    made = caches(model, spec)
    for cache in made:
        model(batch([60])["input_ids"], cache=cache)
        for n in range(steps):
            model(torch.tensor([[7 + n]]), cache=cache)
    return made


@pytest.mark.parametrize("dimensions", [2, 4])
def test_the_exact_window_is_hidden_and_shown_again(model, dimensions):
    found = []
    for cache in started(model):
        steps = []
        for n, columns in enumerate((slice(54, 57), slice(55, 60), slice(0, 0))):
            mask = torch.ones(1, 62 + n, dtype=torch.bool)
            mask[:, columns] = False
            mask = mask.long() if dimensions == 2 else given(model, mask[:, None, None])
            where = {"attention_mask": mask, "position_ids": torch.tensor([[61 + n]])}
            steps.append(model(torch.tensor([[9 + n]]), cache=cache, **where).logits)
        found.append(torch.cat(steps, 1))
    assert same(found[1], found[0])


def hiding(model, columns, dimensions, width=62, queries=1):
    mask = torch.ones(1, width, dtype=torch.bool)
    mask[:, columns] = False
    if dimensions == 2:
        return mask.long()
    causal = torch.ones(queries, width, dtype=torch.bool).tril(width - queries)
    return given(model, (causal & mask)[None, None])


@pytest.mark.parametrize("dimensions", [2, 4])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("spec", [IDENTITY, SNAPKV, DROPS], ids=["identity", "snapkv", "drops"])
def test_what_is_compressed_cannot_be_hidden(model, spec, queries, dimensions):
    cache = started(model, spec)[1]
    fork, mask = cache.fork(), hiding(model, slice(20, 30), dimensions, 61 + queries, queries)
    where = {"attention_mask": mask, "position_ids": torch.arange(61, 61 + queries)[None]}
    tokens = torch.arange(9, 9 + queries)[None]
    with pytest.raises(InputError, match=r"hides 10 tokens of row 0, from column 20 on, but what is compressed"):
        model(tokens, cache=cache, **where)
    where["attention_mask"] = hiding(model, slice(0, 0), dimensions, 61 + queries, queries)
    assert model(tokens, cache=fork, **where).logits.isfinite().all()


@pytest.mark.parametrize("dimensions", [2, 4])
def test_what_was_hidden_when_the_rest_was_compressed_is_gone(model, dimensions):
    cache = kvframe.load(*SNAPKV).cache(model)
    model(batch([60])["input_ids"], cache=cache)
    where = {"attention_mask": hiding(model, slice(20, 30), 2, 61), "position_ids": torch.tensor([[60]])}
    model(torch.tensor([[7]]), cache=cache, **where)
    where = {"attention_mask": hiding(model, slice(20, 30), dimensions), "position_ids": torch.tensor([[61]])}
    model(torch.tensor([[8]]), cache=cache.fork(), **where)
    where["attention_mask"] = hiding(model, slice(20, 25), dimensions)
    with pytest.raises(InputError, match=r"shows 5 tokens of row 0, from column 25 on, but what was hidden"):
        model(torch.tensor([[8]]), cache=cache, **where)


def test_tokens_hidden_from_the_start_may_be_shown_while_exact(model):
    """As with transformers' cache; padding, which comes before a row's first token, stays hidden."""
    tokens, found = batch([40])["input_ids"], []
    first = torch.ones(1, 40, dtype=torch.long)
    first[:, :4] = first[:, 20:24] = 0
    then = torch.ones(1, 42, dtype=torch.long)
    for cache in caches(model, ("identity", {"protect.recent": 64})):
        where = {"attention_mask": first, "position_ids": (first.cumsum(1) - 1).clamp_min(0)}
        model(tokens, cache=cache, **where)
        then[:, :4] = 0 if isinstance(cache, DynamicCache) else 1
        where = {"attention_mask": then, "position_ids": torch.tensor([[36, 37]])}
        found.append(model(torch.tensor([[7, 8]]), cache=cache, **where).logits)
    assert same(found[1], found[0])
    assert cache.report().tokens == (38,)


@pytest.mark.parametrize("padding_sees", ["itself", "everything"])
@pytest.mark.parametrize("spec", [IDENTITY, SNAPKV], ids=["identity", "snapkv"])
def test_padding_that_sees_something_is_left_out_by_the_answers_mask(model, spec, padding_sees):
    """Masks of four dimensions let padding see itself, or everything, so that no row of them is empty."""
    inputs, found = batch([50, 37]), []
    mask = inputs["attention_mask"]
    whole = torch.ones(50, 50, dtype=torch.bool).tril()[None, None] & mask[:, None, None].bool()
    blind = ~mask[:, None, :, None].bool()
    whole = whole | (blind if padding_sees == "everything" else blind & torch.eye(50, dtype=torch.bool))
    for cache in caches(model, spec):
        where, then = (mask.cumsum(1) - 1).clamp_min(0), mask
        steps = [model(inputs["input_ids"], attention_mask=given(model, whole), position_ids=where, cache=cache).logits]
        for n in range(3):
            then = pad(then, (0, 1), value=1)
            token, at = torch.tensor([[7 + n], [8 + n]]), then.sum(1, keepdim=True) - 1
            steps.append(model(token, attention_mask=then, position_ids=at, cache=cache).logits)
        found.append(torch.cat(steps, 1)[:, 13:])
    assert len(cache.compressed_layers[0].parts) > 0
    assert same(found[1], found[0])


def test_masks_of_a_model_with_sliding_layers():
    """Given by kind of layer, as transformers takes them."""
    model, tokens, found = tiny_model("gemma3"), batch([41])["input_ids"], []
    positions, mask = documents(19, 14, 8)
    near = torch.ones(41, 41, dtype=torch.bool).triu(1 - model.config.sliding_window)
    both = {"full_attention": mask, "sliding_attention": mask & near}
    hidden = torch.ones(1, 42, dtype=torch.long)
    hidden[:, 20:24] = hidden[:, 33:36] = 0
    for cache in caches(model, IDENTITY, SNAPKV):
        steps = [model(tokens, attention_mask=both, position_ids=positions, cache=cache).logits]
        for n in range(3):
            where = {"attention_mask": pad(hidden, (0, n), value=1), "position_ids": torch.tensor([[19 + n]])}
            steps.append(model(torch.tensor([[7 + n]]), cache=cache, **where).logits)
        found.append(torch.cat(steps, 1))
    assert len(cache.compressed_layers[0].parts) > 0
    assert same(found[1], found[0])
    assert same(found[2], found[0])


def test_a_bias_on_compressed_tokens_is_refused_and_on_exact_ones_followed(model):
    found = []
    for cache in started(model, IDENTITY):
        bias = torch.zeros(1, 1, 1, 62)
        bias[..., 58:60] = -1.5
        where = {"attention_mask": bias, "position_ids": torch.tensor([[61]])}
        found.append(model(torch.tensor([[9]]), cache=cache, **where).logits)
    assert same(found[1], found[0])
    bias = torch.zeros(1, 1, 1, 63)
    bias[..., 30] = -1.5
    with pytest.raises(InputError, match="adds a bias to the logits of compressed tokens"):
        model(torch.tensor([[9]]), attention_mask=bias, position_ids=torch.tensor([[62]]), cache=cache)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 40), "attention_mask has 40 columns, but the cache has seen 61 and 1 came"),
        ((1, 1, 1, 70), "attention_mask has 70 columns, but the cache has seen 61 and 1 came"),
    ],
)
def test_a_mask_of_another_width_is_refused(model, shape, message):
    cache, mask = started(model)[1], torch.ones(shape, dtype=torch.bool)
    with pytest.raises(InputError, match=message):
        model(torch.tensor([[9]]), attention_mask=mask, position_ids=torch.tensor([[61]]), cache=cache)


def test_what_a_refused_call_hides_is_not_hidden_later(model):
    cache, tokens = kvframe.load(*SNAPKV).cache(model, prefix_length=70), batch([60])["input_ids"]
    model(tokens, cache=cache)
    where = {"attention_mask": hiding(model, slice(20, 30), 2, 61), "position_ids": torch.tensor([[60]])}
    with pytest.raises(InputError, match="exceed"):
        model(torch.tensor([[7]]), cache=cache, **where)
    cache.prefix_length = 0
    cache.compress()
    wanted = started(model, steps=0)[0]
    assert same(*(model(torch.tensor([[7]]), cache=held).logits for held in (cache, wanted)))


# What a cache knows of its past goes with it.


def handed_on(way, cache, model, folder):
    if way == "fork":
        return cache.fork()
    if way == "deepcopy":
        return copy.deepcopy(cache)
    if way == "select":
        return cache.select([1, 0]).select([1, 0])
    if way == "crop":
        other = cache.fork()
        other.crop(0)  # so that what comes are drafts
        model(torch.tensor([[3, 4]] * 2), cache=other)
        other.crop(-2)
        return other
    if way == "to":
        return cache.fork().to("cpu")
    cache.save(folder / "held")
    return kvframe.load_cache(folder / "held", model)


@pytest.mark.parametrize("way", ["fork", "deepcopy", "select", "crop", "to", "file"])
def test_what_is_known_of_the_past_goes_with_the_cache(way, tmp_path):
    model, inputs = tiny_model("llama"), batch([50, 37])
    mask = inputs["attention_mask"]
    cache = kvframe.load(*DROPS).cache(model)
    model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp_min(0), cache=cache)
    mask = pad(mask, (0, 1), value=1)
    mask[:, 20:24] = 0  # gone from now on
    model(torch.tensor([[7], [8]]), attention_mask=mask, position_ids=torch.tensor([[50], [37]]), cache=cache)
    other = handed_on(way, cache, model, tmp_path)
    for name in ("padding", "compressed"):
        assert torch.equal(getattr(other.columns, name), getattr(cache.columns, name))
    mask, where = pad(mask, (0, 1), value=1), torch.tensor([[51], [38]])

    def step(which, mask):
        return model(torch.tensor([[5], [6]]), attention_mask=mask, position_ids=where, cache=which.fork()).logits

    assert torch.equal(step(other, mask), step(cache, mask))
    assert same(step(other, None), step(cache, mask))
    for columns, value in ((slice(20, 24), 1), (slice(14, 16), 0)):
        wrong = mask.clone()
        wrong[:, columns] = value
        with pytest.raises(InputError, match=r"attention_mask (hides|shows)"):
            step(other, wrong)


def test_a_reset_cache_knows_nothing(llama):
    cache = kvframe.load(*DROPS).cache(llama)
    llama(**batch([50, 37]), cache=cache)
    cache.compress()
    cache.reset()
    assert vars(cache.columns) == vars(Columns())
