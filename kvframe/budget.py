"""The budget's arithmetic, done once for all methods: which tokens are protected, and how many entries are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvframe.arguments import whole_numbers
from kvframe.errors import BudgetError, InputError
from kvframe.spec import Budget, PipelineSpec, Protect
from kvframe.types import ModelInfo

Lengths = int | Sequence[int] | Tensor


@dataclass(frozen=True, eq=False)
class Regions:
    """What becomes of each token; bool masks `[B, T]`, disjoint, together `valid`.

    Attributes:
        sinks: kept exactly at the beginning (template prefix and sinks).
        body: what the allocator decides on.
        tail: kept exactly at the end (recent window and suffix).
        suffix: the question, a part of `tail`.
        charged: int64 `[B]`, protected tokens that the budget pays for.
        context: int64 `[B]`, tokens that the ratio is counted over: all valid ones but prefix and suffix.
    """

    sinks: Tensor
    body: Tensor
    tail: Tensor
    suffix: Tensor
    charged: Tensor
    context: Tensor

    def postponed(self, rows: Tensor) -> Regions:
        """The regions with these rows (bool `[B]`) left for another time: all of their tokens stay exact."""
        later = rows[:, None]
        everything = self.sinks | self.body | self.tail
        return replace(
            self,
            sinks=self.sinks & ~later,
            body=self.body & ~later,
            tail=torch.where(later, everything, self.tail),
        )

    @property
    def tail_columns(self) -> int:
        """Columns at the right that hold every row's tail."""
        tokens = self.tail.shape[1]
        columns = self.tail.any(0).nonzero()
        return tokens - int(columns[0]) if len(columns) else 0


def checked_lengths(value: Lengths, name: str) -> Tensor:
    """`value` as int64 `[1]` or `[B]`. Raises InputError for what are no whole numbers, or negative ones."""
    lengths = whole_numbers(name, value, "a whole number of tokens, or one for each row")
    if bool((lengths < 0).any()):
        raise InputError(f"{name} must not be negative, but is {value}.")
    return lengths


def row_lengths(value: Lengths, batch: int, name: str) -> Tensor:
    """`value` as int64 `[B]`; one number serves every row. Raises InputError for a wrong count, and what
    `checked_lengths` does."""
    lengths = checked_lengths(value, name)
    if lengths.numel() not in (1, batch):
        raise InputError(f"{name} must be one number or one for each of the {batch} rows, but {lengths.numel()} came.")
    return lengths.expand(batch) if lengths.numel() == 1 else lengths


def split_regions(
    valid: Tensor,
    protect: Protect,
    prefix: Lengths = 0,
    suffix: Lengths = 0,
    recent: Tensor | None = None,
    begins: Tensor | None = None,
) -> Regions:
    """Share out the tokens of `valid` bool `[B, T]`. Lengths count valid tokens, so padding on either side changes
    nothing. `recent` int64 `[B]` takes the place of `protect.recent`; rows where `begins` (bool `[B]`) is False go on
    from what was compressed before, so they have neither prefix nor sinks. Where the protected regions meet, the tail
    wins. Raises InputError if prefix and suffix exceed a row."""
    batch = valid.shape[0]
    prefixes, suffixes = row_lengths(prefix, batch, "prefix_length"), row_lengths(suffix, batch, "suffix_length")
    sinks_at = torch.full((batch,), protect.sink)
    if begins is not None:
        prefixes, sinks_at = (torch.where(begins.cpu(), length, 0) for length in (prefixes, sinks_at))
    count = valid.sum(1).cpu()
    for row in range(batch):
        if prefixes[row] + suffixes[row] > count[row]:
            raise InputError(
                f"prefix_length {int(prefixes[row])} and suffix_length {int(suffixes[row])} exceed the "
                f"{int(count[row])} tokens of row {row}; give the lengths of parts of the prompt."
            )
    prefixes, suffixes, sinks_at = (length.to(valid.device) for length in (prefixes, suffixes, sinks_at))
    from_start = valid.cumsum(1)  # 1 for the first valid token
    from_end = valid.flip(1).cumsum(1).flip(1)
    is_prefix = valid & (from_start <= prefixes[:, None])
    is_suffix = valid & (from_end <= suffixes[:, None])
    window = protect.recent if recent is None else recent.to(valid.device)[:, None]
    tail = valid & (from_end <= suffixes[:, None] + window) & ~is_prefix
    sinks = valid & ((from_start <= sinks_at[:, None]) | is_prefix) & ~tail
    return Regions(
        sinks=sinks,
        body=valid & ~sinks & ~tail,
        tail=tail,
        suffix=is_suffix,
        charged=((sinks & ~is_prefix) | (tail & ~is_suffix)).sum(1),
        context=(valid & ~is_prefix & ~is_suffix).sum(1),
    )


