"""Grouping entries again: which of them join, carried out with their multiplicities as weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvframe.contracts import blaming
from kvframe.errors import StageError
from kvframe.placement import on
from kvframe.ragged import append_part, join_rows
from kvframe.rope import Rope
from kvframe.stages import Allocator
from kvframe.types import Encoded, Entries, ModelInfo, Part, Regrouping, check_shape

Parts = tuple[Part, ...]


def is_body(part: Part) -> bool:
    """Whether a part may be grouped again: what core keeps exactly is held without positions."""
    return part.encoder.uses_positions or part.encoded.positions is not None


def body_entries(parts: Sequence[Parts], model: ModelInfo, device: torch.device) -> Tensor:
    """Entries of each row's body over all layers and heads, int64 `[B]`, on `device`."""
    counts = [
        on(part.encoded.offsets.diff().view(-1, model.kv_heads).sum(1), device)
        for layer in parts
        for part in layer
        if is_body(part)
    ]
    return torch.stack(counts).sum(0) if counts else torch.zeros(1, dtype=torch.int64, device=device)


def regroup_parts(
    parts: Sequence[Parts], allocator: Allocator, model: ModelInfo, budget: Tensor
) -> tuple[list[Parts], Tensor]:
    """Return the parts of all layers with their bodies brought down to `budget` int64 `[B]` entries by the allocator's
    `regroup`, or as they are if they hold no more; and the entries that went, int64 `[B]`. The body becomes one part,
    coded with the states it had. The allocator sees all layers where `budget` is; each body stays on its device.

    Raises StageError if the allocator returns what its contract forbids."""
    held = body_entries(parts, model, budget.device)
    if not bool((held > budget).any()):
        return list(parts), torch.zeros_like(held)
    bodies = [[part for part in layer if is_body(part)] for layer in parts]
    some = next(part for body in bodies for part in body)
    # A layer may hold nothing: its budget went to others.
    nothing = on(no_rows(some.decode()), budget.device)
    with blaming(some.encoder):
        layers = [join([nothing, *(on(part.decode(), budget.device) for part in body)]) for body in bodies]
    owner = f"allocator '{allocator.name}'"
    with blaming(allocator):
        answers = allocator.regroup(layers, model, budget)
    if len(answers) != len(layers):
        raise StageError(f"{owner} must regroup {len(layers)} layers, but returned {len(answers)}.")
    left = torch.stack([answer.n_entries.sum(1) for answer in answers]).sum(0)
    if bool((left > budget).any()):
        row = int((left - budget).argmax())
        raise StageError(f"{owner} left {int(left[row])} entries of row {row}, but the budget is {int(budget[row])}.")
    out = []
    for index, (layer, body, entries, answer) in enumerate(zip(parts, bodies, layers, answers, strict=True)):
        check_regrouping(answer, entries, owner)
        joined = regroup_entries(entries, answer, model.rope[index])
        kept: Parts = tuple(part for part in layer if not is_body(part))
        if body:
            encoder, state = body[0].encoder, body[0].state
            joined = on(joined, body[0].encoded.offsets.device)
            with blaming(encoder):
                kept = append_part(kept, Part(encoder.encode(joined, state), encoder, state))
        out.append(kept)
    return out, held - left


def no_rows(like: Entries) -> Entries:
    """Entries of as many heads, all empty."""
    return Entries(torch.zeros_like(like.offsets), like.keys[:0], like.values[:0], None, like.keys.new_zeros(0).int())


def join(pieces: Sequence[Entries]) -> Entries:
    """The entries of several parts, head by head."""
    rows = [
        Encoded(e.offsets, {"keys": e.keys, "values": e.values}, "rows", e.keys.dtype, e.log_multiplicity, e.positions)
        for e in pieces
    ]
    whole = rows[0]
    for more in rows[1:]:
        whole = join_rows(whole, more)
    return Entries(whole.offsets, whole.codes["keys"], whole.codes["values"], whole.log_multiplicity, whole.positions)


def check_regrouping(answer: Regrouping, entries: Entries, owner: str) -> None:
    """Raise StageError unless each (b, h) has new ids 0..n_entries-1, each with at least one old entry."""
    pairs = len(entries.offsets) - 1
    check_shape(owner, "regroup's joins", answer.joins, (len(entries.keys),))
    counts = answer.n_entries.reshape(-1)
    check_shape(owner, "regroup's n_entries", counts, (pairs,))
    pair = torch.arange(pairs, device=counts.device).repeat_interleave(entries.offsets.diff())
    kept = answer.joins >= 0
    inside = answer.joins < counts[pair]
    begin = counts.cumsum(0) - counts
    used = torch.zeros(int(counts.sum()), dtype=torch.bool, device=counts.device)
    if bool(inside.all()):
        used[(begin[pair] + answer.joins)[kept]] = True
    if not bool(used.all()) or not bool(inside.all()):
        raise StageError(f"{owner}: regroup's ids must be 0..n_entries-1 in each head, each with at least one entry.")


def regroup_entries(entries: Entries, answer: Regrouping, rope: Rope) -> Entries:
    """Return the entries joined: multiplicities add up; keys, values and positions are means weighted with them, keys
    before RoPE if `align_rope`. An entry that nothing joins is copied bit by bit. Entries must have positions."""
    counts = answer.n_entries.reshape(-1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    pair = torch.arange(len(counts), device=counts.device).repeat_interleave(entries.offsets.diff())
    old = (answer.joins >= 0).nonzero().squeeze(1)
    into = (offsets[pair] + answer.joins)[old]  # [K]
    total = int(offsets[-1])
    size = torch.bincount(into, minlength=total)
    if entries.positions is None:
        raise StageError("entries can only be grouped again if their positions are held.")
    logs = entries.log_multiplicity
    mass = torch.ones(len(old), dtype=torch.float64, device=into.device) if logs is None else logs[old].double().exp()
    at = entries.positions[old]

    def add(rows: Tensor) -> Tensor:
        return torch.zeros(total, *rows.shape[1:], dtype=rows.dtype, device=rows.device).index_add_(0, into, rows)

    whole = add(mass)
    where = (add(mass * at.double()) / whole).round().int()
    keys, values = entries.keys.index_select(0, old), entries.values.index_select(0, old)
    turned = rope.unrotate(keys, at.long()) if answer.align_rope else keys.float()
    share = (mass / whole[into]).to(turned.dtype)[:, None]
    new_keys = add(turned * share)
    if answer.align_rope:
        new_keys = rope.rotate(new_keys, where.long())
    new_keys, new_values = new_keys.to(keys.dtype), add(values.to(turned.dtype) * share).to(values.dtype)
    alone = size[into] == 1
    new_keys[into[alone]], new_values[into[alone]] = keys[alone], values[alone]
    where[into[alone]] = at[alone]
    log_multiplicity = None if logs is None and bool((size <= 1).all()) else whole.log().float()
    if log_multiplicity is not None and logs is not None:
        log_multiplicity[into[alone]] = logs[old][alone]
    return replace(
        entries, offsets=offsets, keys=new_keys, values=new_values, log_multiplicity=log_multiplicity, positions=where
    )
