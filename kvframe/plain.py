"""Values made of tensors, tuples, mappings and dataclasses: as plain data and back, and tensor by tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from kvframe.errors import InputError

# A dataclass of anything else is never made from a file.
OWN = "kvframe"
SIMPLE = (bool, int, float, str, type(None))


def held_tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from held_tensors(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from held_tensors(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from held_tensors(getattr(value, part.name))


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of `value` in which `change` was applied to every tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(inner, change) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(inner, change) for inner in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: map_tensors(getattr(value, f.name), change) for f in fields(value) if f.init})
    return value


def flatten(value: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    """`value` as data that JSON can hold; its tensors go to `tensors`, under names that begin with `prefix`. Raises
    InputError for what is neither."""
    if isinstance(value, Tensor):
        name = f"{prefix}{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, SIMPLE):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"mapping": {name: flatten(inner, tensors, prefix) for name, inner in value.items()}}
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return {type(value).__name__: [flatten(inner, tensors, prefix) for inner in value]}
    if is_dataclass(value) and not isinstance(value, type):
        made = {f.name: flatten(getattr(value, f.name), tensors, prefix) for f in fields(value) if f.init}
        return {"dataclass": f"{type(value).__module__}:{type(value).__qualname__}", "fields": made}
    raise InputError(
        f"A {type(value).__name__} cannot be written to a file; an encoder's state may hold tensors, numbers, texts, "
        "tuples, lists, mappings and dataclasses."
    )


def unflatten(data: Any, tensors: Mapping[str, Tensor], package: str) -> Any:
    """The inverse of `flatten`. Only dataclasses of kvframe and of `package`, in modules that are imported already, are
    made. Raises InputError for any other, and KeyError for a tensor that is missing."""
    if isinstance(data, SIMPLE):
        return data
    if "tensor" in data:
        return tensors[data["tensor"]]
    if "mapping" in data:
        return {name: unflatten(inner, tensors, package) for name, inner in data["mapping"].items()}
    if "tuple" in data:
        return tuple(unflatten(inner, tensors, package) for inner in data["tuple"])
    if "list" in data:
        return [unflatten(inner, tensors, package) for inner in data["list"]]
    made = _dataclass(data["dataclass"], package)
    return made(**{name: unflatten(inner, tensors, package) for name, inner in data["fields"].items()})


def _dataclass(name: str, package: str) -> Any:
    module, _, attribute = name.partition(":")
    found = getattr(sys.modules.get(module), attribute, None)
    if module.partition(".")[0] not in (OWN, package) or not (isinstance(found, type) and is_dataclass(found)):
        raise InputError(f"The file asks for '{name}', which is no dataclass of kvframe or {package}.")
    return found
