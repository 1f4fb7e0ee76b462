"""Laws of whole specs, on a tiny random transformer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from kvframe.budget import total_entries
from kvframe.builtin.encoders import Dense
from kvframe.pipeline import Pipeline
from kvframe.spec import Budget, Decode, Protect, spec_class, validate_spec
from kvframe.testing.case import first_difference
from kvframe.testing.law import expect, law
from kvframe.testing.models import HIDDEN, LAYERS
from kvframe.testing.numerics import logits_tolerance
from kvframe.testing.session import FLUSH, RECENT, SINK, Batch, Session, batches, small
from kvframe.types import storage_bytes

# What is not the cache's memory: its books, the model, the stages, and what an encoder learned once.
_SHARED = ("ledger", "info", "pipeline", "kernel", "encoder", "state", "states", "bound", "_open", "_cache", "_handles")


def _short(pipeline: Pipeline) -> Any:
    lengths = st.lists(st.integers(1, 5), min_size=1, max_size=2)
    return st.builds(Batch, lengths.map(tuple), st.integers(0, 999))


def _tolerance(logits: Tensor, batch: Batch) -> float:
    return logits_tolerance(logits, LAYERS, HIDDEN, max(batch.lengths) + batch.padding)


def _same(mine: Tensor, theirs: Tensor, limit: float, expected: str) -> None:
    difference = first_difference((mine, limit), (theirs, 0.0))
    expect(not difference, expected, f"logits {difference}")


def held_tensors(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that can be reached from a value through attributes and containers, but for what is shared."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name not in _SHARED:
                yield from held_tensors(inner, seen)
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from held_tensors(inner, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        yield from held_tensors(vars(value), seen)


@law("pipeline")
def survives_a_file(pipeline: Pipeline) -> None:
    """Written as plain data and read again, a spec is equal to what it was, with the same fingerprint."""
    spec = pipeline.spec
    if isinstance(spec, spec_class()):
        again = validate_spec(spec.dump())
        expect(again == spec and again.fingerprint == spec.fingerprint, f"{spec!r}", f"{again!r}")


@law("pipeline", batches, weight=0.15)
def full_budget_is_full_attention(pipeline: Pipeline, batch: Batch) -> None:
    """At ratio 1 and with nothing coded, decoding gives the logits of transformers' own cache."""
    exact = small(pipeline, budget=Budget(ratio=1), encoder=Dense())
    wanted = Session(None, batch).answer()
    got = Session(exact, batch).answer()
    _same(got, wanted, _tolerance(wanted, batch), "the logits of the full cache")


@law("pipeline", lambda pipeline: batches(pipeline, 2), weight=0.1)
def turns_that_lose_nothing_are_one_prompt(pipeline: Pipeline, batch: Batch) -> None:
    """At ratio 1 and with nothing coded, a history in two prompts, each compressed, gives the logits of transformers'
    own cache of all of it."""
    exact = small(pipeline, budget=Budget(ratio=1), encoder=Dense())
    logits = []
    for turned in (exact, None):
        session = Session(turned, batch)
        session.answer()
        found = session.go_on(batch.answer(24))
        if turned is not None:
            session.cache.compress()
        logits.append(torch.cat([found, session.go_on(batch.answer(1))], 1))
    _same(logits[0], logits[1], _tolerance(logits[1], batch), "the logits of the full cache in the second turn")


@law("pipeline", batches, weight=0.15)
def row_alone_equals_row_in_batch(pipeline: Pipeline, batch: Batch) -> None:
    """A prompt gives the same logits alone as in a left-padded batch, after compression."""
    pipeline = small(pipeline)
    together = Session(pipeline, batch).answer()
    for row in range(len(batch.lengths)):
        alone = Session(pipeline, batch.alone(row)).answer()
        _same(together[row : row + 1], alone, _tolerance(alone, batch), f"of row {row} what it gives alone")


@law("pipeline", lambda pipeline: batches(pipeline, 2), weight=0.1)
def pieces_give_each_row_what_it_gives_alone(pipeline: Pipeline, batch: Batch) -> None:
    """A left-padded batch that is read in two pieces, and goes on without a mask, gives each row what it gives
    alone."""
    pipeline = small(pipeline)

    def read(batch: Batch) -> Tensor:
        held = Session(pipeline, batch, read=False)
        held.cache.prefill(held.model, *batch.prompt())
        found = held.cache.prefill(held.model, batch.more(0, 11))[:, None]
        where = torch.tensor(batch.lengths)[:, None] + 11
        step: Tensor = held.model(batch.more(11, 12), position_ids=where, cache=held.cache).logits
        return torch.cat([found, step], 1)

    together = read(batch)
    for row in range(len(batch.lengths)):
        alone = read(batch.alone(row))
        _same(together[row : row + 1], alone, _tolerance(alone, batch), f"of row {row} what it gives alone")


