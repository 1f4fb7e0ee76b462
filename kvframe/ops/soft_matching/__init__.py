"""Bipartite soft matching inside chunks: every source finds the target that is most like it."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from kvframe.errors import InputError
from kvframe.ops.soft_matching.reference import soft_matching as soft_matching_reference
from kvframe.types import check_shape

Metric = Literal["cosine", "distance", "ward"]
IMPLEMENTATIONS = ("reference", "triton")


def soft_matching(
    rows: Tensor,
    sources: Tensor,
    targets: Tensor,
    metric: Metric = "cosine",
    counts: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return `(likeness [P, a], partner [P, a])`: for each source of each of `P` chunks its best target.

    Args:
        rows: fp32 (for the reference also fp64) `[M, D]`, what is compared.
        sources: int64 `[P, a]`, the sources of each chunk as indices into `rows`; -1 = none.
        targets: int64 `[P, b]`, its targets likewise.
        metric: "cosine" (-1 to 1; a row of zeros is like nothing: 0), "distance" (minus the squared distance), or
            "ward" (that times `n m / (n + m)`: minus the squared error that a merge of `n` and `m` rows adds).
        counts: `[M]`, how many rows each row stands for; needed for "ward" only.
        impl: "reference", "triton", or "auto": triton for fp32 rows on a GPU, else the reference.

    Higher = more alike; likeness is in the precision of `rows`, and -inf with partner -1 where there is no source or no
    target. `partner` is int64, an index into `rows`. Of the targets whose likeness is within rounding of the best
    (2^-17 of the source's squared norm, for "ward" times its count) the first is taken, so that repeated rows do not
    hang on the order of summation. Costs O(P a b D) time; the reference holds O(b) scores a source, for blocks of
    chunks at a time, the kernel none.

    Raises InputError for another metric or implementation, StageError for shapes that do not fit."""
    if metric not in get_args(Metric):
        raise InputError(f"soft_matching has no metric '{metric}'; there are: {', '.join(get_args(Metric))}.")
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise InputError(
            f"soft_matching has no implementation '{impl}'; there are: auto, {', '.join(IMPLEMENTATIONS)}."
        )
    check_shape("soft_matching", "rows", rows, (None, None))
    check_shape("soft_matching", "sources", sources, (None, None))
    check_shape("soft_matching", "targets", targets, (sources.shape[0], None))
    if metric == "ward":
        if counts is None:
            raise InputError("soft_matching needs counts for the metric 'ward'; give one number for each row.")
        check_shape("soft_matching", "counts", counts, (rows.shape[0],))
    if impl == "triton" or (impl == "auto" and rows.is_cuda and rows.element_size() == 4):
        # Triton is imported where it is used: it takes its time, and not every machine has it.
        from kvframe.ops.soft_matching.triton import soft_matching as soft_matching_triton

        return soft_matching_triton(rows, sources, targets, metric, counts)
    return soft_matching_reference(rows, sources, targets, metric, counts)


__all__ = ["soft_matching"]
