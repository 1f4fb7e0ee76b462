"""What a law draws: prompts, and the few numbers from which the other arguments of a stage are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from kvframe.errors import KvframeError
from kvframe.execute import execute
from kvframe.stages import Allocator, Encoder, Kernel, Stage
from kvframe.testing import numerics
from kvframe.testing.device import attend
from kvframe.testing.prompt import PLAIN, Layout, Prompts
from kvframe.testing.strategies import geometries, make_plan, make_scores, make_segments, prompts
from kvframe.types import Encoded, Entries, LayerPlan, ModelInfo, Needs, Observation, Part, Plan, Segments

BIAS = 300.0  # the largest that Qwen2.5 has in its keys


@dataclass(frozen=True)
class Case:
    """The arguments of one call, as small numbers.

    Attributes:
        segment: tokens of a segment, 0 = one segment.
        levels: different scores, 0 = all different.
        eighths: budget, in eighths of the body's entries.
        keep: entries to be coded, in eighths of the body's; `groups` = some stand for several tokens; `uniform` = the
            same tokens in all heads.
        queries: attending queries.
        encoder: which encoder's codes a kernel attends.
    """

    prompts: Prompts = field(default_factory=Prompts)
    segment: int = 0
    levels: int = 0
    eighths: int = 8
    keep: int = 8
    groups: bool = False
    uniform: bool = True
    queries: int = 1
    encoder: str = "dense"

    def __repr__(self) -> str:
        given = [f.name for f in fields(self) if f.name == "prompts" or getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"

    def alone(self, row: int) -> Case:
        """The same with one of the rows only."""
        return replace(self, prompts=self.prompts.alone(row))

    @property
    def rows(self) -> range:
        """Indices of the rows."""
        return range(len(self.prompts.lengths))

    def segments(self, layout: Layout = PLAIN) -> Segments:
        """The segments."""
        return make_segments(self.prompts, self.segment, layout)

    def scores(self, layout: Layout = PLAIN) -> Tensor:
        """The scores, `[L, B, H, T]`."""
        return make_scores(self.prompts, self.levels, layout)

    @property
    def budget(self) -> Tensor:
        """The budget, int64 `[B]`."""
        units = self.prompts.geometry.layers * self.prompts.geometry.kv_heads
        return torch.tensor([units * body * self.eighths // 8 for body in self.prompts.body])

    def entries(self, layout: Layout = PLAIN) -> list[Entries]:
        """The entries of each layer."""
        plan = make_plan(self.prompts, self.keep, self.groups, self.uniform, layout)
        seen = self.prompts.observation(Needs(), layout)
        layers = enumerate(zip(plan.layers, seen.layers, strict=True))
        rope = seen.model.rope
        return [execute(planned, layer, seen.positions, rope[index]) for index, (planned, layer) in layers]

    @property
    def scale(self) -> float:
        """The factor on q.k that a kernel is given: not D ** -0.5, which it might take for granted."""
        return 0.3

    def query(self) -> Tensor:
        """Queries `[B, Hq, Q, D]` in the dtype of the keys."""
        shape = (self.prompts.model.query_heads, self.queries, self.prompts.geometry.head_dim)
        return torch.stack([self.prompts.draw(row, "query", *shape) for row in self.rows]).to(self.prompts.dtype)


def cases_for(stage: Stage, **choices: Any) -> SearchStrategy[Case]:
    """Cases for a stage of any kind; `choices` as for `prompts`."""
    numbers: dict[str, SearchStrategy[Any]] = {}
    if stage.kind in ("scorer", "allocator"):
        numbers["segment"] = st.sampled_from([0, 1, 4])
    if isinstance(stage, Allocator):
        numbers |= {"levels": st.sampled_from([0, 1, 3]), "eighths": st.integers(0, 8)}
    if isinstance(stage, Encoder | Kernel):
        numbers |= {"keep": st.sampled_from([8, 4, 1, 0]), "groups": st.booleans()}
    if isinstance(stage, Encoder):
        # Heads that are coded together are never given different tokens: the spec would be refused.
        numbers["uniform"] = st.booleans() if stage.joins_heads == 1 else st.just(True)
        if stage.joins_heads > 1:
            choices.setdefault("shapes", geometries(kv_heads=(stage.joins_heads, 2 * stage.joins_heads)))
    if isinstance(stage, Kernel):
        numbers |= {"uniform": st.booleans(), "queries": st.sampled_from([1, 2, 5])}
    drawn = st.builds(Case, prompts(**choices), **numbers)
    return drawn.map(_laden) if isinstance(stage, Encoder | Kernel) else drawn


def _laden(case: Case) -> Case:
    """Every third case with random contents has keys and values that contain what a model adds to them."""
    if case.prompts.content != "random" or case.prompts.seed % 3 != 2:
        return case
    return replace(case, prompts=replace(case.prompts, geometry=replace(case.prompts.geometry, bias=BIAS)))


def accepted(stage: Stage, case: Case) -> None:
    """Leave a case out if the stage refuses its model, as it may, with a KvframeError from `bind`. An encoder may need
    an artefact there that a random model has not; it is tried without."""
    if isinstance(stage, Encoder):
        return
    try:
        stage.bind(case.prompts.model)
    except KvframeError:
        assume(False)


def fitted(stage: Encoder, observation: Observation) -> Sequence[Any]:
    """What an encoder learns of an observation, without an artefact. A KvframeError leaves the case out."""
    try:
        return stage.fit(observation, None)
    except KvframeError:
        assume(False)
        raise


def arguments(stage: Any, case: Case, layout: Layout = PLAIN, needs: Needs | None = None) -> tuple[Any, ...]:
    """What the stage's method is called with. `needs` None = what the stage asks for."""
    accepted(stage, case)
    seen = case.prompts.observation(stage.needs if needs is None else needs, layout)
    if stage.kind == "segmenter":
        return (seen,)
    if stage.kind == "scorer":
        return (seen, case.segments(layout))
    if stage.kind == "allocator":
        return (seen, case.segments(layout), case.scores(layout), case.budget)
    if stage.kind == "encoder":
        return (seen, tuple(case.entries(layout)))
    return (case.query(), attended_part(case, layout), case.scale)


