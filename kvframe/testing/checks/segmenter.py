"""Laws of segmenters."""

from __future__ import annotations

from typing import Any

import torch

from kvframe.testing.case import Case, arguments, cases_for, invoke
from kvframe.testing.law import expect, law


def _cases(stage: Any) -> Any:
    return cases_for(stage, contents=("random", "constant", "zero"), dtypes=(torch.float32, torch.bfloat16))


@law("segmenter", _cases)
def segments_partition_the_tokens(stage: Any, case: Case) -> None:
    """Segment ids are int32 `[B, T]`, from 0 on, and grow by 0 or 1 from token to token; boundaries are finite fp32."""
    (seen,) = arguments(stage, case)
    found = invoke(stage, (seen,))
    expect(found.ids.dtype == torch.int32, "ids in int32", str(found.ids.dtype))
    expect(found.ids.shape == seen.valid.shape, f"ids {list(seen.valid.shape)}", str(list(found.ids.shape)))
    steps = found.ids.diff(dim=1)
    expect(((steps == 0) | (steps == 1)).all() and (found.ids >= 0).all(), "ids that grow by 0 or 1")
    if found.boundary is not None:
        right = found.boundary.dtype == torch.float32 and found.boundary.shape == seen.valid.shape
        expect(right and found.boundary.isfinite().all(), "finite fp32 boundaries [B, T]")
