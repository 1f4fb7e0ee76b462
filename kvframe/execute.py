"""Carries out a plan: keeping, dropping and merging tokens are one weighted segment sum."""

from __future__ import annotations

import torch
from torch import Tensor

from kvframe.errors import StageError
from kvframe.ops.segment_pool import segment_pool
from kvframe.rope import Rope
from kvframe.types import Entries, Grades, LayerObservation, LayerPlan, Observation, Plan, check_shape


def check_plan(plan: Plan, observation: Observation, budget: Tensor, owner: str, grades: Grades | None = None) -> None:
    """Raise StageError unless the plan is valid: shapes, dense entry ids, only body tokens assigned, within budget.

    `budget` is int64 `[B]`, in entries, of the dearest grade if there are `grades`; `owner` names the allocator in the
    message."""
    layers, batch, heads, tokens = observation.shape
    if len(plan.layers) != layers:
        raise StageError(f"{owner} planned {len(plan.layers)} layers, but {layers} are compressed.")
    spent = torch.zeros_like(budget, dtype=torch.float64)
    for index, layer in enumerate(plan.layers):
        check_shape(f"{owner}: plan.layers[{index}]", "assignment", layer.assignment, (batch, heads, tokens))
        check_shape(f"{owner}: plan.layers[{index}]", "n_entries", layer.n_entries, (batch, heads))
        assigned = layer.assignment >= 0
        if bool((assigned & ~observation.body[:, None, :]).any()):
            raise StageError(f"{owner} assigned a token outside the body in layer {index}; core keeps those itself.")
        present = torch.zeros(batch, heads, tokens + 1, dtype=torch.bool, device=assigned.device)
        present.scatter_(-1, torch.where(assigned, layer.assignment, tokens).long(), True)
        wanted = torch.arange(tokens, device=assigned.device) < layer.n_entries[..., None]
        if bool((present[..., :tokens] != wanted).any()):
            raise StageError(
                f"{owner}: entry ids of layer {index} must be 0..n_entries-1, each with at least one token."
            )
        spent += layer.n_entries.sum(-1) if grades is None else grades.cost(layer)
    # Prices are fractions, which are added up in another order here.
    if bool((spent > budget.double() * (1 + 1e-9)).any()):
        row = int((spent - budget).argmax())
        made = f"{int(spent[row])} entries" if grades is None else f"entries that cost {spent[row]:.1f}"
        raise StageError(f"{owner} made {made} for row {row}, but the budget is {int(budget[row])}.")


def execute(plan: LayerPlan, layer: LayerObservation, positions: Tensor, rope: Rope) -> Entries:
    """Return the entries of one layer, in the dtype of its keys, packed by (b, h) and entry id.

    `positions` int64 `[B, T]`. An entry of one token is copied bit by bit unless the plan weights or moves it; the
    others are pooled in fp32: keys before RoPE, rotated to the entry's position, if the plan says `align_rope`."""
    batch, heads, tokens, dim = layer.keys.shape
    counts = plan.n_entries.reshape(-1)
    offsets = torch.zeros(batch * heads + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=offsets[1:])
    total = int(offsets[-1])
    local = plan.assignment.reshape(batch * heads, tokens).long()
    pair, token = (local >= 0).nonzero(as_tuple=True)  # [K] assigned tokens, sorted by pair, then token
    entry = offsets[pair] + local[pair, token]  # [K]
    size = torch.bincount(entry, minlength=total)  # [N]
    source = pair * tokens + token  # [K]
    keys, values = layer.keys.reshape(-1, dim), layer.values.reshape(-1, dim)
    at = positions[pair // heads, token]  # [K]

    if bool((size <= 1).all()) and plan.key_weight is None and plan.value_weight is None and plan.positions is None:
        order = torch.empty_like(source)
        order[entry] = torch.arange(entry.shape[0], device=entry.device)
        log_multiplicity = None if plan.multiplicity is None else plan.multiplicity.float().log()
        first = source[order]
        return Entries(
            offsets, keys.index_select(0, first), values.index_select(0, first), log_multiplicity, at[order].int()
        )

    def pool(rows: Tensor, given: Tensor | None) -> Tensor:
        if given is None:
            return segment_pool(rows, None, entry, total) / size[:, None]
        return segment_pool(rows, given.reshape(-1)[source].float(), entry, total)

    where = plan.positions
    if where is None:
        total_position = torch.zeros(total, dtype=torch.float64, device=at.device).index_add_(0, entry, at.double())
        where = (total_position / size).round().long()  # [N]
    # Several times as fast on a CPU as indexing.
    plain = keys.index_select(0, source)
    turned = rope.unrotate(plain, at) if plan.align_rope else plain.float()
    pooled_keys = pool(turned, plan.key_weight)
    plain_values = values.index_select(0, source)
    pooled_values = pool(plain_values.float(), plan.value_weight)
    if plan.align_rope:
        pooled_keys = rope.rotate(pooled_keys, where)
    pooled_keys, pooled_values = pooled_keys.to(keys.dtype), pooled_values.to(values.dtype)
    alone = (size[entry] == 1) & (where[entry] == at)  # weights of a single token are 1: copy it unchanged
    pooled_keys[entry[alone]] = plain[alone]
    pooled_values[entry[alone]] = plain_values[alone]
    multiplicity = size.float() if plan.multiplicity is None else plan.multiplicity.float()
    return Entries(offsets, pooled_keys, pooled_values, multiplicity.log(), where.int())
