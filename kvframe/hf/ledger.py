"""The books of a cache: what came in, what was kept, and what that costs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvframe.budget import Regions, block_entries, entry_budget, total_entries
from kvframe.hf.remarks import on_waiting
from kvframe.regroup import Parts, body_entries
from kvframe.report import CacheReport, LayerReport
from kvframe.spec import Budget
from kvframe.types import ModelInfo, Plan, storage_bytes

if TYPE_CHECKING:
    from kvframe.hf.layer import CompressedLayer


log = logging.getLogger("kvframe")


@dataclass(frozen=True)
class Share:
    """What one compression may spend, int64 `[B]` each, entries over all layers and heads.

    Attributes:
        body: for what is compressed now.
        total: what the budget allows for it, protected tokens included where they are charged now.
        owed: entries that protected tokens cost beyond the budget, to be saved on what comes later.
    """

    body: Tensor
    total: Tensor
    owed: Tensor


class Ledger:
    """Counts tokens, entries and seconds over the compressions of one cache."""

    def __init__(self) -> None:
        self.compressions = 0
        self.seconds = 0.0
        self.tokens: Tensor | None = None  # int64 [B], valid tokens seen
        self.begun: Tensor | None = None  # bool [B], rows that something was entered for
        # int64 [B] over all layers and heads: entries of the context that was compressed, entries that the budgets
        # allowed for it, entries kept of it.
        self.context = self.allowed = self.kept = torch.zeros(1, dtype=torch.int64)
        self.owed = self.kept  # int64 [B], entries that protected tokens cost beyond the budget so far
        self.notes: list[str] = []
        self.remarks: dict[str, str] = {}  # the notes that give way to newer ones, by what they are about
        self.aloud = True  # whether remarks go to the log, too: not where the report is shown anyway

    def see(self, new: Tensor) -> None:
        """Count new columns `bool [B, Q]`."""
        count = new.sum(1)
        self.tokens = count if self.tokens is None else self.tokens + count

    def forget(self, gone: Tensor) -> None:
        """Take columns `bool [B, Q]` off again."""
        if self.tokens is not None:
            self.tokens = self.tokens - gone.sum(1)

    def note(self, text: str) -> None:
        """Say something in the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def remark(self, about: str, text: str, loud: bool = True) -> None:
        """Say something in the report in place of what was said about the same before, "" = nothing any more; `loud`:
        the first time in the log, too."""
        if before := self.remarks.get(about):
            self.notes.remove(before)
        elif text and loud and self.aloud and about not in self.remarks:
            log.warning("%s%s.", text[0].upper(), text[1:])
        if text:
            self.note(text)
        if text or before:
            self.remarks[about] = text

    def budget(
        self,
        budget: Budget,
        regions: Regions,
        model: ModelInfo,
        itemsize: int,
        bits: float,
        prompt: bool,
        block: int = 1,
    ) -> Share:
        """What may be spent now; for `block` see `entry_budget`. Later prompts, and blocks of generated tokens, get
        their share of the ratio, or of the one that an absolute budget came to at first: their protected tokens are
        those already there. What a row too short for its budget owes is taken off these shares."""
        body = model.layers * model.kv_heads * regions.body.sum(1)
        first = self.begins(regions.body) & (prompt or budget.ratio is None)
        books = (self.context, self.allowed, self.kept, self.owed)
        context, allowed, kept, owing = (book.to(body.device) for book in books)
        share = block_entries(budget, body, model, itemsize, bits)
        if share is None:
            share = torch.where(context > 0, body * allowed // context.clamp_min(1), body)
        # What earlier blocks could not spend, such as less than an entry for each head, is not lost.
        given = torch.minimum((share - owing).clamp_min(0) + (allowed - kept).clamp_min(0), body)
        owed = (owing - share).clamp_min(0)
        if bool(first.any()):
            spend, total = entry_budget(budget, regions, model, itemsize, bits, first, block)
            charged = model.layers * model.kv_heads * regions.charged
            new = torch.where(body > 0, charged - total, 0).clamp_min(0)
            given, owed = torch.where(first, spend, given), torch.where(first, new, owed)
            share = torch.where(first, total.clamp_min(0), share)
        return Share(given, share, owed)

    def begins(self, valid: Tensor) -> Tensor:
        """Rows (of `valid [B, …]`) of which nothing was compressed yet, bool `[B]`."""
        return valid.new_ones(len(valid), dtype=torch.bool) if self.begun is None else ~self.begun

    def body_budget(
        self,
        budget: Budget,
        regions: Regions,
        model: ModelInfo,
        itemsize: int,
        bits: float,
        parts: Sequence[Parts],
        share: Share,
    ) -> tuple[Tensor, Share]:
        """What the whole of a body that is grouped again may hold, int64 `[B]`, and what the block in `regions` may
        come in with: the budget for all that was seen. `parts` are held so far. Rows that begin have their `share`."""
        block = model.layers * model.kv_heads * regions.body.sum(1)
        context = self.context + block
        charged = self.kept - body_entries(parts, model, regions.body.device)
        total = total_entries(budget, context, charged, model, itemsize, bits).minimum(context)
        begins = self.begins(regions.body)
        limit = torch.where(begins, share.body, (total - charged).clamp_min(0))
        more = torch.where(begins, share.total, total.clamp_min(0) - self.allowed)
        return limit, Share(limit.minimum(block), more, torch.where(begins, share.owed, 0))

    def book(
        self,
        plan: Plan,
        regions: Regions,
        model: ModelInfo,
        share: Share,
        seconds: float,
        removed: Tensor | None = None,
    ) -> None:
        """Enter one compression of that `share`; `removed` int64 `[B]` entries went when the body was grouped again.
        Rows that had nothing to compress are not entered."""
        units = model.layers * model.kv_heads
        made = torch.stack([layer.n_entries.sum(1) for layer in plan.layers]).sum(0).to(regions.body.device)
        context, kept = units * regions.body.sum(1), made if removed is None else made - removed
        first = self.begins(regions.body) & regions.body.any(1)
        context = torch.where(first, units * regions.context, context)
        kept = torch.where(first, made + units * regions.charged, kept)
        self.begun = first if self.begun is None else self.begun | first
        total = torch.where(self.begun, share.total, 0)
        self.owed = torch.where(self.begun, share.owed, 0)
        self.context, self.kept, self.allowed = (
            old.to(new.device) + new for old, new in ((self.context, context), (self.kept, kept), (self.allowed, total))
        )
        self.compressions += 1
        self.seconds += seconds
        for note in plan.notes:
            self.note(note)

    def fork(self) -> Ledger:
        """A copy to go on with."""
        other = copy.copy(self)
        other.notes, other.remarks = list(self.notes), dict(self.remarks)
        return other

    def select(self, rows: Tensor) -> None:
        """Keep the books of these batch rows, in this order."""
        names = ("tokens", "begun", "context", "allowed", "kept", "owed") if self.compressions else ("tokens",)
        # A file of before does not know what is owed: nothing, one 0 for all rows.
        self.owed = self.owed.expand_as(self.kept)
        for name in names:
            if (books := getattr(self, name)) is not None:
                setattr(self, name, books[rows.to(books.device)])

    def report(
        self,
        layers: Sequence[CompressedLayer],
        model: ModelInfo,
        watched: Sequence[Tensor],
        learned: Sequence[Tensor],
        valid: Tensor | None,
        uncompressed: tuple[Tensor, Tensor],
        n_layers: int,
        budget: Budget,
    ) -> CacheReport:
        """The report of a cache with these layers; `watched` are the tensors that it holds beside them,
        `learned` those that its encoder has fitted for it alone. `uncompressed` is what the function of
        that name says."""
        exactly = model.layers * model.kv_heads * uncompressed[0]
        context, kept = (book.to(exactly.device) + exactly for book in (self.context, self.kept))
        recent = [t for layer in layers for t in layer.recent.tensors()]
        observed = [t for layer in layers for t in (*layer.queries.tensors(), *layer.outputs.tensors())]
        coded = [t for layer in layers for part in layer.parts for t in part.encoded.tensors()]
        exact = 0 if valid is None else model.layers * model.kv_heads * int(valid.sum())
        columns, batch = (layers[0].seen, 0 if valid is None else len(valid)) if layers else (0, 0)
        itemsize = recent[0].element_size() if recent else 0
        return CacheReport(
            tokens=() if self.tokens is None else tuple(int(n) for n in self.tokens),
            entries=exact + sum(int(p.encoded.offsets[-1]) for layer in layers for p in layer.parts),
            bytes=storage_bytes([*coded, *recent, *observed, *watched, *learned]),
            bytes_by_part={
                "compressed": storage_bytes(coded),
                "recent": storage_bytes(recent),
                "observed": storage_bytes([*observed, *watched]),
                "learned": storage_bytes(learned),
            },
            full_bytes=model.layers * batch * model.kv_heads * columns * model.head_dim * 2 * itemsize,
            requested_ratio=ratio(self.context, self.allowed, budget.ratio if budget.counts_entries else None),
            entry_ratio=ratio(context, kept),
            compress_seconds=self.seconds,
            layers=tuple(
                LayerReport(model.layer_ids[i], entry_range(layer), layer_bytes(layer))
                for i, layer in enumerate(layers)
            ),
            other_layers=n_layers - len(layers),
            notes=(*self.notes, *on_waiting(uncompressed[1])),
            asked_bytes=budget.asked_bytes,
            asked_entries=budget.asked_entries,
            seen_entries=0 if self.tokens is None else model.layers * model.kv_heads * int(self.tokens.sum()),
        )


def ratio(whole: Tensor, part: Tensor, otherwise: float | None = None) -> float:
    """Sum of one over the sum of the other; `otherwise`, or 1, if there is nothing."""
    return float(whole.sum()) / float(part.sum()) if bool(part.any()) else otherwise or 1.0


def entry_range(layer: CompressedLayer) -> tuple[int, int]:
    """Fewest and most compressed entries over the batch rows and heads of a layer."""
    if not layer.parts:
        return (0, 0)
    counts = torch.stack([part.encoded.offsets.diff() for part in layer.parts]).sum(0)
    return int(counts.min()), int(counts.max())


def layer_bytes(layer: CompressedLayer) -> int:
    """Bytes that a layer holds."""
    held = [*layer.recent.tensors(), *layer.queries.tensors(), *layer.outputs.tensors()]
    return storage_bytes([*held, *(t for part in layer.parts for t in part.encoded.tensors())])
