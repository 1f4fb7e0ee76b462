"""Hypothesis strategies. Tensors are made from one drawn seed with a generator of their own, so that shrinking works;
everything shrinks towards few, short, plain prompts of a small model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from kvframe.errors import SpecError
from kvframe.execute import execute
from kvframe.testing.device import home
from kvframe.testing.prompt import PLAIN, Content, Geometry, Layout, Prompts
from kvframe.types import Entries, LayerPlan, Needs, Observation, Plan, Segments

if TYPE_CHECKING:
    from kvframe.spec import PipelineSpec

SEEDS = st.integers(0, 2**16)
# Lengths at which code breaks: one token, two, odd ones, one more than a block of 32.
LENGTHS = (1, 2, 3, 7, 12, 20, 33)


@st.composite
def geometries(
    draw: st.DrawFn,
    *,
    layers: Sequence[int] = (1, 2, 3),
    kv_heads: Sequence[int] = (1, 2, 3),
    groups: Sequence[int] = (1, 2, 3),
    head_dims: Sequence[int] = (8, 16, 32),
    partial_rope: bool = True,
) -> Geometry:
    """Shapes of models. `partial_rope`: some turn half of the channels only, some none
    of them in every second layer."""
    dim = draw(st.sampled_from(head_dims))
    turned = draw(st.sampled_from(("all", "half", "in some layers"))) if partial_rope else "all"
    n_layers, heads, group = (draw(st.sampled_from(choices)) for choices in (layers, kv_heads, groups))
    still = tuple(range(0, n_layers, 2)) if turned == "in some layers" else ()
    return Geometry(n_layers, heads, group, dim, dim // 2 if turned == "half" else None, still)


@st.composite
def prompts(
    draw: st.DrawFn,
    *,
    lengths: Sequence[int] = LENGTHS,
    min_rows: int = 1,
    max_rows: int = 3,
    shapes: SearchStrategy[Geometry] | None = None,
    contents: Sequence[Content] = ("random",),
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_protected: int = 3,
    starts: Sequence[int] = (0,),
) -> Prompts:
    """Prompts; see Prompts for what is drawn. `max_protected` bounds sinks, recent tokens and suffix each."""
    return Prompts(
        lengths=tuple(draw(st.lists(st.sampled_from(lengths), min_size=min_rows, max_size=max_rows))),
        seed=draw(SEEDS),
        geometry=draw(geometries() if shapes is None else shapes),
        dtype=draw(st.sampled_from(dtypes)),
        content=draw(st.sampled_from(contents)),
        sink=draw(st.integers(0, max_protected)),
        recent=draw(st.integers(0, max_protected)),
        suffix=draw(st.integers(0, max_protected)),
        start=draw(st.sampled_from(starts)),
    )


def observations(*, needs: Needs | None = None, **choices: Any) -> SearchStrategy[Observation]:
    """Observations, cut down to `needs` (None = everything); `choices` as for `prompts`."""
    return prompts(**choices).map(lambda drawn: drawn.observation(needs))


def make_segments(case: Prompts, size: int, layout: Layout = PLAIN) -> Segments:
    """Random segments of about `size` tokens for every row; 0 = one segment."""
    rows = []
    for row, length in enumerate(case.lengths):
        cuts = case.draw(row, "cuts", length, 1)[:, 0].argsort().argsort() % max(1, size) == 0
        cuts[0] = False
        rows.append((cuts if size else torch.zeros_like(cuts)).cumsum(0))
    ids = case.place(rows, layout)
    end = layout.left + max(case.lengths)
    ids[:, end:] = ids[:, end - 1 : end]  # padding at the right goes with the last token
    return Segments(ids.int())


def make_scores(case: Prompts, levels: int, layout: Layout = PLAIN) -> Tensor:
    """Random scores `[L, B, H, T]`, 0 outside the body; of `levels` different sizes (many ties), 0 = all different."""
    geometry, rows = case.geometry, []
    for row, length in enumerate(case.lengths):
        score = case.draw(row, "scores", geometry.layers, geometry.kv_heads, length, 1).abs()
        score = score if levels == 0 else (score * levels).floor().clamp_max(levels - 1)
        place = torch.arange(length)
        body = (place >= case.sink) & (place < length - case.recent - case.suffix)
        rows.append(torch.where(body[:, None], score, 0.0))
    return case.place(rows, layout)[..., 0].transpose(0, 1).contiguous()


def make_plan(case: Prompts, keep: int, groups: bool, uniform: bool, layout: Layout = PLAIN) -> Plan:
    """A random valid plan that keeps about `keep` eighths of the body's tokens; with `groups` it merges some; `uniform`
    = the same in all heads of a layer."""
    heads, planned = case.geometry.kv_heads, []
    for layer in range(case.geometry.layers):
        rows, counts = [], []
        for row, length in enumerate(case.lengths):
            made = [
                _assign(case, row, f"plan{layer}.{0 if uniform else h}", length, keep, groups) for h in range(heads)
            ]
            rows.append(torch.stack(made)[..., None])
            counts.append(rows[-1][..., 0].amax(-1) + 1)
        assignment = case.place(rows, layout, -1)[..., 0]
        planned.append(LayerPlan(assignment.int(), torch.stack(counts).long()))
    return Plan(tuple(planned))


def _assign(case: Prompts, row: int, what: str, length: int, keep: int, groups: bool) -> Tensor:
    """The assignment of one head, `[n]`."""
    place = torch.arange(length)
    body = (place >= case.sink) & (place < length - case.recent - case.suffix)
    order = case.draw(row, what, length, 2)
    kept = body & (order[:, 0].argsort().argsort() % 8 < keep)
    names = (order[:, 1] * 3).floor().long() if groups else place  # a few names = tokens that merge
    out = torch.full((length,), -1)
    if bool(kept.any()):
        out[kept] = names[kept].unique(return_inverse=True)[1]
    return out


def segmentations(*, sizes: Sequence[int] = (0, 1, 4), **choices: Any) -> SearchStrategy[tuple[Prompts, Segments]]:
    """Prompts with segments of about `sizes` tokens; 0 = one segment."""
    return st.builds(lambda case, size: (case, make_segments(case, size)), prompts(**choices), st.sampled_from(sizes))


def scores(*, levels: Sequence[int] = (0, 1, 2), **choices: Any) -> SearchStrategy[tuple[Prompts, Tensor]]:
    """Prompts with scores `[L, B, H, T]`, of `levels` different sizes (many ties); 0 = all different."""
    return st.builds(lambda case, level: (case, make_scores(case, level)), prompts(**choices), st.sampled_from(levels))


def plans(*, merges: bool = True, ragged: bool = True, **choices: Any) -> SearchStrategy[tuple[Prompts, Plan]]:
    """Prompts with a valid plan; `merges` and `ragged` mean what an allocator's flags mean."""
    return st.builds(
        lambda case, keep, groups, uniform: (case, make_plan(case, keep, groups, uniform)),
        prompts(**choices),
        st.integers(0, 8),
        st.booleans() if merges else st.just(False),
        st.booleans() if ragged else st.just(True),
    )


