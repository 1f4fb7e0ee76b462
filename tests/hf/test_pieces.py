"""Left-padded batches that are read in pieces: each row gives what it gives alone, however the pieces came in."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, greedy, row_of, tiny_model
from torch.nn.functional import pad

import kvframe

SMALL = {"protect.recent": 6, "protect.sink": 2}
SPECS = {
    "identity": ("identity", SMALL),
    "snapkv": ("snapkv", {**SMALL, "budget.ratio": 2, "scorer.window": 16}),
    "gracekv": ("gracekv", {**SMALL, "budget.ratio": 2, "protect.recent_min": None}),
    "centroidkv": ("centroidkv", {**SMALL, "budget.ratio": 2, "scorer.window": 6}),
    "int8": ("int8", SMALL),
    "forest": ("forest", {**SMALL, "budget.ratio": 2, "scorer.window": 6, "allocator.queries": 6}),
}
LENGTHS, SECOND, STEPS = [37, 61, 50, 7], 11, 3  # the last is no longer than what is protected
# Sums of a few dozen terms in another order, through three layers, at logits of order 10. Where that moves a value over
# the edge of a code's step, it is off by 1/127 of the largest one beside it.
TOLERANCE, STEP = 5e-5, 1 / 127


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def positions(mask, columns):
    return (mask.cumsum(1) - 1).clamp_min(0)[:, -columns:]


def prefilled(model, cache, first, second):
    cache.prefill(model, **first)
    return cache.prefill(model, second)[:, None]


def prefilled_in_chunks(model, cache, first, second):
    cache.prefill(model, **first, chunk=23)
    return cache.prefill(model, second, chunk=4)[:, None]


def compressed_between(model, cache, first, second):
    cache.prefill(model, **first)
    cache.compress()
    return cache.prefill(model, second)[:, None]


def with_the_whole_mask(model, cache, first, second):
    cache.prefill(model, **first)
    mask = pad(first["attention_mask"], (0, SECOND), value=1)
    return model(second, attention_mask=mask, position_ids=positions(mask, SECOND), cache=cache).logits


def without_a_mask(model, cache, first, second):
    """Positions are the caller's; padding is known."""
    cache.prefill(model, **first)
    where = positions(pad(first["attention_mask"], (0, SECOND), value=1), SECOND)
    return model(second, position_ids=where, cache=cache).logits


def in_turns(model, cache, first, second):
    """A prompt, two tokens of an answer, another prompt."""
    cache.prefill(model, **first)
    mask = first["attention_mask"]
    for column in (0, 1):
        mask = pad(mask, (0, 1), value=1)
        token = second[:, column : column + 1]
        model(token, attention_mask=mask, position_ids=positions(mask, 1), cache=cache)
    return cache.prefill(model, second[:, 2:])[:, None]


WAYS = (
    prefilled,
    prefilled_in_chunks,
    compressed_between,
    with_the_whole_mask,
    without_a_mask,
    in_turns,
)


def answer(model, cache, mask, tokens, masked):
    """Logits of three tokens that follow, with a mask or without."""
    steps = []
    for n in range(STEPS):
        mask = pad(mask, (0, 1), value=1)
        given = {"attention_mask": mask} if masked else {}
        where = positions(mask, 1)
        steps.append(model(tokens[:, n : n + 1], position_ids=where, cache=cache, **given).logits)
    return torch.cat(steps, 1)


def read(model, spec, way, first, second, follow, masked):
    cache = kvframe.load(*SPECS[spec]).cache(model)
    logits = way(model, cache, first, second)
    mask = pad(first["attention_mask"], (0, SECOND), value=1)
    return torch.cat([logits[:, -1:], answer(model, cache, mask, follow, masked)], 1)


def streams(spec):
    return not kvframe.load(*SPECS[spec]).spec.whole_prompt_only()


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_row_read_in_pieces_gives_what_it_gives_alone(family, spec, way, masked):
    if way is prefilled_in_chunks and not streams(spec):
        return  # refused, as tests/hf/test_chunks.py has it
    model, first = tiny_model(family), batch(LENGTHS)
    generator = torch.Generator().manual_seed(5)
    second, follow = (torch.randint(3, 97, (len(LENGTHS), n), generator=generator) for n in (SECOND, STEPS))
    together = read(model, spec, way, first, second, follow, masked)
    limit = STEP if spec == "int8" else TOLERANCE
    for row in range(len(LENGTHS)):
        rows = slice(row, row + 1)
        alone = read(model, spec, way, row_of(first, row), second[rows], follow[rows], masked)
        assert torch.allclose(together[rows], alone, atol=limit), f"row {row}: {(together[rows] - alone).abs().max()}"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_generate_goes_on_from_what_was_read(family, spec, implementation):
    model, first = tiny_model(family), batch(LENGTHS[:3])
    model.set_attn_implementation(implementation)
    second = torch.randint(3, 97, (3, SECOND), generator=torch.Generator().manual_seed(5))

    def read(first, second):
        cache = kvframe.load(*SPECS[spec]).cache(model)
        cache.prefill(model, **first)
        whole = {
            "input_ids": torch.cat([first["input_ids"], second], 1),
            "attention_mask": pad(first["attention_mask"], (0, SECOND), value=1),
        }
        return greedy(model, whole, cache)

    together = read(first, second)
    for row in range(3):
        assert torch.equal(together[row : row + 1], read(row_of(first, row), second[row : row + 1]))
