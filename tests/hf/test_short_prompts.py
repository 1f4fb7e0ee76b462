"""Prompts that are too short for their budget: nothing fails, what is protected is kept, and each row is as alone."""

from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_model

import kvframe
from kvframe.errors import BudgetError
from kvframe.testing.numerics import logits_tolerance

RATIOS = (1, 2, 3, 4, 8, 16, 32)
PROMPT = {"encoder.calibration": "prompt", "budget.of": "bytes"}
SPECS = {
    "snapkv": {},
    "adakv": {},
    "streamingllm": {},
    "h2o": {},
    "gracekv": {},
    "centroidkv": {},
    "forest": {},
    "snapkv+int8": {"encoder": "int8"},
    "gracekv+aatc-codespace": PROMPT,
}
WORDS, LAYERS = 512, 2


@pytest.fixture(scope="module")
def model():
    """Random, with enough words that none comes twice in a prompt: equal keys would be chosen by rounding."""
    return tiny_model("llama", vocab_size=WORDS, num_hidden_layers=LAYERS)


def prompts(lengths):
    """Left-padded prompts; a row's tokens depend on its length alone."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        words = torch.randperm(WORDS - 3, generator=torch.Generator().manual_seed(length))[:length] + 3
        ids[row, max(lengths) - length :], mask[row, max(lengths) - length :] = words, 1
    return ids, mask


def read(model, pipeline, lengths, states=None):
    """A cache that was compressed, and the logits `[B, 2, V]` of two steps after that."""
    ids, mask = prompts(lengths)
    cache = pipeline.cache(model)
    if states is not None:
        cache.begin_with(states)
    model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), cache=cache, logits_to_keep=1)
    cache.compress()
    logits = []
    for token in (5, 9):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = mask.sum(1, keepdim=True) - 1
        step = torch.full((len(lengths), 1), token)
        logits.append(model(step, attention_mask=mask, position_ids=positions, cache=cache).logits)
    return cache, torch.cat(logits, 1)


def entries(cache):
    """What each row holds over all layers and heads."""
    held = 4 * cache.valid.sum(1)
    for layer in cache.compressed_layers:
        for part in layer.parts:
            held = held + part.encoded.offsets.diff().view(len(held), -1).sum(1)
    return held.tolist()


@pytest.mark.parametrize("name", SPECS)
def test_rows_of_all_lengths_are_as_alone_at_any_ratio(name, model):
    """Lengths from 0, a row of nothing but padding, to 300: over the ratios each comes once, and every sixth is held
    against itself alone."""
    spec = name.removesuffix("+int8")
    seen = set()
    for turn, ratio in enumerate(RATIOS):
        pipeline = kvframe.load(spec, {**SPECS[name], "budget.ratio": ratio})
        lengths = sorted({0, *range(turn, 301, len(RATIOS))})
        seen.update(lengths)
        together, logits = read(model, pipeline, lengths)
        # What was learned from the prompts belongs to the batch; what follows from it, to each row.
        states = together.states if "aatc" in name else None
        assert bool(logits.isfinite().all())
        protect = pipeline.spec.protect
        window = protect.recent if protect.recent_min is None else protect.recent_min
        held = entries(together)
        for row, length in enumerate(lengths):
            # Two tokens of the answer beside what is protected.
            assert held[row] >= 4 * (min(length, protect.sink + (protect.recent if length <= 36 else window)) + 2)
            if not length or (row + turn) % 6:
                continue
            alone, wanted = read(model, pipeline, [length], states)
            assert held[row] == entries(alone)[0], (ratio, length)
            limit = logits_tolerance(wanted, LAYERS, 64, 302)
            assert float((logits[row] - wanted[0]).abs().max()) <= limit, (ratio, length)
    assert seen == set(range(301))


@pytest.mark.parametrize(
    "budget", [{"ratio": 8}, {"ratio": 8, "of": "bytes"}, {"entries": 9}, {"bytes": 9 * 512}], ids=str
)
def test_a_row_above_its_budget_keeps_what_is_protected(model, caplog, budget):
    """Budgets of all kinds, in one batch with a row that is long enough for a ratio."""
    pipeline = kvframe.load("snapkv", {"budget": budget})
    cache, _ = read(model, pipeline, [93, 20, 400, 0])
    held = entries(cache)
    assert held[:2] == [4 * 38, 4 * 22]
    assert held[2] == 4 * (50 + 2) if "ratio" in budget else held[2] == 4 * 38
    assert held[3] == 4 * 2
    short = "2 of 4 rows (93, 20 tokens) are" if "ratio" in budget else "3 of 4 rows (93, 20, 400 tokens) are"
    said = f"{short} too short for the budget: only what is protected is kept, 36 tokens at most"
    assert [note for note in cache.report().notes if "too short" in note] == [said]
    assert [r.getMessage() for r in caplog.records if r.name == "kvframe"] == [f"{said}."]
    with pytest.raises(BudgetError, match=r"The budget of row 0 \(93 context tokens\)"):
        read(model, kvframe.load("snapkv", {"budget": {**budget, "strict": True}}), [93, 20, 400, 0])


def test_what_is_whole_says_so_until_there_is_more(model, caplog):
    """A chat: a first turn that is whole, a second that is short, a third that is long enough. The log says it once."""
    cache = kvframe.load("snapkv", {"budget.ratio": 4}).cache(model)
    told = []
    for length in (20, 70, 400):
        ids, _ = prompts([length])
        model(ids, cache=cache, position_ids=torch.arange(length)[None] + cache.get_seq_length())
        cache.compress()
        told.append(cache.report().notes)
    whole = "nothing was compressed: the prompt (20 tokens) is not longer than what is protected"
    short = "the prompt (90 tokens) is too short for the budget: only what is protected is kept, 36 tokens at most"
    assert told == [(whole,), (short,), (short,)]
    assert [r.getMessage() for r in caplog.records if r.name == "kvframe"] == [f"N{whole[1:]}."]
    # What the second turn held too much, the third holds less: together they are a quarter.
    assert entries(cache)[0] == 4 * math.floor(490 / 4)


@pytest.mark.parametrize("spec", ["snapkv", "adakv", "gracekv", "forest"])
@pytest.mark.parametrize("of", ["entries", "bytes"])
def test_turns_come_to_the_ratio_as_soon_as_they_can(model, spec, of):
    """Protected tokens that a short turn could not pay for are paid for by later ones, row by row: a history in turns
    holds no more than its budget as one prompt, and rows begin when they are long enough, as alone."""
    pipeline = kvframe.load(spec, {"budget": {"ratio": 8, "of": of}, "protect": {"sink": 2, "recent": 10}})
    starts = (5, 13, 40, 200)

    def converse(starts):
        caches = pipeline.cache(model)
        mask = torch.zeros(len(starts), 0, dtype=torch.long)
        for turn, lengths in enumerate((starts, [30] * len(starts), [60] * len(starts))):
            ids, new = prompts(lengths)
            mask = torch.cat([mask, new], 1)
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            model(ids, attention_mask=mask, position_ids=positions, cache=caches)
            caches.compress()
            yield turn, caches, entries(caches)

    whole = converse(starts)
    alone = [converse([start]) for start in starts]
    for turn, cache, held in whole:
        assert held == [next(single)[2][0] for single in alone]
        assert cache.ledger.compressions == turn + 1
        for row, start in enumerate(starts):
            tokens = start + (0, 30, 90)[turn]
            assert held[row] <= 4 * max(tokens / 8, min(tokens, 12))
            assert held[row] >= 4 * min(tokens, 12)


def test_a_strict_chunk_waits_and_a_strict_end_is_an_error(model):
    ids, mask = prompts([300, 40])
    for strict in (False, True):
        cache = kvframe.load("snapkv", {"budget.ratio": 4, "budget.strict": strict}).cache(model)
        cache.prefill(model, ids, mask, chunk=100)
        assert entries(cache)[1] == 4 * 40
        if strict:
            with pytest.raises(BudgetError, match=r"row 1 \(40 context tokens\)"):
                cache.compress()
        else:
            cache.compress()
            assert entries(cache)[1] == 4 * 36


def test_blocks_of_an_answer_pay_what_the_prompt_owes(model):
    overrides = {"budget.ratio": 4, "decode.flush": 8, "protect.recent": 8}
    cache, _ = read(model, kvframe.load("snapkv", overrides), [20])
    assert entries(cache)[0] == 4 * (12 + 2)
    for step in range(60):
        model(torch.tensor([[5 + step]]), cache=cache, position_ids=torch.tensor([[22 + step]]))
        exact = cache.valid.sum() - 8
        # 12 are protected from the start; beyond that no more than a quarter is held of what was compressed.
        seen = 82 - 60 + step + 1 - int(exact)
        assert entries(cache)[0] - 4 * int(exact) <= 4 * max(12, seen / 4)
    assert entries(cache)[0] - 4 * int(exact) > 4 * 16


@pytest.mark.parametrize("spec", ["gracekv+aatc-codespace", "snapkv"])
def test_what_learns_from_a_prompt_waits_for_one_that_is_kept(spec, model, tmp_path):
    """Nothing is learned from a body of which nothing is kept; the second turn's is what is learned from, also of a
    cache that was saved in between."""
    encoder = {"name": "aatc.transform", "calibration": "prompt", "search": [2, 4], "joint_heads": 1}
    overrides = PROMPT if "aatc" in spec else {"encoder": encoder, "budget.of": "bytes"}
    pipeline = kvframe.load(spec, {**overrides, "budget.ratio": 8})
    cache = pipeline.cache(model)
    first, second = prompts([37])[0], prompts([400])[0]
    model(first, cache=cache)
    cache.compress()
    assert cache.states is None
    assert cache.report().bytes_by_part["learned"] == 0
    cache.save(tmp_path / "cache")
    loaded = kvframe.load_cache(tmp_path / "cache", model)
    held = []
    for each in (cache, loaded):
        model(second, cache=each, position_ids=torch.arange(37, 437)[None])
        each.compress()
        assert each.report().bytes_by_part["learned"] > 0
        held.append((entries(each), each.report().bytes, each.report().notes))
    assert held[0] == held[1]
    assert held[0][0][0] > 4 * 36


def test_rows_of_which_nothing_but_the_window_is_left_are_as_alone(model):
    """Without sinks, and with windows that take the whole budget, there is nothing compressed to attend, but columns of
    shorter rows are gone all the same."""
    pipeline = kvframe.load("snapkv", {"protect.sink": 0, "protect.recent_min": 4, "budget.ratio": 8})
    lengths, found = (80, 40, 12), {}
    words, valid = prompts(lengths)
    for rows in ([0, 1, 2], [0], [1], [2]):
        begin = int((valid[rows].sum(0) == 0).sum())  # no padding for a row alone
        ids, mask = words[rows][:, begin:], valid[rows][:, begin:]
        cache, logits = pipeline.cache(model), []
        model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), cache=cache)
        for token in range(3):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            step = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
            logits.append(model(torch.full((len(rows), 1), 7 + token), cache=cache, **step).logits[:, -1])
        assert rows != [0] or not cache.compressed_layers[0].parts
        found[tuple(rows)] = torch.stack(logits, 1)
    for row in range(3):
        whole, alone = found[0, 1, 2][row], found[(row,)][0]
        assert float((whole - alone).abs().max()) <= 2 * logits_tolerance(alone, LAYERS, 96, 80)
