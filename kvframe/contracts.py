"""What a stage must hand back, and must leave alone, checked where its result enters the pipeline, and who is named
when a stage fails. The checks cost far less than the stages: they look at shapes and types, and at values only where a
wrong one would go unseen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvframe.errors import KvframeError, StageError
from kvframe.stages import Encoder, Stage
from kvframe.types import Encoded, Entries, Grades, LayerPlan, Observation, Plan, check_shape

WHOLE_NUMBERS = (torch.int8, torch.int16, torch.int32, torch.int64)
# What says already what is wrong, or is no fault of the stage that it comes up in.
PASSED_ON = (KvframeError, MemoryError, torch.OutOfMemoryError)
MAX_REASON = 240


@contextmanager
def blaming(*stages: Stage) -> Iterator[None]:
    """Turn what a stage raises into a StageError that names it, with the original as its cause. The errors of kvframe
    and want of memory pass as they are. Of several stages, which may call each other, the innermost is named that was
    at work; without one, the first."""
    try:
        yield
    except PASSED_ON:
        raise
    except Exception as error:
        raise failure(error, *stages) from error


def failure(error: Exception, *stages: Stage) -> StageError:
    """The error that `blaming` raises."""
    culprit, trace = stages[0], error.__traceback__
    while trace is not None:
        first = trace.tb_frame.f_code.co_varnames[:1]
        owner = trace.tb_frame.f_locals.get(*first) if first else None
        # Stages that a stage makes itself are its own affair.
        culprit = owner if isinstance(owner, Stage) and owner in stages else culprit
        trace = trace.tb_next
    text = textwrap.shorten(str(error), MAX_REASON, placeholder=" ...").rstrip(".")
    return StageError(
        f"{culprit.kind} '{culprit.name}' fails with {type(error).__name__}{': ' if text else ''}{text}; mend it, or "
        f"choose another {culprit.kind}."
    )


class Untouched:
    """Notices a stage that writes into what it was given: an observation, entries or codes, and more by name."""

    def __init__(self, seen: Observation | Entries | Encoded, **more: Tensor) -> None:
        self._tensors = dict(more)
        if isinstance(seen, Observation):
            self._observe(seen)
        else:
            codes = seen.codes if isinstance(seen, Encoded) else {}
            for name, tensor in {**vars(seen), **codes}.items():
                self._add(name, tensor)
        self._writes = {name: writes(tensor) for name, tensor in self._tensors.items()}

    def _observe(self, observation: Observation) -> None:
        for name in ("positions", "valid", "body", "surprisal", "suffix"):
            self._add(name, getattr(observation, name))
        for index, layer in enumerate(observation.layers):
            for name in ("keys", "values", "queries", "head_outputs"):
                self._add(f"layers[{index}].{name}", getattr(layer, name))
        for depth, states in observation.hidden_states.items():
            self._add(f"hidden_states[{depth}]", states)

    def _add(self, name: str, tensor: Any) -> None:
        if isinstance(tensor, Tensor):
            self._tensors[name] = tensor

    def check(self, stage: Stage) -> None:
        """Raise StageError, naming the stage, if anything was written to since."""
        for name, tensor in self._tensors.items():
            if writes(tensor) != self._writes[name]:
                raise StageError(
                    f"{stage.kind} '{stage.name}' changes {name} in place, which other stages and the cache read too; "
                    "work on a copy."
                )


def writes(tensor: Tensor) -> int:
    """How often a tensor's storage was written to, as torch counts it; 0 in inference mode, where it does not."""
    return 0 if tensor.is_inference() else tensor._version


def check_plan_fields(plan: Plan, observation: Observation, owner: str, grades: Grades | None = None) -> None:
    """Raise StageError unless each layer's tensors have the shapes, types and device that `execute` takes for granted.
    Which tokens may go where is `check_plan`'s."""
    _, batch, heads, tokens = observation.shape
    for index, layer in enumerate(plan.layers):
        where = f"{owner}: plan.layers[{index}]"
        for name in ("assignment", "n_entries"):
            tensor = getattr(layer, name)
            if tensor.dtype not in WHOLE_NUMBERS:
                raise StageError(f"{where}.{name} must hold whole numbers, but is {tensor.dtype}.")
        check_shape(where, "assignment", layer.assignment, (batch, heads, tokens))
        check_shape(where, "n_entries", layer.n_entries, (batch, heads))
        for name, tensor in vars(layer).items():
            if isinstance(tensor, Tensor) and tensor.device != observation.valid.device:
                raise StageError(
                    f"{where}.{name} is on {tensor.device}, but the observation is on {observation.valid.device}; make "
                    "new tensors with device=observation.valid.device."
                )
        if bool((layer.assignment >= tokens).any()):
            raise StageError(f"{where}.assignment holds {int(layer.assignment.max())}, but there are {tokens} tokens.")
        _check_optional(layer, (batch, heads, tokens), where)
        _check_grade(layer, grades, where)


