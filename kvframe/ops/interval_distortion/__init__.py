"""How wrong attention gets when a run of tokens becomes one entry: tables over all intervals up to a length."""

from __future__ import annotations

from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.interval_distortion.fast import gram_band
from kvframe.ops.interval_distortion.fast import interval_distortion as interval_distortion_fast
from kvframe.ops.interval_distortion.reference import interval_distortion as interval_distortion_reference
from kvframe.ops.interval_distortion.tables import IntervalTables, interval_sums
from kvframe.rope import Rope

IMPLEMENTATIONS = {"reference": interval_distortion_reference, "fast": interval_distortion_fast}


def interval_distortion(
    keys: Tensor,
    values: Tensor,
    probes: Tensor,
    weights: Tensor,
    rope: Rope,
    scale: float,
    longest: int,
    *,
    mass_share: float = 0.25,
    base: float = 0.1,
    coherent: bool = True,
    impl: str = "auto",
) -> IntervalTables:
    """Return the tables of all intervals of 1 to `longest` consecutive tokens.

    `keys` (after RoPE), `values [U, N, D]` are those of `U` heads, at consecutive positions; `probes [U, P, D]` are
    queries (after RoPE) that see all of them; `weights [U, N]` >= 0 weigh the values of an entry. An interval I of n
    tokens becomes one entry:

        key = the mean of its keys before RoPE, rotated to the rounded mean position (half a position: downwards)
        value = sum of (w_t + base * mean w) v_t, normalised
        multiplicity m = clamp(n c^2, 1, n) with c = |mean key| / mean |key| before RoPE   (`coherent`; else n)

    and, with e_t the probe's softmax over the N tokens, Z = sum of e_t, M = sum of e_t v_t over I, Z' and M' = Z' value
    the same of the entry, its distortion is

        mean over probes of  Z [ mass_share (Z - Z')^2 / Z^2 + (1 - mass_share) |M - M'|^2 / |M|^2 ]

    0 = exact, 1 = as bad as a dropped region. Source: GraceKV (Tian et al. 2026, arXiv 2608.07001), prototypes and
    distortion. `impl`: "reference" (fp64, interval by interval), "fast" (fp32 recurrences over all intervals of one
    length at a time) or "auto". Raises InputError for another name."""
    name = "fast" if impl == "auto" else impl
    if name not in IMPLEMENTATIONS:
        raise InputError(
            f"interval_distortion has no implementation '{impl}'; there are: auto, {', '.join(IMPLEMENTATIONS)}."
        )
    return IMPLEMENTATIONS[name](keys, values, probes, weights, rope, scale, longest, mass_share, base, coherent)


__all__ = ["IntervalTables", "gram_band", "interval_distortion", "interval_sums"]