@law("pipeline", lambda pipeline: batches(pipeline, 2), weight=0.15)
def padding_changes_nothing(pipeline: Pipeline, batch: Batch) -> None:
    """More padding at the left changes no logits."""
    pipeline = small(pipeline)
    plain = Session(pipeline, batch).answer()
    padded = Session(pipeline, replace(batch, padding=5)).answer()
    _same(padded, plain, _tolerance(plain, replace(batch, padding=5)), "the same with 5 more columns of padding")


@law("pipeline", lambda pipeline: st.tuples(batches(pipeline, 2), batches(pipeline, 2)), weight=0.15)
def caches_in_turn_equal_each_alone(pipeline: Pipeline, batches: tuple[Batch, Batch]) -> None:
    """Two caches used in turn on one model give bit by bit what each gives alone."""
    pipeline = small(pipeline)
    pair = batches[0], replace(batches[1], family=batches[0].family)
    alone = [Session(pipeline, batch).answer(4) for batch in pair]
    sessions = [Session(pipeline, batch) for batch in pair]
    for step in range(4):
        for which, session in enumerate(sessions):
            logits = session.go_on(pair[which].answer(4)[:, step : step + 1])
            _same(logits, alone[which][:, step : step + 1], 0.0, f"bit by bit what cache {which} gives alone")


@law("pipeline", lambda pipeline: st.tuples(batches(pipeline, 2), batches(pipeline, 2)), weight=0.15)
def a_reset_cache_is_as_new(pipeline: Pipeline, batches: tuple[Batch, Batch]) -> None:
    """A cache that served one batch and was reset serves the next as a new one would, bit by bit."""
    pipeline = small(pipeline)
    first, second = batches[0], replace(batches[1], family=batches[0].family)
    fresh = Session(pipeline, second).answer()
    used = Session(pipeline, first)
    used.answer()
    used.cache.reset()
    used.batch = second
    used.show(*second.prompt())
    used.cache.compress()
    _same(used.answer(), fresh, 0.0, "bit by bit what a new cache gives")


@law("pipeline", lambda pipeline: batches(pipeline, 2), weight=0.1)
def mixed_precision_is_served(pipeline: Pipeline, batch: Batch) -> None:
    """Under autocast to bfloat16, where keys come in fp32 and values do not, decoding goes on; at ratio 1 and with
    nothing coded its logits are no further from those of fp32 than twice what transformers' own cache gives there."""
    exact = small(pipeline, budget=Budget(ratio=1), encoder=Dense())
    wanted = Session(None, batch).answer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock, got, coded = (Session(kind, batch).answer() for kind in (None, exact, small(pipeline)))
    off, allowed = (float((logits.float() - wanted).norm()) for logits in (got, stock))
    expect(off <= 2 * allowed, f"logits at most {2 * allowed:.4g} off those of fp32, in norm", f"{off:.4g}")
    expect(bool(coded.isfinite().all()), "finite logits", "others")


@law("pipeline", lambda pipeline: batches(pipeline, 2), weight=0.1)
def a_step_that_breaks_off_leaves_no_trace(pipeline: Pipeline, batch: Batch) -> None:
    """After a call that fails in a layer, whether it compressed something or not, the cache reports what it did before,
    and the same call gives bit by bit what it gives without the failure."""
    pipeline = small(pipeline)
    wanted, broken = Session(pipeline, batch), Session(pipeline, batch)
    for tokens in (*batch.answer(2).split(1, 1), batch.answer(24), *batch.answer(2).split(1, 1)):
        before = replace(broken.cache.report(), compress_seconds=0.0)
        mask = broken.mask
        try:
            with _failing(broken.model):
                broken.go_on(tokens)
        except _BreaksOffError:
            broken.mask = mask
        after = replace(broken.cache.report(), compress_seconds=0.0)
        expect(after == before, f"the report of before the step, {before}", f"{after}")
        _same(broken.go_on(tokens), wanted.go_on(tokens), 0.0, "bit by bit what a cache gives whose calls never failed")


class _BreaksOffError(Exception):
    pass


@contextmanager
def _failing(model: Any) -> Iterator[None]:
    """Let calls of a model fail in the last layer, after the others have put their keys into the cache."""

    def fail(*_: Any) -> None:
        raise _BreaksOffError

    handle = model.model.layers[-1].self_attn.q_proj.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@law("pipeline", lambda pipeline: batches(pipeline, 2), weight=0.1)