def _check_optional(layer: LayerPlan, dense: tuple[int, ...], where: str) -> None:
    entries = int(layer.n_entries.sum())
    for name in ("key_weight", "value_weight"):
        if (weight := getattr(layer, name)) is not None:
            check_shape(where, name, weight, dense)
            if not bool(weight[layer.assignment >= 0].isfinite().all()):
                raise StageError(f"{where}.{name} must be finite where a token is assigned, but is not.")
    for name in ("multiplicity", "positions"):
        if (tensor := getattr(layer, name)) is not None:
            check_shape(where, name, tensor, (entries,))
    count = layer.multiplicity
    # NaN compares as False, so it is found too.
    if count is not None and not bool((count >= 1 - 1e-3).all()):
        raise StageError(f"{where}.multiplicity must be at least 1, but is {float(count.min()):.4g} at its smallest.")


def _check_grade(layer: LayerPlan, grades: Grades | None, where: str) -> None:
    if (layer.grade is None) != (grades is None):
        wanted = "say which of the encoder's grades each entry has" if grades else "be None: the encoder has one grade"
        raise StageError(f"{where}.grade must {wanted}.")
    if layer.grade is not None and grades is not None:
        check_shape(where, "grade", layer.grade, (int(layer.n_entries.sum()),))
        known = (layer.grade >= 0) & (layer.grade < len(grades.price))
        if layer.grade.dtype not in WHOLE_NUMBERS or not bool(known.all()):
            raise StageError(f"{where}.grade must hold whole numbers from 0 to {len(grades.price) - 1}.")


def check_states(states: Sequence[Any], observation: Observation, encoder: Encoder) -> None:
    """Raise StageError unless there is one state a layer."""
    if len(states) != len(observation.layers):
        wanted, found = len(observation.layers), len(states)
        raise StageError(
            f"encoder '{encoder.name}' must learn one state a layer, {wanted} in all, but fit returned {found}."
        )


def check_encoded(encoded: Encoded, entries: Entries, encoder: Encoder) -> None:
    """Raise StageError unless the codes are those of as many rows a head, with what belongs to the rows."""
    owner = f"encoder '{encoder.name}'"
    if encoded.offsets.shape != entries.offsets.shape or not torch.equal(encoded.offsets, entries.offsets):
        raise StageError(
            f"{owner} must keep the number of rows of each head ({entries.offsets.diff().tolist()}), but its codes' "
            f"offsets say {encoded.offsets.diff().tolist()}."
        )
    if encoded.dtype != entries.keys.dtype:
        raise StageError(f"{owner} must decode to {entries.keys.dtype}, but its codes say {encoded.dtype}.")
    for name in ("log_multiplicity", "positions"):
        given, kept = getattr(entries, name), getattr(encoded, name)
        # An encoder may hold positions among its codes, in fewer bits, as long as decoding gives them back.
        if name == "positions" and given is not None and kept is None:
            continue
        if (given is None) != (kept is None):
            raise StageError(
                f"{owner} must carry {name} as it came, but {'made it up' if given is None else 'lost it'}."
            )
        if given is not None:
            check_shape(owner, name, kept, tuple(given.shape))
    for name, codes in encoded.codes.items():
        if codes.device != entries.keys.device:
            raise StageError(
                f"{owner}: code '{name}' is on {codes.device}, but the entries are on {entries.keys.device}."
            )
        if codes.is_floating_point() and not bool(codes.isfinite().all()):
            raise StageError(
                f"{owner}: code '{name}' holds infinities or NaN; if the keys and values do not, scale them before "
                f"rounding to {codes.dtype}."
            )
