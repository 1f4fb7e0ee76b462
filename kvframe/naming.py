"""Names and values in sentences: the name most like one that is not there, and values cut short."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any


def nearest(name: str, choices: Iterable[str]) -> str:
    """The end of a sentence: the name most like `name`, or the list of all."""
    names = sorted(choices)
    tails = {n.rpartition(".")[2]: n for n in names}
    close = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name, list(tails), n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{tails.get(close[0], close[0])}'?"
    return f"; there are: {', '.join(names) or 'none'}."


class Short(reprlib.Repr):
    """Values on one line, cut short."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr1(self, value: Any, level: int) -> str:
        return " ".join(super().repr1(value, level).split())

    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to write out numbers of thousands of digits.
        return repr(value) if value.bit_length() <= 128 else f"about 2**{value.bit_length() - 1}"


class ShortYaml(Short):
    """Values as YAML spells them."""

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802 - reprlib looks for the type's name
        return "null"


said = Short().repr
said_in_yaml = ShortYaml().repr