def the_model_stays_as_it_was(pipeline: Pipeline, batch: Batch) -> None:
    """After use the model's weights, its modules' attributes and hooks, and its logits with a stock cache are as
    before."""
    model = copy.deepcopy(batch.model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    before = Session(None, batch, model).answer()
    session = Session(small(pipeline), batch, model)
    session.answer()
    del session
    for name, tensor in model.state_dict().items():
        expect(torch.equal(tensor, weights[name]), "weights as before", f"others in {name}")
    for name, module in model.named_modules():
        extra = set(vars(module)) ^ attributes[name]
        expect(not extra, f"the attributes of {name or 'the model'} as before", f"a change of {sorted(extra)}")
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        expect(hooks == 0, "no hooks once the cache is gone", f"{hooks} on {name or 'the model'}")
    _same(Session(None, batch, model).answer(), before, 0.0, "the logits that the stock cache gave before")


@law("pipeline", batches, weight=0.15)
def bytes_are_as_reported(pipeline: Pipeline, batch: Batch) -> None:
    """The report's bytes are the size of all storages that can be reached from the cache, and the sum of its parts."""
    session = Session(small(pipeline), batch)
    session.answer()
    report = session.cache.report()
    held = storage_bytes(list(held_tensors(session.cache)))
    expect(report.bytes == held, f"{held} bytes, which the cache holds", f"{report.bytes} reported")
    parts = sum(report.bytes_by_part.values())
    expect(report.bytes == parts, f"{report.bytes} bytes in parts", f"{parts}: {report.bytes_by_part}")


def _spending(pipeline: Pipeline) -> bool:
    return not pipeline.spec.allocator.keeps_all


def _prices(cache: Any) -> dict[Any, float]:
    """What an entry of each of several grades costs, as a share of the dearest's; nothing if there is only one."""
    bits = cache.pipeline.grade_bits(cache.info, cache.compressed_layers[0].recent.keys.element_size())
    return {} if len(bits) == 1 else {e: b / bits[-1] for e, b in zip(cache.pipeline.encoders, bits, strict=True)}


def _as_asked(pipeline: Pipeline, report: Any, ratio: float) -> bool:
    """Whether as many entries are left as the ratio allows, or as it is not for these to say: all are kept, or some are
    coarser than others."""
    free = pipeline.spec.allocator.keeps_all or len(pipeline.encoders) > 1
    return free or bool(report.entry_ratio >= ratio * (1 - 1e-9))


def _within(session: Session, suffix: int) -> None:
    """What each row's entries cost, over all layers and heads, exact ones included, against what the budget allows."""
    held_by = session.cache
    units, batch = held_by.info.layers * held_by.info.kv_heads, len(session.batch.lengths)
    held = (units * held_by.valid.sum(1)).double()
    price = _prices(held_by)
    for layer in held_by.compressed_layers:
        for part in layer.parts:
            count = part.encoded.offsets.diff().reshape(batch, -1)
            if (each := price.get(part.encoder)) is not None:
                count = -(-count // part.encoder.block) * part.encoder.block * each
            held = held + count.sum(1)
    # The suffix is not charged; answer tokens that still stand in the recent window are not yet compressed.
    spec, context = held_by.pipeline.spec, session.mask.sum(1) - suffix
    itemsize, bits = held_by.compressed_layers[0].recent.keys.element_size(), held_by.pipeline.entry_bits
    charged = context.clamp_max(spec.protect.sink + spec.protect.recent)
    total = total_entries(
        spec.budget, units * context, units * charged, held_by.info, itemsize, bits(held_by.info, itemsize)
    )
    # What is protected is kept even if it costs more.
    allowed = total.maximum(units * charged) + units * suffix
    found = f"{held.tolist()}"
    expect((held <= allowed + 1e-6).all(), f"at most {allowed.tolist()} for {context.tolist()} tokens", found)


@law("pipeline", batches, applies=_spending, weight=0.15)
def budget_is_respected(pipeline: Pipeline, batch: Batch) -> None:
    """After compression each row holds at most its tokens / ratio entries, protected ones included, and the report says
    so."""
    pipeline = small(pipeline)
    session = Session(pipeline, batch)
    ratio = float(pipeline.spec.budget.ratio or 1)
    _within(session, pipeline.spec.protect.suffix)
    report = session.cache.report()
    asked = report.requested_ratio >= ratio * (1 - 1e-9) or not pipeline.spec.budget.counts_entries
    expect(asked, f"a requested ratio of {ratio}", str(report.requested_ratio))
    kept = _as_asked(pipeline, report, report.requested_ratio)
    expect(kept, f"a ratio of at least {report.requested_ratio}", str(report.entry_ratio))


@law("pipeline", lambda pipeline: batches(pipeline, 2), weight=0.15)
def decoding_steps_equal_one_block(pipeline: Pipeline, batch: Batch) -> None:
    """After compression, tokens one by one give the logits that they give in one block."""
    pipeline = small(pipeline, decode=Decode())
    tokens = batch.answer(4)
    block = Session(pipeline, batch).go_on(tokens)
    steps = Session(pipeline, batch).answer(4)
    _same(steps, block, _tolerance(block, batch), "the logits of one block")


@law("pipeline", lambda pipeline: batches(pipeline, 2), applies=lambda p: bool(p.spec.allocator.streams), weight=0.15)
def flushing_stays_within_budget(pipeline: Pipeline, batch: Batch) -> None:
    """With an allocator that streams, blocks of answer tokens are compressed as they leave the recent window: at every
    step no more than a block too many is exact, and what was compressed is within the ratio."""
    pipeline = small(pipeline, decode=Decode(flush=FLUSH))
    session = Session(pipeline, batch)
    protect = pipeline.spec.protect
    tokens = batch.answer(3 * FLUSH)
    for step in range(tokens.shape[1]):
        logits = session.go_on(tokens[:, step : step + 1])
        expect(logits.isfinite().all(), "finite logits", f"others at step {step}")
        exact = session.cache.compressed_layers[0].recent.length
        expect(exact <= protect.recent + protect.suffix + FLUSH, f"at most {protect.recent} recent tokens, the suffix "
               f"and a block of {FLUSH}", f"{exact} at step {step}")  # fmt: skip
        report = session.cache.report()
        kept = _as_asked(pipeline, report, float(pipeline.spec.budget.ratio or 1))
        expect(kept, f"a ratio of at least {pipeline.spec.budget.ratio}", f"{report.entry_ratio} at step {step}")


@law("pipeline", lambda pipeline: batches(pipeline, 2), weight=0.15)
def a_second_prompt_is_compressed(pipeline: Pipeline, batch: Batch) -> None:
    """A second turn's prompt is attended with what is there, then compressed in its turn, within the ratio."""
    pipeline = small(pipeline)
    session = Session(pipeline, batch)
    session.answer()
    logits = session.go_on(batch.answer(24))
    session.cache.compress()
    logits = torch.cat([logits, session.go_on(batch.answer(1))], 1)
    expect(logits.isfinite().all(), "finite logits", "inf or NaN")
    report = session.cache.report()
    seen = tuple(length + 3 + 24 + 1 for length in batch.lengths)
    expect(report.tokens == seen, f"{seen} tokens seen", str(report.tokens))
    kept = _as_asked(pipeline, report, float(pipeline.spec.budget.ratio or 1))
    expect(kept, f"a ratio of at least {pipeline.spec.budget.ratio}", str(report.entry_ratio))


@law("pipeline", _short, weight=0.3)
def tiny_prompts_are_served(pipeline: Pipeline, batch: Batch) -> None:
    """Prompts of one to five tokens, none protected, go through every stage, within the ratio."""
    pipeline = small(pipeline, protect=Protect(sink=0, recent=0), decode=Decode())
    session = Session(pipeline, batch)
    if not pipeline.spec.allocator.keeps_all:
        _within(session, 0)
    expect(session.answer(2).isfinite().all(), "finite logits", "inf or NaN")


def _with_short_ones(pipeline: Pipeline) -> Any:
    edge = SINK + RECENT
    short = st.lists(st.sampled_from([1, edge - 1, edge, edge + 1, 3 * edge]), min_size=2, max_size=2)
    # The last one is long enough at a ratio of 16, so that stages have something to do.
    return st.builds(Batch, short.map(lambda some: (*some, 16 * edge + 7)), st.integers(0, 999))


@law("pipeline", _with_short_ones, applies=_spending, weight=0.1)
def too_short_prompts_keep_what_is_protected(pipeline: Pipeline, batch: Batch) -> None:
    """A prompt whose protected tokens cost more than its budget keeps them, at most what it has, and nothing else: no
    error, the logits that it gives alone, and a note."""
    edge = SINK + RECENT
    pipeline = small(
        pipeline,
        protect=Protect(sink=SINK, recent=RECENT),
        budget=Budget(ratio=16, of="bytes" if len(pipeline.encoders) > 1 else "entries"),
        decode=Decode(),
    )
    session = Session(pipeline, batch)
    report, units = session.cache.report(), session.cache.info.layers * session.cache.info.kv_heads
    expect(any("too short" in n for n in report.notes), "a note that rows are too short", str(report.notes))
    together = session.answer(2)
    for row, length in enumerate(batch.lengths[:-1]):
        alone = Session(pipeline, batch.alone(row))
        held, kept = alone.cache.report().entries, units * min(length, edge)
        expect(held == kept, f"{kept} entries of the {units * length} of row {row}", str(held))
        wanted = alone.answer(2)
        _same(together[row : row + 1], wanted, _tolerance(wanted, batch), f"of row {row} what it gives alone")
