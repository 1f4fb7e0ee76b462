"""Regions and the budget's arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import info

import kvframe
from kvframe.budget import entry_budget, fitted_recent, fitted_regions, split_regions
from kvframe.errors import BudgetError, InputError
from kvframe.spec import Budget, Protect


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(0, 6),
    st.integers(0, 9),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 10**6),
)
def test_regions_share_out_the_tokens(lengths, sink, recent, prefix, suffix, seed):
    generator = torch.Generator().manual_seed(seed)
    columns = max(lengths) + 4
    valid = torch.zeros(len(lengths), columns, dtype=torch.bool)
    for row, length in enumerate(lengths):  # padding anywhere
        valid[row, torch.randperm(columns, generator=generator)[:length]] = True
    prefix, suffix = min(prefix, min(lengths)), min(suffix, max(0, min(lengths) - prefix))
    regions = split_regions(valid, Protect(sink=sink, recent=recent), prefix, suffix)
    together = regions.sinks.int() + regions.body.int() + regions.tail.int()
    assert torch.equal(together, valid.int())
    for row, length in enumerate(lengths):
        tokens = valid[row].nonzero()[:, 0].tolist()
        tail = tokens[max(prefix, length - suffix - recent) :]
        first = [t for t in tokens[: max(sink, prefix)] if t not in tail]
        assert regions.tail[row].nonzero()[:, 0].tolist() == tail
        assert regions.sinks[row].nonzero()[:, 0].tolist() == first
        assert int(regions.context[row]) == length - prefix - suffix
        assert int(regions.charged[row]) == len([t for t in first if t not in tokens[:prefix]]) + len(tail) - suffix
    if regions.tail_columns:
        assert not regions.tail[:, : columns - regions.tail_columns].any()


@given(st.lists(st.integers(0, 300), min_size=1, max_size=3), st.floats(1, 8))
def test_a_ratio_is_never_exceeded(lengths, ratio):
    """But by what is protected: a row that is too short for that keeps it, and nothing of its body."""
    valid = torch.stack([torch.arange(300) >= 300 - length for length in lengths])
    regions, model = split_regions(valid, Protect(sink=1, recent=2)), info()
    body, total = entry_budget(Budget(ratio=ratio), regions, model, 4, 8 * 2 * 32)
    short = []
    for row, length in enumerate(lengths):
        allowed, exact = int(4 * length / ratio), 4 * min(length, 3)
        if regions.body[row].any():
            short.append(allowed < exact)
            assert (int(body[row]), int(total[row])) == (max(allowed - exact, 0), allowed)
        else:
            assert int(body[row]) == 0
    strict = Budget(ratio=ratio, strict=True)
    if any(short):
        with pytest.raises(BudgetError):
            entry_budget(strict, regions, model, 4, 8 * 2 * 32)
    else:
        assert torch.equal(entry_budget(strict, regions, model, 4, 8 * 2 * 32)[0], body)


@pytest.mark.parametrize("suffix", [0, 3])
@pytest.mark.parametrize("window", [{}, {"recent_min": 4}, {"recent_min": 4, "recent_share": 0.25}], ids=str)
@pytest.mark.parametrize(
    "given_budget", [{"ratio": 4}, {"ratio": 9}, {"ratio": 4, "of": "bytes"}, {"entries": 20}, {"bytes": 6000}], ids=str
)
def test_a_longer_prompt_holds_no_less_until_its_window_gives_way(given_budget, window, suffix):
    """From 0 tokens to 400 what is kept, in bytes, grows with the prompt. A prompt that is not longer than what is
    protected is whole, and one that is keeps no less than sinks and the shortest window. The one step down is where
    the budget begins to hold a shortened window: there it is met."""
    budget, model = Budget(**given_budget), info()
    protect = Protect(sink=4, recent=32, **window)
    spec = kvframe.load("identity").spec.model_copy(update={"budget": budget, "protect": protect})
    valid = torch.arange(400) >= 400 - torch.arange(suffix, 401)[:, None]
    regions, recent = fitted_regions(valid, spec, model, 4, suffix=suffix)
    bits = 512.0 if budget.counts_entries else 200.0
    body, total = entry_budget(budget, regions, model, 4, bits)
    kept = 4 * 512 * regions.charged + bits * body
    whole = regions.context <= 36
    assert torch.equal(kept[whole], 4 * 512.0 * regions.context[whole])
    steps = (kept[1:] < kept[:-1] - bits).nonzero()[:, 0] + 1
    assert len(steps) <= (recent is not None)
    for row in steps.tolist():
        assert int(total[row]) >= 4 * int(regions.charged[row])
    least = 4 + protect.recent if recent is None else 8
    assert bool((regions.charged >= regions.context.clamp_max(least)).all())
    # Whoever is above the budget keeps the whole window, and nothing else.
    above = (total < 4 * regions.charged) & ~whole
    # A ninth of 37 tokens is less than the 8 of the shortest window, which fits in all the others.
    assert bool(above.any()) == (recent is None or given_budget == {"ratio": 9})
    assert bool((regions.charged[above] == 36).all())
    assert not bool(body[above].any())


def test_ratio_one_keeps_everything():
    valid = torch.ones(2, 50, dtype=torch.bool)
    regions, model = split_regions(valid, Protect()), info()
    body, _ = entry_budget(Budget(ratio=1), regions, model, 4, 512)
    assert torch.equal(body, 4 * regions.body.sum(1))


def test_entries_and_bytes():
    valid = torch.ones(1, 200, dtype=torch.bool)
    regions, model = split_regions(valid, Protect(sink=2, recent=8)), info()
    body, total = entry_budget(Budget(entries=50), regions, model, 4, 512)
    assert (int(body), int(total)) == (4 * 40, 4 * 50)
    # One exact entry takes 2 * 8 values of 4 bytes; a coded one 10 bytes here.
    body, total = entry_budget(Budget(bytes=4000), regions, model, 4, 80)
    assert int(body) == (4000 - 4 * 10 * 64) // 10
    body, _ = entry_budget(Budget(bytes=10**9), regions, model, 4, 80)
    assert int(body) == 4 * 190
    # Where blocks of 32 are paid for together, each head's last one is.
    body, total = entry_budget(Budget(bytes=10**9), regions, model, 4, 80, block=32)
    assert (int(body), int(total)) == (4 * 192, 4 * 200)


def test_messages():
    valid = torch.ones(2, 40, dtype=torch.bool)
    with pytest.raises(InputError, match="exceed the 40 tokens of row 0"):
        split_regions(valid, Protect(), 20, 21)
    with pytest.raises(InputError, match="one for each of the 2 rows, but 3 came"):
        split_regions(valid, Protect(), 0, [1, 2, 3])
    with pytest.raises(InputError, match="must not be negative"):
        split_regions(valid, Protect(), 0, -1)
    with pytest.raises(BudgetError, match=r"row 0 \(40 context tokens\) is 10.0 entries per head, below its 36"):
        entry_budget(Budget(ratio=4, strict=True), split_regions(valid, Protect()), info(), 4, 512)
    with pytest.raises(BudgetError, match="buys less than the 36 protected"):
        entry_budget(Budget(bytes=100, strict=True), split_regions(valid, Protect()), info(), 4, 512)


@pytest.mark.parametrize(
    ("settings", "lengths", "wanted"),
    [
        ({}, [100], None),
        ({"recent_min": 4}, [400], None),  # 40 entries hold the window of 32 and 4 sinks
        ({"recent_min": 4}, [200, 400, 60], [16, 32, 4]),  # what is left, the window, the minimum
        ({"recent_min": 4, "recent_share": 0.25}, [400, 600, 60], [9, 32, 4]),  # 36 is below 48, 56 is not
        ({"recent_min": 50}, [200], None),  # never longer than the window
    ],
)
def test_a_small_budget_shortens_the_recent_window(settings, lengths, wanted):
    protect, model = Protect(sink=4, recent=32, **settings), info()
    valid = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    regions = split_regions(valid, protect)
    recent = fitted_recent(Budget(ratio=10), protect, regions, model, 4)
    assert wanted == (None if recent is None else recent.tolist())
    if recent is not None:
        shortened = split_regions(valid, protect, recent=recent)
        assert shortened.tail.sum(1).tolist() == wanted
        if "recent_share" in settings:
            entry_budget(Budget(ratio=10), split_regions(valid[:2], protect, recent=recent[:2]), model, 4, 512)


@given(st.lists(st.integers(40, 300), min_size=1, max_size=3), st.floats(1, 12), st.floats(40, 4096))
def test_a_ratio_of_bytes_buys_what_the_encoder_declares(lengths, ratio, bits):
    """Protected tokens at full price and the body's at the encoder's: no more bytes than asked for, and not one entry
    less than they buy. Beside it, the same number of bytes as an absolute budget."""
    valid = torch.stack([torch.arange(300) >= 300 - length for length in lengths])
    regions, model = split_regions(valid, Protect(sink=1, recent=2), prefix=3, suffix=4), info()
    exact, itemsize = 8 * 2 * model.head_dim * 2, 2
    body, total = entry_budget(Budget(ratio=ratio, of="bytes"), regions, model, itemsize, bits)
    units = model.layers * model.kv_heads
    for row, length in enumerate(lengths):
        whole = units * (length - 7) * exact
        spent = units * int(regions.charged[row]) * exact + int(body[row]) * bits
        assert spent <= whole / ratio * (1 + 1e-9)
        assert spent > whole / ratio - bits * (1 + 1e-9) or int(body[row]) == units * int(regions.body[row].sum())
        assert int(total[row]) == int(body[row]) + units * int(regions.charged[row])
    one = split_regions(valid[:1], Protect(sink=1, recent=2), prefix=3, suffix=4)
    size = int(units * (lengths[0] - 7) * exact / ratio) // 8
    same, _ = entry_budget(Budget(bytes=size), one, model, itemsize, bits)
    assert 0 <= int(body[0]) - int(same[0]) <= 1 + 8 / bits


def test_bytes_that_buy_less_than_what_is_protected():
    regions = split_regions(torch.ones(1, 300, dtype=torch.bool), Protect(sink=4, recent=32))
    for given_budget in ({"ratio": 32, "of": "bytes"}, {"bytes": "1KiB"}):
        budget = Budget(**given_budget)
        body, total = entry_budget(budget, regions, info(), 4, 100.0)
        # What is owed is counted in coded entries, of which an exact one buys five.
        spent = 4 * 300 * 512 / 32 if budget.bytes is None else 8 * 1024
        assert (int(body), int(total)) == (0, 4 * 36 + math.floor((spent - 4 * 36 * 512) / 100))
        budget = Budget(**given_budget, strict=True)
        with pytest.raises(
            BudgetError, match=r"buys less than the 36 protected tokens, which take .* bytes as they are"
        ):
            entry_budget(budget, regions, info(), 4, 100.0)
    with pytest.raises(ValueError, match="of: bytes belongs to a ratio"):
        Budget(entries=3, of="bytes")