def fitted_recent(budget: Budget, protect: Protect, regions: Regions, model: ModelInfo, itemsize: int) -> Tensor | None:
    """Return the recent window of each row, int64 `[B]`, shortened where the budget is too small for `protect.recent`;
    None if it need not, or may not (`protect.recent_min` null), be shortened anywhere.

    Of `b` entries per head beside the sinks the window may take `recent_share * b`, at least `recent_min`. It is
    shortened once `b` cannot hold it or, for a share below 1, is less than 1.5 windows."""
    if protect.recent_min is None:
        return None
    units = model.layers * model.kv_heads
    if budget.ratio is not None:
        total = (units * regions.context.double() / budget.ratio).floor()
    else:
        entry_bytes = 2 * model.head_dim * itemsize
        total = torch.full_like(regions.context, budget.entries or int(budget.bytes or 0) // (entry_bytes * units))
        total = units * total.double()
    left = (total / units).floor() - protect.sink
    fitted = (left * protect.recent_share).floor().clamp(min(protect.recent_min, protect.recent), protect.recent)
    enough = protect.recent * (1.0 if protect.recent_share == 1 else 1.5)
    recent = torch.where(left < enough, fitted, float(protect.recent)).long()
    return recent if bool((recent < protect.recent).any()) else None


def fitted_regions(
    valid: Tensor,
    spec: PipelineSpec,
    model: ModelInfo,
    itemsize: int,
    prefix: Lengths = 0,
    suffix: Lengths = 0,
    begins: Tensor | None = None,
) -> tuple[Regions, Tensor | None]:
    """`split_regions` with the recent window that the budget leaves, and that window, int64 `[B]`, None if it is
    nowhere shortened. Rows where `begins` (bool `[B]`, None = all) is False have their window already.

    Unless the budget is strict, a row keeps the whole window if it is not longer than what is protected with that, so
    that the shortest prompts stay whole, or if it would not fit with the shortest window either."""
    budget, protect = spec.budget, spec.protect
    regions = split_regions(valid, protect, prefix, suffix, None, begins)
    recent = fitted_recent(budget, protect, regions, model, itemsize)
    if recent is None:
        return regions, None
    if begins is not None:
        recent = torch.where(begins, recent, protect.recent)
    shortened = split_regions(valid, protect, prefix, suffix, recent, begins)
    if not budget.strict:
        whole = ~regions.body.any(1) | too_short(budget, shortened, model, itemsize)
        if bool(whole.any()):
            recent = torch.where(whole, protect.recent, recent)
            shortened = split_regions(valid, protect, prefix, suffix, recent, begins)
    return (shortened, recent) if bool((recent < protect.recent).any()) else (regions, None)


def total_entries(
    budget: Budget, context: Tensor, charged: Tensor, model: ModelInfo, itemsize: int, bits_per_entry: float
) -> Tensor:
    """Entries over all layers and heads that the budget allows, int64 `[B]`, of a context of `context` int64 `[B]`
    entries, `charged` of them exact; more than there are if an absolute budget is larger. For the rest see
    `entry_budget`."""
    if budget.ratio is not None and budget.counts_entries:
        return (context.double() / budget.ratio).floor().long()
    if budget.entries is not None:
        return torch.full_like(context, model.layers * model.kv_heads * budget.entries)
    exact = 2 * model.head_dim * itemsize * 8  # bits of an entry that is not coded
    bits = context.double() * exact / budget.ratio if budget.ratio is not None else float(int(budget.bytes or 0) * 8)
    return charged + ((bits - charged.double() * exact) / bits_per_entry).floor().long()


def block_entries(
    budget: Budget, body: Tensor, model: ModelInfo, itemsize: int, bits_per_entry: float
) -> Tensor | None:
    """Entries for a later block or prompt of `body` int64 `[B]` entries whose protected ones are paid for: its share of
    the ratio; None for a budget without one."""
    if budget.ratio is None:
        return None
    return total_entries(budget, body, torch.zeros_like(body), model, itemsize, bits_per_entry).minimum(body)


def too_short(budget: Budget, regions: Regions, model: ModelInfo, itemsize: int) -> Tensor:
    """Rows whose budget does not cover their charged protected tokens, bool `[B]`."""
    units = model.layers * model.kv_heads
    context, charged = units * regions.context, units * regions.charged
    # What a coded entry costs is of no account: none is paid for.
    return total_entries(budget, context, charged, model, itemsize, 1.0) < charged


def entry_budget(
    budget: Budget,
    regions: Regions,
    model: ModelInfo,
    itemsize: int,
    bits_per_entry: float,
    rows: Tensor | None = None,
    block: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return `(for the body, total)`, both int64 `[B]`: entries over all layers and heads.

    The total counts the context's entries, charged protected ones included; the rest is the body's, at most all of it,
    each head's filled up to whole blocks of `block` entries, which cost as much as full ones. A row without a body gets
    nothing. `bits_per_entry` is what a coded entry costs, `itemsize` the bytes of one exact value.

    Where the total does not cover the charged protected tokens the body gets nothing, and the total, which is then
    below them (below 0 perhaps, as they cost more than coded entries), says what is owed. Raises BudgetError instead
    if the budget is strict, for `rows` (bool `[B]`, None = all) that have a body."""
    units = model.layers * model.kv_heads
    context, charged = units * regions.context, units * regions.charged
    body = units * regions.body.sum(1)
    bought = total_entries(budget, context, charged, model, itemsize, bits_per_entry)
    total = torch.minimum(bought, context)
    short = (total < charged) & (body > 0)
    short = short if rows is None else short & rows
    if budget.strict and bool(short.any()):
        row = int(short.nonzero()[0])
        whose, exact = (
            f"The budget of row {row} ({int(regions.context[row])} context tokens)",
            int(regions.charged[row]),
        )
        if budget.counts_entries:
            raise BudgetError(
                f"{whose} is {int(total[row]) / units:.1f} entries per head, below its {exact} protected tokens; lower "
                "budget.ratio (or give more), or lower protect.recent or protect.sink."
            )
        held = int(charged[row]) * 2 * model.head_dim * itemsize
        raise BudgetError(
            f"{whose} buys less than the {exact} protected tokens, which take {held} bytes as they are; give more "
            "bytes or a lower budget.ratio, or lower protect.recent or protect.sink."
        )
    left = torch.where(body > 0, bought - charged, 0).clamp_min(0)
    filled = -(-regions.body.sum(1) // block) * block * units
    return torch.minimum(left, filled), torch.where(body > 0, total, context)


def buys_more(
    budget: Budget, regions: Regions, model: ModelInfo, itemsize: int, bits_per_entry: float, block: int = 1
) -> Tensor:
    """Rows whose budget buys more than their whole body, bool `[B]`. For the arguments see `entry_budget`."""
    units = model.layers * model.kv_heads
    context, charged, body = units * regions.context, units * regions.charged, regions.body.sum(1)
    bought = total_entries(budget, context, charged, model, itemsize, bits_per_entry)
    return (body > 0) & (bought - charged > units * -(-body // block) * block)


def allowed_bytes(budget: Budget, regions: Regions, model: ModelInfo, itemsize: int) -> float:
    """Bytes that a budget of bytes allows for all rows together, without prefix and suffix."""
    if budget.ratio is None:
        return float(budget.bytes or 0) * len(regions.context)
    return float(regions.context.sum()) * model.layers * model.kv_heads * 2 * model.head_dim * itemsize / budget.ratio
