"""Both specs on a live cache: what users call."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria

import kvframe
from kvframe.errors import BudgetError

SMALL = {"protect.recent": 3, "protect.sink": 2, "segmenter.size": 16}
SPECS = ["centroidkv", "centroidkv-paper"]


def generate(model, inputs, cache=None, new=12, **settings):
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new, **settings}
    out = model.generate(**inputs, **({} if cache is None else {"cache": cache}), **settings)
    return out[:, inputs["input_ids"].shape[1] :]


def row_of(inputs, row):
    kept = inputs["attention_mask"][row].bool()
    return {name: tensor[row : row + 1, kept] for name, tensor in inputs.items()}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("flush", [None, 5])
def test_a_row_is_the_same_alone_and_in_a_padded_batch(spec, flush, llama, prompts):
    inputs = prompts([70, 41, 30])
    pipeline = kvframe.load(spec, {**SMALL, "budget.ratio": 3, "decode.flush": flush})
    together = generate(llama, inputs, pipeline.cache(llama), 20)
    for row in range(3):
        assert torch.equal(generate(llama, row_of(inputs, row), pipeline.cache(llama), 20)[0], together[row])


@pytest.mark.parametrize("spec", SPECS)
def test_ratio_1_gives_the_stock_tokens(spec, llama, prompts):
    inputs = prompts([50, 33, 20])
    cache = kvframe.load(spec, {**SMALL, "budget.ratio": 1, "decode.flush": 4}).cache(llama)
    assert torch.equal(generate(llama, inputs, cache, 16), generate(llama, inputs, None, 16))
    assert cache.report().entry_ratio == 1


@pytest.mark.parametrize("spec", SPECS)
def test_sampling_is_reproducible_and_in_a_batch(spec, llama, prompts):
    inputs = prompts([50, 33, 20])
    pipeline = kvframe.load(spec, {**SMALL, "budget.ratio": 4, "decode.flush": 4})
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(generate(llama, inputs, pipeline.cache(llama), 16, do_sample=True, temperature=0.8))
    assert drawn[0].shape == (3, 16)
    assert torch.equal(*drawn)


@pytest.mark.parametrize("spec", SPECS)
def test_low_precision_generates(spec, llama, prompts):
    import copy

    model = copy.deepcopy(llama).to(torch.bfloat16)
    cache = kvframe.load(spec, {**SMALL, "budget.ratio": 4, "decode.flush": 4}).cache(model)
    assert generate(model, prompts([50, 33]), cache, 9).shape == (2, 9)
    assert cache.compressed_layers[0].parts[-1].decode().keys.dtype == torch.bfloat16


@pytest.mark.parametrize("spec", SPECS)
def test_prompts_shorter_than_a_chunk_or_than_what_is_protected(spec, llama, prompts):
    pipeline = kvframe.load(spec, {"protect.recent": 3, "protect.sink": 2, "budget.ratio": 1.5})
    for lengths in ([9], [9, 3], [1]):
        assert generate(llama, prompts(lengths), pipeline.cache(llama), 6).shape == (len(lengths), 6)
    strict = kvframe.load(spec, {**SMALL, "budget.ratio": 4, "budget.strict": True})
    with pytest.raises(BudgetError, match="below its 5 protected tokens"):
        generate(llama, prompts([9]), strict.cache(llama))


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_bytes_shrink_by_the_ratio(spec, ratio, llama, prompts):
    """Bytes are those of the storages held: heads of different lengths are not padded to the longest."""
    cache = kvframe.load(spec, {**SMALL, "budget.ratio": ratio}).cache(llama)
    inputs = prompts([200, 200])
    llama(**inputs, cache=cache)
    cache.compress()
    report = cache.report()
    units, entries = 3 * 2, report.entries
    # Two rows of 200 tokens; an entry is a key and a value of 16 fp32 numbers, and in the body a log multiplicity.
    assert entries <= 2 * units * 200 / ratio
    rows = entries * 2 * 16 * 4
    body = entries - 2 * units * (3 + 2)
    # Beside the rows: offsets of the parts, validity, positions, watched queries.
    bookkeeping = 3 * 2 * (2 * 2 + 1) * 8 + 2 * 3 * (8 + 1)
    assert report.bytes_by_part["compressed"] + report.bytes_by_part["recent"] <= rows + body * 4 + bookkeeping
    lengths = {tuple(part.encoded.offsets.diff().tolist()) for layer in cache.compressed_layers for part in layer.parts}
    ragged = any(len(set(line)) > 1 for line in lengths)
    assert ragged == (spec == "centroidkv")


class EveryStep(StoppingCriteria):
    """Looks at the cache after every step."""

    def __init__(self, cache, look):
        self.cache, self.look = cache, look

    def __call__(self, input_ids, scores, **kwargs):
        self.look(self.cache)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("lengths", [[64], [64, 40, 21]])
def test_the_budget_holds_at_every_step(spec, lengths, llama, prompts):
    ratio, recent, sink, flush, new = 3, 4, 2, 8, 150
    cache = kvframe.load(
        spec, {"budget.ratio": ratio, "protect.recent": recent, "protect.sink": sink, "decode.flush": flush}
    ).cache(llama)
    steps = []

    def look(cache):
        if not cache.compressed_layers[0].parts:
            return
        units = 3 * 2
        held = torch.zeros(len(lengths), dtype=torch.long)
        for layer in cache.compressed_layers:
            for part in layer.parts:
                held += part.encoded.offsets.diff().view(len(lengths), -1).sum(1)
        exact = cache.valid.sum(1)  # tokens of the recent window
        seen = cache.ledger.tokens
        for row, length in enumerate(lengths):
            # What the prompt may keep, and of what was generated the share that left the window; recent tokens exact.
            left = int(seen[row]) - length - (int(exact[row]) - recent)
            assert int(held[row]) + units * recent <= units * length / ratio + units * left / ratio
            assert int(exact[row]) <= recent + flush
        steps.append(held)

    generate(llama, prompts(lengths), cache, new, stopping_criteria=[EveryStep(cache, look)])
    assert len(steps) == new - 1
    assert steps[-1][0] > steps[0][0]
    assert cache.report().entry_ratio >= ratio


@pytest.mark.parametrize("spec", SPECS)
def test_identical_entries_on_the_live_cache(spec, llama):
    """Copies of one token at one position have equal keys and values in every layer. However they are merged, the next
    step must not change but by rounding; without the multiplicity it does."""
    n, token, position = 60, 7, 5
    prompt, positions = torch.full((1, n), token), torch.full((1, n), position)
    after, step_position = torch.tensor([[11]]), torch.tensor([[position + 1]])
    stock = DynamicCache(config=llama.config)
    llama(prompt, position_ids=positions, cache=stock)
    wanted = llama(after, position_ids=step_position, cache=stock).logits
    errors = {}
    for multiplicity in ("count", "coherence", "none"):
        cache = kvframe.load(spec, {**SMALL, "budget.ratio": 8, "allocator.multiplicity": multiplicity}).cache(llama)
        llama(prompt, position_ids=positions, cache=cache)
        cache.compress()
        assert cache.report().entry_ratio >= 8
        got = llama(after, position_ids=step_position, cache=cache).logits
        errors[multiplicity] = float((got - wanted).abs().max() / wanted.abs().max())
    # Keys of equal tokens differ by the rounding of three layers; so do the logits.
    assert errors["count"] < 256 * torch.finfo(torch.float32).eps
    assert errors["coherence"] < 256 * torch.finfo(torch.float32).eps
    assert errors["none"] > 1e-3


def test_identical_entries_while_decoding(llama):
    """As above, with the copies clustered block by block as they leave the recent window."""
    n, token, position = 40, 7, 5
    stock = DynamicCache(config=llama.config)
    cache = kvframe.load("centroidkv", {**SMALL, "budget.ratio": 4, "decode.flush": 8}).cache(llama)
    at = torch.full((1, n), position)
    llama(torch.full((1, n), token), position_ids=at, cache=stock)
    llama(torch.full((1, n), token), position_ids=at, cache=cache)
    for _ in range(40):
        one = torch.tensor([[token]])
        wanted = llama(one, position_ids=at[:, :1], cache=stock).logits
        got = llama(one, position_ids=at[:, :1], cache=cache).logits
        assert float((got - wanted).abs().max()) < 256 * torch.finfo(torch.float32).eps * float(wanted.abs().max())
    assert cache.ledger.compressions >= 5
    one, at = torch.tensor([[11]]), torch.tensor([[position + 1]])
    wanted = llama(one, position_ids=at, cache=stock).logits
    got = llama(one, position_ids=at, cache=cache).logits
    assert float((got - wanted).abs().max()) < 256 * torch.finfo(torch.float32).eps * float(wanted.abs().max())


def test_an_overflowing_model_is_named(llama, prompts):
    import copy

    from kvframe.errors import InputError

    broken = copy.deepcopy(llama)
    broken.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    cache = kvframe.load("centroidkv-paper", SMALL).cache(broken)
    broken(**prompts([40]), cache=cache)
    with pytest.raises(InputError, match="keys of layer 1 are not finite"):
        cache.compress()
