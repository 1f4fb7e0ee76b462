"""Prototype trees: how the interval of a slot splits, down to single tokens.

Trees are built level by level, for all slots and heads at once; every number asked for is a look-up in the interval
tables. Source: GraceKV (Tian et al. 2026), distortion and trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

CANDIDATES = 16  # cuts of highest curvature that a node considers beside its midpoint


@dataclass(frozen=True, eq=False)
class Trees:
    """Nodes of many trees, parents before their children; all `[K]`.

    Attributes:
        unit, begin, end: the head and the interval `[begin, end)` of its body.
        distortion: of the node as one entry; 0 for single tokens.
        parent: -1 for roots.
        child: the first child; the others follow it. -1 for single tokens.
        cost: entries that splitting the node adds: its children - 1; 0 for single tokens.
    """

    unit: Tensor
    begin: Tensor
    end: Tensor
    distortion: Tensor
    parent: Tensor
    child: Tensor
    cost: Tensor

    def __len__(self) -> int:
        return len(self.unit)

    @property
    def gain(self) -> Tensor:
        """What splitting takes from the distortion (may be negative); 0 for single tokens."""
        left, below = self.distortion.clone(), self.parent >= 0
        left.index_add_(0, self.parent[below], -self.distortion[below])
        return torch.where(self.cost > 0, left, 0)


@dataclass(frozen=True)
class SplitRule:
    """`bonus` times the curvature (0 to 1 within the node), as it stands ("absolute") or times the node's distortion
    ("relative"), is added to the gain of a cut."""

    bonus: float
    kind: Literal["absolute", "relative"]


def cut_thresholds(strength: Tensor, longest: int) -> Tensor:
    """Return `[longest, N]`: the strength that a cut inside `[a, a + n)` must reach to be among the `CANDIDATES`
    strongest, at `[n - 1, a]`. `strength [N]` is that of the cut before each token."""
    tokens = len(strength)
    best = torch.full((tokens, CANDIDATES), -torch.inf, device=strength.device)
    out = torch.full((longest, tokens), -torch.inf, device=strength.device)
    for length in range(2, longest + 1):
        n = max(0, tokens - length + 1)
        lowest, where = best[:n].min(1)
        best[:n].scatter_(1, where[:, None], torch.maximum(lowest, strength[length - 1 :])[:, None])
        out[length - 1, :n] = best[:n].min(1).values
    return out


def grow(
    distortion: Tensor,
    mass: Tensor,
    value: Tensor,
    floor: Tensor,
    starts: Tensor,
    lengths: Tensor,
    strength: Tensor,
    thresholds: Tensor,
    rule: SplitRule,
) -> Trees:
    """Build the trees of all units and slots.

    `distortion [U, longest, N]` (see `kvframe.ops.interval_distortion`), `mass`, `value [U, N]`; `floor` bool `[U, N]`
    marks tokens that must become easy to reach; slots are `[start, start + length)`. A node with more than one token
    becomes

        [a, p), {p}, [p + 1, b)  at its floor token of highest value, if it holds one; else the better per entry of
        [a, x), [x, b)           at the best of the strongest cuts and the midpoint, with the curvature bonus
        [a, p), {p}, [p + 1, b)  at its token of highest mass
    """
    units, _, tokens = distortion.shape
    device = distortion.device
    flat = distortion.reshape(-1)
    longest = distortion.shape[1]

    def look(unit: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """Distortion of intervals; 0 for empty ones."""
        length = end - begin
        at = (unit * longest + (length - 1).clamp_min(0)) * tokens + begin.clamp_max(tokens - 1)
        return torch.where(length > 0, flat[at], 0)

    wanted = torch.where(floor, 2 + value, mass)  # masses are at most 1, so floor tokens come first
    unit = torch.arange(units, device=device).repeat_interleave(len(starts))
    begin, length = starts.repeat(units), lengths.repeat(units)
    level = {
        "unit": unit,
        "begin": begin,
        "end": begin + length,
        "distortion": look(unit, begin, begin + length),
        "parent": torch.full_like(unit, -1),
    }
    levels, made = [], 0
    while len(level["unit"]):
        count = len(level["unit"])
        child, cost = torch.full((count,), -1, device=device), torch.zeros(count, dtype=torch.int64, device=device)
        several = (level["end"] - level["begin"] > 1).nonzero()[:, 0]
        u, a, b, d = (level[name][several] for name in ("unit", "begin", "end", "distortion"))
        left, right, third = _split((u, a, b, d), look, wanted, floor, strength, thresholds, rule)
        # Up to three intervals a node; empty ones are no children.
        begins = torch.stack([a, left, right], 1)
        ends = torch.stack([left, right, b], 1)
        ends[~third, 1], begins[~third, 2] = left[~third], left[~third]
        exists = ends > begins
        number = exists.sum(1)
        child[several], cost[several] = made + count + number.cumsum(0) - number, number - 1
        levels.append({**level, "child": child, "cost": cost})
        owner = several[:, None].expand(-1, 3)[exists]
        level = {"unit": u[:, None].expand(-1, 3)[exists], "begin": begins[exists], "end": ends[exists]}
        level["distortion"] = look(level["unit"], level["begin"], level["end"])
        level["parent"] = owner + made
        made += count
    names = [field.name for field in fields(Trees)]
    return Trees(**{name: torch.cat([part[name] for part in levels]) for name in names})


def _split(
    nodes: tuple[Tensor, Tensor, Tensor, Tensor],
    look: Callable[[Tensor, Tensor, Tensor], Tensor],
    wanted: Tensor,
    floor: Tensor,
    strength: Tensor,
    thresholds: Tensor,
    rule: SplitRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """For `nodes` (unit, begin, end, distortion) of several tokens: `(left, right, third)`. With `third` the children
    are [a, left), [left, right), [right, b), else [a, left), [left, b)."""
    u, a, b, d = nodes
    length = b - a
    node = torch.arange(len(u), device=u.device).repeat_interleave(length)
    first = length.cumsum(0) - length
    token = torch.arange(len(node), device=u.device) - first[node] + a[node]
    pick = best_of(wanted[u[node], token], token, node, len(u))
    forced = floor[u, pick]
    rest = look(u, a, pick) + look(u, pick + 1, b)
    cost = 1 + ((pick > a) & (pick < b - 1)).long()
    extraction = (d - rest) / cost

    inner = token > a[node]
    node, cut = node[inner], token[inner]
    strong = strength[cut]
    low = strong.new_full((len(u),), torch.inf).scatter_reduce_(0, node, strong, "amin")
    high = strong.new_full((len(u),), -torch.inf).scatter_reduce_(0, node, strong, "amax")
    normal = (strong - low[node]) / (high - low)[node].clamp_min(torch.finfo(torch.float32).tiny)
    middle = (a + b + 1) // 2
    allowed = (strong >= thresholds[length - 1, a][node]) | (cut == middle[node])
    scale = rule.bonus if rule.kind == "absolute" else rule.bonus * d[node]
    gain = d[node] - look(u[node], a[node], cut) - look(u[node], cut, b[node]) + scale * normal
    gain = gain.masked_fill(~allowed, -torch.inf)
    where = best_of(gain, cut, node, len(u))
    highest = gain.new_full((len(u),), -torch.inf).scatter_reduce_(0, node, gain, "amax")
    extract = forced | (extraction > highest)
    inside = extract & (pick > a) & (pick < b - 1)
    # At an edge, extraction is a cut beside the token.
    left = torch.where(extract, torch.where(pick > a, pick, pick + 1), where)
    right = torch.where(inside, pick + 1, left)
    return left, right, inside


def best_of(values: Tensor, labels: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return `[groups]`: the lowest label (int64) among those of highest value in each group."""
    highest = values.new_full((groups,), -torch.inf).scatter_reduce_(0, group, values, "amax")
    top = torch.where(values == highest[group], labels, torch.iinfo(torch.int64).max)
    first = torch.full((groups,), torch.iinfo(torch.int64).max, device=labels.device)
    return first.scatter_reduce_(0, group, top, "amin")


def join(parts: list[Trees], units: list[int]) -> Trees:
    """The trees of several groups of units behind each other; `units[i]` is the first unit of group i."""
    shift, joined = 0, []
    for part, first in zip(parts, units, strict=True):
        child = torch.where(part.child >= 0, part.child + shift, -1)
        parent = torch.where(part.parent >= 0, part.parent + shift, -1)
        joined.append(Trees(part.unit + first, part.begin, part.end, part.distortion, parent, child, part.cost))
        shift += len(part)
    return Trees(*(torch.cat([getattr(part, field.name) for part in joined]) for field in fields(Trees)))
