"""Did you mean: the name most like one that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str:
    """The end of a sentence: the name most like `name`, or the list of all."""
    names = sorted(choices)
    tails = {n.rpartition(".")[2]: n for n in names}
    close = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(name, list(tails), n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{tails.get(close[0], close[0])}'?"
    return f"; there are: {', '.join(names) or 'none'}."
