"""The allocator: chunked soft matching of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops import select_top
from kvframe.stages import Allocator
from kvframe.types import Entries, LayerPlan, ModelInfo, Observation, Plan, Regrouping, Segments
from kvframe_centroidkv.again import cluster_again
from kvframe_centroidkv.partition import Partition
from kvframe_centroidkv.passes import Work, cluster
from kvframe_centroidkv.plans import plan_layers
from kvframe_centroidkv.targets import Share, Targets, share_out

STEPS = {"tighten": (0.6, 0.7, 0.8, 0.9), "relax": (0.95, 0.85, 0.75), "fraction": ()}
# Layers are clustered together while their keys take no more than this, in fp32.
LAYER_BYTES = 1 << 28


class SoftMatching(Allocator):
    """Merges tokens whose keys are alike, until the budget is met exactly.

    One pass, on the entries of each KV head in chunks of their order:

        A, B = the two sides of a chunk (`partition`)
        partner(a) = the b of B with the highest likeness of keys (`similarity`);  confidence(a) = that likeness
        of all a that share a budget (`share`) the most confident are merged into their partners, at most `max_share`
        of them and at most as many as there are entries too many
        key(b) = (n_b key_b + sum of n_a key_a) / (n_b + sum of n_a);  n(b) = n_b + sum of n_a

    The first pass works inside the segmenter's segments (`chunks`), the later ones inside runs of as many entries as
    the longest segment. A share of the entries (`safeguard`) are tokens of the highest scores, kept as they are. Values
    are averaged with their keys; attention adds log n to the logits (`multiplicity`).

    The whole budget is spent. With one entry a head or less, the last heads keep nothing. Time O(T chunk D) and memory
    O(T D + T chunk) for each (layer, row, head); `share: global` holds the keys of all layers in fp32 meanwhile.
    Source: Hu et al. 2025, chunked soft matching; see docs/methods/centroidkv.md for what is read into it."""

    paper: ClassVar[str] = "Hu et al., 2025, CentroidKV (first version: Chelsea), arXiv 2506.11418"
    ragged: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    name: Literal["centroidkv.soft_matching"] = "centroidkv.soft_matching"
    partition: Partition = Field(
        "alternating",
        description="Sides of a chunk: every second entry, its two halves, or a random half drawn from `seed`.",
    )
    seed: int = Field(0, ge=0, lt=1 << 31, description="Of the random partition.")
    schedule: Literal["tighten", "relax", "fraction"] = Field(
        "fraction",
        description="fraction = the most confident edges of each pass; tighten and relax = first one pass for each of "
        "`thresholds`, which rise or fall, then as fraction until the budget is met.",
    )
    thresholds: tuple[float, ...] | None = Field(
        None,
        description="Cosines (-1 to 1) that an edge must reach in the first passes; null = 0.6, 0.7, 0.8, 0.9 for "
        "tighten, 0.95, 0.85, 0.75 for relax, none for fraction.",
    )
    max_share: float = Field(
        0.5, gt=0, le=1, description="Share (0 to 1) of the sources of one budget that a pass may merge."
    )
    similarity: Literal["cosine", "distance", "ward"] = Field(
        "cosine",
        description="Likeness of keys: cosine, minus squared distance, or minus the squared error that the merge adds "
        "(Ward), which keeps groups small.",
    )
    rope: Literal["pre", "post"] = Field(
        "pre",
        description="Compare and average keys before RoPE (the mean is rotated to the rounded mean position), or as "
        "cached.",
    )
    share: Share = Field("global", description="Who shares a budget: each head, each layer, or all layers and heads.")
    safeguard: float = Field(
        0.4, ge=0, le=1, description="Share (0 to 1) of the entries that are single tokens of the highest scores."
    )
    multiplicity: Literal["count", "coherence", "none"] = Field(
        "count",
        description="Weight of an entry of n tokens in attention: n, or |sum of their unit keys|^2 / n (n if all keys "
        "point the same way, at least 1), or 1.",
    )

    recluster: bool = Field(
        False,
        description="While an answer is written, cluster the whole body again with each block, weighted by counts, "
        "within the budget for all tokens so far; else each block by itself, within its share.",
    )

    @model_validator(mode="after")
    def _counts_are_held(self) -> SoftMatching:
        if self.recluster and self.multiplicity != "count":
            raise ValueError(
                f"recluster weighs entries with their counts, but multiplicity {self.multiplicity} does not hold them; "
                "set multiplicity: count, or recluster: false"
            )
        return self

    @model_validator(mode="after")
    def _thresholds_fit(self) -> SoftMatching:
        if self.schedule == "fraction":
            if self.thresholds:
                raise ValueError(
                    "thresholds belong to schedule tighten or relax; leave them out or change the schedule"
                )
            return self
        if self.similarity != "cosine":
            raise ValueError(
                f"schedule {self.schedule} needs similarity cosine, whose thresholds mean the same for every model; "
                f"with similarity {self.similarity} set schedule: fraction"
            )
        steps = list(self.steps)
        if steps != sorted(steps, reverse=self.schedule == "relax"):
            direction = "rise" if self.schedule == "tighten" else "fall"
            raise ValueError(f"thresholds must {direction} with schedule {self.schedule}, but are {steps}")
        if any(not -1 <= step <= 1 for step in steps):
            raise ValueError(f"thresholds are cosines between -1 and 1, but are {steps}")
        return self

    @property
    def steps(self) -> tuple[float, ...]:
        """The thresholds of the first passes."""
        return STEPS[self.schedule] if self.thresholds is None else self.thresholds

    def allocate(self, observation: Observation, segments: Segments, scores: Tensor, budget: Tensor) -> Plan:
        """Return a plan of exactly the budget, or of the whole body if that is smaller.

        Raises InputError, naming the layer, if a key is not finite."""
        layers, _, heads, _ = observation.shape
        body = observation.body
        budget = torch.minimum(budget, layers * heads * body.sum(1))
        targets = share_out(budget, layers, heads, self.share, self.safeguard)
        single = select_top(scores, targets.singles, body[None, :, None] & targets.alive[..., None])
        step = layers
        if self.share != "global":
            size = observation.layers[0].keys.numel() * 4
            step = max(1, LAYER_BYTES // max(1, size))
        plans: list[LayerPlan] = []
        for begin in range(0, layers, step):
            plans += self._plan(observation, segments, targets, single, range(begin, min(begin + step, layers)))
        return Plan(tuple(plans))

    @property
    def regroups(self) -> bool:
        """See Allocator.regroups."""
        return self.recluster

    def regroup(self, body: Sequence[Entries], model: ModelInfo, budget: Tensor) -> list[Regrouping]:
        """See Allocator.regroup."""
        return cluster_again(self, body, model, budget)

    def _plan(
        self, observation: Observation, segments: Segments, targets: Targets, single: Tensor, layers: range
    ) -> list[LayerPlan]:
        """The plans of some layers, whose groups hold no unit of another layer."""
        _, batch, heads, tokens = observation.shape
        here = slice(layers.start, layers.stop)
        single, alive, group = single[here], targets.alive[here], targets.group[here]
        free = observation.body[None, :, None] & alive[..., None] & ~single  # [l, B, H, T]
        place = free.flatten().nonzero().squeeze(1)  # [M], sorted by unit, then column
        unit, column = place // tokens, place % tokens
        row = unit // heads % batch
        keys = self._keys(observation, layers, free)
        first = int(group.min()) if group.numel() else 0
        group = (group - first).flatten()
        total = targets.total[first : first + int(group.max()) + 1] if len(group) else targets.total
        kept = torch.zeros_like(total).index_add_(0, group, single.sum(-1).flatten())
        units = torch.arange(len(layers) * batch * heads, device=place.device)
        work = Work(
            # The coherence of a cluster is that of its tokens' keys, which are still needed.
            sums=keys.clone() if self.multiplicity == "coherence" else keys,
            counts=keys.new_ones(len(keys)),
            unit=unit,
            segment=(segments.ids[row, column] - segments.ids[row, 0]).long(),
            chunk=longest_segment(observation.body, segments)[units // heads % batch],
            stream=(layers.start + units // (batch * heads)) * heads + units % heads,
            group=group,
            target=total - kept,
        )
        clusters = cluster(work, self)
        return plan_layers(self, observation, clusters, place, single, keys)

    def _keys(self, observation: Observation, layers: range, free: Tensor) -> Tensor:
        """The keys `[M, D]` of the layers where `free` bool `[l, B, H, T]` is True, fp32 (fp64 if they are)."""
        model = observation.model
        some = observation.layers[layers.start].keys
        dtype = some.dtype if some.dtype == torch.float64 else torch.float32
        counts = free.sum((1, 2, 3)).tolist()
        out = some.new_empty(sum(counts), model.head_dim, dtype=dtype)
        for index, mask, rows in zip(layers, free, out.split(counts), strict=True):
            keys = observation.layers[index].keys
            if self.rope == "pre":
                keys = model.rope[index].unrotate(keys, observation.positions[:, None])
            at = mask.flatten().nonzero().squeeze(1)
            torch.index_select(keys.to(dtype).reshape(-1, model.head_dim), 0, at, out=rows)
            # One sum tells at once that all is well.
            if not bool(rows.sum().isfinite()) and not bool((finite := rows.isfinite().all(-1)).all()):
                row, head, column = mask.nonzero()[int((~finite).nonzero()[0])].tolist()
                raise InputError(
                    f"The keys of layer {model.layer_ids[index]} are not finite (row {row}, KV head {head}, column "
                    f"{column}), so they cannot be clustered; the model overflows: load it in bfloat16 or float32."
                )
        return out


def longest_segment(body: Tensor, segments: Segments) -> Tensor:
    """Return int64 `[B]`: the body tokens of the longest segment of each row, at least 2, so that runs of that length
    can always be merged."""
    ids = (segments.ids - segments.ids[:, :1]).long()
    length = torch.zeros_like(ids).scatter_add_(1, ids, body.long())
    return length.amax(1).clamp_min(2) if ids.shape[1] else length.new_full((len(ids),), 2)
