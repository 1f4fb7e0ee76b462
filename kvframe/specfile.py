"""Reads spec files: by name or from a path, together with the specs that they extend, and sets overrides in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from kvframe.arguments import expect
from kvframe.errors import SpecError
from kvframe.registry import registry
from kvframe.stages import KINDS
from kvframe.yamlfile import MAX_DEPTH, parse_yaml
from kvframe.yamlfile import Path as Keys

STAGE_FIELDS = tuple(kind.kind for kind in KINDS)
BUDGETS = ("ratio", "entries", "bytes")
EXTENDS = "extends"
# A spec is a page of text. The limit also ends the reading of what has no end.
MAX_BYTES = 256 * 1024


@dataclass(frozen=True)
class SpecData:
    """A spec as it is written, before it is validated.

    Attributes:
        data: the mapping, with what it extends merged in.
        origin: the file that was asked for.
        places: path of keys -> "file:line" where it stands, or "override".
    """

    data: dict[str, Any]
    origin: str
    places: Mapping[Keys, str]


def spec_source(text: str) -> str | Path:
    """A spec's file if the text looks like a path (it ends in .yaml or .yml, or holds a separator), else its name."""
    return Path(text).expanduser() if text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text else text


def read_spec_data(source: str | Path, overrides: Mapping[str, Any] | None = None) -> SpecData:
    """Read a spec by name (str) or from a file (pathlib.Path), and what it extends.

    `extends: base` names a spec, or a file relative to the one in which it stands. Mappings are merged, the extending
    spec winning; a stage that is given by another name, and the budget, replace the base's; a description is not handed
    down. Then `overrides` (dotted path -> value) are set. Raises SpecError, naming file and line."""
    chain: list[SpecData] = []
    seen: dict[str, str] = {}
    file, origin = _find(source)
    while True:
        data, lines = parse_yaml(_read(file), origin)
        seen[_identity(file)] = origin
        chain.append(SpecData(data, origin, {keys: f"{origin}:{line}" for keys, line in lines.items()}))
        if EXTENDS not in data:
            break
        file, origin = _find_base(data.pop(EXTENDS), file, origin, chain[-1].places[EXTENDS,])
        if _identity(file) in seen:
            circle = " -> ".join([*seen.values(), origin])
            raise SpecError(
                f"{chain[-1].places[EXTENDS,]}: extends: a spec cannot extend itself ({circle}); "
                "remove one of these lines."
            )
    data, places = dict(chain[-1].data), dict(chain[-1].places)
    for layer in reversed(chain[:-1]):
        data.pop("description", None)
        _merge(data, places, layer.data, layer.places, ())
    overrides = {} if overrides is None else overrides
    expect("overrides", overrides, Mapping, "a mapping such as {'budget.ratio': 8}")
    for path, value in overrides.items():
        expect("A key of overrides", path, str, "a path of keys such as 'budget.ratio'")
        _override(data, places, path, value)
    return SpecData(data, chain[0].origin, places)


def _find(source: str | Path) -> tuple[Path | Traversable, str]:
    if isinstance(source, Path):
        return source, str(source)
    if source not in registry().specs and isinstance(spec_source(source), Path):
        raise SpecError(f"There is no spec named '{source}'; a file is given as pathlib.Path('{source}').")
    return registry().spec_file(source), f"{source}.yaml"


def _find_base(base: Any, file: Path | Traversable, origin: str, place: str) -> tuple[Path | Traversable, str]:
    """The file that `extends: base`, standing at `place` in `file`, means."""
    if not isinstance(base, str) or not base.strip():
        raise SpecError(f"{place}: extends: give the name of a spec, or a relative path, but it is {base!r}.")
    target = spec_source(base)
    if isinstance(target, Path):
        if not isinstance(file, Path):
            raise SpecError(f"{place}: extends: a packed plugin's spec can only extend a spec by name, not '{base}'.")
        found = file.parent / target
        if not found.is_file():
            raise SpecError(f"{place}: extends: there is no file '{found}'; the path counts from '{origin}'.")
        return found, str(Path(origin).parent / target)
    try:
        return _find(target)
    except SpecError as error:
        message = str(error)
        raise SpecError(f"{place}: extends: {message[0].lower()}{message[1:]}") from None


def _identity(file: Path | Traversable) -> str:
    return str(file.resolve() if isinstance(file, Path) else file)


def _read(file: Path | Traversable) -> str:
    try:
        with file.open("rb") as stream:
            content: bytes = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise SpecError(f"The spec file '{file}' is larger than {MAX_BYTES // 1024} KiB; a spec is a page of text.")
        return content.decode("utf-8")
    # A name with a null byte is a ValueError.
    except (OSError, ValueError) as error:
        text = isinstance(error, UnicodeDecodeError)
        reason = "it is not UTF-8 text" if text else getattr(error, "strerror", None) or str(error)
        name = file.name.rpartition(".")[0]
        named = isinstance(error, FileNotFoundError) and name in registry().specs
        hint = f"; the spec of that name is '{name}', without an ending" if named else ""
        raise SpecError(f"The spec file '{file}' cannot be read: {reason}{hint}.") from None


def _merge(
    data: dict[str, Any], places: dict[Keys, str], new: Mapping[str, Any], new_places: Mapping[Keys, str], at: Keys
) -> None:
    """Merge `new`, whose keys stand at the path `at`, into `data`."""
    for key, value in new.items():
        path, old = (*at, key), data.get(key)
        if not at and key in STAGE_FIELDS:
            if isinstance(old, str):
                old, places[*path, "name"] = {"name": old}, places[path]
            value = {"name": value} if isinstance(value, str) else value
        if isinstance(old, dict) and isinstance(value, dict) and _belong_together(path, old, value):
            data[key] = merged = dict(old)
            _merge(merged, places, value, new_places, path)
            places[path] = new_places[path]
        else:
            data[key] = value
            _forget(places, path)
            places.update({p: place for p, place in new_places.items() if p[: len(path)] == path})


def _belong_together(path: Keys, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two mappings at `path` are merged, not one replaced by the other."""
    if len(path) == 1 and path[0] in STAGE_FIELDS:
        return new.get("name", old.get("name")) == old.get("name")
    return path != ("budget",)


def _forget(places: dict[Keys, str], path: Keys) -> None:
    for known in [p for p in places if p[: len(path)] == path]:
        del places[known]


def _override(data: dict[str, Any], places: dict[Keys, str], path: str, value: Any) -> None:
    if path == EXTENDS:
        raise SpecError("extends cannot be overridden: it says which file is read; write it into a spec file.")
    keys = tuple(path.split("."))
    if len(keys) > MAX_DEPTH:
        raise SpecError(
            f"override: '{path[:40]} ...' is more than {MAX_DEPTH} levels deep; a spec has stages, fields and values."
        )
    *parents, last = keys
    for depth, key in enumerate(parents):
        inner = data.get(key)
        data[key] = data = dict(inner) if isinstance(inner, dict) else {} if inner is None else {"name": inner}
        places.setdefault(keys[: depth + 1], "override")
    other = len(parents) == 1 and parents[0] in STAGE_FIELDS and last == "name" and data.get("name") != value
    if other:
        # Another stage has other parameters.
        data.clear()
    if parents == ["budget"] and last in BUDGETS:
        # The three are alternatives; what a ratio is of stays with a ratio.
        for name in (*BUDGETS, *(["of"] if last != "ratio" else [])):
            data.pop(name, None)
    data[last] = value
    _forget(places, keys)
    places[keys] = "override"
