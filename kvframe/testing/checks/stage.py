"""Laws of every stage, whatever its kind."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import strategies as st
from pydantic import ValidationError

from kvframe.contracts import writes
from kvframe.errors import KvframeError
from kvframe.plain import held_tensors
from kvframe.stages import Encoder, Kernel
from kvframe.testing.case import (
    Case,
    arguments,
    by_row,
    cases_for,
    first_difference,
    fitted,
    invoke,
)
from kvframe.testing.law import expect, law
from kvframe.testing.prompt import Layout
from kvframe.types import Needs


def _cases(stage: Any) -> Any:
    return cases_for(stage)


def _pairs(stage: Any) -> Any:
    return st.tuples(cases_for(stage), cases_for(stage, max_rows=1))


def _sees(stage: Any) -> bool:
    return not isinstance(stage, Kernel)


def _same_rows(stage: Any, mine: list[Any], theirs: list[Any], expected: str) -> None:
    for row, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        expect(a.keys() == b.keys(), expected, f"{sorted(a)} instead of {sorted(b)} in row {row}")
        for name in a:
            difference = first_difference(a[name], b[name])
            expect(not difference, expected, f"{name} of row {row}: {difference}")


@law("stage")
def is_documented(stage: Any) -> None:
    """The class has a docstring, its name is fixed by a Literal, and every field has a description."""
    cls = type(stage)
    expect((cls.__doc__ or "").strip() and cls.__doc__ != cls.__mro__[1].__doc__, "a docstring of the class")
    expect(isinstance(cls.model_fields["name"].default, str), "a default for `name`, as in name: Literal[...] = ...")
    for name, info in cls.model_fields.items():
        expect(name == "name" or info.description, f"Field(..., description=...) for '{name}'")


@law("stage")
def survives_a_spec(stage: Any) -> None:
    """Written to JSON as a spec's plain data and read again, a stage is equal to what it was."""
    data = json.loads(json.dumps(stage.model_dump(mode="json"), allow_nan=False))
    again = type(stage).model_validate(data)
    expect(again == stage, f"{stage!r}", f"{again!r}")
    expect(hash(again) == hash(stage), "equal stages with equal hashes")


@law("stage")
def rejects_bad_fields(stage: Any) -> None:
    """Unknown keys, a foreign name, not-a-number and changes after construction are refused."""
    cls, data = type(stage), stage.model_dump()
    bad: list[tuple[str, Any]] = [("an_unknown_key", 1), ("name", "some.other_stage")]
    for name, info in cls.model_fields.items():
        if info.annotation in (int, float):
            bad += [(name, float("nan")), (name, "many"), (name, None)]
    for name, value in bad:
        try:
            cls.model_validate({**data, name: value})
        except ValidationError:
            continue
        expect(False, f"{name}={value!r} to be refused", "a stage (limits or allow_inf_nan=False refuse NaN)")
    for name in data:
        try:
            setattr(stage, name, data[name])
        except ValidationError:
            continue
        expect(False, "a frozen stage", f"one whose field '{name}' can be set")


@law("stage", _cases, weight=0.3)
def binds_or_refuses(stage: Any, case: Case) -> None:
    """`bind` returns, or refuses the model with a KvframeError, the same way twice."""
    outcomes = []
    for _ in range(2):
        try:
            stage.bind(case.prompts.model)
            outcomes.append("returns")
        except KvframeError:
            outcomes.append("refuses")
    expect(outcomes[0] == outcomes[1], "the same outcome twice", " then ".join(outcomes))


@law("stage", _pairs)
def is_pure(stage: Any, cases: tuple[Case, Case]) -> None:
    """Inputs are not written to, nor torch's random state; the same inputs give the same bits, whatever came in
    between."""
    given, other = (arguments(stage, case) for case in cases)
    before, state = [tensor.clone() for tensor in held_tensors(given)], torch.get_rng_state()
    written = [writes(tensor) for tensor in held_tensors(given)]
    first = [tensor.clone() for tensor in held_tensors(invoke(stage, given))]
    expect(torch.equal(torch.get_rng_state(), state), "torch's global random state as before (use a local generator)")
    for old, new in zip(before, held_tensors(given), strict=True):
        expect(torch.equal(old, new), "inputs as before", f"an input {list(new.shape)} of {new.dtype} that changed")
    # What clamps in place, for example, changes only some inputs.
    for count, new in zip(written, held_tensors(given), strict=True):
        expect(writes(new) == count, "inputs left alone", f"a write into one of {list(new.shape)}, {new.dtype}")
    invoke(stage, other)
    again = list(held_tensors(invoke(stage, given)))
    expect(len(first) == len(again), "the same outputs twice")
    for old, new in zip(first, again, strict=True):
        difference = first_difference((new, 0.0), (old, 0.0))
        expect(not difference, "the same outputs for the same inputs", difference)


@law("stage", _cases)
def row_alone_equals_row_in_batch(stage: Any, case: Case) -> None:
    """A row gives the same alone as in a batch of rows of other lengths."""
    given = arguments(stage, case)
    # What an encoder learned of the whole batch is given: coding, not learning, is what must go row by row.
    states = fitted(stage, given[0]) if isinstance(stage, Encoder) else None
    together = by_row(stage, case, invoke(stage, given, states))
    for row in case.rows:
        single = case.alone(row)
        result = by_row(stage, single, invoke(stage, arguments(stage, single), states))
        _same_rows(stage, together[row : row + 1], result, "what the row gives alone")


@law("stage", _cases, applies=_sees)
def padding_changes_nothing(stage: Any, case: Case) -> None:
    """Columns of padding at either side of the batch, and what stands in them, change nothing."""
    plain = by_row(stage, case, invoke(stage, arguments(stage, case)))
    for layout in (Layout(noise=1), Layout(left=3, noise=2), Layout(right=2, noise=3)):
        padded = by_row(stage, case, invoke(stage, arguments(stage, case, layout)), layout)
        _same_rows(stage, padded, plain, f"the same with {layout.left} columns of padding at the left and "
                   f"{layout.right} at the right")  # fmt: skip


@law("stage", _cases, applies=_sees)
def needs_are_honoured(stage: Any, case: Case) -> None:
    """A stage does with what it `needs`, and what other stages of a spec have asked for changes nothing."""
    enough = by_row(stage, case, invoke(stage, arguments(stage, case)))
    all_of_it = Needs("all", "all", (0.0, 0.33, 0.5, 0.75, *stage.needs.hidden_states), True)
    more = by_row(stage, case, invoke(stage, arguments(stage, case, needs=all_of_it)))
    _same_rows(stage, more, enough, "the same from an observation with more in it than was asked for")
