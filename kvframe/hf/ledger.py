"""The books of a cache: what came in, what was kept, and what that costs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvframe.budget import Regions, block_entries, entry_budget, total_entries
from kvframe.regroup import Parts, body_entries
from kvframe.report import CacheReport, LayerReport
from kvframe.spec import Budget
from kvframe.types import ModelInfo, Plan, storage_bytes

if TYPE_CHECKING:
    from kvframe.hf.layer import CompressedLayer


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
        self.notes: list[str] = []

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

    def note_nothing(self, valid: Tensor) -> None:
        """Say that the tokens `bool [B, R]` of a first prompt stay as they are."""
        seen = ", ".join(str(int(n)) for n in valid.sum(1))
        self.note(f"nothing was compressed: the prompt ({seen} tokens) is not longer than what is protected")

    def budget(
        self,
        budget: Budget,
        regions: Regions,
        model: ModelInfo,
        itemsize: int,
        bits: float,
        prompt: bool,
        block: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """`(for the body, total)` int64 `[B]`; for `block` see `entry_budget`. Later prompts, and blocks of generated
        tokens, get their share of the ratio, or of the one that an absolute budget came to at first: their protected
        tokens are those already there."""
        first = self.begins(regions.body) & (prompt or budget.ratio is None)
        if bool(first.all()):
            return entry_budget(budget, regions, model, itemsize, bits, block=block)
        body = model.layers * model.kv_heads * regions.body.sum(1)
        share = block_entries(budget, body, model, itemsize, bits)
        if share is None:
            share = torch.where(self.context > 0, body * self.allowed // self.context.clamp_min(1), body)
        # What earlier blocks could not spend, such as less than an entry for each head, is not lost.
        given = torch.minimum(share + (self.allowed - self.kept).clamp_min(0), body)
        if not bool(first.any()):
            return given, share
        whole = entry_budget(budget, regions, model, itemsize, bits, first, block)
        return torch.where(first, whole[0], given), torch.where(first, whole[1], share)

    def begins(self, valid: Tensor) -> Tensor:
        """Rows (of `valid [B, …]`) of which nothing was compressed yet, bool `[B]`."""
        return valid.new_ones(len(valid), dtype=torch.bool) if self.begun is None else ~self.begun

    def body_budget(
        self, budget: Budget, regions: Regions, model: ModelInfo, itemsize: int, bits: float, parts: Sequence[Parts]
    ) -> tuple[Tensor, Tensor]:
        """`(for the whole body, more than before)` int64 `[B]`, of a body that is grouped again: what the budget allows
        for all that was seen, with the block in `regions`. `parts` are held so far."""
        context = self.context + model.layers * model.kv_heads * regions.body.sum(1)
        charged = self.kept - body_entries(parts, model, regions.body.device)
        total = total_entries(budget, context, charged, model, itemsize, bits).minimum(context)
        return (total - charged).clamp_min(0), total - self.allowed

    def book(
        self,
        plan: Plan,
        regions: Regions,
        model: ModelInfo,
        total: Tensor,
        seconds: float,
        removed: Tensor | None = None,
    ) -> None:
        """Enter one compression; `removed` int64 `[B]` entries went when the body was grouped again. Rows that had
        nothing to compress are not entered."""
        units = model.layers * model.kv_heads
        made = torch.stack([layer.n_entries.sum(1) for layer in plan.layers]).sum(0).to(regions.body.device)
        context, kept = units * regions.body.sum(1), made if removed is None else made - removed
        first = self.begins(regions.body) & regions.body.any(1)
        context = torch.where(first, units * regions.context, context)
        kept = torch.where(first, made + units * regions.charged, kept)
        self.begun = first if self.begun is None else self.begun | first
        total = torch.where(self.begun, total, 0)
        self.context, self.kept, self.allowed = (
            old.to(new.device) + new for old, new in ((self.context, context), (self.kept, kept), (self.allowed, total))
        )
        self.compressions += 1
        self.seconds += seconds

    def fork(self) -> Ledger:
        """A copy to go on with."""
        other = copy.copy(self)
        other.notes = list(self.notes)
        return other

    def select(self, rows: Tensor) -> None:
        """Keep the books of these batch rows, in this order."""
        names = ("tokens", "begun", "context", "allowed", "kept") if self.compressions else ("tokens",)
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
        n_layers: int,
        asked_bytes: str,
    ) -> CacheReport:
        """The report of a cache with these layers; `watched` are the tensors that it holds beside them,
        `learned` those that its encoder has fitted for it alone."""
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
            requested_ratio=ratio(self.context, self.allowed),
            entry_ratio=ratio(self.context, self.kept),
            compress_seconds=self.seconds,
            layers=tuple(
                LayerReport(model.layer_ids[i], entry_range(layer), layer_bytes(layer))
                for i, layer in enumerate(layers)
            ),
            other_layers=n_layers - len(layers),
            notes=tuple(self.notes),
            asked_bytes=asked_bytes,
        )


def ratio(whole: Tensor, part: Tensor) -> float:
    """Sum of one over the sum of the other; 1 if there is nothing."""
    return float(whole.sum()) / float(part.sum()) if bool(part.any()) else 1.0


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
