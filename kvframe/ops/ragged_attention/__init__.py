"""Attention over ragged entries with log multiplicity, returned with its log-sum-exp, and the exact merge of parts."""

from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.ragged_attention.dense import dense_attention
from kvframe.ops.ragged_attention.logits import attention_weights, cap_logits
from kvframe.ops.ragged_attention.merge import merge_attention, merge_sinks
from kvframe.ops.ragged_attention.operator import run
from kvframe.ops.ragged_attention.reference import ragged_attention as ragged_attention_reference
from kvframe.ops.ragged_attention.sdpa import ragged_attention as ragged_attention_sdpa
from kvframe.types import Encoded, Entries

IMPLEMENTATIONS = {"reference": ragged_attention_reference, "sdpa": ragged_attention_sdpa}


def ragged_attention(
    query: Tensor, entries: Entries, scale: float, impl: str = "auto", softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend `query [B, Hq, Q, D]` to ragged `entries` (see `kvframe.stages.Kernel.attend` for the contract).

    `impl`: "reference" (fp32 or, for fp64 input, fp64), "sdpa" (torch's fused attention where it applies), or "auto"
    (= "sdpa"). Raises InputError for another name."""
    name = "sdpa" if impl == "auto" else impl
    if name not in IMPLEMENTATIONS:
        raise InputError(
            f"ragged_attention has no implementation '{impl}'; there are: auto, {', '.join(IMPLEMENTATIONS)}."
        )
    return IMPLEMENTATIONS[name](query, entries, scale, softcap)


def attend_codes(
    query: Tensor, encoded: Encoded, scale: float, impl: str, softcap: float | None = None
) -> tuple[Tensor, Tensor] | None:
    """Attend codes of the formats "dense" and "int8" where they lie, with `impl` "cpu" or "triton"; None for another.

    Raises InputError for what that implementation cannot take."""
    if impl not in ("cpu", "triton"):
        return None
    return run(query, encoded, scale, impl, softcap)


__all__ = [
    "attend_codes",
    "attention_weights",
    "cap_logits",
    "dense_attention",
    "merge_attention",
    "merge_sinks",
    "ragged_attention",
]
