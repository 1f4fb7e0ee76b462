"""Instances of a stage class that are worth checking: one for each choice that its fields offer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kvframe.stages import Stage


def variants(stage: type[Stage]) -> list[Stage]:
    """The stage at its default parameters, then with one field at a time set to its other choices (Literal, bool) or to
    the ends of its range (ge, le). What the class refuses is left out. Raises InputError if a field has no default."""
    from kvframe.errors import InputError

    try:
        found = [stage()]  # type: ignore[call-arg]
    except ValidationError as error:
        missing = ", ".join(str(e["loc"][0]) for e in error.errors())
        raise InputError(f"{stage.__name__} cannot be made without arguments: give {missing} a default.") from None
    for name, info in stage.model_fields.items():
        if name == "name":
            continue
        for value in _choices(info):
            try:
                made = stage(**{name: value})
            except ValidationError:
                continue
            if made not in found:
                found.append(made)
    return found


def _choices(info: FieldInfo) -> Iterator[Any]:
    annotation = info.annotation
    for option in get_args(annotation) if get_origin(annotation) is not Literal else (annotation,):
        if get_origin(option) is Literal:
            yield from get_args(option)
    if annotation is bool:
        yield from (False, True)
    for limit in info.metadata:
        if isinstance(limit, Ge):
            yield limit.ge
        elif isinstance(limit, Le):
            yield limit.le
        elif isinstance(limit, Gt) and annotation is int:
            yield int(limit.gt) + 1  # type: ignore[call-overload]
