"""Prompts that are read in chunks and compressed between them."""

from __future__ import annotations

import pytest
import torch
from tiny import MODELS, batch, greedy, tiny_model

import kvframe
from kvframe.errors import InputError, SpecError

SMALL = {"protect.recent": 5, "protect.sink": 2}
TOP_K = {"allocator": "top_k", "budget.ratio": 4, "scorer": {"name": "baselines.snapkv", "window": 5}, **SMALL}
ADA = {**TOP_K, "allocator": "baselines.ada"}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_lost_is_nothing_changed(name):
    model, inputs = tiny_model(name), batch([90, 31])
    expected = model(
        **inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp_min(0), use_cache=False
    ).logits[:, -1]
    for chunk in (1000, 29):
        cache = kvframe.load("identity", SMALL).cache(model)
        logits = cache.prefill(model, **inputs, chunk=chunk)
        assert torch.allclose(logits, expected, atol=5e-5)
        assert (len(cache.compressed_layers[0].parts) > 0) == (chunk < 90)
        assert cache.report().tokens == (90, 31)


@pytest.mark.parametrize("overrides", [TOP_K, ADA, {**TOP_K, "encoder": "int8"}], ids=["top_k", "ada", "int8"])
def test_what_is_held_stays_below_a_chunk_and_the_budget(llama, overrides):
    inputs = batch([301, 122, 20])
    cache = kvframe.load("identity", {**overrides, "protect.recent_min": 1}).cache(llama)
    longest, seen = 0, []
    read = type(cache).compress_waiting

    def watch(tokens=0):
        nonlocal longest
        longest = max(longest, cache.compressed_layers[0].recent.length)
        read(cache, tokens)
        seen.append(cache.report())

    cache.compress_waiting = watch
    cache.prefill(llama, **inputs, chunk=64)
    assert len(seen) == 4
    assert longest <= 5 + 64
    for report in seen:
        assert report.entry_ratio >= 4
    cache.compress()
    report = cache.report()
    assert report.tokens == (301, 122, 20)
    # The short row waited to the end: its budget was below what is protected of it.
    heads = torch.stack([p.encoded.offsets.diff() for p in cache.compressed_layers[1].parts]).sum(0).view(3, 2)
    assert heads[0].float().mean() <= 2 + 301 / 4
    assert heads[1].float().mean() <= 2 + 122 / 4
    assert heads[2].float().mean() <= 20 / 4


def test_a_report_tells_what_is_held_while_a_chunk_waits(llama, tmp_path, caplog):
    """Of 300 and 190 tokens the last 100 columns wait: the ratio counts them, the report and the log of a save say so,
    and once they are compressed the file is as small as the ratio says."""
    inputs, units = batch([300, 190]), 3 * 2
    cache = kvframe.load("identity", TOP_K).cache(llama)
    cache.prefill(llama, **inputs, chunk=100)
    report = cache.report()
    assert report.seen_entries == units * 490
    # All that is held belongs to the context here, and nothing else does.
    assert report.entry_ratio == pytest.approx(report.seen_entries / report.entries)
    assert report.entry_ratio < 2.2
    note = "100, 100 tokens wait uncompressed until the answer begins, or cache.compress() is called"
    assert report.notes[-1] == note
    assert f"entries held      {report.entries} of {report.seen_entries} over 3 layers" in str(report)
    cache.save(tmp_path / "waiting")
    assert [r.getMessage() for r in caplog.records if r.name == "kvframe"] == [f"Saved as it is: {note}."]
    again = kvframe.load_cache(tmp_path / "waiting", llama).report()
    assert (again.entry_ratio, again.notes) == (report.entry_ratio, report.notes)
    caplog.clear()
    cache.compress()
    cache.save(tmp_path / "small")
    assert not caplog.records
    report = cache.report()
    assert report.entry_ratio == pytest.approx(report.seen_entries / report.entries)
    assert report.entry_ratio >= 4
    assert not report.notes
    assert (tmp_path / "small").stat().st_size < 0.6 * (tmp_path / "waiting").stat().st_size


def test_sinks_are_kept_of_rows_that_begin_late(llama):
    inputs = batch([120, 33])
    cache = kvframe.load("identity", {**TOP_K, "scorer": "baselines.streaming"}).cache(llama)
    alone = kvframe.load("identity", {**TOP_K, "scorer": "baselines.streaming"}).cache(llama)
    cache.prefill(llama, **inputs, chunk=40)
    cache.compress()
    row = {name: tensor[1:, 87:] for name, tensor in inputs.items()}
    llama(**row, cache=alone)
    alone.compress()
    # Layer 0 sees the tokens themselves, so its keys do not depend on what was dropped.
    mine = cache.select([1]).compressed_layers[0].parts[0].decode()
    theirs = alone.compressed_layers[0].parts[0].decode()
    assert torch.allclose(mine.keys[:2], theirs.keys[:2], atol=1e-5)


def test_generate_in_chunks_does_the_same(llama):
    inputs = batch([132, 77])
    pipeline = kvframe.load("identity", {**ADA, "prefill.flush": 20, "decode.flush": 4})
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cache = pipeline.cache(llama)
    tokens = llama.generate(**inputs, cache=cache, prefill_chunk_size=33, **settings)[:, 132:]
    other = pipeline.cache(llama)
    logits = other.prefill(llama, **inputs, chunk=33)
    assert torch.equal(logits.argmax(-1), tokens[:, 0])
    assert cache.report().tokens == (137, 82)
    assert cache.report().entry_ratio >= 4
    assert cache.compressed_layers[0].recent.length < 33


def test_turns_are_read_in_chunks(llama):
    first, second = batch([70, 41], seed=1), batch([60, 60], seed=2)
    cache = kvframe.load("identity", TOP_K).cache(llama)
    answer = greedy(llama, first, cache, new=4)
    more = torch.cat([answer[:, -1:], second["input_ids"]], 1)
    cache.prefill(llama, more, chunk=25)
    cache.compress()
    report = cache.report()
    assert report.tokens == (70 + 4 + 60, 41 + 4 + 60)
    assert report.entry_ratio >= 4


def test_what_must_be_seen_whole_says_so(llama, monkeypatch):
    from kvframe_gracekv import exact_flow

    monkeypatch.setattr(exact_flow.ExactFlow, "streams", False)
    inputs = batch([90])
    cache = kvframe.load("gracekv", {"budget.ratio": 2, **SMALL}).cache(llama)
    with pytest.raises(InputError, match=r"Allocator 'gracekv.exact_flow' plans over the whole prompt"):
        cache.prefill(llama, **inputs, chunk=30)
    with pytest.raises(InputError, match="a chunk's share of it is not known"):
        kvframe.load("identity", {**TOP_K, "budget": {"entries": 30}}).cache(llama).prefill(llama, **inputs, chunk=30)
    with pytest.raises(SpecError, match=r"prefill.flush: null"):
        kvframe.load("gracekv", {"prefill.flush": 30})
    cache = kvframe.load("identity", TOP_K).cache(llama)
    for change, said in (
        ({"chunk": 1}, "at least 2 tokens"),
        ({"input_ids": inputs["input_ids"][0]}, r"must be \[B, T\]"),
        ({"attention_mask": inputs["attention_mask"][:, 1:]}, "a column for each"),
    ):
        with pytest.raises(InputError, match=said):
            cache.prefill(llama, **{**inputs, **change})
    assert cache.get_seq_length() == 0