def attended_part(case: Case, layout: Layout = PLAIN) -> Part:
    """The first layer's entries, coded by the case's encoder, which is fitted on the prompts."""
    from kvframe.registry import registry

    encoder: Any = registry().stages["encoder"][case.encoder]()  # type: ignore[call-arg]
    seen = case.prompts.observation(encoder.needs, layout)
    try:
        state = encoder.fit(seen, None)[0]
        part = Part(encoder.encode(case.entries(layout)[0], state), encoder, state)
        part.decode()
    except Exception:
        # An encoder that cannot code these entries breaks laws of its own; the kernel is held to other cases.
        assume(False)
        raise
    return part


def invoke(stage: Any, given: tuple[Any, ...], states: Sequence[Any] | None = None) -> Any:
    """Call the stage's method. For an encoder: fit it (unless `states` are given), encode each layer's entries, and
    return `(codes, decoded entries)` of each."""
    if stage.kind == "segmenter":
        return stage.segment(*given)
    if stage.kind == "scorer":
        return stage.score(*given)
    if stage.kind == "allocator":
        return stage.allocate(*given)
    if stage.kind == "encoder":
        learned = fitted(stage, given[0]) if states is None else states
        kept = (as_given(stage, entries, given[0].model) for entries in given[1])
        return [coded(stage, entries, state) for entries, state in zip(kept, learned, strict=True)]
    return attend(stage, *given)


def as_given(stage: Encoder, entries: Entries, model: ModelInfo) -> Entries:
    """What an encoder is given: as in a pipeline, positions only if it uses them."""
    return entries if stage.holds_positions(model) else replace(entries, positions=None)


def coded(stage: Encoder, entries: Entries, state: Any) -> tuple[Encoded, Entries]:
    """Codes and what they decode to."""
    encoded = stage.encode(entries, state)
    return encoded, stage.decode(encoded, state)


def by_row(stage: Any, case: Case, result: Any, layout: Layout = PLAIN) -> list[dict[str, tuple[Tensor, float]]]:
    """A result taken apart by batch row and freed of padding: name -> (tensor, tolerance)."""
    exact = 0.0
    seen = case.prompts.observation(stage.needs, layout) if stage.kind == "scorer" else None
    rows = []
    for row in case.rows:
        at = case.prompts.columns(row, layout)
        found: dict[str, tuple[Tensor, float]] = {}
        if isinstance(result, Segments):
            ids = result.ids[row, at]
            found["ids"] = (ids - ids[:1], exact)
            if result.boundary is not None:
                size = float(result.boundary[row, at].abs().max())
                # Strengths are statistics over the row: sums of T terms of that size.
                found["boundary"] = (result.boundary[row, at], numerics.sum_tolerance(8 * len(ids), size))
        elif isinstance(result, Plan):
            for index, layer in enumerate(result.layers):
                at_position = case.prompts.observation(Needs(), layout).positions[row, at]
                found |= {f"layer {index}: {k}": v for k, v in _planned(layer, row, at, at_position).items()}
        elif isinstance(result, Tensor):
            body = seen.body[row, at] if seen is not None else slice(None)
            found["scores"] = (result[:, row, :, at][..., body], 0.0 if seen is None else _scores(result, seen))
        elif isinstance(result, list):
            for index, (_, entries) in enumerate(result):
                found |= {f"layer {index}: {k}": v for k, v in _decoded(entries, row, len(case.rows)).items()}
        else:
            out, lse = result
            part = attended_part(case, layout).decode()
            limits = numerics.attention_tolerance(case.query(), part, case.scale)
            found |= {"out": (out[row], limits[0]), "lse": (lse[row], limits[1])}
        rows.append(found)
    return rows


