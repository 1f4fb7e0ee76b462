"""The books of a cache: what came in, what was kept, and what that costs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvframe.budget import Regions, entry_budget
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
        self.context = 0  # entries of the context that was compressed
        self.allowed = 0  # entries that the budgets allowed for it
        self.kept = 0  # entries kept of it
        self.notes: list[str] = []

    def see(self, new: Tensor) -> None:
        """Count new columns `bool [B, Q]`."""
        count = new.sum(1)
        self.tokens = count if self.tokens is None else self.tokens + count

    def note(self, text: str) -> None:
        """Say something in the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def budget(
        self, budget: Budget, regions: Regions, model: ModelInfo, itemsize: int, bits: float, prompt: bool
    ) -> tuple[Tensor, Tensor]:
        """`(for the body, total)` int64 `[B]`. Later prompts, and blocks of generated tokens, get their share of the
        ratio, or of the one that an absolute budget came to at first: their protected tokens are
        those already there."""
        if not self.compressions and (prompt or budget.ratio is None):
            return entry_budget(budget, regions, model, itemsize, bits)
        body = model.layers * model.kv_heads * regions.body.sum(1)
        ratio = budget.ratio if budget.ratio is not None else self.context / max(1, self.allowed)
        share = (body.double() / ratio).floor().long()
        return share, share

    def book(self, plan: Plan, regions: Regions, model: ModelInfo, total: Tensor, seconds: float) -> None:
        """Enter one compression."""
        units = model.layers * model.kv_heads
        made = sum(int(layer.n_entries.sum()) for layer in plan.layers)
        if self.compressions:
            self.context += units * int(regions.body.sum())
            self.kept += made
        else:
            charged = torch.where(regions.body.any(1), regions.charged, regions.context)
            self.context += units * int(regions.context.sum())
            self.kept += made + units * int(charged.sum())
        self.allowed += int(total.sum())
        self.compressions += 1
        self.seconds += seconds

    def fork(self) -> Ledger:
        """A copy to go on with."""
        other = copy.copy(self)
        other.notes = list(self.notes)
        return other

    def report(
        self,
        layers: Sequence[CompressedLayer],
        model: ModelInfo,
        watched: Sequence[Tensor],
        learned: Sequence[Tensor],
        valid: Tensor | None,
        n_layers: int,
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
            requested_ratio=self.context / self.allowed if self.allowed else 1.0,
            entry_ratio=self.context / self.kept if self.kept else 1.0,
            compress_seconds=self.seconds,
            layers=tuple(
                LayerReport(model.layer_ids[i], entry_range(layer), layer_bytes(layer))
                for i, layer in enumerate(layers)
            ),
            other_layers=n_layers - len(layers),
            notes=tuple(self.notes),
        )


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
