"""Reads plain YAML and remembers the line of every key, so that errors can point at it."""

from __future__ import annotations

from typing import Any

import yaml

from kvframe.errors import SpecError

Path = tuple[str | int, ...]
# A spec has three levels; PyYAML's composer calls itself once a level.
MAX_DEPTH = 32


def parse_yaml(text: str, source: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Return the mapping in `text` and the line (from 1) of each path in it.

    Raises what `read_yaml` raises, and SpecError for a document that is no mapping."""
    data, lines = read_yaml(text, source)
    if not isinstance(data, dict):
        found = "nothing" if data is None else "a sequence" if isinstance(data, list) else "a scalar"
        raise SpecError(f"{source}: a spec is a mapping such as 'scorer: uniform', but the file holds {found}.")
    return data, lines


def read_yaml(text: str, source: str) -> tuple[Any, dict[Path, int]]:
    """Return the value in `text`, None for nothing, and the line (from 1) of each path in it.

    Only plain YAML is read. Raises SpecError, naming `source` and the line, for broken YAML, duplicate keys, anchors
    and aliases, tags, and nesting beyond 32 levels."""
    lines: dict[Path, int] = {}
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        _refuse_tricks(text, source)
        node = loader.get_single_node()
        return None if node is None else _build(loader, node, (), lines, source), lines
    except yaml.MarkedYAMLError as error:
        problem = " ".join(str(error.problem).split())
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        hint = " (indent with spaces, not tabs)" if "\\t" in problem else ""
        raise SpecError(f"{source}:{line}: not valid YAML: {problem}{hint}.") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: not valid YAML: {' '.join(str(error).split())}.") from None
    finally:
        if loader is not None:
            loader.dispose()


def _refuse_tricks(text: str, source: str) -> None:
    """Raise SpecError for what a spec has no use for, before anything is built of it."""
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise SpecError(f"{_at(source, event)}: anchors and aliases are not allowed; write the value out.")
        if tag := getattr(event, "tag", None):
            name = tag.replace("tag:yaml.org,2002:", "!!")
            raise SpecError(f"{_at(source, event)}: tags such as '{name}' are not allowed; write the value alone.")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise SpecError(
                f"{_at(source, event)}: more than {MAX_DEPTH} levels deep; a spec has stages, fields and values."
            )


def _at(source: str, marked: Any) -> str:
    return f"{source}:{marked.start_mark.line + 1}"


def _build(loader: yaml.SafeLoader, node: yaml.Node, path: Path, lines: dict[Path, int], source: str) -> Any:
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        built: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = _plain(loader, key_node, source) if isinstance(key_node, yaml.ScalarNode) else key_node.id
            if not isinstance(key, str) or not isinstance(key_node, yaml.ScalarNode):
                raise SpecError(f"{_at(source, key_node)}: keys must be words, but this one is {key!r}.")
            if key in built:
                raise SpecError(f"{_at(source, key_node)}: the key '{key}' stands twice; keep one.")
            built[key] = _build(loader, value_node, (*path, key), lines, source)
            lines[(*path, key)] = key_node.start_mark.line + 1
        return built
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, item, (*path, i), lines, source) for i, item in enumerate(node.value)]
    return _plain(loader, node, source)


def _plain(loader: yaml.SafeLoader, node: yaml.Node, source: str) -> Any:
    try:
        return loader.construct_object(node)
    except ValueError as error:
        # A date that does not exist, or an integer of thousands of digits.
        raise SpecError(f"{_at(source, node)}: the value cannot be read: {error}; put text in quotes.") from None