def _scores(result: Tensor, seen: Observation) -> float:
    inside = seen.body[None, :, None].expand(result.shape)
    return numerics.score_tolerance(result[inside], seen)


def _planned(layer: LayerPlan, row: int, at: slice, positions: Tensor) -> dict[str, tuple[Tensor, float]]:
    """One row of a plan, with what it leaves out spelled out: plain means, group sizes, rounded mean positions."""
    heads = layer.n_entries.shape[1]
    ends = [0, *layer.n_entries.reshape(-1).cumsum(0).tolist()]
    mine = slice(ends[row * heads], ends[(row + 1) * heads])
    assignment, counts = layer.assignment[row, :, at], layer.n_entries[row]
    length, groups = assignment.shape[-1], [row_groups(a, int(n)) for a, n in zip(assignment, counts, strict=True)]
    sizes = torch.cat([g.sum(-1) for g in groups])  # [n]
    found = {"assignment": (assignment, 0.0), "n_entries": (counts, 0.0)}
    for name in ("key_weight", "value_weight"):
        weight = getattr(layer, name)
        # Row h of `mean` gives each token 1 / the size of its entry.
        mean = torch.stack([(g / g.sum(-1, keepdim=True)).sum(0) for g in groups])
        given = mean if weight is None else weight[row, :, at] * (assignment >= 0)
        found[name] = (given.float(), numerics.sum_tolerance(length, 1.0))
    count = sizes.float() if layer.multiplicity is None else layer.multiplicity[mine].float()
    found["multiplicity"] = (count, numerics.sum_tolerance(8, float(length)))
    mean_position = torch.cat([(g.double() @ positions.double()) for g in groups]) / sizes
    place = mean_position.round().int() if layer.positions is None else layer.positions[mine]
    found["positions"] = (place, 0.0)
    return found


def row_groups(assignment: Tensor, count: int) -> Tensor:
    """Membership of the tokens of `assignment [n]` in `count` entries, fp32 `[count, n]`."""
    return (assignment == torch.arange(count)[:, None]).float()


def _decoded(entries: Entries, row: int, batch: int) -> dict[str, tuple[Tensor, float]]:
    heads = (len(entries.bounds) - 1) // batch
    mine = slice(entries.bounds[row * heads], entries.bounds[(row + 1) * heads])
    found = {"lengths": (entries.offsets.diff()[row * heads : (row + 1) * heads], 0.0)}
    for name in ("keys", "values"):
        rows = getattr(entries, name)[mine]
        size = float(rows.float().norm(dim=-1).max()) if len(rows) else 0.0
        # A transform over D channels of each of H heads and back, then rounded to the dtype.
        length = 2 * rows.shape[-1] * heads
        found[name] = (rows, numerics.sum_tolerance(length, size) + torch.finfo(rows.dtype).eps * size)
    count = torch.zeros(len(entries.keys)) if entries.log_multiplicity is None else entries.log_multiplicity
    found["log_multiplicity"] = (count[mine], numerics.FP32 * 8)
    return found


def first_difference(mine: tuple[Tensor, float], theirs: tuple[Tensor, float]) -> str:
    """Where and by how much two tensors differ beyond the tolerance; "" if they do not."""
    (a, limit), (b, _) = mine, theirs
    if a.shape != b.shape:
        return f"shape {list(a.shape)} instead of {list(b.shape)}"
    if not a.numel():
        return ""
    x, y = a.double(), b.double()
    wrong = ~(((x - y).abs() <= limit) | (x == y) | (x.isnan() & y.isnan()))
    if not bool(wrong.any()):
        return ""
    at = tuple(int(i) for i in wrong.nonzero()[0])
    within = f" (beyond {limit:.3g})" if limit else ""
    return f"{float(x[at]):.9g} instead of {float(y[at]):.9g}{within} at {list(at)} and {int(wrong.sum()) - 1} more"
