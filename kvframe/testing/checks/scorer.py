"""Laws of scorers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvframe.testing.case import Case, arguments, cases_for, first_difference, invoke
from kvframe.testing.law import expect, law
from kvframe.testing.prompt import Layout
from kvframe.types import Observation

EXTREME = ("random", "constant", "zero", "tiny", "huge")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _cases(stage: Any) -> Any:
    return cases_for(stage)


def _extreme(stage: Any) -> Any:
    return cases_for(stage, contents=EXTREME, dtypes=DTYPES)


def of_body(scores: Tensor, seen: Observation) -> Tensor:
    """The scores of body tokens, flat."""
    return scores[seen.body[None, :, None].expand(scores.shape)]


@law("scorer", _cases)
def scores_have_their_shape(stage: Any, case: Case) -> None:
    """Scores are fp32 `[L, B, H, T]`: one number for each KV head, not for each query head."""
    given = arguments(stage, case)
    scores = invoke(stage, given)
    expect(scores.shape == given[0].shape, f"shape {list(given[0].shape)}", str(list(scores.shape)))
    expect(scores.dtype == torch.float32, "fp32", str(scores.dtype))


@law("scorer", _extreme)
def scores_are_finite_and_not_negative(stage: Any, case: Case) -> None:
    """Scores of body tokens are finite and >= 0, also for constant, zero, tiny and huge keys in 16 bits."""
    # What overflows most easily is never left to the draw.
    largest = replace(case.prompts, content="huge", dtype=torch.float16)
    for each in (case, replace(case, prompts=largest)):
        given = arguments(stage, each)
        body = of_body(invoke(stage, given), given[0])
        wrong = body[~(body >= 0) | body.isinf()]
        expect(not len(wrong), "finite scores >= 0", f"some of {wrong[:3]}")


@law("scorer", _cases)
def padding_is_never_read(stage: Any, case: Case) -> None:
    """What stands at padding changes no bit of a body token's score."""
    one, two = (arguments(stage, case, Layout(left=2, right=1, noise=n)) for n in (1, 2))
    first, second = (of_body(invoke(stage, given), given[0]) for given in (one, two))
    difference = first_difference((first, 0.0), (second, 0.0))
    expect(not difference, "scores that do not depend on padding", difference)
