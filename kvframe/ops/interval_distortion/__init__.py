"""How wrong attention gets when a run of tokens becomes one entry: tables over all intervals up to a length."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.interval_distortion.fast import gram_band
from kvframe.ops.interval_distortion.tables import IntervalTables, interval_sums
from kvframe.rope import Rope

IMPLEMENTATIONS = ("reference", "fast", "numba", "triton")
log = logging.getLogger("kvframe")


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
    length at a time), "numba" (the same, compiled, on a CPU; needs numba), "triton" (on a GPU) or "auto": triton on a
    GPU, numba on a CPU if it is installed, else fast. Raises InputError for another name, or one that cannot run."""
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise InputError(
            f"interval_distortion has no implementation '{impl}'; there are: auto, {', '.join(IMPLEMENTATIONS)}."
        )
    if impl == "numba" and not compiled():
        raise InputError(
            "interval_distortion's numba path needs numba: pip install 'kvframe[cpu]', or use impl='auto'."
        )
    name = impl
    if impl == "auto":
        name = "triton" if keys.is_cuda else "numba" if keys.device.type == "cpu" and compiled() else "fast"
    return implementation(name)(keys, values, probes, weights, rope, scale, longest, mass_share, base, coherent)


@cache
def compiled() -> bool:
    """Whether numba is there; says so once if it is not."""
    found = find_spec("numba") is not None
    if not found:
        log.info("numba is not installed, so interval tables take twice the time; pip install 'kvframe[cpu]' helps.")
    return found


@cache
def implementation(name: str) -> Any:
    """The function that does it; imported where it is used, as numba takes its time."""
    return importlib.import_module(f"kvframe.ops.interval_distortion.{name}").interval_distortion


__all__ = ["IntervalTables", "gram_band", "interval_distortion", "interval_sums"]
