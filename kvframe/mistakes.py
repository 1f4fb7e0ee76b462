"""What is wrong with a spec, in sentences: pydantic's errors said in a spec's words, and the numbers that pydantic lets
pass but nobody meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from kvframe.naming import nearest, said_in_yaml
from kvframe.registry import registry
from kvframe.stages import Stage

Keys = tuple[Any, ...]
Places = Mapping[Any, str]
# Beyond any context and any memory, and small enough to be multiplied with layers, heads and bits in 64 bits.
MOST_TOKENS = 1 << 40
SMALLER = "smaller than 2**40, about 1.1e12"
BYTES = "a number of bytes, such as 64MiB or 67108864"
# What pydantic says at length, by the beginning of the error's type.
EXPECTED = {
    "int_parsing_size": SMALLER,
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_": "text, in quotes where YAML reads something else",
    "tuple_": "a list",
    "list_": "a list",
    "byte_size": BYTES,
}


def explain(
    errors: Iterable[Mapping[str, Any]], data: Any, origin: str, places: Places, spec: type[BaseModel]
) -> list[str]:
    """One sentence for each mistake in `data` that pydantic found; `places` says where each path stands."""
    # The members of a union each have an error of their own, but it is one mistake.
    said: dict[tuple[str, str], list[str]] = {}
    for error in errors:
        begin, wanted, end = _sentence(error, data, origin, places, spec)
        said.setdefault((begin, end), []).append(wanted)
    sentences = []
    for (begin, end), choices in said.items():
        sentence = f"{begin}{' or '.join(dict.fromkeys(choices))}{end}"
        # A key may be of several lines.
        sentences.append(" ".join(sentence.splitlines()))
    return sentences


def misread(data: Any, read: Any, origin: str, places: Places, path: Keys = ()) -> Iterator[str]:
    """One sentence for each number in `data`, read as `read`, that pydantic took from true or false, or that is too
    large to count anything with."""
    if isinstance(data, Mapping) and isinstance(read, Mapping):
        for key in data.keys() & read.keys():
            yield from misread(data[key], read[key], origin, places, (*path, key))
    elif isinstance(data, Sequence) and isinstance(read, Sequence) and not isinstance(data, str):
        for index, (inner, made) in enumerate(zip(data, read, strict=False)):
            yield from misread(inner, made, origin, places, (*path, index))
    elif isinstance(read, int | float) and not isinstance(read, bool):
        begin = f"{_where(path, places, origin)}: {'.'.join(map(str, path))}: must be"
        if isinstance(data, bool):
            yield f"{begin} a number, but it is {said_in_yaml(data)}."
        # Bytes have a limit of their own.
        elif abs(read) >= MOST_TOKENS and path != ("budget", "bytes"):
            yield f"{begin} {SMALLER}, but it is {said_in_yaml(data)}."


def _sentence(
    error: Mapping[str, Any], data: Any, origin: str, places: Places, spec: type[BaseModel]
) -> tuple[str, str, str]:
    """The sentence for one error of pydantic: its beginning, what was expected, and its end."""
    path = _path_in(error["loc"], data, error["type"] == "missing")
    dotted = ".".join(map(str, path))
    given, kind, stages = error["input"], error["type"], registry().stages
    of_stage = bool(path) and path[0] in stages and path[1:] in ((), ("name",))
    # Of a stage that is the only one of its kind, the name is a literal; so may other fields be.
    misnamed = of_stage and kind in ("union_tag_invalid", "literal_error")
    message = error["msg"].removeprefix("Value error, ")
    # What does not fit together is said of the whole spec, but the sentence begins with the stage to change.
    clash = message.partition(" ")[0]
    at = (path[0], "name") if misnamed else (clash,) if not path and clash in stages else path
    begin = f"{_where(at, places, origin)}: {dotted + ': ' if dotted else ''}"
    if misnamed:
        name = given.get("name") if isinstance(given, dict) else given
        begin = f"{_where(at, places, origin)}: {path[0]}: "
        return begin, f"there is no {path[0]} named {said_in_yaml(name)}{nearest(str(name), stages[str(path[0])])}", ""
    if kind == "extra_forbidden":
        owner, choices = _fields_at(path[:-1], data, spec)
        if path == ("extends",):
            return begin, "it is read from files only; merge the specs before.", ""
        return begin, f"unknown key '{path[-1]}'{owner}{nearest(str(path[-1]), choices)}", ""
    if not path or kind == "value_error":
        return begin, f"{message}.", ""
    if kind == "missing":
        return begin, "it must be given.", ""
    if of_stage:
        fields = given if isinstance(given, dict) else {}
        example = ", ".join(["name: …", *(f"{key}: {said_in_yaml(value)}" for key, value in fields.items())][:4])
        return f"{begin}must be ", f"a stage's name, or {{{example}}}", f", but it is {said_in_yaml(given)}."
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        keys = _fields_at(path, data, spec)[1]
        wanted = f"{{{keys[0]}: …}} or the like (keys: {', '.join(keys)})" if keys else "keys with values"
        return f"{begin}must be ", wanted, f", but it is {said_in_yaml(given)}."
    wanted = next((text for start, text in EXPECTED.items() if kind.startswith(start)), "")
    if wanted or message.startswith("Input should be "):
        return (
            f"{begin}must be ",
            wanted or message.removeprefix("Input should be "),
            f", but it is {said_in_yaml(given)}.",
        )
    return begin, message, f", but it is {said_in_yaml(given)}."


def _where(path: Keys, places: Places, origin: str) -> str:
    """Where the innermost key of a path stands that is written down."""
    return next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), origin)


def _path_in(loc: Keys, data: Any, missing: bool) -> Keys:
    """Pydantic's location without the tags of unions, which are not keys of the data; nor is the last of its keys if
    that is `missing`."""
    path: list[Any] = []
    for index, key in enumerate(loc):
        inside = isinstance(data, dict) and key in data
        tag = index == 1 and loc[0] in registry().stages and not (inside and len(loc) == 2)
        if tag and isinstance(key, str) and key in registry().stages[loc[0]]:
            continue
        listed = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if path and not (inside or listed or missing):
            break
        path.append(key)
        data = data[key] if inside or listed else None
    return tuple(path)


def _fields_at(path: Keys, data: Any, spec: type[BaseModel]) -> tuple[str, list[str]]:
    """Whose the keys at a path are, and the valid ones."""
    if not path:
        return "", list(spec.model_fields)
    section = spec.model_fields[path[0]].annotation
    if path[0] in registry().stages:
        given = data[path[0]]
        name = given["name"] if isinstance(given, dict) else given
        stage: type[Stage] = registry().stages[path[0]][name]
        return f" of '{name}'", list(stage.model_fields)
    return "", list(getattr(section, "model_fields", {}))