def entries(*, merges: bool = True, ragged: bool = True, **choices: Any) -> SearchStrategy[tuple[Prompts, Entries]]:
    """Prompts with the entries of their first layer."""

    def carry_out(drawn: tuple[Prompts, Plan]) -> tuple[Prompts, Entries]:
        case, plan = drawn
        seen = case.observation(Needs())
        return case, execute(plan.layers[0], seen.layers[0], seen.positions, seen.model.rope[0])

    return plans(merges=merges, ragged=ragged, **choices).map(carry_out)


@st.composite
def specs(
    draw: st.DrawFn, *, ratios: Sequence[float] = (1, 2, 4), plugins: Iterable[str] | None = None
) -> PipelineSpec:
    """Specs of registered stages at their default parameters, in any combination that is valid and runs on this
    machine. `plugins` limits the
    stages to those of these entry-point names ("core" = kvframe's own)."""
    from kvframe.registry import registry
    from kvframe.spec import validate_spec

    known = registry()
    data: dict[str, Any] = {}
    for kind, classes in known.stages.items():
        names = [n for n in classes if plugins is None or known.owners[f"{kind}:{n}"].name in set(plugins)]
        if kind == "attention":
            able = [n for n in names if getattr(classes[n], "any_format", True)]
            names = [n for n in able if home(classes[n]())[0]]  # type: ignore[call-arg]
        data[kind] = draw(st.sampled_from(names))
    keeps_all = getattr(known.stages["allocator"][data["allocator"]], "keeps_all", False)
    data["budget"] = {"ratio": 1 if keeps_all else draw(st.sampled_from(ratios))}
    try:
        return validate_spec(data)
    except SpecError:
        from hypothesis import reject

        reject()
