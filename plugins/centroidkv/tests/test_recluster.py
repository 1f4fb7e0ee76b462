"""The whole body clustered again while an answer is written, on a live cache."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

import kvframe
from kvframe.errors import StageError
from kvframe_centroidkv.allocator import SoftMatching

SMALL = {
    "protect.recent": 3,
    "protect.sink": 2,
    "segmenter.size": 16,
    "decode.flush": 5,
    "allocator.recluster": True,
}
UNITS = 3 * 2


def feed(model, cache, inputs, steps):
    """Give the model a prompt and then always the same tokens, yielding after each step."""
    places = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    model(**inputs, position_ids=places, cache=cache)
    rows, mask = len(inputs["input_ids"]), inputs["attention_mask"]
    for step in range(steps):
        mask = torch.cat([mask, mask.new_ones(rows, 1)], 1)
        ids = torch.full((rows, 1), 3 + step * 7 % 90)
        position = (mask.sum(1) - 1)[:, None]
        yield model(ids, attention_mask=mask, position_ids=position, cache=cache).logits


@pytest.mark.parametrize(
    ("spec", "budget"),
    [
        ("centroidkv", {"budget.ratio": 3}),
        ("centroidkv", {"budget.entries": 14}),
        ("centroidkv-paper", {"budget.entries": 14}),
    ],
)
@pytest.mark.parametrize("lengths", [[40, 23, 20]])
def test_tokens_are_counted_and_the_budget_is_kept_at_every_step(spec, budget, lengths, llama, prompts):
    cache = kvframe.load(spec, {**SMALL, **budget}).cache(llama)
    seen = torch.tensor(lengths)
    for _ in feed(llama, cache, prompts(lengths), 60):
        seen = seen + 1
        exact = cache.valid.sum(1)
        held, tokens = torch.zeros(len(lengths), dtype=torch.long), []
        for layer in cache.compressed_layers:
            counted = torch.zeros(len(lengths) * 2, dtype=torch.float64)
            for part in layer.parts:
                entries = part.decode()
                size = entries.offsets.diff()
                held += size.view(len(lengths), 2).sum(1)
                mass = entries.log_multiplicity
                mass = torch.ones(len(entries.keys)) if mass is None else mass.exp()
                pair = torch.arange(len(size)).repeat_interleave(size)
                counted.index_add_(0, pair, mass.double())
            tokens.append(counted.view(len(lengths), 2))
        # A multiplicity is held as an fp32 logarithm; each time that it is summed and held again rounds once more.
        limit = 64 * torch.finfo(torch.float32).eps * float(seen.max())
        assert float((torch.stack(tokens) - (seen - exact)[None, :, None]).abs().max()) <= limit
        for row, count in enumerate(seen.tolist()):
            waiting = int(exact[row]) - 3  # what left the window, but is no full block yet
            allowed = UNITS * 14 if "budget.entries" in budget else UNITS * (count - waiting) // 3
            spent = int(held[row]) + UNITS * min(3, int(exact[row]))
            assert spent <= allowed
    assert cache.ledger.compressions > 8


@pytest.mark.parametrize("spec", ["centroidkv", "centroidkv-paper"])
def test_a_row_is_the_same_alone_and_in_a_padded_batch(spec, llama, prompts):
    inputs, pipeline = prompts([41, 30]), kvframe.load(spec, {**SMALL, "budget.entries": 12})
    together = torch.stack(list(feed(llama, pipeline.cache(llama), inputs, 25)))
    alone = {name: tensor[1:, 11:] for name, tensor in inputs.items()}
    single = torch.stack(list(feed(llama, pipeline.cache(llama), alone, 25)))
    assert float((together[:, 1:] - single).abs().max()) < 1e-3 * float(single.abs().max())


@pytest.mark.parametrize("spec", ["centroidkv", "centroidkv-paper"])
def test_identical_entries_merge_exactly(spec, llama):
    """Copies of one token at one position, clustered again and again: the next step changes by rounding only."""
    from transformers import DynamicCache

    token, position, n = 7, 5, 30
    stock = DynamicCache(config=llama.config)
    cache = kvframe.load(spec, {**SMALL, "budget.entries": 8}).cache(llama)
    at, ids = torch.full((1, n), position), torch.full((1, n), token)
    llama(ids, position_ids=at, cache=stock)
    llama(ids, position_ids=at, cache=cache)
    for _ in range(40):
        wanted = llama(ids[:, :1], position_ids=at[:, :1], cache=stock).logits
        got = llama(ids[:, :1], position_ids=at[:, :1], cache=cache).logits
        assert float((got - wanted).abs().max()) < 256 * torch.finfo(torch.float32).eps * float(wanted.abs().max())
    assert cache.ledger.compressions >= 7
    assert cache.report().entry_ratio > 7


def test_quantised_entries_are_clustered_again(llama, prompts):
    """An encoder that rounds is asked to code the body anew; positions and counts come through."""
    spec = {**SMALL, "budget.entries": 14, "encoder": {"name": "baselines.per_token", "bits": 8}}
    cache = kvframe.load("centroidkv", spec).cache(llama)
    for _ in feed(llama, cache, prompts([40]), 20):
        pass
    part = cache.compressed_layers[0].parts[-1]
    assert part.decode().positions is not None
    total = part.decode().log_multiplicity.double().exp().sum()
    assert abs(float(total) - 2 * (60 - 2 - int(cache.valid.sum()))) < 1e-3


def test_what_does_not_hold_counts_is_refused():
    with pytest.raises(ValidationError, match="set multiplicity: count, or recluster: false"):
        SoftMatching(recluster=True, multiplicity="none")


def test_a_regrouping_that_breaks_its_contract_is_named(llama, prompts, monkeypatch):
    from kvframe.types import Regrouping

    def too_much(self, body, model, budget):
        return [
            Regrouping(torch.cat([torch.arange(n) for n in e.offsets.diff().tolist()]), e.offsets.diff().view(1, 2))
            for e in body
        ]

    def a_gap(self, body, model, budget):
        return [Regrouping(torch.ones(len(e.keys), dtype=torch.long), torch.full((1, 2), 2)) for e in body]

    for wrong, said in ((too_much, "the budget is"), (a_gap, "ids must be 0..n_entries-1")):
        monkeypatch.setattr(SoftMatching, "regroup", wrong)
        cache = kvframe.load("centroidkv", {**SMALL, "budget.entries": 12}).cache(llama)
        with pytest.raises(StageError, match=said):
            list(feed(llama, cache, prompts([40]), 12))
