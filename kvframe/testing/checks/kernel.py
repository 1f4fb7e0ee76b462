"""Laws of attention kernels, on the codes of every registered encoder that the kernel accepts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from kvframe.builtin.encoders import Dense
from kvframe.errors import KvframeError
from kvframe.ops import merge_attention, ragged_attention
from kvframe.testing import device
from kvframe.testing.case import Case, attended_part, cases_for, first_difference
from kvframe.testing.checks.encoder import take
from kvframe.testing.law import expect, law
from kvframe.testing.numerics import attention_tolerance
from kvframe.testing.prompt import Content
from kvframe.types import Entries, Part

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _codable() -> tuple[str, ...]:
    """Encoders that can be made without arguments, `dense` first, and that code any heads by themselves."""
    from kvframe.registry import registry

    made = [stage() for stage in registry().stages["encoder"].values()]  # type: ignore[call-arg]
    return ("dense", *(e.name for e in made if e.name != "dense" and getattr(e, "joins_heads", 1) == 1))


def _cases(stage: Any) -> Any:
    return cases_for(stage)


def _any_code(stage: Any) -> Any:
    coded = st.sampled_from(_codable())
    drawn = cases_for(stage, dtypes=DTYPES, contents=("random", "constant", "zero"))
    return st.builds(lambda case, name: replace(case, encoder=name), drawn, coded)


def _huge(stage: Any) -> Any:
    contents: tuple[Content, ...] = ("huge",)
    return cases_for(stage, dtypes=DTYPES, contents=contents)


def attend(stage: Any, query: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """Attend; codes that the kernel refuses with a KvframeError are left out."""
    try:
        out, lse = device.attend(stage, query, part, scale)
    except KvframeError:
        assume(False)
        raise
    return out, lse


def dense(entries: Entries) -> Part:
    """Entries as a part that holds them as they are."""
    encoder = Dense()
    return Part(encoder.encode(replace(entries, positions=None), ()), encoder)


def _compare(mine: Any, theirs: Any, limits: tuple[float, float], expected: str) -> None:
    for name, a, b, limit in zip(("out", "lse"), mine, theirs, limits, strict=True):
        difference = first_difference((a, limit), (b, 0.0))
        expect(not difference, expected, f"{name}: {difference}")


def _twice(limits: tuple[float, float]) -> tuple[float, float]:
    return 2 * limits[0], 2 * limits[1]


@law("attention", _any_code)
def attention_matches_the_reference(stage: Any, case: Case) -> None:
    """Outputs and log-sum-exps are those of the fp64 softmax of q.k * scale + log multiplicity over the decoded
    entries, for ragged heads, grouped queries, odd sizes and every dtype."""
    part, query, scale = attended_part(case), case.query(), case.scale
    got = attend(stage, query, part, scale)
    shapes = (tuple(query.shape), tuple(query.shape[:-1]))
    for name, tensor, shape in zip(("out", "lse"), got, shapes, strict=True):
        expect(tensor.dtype == torch.float32, f"{name} in fp32", str(tensor.dtype))
        expect(tuple(tensor.shape) == shape, f"{name} {list(shape)}", str(list(tensor.shape)))
    back = part.decode()
    wanted = ragged_attention(query.double(), back, scale, impl="reference")
    limits = attention_tolerance(query, back, scale, coded=not part.encoder.views)
    _compare(got, wanted, limits, "what attention in fp64 gives")


@law("attention", _cases)
def multiplicity_counts_copies(stage: Any, case: Case) -> None:
    """An entry of multiplicity 3 counts as three equal entries."""
    entries = replace(case.entries()[0], log_multiplicity=None)
    query, scale = case.query(), case.scale
    n = len(entries.keys)
    tripled = torch.arange(n).repeat_interleave(3)
    copies = Entries(entries.offsets * 3, entries.keys[tripled], entries.values[tripled])
    weighted = replace(entries, log_multiplicity=torch.full((n,), 3.0).log())
    got, wanted = (attend(stage, query, dense(e), scale) for e in (weighted, copies))
    _compare(got, wanted, _twice(attention_tolerance(query, copies, scale)), "the same as three copies of each entry")


@law("attention", _cases)
def parts_merge_to_the_whole(stage: Any, case: Case) -> None:
    """Attention over two parts of the entries, merged by their log-sum-exps, is attention over all of them."""
    entries, query, scale = case.entries()[0], case.query(), case.scale
    lengths = entries.offsets.diff().tolist()
    cut = [n // 3 for n in lengths]
    parts = [take(entries, [0] * len(cut), cut), take(entries, cut, lengths)]
    merged = merge_attention([attend(stage, query, dense(part), scale) for part in parts])
    whole = attend(stage, query, dense(entries), scale)
    _compare(merged, whole, _twice(attention_tolerance(query, entries, scale)), "attention over the whole")


@law("attention", _cases)
def order_does_not_matter(stage: Any, case: Case) -> None:
    """The order of a head's entries changes nothing."""
    entries, query, scale = case.entries()[0], case.query(), case.scale
    back = [
        torch.arange(end - 1, begin - 1, -1) for begin, end in zip(entries.bounds, entries.bounds[1:], strict=False)
    ]
    rows = torch.cat(back)
    count = entries.log_multiplicity
    turned = Entries(entries.offsets, entries.keys[rows], entries.values[rows], None if count is None else count[rows])
    got, wanted = (attend(stage, query, dense(e), scale) for e in (turned, entries))
    _compare(got, wanted, _twice(attention_tolerance(query, entries, scale)), "the same for the entries in reverse")


@law("attention", _cases, weight=0.5)
def empty_heads_give_nothing(stage: Any, case: Case) -> None:
    """A head without entries gives out 0 and log-sum-exp -inf; the others are as without it."""
    entries, query, scale = case.entries()[0], case.query(), case.scale
    heads = case.prompts.geometry.kv_heads
    lengths = entries.offsets.diff().tolist()
    fewer = [0 if pair % 2 == 0 else n for pair, n in enumerate(lengths)]
    out, lse = attend(stage, query, dense(take(entries, [0] * len(fewer), fewer)), scale)
    whole = attend(stage, query, dense(entries), scale)
    limits = _twice(attention_tolerance(query, entries, scale))
    group = case.prompts.geometry.group
    for pair, n in enumerate(fewer):
        row, first = pair // heads, pair % heads * group
        mine = (out[row, first : first + group], lse[row, first : first + group])
        if n == 0:
            expect(not mine[0].any() and (mine[1] == -torch.inf).all(), "out 0 and lse -inf", f"{mine[0].abs().max()}")
        else:
            theirs = tuple(t[row, first : first + group] for t in whole)
            _compare(mine, theirs, limits, "a head with entries as without the empty one")


@law("attention", _huge)
def huge_logits_stay_finite(stage: Any, case: Case) -> None:
    """With keys and values of 3e4 outputs are finite and no larger than the largest value."""
    part, query, scale = attended_part(case), case.query(), case.scale
    out, lse = attend(stage, query, part, scale)
    largest = float(part.decode().values.float().abs().max()) if part.encoded.bounds[-1] else 0.0
    low = torch.finfo(query.dtype).eps
    expect(out.isfinite().all() and not lse.isnan().any(), "finite outputs", "inf or NaN")
    expect((out.abs() <= largest * (1 + 4 * low)).all(), f"outputs of at most {largest}", f"{out.abs().max()}")
